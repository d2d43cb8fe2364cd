"""Times exchanges between devices, and between the ranks of an MPI job, on the two levels of links that
`cost.collectives` has.

Inside of all machines at once; then between machines, by all their devices (or ranks) at once, each with those of its
own number in the others.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
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
#: Of what they reduce while their devices compute; length of the matrices that are multiplied meanwhile.
_BESIDE_BYTES = (1 << 16, 1 << 19, 1 << 21)
_LENGTH = 384
_WIDTH = 64
_TARGET_S = 0.02
#: How much longer a program is than the sum beside it; what is too short to be told from nothing.
_LONGER, _LEAST_S = 2, 1e-6


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
    """(bytes, seconds) of sums, by MPI and in rings, of what they take longer than a program that they are made beside,
    and of rows from each rank to each other one."""
    reduced: dict[str, list[tuple[float, float]]] = {}
    device, compute = jax.local_devices()[0], jax.jit(_products)
    matrix = jax.device_put(np.ones((_LENGTH, _LENGTH), np.float32), device)
    product_s = _seconds(comm, lambda: compute(matrix, 8).block_until_ready()) / 8
    for size in _REDUCED_BYTES:
        array = np.ones(size // 4, np.float32)
        memory = np.empty(exchange.packed_bytes([array]), np.uint8)

        def reduce(beside: bool = False, array: np.ndarray = array, memory: np.ndarray = memory) -> None:
            exchange.reduce([array], memory=memory, beside=beside)

        ways = {"mpi_all_reduce": None, "ring_all_reduce": 0}
        seconds = {}
        for name, exchange.rings_from in ways.items():
            seconds[name] = _seconds(comm, reduce)
            reduced.setdefault(name, []).append((float(size), seconds[name]))
        if size in _BESIDE_BYTES:
            faster = min(seconds, key=seconds.__getitem__)
            exchange.rings_from = ways[faster]
            program = functools.partial(compute, matrix, math.ceil(_LONGER * seconds[faster] / product_s))
            added = _added_seconds(comm, program, reduce)
            reduced.setdefault("beside_all_reduce", []).append((float(size), added))
    sent = []
    for size in _RANK_BYTES:
        count = size // 4 // _WIDTH
        requested = exchange.ask(np.arange(exchange.size * count), count)  # all rows of all
        rows, out = np.ones((count, _WIDTH), np.float32), np.empty((exchange.size * count, _WIDTH), np.float32)
        sent.append((float(size), _seconds(comm, lambda a=requested, r=rows, o=out: exchange.fetch(a, r, o))))
    return {**reduced, "mpi_all_to_all": sent}


def _products(x: jax.Array, count: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, y: (x @ y) * (1 / _LENGTH), x)


def _added_seconds(comm: Any, program: Callable[[], jax.Array], run: Callable[[bool], None]) -> float:
    """Returns how many seconds longer a program takes with one run beside it than alone."""

    def both() -> None:
        result = program()
        run(True)
        result.block_until_ready()

    return max(_seconds(comm, both) - _seconds(comm, lambda: program().block_until_ready()), _LEAST_S)


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
