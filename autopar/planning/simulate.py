"""`simulate`: predicts a planned step on other numbers of devices; `save_trace` writes a predicted timeline.

A step in stages is simulated as copies of the plan's pipeline, by the cluster's rates. Each copy has its own examples,
and copies of a stage sum their gradients once a step. Stages fill the devices of one machine after the other.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cost.collectives import traffic
from autopar.cost.rates import StageRates, planned_stage_rates
from autopar.cost.simulate import BACKWARD, StepTime, crossovers, expected_maximum, scaling
from autopar.cost.stage_time import pipeline_memory, simulate_pipeline
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import Term
from autopar.ir.plan import PipelinePlan, Plan, StagePlan, require_plan
from autopar.ir.strategy import Method
from autopar.jax_types import Json
from autopar.measure.cluster import require_cluster
from autopar.planning.plan import alone_time, named_methods, workload
from autopar.planning.predictions import predict_stages, sources_text
from autopar.planning.simulate_clients import ClientOptions, SyncSimulation, SyncTime, simulate_clients

#: An event of Chrome's Trace Event Format, with times in microseconds.
Event = dict[str, Json]
_TASK_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
#: Numbers of devices that are simulated by default.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 5000, 10_000)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Simulated steps by number of devices; `str()` is a table.

    Attributes:
      step: The step's name.
      cluster: The kind of devices; their number varies.
      times: A time for each number of devices.
    """

    step: str
    cluster: ClusterSpec
    times: tuple[StepTime, ...]

    @property
    def speedups(self) -> tuple[float, ...]:
        """Examples a second relative to the first of `times`, which has the fewest devices."""
        first = self.times[0]
        return tuple(t.devices / first.devices * first.seconds / t.seconds for t in self.times)

    @property
    def crossovers(self) -> list[str]:
        """Returns lines on the numbers of devices at which methods, or the limit of a step, change."""
        return crossovers(self.times)

    def __str__(self) -> str:
        lines = [
            f"{self.step} on {self.cluster.device.name} ({self.cluster.name}), simulated; as many examples a device"
        ]
        lines.append(f"{'devices':>8}{'ms a step':>12}{'at least':>10}{'speed-up':>10}  most of it       methods")
        for t, speedup in zip(self.times, self.speedups, strict=True):
            methods = ", ".join(f"{path} {method}" for path, method in t.methods.items())
            fits = "" if t.fits else " (the state doesn't fit)"
            least = f"{1e3 * t.bound_s:.2f}" if t.bound_s else "-"
            times = f"{t.devices:>8}{1e3 * t.seconds:>12.2f}{least:>10}{speedup:>10.1f}"
            lines.append(f"{times}  {t.limit:<17}{methods}{fits}")
        sources = [sources_text(self.cluster)] * (self.times[-1].devices == 1)
        return "\n".join([*lines, *self.crossovers, *sources])

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
    """Simulates the step of a plan on several numbers of devices (weak scaling: each device keeps its number of
    examples).

    A plan with `sync=` is simulated client by client and step by step: minibatches, waiting, and staleness of
    gradients.

    Args:
      plan: A plan of `autopar.plan` for several devices: `plan(step, state, batch, cluster=...)`; with `sync=` for any
        number of clients. Of a plan for one device (`cluster=cluster.of(1, 1)`) a step of that device is predicted.
      cluster: The kind of devices; by default the plan's.
      devices: One number of devices or several ascending ones; `COUNTS` by default, 1 of a plan for one.
        Machines are filled one after the other, the last one wholly. With stages, multiples of their devices: copies of
        the pipeline that add up their gradients. With `sync=`, multiples of a client's devices (an even number of
        clients in a ring); by default all of the cluster.
      methods: The method of all tables, or of each by its path: one of strategies, or "ps on hosts" (a rank for each
        device). "auto" takes the fastest at each number of devices; tables that the plan has on hosts stay there.
      overlap: The part of the dense gradients' exchange that may run during the backward pass, 0 to 1.
      variation: Standard deviation of a device's own work over its mean; all wait for the slowest device. With `sync=`
        each own step of a client is drawn.
      slow: With `sync=`, stragglers: worker -> factor of its own steps' time, such as `{3: 10.0}`.
      step_s: With `sync=`, seconds of a client's own step; by default predicted.
      servers: With servers, their number; they are in the first of a process for each device. By default as many as in
        the plan, or one for each client if the plan has them in all processes. Servers of `Async` in another number
        than the plan's count as equally large, with one leaf each at least.
      steps: With `sync=`, simulated steps of each client, on average; by default some hundred.

    Returns:
      `Simulation`, or for a plan with `sync=` `SyncSimulation`; both are tables by number of devices.

    Raises:
      ArgumentsError: no cluster is given; the plan is for one device, and so doesn't know what several share; a number
        is out of range; a method or table doesn't exist; or arguments for `sync=` with a plan without it.
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
    if plan.clients_plan is not None:
        return simulate_clients(plan, cluster, numbers, options, methods=methods, **slack)
    if options != ClientOptions():
        raise ArgumentsError(
            f"slow=, step_s=, servers= and steps= are of clients, and {plan.name} has none: plan a step with "
            "parallelize(step, sync=...)"
        )
    if plan.pipeline is not None:
        return Simulation(plan.step, cluster, stage_times(plan.step, plan.pipeline, cluster, numbers, **slack))
    if numbers == [1] and plan.devices == 1 and plan.cluster is not None:
        if methods != "auto" or any(slack.values()):
            raise ArgumentsError(
                f"methods=, overlap= and variation= are of several devices, and {plan.name} is of one: leave them out"
            )
        return Simulation(plan.step, cluster.of(1, 1), (alone_time(plan, cluster),))
    return simulate_devices(plan, cluster, numbers, methods=methods, **slack)


def _counts(plan: Plan, cluster: ClusterSpec) -> Sequence[int]:
    if plan.clients_plan is not None:
        return [cluster.count]
    if plan.pipeline is None:
        return COUNTS if plan.devices > 1 or plan.cluster is None else [1]
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


def stage_times(
    name: str, plan: PipelinePlan, cluster: ClusterSpec, counts: Sequence[int], *, overlap: float, variation: float
) -> tuple[StepTime, ...]:
    """Simulates copies of a pipeline for each number of devices (`simulate`). Raises ArgumentsError if one is no
    multiple of the pipeline's."""
    if plan.updates and any(n != plan.size for n in counts):
        raise ArgumentsError(f"{name}: a pipeline without a flush has no copies; leave devices= at {plan.size}")
    wrong = [n for n in counts if n % plan.size]
    if wrong:
        raise ArgumentsError(f"devices={wrong[0]}: {name} has stages on {plan.size} devices; give multiples of them")
    return tuple(
        _copies_time(plan, cluster.of(math.ceil(n / cluster.devices), min(n, cluster.devices)), n, overlap, variation)
        for n in counts
    )


