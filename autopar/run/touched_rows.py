"""`TouchedRows`: finds the rows of tables that a client has touched since the last mean; other rows don't differ.

It serves tables whose other rows a step leaves unchanged (`SyncPlan.by_rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compile import Compiled
from autopar.ir.plan import SyncPlan
from autopar.ir.program import known
from autopar.jax_types import Array, Leaf
from autopar.measure.alpha import id_program, id_reader, is_exact
from autopar.tables.replica import Rows, Touched

#: The smallest padded number of rows.
_LEAST = 256


class TouchedRows:
    """Finds the rows that steps of a client look up."""

    def __init__(self, compiled: Compiled, plan: SyncPlan) -> None:
        program = compiled.analysed
        by_path = {program.inputs[k].path: k for k in program.new_states}
        #: Input -> its family, of tables of which the touched rows are sent.
        self._families = {k: known(program.facts.space_of(k)) for k in (by_path[path] for path in plan.by_rows)}
        family = compiled.bound.family
        lifted = {k: program.ids[s.family] for k, s in self._families.items() if family(s.family) is not None}
        self._readers = {k: id_reader(program, x) for k, x in lifted.items() if is_exact(id_program(program, x)[0])}

    def __contains__(self, k: int) -> bool:
        return k in self._families

    def none(self, tables: Collection[int]) -> dict[int, Touched]:
        return {k: Touched(space.extent) for k, space in self._families.items() if k in tables}

    def after(self, touched: Mapping[int, Touched], leaves: Sequence[Leaf]) -> dict[int, Touched]:
        """Returns for each table the rows touched after one more call, whose `leaves` aren't donated yet; all rows
        where nobody has counted them."""
        made = {}
        for k, space in self._families.items():
            so_far = touched.get(k)
            if so_far is None or k not in self._readers:  # no reader: all rows move, or ids may round differently
                made[k] = Touched(space.extent, (self.everything(k),))
                continue
            ids = self._readers[k](leaves)
            assert ids is not None, "a call has all of its arguments"
            found = np.unique(np.concatenate(ids))
            made[k] = so_far.with_call(found[(found >= 0) & (found < space.extent)])
        return made

    def of_bits(self, k: int, bits: np.ndarray) -> Touched:
        """Returns the rows that a checkpoint's bits name."""
        return Touched.of_bits(self._families[k].extent, bits)

    def rows(self, k: int, bits: np.ndarray) -> np.ndarray | None:
        """Returns the rows that bits name, padded; None if there are so many that all are sent."""
        extent = self._families[k].extent
        (rows,) = np.nonzero(np.unpackbits(bits, count=extent))
        padded = self.padded(rows)
        return None if 2 * padded.size > extent else padded

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """Repeats rows up to a power of two, so that few programs are compiled."""
        count = max(_LEAST, 1 << max(0, rows.size - 1).bit_length())
        return np.resize(rows if rows.size else np.zeros(1, np.int64), count)

    def everything(self, k: int) -> np.ndarray:
        return np.arange(self._families[k].extent)

    def picked(self, k: int, array: Array, rows: np.ndarray) -> Array:
        """Returns rows of a table, [n, ...]."""
        return _picked(array, rows.astype(np.int32), self.axis(k))

    def rows_of(self, k: int, rows: np.ndarray, values: Array) -> Rows:
        return Rows(self.axis(k), rows.astype(np.int32), values)

    def put(self, k: int, array: Array, rows: np.ndarray, values: Array, *, in_place: bool) -> Array:
        """Returns a table with `values` in place of `rows`."""
        return _putter(in_place)(array, rows.astype(np.int32), values, self.axis(k))

    def axis(self, k: int) -> int:
        space = self._families[k]
        return space.axes[space.leaves.index(k)]


@functools.partial(jax.jit, static_argnums=2)
def _picked(array: Array, places: Array, axis: int) -> Array:
    return jnp.moveaxis(jnp.take(array, places, axis), axis, 0)


@functools.cache
def _putter(in_place: bool) -> Callable[[Array, Array, Array, int], Array]:
    def put(array: Array, places: Array, values: Array, axis: int) -> Array:
        return array.at[(slice(None),) * axis + (places,)].set(jnp.moveaxis(values, 0, axis))

    return jax.jit(put, static_argnums=3, donate_argnums=0 if in_place else ())
