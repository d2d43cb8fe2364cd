"""Trace files: their slices are the tasks of the timeline, each on its own track."""

from __future__ import annotations

import dataclasses
import doctest
import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar
from autopar.cost.stage_time import pipeline_seconds, simulate_pipeline
from autopar.ir.pipeline import Calls
from autopar.ir.plan import PipelinePlan, Plan, StagePlan

WIDTH, EXAMPLES = 64, 32
CLUSTER = autopar.Cluster.named("parallax-8x6")


def layers(params: Any, x: Any) -> Any:
    def loss_of(params: Any) -> Any:
        hidden = x
        for w in params:
            hidden = jax.numpy.tanh(hidden @ w)
        return (hidden**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def planned(cluster: Any = None, **options: Any) -> Plan:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 4
    batch = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), "float32")
    return autopar.plan(autopar.parallelize(layers, **options), params, batch, cluster=cluster)


def staged(schedule: str) -> Plan:
    """Two stages, the second one on two devices in turn."""
    seconds = [dict(zip("FBW", times, strict=True)) for times in ((1e-3, 2e-3, 5e-4), (2e-3, 3e-3, 1e-3))]
    if schedule not in ("zero-bubble", "1f1b"):
        seconds = [{kind: each[kind] for kind in "FB"} for each in seconds]
    stage_devices = ((0,), (1, 2))
    stages = tuple(
        StagePlan(devices, (f"{k}",), own, update_s=1e-4 * (1 + k), ahead_bytes=1000, back_bytes=1000)
        for k, (devices, own) in enumerate(zip(stage_devices, seconds, strict=True))
    )
    calls = Calls.soonest(stage_devices) if schedule == "async" else None
    when = {} if calls is None else {"updates": calls.updates, "last": calls.last}
    plan = PipelinePlan(schedule, 1 if calls else 4, stages, send_byte_s=1e-7, **when)
    return dataclasses.replace(planned(), pipeline=plan)


def saved(path: Path, of: Any) -> tuple[dict[tuple[int, int], str], list[dict[str, Any]]]:
    """The names of tracks, and the slices."""
    autopar.save_trace(path, of)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(data)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] > 0 and (e["pid"], e["tid"]) in names for e in slices)
    for track in names:
        own = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        ends = [ts + dur for ts, dur in own]
        assert own and all(end <= start * (1 + 1e-9) for end, (start, _) in zip(ends, own[1:], strict=False)), track
    return names, slices


@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b", "async"])
def test_a_pipeline(schedule: str, tmp_path: Path) -> None:
    plan = staged(schedule)
    assert plan.pipeline is not None
    names, slices = saved(tmp_path / "pipeline.json", plan)
    assert list(names.values()) == ["device 0", "device 1", "device 2"]
    simulated = simulate_pipeline(plan.pipeline)
    found = {(e["name"], e["args"]["stage"]): e for e in slices if e["name"] != "update"}
    assert len(found) == len(simulated.starts)
    for task, start in simulated.starts.items():
        word = {"F": "forward", "B": "backward", "W": "gradients of weights"}[task.kind]
        event = found[f"{word} {task.microbatch}", task.stage]
        assert event["ts"] == pytest.approx(1e6 * start)
        assert event["ts"] + event["dur"] == pytest.approx(1e6 * simulated.ends[task])
        assert event["tid"] == (0 if task.stage == 0 else 1 + task.microbatch % 2)
    last = max(e["ts"] + e["dur"] for e in slices)
    if schedule == "async":
        assert last == pytest.approx(1e6 * simulated.seconds) and all(e["name"] != "update" for e in slices)
    else:
        assert last == pytest.approx(1e6 * pipeline_seconds(plan.pipeline))
        assert [e["tid"] for e in slices if e["name"] == "update"] == [0, 1, 2]


@pytest.mark.parametrize(
    "sync", [autopar.sync.Average(every=2), autopar.sync.Async(), autopar.sync.DPSGD(), autopar.sync.ADPSGD()]
)
def test_clients(sync: Any, tmp_path: Path) -> None:
    simulated = autopar.simulate(planned(sync=sync), cluster=CLUSTER, devices=4, slow={1: 3.0}, step_s=0.01, steps=20)
    names, slices = saved(tmp_path / "clients.json.gz", simulated)
    assert list(names.values()) == [f"client {n}" for n in range(4)]
    (time,) = simulated.times
    for w, client in enumerate(time.clients):
        own = [e for e in slices if e["tid"] == w]
        assert [e["name"] for e in own] == [f"step {n}" for n in range(len(own))]
        assert [e["dur"] for e in own] == pytest.approx([3e4 if w == 1 else 1e4] * len(own))
        assert sum(e["dur"] for e in own) == pytest.approx(1e6 * client.computing_s)
        assert len(own) - client.minibatches in (0, 1)
        for event, end in zip(own, client.ends, strict=False):
            assert event["ts"] + event["dur"] <= 1e6 * end * (1 + 1e-9)


def test_several_numbers_of_devices_are_processes(tmp_path: Path) -> None:
    simulated = autopar.simulate(
        planned(sync=autopar.sync.Average()), cluster=CLUSTER, devices=[2, 4], step_s=0.01, steps=3
    )
    names, _ = saved(tmp_path / "clients.json", simulated)
    assert [process for process, _ in names] == [0] * 2 + [1] * 4


def test_what_has_no_timeline_is_refused(tmp_path: Path) -> None:
    plan, timed = planned(CLUSTER), staged("1f1b")
    assert timed.pipeline is not None
    stages = tuple(dataclasses.replace(stage, seconds={}) for stage in timed.pipeline.stages)
    with pytest.raises(autopar.ArgumentsError, match="takes a plan with stages.*not the plan of layers"):
        autopar.save_trace(tmp_path / "trace.json", plan)
    with pytest.raises(autopar.ArgumentsError, match="not a Simulation"):
        autopar.save_trace(tmp_path / "trace.json", autopar.simulate(plan))
    with pytest.raises(autopar.ArgumentsError, match="can't be written"):
        autopar.save_trace(tmp_path / "none" / "trace.json", timed)
    untimed = dataclasses.replace(timed, pipeline=dataclasses.replace(timed.pipeline, stages=stages))
    with pytest.raises(autopar.ArgumentsError, match="without rates of the devices"):
        autopar.save_trace(tmp_path / "trace.json", untimed)


def test_the_example() -> None:
    assert doctest.testmod(importlib.import_module("autopar.planning.simulate")).failed == 0
