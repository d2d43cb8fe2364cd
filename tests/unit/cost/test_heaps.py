"""Heaps' law with an end: fits of what is known exactly, and predictions of what was held out."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.measure.alpha import fit_growth

WORKERS = (1, 2, 4, 8)


def expected_rows(p: np.ndarray, ids: float) -> float:
    """Distinct rows among ids that are drawn by themselves, with probability p[r] each: the sum of 1 - (1 - p)^ids."""
    return float(-np.expm1(ids * np.log1p(-p)).sum())


def zipf(rows: int, exponent: float) -> np.ndarray:
    p = np.arange(1, rows + 1) ** -exponent
    return p / p.sum()


@pytest.mark.parametrize(("k", "beta"), [(3.0, 0.6), (1.0, 1.0), (5.0, 0.45)])
def test_heaps_law_gives_back_its_numbers(k: float, beta: float) -> None:
    """In a table without end; by hand: 100 ids each."""
    growth = fit_growth(10**15, 100, [(n, k * (100 * n) ** beta) for n in WORKERS])
    assert (growth.k, growth.beta) == (pytest.approx(k, rel=1e-4), pytest.approx(beta, rel=1e-5))
    assert growth.residual < 1e-5
    assert growth.rows(48) == pytest.approx(k * 4800**beta, rel=1e-4)


@pytest.mark.parametrize("ids", [10, 1000, 20_000])
def test_uniform_ids_are_exact(ids: int) -> None:
    """Up to all of the rows; V (1 - (1 - 1/V)^m)."""
    extent = 10_000
    growth = fit_growth(extent, ids, [(n, extent * (1 - (1 - 1 / extent) ** (n * ids))) for n in WORKERS[:3]])
    assert growth.beta == pytest.approx(1, abs=1e-3)
    for n in (1, 3, 48, 1000):
        assert growth.rows(n) == pytest.approx(extent * (1 - (1 - 1 / extent) ** (n * ids)), rel=1e-3)


@pytest.mark.parametrize("extent", [1000, 100_000, 1_000_000])
@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("ids", [64, 2560])
def test_zipf_is_predicted_from_an_eighth(extent: int, exponent: float, ids: int) -> None:
    p = zipf(extent, exponent)
    growth = fit_growth(extent, ids, [(n, expected_rows(p, n * ids)) for n in WORKERS])
    assert growth.rows(48) == pytest.approx(expected_rows(p, 48 * ids), rel=0.1)
    assert growth.residual < 0.03
    several = [growth.rows(n) for n in (1, 2, 5, 48, 10_000)]
    assert several == sorted(several) and several[-1] <= extent


def test_a_draw_of_zipf_is_predicted() -> None:
    """Of what is drawn, not expected: 8 workers here, 48 held out."""
    p, ids = zipf(200_000, 1.1), 2000
    draws = np.random.default_rng(0).choice(p.size, (48, ids), p=p)
    points = [(n, np.mean([np.unique(draws[k : k + n]).size for k in range(0, 8, n)])) for n in WORKERS]
    assert fit_growth(p.size, ids, points).rows(48) == pytest.approx(np.unique(draws).size, rel=0.1)


def test_other_workers_of_the_same_data() -> None:
    growth = fit_growth(1000, 10, [(1, 9), (2, 17)])
    half = growth.with_ids(5)
    assert half.points == ((2, 9), (4, 17)) and half.rows(6) == growth.rows(3)


def test_ends() -> None:
    full = fit_growth(50, 1000, [(1, 50), (2, 50)])
    assert [full.rows(n) for n in (1, 2, 100)] == pytest.approx([49.5] * 3)
    assert fit_growth(50, 10, [(1, 0), (4, 0)]).rows(9) == 0
    assert fit_growth(10**9, 10, [(1, 0), (2, 6)]).rows(4) == pytest.approx(12), "what touched nothing says nothing"
    assert fit_growth(10**6, 10, [(1, 9), (2, 19)]).rows(1e-3) <= 1e-2, "no more rows than ids"


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([(1, 5)], "two numbers of workers at least"),
        ([(2, 5), (2, 6)], "two numbers of workers at least"),
        ([(1, 5), (2, 51)], "touch 0 to 50 rows"),
        ([(0, 5), (2, 6)], "workers are positive"),
    ],
)
def test_points_that_cannot_be(points: list[tuple[int, int]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fit_growth(50, 10, points)
