"""`ReadRows`: of a table whose rows wait, an evaluation brings those up to date that it reads, and no others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.analysis.row_ids import collect_ids
from autopar.backends.across import is_global, place_array
from autopar.backends.deferred_tables import NEVER
from autopar.backends.emit import emit
from autopar.backends.indices import sorted_unique
from autopar.backends.watched import jit_on
from autopar.ir.program import Block, Program
from autopar.ir.rowspace import Access, RowSpace
from autopar.measure.alpha import id_program, is_exact
from autopar.run.kept_placements import KeptPlacements
from autopar.tables.deferred import DeferredTable, UpdateLog
from autopar.tables.leaf import TableLeaf

Array = Any
#: Blocks of rows at most that a program brings up to date which is compiled for a step's; more get one of their own.
_BLOCKS = 8


@dataclass(frozen=True)
class _Ids:
    """The rows that are looked up in a leaf.

    Attributes:
      run: Makes them, flat; out of range is no row.
      reads: The inputs that it is given.
    """

    run: Callable[..., Sequence[Array]]
    reads: Sequence[int]


class ReadRows:
    """Finds what an evaluation reads of tables.

    Args:
      program: The analysed evaluation, which has no state.
      kept: Its arguments where it takes them.
    """

    def __init__(self, program: Program, kept: KeptPlacements) -> None:
        self._program, self._kept = program, kept
        self._known: dict[tuple[int, int], _Ids | None] = {}
        self._program_of = functools.cache(self._ids_program)

    def current(self, leaves: Sequence[Any]) -> list[Any]:
        """A call's flat arguments, with the table as it is stored, its rows up to date where they are read, in place of
        tables of which nothing is read but rows, by numbers that don't follow from such tables."""
        by_log: dict[int, tuple[UpdateLog, list[int]]] = {}
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, DeferredTable):
                by_log.setdefault(id(leaf.log), (leaf.log, []))[1].append(k)
        made = list(leaves)
        for log, places in by_log.values():
            if log.is_up_to_date or log.is_deleted():
                continue
            found = {k: ids for k in places if (ids := self._ids(k, leaves[k].axis)) is not None}
            reads = sorted({k for ids in found.values() for k in ids.reads})
            if len(found) < len(places) or any(isinstance(leaves[k], TableLeaf) for k in reads):
                continue
            tables, everywhere = tuple((leaves[k].table, k, leaves[k].axis) for k in places), log.spec.everywhere
            run = self._program_of(tables, log.spec.blocks, everywhere)
            for ids in run({k: self._placed(k, leaves[k], everywhere) for k in reads}):
                log.catch_up(ids)
            for k in places:
                made[k] = leaves[k].lagging()
        return made

    def _placed(self, k: int, leaf: Any, everywhere: NamedSharding) -> Array:
        place = functools.partial(place_array, sharding=everywhere, own=True)
        return leaf if is_global(leaf) else self._kept.placed(k, leaf, (everywhere, None), place)

    def _ids_program(
        self, read: tuple[tuple[int, int, int], ...], sizes: tuple[int, ...], everywhere: NamedSharding
    ) -> Callable[[Mapping[int, Array]], list[dict[int, Array]]]:
        """The program that makes the numbers of rows of all tables of an update log, flat, sorted and distinct, of the
        inputs that they follow from.

        Args:
          read: (A table, an input that is a leaf of it, its row axis).
          sizes: How many rows of each table are brought up to date at a time.
          everywhere: Where they are to be.
        """

        def run(inputs: Mapping[int, Array]) -> list[dict[int, Array]]:
            rows: dict[int, list[Array]] = {}
            for table, k, axis in read:
                ids = self._ids(k, axis)
                assert ids is not None, "only rows are read"
                rows.setdefault(table, []).extend(ids.run(*(inputs[n] for n in ids.reads)))
            flat = {table: jnp.concatenate(some) for table, some in rows.items() if some}
            return _cut({table: sorted_unique(ids, ids.size, NEVER) for table, ids in flat.items()}, sizes)

        return jit_on(cast(Mesh, everywhere.mesh), run, out_shardings=everywhere)

    def _ids(self, k: int, axis: int) -> _Ids | None:
        """The rows that are looked up in a leaf; None if it is read otherwise."""
        if (k, axis) not in self._known:
            self._known[k, axis] = self._found(k, axis)
        return self._known[k, axis]

    def _found(self, k: int, axis: int) -> _Ids | None:
        lookups = _lookups(self._program.block, k, axis)
        if not lookups:
            return None if lookups is None else _Ids(tuple, ())
        extent = self._program.block.inputs[k].shape[axis]
        space = RowSpace(k, extent, (k,), (axis,), (k,), tuple(lookups))
        block, used = id_program(self._program, collect_ids(self._program.block, space))
        if any(e.effects for e in block.walk()) or not is_exact(block):
            return None
        reads = [n for n, is_read in enumerate(used) if is_read]
        block = Block(tuple(block.inputs[n] for n in reads), block.equations, block.outputs)
        return _Ids(emit(block), reads)


def _cut(rows: Mapping[int, Array], sizes: Sequence[int]) -> list[dict[int, Array]]:
    """Numbers of rows in blocks of these sizes, one for each table; as they are if these were many."""
    count = max((-(-ids.size // sizes[table]) for table, ids in rows.items()), default=0)
    if count > _BLOCKS:
        return [dict(rows)]

    def block(table: int, k: int) -> Array:
        ids, size = rows.get(table, jnp.zeros(0, jnp.int32)), sizes[table]
        some = ids[k * size : (k + 1) * size]
        return jnp.pad(some, (0, size - some.size), constant_values=NEVER)

    return [{table: block(table, k) for table in range(len(sizes))} for k in range(count)]


def _lookups(block: Block, k: int, axis: int) -> list[Access] | None:
    """The lookups of rows of an input, none of which is inside of a loop or branch; None if anything else reads it."""
    leaf, found = block.inputs[k], list[Access]()
    if leaf in block.outputs:
        return None
    for equation in block.equations:
        if leaf not in equation.inputs:
            continue
        numbers = equation.params["dimension_numbers"] if equation.op == "gather" else None
        is_lookup = numbers is not None and axis in numbers.start_index_map and axis in numbers.collapsed_slice_dims
        if not is_lookup or leaf in equation.inputs[1:]:
            return None
        found.append(Access(equation, (), axis))
    return found
