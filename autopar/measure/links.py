"""Times exchanges between devices, and between the ranks of an MPI job, on the two levels of links that
`cost.collectives` has.

Inside of all machines at once; then between machines, by all their devices (or ranks) at once, each with those of its
own number in the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.backends.devices import Devices
from autopar.cost.fit import fit_collective
from autopar.ir.cluster import Link
from autopar.launch.group import Group, MpiGroup
from autopar.measure.loops import collective_points, undisturbed
from autopar.mpi.exchange import Exchange
from autopar.mpi.limits import machine_name

#: Of the result of a collective on one device, in bytes.
_CPU_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_BYTES = (*_CPU_BYTES, 1 << 25)
#: Of what ranks reduce, or of what one sends another one, in bytes; elements of a row; seconds of a round.
_RANK_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
_REDUCED_BYTES = (*_RANK_BYTES, 1 << 24)
_WIDTH = 64
_TARGET_S = 0.02


def measure_links(grid: np.ndarray) -> dict[str, dict[str, Link]]:
    """Collective -> level -> its link; nothing where there is one participant only. `grid`: `[machines, devices]`."""
    mesh = Mesh(grid, ("machine", "device"), axis_types=(AxisType.Auto,) * 2)
    sizes = _CPU_BYTES if grid.flat[0].platform == "cpu" else _BYTES
    links: dict[str, dict[str, Link]] = {}
    for collective in ("all_reduce", "all_gather", "all_to_all"):
        for level, axis, sharing in (("inside", "device", 1), ("between", "machine", grid.shape[1])):
            devices = Devices(mesh, axis)
            if devices.count > 1:
                parts = 1 if collective == "all_reduce" else devices.count  # of the result
                timed = undisturbed(collective_points(devices, collective, sizes))
                points = [(size / parts, s) for size, s in timed]
                link = fit_collective(collective, devices.count, points, sharing)
                links.setdefault(collective, {})[level] = link
    return links


def measure_ranks(group: Group) -> dict[str, dict[str, Link]]:
    """Collective of ranks -> level -> link; nothing where a level has one rank only, or without MPI. Collective.

    Where machines have different numbers of ranks, links between them aren't measured.
    """
    links: dict[str, dict[str, Link]] = {}
    if not group.several or not isinstance(group, MpiGroup):
        return links
    names = group.values(machine_name(), "machines")
    number = names[: group.rank].count(names[group.rank])
    are_alike = len({names.count(name) for name in names}) == 1
    levels = [("inside", names[group.rank], 1)]
    levels += [("between", number, names.count(names[0]))] if are_alike else []
    for level, colour, sharing in levels:
        with group.split(colour) as part:
            if part.several:
                exchange = Exchange(part.rank, part.size, part.comm)
                for collective, points in _points(exchange, part.comm).items():
                    _, traffic = collective.split("_", 1)
                    link = fit_collective(traffic, part.size, undisturbed(points), sharing)
                    links.setdefault(collective, {})[level] = link
    return links


def _points(exchange: Exchange, comm: Any) -> dict[str, list[tuple[float, float]]]:
    """(bytes, seconds) of sums, by MPI and in rings, and of rows from each rank to each other one."""
    reduced: dict[str, list[tuple[float, float]]] = {}
    for size in _REDUCED_BYTES:
        array = np.ones(size // 4, np.float32)
        memory = np.empty(exchange.packed_bytes([array]), np.uint8)
        for name, exchange.rings_from in (("mpi_all_reduce", None), ("ring_all_reduce", 0)):
            seconds = _seconds(comm, lambda a=array, m=memory: exchange.reduce([a], memory=m))
            reduced.setdefault(name, []).append((float(size), seconds))
    sent = []
    for size in _RANK_BYTES:
        count = size // 4 // _WIDTH
        requested = exchange.ask(np.arange(exchange.size * count), count)  # all rows of all
        rows, out = np.ones((count, _WIDTH), np.float32), np.empty((exchange.size * count, _WIDTH), np.float32)
        sent.append((float(size), _seconds(comm, lambda a=requested, r=rows, o=out: exchange.fetch(a, r, o))))
    return {**reduced, "mpi_all_to_all": sent}


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
