"""`PipelineRunner`: calls a step whose stages are on devices of their own, in the order of a schedule.

Each program of a stage is compiled by itself for its device. Programs are issued in an order in which their operands
exist, and JAX runs those of different devices at the same time; a value that another stage reads is sent as soon as it
is made. What no later program reads is let go, so that a stage holds the activations that its schedule says.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.emit import emit
from autopar.backends.microbatches import Microbatch, wide
from autopar.errors import StepError
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Literal, Var
from autopar.ir.reductions import REDUCERS
from autopar.ir.schedule import Schedule
from autopar.run.buffers import with_own_buffers
from autopar.tables.kinds import copied

Array = Any


class PipelineRunner:
    """Calls a planned step on flat arrays, a stage on each device.

    Args:
      step: The programs.
      schedule: The order of each device's tasks.
      devices: One for each stage.
      out_tree: The structure of the results.
      donate: Whether states are updated in place.
    """

    def __init__(
        self, step: StagedStep, schedule: Schedule, devices: Sequence[Any], out_tree: Any, donate: bool
    ) -> None:
        self._step, self._devices, self._out_tree, self._donate = step, devices, out_tree, donate
        self._order = tuple(schedule.issue_order())
        self._states = {k for k, var in enumerate(step.inputs) if var in step.homes}
        self._is_new = True
        given = _last_readers(step) if donate else {}
        self._compiled = {id(p): _compiled(p, step.microbatches, given.get(id(p), ())) for p in step.programs}
        self._once = {phase: [p for p in step.programs if p.phase == phase] for phase in ("before", "update")}
        self._each = {(p.phase, p.stage): p for p in step.programs if p.phase in ("F", "B")}
        self._reads = Counter(a for p in self._each.values() for a in p.block.inputs)
        self._joined_at = {v: p.stage for p in self._each.values() for v in p.outputs if v in step.joins}

    def lower(self) -> Any:
        """A pipeline is several programs."""
        raise StepError("a step in stages runs in several programs, and so can't be traced into one (lower, jax.jit)")

    def was_exceeded(self) -> bool:
        """Never: no capacity is measured."""
        return False

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The step's results, of flat arrays; new states are where their stages are."""
        values = _Values(self._devices)
        if self._is_new and self._donate:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        for var, leaf in zip(self._step.inputs, leaves, strict=True):
            values.given[var] = leaf
        for program in self._once["before"]:
            self._run(program, values)
        self._run_microbatches(values)
        for program in self._once["update"]:
            self._run(program, values)
        last, seen, results = len(self._devices) - 1, set[int](), []
        for atom in self._step.outputs:
            found = atom.value if isinstance(atom, Literal) else values.anywhere(atom, last)
            results.append(copied(found) if id(found) in seen else found)  # each leaf of a state has its own buffer
            seen.add(id(found))
        return self._out_tree.unflatten(results)

    def _run(self, program: StageProgram, values: _Values) -> None:
        operands = [values.at(a, program.stage) for a in program.block.inputs]
        results = self._compiled[id(program)](np.int32(0), *operands)
        for var, value in zip(program.outputs, results, strict=True):
            values.put(var, program.stage, value)

    def _run_microbatches(self, values: _Values) -> None:
        step = self._step
        parts = [_Values(self._devices, values) for _ in range(step.microbatches)]
        slices = {whole: _slices(values.given[whole], axis, step.microbatches) for whole, axis in step.parts.values()}
        for part, own in enumerate(parts):
            own.given = {var: slices[whole][part] for var, (whole, _) in step.parts.items()}
            own.waiting = Counter(self._reads)
        sums: dict[Var, Array] = {}
        stacks: dict[Var, list[Array]] = {v: [] for v, (_, join) in step.joins.items() if not isinstance(join, str)}
        for task in self._order:
            program = self._each.get((task.kind, task.stage))
            if program is None:
                continue
            own = parts[task.microbatch]
            operands = [own.take(a, program.stage) for a in program.block.inputs]
            results = self._compiled[id(program)](np.int32(task.microbatch), *operands)
            found = dict(zip(program.outputs, results, strict=True))
            for var, value in found.items():
                if own.waiting[var]:
                    own.put(var, program.stage, value)
                if var in stacks:
                    stacks[var].append(value)
            names = tuple(v for v in found if v in step.joins and v not in stacks)
            new = [found[v] for v in names]
            joins = tuple(str(step.joins[v][1]) for v in names)
            if names:
                joined = _next(joins, [sums[v] for v in names], new) if names[0] in sums else _first(new)
                sums.update(zip(names, joined, strict=True))
        for var, (whole, join) in step.joins.items():
            value = sums[var].astype(whole.dtype) if isinstance(join, str) else jnp.concatenate(stacks[var], axis=join)
            values.put(whole, self._joined_at[var], value)


