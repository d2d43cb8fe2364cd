"""The row-space operations that a backend implements.

`emit` walks a lifted program and hands each operation of row space to the `RowBackend` of its family; everything else
is JAX's own. `Route` is the backend's own data (a pytree of arrays): whatever it needs to find rows. Arrays are
global: over several devices a backend works under XLA's partitioner, or in `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autopar.backends.reductions import Others

Array = Any
Route = Any


class RowBackend(Protocol):
    """See docs/design.md, 'Row space'; shapes with U routed rows, F fetched ones, V rows in the table.

    Attributes:
      is_spread: Whether rows are spread over the devices; else each device has all.
    """

    is_spread: bool

    def route(self, ids: Sequence[Array], params: Mapping[str, Any]) -> Route:
        """What finds the rows of flat int32 ids (`extent`: no row), padded to `rows`; at least one is padding.

        `params`: `extent`, `rows`, `asked` (F), and in `batched` for each of `ids` whether equal shares of it are the
        devices' (None: none is).
        """
        ...

    def pull(self, leaf: Array, route: Route, axis: int, state: bool) -> Array:
        """The routed rows: [V, ...] -> [U, ...]. The last, which is padding, is some untouched row: of a state made
        finite."""
        ...

    def fetch(self, rows: Array, route: Route, axis: int) -> Array:
        """Brings each device the rows that it asked for: [U, ...] -> [F, ...]."""
        ...

    def lookup(self, params: Mapping[str, Any], fetched: Array, route: Route, index: Array) -> Array:
        """The gather that `params` describes, whose index vectors mean rows of the table, from the fetched rows."""
        ...

    def lookup_ids(self, fetched: Array, route: Route, ids: Array, axis: int) -> Array:
        """The rows with these flat int32 ids, all of which are rows."""
        ...

    def push(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        """The scatter that `params` describes, whose index vectors mean rows of the table, into `base` [U, ...]."""
        ...

    def aggregate(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        """A push by each device of what it has itself, into the rows that it asked for: `base` [F, ...]."""
        ...

    def deliver(self, sums: Array, route: Route, axis: int, base: Array | None) -> Array:
        """What was aggregated, [F, ...], summed over the devices and added to `base` [U, ...], if there is one."""
        ...

    def push_ids(self, base: Array, route: Route, ids: Array, updates: Array, axis: int) -> Array:
        """`base` [U, ...] with the rows of these flat int32 ids replaced; all of them are rows."""
        ...

    def row_numbers(self, route: Route, extent: int) -> Array:
        """int32[U]: which row of the table each routed row is, the last padding row included."""
        ...

    def reduce_rows(self, params: Mapping[str, Any], rows: Array, route: Route, others: Others | None = None) -> Array:
        """A reduction over all rows, from the routed ones, and from `others` if need be.

        `params`: `op`, `axes`, `axis`, `extent`.
        """
        ...

    def reduce_part(
        self, params: Mapping[str, Any], rows: Array, route: Route, others: Others | None, alone: Array | None
    ) -> Array:
        """The same of an owner's own rows, in the program of one device; of the routed ones alone if `alone` holds."""
        ...

    def padding(self, rows: Array, axis: int) -> Array:
        """The padding rows that stand for the untouched ones: at least one."""
        ...

    def commit(self, leaf: Array, rows: Array, route: Route, axis: int, guard: Array | None = None) -> Array:
        """The leaf with the routed rows replaced, in place where the leaf is donated; as it was if `guard` holds."""
        ...

    def exceeded(self, route: Route) -> Array:
        """bool[]: whether the ids need more rows than the route holds."""
        ...

    def densify(self, rows: Array, route: Route, axis: int, extent: int) -> Array:
        """All rows: the routed ones where they belong, the padding row's value everywhere else."""
        ...

    def fill(self, leaf: Array, rows: Array, axis: int) -> Array:
        """The leaf with all rows what the padding row is."""
        ...

    def sweep(
        self,
        update: Callable[[Route, Sequence[Array]], Sequence[Array]],
        leaves: Sequence[Array],
        needed: Array,
        params: Mapping[str, Any],
    ) -> Sequence[Array]:
        """If `needed`, run the off-row update over all rows of the leaves, `rows` at a time and in place."""
        ...
