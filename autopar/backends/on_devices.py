"""Runs a planned step on several devices: each family's backend, and the placement of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.backends.combined import combined
from autopar.backends.devices import Devices, Mapped, OwnPart
from autopar.backends.emit import emit
from autopar.backends.gloo import uses_gloo
from autopar.backends.layouts import store, whole
from autopar.backends.row_backend import RowBackend
from autopar.backends.sharded import ShardedRows
from autopar.backends.single import GatheredRows
from autopar.ir.local import LocalFacts, Spread
from autopar.ir.program import ArrayType, Program
from autopar.ir.program_plan import ProgramPlan
from autopar.jax_types import Array


def backends(bound: ProgramPlan, devices: OwnPart) -> Mapping[int, RowBackend]:
    """Maps families to their backends; `allreduce_rows` has that of `emit`."""
    by_family: dict[int, RowBackend] = {}
    for family in bound.families:
        if family.layout is not None and family.bounds.capacity is not None:
            by_family[family.family] = ShardedRows(devices, family.layout, family.bounds.capacity)
        elif family.method == "allgather":
            by_family[family.family] = GatheredRows(devices)
    return by_family


def mapped(program: Program, bound: ProgramPlan, devices: Devices) -> Callable[..., Sequence[Array]]:
    """Maps the program of one device over all of them, as a function of global arrays."""
    assert program.local is not None, "the program is one device's"
    inside = Mapped(devices.mesh, devices.axis, tensor_axis=devices.tensor_axis)
    emitted = emit(program.block, backends(bound, inside), inside)

    def run(*operands: Array) -> tuple[Array, ...]:
        return tuple(emitted(*operands))

    entries = [entry.entry_axis for entry in program.inputs[len(bound.placements) :]]
    axes, tensors = (*bound.placements, *entries), None
    if program.local.tensor is not None:
        tensors = [bound.tensors.get(k) for k in range(len(axes))], _axes_of(program.local.tensor)
    methods = [family.method for family in bound.families]
    share = len(methods) > len(set(methods))  # exchanges of one kind can share messages
    direct = uses_gloo(devices.mesh)
    fun = combined(run, direct=direct) if share or direct else run
    return devices.mapped(fun, axes, _axes_of(program.local), tensors=tensors)


def _axes_of(local: LocalFacts) -> tuple[int | None, ...]:
    return tuple(state.axis if isinstance(state, Spread) else None for state in local.outputs)


def spread(
    run: Callable[..., Sequence[Array]], bound: ProgramPlan, program: Program, devices: Devices
) -> Callable[..., Sequence[Array]]:
    """Returns the function of global arrays, with the placement of inputs and new states as constraints."""
    types = [v.type for v in program.block.inputs]

    def constrained(value: Array, k: int) -> Array:
        if k >= len(types) or not isinstance(types[k], ArrayType):  # an update log's entry follows its rows
            return value
        return devices.constrain(value, *bound.placement(k))

    def spread_run(*inputs: Array) -> Sequence[Array]:
        outputs = run(*(constrained(x, k) for k, x in enumerate(inputs)))  # and perhaps a flag
        pairs = zip(outputs, program.outputs, strict=False)
        placed = [x if out.state is None else constrained(x, out.state) for x, out in pairs]
        return [*placed, *outputs[len(placed) :]]

    return spread_run


def on_ordinary_arrays(
    run: Callable[..., Sequence[Array]], bound: ProgramPlan, program: Program, devices: Devices
) -> Callable[..., Sequence[Array]]:
    """Wraps a function of stored tables as one of tables whose rows are in their own order."""
    outputs = {out: bound.layouts[k] for k, out in program.new_states.items() if k in bound.layouts}

    def ordinary_run(*inputs: Array) -> Sequence[Array]:
        stored = [store(x, *bound.layouts[k], devices) if k in bound.layouts else x for k, x in enumerate(inputs)]
        results = run(*stored)[: len(program.outputs)]
        return [whole(x, *outputs[k], devices) if k in outputs else x for k, x in enumerate(results)]

    return ordinary_run


# --- steps with measured capacities, and another program for batches that exceed them ---
#
# The first program returns the batch's need of each capacity. If one is exceeded, it returns the old states and a flag;
# then a loop of one iteration (else of none) runs the second program, whose capacities no batch exceeds. It is a loop
# because XLA updates a loop's tables in place and copies those of a conditional. Until both are compiled as one, the
# first one runs alone, and its caller reads the flag (`run.devices.LateFallback`).


Run = Callable[..., Sequence[Array]]


def without_fallback(tight: Run, program: Program) -> Run:
    """Returns `tight` with the batch's need of each capacity as one output, int32[capacities], before the flag."""
    count = sum(e.op == "ap.load" for e in program.block.equations)

    def run(*inputs: Array) -> Sequence[Array]:
        *outputs, exceeded = tight(*inputs)
        return [*outputs[:-count], jnp.stack(outputs[-count:]), exceeded]

    return run


def with_fallback(tight: Run, safe: Run, program: Program) -> Run:
    """Joins `tight` with `safe`, the same step without limits, which does its work if a batch exceeds one.

    Args:
      tight: Its last outputs are the batch's need of each capacity, int32[], and a flag if one is exceeded.
      safe: Has no such outputs.
      program: That of `tight`.

    Returns:
      A function like `safe`, whose last output is the batch's need of each capacity, int32[capacities].
    """
    new_states = program.new_states
    count = sum(e.op == "ap.load" for e in program.block.equations)
    batch = {k for k, input_ in enumerate(program.inputs) if input_.role == "batch"}

    def run(*inputs: Array) -> Sequence[Array]:
        *outputs, exceeded = tight(*inputs)
        outputs, loads = outputs[:-count], outputs[-count:]

        def again(turn: Array, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
            arguments = [
                outputs[new_states[k]] if k in new_states else _inside(turn, x) if k in batch else x
                for k, x in enumerate(inputs)
            ]
            return _strong(safe(*arguments))

        turns = jnp.where(exceeded, 1, 0)
        return [*jax.lax.fori_loop(0, turns, again, _strong(outputs)), jnp.stack(loads)]

    return run


def _inside(turn: Array, value: Array) -> Array:
    """Makes a value unknown before the loop.

    XLA would hoist everything that depends on the batch alone, the exchange of its ids above all, out of the loop, into
    every step.
    """
    return jnp.where(turn == 0, value, jnp.zeros_like(value))


def _strong(values: Sequence[Array]) -> tuple[Array, ...]:
    """Makes values strongly typed, since a loop's carry keeps its types."""
    return tuple(x if jax_compat.is_key(x.dtype) else jax_compat.strong(x) for x in map(jnp.asarray, values))