class _Values:
    """Values by name and stage. One that another stage made is sent when it is first asked for.

    Attributes:
      given: What the call was given; sent to whoever reads it.
      waiting: Value -> how many programs are still to read it.
    """

    def __init__(self, devices: Sequence[Any], outer: _Values | None = None) -> None:
        self._devices, self._outer = devices, outer
        self._held: dict[Var, dict[int, Array]] = {}
        self.given: dict[Var, Any] = {}
        self.waiting: Counter[Var] = Counter()

    def put(self, var: Var, stage: int, value: Array) -> None:
        self._held.setdefault(var, {})[stage] = value

    def at(self, var: Var, stage: int) -> Array:
        """The value on a stage's device."""
        held = self._held.get(var)
        if held is None and var not in self.given:
            assert self._outer is not None, "values are made before they are read"
            return self._outer.at(var, stage)
        held = self._held.setdefault(var, {})
        if stage not in held:
            source = next(iter(held.values())) if held else self.given[var]
            held[stage] = jax.device_put(source, self._devices[stage])
        return held[stage]

    def take(self, var: Var, stage: int) -> Array:
        """The same, for one of the programs that read it: let go after the last one."""
        value = self.at(var, stage)
        if var in self.waiting:
            self.waiting[var] -= 1
            if not self.waiting[var]:
                self._held.pop(var, None)
        return value

    def anywhere(self, var: Var, stage: int) -> Array:
        """The value where it is; on a stage's device if it is nowhere yet."""
        held = self._held.get(var)
        return next(iter(held.values())) if held else self.at(var, stage)


def _last_readers(step: StagedStep) -> dict[int, tuple[int, ...]]:
    """Of each program the positions of the state's leaves that no later one reads: their buffers take the new ones."""
    found: dict[Var, tuple[int, int]] = {}
    outputs = set(step.outputs)
    for program in step.programs:
        for k, var in enumerate(program.block.inputs):
            if var in step.homes and step.homes[var] == program.stage and var not in outputs:
                found[var] = id(program), k
            else:
                found.pop(var, None)  # read where it was sent to
    positions: dict[int, list[int]] = {}
    updates = {id(p) for p in step.programs if p.phase == "update"}
    for name, k in found.values():
        if name in updates:
            positions.setdefault(name, []).append(k + 1)  # behind the microbatch's number
    return {name: tuple(numbers) for name, numbers in positions.items()}


def _compiled(program: StageProgram, count: int, donated: tuple[int, ...]) -> Callable[..., Sequence[Array]]:
    def run(number: Array, *inputs: Array) -> Sequence[Array]:
        return [jnp.asarray(x) for x in emit(program.block, {}, Microbatch(number, count, None))(*inputs)]

    run.__name__ = f"{program.phase}_{program.stage}"
    return jax.jit(run, donate_argnums=donated)


def _slices(value: Any, axis: int, count: int) -> list[Any]:
    """Equal parts of a batch's leaf."""
    if isinstance(value, np.ndarray):
        return np.split(value, count, axis)
    return [_part(value, np.int32(k), axis, count) for k in range(count)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _part(value: Array, number: Array, axis: int, count: int) -> Array:
    return Microbatch(number, count, None).share(value, axis)


@jax.jit
def _first(new: Sequence[Array]) -> Sequence[Array]:
    """Where sums begin."""
    return [x.astype(wide(x.dtype)) for x in new]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _next(joins: tuple[str, ...], totals: Sequence[Array], new: Sequence[Array]) -> Sequence[Array]:
    return [REDUCERS[n].join(t, x.astype(t.dtype)) for n, t, x in zip(joins, totals, new, strict=True)]
