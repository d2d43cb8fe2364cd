"""The row-space operations that a backend implements.

`emit` hands each row-space operation of a lifted program to the `RowBackend` of its family; everything else is JAX's
own. `Route` is the backend's own data (a pytree of arrays) for finding rows. Arrays are global: over several devices a
backend works under XLA's partitioner, or in `shard_map`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar.backends.indices import along, numbered, set_rows
from autopar.ir.reductions import REDUCERS, neutral
from autopar.jax_types import Array, Leaf, Params, Pytree

Route = Pytree


@dataclass(frozen=True)
class Others:
    """Untouched rows, where they may differ from the padding row."""

    needed: Array  #: They do differ.
    rows: Callable[[Leaf], Array]  #: Returns what is reduced of the rows of a route, as if none were touched.
    block: int  #: Number of rows that are taken at a time.


class RowBackend(abc.ABC):
    """See docs/design.md, 'Row space'; shapes have U routed rows, F fetched ones, V rows in the table.

    A method named like an operation (`ap.pull`) takes an equation's parameters, with its `primitive` among them, and
    its operands. `axis` is the rows' axis. `is_spread`: rows are spread over the devices; else each device has all.
    """

    is_spread = False

    @abc.abstractmethod
    def route(self, params: Params, *ids: Array) -> Route:
        """Finds the rows of flat int32 ids (`extent`: no row), padded to `rows`; at least one is padding.

        `params`: `extent`, `rows`, `requested` (F), and in `batched` for each of `ids` whether equal shards of it are
        the devices' (None: none is).
        """

    @abc.abstractmethod
    def pull(self, params: Params, leaf: Array, route: Route) -> Array:
        """Returns the routed rows, [V, ...] -> [U, ...]. The last, padding, is some untouched row, made finite in a
        `state`."""

    @abc.abstractmethod
    def fetch(self, params: Params, rows: Array, route: Route) -> Array:
        """Brings each device the rows that it requested: [U, ...] -> [F, ...]."""

    @abc.abstractmethod
    def lookup(self, params: Params, fetched: Array, route: Route, index: Array) -> Array:
        """Runs the gather that `params` describes, with index vectors of the table, on the fetched rows."""

    @abc.abstractmethod
    def lookup_ids(self, params: Params, fetched: Array, route: Route, ids: Array) -> Array:
        """Returns the rows with these flat int32 ids, all of which are rows."""

    @abc.abstractmethod
    def push(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        """Runs the scatter that `params` describes, with index vectors of the table, into `base` [U, ...]."""

    def aggregate(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        """Pushes a device's own updates into the rows that it requested, `base` [F, ...]."""
        raise AssertionError("nothing travels by itself: there are pushes only")

    def deliver(self, params: Params, sums: Array, route: Route, base: Array | None = None) -> Array:
        """Sums aggregated rows [F, ...] over the devices, and adds them to `base` [U, ...], if there is one."""
        raise AssertionError("nothing travels by itself: there are pushes only")

    @abc.abstractmethod
    def push_ids(self, params: Params, base: Array, route: Route, ids: Array, updates: Array) -> Array:
        """Returns `base` [U, ...] with the rows of these flat int32 ids replaced; all of them are rows."""

    def row_iota(self, params: Params, route: Route) -> Array:
        """Returns the rows' numbers along their axis, as an iota."""
        return numbered(params, self.row_numbers(route, params["extent"]))

    @abc.abstractmethod
    def row_numbers(self, route: Route, extent: int) -> Array:
        """Returns int32[U], the number in the table of each routed row, the last padding row included."""

    @abc.abstractmethod
    def reduce_rows(
        self, params: Params, rows: Array, route: Route, *alone: Array, others: Others | None = None, part: bool = False
    ) -> Array:
        """Reduces over all rows, from the routed ones, and from `others` if need be.

        `params`: `op`, `axes`, `axis`, `extent`. `part`: reduces an owner's own rows alone, in the program of one
        device. `alone`: a flag that leaves out the others, where that may be so.
        """

    def padding(self, params: Params, rows: Array, route: Route) -> Array:
        """Returns the padding rows (at least one) that stand for the untouched ones."""
        return self.last_rows(rows, params["axis"])

    def last_rows(self, rows: Array, axis: int) -> Array:
        """Returns the last row; if rows are spread, that of each device."""
        return rows[along(axis, slice(-1, None))]

    def commit(self, params: Params, leaf: Array, rows: Array, route: Route, *rest: Array) -> Array:
        """Replaces the routed rows of a leaf after computing `rest`; leaves it unchanged if a guard holds."""
        guard, first = (rest[0], rest[1:]) if params.get("guarded") else (None, rest)
        if first:
            rows, *_ = jax.lax.optimization_barrier((rows, *first))
        return self.replace(leaf, rows, route, params["axis"], guard)

    def replace(self, leaf: Array, rows: Array, route: Route, axis: int, guard: Array | None = None) -> Array:
        """Replaces the routed rows of a leaf, in place if it is donated; leaves it unchanged if `guard` holds."""
        numbers = route.rows if guard is None else jnp.where(guard, leaf.shape[axis], route.rows)
        return set_rows(leaf, rows, numbers, axis)

    def load(self, params: Params, route: Route) -> Array:
        """Returns int32[], the most rows that a device asks another one for, even if the route holds fewer."""
        return jnp.zeros((), jnp.int32)

    @abc.abstractmethod
    def densify(self, params: Params, rows: Array, route: Route) -> Array:
        """Returns all rows: the routed ones as they are, the padding row's value elsewhere."""

    def fill(self, params: Params, leaf: Array, rows: Array, route: Route, *unless: Array) -> Array:
        """Makes all rows equal to the padding row, in place, unless one of some conditions holds."""
        rounds = jnp.where(jnp.any(jnp.stack(unless)), 0, 1)

        def filled(_: Array, leaf: Array) -> Array:
            return jnp.broadcast_to(self.last_rows(rows, params["axis"]), leaf.shape)

        return jax.lax.fori_loop(0, rounds, filled, leaf)

    # --- all rows, some at a time ---

    @abc.abstractmethod
    def blocks(self, rows: int, extent: int) -> int:
        """Returns the number of blocks of `rows` rows."""

    @abc.abstractmethod
    def block(self, k: Array, rows: int, extent: int) -> Route:
        """Returns a route to the rows of one block, touched or not; its `rows` are their numbers."""

    def sweep(
        self,
        params: Params,
        update: Callable[[Route, Sequence[Array]], Sequence[Array]],
        leaves: Sequence[Array],
        needed: Array,
    ) -> Sequence[Array]:
        """Runs, if `needed`, the update of untouched rows over all rows of the leaves, `rows` at a time and in
        place."""
        size, extent = params["rows"], params["extent"]

        def step(k: Array, leaves: Sequence[Array]) -> Sequence[Array]:
            route = self.block(k, size, extent)
            new = zip(leaves, update(route, leaves), params["axes"], strict=True)
            return tuple(self.replace(leaf, value, route, axis) for leaf, value, axis in new)

        return jax.lax.fori_loop(0, jnp.where(needed, self.blocks(size, extent), 0), step, tuple(leaves))

    def join_others(
        self, params: Params, part: Array, others: Others | None, reduced: Callable[[Array, Route], Array]
    ) -> Array:
        """Joins a `part` of the routed rows (of all rows, unless others are needed) with that of all others, by blocks.

        `reduced`: reduces the untouched rows of a block, from its rows and their route.
        """
        if others is None:
            return part
        size, extent = others.block, params["extent"]

        def step(k: Array, total: Array) -> Array:
            route = self.block(k, size, extent)
            return REDUCERS[params["op"]].join(total, reduced(others.rows(route), route).astype(total.dtype))

        return jax.lax.fori_loop(0, jnp.where(others.needed, self.blocks(size, extent), 0), step, part)


