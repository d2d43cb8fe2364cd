"""Latency and bandwidth from times: exact ones give them back, noisy ones nearly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.cost.collectives import fit_collective, fit_link
from autopar.ir.cluster import Link

SIZES = [2.0**k for k in range(10, 27, 4)]


@pytest.mark.parametrize("messages", [1, 6])
@pytest.mark.parametrize(("latency", "rate"), [(5e-6, 12.5e9), (0.0, 1e9), (1e-3, 1e6)])
def test_exact_times_give_the_link_back(latency: float, rate: float, messages: int) -> None:
    link = Link(latency, rate)
    fit = fit_link([(size, link(size, messages)) for size in SIZES], messages)
    assert fit.link.latency_s == pytest.approx(latency, rel=1e-9, abs=1e-15)
    assert fit.link.bytes_s == pytest.approx(rate, rel=1e-9)
    assert fit.error < 1e-9


def test_noisy_times() -> None:
    """Each time is up to 10% longer or shorter: so is the link, about, and so much is told."""
    random, link = np.random.default_rng(0), Link(5e-6, 12.5e9)
    points = [(size, link(size) * random.uniform(0.9, 1.1)) for size in SIZES * 8]
    fit = fit_link(points)
    assert fit.link.latency_s == pytest.approx(5e-6, rel=0.05)
    assert fit.link.bytes_s == pytest.approx(12.5e9, rel=0.05)
    assert 0.2 / math.sqrt(12) == pytest.approx(fit.error, rel=0.2), "of uniform noise from -0.1 to 0.1"


def test_small_and_large_messages_count_alike() -> None:
    """No two parameters explain three points; by hand, with times of 1 and 2 for sizes that hardly matter: the mean of
    1 / seconds over the mean of its squares."""
    fit = fit_link([(0.0, 1.0), (0.0, 2.0), (1e9, 1e9 + 1.2)])
    assert fit.link.latency_s == pytest.approx((1 + 1 / 2) / (1 + 1 / 4), rel=1e-6)
    assert fit.link.bytes_s == pytest.approx(1.0, rel=1e-6)
    assert fit.error == pytest.approx(math.sqrt((0.2**2 + 0.4**2) / 3), rel=1e-6)


def test_what_no_link_has() -> None:
    """A negative latency is none; what doesn't take longer the larger it is has no end of bandwidth."""
    found = fit_link([(10.0, 1.0), (100.0, 100.0)]).link
    assert (found.latency_s, found.bytes_s) == (0.0, pytest.approx((10**2 + 1) / (10 + 1)))
    found = fit_link([(10.0, 2.0), (100.0, 2.0)]).link
    assert (found.latency_s, found.bytes_s) == (pytest.approx(2.0), math.inf)
    assert fit_link([(10.0, 4.0), (100.0, 2.0)]).link.bytes_s == math.inf


@pytest.mark.parametrize("points", [[], [(1.0, 1.0), (1.0, 2.0)], [(1.0, 1.0), (2.0, 0.0)]])
def test_too_few_points(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="positive times of two different sizes"):
        fit_link(points)


@pytest.mark.parametrize(
    ("collective", "sent", "messages"),
    [("all_reduce", 2 * 3 / 4, 6), ("all_gather", 3, 3), ("all_to_all", 3, 3)],  # of 4, for each byte of the size
)
def test_a_collective_by_hand(collective: str, sent: float, messages: int) -> None:
    """A link that two of them shard: 1 microsecond a message, 1 GB/s."""
    points = [(size, messages * 1e-6 + 2 * sent * size / 1e9) for size in SIZES]
    found = fit_collective(collective, 4, points, sharing=2)
    assert (found.latency_s, found.bytes_s) == (pytest.approx(1e-6), pytest.approx(1e9))
    assert found.source == "measured here: 5 sizes from 1.0 KiB to 64.0 MiB among 4; 0% off (rms)"
