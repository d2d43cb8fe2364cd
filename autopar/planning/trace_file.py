"""`save_trace`: a predicted timeline as a trace file, by the Trace Event Format of Chrome, which Perfetto opens."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.cost.stage_time import simulate_pipeline
from autopar.errors import ArgumentsError
from autopar.ir.plan import Plan
from autopar.ir.stage_plan import PipelinePlan
from autopar.planning.simulate_clients import SyncSimulation, SyncTime

#: An event of the format; its times are in microseconds.
Event = dict[str, Any]
_WORDS = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def save_trace(path: str | os.PathLike[str], of: Plan | SyncSimulation) -> None:
    """Writes a predicted timeline to a file that https://ui.perfetto.dev and chrome://tracing show.

    Of a pipeline each device is a track, and each task of its schedule a slice: its stage's forward, or backward, of a
    microbatch; then the updates. Of clients (`sync=`) each one is a track, and each of its own steps a slice; between
    them it waits. Each number of devices that was simulated is a process of the trace.

    Args:
      path: The file; it is compressed if its name ends in ".gz".
      of: A plan with stages, `autopar.plan(step, ...)`, or what `autopar.simulate` returned of a plan with `sync=`.

    Raises:
      ArgumentsError: `of` has no timeline, or one without times; or the file can't be written.

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
    """Yields the tasks of a pipeline's devices, and the updates of one that is flushed.

    Raises:
      ArgumentsError: the tasks have no times.
    """
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
        name = f"{_WORDS[task.kind]} {task.microbatch}"
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
