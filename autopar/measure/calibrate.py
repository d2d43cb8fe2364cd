"""Measures how long exchanges take on some devices: for a few seconds at first need, then read from a file.

What there was no time for is assumed of devices like these, and measured by the next process, or by `calibrate`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar.backends.devices import Devices
from autopar.cost.rates import Rates, planned_rates
from autopar.measure import loops
from autopar.measure.budget import AT_FIRST_S, Budget
from autopar.measure.cache import Advance, cache_file, measuring, write_cache
from autopar.measure.cluster import are_alike
from autopar.measure.figures import BASE, DENSE, SIDE, Figures, rates_of_figures
from autopar.measure.probe import StepPlanner, WholeSteps
from autopar.measure.rows import RowLoops
from autopar.mpi.limits import machine_name

#: What figures are for: to compare methods, or to predict a whole step as well.
Purpose = Literal["methods", "steps"]
_WHY: dict[Purpose, str] = {"methods": "to choose each table's method", "steps": "to predict whole steps"}

#: Of the result of a collective on one device, in bytes: of little and of much, and of what is between.
_LITTLE, _BETWEEN, _MUCH = 1 << 10, 1 << 17, 1 << 22
#: Of a dense gradient, which no cache holds.
_GRADIENT = 1 << 24
_FEW_IDS, _IDS = 1 << 8, 1 << 13
#: Of a pass over memory: what is measured first, then the rest.
_WALKED, _ALSO_WALKED = 1 << 23, (1 << 15, 1 << 19, 1 << 25)
#: Of rows.
_NARROW, _WIDE = 64, 1024

#: What was found in this process, by which all of its plans are made. Unavoidably global, as the devices are.
_known: dict[tuple[Devices, Purpose], Figures] = {}


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement.

    Attributes:
      figure: Which figure it is a point of.
      at: Where: bytes, ids, a method.
      weight: How long it takes, in measurements of small arrays.
      run: Returns seconds.
    """

    figure: str
    at: int | str
    weight: float
    run: Callable[[], float]


def rates_of(
    devices: Devices, plan: StepPlanner, *, steps: bool = False, budget: Budget | None = None, again: bool = False
) -> Rates:
    """The rates of these devices: of this process, of earlier ones (a file in the user's cache), or measured now.

    Where the devices are of several processes, these measure together, and take the first one's figures. Collective at
    the first call for each purpose.

    Args:
      devices: The devices.
      plan: Gives the planned form of a step by a method.
      steps: Whether whole steps are to be predicted, or only methods compared.
      budget: What measuring may take, also if this process has measured before; `AT_FIRST_S` for each purpose if left
        out.
      again: Whether to measure what is known as well.
    """
    purposes: tuple[Purpose, ...] = ("methods", "steps") if steps else ("methods",)
    for purpose in purposes:
        if budget is not None or (devices, purpose) not in _known:
            _known[devices, purpose] = _figures_for(purpose, devices, plan, budget, again=again)
    figures: Figures = {}
    for purpose in reversed(purposes):  # methods are compared by what they were compared by before
        figures |= _known[devices, purpose]
    return rates_of_figures(figures, _assumed(devices))


