"""`simulate`: what a planned step would take on more devices of a kind, or fewer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.simulate import StepTime, crossovers, scaling
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan, require_plan
from autopar.ir.strategy import Method
from autopar.measure.cluster import require_cluster
from autopar.planning.simulate_clients import ClientOptions, SyncSimulation, simulate_clients
from autopar.planning.simulate_stages import stage_times
from autopar.planning.workload import named_methods, workload

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
    slow: Mapping[int, float] | None = None,
    step_s: float | None = None,
    servers: int | None = None,
    steps: int | None = None,
) -> Simulation | SyncSimulation:
    """Simulate the step of a plan on several numbers of devices (weak scaling: as many examples on each device).

    Of a plan with `sync=` the clients are simulated, step by step: how many minibatches they do, who waits, and how
    stale gradients are.

    Args:
      plan: Of `autopar.plan`, for several devices: `plan(step, state, batch, cluster=...)`. With `sync=` of any number
        of clients.
      cluster: Of which devices; the plan's by default.
      devices: Numbers of devices, ascending, or one; `COUNTS` by default. Machines are filled one after the other, the
        last one wholly. Of a plan with stages multiples of their devices: copies of the pipeline, each with as many
        examples, whose gradients are added up. With `sync=` multiples of a client's devices, even ones of a ring; all
        of the cluster's by default.
      methods: Of each table by its path, or of all: a method of strategies, or "ps on hosts" (a rank for each device);
        "auto": the fastest at each number of devices, but what the plan has on hosts stays there.
      overlap: The part of the dense gradients' exchange that may go on beside the backward pass, 0 to 1.
      variation: Standard deviation of a device's own work over its mean; the slowest device is waited for. With
        `sync=` of a client's own step, each of which is drawn.
      slow: With `sync=`, stragglers: worker -> how many times as long its own steps take, such as `{3: 10.0}`.
      step_s: With `sync=`, what a client's own step takes, in seconds; predicted of the devices by default.
      servers: With servers, how many there are, in the first of a process for each device; as many as in the plan by
        default, or one for each client, if they are in all processes there. With `Async` they are taken to be equally
        large, if there are others than in the plan; a server keeps one leaf at least.
      steps: With `sync=`, how many steps of each client are simulated, on average; some hundred by default.

    Returns:
      `Simulation`, or `SyncSimulation` of a plan with `sync=`; either is a table by numbers of devices.

    Raises:
      ArgumentsError: no cluster is given; the plan is of one device, so that nobody knows what is shared; a number that
        is out of range; a method or table that there isn't; or arguments for `sync=` where the plan has none.
    """
    require_plan(plan, "simulate")
    cluster = plan.cluster if cluster is None else require_cluster(cluster)
    if cluster is None:
        raise ArgumentsError("simulate needs to know the devices: simulate(plan, cluster=autopar.Cluster.named(...))")
    numbers = [devices] if isinstance(devices, int) else list(_counts(plan, cluster) if devices is None else devices)
    if not numbers or not all(isinstance(n, int) and n >= 1 for n in numbers) or numbers != sorted(set(numbers)):
        raise ArgumentsError(f"devices={devices}: give growing numbers of devices, 1 at least")
    if not 0 <= overlap <= 1 or not 0 <= variation < math.inf:
        raise ArgumentsError(f"overlap={overlap}, variation={variation}: overlap is in [0, 1], variation 0 or more")
    slack = {"overlap": overlap, "variation": variation}
    options = ClientOptions({} if slow is None else slow, step_s, servers, steps)
    if plan.way is not None:
        return simulate_clients(plan, cluster, numbers, options, methods=methods, **slack)
    if options != ClientOptions():
        raise ArgumentsError(
            f"slow=, step_s=, servers= and steps= are of clients, and {plan.name} has none: plan a step with "
            "parallelize(step, sync=...)"
        )
    if plan.pipeline is not None:
        return Simulation(plan.step, cluster, stage_times(plan.step, plan.pipeline, cluster, numbers, **slack))
    return simulate_devices(plan, cluster, numbers, methods=methods, **slack)


def _counts(plan: Plan, cluster: ClusterSpec) -> Sequence[int]:
    """Returns the numbers of devices that are simulated by default."""
    if plan.way is not None:
        return [cluster.count]
    if plan.pipeline is None:
        return COUNTS
    return [n for n in COUNTS if n % plan.pipeline.size == 0] if not plan.pipeline.updates else [plan.pipeline.size]


def simulate_devices(
    plan: Plan,
    cluster: ClusterSpec,
    numbers: Sequence[int] = COUNTS,
    *,
    methods: Mapping[str, Method | str] | Method | str = "auto",
    overlap: float = 0.0,
    variation: float = 0.0,
) -> Simulation:
    """Simulates data parallelism; see `simulate`."""
    work = workload(plan)
    named = named_methods(methods, work)
    times = scaling(work, cluster, numbers, methods=named, overlap=overlap, variation=variation)
    return Simulation(plan.step, cluster, tuple(times))
