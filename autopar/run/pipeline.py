"""`PipelineRunner`: calls a step whose stages are on devices of their own, in the order of a schedule.

Each program of a stage is compiled by itself for its device. Programs are issued in an order in which their operands
exist, and JAX runs those of different devices at the same time; a value that another stage reads is sent as soon as it
is made. What no later program reads is let go, so that a stage holds the activations that its schedule says. The
devices of a stage (replicas) take microbatches in turn, hold the same weights, and each runs the update.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.emit import emit
from autopar.backends.microbatches import Microbatch, wide
from autopar.errors import StepError
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Literal, Var
from autopar.ir.reductions import REDUCERS
from autopar.ir.schedule import Places, Schedule
from autopar.run.buffers import with_own_buffers
from autopar.tables.kinds import copied

Array = Any


class PipelineRunner:
    """Calls a planned step on flat arrays, its stages on devices of their own.

    Args:
      step: The programs.
      schedule: The order of each device's tasks.
      devices: Those of the schedule, by number.
      out_tree: The structure of the results.
      donate: Whether states are updated in place.
    """

    def __init__(
        self, step: StagedStep, schedule: Schedule, devices: Sequence[Any], out_tree: Any, donate: bool
    ) -> None:
        self._step, self._schedule, self._devices = step, schedule, devices
        self._out_tree, self._donate = out_tree, donate
        self._order = tuple(schedule.issue_order())
        self._states = {k for k, var in enumerate(step.inputs) if var in step.homes}
        self._is_new = True
        donated = _last_readers(step) if donate else {}
        self._compiled = {id(p): _compiled(p, step.microbatches, donated.get(id(p), ())) for p in step.programs}
        self._once = {phase: [p for p in step.programs if p.phase == phase] for phase in ("before", "update")}
        self._each = {(p.phase, p.stage): p for p in step.programs if p.phase in ("F", "B", "W")}
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
        if self._is_new and self._donate:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        values = Values(self._devices, dict(zip(self._step.inputs, leaves, strict=True)))
        for program in self._once["before"]:
            self._run_once(program, values)
        self._run_microbatches(values)
        for program in self._once["update"]:
            self._run_once(program, values)
        seen, results = set[int](), []
        for atom in self._step.outputs:
            result = atom.value if isinstance(atom, Literal) else values.result(atom, self._schedule.places)
            results.append(copied(result) if id(result) in seen else result)  # each leaf of a state has its own buffer
            seen.add(id(result))
        return self._out_tree.unflatten(results)

    def _run_once(self, program: StageProgram, values: Values) -> None:
        """A program on each device of its stage. Operands are sent to all before the first one donates its own."""
        places = self._schedule.places[program.stage]
        operands = [[values.at(a, device) for a in program.block.inputs] for device in places]
        for device, own in zip(places, operands, strict=True):
            self._run(program, 0, own, functools.partial(values.put, device=device))

    def _run(
        self, program: StageProgram, microbatch: int, operands: Sequence[Array], put: Callable[..., None]
    ) -> Mapping[Var, Array]:
        results = self._compiled[id(program)](np.int32(microbatch), *operands)
        made = dict(zip(program.outputs, results, strict=True))
        for var, value in made.items():
            put(var, value=value)
        return made

    def _run_microbatches(self, values: Values) -> None:
        step = self._step
        slices = {whole: _slices(values.leaf(whole), axis, step.microbatches) for whole, axis in step.parts.values()}
        of_parts = []
        for k in range(step.microbatches):
            own = {var: slices[whole][k] for var, (whole, _) in step.parts.items()}
            of_parts.append(Values(self._devices, own, values, self._reads))
        sums: dict[int, dict[Var, Array]] = {}
        stacks: dict[Var, list[Array]] = {v: [] for v, (_, join) in step.joins.items() if not isinstance(join, str)}
        for task in self._order:
            program = self._each.get((task.kind, task.stage))
            if program is None:
                continue
            device = self._schedule.device_of(task.stage, task.microbatch)
            values_of = of_parts[task.microbatch]
            operands = [values_of.take(a, device) for a in program.block.inputs]
            made = self._run(program, task.microbatch, operands, functools.partial(values_of.put, device=device))
            joined = {var: value for var, value in made.items() if var in step.joins}
            for var in [v for v in joined if v in stacks]:
                stacks[var].append(joined.pop(var))
            self._add(sums.setdefault(device, {}), joined)
        self._join(sums, stacks, values)

    def _add(self, totals: dict[Var, Array], new: Mapping[Var, Array]) -> None:
        """What a microbatch has made, to the sums of its device."""
        names = tuple(new)
        if not names:
            return
        if names[0] in totals:
            joins = tuple(str(self._step.joins[v][1]) for v in names)
            joined = _next(joins, [totals[v] for v in names], list(new.values()))
        else:
            joined = _first(list(new.values()))
        totals.update(zip(names, joined, strict=True))

    def _join(self, sums: dict[int, dict[Var, Array]], stacks: Mapping[Var, list[Array]], values: Values) -> None:
        """Sums of all replicas, and results for each example, for the update."""
        for stage, (first, *others) in enumerate(self._schedule.places):
            names = [v for v in sums.get(first, {}) if self._joined_at[v] == stage]
            for device in others:
                if device in sums and names:
                    sent = jax.device_put([sums[device][v] for v in names], self._devices[first])
                    self._add(sums[first], dict(zip(names, sent, strict=True)))
            for var in names:
                whole = self._step.joins[var][0]
                values.put(whole, first, sums[first][var].astype(whole.dtype))
        for var, parts in stacks.items():
            (whole, axis), first = self._step.joins[var], self._schedule.places[self._joined_at[var]][0]
            values.put(whole, first, jnp.concatenate(jax.device_put(parts, self._devices[first]), axis=int(axis)))


class Values:
    """Values by name and device. One that another device made is sent when it is first asked for.

    Args:
      devices: By number.
      leaves: What the call, or the microbatch, was given.
      outer: Values of the whole step, of a microbatch's.
      reads: How many programs read a value before it is let go; values that aren't there are kept.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        leaves: Mapping[Var, Any],
        outer: Values | None = None,
        reads: Mapping[Var, int] | None = None,
    ) -> None:
        self._devices, self._leaves, self._outer = devices, leaves, outer
        self._made: dict[Var, dict[int, Array]] = {}
        self._sent: dict[Var, dict[int, Array]] = {}
        self._waiting = Counter(reads or {})
        self._drops = reads is not None

    def leaf(self, var: Var) -> Any:
        """An argument of the call."""
        return self._leaves[var]

    def put(self, var: Var, device: int, value: Array) -> None:
        """A value that a device has made; one that nobody is going to read is let go."""
        if not self._drops or self._waiting[var]:
            self._made.setdefault(var, {})[device] = value

    def at(self, var: Var, device: int) -> Array:
        """The value on a device."""
        made = self._made.get(var, {})
        if device in made:
            return made[device]
        if not made and var not in self._leaves:
            assert self._outer is not None, "values are made before they are read"
            return self._outer.at(var, device)
        sent = self._sent.setdefault(var, {})
        if device not in sent:
            source = next(iter(made.values())) if made else self._leaves[var]
            sent[device] = _on_device(source, self._devices[device])
        return sent[device]

    def take(self, var: Var, device: int) -> Array:
        """The same, for one of the programs that read it: let go after the last one."""
        value = self.at(var, device)
        if self._drops and var in self._waiting:
            self._waiting[var] -= 1
            if not self._waiting[var]:
                self._made.pop(var, None)
                self._sent.pop(var, None)
        return value

    def result(self, var: Var, places: Places) -> Array:
        """The value where it was made first, one array on all devices of that stage if these have made it, too."""
        made = self._made.get(var)
        if made is None:
            return self.at(var, places[-1][0])
        first = next(iter(made))
        replicas = next(replicas for replicas in places if first in replicas)
        if len(replicas) == 1 or not made.keys() >= set(replicas):
            return made[first]
        mesh = jax.sharding.Mesh(np.array([self._devices[k] for k in replicas]), ("replica",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_single_device_arrays(var.shape, sharding, [made[k] for k in replicas])


def _on_device(value: Any, device: Any) -> Array:
    """A value on a device, without a copy if it is there."""
    if isinstance(value, jax.Array) and not jax_compat.is_key(value.dtype) and value.is_fully_replicated:
        shards = [shard.data for shard in value.addressable_shards if shard.device == device]
        if shards:
            return shards[0]
    return jax.device_put(value, device)


def _last_readers(step: StagedStep) -> dict[int, tuple[int, ...]]:
    """Of each program the positions of the state's leaves that no later one reads: their buffers take the new ones."""
    readers: dict[Var, tuple[int, int]] = {}
    outputs = set(step.outputs)
    for program in step.programs:
        for k, var in enumerate(program.block.inputs):
            if var in step.homes and step.homes[var] == program.stage and var not in outputs:
                readers[var] = id(program), k
            else:
                readers.pop(var, None)  # read where it was sent to
    positions: dict[int, list[int]] = {}
    updates = {id(p) for p in step.programs if p.phase == "update"}
    for name, k in readers.values():
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
