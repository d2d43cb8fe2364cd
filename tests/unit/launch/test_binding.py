"""Which ranks are kept on which core."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from autopar.errors import LaunchError
from autopar.launch.binding import Bindable, bind, choose_core
from autopar.mpi.world import World


def ranks(count: int, cores: int, machine: str = "m", *, computes_on_one: bool = True) -> list[Bindable]:
    return [Bindable(machine, frozenset(range(cores)), computes_on_one)] * count


BOUND = [Bindable("m", frozenset({core}), True) for core in range(2)]


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        (ranks(2, 2), [0, 1]),
        (ranks(5, 2), [0, 1, 0, 1, 0]),
        ([Bindable("m", frozenset({3, 7}), True)] * 2, [3, 7]),  # all that a container has
        (ranks(3, 4), [None] * 3),
        (ranks(2, 1), [None] * 2),
        (BOUND, [None] * 2),
        ([*ranks(1, 2), BOUND[0]], [None] * 2),  # somebody has bound some of them
        (ranks(2, 2, computes_on_one=False), [None] * 2),
        ([*ranks(1, 2), *ranks(1, 2, computes_on_one=False)], [None] * 2),
        ([*ranks(1, 2), *ranks(2, 2, "n"), *ranks(1, 2)], [0, 0, 1, 1]),  # two machines
        ([*ranks(2, 2), *ranks(1, 2, "n")], [0, 1, None]),
    ],
)
def test_ranks_that_take_all_cores_are_bound(told: list[Bindable], cores: list[int | None]) -> None:
    assert [choose_core(told, rank) for rank in range(len(told))] == cores


def test_binding_whatever_else_there_is() -> None:
    told = ranks(3, 4, computes_on_one=False)
    assert [choose_core(told, rank, always=True) for rank in range(3)] == [0, 1, 2]
    assert choose_core(BOUND, 0, always=True) is None  # it is done


def test_a_rank_may_be_left_unbound(environment: Callable[..., None]) -> None:
    class Comm:
        def allgather(self, own: Bindable) -> list[Bindable]:
            return [own] * len(own.cores)

    before = os.sched_getaffinity(0)
    environment(AUTOPAR_BIND="none")
    bind(World(0, len(before), Comm()), computes_on_one=True)
    assert os.sched_getaffinity(0) == before
    environment(AUTOPAR_BIND="socket")
    with pytest.raises(LaunchError, match="AUTOPAR_BIND='socket' is neither core nor none"):
        bind(World(0, len(before), Comm()), computes_on_one=True)
