"""`replay`: runs a timeline's actions one after the other in one process: its devices must have computed the same bits.

It is the oracle of asynchronous pipelines, which compute another function than the step on one device, by design.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.emit import emit
from autopar.backends.stage_device import StageDevice
from autopar.ir.asynchronous_timeline import asynchronous_timeline
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import Var, known
from autopar.ir.timeline import Microbatch, Run, Send, Timeline, Value
from autopar.jax_types import Array, Leaf, Pytree
from autopar.planning.verify import Verification, compared_values, replayed
from autopar.run.asynchronous import AsynchronousRunner
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

    The programs are the devices', compiled for one place. Values are moved and dropped where the timeline says so.

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

    Args:
      step, watch, tensor: As for `replay`.
      new_states: Number of a state input -> number of the output with its new value.
      minibatches: Flat arguments of each call. States are taken from the first one.
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