def _assumed(devices: Devices) -> Rates:
    """Returns the figures of the known cluster whose devices are most like these."""
    first, machines = devices.mesh.devices.flat[0], 1
    if devices.processes.several:
        machines = len({d.process_index for d in devices.mesh.devices.flat})
    like = are_alike(first.platform, first.device_kind)
    return planned_rates(like.of(machines, max(1, devices.count // machines)))


def _figures_for(
    purpose: Purpose, devices: Devices, plan: StepPlanner, budget: Budget | None, *, again: bool
) -> Figures:
    """The first process's figures, and what it lacks of those for a purpose measured as far as there is time."""
    processes = devices.processes
    machines = len(set(processes.values(machine_name(), "machines of the devices")))
    file = cache_file(devices, f"rates-{machines}-{{}}.json")
    kept: Figures = processes.first(read_figures(file), "figures of the devices")
    probes = [p for p in probes_for(purpose, devices, plan) if again or str(p.at) not in kept.get(p.figure, {})]
    if not probes:
        return kept
    # First of all, known or not, what is soon done: it says how busy the machine is.
    probes.insert(0, Probe("product", SIDE, 2, lambda: loops.product_seconds(devices, SIDE)))
    what = f"what exchanges cost on {devices.count} devices"
    # In a thread of its own, for the step may be called while JAX traces another one, and would be part of it.
    with (
        measuring(what, _WHY[purpose], len(probes), file, shown=processes.rank == 0) as advance,
        ThreadPoolExecutor(1) as thread,
    ):
        budget = budget or Budget(AT_FIRST_S, processes)
        measured = thread.submit(measure_probes, probes, budget, advance).result()
    figures = {**kept, **{name: {**kept.get(name, {}), **points} for name, points in measured.items()}}
    figures = processes.first(figures, "figures of the devices")
    if processes.rank == 0:
        write_cache(file, json.dumps(figures))
    return figures


def read_figures(file: Path) -> Figures:
    """Returns what an earlier process has kept; nothing if the file isn't there, or isn't such a file."""
    try:
        read = json.loads(file.read_text())
        return {name: {str(at): float(s) for at, s in points.items()} for name, points in read.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def measure_probes(probes: Sequence[Probe], budget: Budget, advance: Advance = lambda part: None) -> Figures:
    """Measures what there is time for. `advance` is told what is measured next, for each probe."""
    figures: Figures = {}
    for probe in probes:
        advance(probe.figure.replace("_", " "))
        seconds = budget.run(probe.weight, probe.run)
        if seconds is not None:
            figures.setdefault(probe.figure, {})[str(probe.at)] = seconds
    return figures


def probes_for(purpose: Purpose, devices: Devices, plan: StepPlanner) -> list[Probe]:
    """Returns what is measured for a purpose; first what says most."""
    whole = WholeSteps(plan, devices)
    if purpose == "steps":

        def moved_byte_s() -> float:
            return whole.moved_byte_s(loops.product_seconds(devices, SIDE) / (2 * SIDE**3))

        steps = [Probe("dense", size, 4, functools.partial(whole.dense_s, size)) for size in DENSE]
        return [*steps, Probe("moved_byte", "batch", 6, moved_byte_s)]

    def collective(name: str, size: int, weight: float = 1) -> Probe:
        return Probe(name, size, weight, lambda: loops.collective_points(devices, name, (size,))[0][1])

    def walk(size: int) -> Probe:
        return Probe("walk", 2 * size, 1 + size / (1 << 24), lambda: loops.walk_seconds(devices, size))

    def update(size: int) -> Probe:
        # A gradient is read, and was written, beside a parameter and its slot: half as much again.
        return Probe("update", 3 * size, 1 + size / (1 << 23), lambda: loops.update_seconds(devices, size))

    def method(name: str, weight: float) -> Probe:
        return Probe("more", name, weight, lambda: whole.method_s(name))

    collectives = ("all_to_all", "all_gather", "all_reduce")
    rows = RowLoops(devices)
    return [
        *(collective(name, _MUCH, 2) for name in collectives),
        *(collective(name, _LITTLE) for name in collectives),
        Probe("gather", _WIDE, 2, lambda: rows.gather_s(_WIDE)),
        Probe("scatter", _WIDE, 2, lambda: rows.scatter_s(_WIDE)),
        Probe("route", _IDS, 2, lambda: rows.route_s(_IDS)),
        walk(_WALKED),
        update(_WALKED),
        Probe("call", BASE, 3, whole.call_s),
        method("ps", 9),
        method("allgather", 6),
        method("allreduce_rows", 5),
        Probe("gather", _NARROW, 2, lambda: rows.gather_s(_NARROW)),
        Probe("scatter", _NARROW, 2, lambda: rows.scatter_s(_NARROW)),
        Probe("route", _FEW_IDS, 2, lambda: rows.route_s(_FEW_IDS)),
        collective("all_reduce", _GRADIENT, 3),
        *(probe(size) for size in _ALSO_WALKED for probe in (walk, update)),
        *(collective(name, _BETWEEN) for name in collectives),
    ]
