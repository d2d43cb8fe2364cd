"""The row-space operations that a backend implements.

`emit` walks a lifted program and hands each operation of row space to a `RowBackend`; everything else is JAX's own.
`Route` is the backend's own data (a pytree of arrays): whatever it needs to find rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Array = Any
Route = Any


class RowBackend(Protocol):
    """See DESIGN, 'Row-space operations'; shapes with U routed rows, V rows in the table."""

    def route(self, ids: Sequence[Array], extent: int, rows: int) -> Route:
        """Sorted unique rows of flat int32 ids (extent: no row), padded to `rows`; at least one is padding."""
        ...

    def pull(self, leaf: Array, route: Route, axis: int, state: bool) -> Array:
        """The routed rows: [V, ...] -> [U, ...]. Padding holds some real row, the last one made finite in a state."""
        ...

    def row_numbers(self, route: Route) -> Array:
        """int32[U]: which row of the table each routed row is."""
        ...

    def positions(self, route: Route, ids: Array, extent: int) -> Array:
        """Where the rows with these int32 ids are among the routed ones; U for ids that are no row (`extent`)."""
        ...

    def is_row(self, route: Route, extent: int) -> Array:
        """bool[U]: False for padding."""
        ...

    def commit(self, leaf: Array, rows: Array, route: Route, axis: int) -> Array:
        """The leaf with the routed rows replaced, in place where the leaf is donated."""
        ...

    def densify(self, rows: Array, route: Route, axis: int, extent: int) -> Array:
        """All rows: the routed ones where they belong, the padding row's value everywhere else."""
        ...

    def sweep(
        self,
        update: Callable[[Route, Sequence[Array]], Sequence[Array]],
        leaves: Sequence[Array],
        needed: Array,
        params: Mapping[str, Any],
    ) -> Sequence[Array]:
        """If `needed`, run the off-row update over all rows of the leaves, block by block and in place."""
        ...