def _copies_time(plan: PipelinePlan, cluster: ClusterSpec, count: int, overlap: float, variation: float) -> StepTime:
    rates, copies = planned_stage_rates(cluster), count // plan.size
    there = cluster.of(math.ceil(plan.size / cluster.devices), min(plan.size, cluster.devices))
    own = replace(
        plan,
        stages=tuple(_timed(stage, rates) for stage in plan.stages),
        send_byte_s=planned_stage_rates(there).send_byte_s,
    )
    (stages, *_), (sums, sent) = predict_stages(own, there).parts, _gradient_sums(plan, cluster, copies)
    model = stages.seconds or 0.0
    parts = {
        "model": (Term("microbatches through the stages", model, bound_s=stages.bound_s),),
        "dense gradients": (Term("sums of the copies' gradients", sums, sent),),
        "dense updates": (Term("the slowest stage's update", max(stage.update_s for stage in own.stages)),),
    }
    waiting, hidden = variation * model * expected_maximum(count), min(overlap * sums, BACKWARD * model)
    return StepTime(count, parts, {}, waiting, hidden, max(pipeline_memory(own)) <= cluster.device.memory_bytes)


def _timed(stage: StagePlan, rates: StageRates) -> StagePlan:
    total = sum(stage.seconds.values())
    seconds = rates.seconds(stage.flops, stage.activation_bytes + stage.ahead_bytes + stage.back_bytes)
    seconds += rates.send_byte_s * stage.exchanged_bytes + rates.call_s * stage.exchanges
    shares = {kind: s / total for kind, s in stage.seconds.items()} if total else {"F": 1 / 3, "B": 2 / 3}
    update = rates.seconds(0.0, 2 * stage.state_bytes + stage.gradient_bytes)
    return replace(stage, seconds={k: share * seconds for k, share in shares.items()}, update_s=update)


