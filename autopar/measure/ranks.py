"""Times what tables on hosts exchange by MPI: an AllReduce of the ranks, and rows from each rank to each other one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from autopar.cost.fit import fit_collective
from autopar.ir.cluster import Link
from autopar.measure.loops import undisturbed
from autopar.mpi.exchange import Exchange
from autopar.mpi.limits import machine_name
from autopar.mpi.world import World

#: Of what is reduced, or of what one rank sends another one, in bytes.
_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
_WIDTH = 64
_TARGET_S = 0.02


def measure_ranks(here: World) -> dict[str, dict[str, Link]]:
    """Collective of MPI -> level -> link; nothing where a level has one rank only. Collective.

    Between machines all ranks of a machine exchange at once, each with those of its own number; where machines have
    different numbers of ranks, that isn't measured.
    """
    found: dict[str, dict[str, Link]] = {}
    if here.size == 1:
        return found
    names = here.comm.allgather(machine_name())
    number = names[: here.rank].count(names[here.rank])
    are_alike = len({names.count(name) for name in names}) == 1
    levels = [("inside", names.index(names[here.rank]), 1)]
    levels += [("between", number, names.count(names[0]))] if are_alike else []
    for level, color, sharing in levels:
        comm = here.comm.Split(color, here.rank)
        if comm.Get_size() > 1:
            count = comm.Get_size()
            for collective, points in _points(Exchange(comm.Get_rank(), count, comm), comm).items():
                link = fit_collective(collective, count, undisturbed(points), sharing)
                found.setdefault(f"mpi_{collective}", {})[level] = link
        comm.Free()
    return found


def _points(exchange: Exchange, comm: Any) -> dict[str, list[tuple[float, float]]]:
    """(bytes, seconds) of sums, and of rows from each rank to each other one."""
    reduced, sent = [], []
    for size in _BYTES:
        array = np.ones(size // 4, np.float32)
        memory = np.empty(exchange.packed_bytes([array]), np.uint8)
        reduced.append((float(size), _seconds(comm, lambda a=array, m=memory: exchange.reduce([a], memory=m))))
        count = size // 4 // _WIDTH
        asked = exchange.ask(np.arange(exchange.size * count), count)  # all rows of all
        rows, out = np.ones((count, _WIDTH), np.float32), np.empty((exchange.size * count, _WIDTH), np.float32)
        sent.append((float(size), _seconds(comm, lambda a=asked, r=rows, o=out: exchange.fetch(a, r, o))))
    return {"all_reduce": reduced, "all_to_all": sent}


def _seconds(comm: Any, run: Callable[[], Any]) -> float:
    """Of one run, on the slowest rank; the fastest of some rounds."""

    def turns(count: int) -> float:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return max(comm.allgather((time.perf_counter() - start) / count))

    count = max(1, min(1000, int(_TARGET_S / max(turns(3), 1e-7))))
    return min(turns(count) for _ in range(5))
