"""A program written by hand, cut into two stages: which equation is where, and a step's actions, run one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.backends.emit import emit
from autopar.compile import analyze_program, compile_program
from autopar.cost.rates import UNMEASURED, Measurements, StageRates
from autopar.cost.stage_time import pipeline_seconds
from autopar.errors import StrategyError
from autopar.ir.options import Options
from autopar.ir.pipeline import Pipeline, StagedStep
from autopar.ir.plan import PipelinePlan
from autopar.ir.program import Program, Var
from autopar.ir.timeline import Action, Join, Run, Send, Timeline, stage_timeline, verify_timeline
from autopar.passes.staging import stages as search
from autopar.planning.notes import stage_notes
from autopar.planning.replay import replay
from autopar.ways.stages import InStages
from tests.support.programs import IDS, WIDTH, microbatches

COUNT = 3


def _planned(pipeline: Pipeline, measured: Measurements = UNMEASURED) -> tuple[StagedStep, PipelinePlan]:
    options = Options(microbatches=pipeline.microbatch_count, sparse="off")
    way = InStages(options, pipeline=pipeline, count=2)
    if pipeline.is_open:
        way = way.chosen(microbatches(), lambda *_: measured)
    compiled = compile_program(analyze_program(microbatches(), way), way, measured)
    assert compiled.plan.pipeline is not None
    return compiled.program.staged, compiled.plan.pipeline


def _staged(pipeline: Pipeline) -> tuple[Program, StagedStep]:
    return microbatches(), _planned(pipeline)[0]


def _values() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (2 * IDS, WIDTH))
    return [random.integers(-3, 4, shape).astype(np.float32) for shape in shapes]


def _run(step: StagedStep, timeline: Timeline) -> list[np.ndarray]:
    """The results of a step."""
    found = {v.var: x for v, x in replay(step, timeline, dict(zip(step.inputs, _values(), strict=True))).items()}
    return [np.asarray(found[v]) for v in step.outputs if isinstance(v, Var)]


def _expected(program: Program) -> list[np.ndarray]:
    return [np.asarray(x) for x in emit(program.block)(*map(jnp.asarray, _values()))]


def _listed(pipeline: Pipeline) -> tuple[list[np.ndarray], StagedStep, Timeline]:
    program, step = _staged(pipeline)
    return _expected(program), step, stage_timeline(step, pipeline.scheduled(pipeline.microbatches))


def _agree(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_which_equation_is_where() -> None:
    _, step = _staged(Pipeline(2, "zero-bubble", COUNT))
    ops = {(p.phase, p.stage): [e.op for e in p.block.equations] for p in step.programs}
    assert ops["F", 0] == ["dot_general"]
    assert ops["F", 1] == ["dot_general", "reduce_sum"]
    assert ops["B", 1] == ["mul", "dot_general"]  # the gradient of what stage 0 has sent, which it waits for
    assert ops["W", 1] == ["dot_general"]
    assert ops["W", 0] == ["dot_general"] and ("B", 0) not in ops
    assert ops["update", 0] == ops["update", 1] == ["mul", "add"]
    assert sorted(step.homes.values()) == [0, 1]
    merged = {(p.phase, p.stage) for p in _staged(Pipeline(2, "1f1b", COUNT))[1].programs}
    assert ("W", 1) not in merged and ("B", 0) in merged


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(1, "1f1b", COUNT),
        Pipeline(2, "1f1b", COUNT),
        Pipeline(2, "gpipe", COUNT),
        Pipeline(2, "zero-bubble", COUNT),
        Pipeline(2, "1f1b", COUNT, replicas=(2, 1)),
        Pipeline(2, "zero-bubble", 2 * COUNT, replicas=2),
        Pipeline(2, "interleaved", COUNT),
    ],
    ids=lambda p: f"{p.count} {p.schedule} {p.replicas}",
)
def test_the_timeline_makes_the_step(pipeline: Pipeline) -> None:
    """Small integers: no sum rounds."""
    expected, step, timeline = _listed(pipeline)
    assert _agree(_run(step, timeline), expected)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 1), ("gpipe", COUNT), ("zero-bubble", 2)])
def test_a_stage_holds_the_activations_that_its_schedule_says(schedule: str, most: int) -> None:
    """From the forward that has read them to the last task that reads them."""
    _, step, timeline = _listed(Pipeline(2, schedule, COUNT))
    hidden = _hidden(step)
    held = highest = 0
    for action, drops in zip(timeline.actions, timeline.drops, strict=True):
        held += isinstance(action, Run) and (action.program.phase, action.device) == ("F", 1)
        highest = max(highest, held)
        held -= sum(device == 1 and value.var is hidden for device, value in drops)
    assert (held, highest) == (0, most)


def _hidden(step: StagedStep) -> Var:
    return next(p.outputs[0] for p in step.programs if (p.phase, p.stage) == ("F", 0))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("a sum lost", r"is summed over the microbatches \[1, 2\]"),
        (
            "a replica's sum lost",
            r"the send from device 1 to 0 reads f32.* of SumOf\(replica=1\), which device 1 doesn't",
        ),
        ("summed twice", r"is summed over the microbatches \[1, 1, 2\]"),
        ("freed early", r"B1\(1\) on device 1 reads f32.* of Microbatch\(number=1\), which was dropped before"),
        ("sent late", r"F1\(0\) on device 1 reads f32.*, which device 1 doesn't have"),
        ("sent twice", r"the send from device 0 to 1 makes f32.* once more"),
        ("sent to itself", "the send from device 0 to 0 makes f32.* once more"),
        ("a part lost", "has 2 parts of 3"),
        ("no result", r"devices \[.*\] don't have the result f32"),
        ("dropped by another", "device 0 drops f32.*, which it doesn't have"),
    ],
)
def test_mistakes_are_found(wrong: str, told: str) -> None:
    replicas = (2, 1) if wrong == "a replica's sum lost" else 1
    _, _, timeline = _listed(Pipeline(2, "1f1b", COUNT, replicas=replicas))
    listed, drops = list(timeline.actions), list(timeline.drops)
    sent = next(k for k, action in enumerate(listed) if isinstance(action, Send))
    if wrong == "freed early":  # with the forward, though the backward reads it
        early, late = (_task(listed, phase, 1, microbatch=1) for phase in ("F", "B"))
        drops[early], drops[late] = (*drops[early], *(d for d in drops[late] if d[1] in listed[early].reads)), ()
    elif wrong == "sent late":
        listed.append(listed.pop(sent))
        drops.append(drops.pop(sent))
    elif wrong == "sent twice":
        listed.insert(sent, listed[sent])
        drops.insert(sent, ())
    elif wrong == "sent to itself":
        listed[sent] = dataclasses.replace(listed[sent], target=listed[sent].source)
    elif wrong == "summed twice":
        listed[_task(listed, "B", 0)] = dataclasses.replace(listed[_task(listed, "B", 0)], microbatch=1)
    elif wrong == "a part lost":
        k = next(k for k, action in enumerate(listed) if isinstance(action, Join))
        made = {v: ((*parts, *parts), 0) for v, (parts, _) in listed[k].made.items()}
        listed[k] = dataclasses.replace(listed[k], made=made)
    elif wrong == "no result":
        del listed[-1], drops[-1]
    elif wrong == "dropped by another":
        drops[sent] = ((0, listed[_task(listed, "B", 1)].writes[0]), *drops[sent])
    else:
        k = _task(listed, "B", 0, microbatch=int(wrong != "a sum lost"))
        listed[k] = dataclasses.replace(listed[k], sums={})
    with pytest.raises(AssertionError, match=told):
        verify_timeline(dataclasses.replace(timeline, actions=tuple(listed), drops=tuple(drops)))


def _task(actions: Sequence[Action], phase: str, stage: int, microbatch: int = 0) -> int:
    """Where a task of a microbatch is."""
    return next(
        k
        for k, a in enumerate(actions)
        if isinstance(a, Run) and (a.program.phase, a.program.stage, a.microbatch) == (phase, stage, microbatch)
    )


#: Seconds of a floating-point operation alone.
RATES = StageRates(flop_s=1.0, byte_s=0.0, call_s=0.0, send_byte_s=0.0)
#: Bytes of a weight.
WEIGHT = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("send_byte_s", "memory", "stage_devices"),
    [
        (0.0, None, ((0, 1),)),  # sums that cost nothing: data parallelism has no bubble
        (1e6, None, ((0,), (1,))),  # activations of examples are fewer bytes than gradients of weights
        (0.0, 4 * WEIGHT, ((0,), (1,))),  # both weights and their gradients don't fit beside activations
    ],
)
def test_auto_takes_what_is_predicted_to_be_fastest(send_byte_s: float, memory: int | None, stage_devices: Any) -> None:
    rates = dataclasses.replace(RATES, send_byte_s=send_byte_s)
    pipeline = Pipeline("auto", microbatches=2 * COUNT)
    _, plan = _planned(pipeline, Measurements(memory=memory, stages=rates))
    assert plan.stage_devices == stage_devices
    assert min(plan.candidates, key=lambda x: x[1])[0].startswith(f"{len(stage_devices)} stage")
    if send_byte_s == 0 and memory is None:
        operations = 6 * 2 * 2 * IDS * WIDTH * WIDTH  # of the four products that train, and the two forward ones
        assert plan.candidates[0][1] == pytest.approx(operations / 2, rel=0.2)


@pytest.mark.parametrize(
    ("stages", "schedule"), [("auto", "1f1b"), ("auto", "auto"), (1, "1f1b"), (2, "1f1b"), (2, "zero-bubble")]
)
@pytest.mark.parametrize("send_byte_s", [0.0, 3.0])
def test_a_plan_takes_the_time_for_which_it_was_chosen(stages: Any, schedule: str, send_byte_s: float) -> None:
    """Calls of programs, sums of replicas and updates are counted alike by the search and for its choice; of what each
    program reads the search knows that of units one by one.
    """
    rates = StageRates(flop_s=1.0, byte_s=2.0, call_s=500.0, send_byte_s=send_byte_s)
    _, plan = _planned(Pipeline(stages, schedule, "auto"), Measurements(stages=rates))
    chosen = [seconds for what, seconds in plan.candidates if what.startswith(f"{len(plan.stages)} stage")]
    assert chosen == [pytest.approx(pipeline_seconds(plan), rel=0.1)]
    times = [note for note in stage_notes(plan) if " ms: " in note]
    assert sum(f"  {1e3 * pipeline_seconds(plan):.2f} ms: " in note for note in times) == 1  # one time for one plan


@pytest.mark.parametrize(("seconds", "stages"), [((1.09, 1.05, 1.0), 1), ((1.11, 1.05, 1.0), 2), ((1.0, 0.8, 0.79), 2)])
def test_fewer_stages_are_preferred_to_those_that_are_hardly_faster(seconds: Sequence[float], stages: int) -> None:
    found = [search.Candidate(Pipeline(k + 1), each) for k, each in enumerate(seconds)]
    assert search.preferred(found).pipeline.count == stages


def test_stages_that_fit_no_memory_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"fit devices of 8 B: its state takes 32 B"):
        _planned(Pipeline(2, microbatches=2), Measurements(memory=8, stages=RATES))
    with pytest.raises(StrategyError, match=r"can be chosen fit devices of 8 B: at least \d+ B are needed"):
        _planned(Pipeline("auto", microbatches=2), Measurements(memory=8, stages=RATES))
    patterns = Pipeline([["first"], ["second"]], microbatches=2)
    with pytest.raises(StrategyError, match=r"stage 0 needs \d+ B, and its device has 8 B"):
        _planned(patterns, Measurements(memory=8, stages=RATES))


@pytest.mark.parametrize("memory", [None, 150, 120])
@pytest.mark.parametrize("call_s", [0.0, 50.0])
def test_the_search_finds_the_best_of_all_that_fit(call_s: float, memory: int | None) -> None:
    """Microbatches, schedules and rematerialization: none that was tried and fits is faster."""
    seen: list[tuple[Pipeline, float, float]] = []

    def noted(pipeline: Pipeline, *rest: Any) -> tuple[float, float]:
        result = predicted(pipeline, *rest)
        seen.append((pipeline, *result))
        return result

    predicted, search.predicted = search.predicted, noted
    try:
        pipeline = Pipeline("auto", "auto", "auto", remat="auto")
        measured = Measurements(memory=memory, stages=dataclasses.replace(RATES, call_s=call_s))
        _, plan = _planned(pipeline, measured)
    finally:
        search.predicted = predicted
    fitting = [(seconds, p) for p, seconds, needed in seen if memory is None or needed <= memory]
    best = min(seconds for seconds, _ in fitting)
    assert plan.candidates[0][1] == best
    assert {p.microbatches for p, *_ in seen} == {1, 2}
    assert {(p.schedule, p.remat) for p, *_ in seen} >= {(s, r) for s in ("1f1b", "zero-bubble") for r in (True, False)}
    assert memory is None or len(fitting) < len(seen)
    assert (plan.schedule, plan.microbatches, plan.remat, len(plan.stages)) in {
        (p.schedule, p.microbatches, p.remat, p.count) for seconds, p in fitting if seconds == best
    }