def _gradient_sums(plan: PipelinePlan, cluster: ClusterSpec, copies: int) -> tuple[float, int]:
    """Returns seconds and bytes of the AllReduces over copies; the stages of a machine share its link."""
    if copies == 1:
        return 0.0, 0
    each = (plan.tensor * len(stage.devices) * [stage.gradient_bytes] for stage in plan.stages)
    sizes = sorted(itertools.chain(*each), reverse=True)
    link, together = cluster.inside, sizes[0]
    if cluster.machines > 1:
        link, together = cluster.between, sum(sizes[: min(plan.size, cluster.devices)])
    sent, rounds = traffic("all_reduce", copies, together)
    return link(sent, rounds), round(traffic("all_reduce", copies, sizes[0])[0])


# --- as a trace ---


def save_trace(path: str | os.PathLike[str], of: Plan | SyncSimulation) -> None:
    """Writes a predicted timeline as a file for https://ui.perfetto.dev and chrome://tracing.

    For a pipeline each device is a track, and each task a slice: a stage's forward or backward of a microbatch, then
    the update. For clients (`sync=`) each one is a track and each own step a slice; between slices it waits. Each
    simulated number of devices is a process of the trace.

    Args:
      path: The file; it is compressed if its name ends in ".gz".
      of: A plan with stages (`autopar.plan(step, ...)`), or the result of `autopar.simulate` for a plan with `sync=`.

    Raises:
      ArgumentsError: `of` has no timeline, or no times; or the file can't be written.

    Example:
      >>> import jax, jax.numpy as jnp, tempfile, autopar
      >>> step = autopar.parallelize(
      ...     lambda w, x: (w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.sum()),
      ...     sync=autopar.sync.Average(every=2),
      ... )
      >>> w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((8, 64), "float32")
      >>> cluster = autopar.Cluster.named("parallax-8x6")
      >>> simulated = autopar.simulate(autopar.plan(step, w, x), cluster=cluster, slow={1: 2.0})
      >>> autopar.save_trace(tempfile.mkdtemp() + "/clients.json.gz", simulated)
    """
    if isinstance(of, SyncSimulation):
        events = [event for n, time in enumerate(of.times) for event in _client_events(n, time)]
    elif isinstance(of, Plan) and of.pipeline is not None:
        events = list(_stage_events(of.step, of.pipeline))
    else:
        raise ArgumentsError(
            f"save_trace takes a plan with stages (parallelize(step, pipeline=...)), or autopar.simulate(plan, ...) of "
            f"one with sync=, not {of.name if isinstance(of, Plan) else f'a {type(of).__name__}'}"
        )
    data = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    try:
        Path(path).write_bytes(gzip.compress(data) if os.fspath(path).endswith(".gz") else data)
    except OSError as error:
        raise ArgumentsError(f"{path}: the trace can't be written: {error.strerror}") from error


def _stage_events(step: str, plan: PipelinePlan) -> Iterator[Event]:
    """Yields the tasks of a pipeline's devices, and with a flush the updates; raises ArgumentsError if the tasks have
    no times."""
    if not plan.is_timed:
        raise ArgumentsError(
            f"the plan of {step} was made without rates of the devices, so its tasks have no times: make it with "
            "cluster=, or where the devices are"
        )
    yield from _names(0, f"{step}, predicted", "device", plan.devices)
    simulated = simulate_pipeline(plan)
    for task, start in simulated.starts.items():
        device = plan.scheduled.device_of(task.stage, task.microbatch)
        about = {"stage": task.stage, "microbatch": task.microbatch}
        name = f"{_TASK_NAMES[task.kind]} {task.microbatch}"
        yield _slice(0, device, name, start, simulated.ends[task] - start, about)
    free = [simulated.seconds] * plan.devices
    for k, stage in enumerate(() if plan.updates else plan.stages):
        for device in stage.devices:
            yield _slice(0, device, "update", free[device], stage.update_s, {"stage": k})
            free[device] += stage.update_s


def _client_events(process: int, time: SyncTime) -> Iterator[Event]:
    yield from _names(process, f"{time.devices} devices, simulated", "client", len(time.clients))
    for w, client in enumerate(time.clients):
        for n, (start, seconds) in enumerate(client.own_steps):
            yield _slice(process, w, f"step {n}", start, seconds, {"step": n})


def _names(process: int, name: str, noun: str, tracks: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for k in range(tracks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": k, "args": {"name": f"{noun} {k}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": k, "args": {"sort_index": k}}


def _slice(process: int, track: int, name: str, start_s: float, seconds: float, about: Event) -> Event:
    times = {"ts": 1e6 * start_s, "dur": 1e6 * seconds}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **times, "args": about}
