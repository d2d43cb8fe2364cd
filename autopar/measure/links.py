"""Times exchanges between devices, and between the ranks of an MPI job, on the two levels of links that
`cost.collectives` has.

Inside of all machines at once; then between machines, by all their devices (or ranks) at once, each with those of its
own number in the others.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.backends.devices import Devices
from autopar.cost.collectives import fit_collective
from autopar.ir.cluster import Link
from autopar.launch.cluster_file import DEVICE_COLLECTIVES
from autopar.launch.group import Group, MpiGroup
from autopar.measure.budget import Budget
from autopar.measure.loops import collective_points, undisturbed
from autopar.mpi.exchange import Exchange
from autopar.mpi.limits import machine_name

#: Of the result of a collective on one device, in bytes; how many of them weigh as much as a compilation.
_CPU_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_BYTES = (*_CPU_BYTES, 1 << 25)
_WEIGHED = 1 << 22
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


def measure_links(grid: np.ndarray, budget: Budget) -> dict[str, dict[str, Link]]:
    """Collective -> level -> its link; nothing where there is one participant only, or no time for two sizes. `grid`:
    `[machines, devices]`."""
    mesh = Mesh(grid, ("machine", "device"), axis_types=(AxisType.Auto,) * 2)
    sizes = _CPU_BYTES if grid.flat[0].platform == "cpu" else _BYTES
    levels = {"inside": (Devices(mesh, "device"), 1), "between": (Devices(mesh, "machine"), grid.shape[1])}
    timed: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for size, collective, level in itertools.product(_ends_first(sizes), DEVICE_COLLECTIVES, levels):
        devices, _ = levels[level]
        if devices.count > 1:
            measure = functools.partial(collective_points, devices, collective, (size,))
            timed.setdefault((collective, level), []).extend(budget.run(1 + size / _WEIGHED, measure) or [])
    links: dict[str, dict[str, Link]] = {}
    for (collective, level), points in timed.items():
        if len(points) > 1:
            devices, sharing = levels[level]
            parts = 1 if collective == "all_reduce" else devices.count  # of the result
            sent = [(size / parts, s) for size, s in undisturbed(sorted(points))]
            links.setdefault(collective, {})[level] = fit_collective(collective, devices.count, sent, sharing)
    return links


def _ends_first(sizes: Sequence[int]) -> list[int]:
    """Sizes in the order in which they are measured: the least and the largest say most."""
    return [sizes[0], sizes[-1], *sizes[1:-1]]


def measure_ranks(group: Group, budget: Budget) -> dict[str, dict[str, Link]]:
    """Collective of ranks -> level -> link; nothing where a level has one rank only, without MPI, or where there is no
    time for two sizes. Collective.

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
                for collective, points in _points(exchange, part, budget).items():
                    if len(points) > 1:
                        _, traffic = collective.split("_", 1)
                        link = fit_collective(traffic, part.size, undisturbed(sorted(points)), sharing)
                        links.setdefault(collective, {})[level] = link
    return links


def _points(exchange: Exchange, part: MpiGroup, budget: Budget) -> dict[str, list[tuple[float, float]]]:
    """(bytes, seconds) of sums, by MPI and in rings, of what they take longer than a program that they are made beside,
    and of rows from each rank to each other one."""
    points: dict[str, list[tuple[float, float]]] = {}
    reduced = functools.partial(_reduced_s, exchange, part.comm, jax.jit(_products))
    sent = functools.partial(_sent_s, exchange, part.comm)
    for measure, sizes, weight in ((reduced, _REDUCED_BYTES, 3), (sent, _RANK_BYTES, 1)):
        for size in _ends_first(sizes):
            seconds = budget.run(weight, functools.partial(measure, size), part)
            for name, taken in (seconds or {}).items():
                points.setdefault(name, []).append((float(size), taken))
    return points


def _reduced_s(exchange: Exchange, comm: Any, compute: Callable[..., jax.Array], size: int) -> dict[str, float]:
    """Seconds of sums of so many bytes; `compute`: multiplies matrices, so often."""
    array = np.ones(size // 4, np.float32)
    memory = np.empty(exchange.packed_bytes([array]), np.uint8)

    def reduce(beside: bool = False) -> None:
        exchange.reduce([array], memory=memory, beside=beside)

    ways, seconds = {"mpi_all_reduce": None, "ring_all_reduce": 0}, {}
    for name, exchange.rings_from in ways.items():
        seconds[name] = _seconds(comm, reduce)
    if size in _BESIDE_BYTES:
        faster = min(seconds, key=seconds.__getitem__)
        exchange.rings_from = ways[faster]
        matrix = jax.device_put(np.ones((_LENGTH, _LENGTH), np.float32), jax.local_devices()[0])
        product_s = _seconds(comm, lambda: compute(matrix, 8).block_until_ready()) / 8
        program = functools.partial(compute, matrix, math.ceil(_LONGER * seconds[faster] / product_s))
        seconds["beside_all_reduce"] = _added_seconds(comm, program, reduce)
    return seconds


def _sent_s(exchange: Exchange, comm: Any, size: int) -> dict[str, float]:
    """Seconds of so many bytes of rows from each rank to each other one."""
    count = size // 4 // _WIDTH
    requested = exchange.ask(np.arange(exchange.size * count), count)  # all rows of all
    rows, out = np.ones((count, _WIDTH), np.float32), np.empty((exchange.size * count, _WIDTH), np.float32)
    return {"mpi_all_to_all": _seconds(comm, lambda: exchange.fetch(requested, rows, out))}


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
