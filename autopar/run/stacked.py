"""`StackedLeaves`: converts a caller's leaves to those of a program with stacked tables, and results back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.backends.devices import Devices
from autopar.backends.global_arrays import is_global, place_array
from autopar.backends.layouts import placed
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.figures import format_bytes
from autopar.ir.layout import RowLayout
from autopar.ir.program import Atom
from autopar.ir.stacked import StackedProgram, StackedTable, StackIndex
from autopar.jax_types import Array, Device, Leaf
from autopar.tables.leaf import current
from autopar.tables.sharded import Table, TablePart

#: The call that moves tables which warns: earlier ones may follow a checkpoint, or another step once.
_CALLS = 3


class StackedLeaves:
    """Joins tables into stacks, and splits stacks into leaves for tables. `donate`: states are updated in place;
    autopar's own tables are then deleted when they are joined."""

    def __init__(self, stack: StackedProgram, devices: Devices, *, donate: bool) -> None:
        self._stack, self._devices, self._moves = stack, devices, Moves(stack.program.name)
        self._deletes = donate and bool(stack.program.new_states)
        new = {out: stack.inputs[k] for k, out in stack.program.new_states.items()}
        self._parts = {
            out: [
                (k, index, _aval(stack.program.block.outputs[out], index))
                for k, index in zip(of, made.indices, strict=True)
            ]
            for out, of in enumerate(stack.outputs)
            if isinstance(made := new.get(out), StackedTable)
        }

    def joined(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns the stacked program's arguments. Tables that a step returned are in their stack already."""
        made: list[Leaf] = []
        moved: list[Leaf] = []
        held: Counter[int] | None = None
        for of in self._stack.inputs:
            if isinstance(of, int):
                made.append(unstacked(leaves[of]))
                continue
            members = [leaves[k] for k in of.inputs]
            whole = _common_stack(members, of.indices)
            if whole is None:
                held = held or Counter(id(leaf.stored) for leaf in leaves if isinstance(leaf, Table))
                whole = self._join(members, of.indices, held)
                moved += members
            made.append(whole)
        self._moves.see(moved)
        return made

    def split(self, results: Sequence[Leaf]) -> list[Leaf]:
        """Returns the results of the user's step."""
        made: dict[int, Leaf] = {}
        for out, (of, result) in enumerate(zip(self._stack.outputs, results, strict=True)):
            if out in self._parts:
                made.update((k, TablePart(result, index, aval)) for k, index, aval in self._parts[out])
            else:
                made[of[0]] = result
        return [made[k] for k in range(len(made))]

    def _join(self, members: Sequence[Leaf], indices: Sequence[StackIndex], held: Mapping[int, int]) -> Leaf:
        """Copies tables into a stack, one by one; other rows of the stack are zeros.

        Deletes a donated Table at once, unless several leaves share it (`held`: id -> number of leaves).
        """
        shape = indices[0].shape
        like, layout = members[0], shape.layout
        whole = (layout.stored, *like.shape[1:])
        sharding = self._devices.sharding(0 if shape.devices > 1 else None)
        parts = _parts_of(sharding, whole, layout)
        dtype = jax.dtypes.canonicalize_dtype(like.dtype)
        own = {part: np.zeros((layout.shard_rows, *whole[1:]), dtype) for part in {*parts.values()}}
        for leaf, index in zip(members, indices, strict=True):
            start, layout_of = shape.starts[index.table] // shape.devices, shape.layout_of(index.table)
            for part, rows in self._shards(leaf, layout_of):
                if part in own and layout_of.owner in (None, part):
                    own[part][start : start + len(rows)] = rows
            if self._deletes and isinstance(leaf, Table) and held[id(leaf.stored)] == 1:
                leaf.stored.delete()
        last = {part: device for device, part in parts.items()}
        arrays = [
            jax.device_put(own.pop(part) if last[part] is device else own[part], device)
            for device, part in parts.items()
        ]
        stored = jax.make_array_from_single_device_arrays(whole, sharding, arrays)
        return Table(stored, layout, 0) if shape.devices > 1 else stored

    def _shards(self, leaf: Leaf, layout: RowLayout) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (number, stored rows) of each shard of a table that this process has."""
        leaf = current(leaf)
        if not (isinstance(leaf, Table) and leaf.layout == layout and leaf.axis == 0):
            rows = leaf.materialize() if isinstance(leaf, Table) else leaf
            if not is_global(rows):
                rows, numbers = np.asarray(rows), np.arange(layout.shard_rows)
                for part in range(layout.devices) if layout.owner is None else (layout.owner,):
                    yield part, rows[np.minimum(layout.row(part * layout.shard_rows + numbers), layout.extent - 1)]
                return
            if layout.owner is not None:  # every process gets all rows
                yield layout.owner, np.asarray(place_array(rows, self._devices.sharding(None)))
                return
            leaf = Table(placed(rows, layout, 0, self._devices), layout, 0)
        for shard in leaf.stored.addressable_shards:
            yield (shard.index[0].start or 0) // layout.shard_rows, np.asarray(shard.data)


class Moves:
    """Warns once if a step, `name`, is given tables again and again that another step keeps in a stack."""

    def __init__(self, name: str) -> None:
        self._name, self._calls = name, 0

    def see(self, moved: Sequence[Leaf]) -> None:
        """Counts a call that moved these leaves."""
        parts = [leaf for leaf in moved if isinstance(leaf, TablePart)]
        self._calls += bool(parts)
        if parts and self._calls == _CALLS:
            warn(
                f"{self._name} was given tables {_CALLS} times that another step keeps beside other tables, and copies "
                f"them each time, {format_bytes(sum(leaf.nbytes for leaf in parts))}. Give both steps the same tables, "
                "updated alike: autopar.explain says which are exchanged and updated as one",
                SlowPlanWarning,
            )


def _aval(stack: Atom, index: StackIndex) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((index.shape.extents[index.table], *stack.shape[1:]), stack.dtype)


def unstacked(leaf: Leaf) -> Leaf:
    """Copies the rows of a table out of its stack; returns any other leaf as it is."""
    return leaf.current() if isinstance(leaf, TablePart) else leaf


def _common_stack(members: Sequence[Leaf], indices: Sequence[StackIndex]) -> Leaf | None:
    """Returns the stack that has these tables at these indices; None if there is none."""
    stack = members[0].pending if isinstance(members[0], TablePart) else None
    is_common = all(
        isinstance(leaf, TablePart) and leaf.pending is stack and (leaf.where is index or leaf.where == index)
        for leaf, index in zip(members, indices, strict=True)
    )
    return stack if is_common else None


def _parts_of(sharding: NamedSharding, whole: tuple[int, ...], layout: RowLayout) -> Mapping[Device, int]:
    slices = sharding.addressable_devices_indices_map(whole)
    return {device: (index[0].start or 0) // layout.shard_rows for device, index in slices.items() if index is not None}


def on_ordinary_tables(run: Callable[..., Sequence[Array]], stack: StackedProgram) -> Callable[..., Sequence[Array]]:
    """Wraps a function of stacks, whose rows are in their own order, as a function of the tables."""

    def run_on_tables(*leaves: Array) -> list[Array]:
        taken = [leaves[of] if isinstance(of, int) else _stack(leaves, of) for of in stack.inputs]
        new = {out: stack.inputs[k] for k, out in stack.program.new_states.items()}
        made: dict[int, Array] = {}
        for out, (of, result) in enumerate(zip(stack.outputs, run(*taken), strict=True)):
            table = new.get(out)
            if not isinstance(table, StackedTable):
                made[of[0]] = result
                continue
            for k, index in zip(of, table.indices, strict=True):
                made[k] = result[index.shape.rows_of(index.table)]
        return [made[k] for k in range(len(made))]

    return run_on_tables


def _stack(leaves: Sequence[Array], of: StackedTable) -> Array:
    """Stacks tables along their rows; all other rows of the stack are zeros."""
    shape, like = of.indices[0].shape, leaves[of.inputs[0]]
    whole = jnp.zeros((shape.rows, *like.shape[1:]), like.dtype)
    for k, index in zip(of.inputs, of.indices, strict=True):
        whole = whole.at[shape.rows_of(index.table)].set(leaves[k])
    return whole
