"""The dynamic program of a pipeline's stages against trying them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from autopar.cost.stage_time import Chain, Layer, partition


def _all_partitions(layers: int, devices: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for count in range(1, min(layers, devices) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            for replicas in itertools.product(range(1, devices + 1), repeat=count):
                if sum(replicas) == devices:
                    yield (*cuts, layers), replicas


def _seconds(chain: Chain, ends: Sequence[int], replicas: Sequence[int]) -> float:
    """Of the slowest stage or send; infinity where a stage exceeds the memory."""
    slowest, start = 0.0, 0
    for k, (end, own) in enumerate(zip(ends, replicas, strict=True)):
        layers = chain.layers[start:end]
        held = -(-min(chain.microbatches, chain.devices - sum(replicas[:k])) // own)  # microbatches, by 1F1B
        size = sum(x.state + x.gradient + held * x.activation for x in layers)
        if chain.memory is not None and size > chain.memory:
            return np.inf
        send = chain.layers[start].sent * chain.byte_s if start else 0.0
        reduced = 2 * (own - 1) / own * sum(x.gradient for x in layers) * chain.byte_s / chain.microbatches
        slowest, start = max(slowest, sum(x.seconds for x in layers) / own + reduced, send), end
    return slowest


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, devices = int(random.integers(1, 7)), int(random.integers(1, 5))
    layers = [Layer(*random.integers(1, 20, 5).tolist()) for _ in range(count)]
    limit = (None, 60.0, 120.0)[seed % 3]
    chain = Chain(layers, devices, int(random.integers(1, 9)), float(random.choice([0.0, 0.3, 2.0])), limit)
    for stages in (None, *range(1, devices + 1)):
        wanted = [x for x in _all_partitions(count, devices) if stages in (None, len(x[0]))]
        best = min((_seconds(chain, *x) for x in wanted), default=np.inf)
        found = partition(chain, stages)
        assert (found is None) == np.isinf(best)
        if found is not None:
            assert found.seconds == pytest.approx(best)
            assert _seconds(chain, found.ends, found.replicas) == pytest.approx(best)
    for replicas in {x[1] for x in _all_partitions(count, devices)}:
        best = min(_seconds(chain, *x) for x in _all_partitions(count, devices) if x[1] == replicas)
        found = partition(chain, len(replicas), replicas)
        assert (np.inf if found is None else found.seconds) == pytest.approx(best)


def test_replicates_the_layer_that_takes_longest() -> None:
    found = partition(Chain([Layer(1.0, gradient=100), Layer(3.0)], 4, 8, byte_s=0.1))
    assert found is not None
    assert (found.ends, found.replicas, found.seconds) == ((1, 2), (1, 3), 1.0)


def test_cuts_where_little_is_sent() -> None:
    layers = [Layer(1.0), Layer(1.0, sent=100), Layer(1.0, sent=1), Layer(1.0, sent=100)]
    found = partition(Chain(layers, 2, 8, byte_s=1.0), stages=2)
    assert found is not None and found.ends == (2, 4)
    unequal = partition(Chain([*layers, Layer(5.0, sent=100)], 2, 8, byte_s=0.1), stages=2)
    assert unequal is not None and unequal.ends == (2, 5)
