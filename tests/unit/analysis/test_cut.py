"""The cheapest cut, against all cuts of random graphs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.passes.place_border import cheapest_cut


def _cost(own: set[int], costs: list[int], reads: list[tuple[int, int]], needed: set[int]) -> int:
    sent = {k for k, reader in reads if k in own and reader not in own} | (needed & own)
    return sum(costs[k] for k in sent)


@pytest.mark.parametrize("seed", range(60))
def test_cut_is_the_cheapest_of_all(seed: int) -> None:
    """Of the cheapest ones it is that with the fewest values on the first side."""
    random = np.random.default_rng(seed)
    given, count = {*range(random.integers(1, 3))}, 13
    costs = [int(c) for c in random.choice([4, 8, 16, 32, 64, 128], count)]
    reads = [
        (int(k), n)
        for n in range(len(given), count)
        for k in random.choice(n, min(n, random.integers(1, 4)), replace=False)
    ]
    needed = {int(k) for k in random.choice(count, random.integers(1, 4), replace=False)}
    possible = []
    for size in range(count - len(given) + 1):
        for more in itertools.combinations(range(len(given), count), size):
            own = given | {*more}
            if all(k in own for k, reader in reads if reader in own):
                possible.append((_cost(own, costs, reads, needed), len(own)))
    own = set(cheapest_cut(costs, reads, given, needed))
    assert own >= given and all(k in own for k, reader in reads if reader in own)
    assert (_cost(own, costs, reads, needed), len(own)) == min(possible)


def test_what_is_sent_anyway_moves_nothing() -> None:
    """Two halves of a value that is needed itself, as well, stay behind it."""
    assert cheapest_cut([128, 64, 64], [(0, 1), (0, 2)], [0], [0, 1, 2]) == {0}
    assert cheapest_cut([128, 64, 63], [(0, 1), (0, 2)], [0], [1, 2]) == {0, 1, 2}
    assert cheapest_cut([128, 64, 64], [(0, 1), (0, 2)], [0], [1, 2]) == {0}
