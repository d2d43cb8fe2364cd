"""`replay`: runs a timeline's actions one after the other in one process: its devices must have computed the same bits.

It is the oracle of asynchronous pipelines, which compute another function than the step on one device, by design.
`staleness` watches one: how far the weights that tasks see are from those that they stand for.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import StageDevice
from autopar.backends.emit import emit
from autopar.cost.stage_time import stage_times, steps_ahead
from autopar.errors import ArgumentsError
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import Var, known
from autopar.ir.timeline import Microbatch, Run, Send, Timeline, Value, asynchronous_timeline
from autopar.jax_types import Array, Leaf, Pytree
from autopar.planning.text import Column, Columns, print_as
from autopar.planning.verify import Verification, compared_values, replayed
from autopar.run.asynchronous import AsynchronousRunner
from autopar.run.object_step import AnyStep, unwrapped
from autopar.run.planned_step import PlannedStep
from autopar.run.stage_executor import CompiledProgram, joined, stage_executables
from autopar.tables.kinds import copied, materialize

#: Called with each value that is made, versions of leaves among them.
Watch = Callable[[Value, Array], None]

#: The reference, for messages.
AGAINST = "a sequential replay of its own tasks, since without a flush it is another function than the plain step"


def _unwatched(value: Value, array: Array) -> None:
    """Ignores an array: nobody asks for it."""


def replay(
    step: StagedStep,
    timeline: Timeline,
    arguments: Mapping[Var, Array],
    minibatches: Sequence[Mapping[Var, Array]] = (),
    watch: Watch = _unwatched,
    tensor: int = 1,
) -> dict[Value, Array]:
    """Returns the results of a timeline.

    The programs are the devices', compiled for one device. Values are moved and dropped where the timeline says so.

    Args:
      step: The stages' programs.
      timeline: The actions of all devices.
      arguments: The call's arguments and the leaves of the state; a leaf in several stages comes in parts.
      minibatches: Without a flush, the arguments of each minibatch.
      watch: Called with the first version of each leaf, and with each value that a program makes.
      tensor: T, the devices that divide the products of a stage: rounding depends on how they are divided.

    Raises:
      KeyError: a device reads a value that it doesn't have.
    """
    device, executables = StageDevice(tuple(jax.local_devices()[:tensor])), stage_executables(step, timeline)
    programs = {
        program: CompiledProgram(*(lowered.compile() for lowered in each.lower(device)))
        for program, each in executables.items()
    }

    def put(value: Value, array: Array) -> Array:
        return device.put(array, step.divided.get(value.var))

    def first(value: Value) -> Array:
        given = arguments.get(value.var)
        return put(value, jnp.zeros(value.var.shape, value.var.dtype) if given is None else given)

    held = {(k, value): first(value) for value, devices in timeline.given.items() for k in devices}
    for (_, value), array in held.items():
        watch(value, array)

    def read(k: int, value: Value) -> Array:
        if (k, value) in held or value not in timeline.arguments:
            return held[k, value]
        if not isinstance(value.part, Microbatch):
            return put(value, arguments[value.var])
        whole, axis = step.parts.get(value.var, (value.var, 0))
        if minibatches:
            return put(value, minibatches[value.part.number][whole])
        return put(value, jnp.split(jnp.asarray(arguments[whole]), step.microbatches, axis)[value.part.number])

    for action, drops in zip(timeline.actions, timeline.drops, strict=True):
        if isinstance(action, Run):
            program, executable, at = programs[action.program], executables[action.program], action.device
            names = [action.sums[v] for v in executable.joins]
            sums = [held[at, name] for name in names if (at, name) in held] or [*program.start()]
            operands, number = [read(at, value) for value in action.reads], (action.microbatch or 0) % step.microbatches
            sums, results = program.run(np.int32(number), sums, *operands)
            held |= {(at, name): total for name, total in zip(names, sums, strict=True)}
            for k, array in zip(executable.read, results, strict=True):
                held[at, action.writes[k]] = array
                watch(action.writes[k], array)
        elif isinstance(action, Send):
            held[action.target, action.value] = read(action.source, action.value)
        else:
            for whole, (names, join) in action.made.items():
                parts = [read(action.device, name) for name in names]
                if isinstance(join, str):
                    (made,) = joined((join,), (whole.var.dtype,), [parts])
                else:
                    made = jnp.concatenate(parts, axis=join)
                held[action.device, whole] = made
        for each in drops:
            held.pop(each, None)
    return {value: read(devices[0], value) for value, devices in timeline.results.items()}


def replay_minibatches(
    step: StagedStep,
    new_states: Mapping[int, int],
    minibatches: Sequence[Sequence[Array]],
    watch: Watch = _unwatched,
    tensor: int = 1,
) -> list[list[Array | None]]:
    """Returns flat results of each minibatch of a step without a flush, drained after the last, whose results alone
    have the state (None before).

    `step`, `watch`, `tensor`: as for `replay`. `new_states`: number of a state input -> number of the output with its
    new value. `minibatches`: flat arguments of each call. States are taken from the first one.
    """
    asynchronous = step.asynchronous
    assert asynchronous is not None, "minibatches aren't flushed"
    inputs = [leaf if isinstance(leaf, tuple) else (leaf,) for leaf in step.inputs]
    given = [_by_var(inputs, leaves) for leaves in minibatches]
    clock = jax.jit(lambda *operands: emit(asynchronous.clock, {})(*operands))
    clocks = {v: given[0][v] for v in asynchronous.clocks}
    for each in given:
        each |= clocks
        clocks = dict(zip(asynchronous.clocks, clock(*(each[v] for v in asynchronous.clock.inputs)), strict=True))
    timeline = asynchronous_timeline(step, len(minibatches))
    found = replay(step, timeline, given[0], given, watch, tensor)
    made = {(v.var, v.part.number if isinstance(v.part, Microbatch) else -1): x for v, x in found.items()}

    def result(k: int, number: int) -> Array | None:
        leaf = next((i for i, out in new_states.items() if out == k), None)
        if leaf is None:
            atoms = asynchronous.returned(step.outputs[k])
            values = [made.get((a, number), given[number].get(a, getattr(a, "value", None))) for a in atoms]  # type: ignore[arg-type]
        elif number < len(minibatches) - 1:
            return None
        else:
            values = [made.get((v, -1), clocks.get(v, given[0][v])) for v in inputs[leaf]]
        return values[0] if len(values) == 1 else jnp.concatenate([jnp.asarray(x) for x in values])

    return [[result(k, number) for k in range(len(step.outputs))] for number in range(len(minibatches))]


def _by_var(inputs: Sequence[tuple[Var, ...]], leaves: Sequence[Array]) -> dict[Var, Array]:
    """Returns arguments by the step's inputs; a leaf of several stages is cut into their parts."""
    found: dict[Var, Array] = {}
    for parts, leaf in zip(inputs, leaves, strict=True):
        if len(parts) == 1:
            found[parts[0]] = leaf
            continue
        ends = tuple(itertools.accumulate(v.shape[0] for v in parts))
        found |= {v: jnp.asarray(leaf)[a:b] for v, a, b in zip(parts, (0, *ends), ends, strict=False)}
    return found