# --- reductions over all rows of a table: those that aren't routed are as the padding row, the last, is ---


def reduce_some(params: Params, rows: Array, which: Array) -> Array:
    """Reduces some rows. `params`: `op`, `axes`, `axis`; `which`: bool[number of rows]."""
    op, axis = params["op"], params["axis"]
    shape = [1] * rows.ndim
    shape[axis] = rows.shape[axis]
    return REDUCERS[op].reduce(jnp.where(which.reshape(shape), rows, neutral(op, rows.dtype)), params["axes"])


def reduce_routed(
    params: Params, rows: Array, is_row: Array, extent: Array | int, alone: Array | bool = False
) -> Array:
    """Reduces all `extent` rows, or the routed ones `alone`. `is_row`: bool[U], False for padding."""
    kind, axes, axis = REDUCERS[params["op"]], params["axes"], params["axis"]
    part = reduce_some(params, rows, is_row)
    padding = jax.lax.slice_in_dim(rows, rows.shape[axis] - 1, rows.shape[axis], axis=axis)
    untouched = jnp.where(alone, 0, extent - jnp.sum(is_row, dtype=jnp.int32))
    others = kind.repeated(kind.reduce(padding, axes), untouched)
    return jnp.where(untouched > 0, kind.join(part, others), part)
