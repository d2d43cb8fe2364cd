"""`simulate`: what a planned step would take on more devices of a kind, or fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost.exchange import HOSTED
from autopar.cost.simulate import SIMULATED, StepTime, TableLoad, Workload, crossovers, scaling
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan, TablePlan, require_plan
from autopar.ir.strategy import Method
from autopar.measure.cluster import require_cluster
from autopar.planning.plan import dense_load
from autopar.planning.simulate_stages import stage_times

#: Devices that are simulated by default: 1 to 10,000.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 5000, 10_000)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Simulated steps by number of devices; `str()` is a table.

    Attributes:
      step: The step's name.
      cluster: Whose devices they are; their number differs.
      times: One for each number of devices.
    """

    step: str
    cluster: ClusterSpec
    times: tuple[StepTime, ...]

    @property
    def speedups(self) -> tuple[float, ...]:
        """Examples a second over those of the first of `times`, which has the fewest devices."""
        first = self.times[0]
        return tuple(t.devices / first.devices * first.seconds / t.seconds for t in self.times)

    @property
    def crossovers(self) -> list[str]:
        """Where the methods or what limits a step changes: a line each."""
        return crossovers(self.times)

    def __str__(self) -> str:
        lines = [
            f"{self.step} on {self.cluster.device.name} ({self.cluster.name}), simulated; as many examples a device"
        ]
        lines.append(f"{'devices':>8}{'ms a step':>12}{'speed-up':>10}  most of it       methods")
        for t, speedup in zip(self.times, self.speedups, strict=True):
            methods = ", ".join(f"{path} {method}" for path, method in t.methods.items())
            fits = "" if t.fits else " (the state doesn't fit)"
            lines.append(f"{t.devices:>8}{1e3 * t.seconds:>12.2f}{speedup:>10.1f}  {t.limit:<17}{methods}{fits}")
        return "\n".join([*lines, *self.crossovers])

    __repr__ = __str__


def simulate(
    plan: Plan,
    *,
    cluster: ClusterSpec | None = None,
    devices: Sequence[int] | int | None = None,
    methods: Mapping[str, Method | str] | Method | str = "auto",
    overlap: float = 0.0,
    variation: float = 0.0,
) -> Simulation:
    """Simulate the step of a plan on several numbers of devices (weak scaling: as many examples on each device).

    Args:
      plan: Of `autopar.plan`, for several devices: `plan(step, state, batch, cluster=...)`.
      cluster: Of which devices; the plan's by default.
      devices: Numbers of devices, ascending, or one; `COUNTS` by default. Machines are filled one after the other, the
        last one wholly. Of a plan with stages multiples of their devices: copies of the pipeline, each with as many
        examples, whose gradients are added up.
      methods: Of each table by its path, or of all: a method of strategies, or "ps on hosts" (a rank for each device);
        "auto": the fastest at each number of devices, but what the plan has on hosts stays there.
      overlap: The part of the dense gradients' exchange that may go on beside the backward pass, 0 to 1.
      variation: Standard deviation of a device's own work over its mean; the slowest device is waited for.

    Raises:
      ArgumentsError: no cluster is given; the plan is of one device, so that nobody knows what is shared; a number that
        is out of range; or a method or table that there isn't.
    """
    require_plan(plan, "simulate")
    replicas = plan.sync or plan.served
    if replicas is not None:
        raise ArgumentsError(
            f"simulate knows no replicas, and {plan.name} is of {replicas}: plan the step without sync= for what its "
            "data parallelism takes"
        )
    cluster = plan.cluster if cluster is None else require_cluster(cluster)
    if cluster is None:
        raise ArgumentsError("simulate needs to know the devices: simulate(plan, cluster=autopar.Cluster.named(...))")
    if devices is None:
        pipeline = plan.pipeline
        devices = [n for n in COUNTS if pipeline is None or n % pipeline.size == 0]
        devices = [pipeline.size] if pipeline is not None and pipeline.updates else devices
    numbers = [devices] if isinstance(devices, int) else list(devices)
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers) or numbers != sorted(set(numbers)):
        raise ArgumentsError(f"devices={devices}: give growing numbers of devices, 1 at least")
    if not 0 <= overlap <= 1 or not variation >= 0:
        raise ArgumentsError(f"overlap={overlap}, variation={variation}: overlap is in [0, 1], variation 0 or more")
    if plan.pipeline is not None:
        slack = {"overlap": overlap, "variation": variation}
        return Simulation(plan.step, cluster, stage_times(plan.step, plan.pipeline, cluster, numbers, **slack))
    work = workload(plan)
    named = _named(methods, work)
    times = scaling(work, cluster, numbers, methods=named, overlap=overlap, variation=variation)
    return Simulation(plan.step, cluster, tuple(times))


def _named(methods: Mapping[str, Any] | Any, work: Workload) -> Mapping[str, str] | str:
    """Methods by the names that simulated steps have; as in strategies ("ps", "hosts") is one."""

    def name(method: Any) -> str:
        method_ = HOSTED if method == ("ps", "hosts") else method
        if method_ not in ("auto", *SIMULATED, HOSTED):
            known = ", ".join(map(repr, ("auto", *SIMULATED, HOSTED)))
            raise ArgumentsError(f"methods: there is no {method!r}; there are {known}")
        return method_

    if not isinstance(methods, Mapping):
        return name(methods)
    paths = [t.path for t in work.tables]
    for path in methods:
        if path not in paths:
            raise ArgumentsError(f"methods: no table {path!r} goes by its rows; there are {', '.join(paths) or 'none'}")
    return {path: name(method) for path, method in methods.items()}


def workload(plan: Plan) -> Workload:
    """What each device does in a step of a plan.

    Raises:
      ArgumentsError: the plan is of one device.
    """
    if plan.devices == 1:
        raise ArgumentsError(
            f"the plan of {plan.step} is of one device, which says nothing of what several share: "
            "plan(step, state, batch, cluster=...) for two devices at least"
        )
    tables = tuple(table_load(table) for table in plan.families if table.sizes is not None)
    return Workload(dense_load(plan), tables)


def table_load(table: TablePlan, ids: int | None = None) -> TableLoad:
    """What each device asks of a table of a plan of several devices.

    Args:
      table: One with `sizes`.
      ids: That a device looks up, drawn as those of the plan are; as many as there by default.
    """
    sizes = table.sizes
    assert sizes is not None, "a plan of several devices has the sizes of its tables"
    each = sizes.ids if ids is None else ids
    growth = table.growth if table.growth is None or ids is None else table.growth.with_ids(ids)

    def rows(n: int) -> float:
        """Where growth isn't known: all ids differ."""
        return growth.rows(n) if growth is not None else min(sizes.extent, n * each)

    sizes_and_rows = (table.path, sizes.extent, sizes.row_bytes, sizes.family_bytes, each, rows)
    return TableLoad(*sizes_and_rows, hosted=table.where == "hosts")