def compare_replay(planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification:
    """Compares a run, drained at its end, with its replay. Arguments as for `Way.replayed`."""
    program, runner = planned.compiled.analysed, planned.runner
    assert isinstance(runner, AsynchronousRunner), "the step has no flush"
    step = known(planned.compiled.program.staged)
    pipeline = planned.compiled.plan.pipeline
    assert pipeline is not None, "a step without a flush has stages"
    first = [copied(materialize(leaf)) for leaf in leaves]
    expected = replay_minibatches(step, program.new_states, [first] * steps, tensor=pipeline.tensor)
    given, found = [copied(leaf) for leaf in first], []
    states: dict[int, Pytree] = {}
    for _ in range(steps):
        states, others = runner.call(given)
        found += [] if others is None else [others]
        for leaf, out in program.new_states.items():
            given[leaf] = states[out]
    last = materialize(states)
    found += runner.rest_of(states)
    checks = []
    for k, output in enumerate(program.outputs):
        path = program.inputs[output.state].path if output.state is not None else output.path
        each = zip(expected, found, strict=True)
        pairs = [(expected[-1][k], last[k])] if k in last else [(e[k], f[k]) for e, f in each]
        sizes, errors = zip(*(compared_values(*pair) for pair in pairs), strict=True)
        checks.append(replayed(path, max(sizes), max(errors)))
    return Verification(tuple(checks), steps, AGAINST)


# --- how far the weights that an asynchronous pipeline's tasks see are from those that they stand for ---
#
# Source: SpecTrain (Chen et al., 2018), section 3.2, figure 8.


@dataclass(frozen=True, slots=True)
class TaskStaleness:
    """The staleness of a stage's forwards ("F") or backwards ("B")."""

    stage: int
    kind: str
    ahead: int  #: s, updates of the stage from such a task's start to its minibatch's last backward.
    #: For each version from the first update on, the RMS difference between its weights and those s updates later.
    stale: tuple[float, ...]
    predicted: tuple[float, ...]  #: The same for W + s u, which "spectrain" reads; u is the last update's change.


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of a pipeline's tasks whose s isn't 0; `str()` is a table of medians."""

    schedule: str
    tasks: tuple[TaskStaleness, ...]

    def __str__(self) -> str:
        if not self.tasks:
            return f"{self.schedule}: no task misses an update of its stage"
        lower = [sum(p < s for p, s in zip(t.predicted, t.stale, strict=True)) / len(t.stale) for t in self.tasks]
        columns = {
            "stage": [str(t.stage) for t in self.tasks],
            "task": [t.kind for t in self.tasks],
            "s": [str(t.ahead) for t in self.tasks],
            "RMSE stale": [f"{statistics.median(t.stale):.2e}" for t in self.tasks],
            "predicted": [f"{statistics.median(t.predicted):.2e}" for t in self.tasks],
            "nearer": [f"{share:.0%}" for share in lower],
        }
        return print_as(Columns([Column(title, of, "right") for title, of in columns.items()]), "text")

    __repr__ = __str__


def staleness(step: AnyStep, state: Pytree, batches: Iterable[Pytree]) -> Staleness:
    """Compares the weights that tasks of an asynchronous pipeline see with those that they stand for.

    The minibatches are replayed, task by task, in this process, which meanwhile has the whole state; `state` is left as
    it is.

    Args:
      step: The step that `parallelize` returned, with an asynchronous schedule. It takes a state and a batch.
      state: The first state.
      batches: A batch for each call; more than the pipeline has in flight.

    Returns:
      For each stage's forwards and backwards that miss updates, the distance of their weights, and of weights predicted
        from them, to the weights at the start of their minibatch's last backward.

    Raises:
      ArgumentsError: the step has another schedule, or there are too few batches.
    """
    minibatches = list(batches)
    if not minibatches:
        raise ArgumentsError("staleness: no batches")
    pure, arrays, named = unwrapped(step, (state, minibatches[0]), {}, "staleness")
    planned = pure.planned_for(*arrays, **named)
    staged, plan = planned.compiled.program.staged, planned.compiled.plan.pipeline
    if staged is None or staged.asynchronous is None or plan is None:
        raise ArgumentsError(
            f"staleness: {step.name} has no asynchronous pipeline, so nothing is stale: "
            "parallelize(step, pipeline=autopar.Pipeline(..., schedule='spectrain'))"
        )
    ahead = plan.ahead or steps_ahead(plan.calls, stage_times(plan))
    if len(minibatches) < max(map(max, ahead)) + 2:
        raise ArgumentsError(
            f"staleness: {len(minibatches)} batches; versions are compared over {max(map(max, ahead))} updates, "
            "behind the first one"
        )
    leaves = [pure.leaves(*unwrapped(step, (state, batch), {}, "staleness")[1:]) for batch in minibatches]
    watched = _Watched(staged, ahead)
    given = [[materialize(leaf) for leaf in each] for each in leaves]
    replay_minibatches(staged, planned.compiled.analysed.new_states, given, watched.see, plan.tensor)
    return Staleness(plan.schedule, tuple(watched.found()))


class _Watched:
    """Keeps the versions of each stage's weights during a replay, as far as they are compared."""

    def __init__(self, staged: StagedStep, ahead: Sequence[tuple[int, int]]) -> None:
        asynchronous = staged.asynchronous
        assert asynchronous is not None, "versions differ"
        self._ahead = ahead
        self._weights: dict[int, list[Var]] = {k: [] for k in range(len(ahead))}
        for v in staged.weights:
            if v in asynchronous.news and jnp.issubdtype(v.dtype, jnp.inexact):
                self._weights[staged.homes[v]].append(v)
        self._stages = {v: k for k, weights in self._weights.items() for v in weights}
        self._versions: dict[int, dict[int, dict[Var, Array]]] = collections.defaultdict(dict)
        self._errors: dict[tuple[int, str], list[tuple[float, float]]] = {}

    def see(self, value: Value, array: Array) -> None:
        """Takes in a version of a leaf."""
        stage = self._stages.get(value.var)
        if stage is None:
            return
        versions = self._versions[stage]
        version = versions.setdefault(value.version, {})
        is_new = value.var not in version
        version[value.var] = array
        if is_new and len(version) == len(self._weights[stage]):
            self._compare(stage, value.version)
            versions.pop(value.version - max(self._ahead[stage]) - 1, None)

    def _compare(self, stage: int, now: int) -> None:
        versions = self._versions[stage]
        for kind, ahead in zip("FB", self._ahead[stage], strict=True):
            if ahead and now > ahead:
                weights = self._weights[stage]
                lists = ([versions[v][x] for x in weights] for v in (now - ahead - 1, now - ahead, now))
                stale, predicted = _errors(ahead, *lists)
                self._errors.setdefault((stage, kind), []).append((float(stale), float(predicted)))

    def found(self) -> Iterable[TaskStaleness]:
        for (stage, kind), errors in sorted(self._errors.items(), key=lambda item: (item[0][0], item[0][1] != "F")):
            stale, predicted = zip(*errors, strict=True)
            yield TaskStaleness(stage, kind, self._ahead[stage]["FB".index(kind)], stale, predicted)


@jax.jit
def _errors(ahead: int, before: Sequence[Array], then: Sequence[Array], now: Sequence[Array]) -> tuple[Array, Array]:
    size = sum(w.size for w in now)

    def rmse(guesses: Iterable[Array]) -> Array:
        squares = (jnp.sum(jnp.square(jnp.abs(a - b).astype(jnp.float32))) for a, b in zip(guesses, now, strict=True))
        return jnp.sqrt(sum(squares) / size)

    return rmse(then), rmse(w + ahead * (w - old) for old, w in zip(before, then, strict=True))
