"""Runs a planned step on several devices: each family's backend, and the placement of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.backends.combined import combined
from autopar.backends.devices import Devices, Mapped, OwnPart
from autopar.backends.emit import emit
from autopar.backends.layouts import store, whole
from autopar.backends.messages import by_gloo
from autopar.backends.protocol import RowBackend
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
    by_messages = by_gloo(devices.mesh)
    fun = combined(run, by_messages=by_messages) if share or by_messages else run
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
