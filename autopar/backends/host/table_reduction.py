"""Reductions over all rows of a table: a rank's own rows, by blocks, so that memory doesn't grow with the table.

What is computed row by row in between (squares, masks, another table's rows) is part of the compiled program; rows that
a rank has only as padding (spare ones, the rest of the last block) are masked there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.backends.emit import emit
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.storage import HostRows, rows_back, rows_first
from autopar.ir.layout import RowLayout
from autopar.ir.operations import split
from autopar.ir.program import Equation
from autopar.ir.reductions import REDUCERS
from autopar.jax_types import Leaf


class TableReduction:
    """A compiled `reduce_table` equation (`passes/reduce_tables.py`)."""

    def __init__(self, equation: Equation, ranks: Ranks) -> None:
        self._ranks = ranks
        self._params = equation.params
        (body,) = equation.bodies
        self._program = ranks.compile(emit(body), "owner", [], [])

    def run(self, operands: Sequence[Leaf]) -> np.ndarray:
        """Reduces this rank's part of a table, from the operands that `ir.operations` lists."""
        p, rank = self._params, self._ranks.exchange.rank
        layout: RowLayout = p["layout"]
        named = split("ap.reduce_table", p, operands)
        stored, touched = named["stored"], _pairs(named["touched"])
        pairs = zip(named["dense"], p["dense"], strict=True)
        dense = [_by_rows(self._own(x), axis, factor, layout.extent) for x, (axis, factor) in pairs]
        others = [self._ranks.for_owner(x) for x in named["values"]]
        count, size = int(layout.rows_on(np.int64(rank))), p["rows"]
        total: np.ndarray | None = None
        for start in range(0, max(count, 1), size):  # one block, too, where a rank has no row
            end = min(start + size, count)
            numbers = np.full((size,), -1, np.int32)
            numbers[: end - start] = layout.row(np.arange(start, end) + rank * layout.shard_rows)
            blocks = [_stored(table, start, end, size) for table in stored]
            pairs = zip(touched, p["touched"], strict=True)
            blocks += [_touched(self._own(rows), route, axis, start, end, size) for (rows, route), (axis, _) in pairs]
            pairs = zip(dense, p["dense"], strict=True)
            blocks += [_dense(rows, numbers, end - start, axis) for rows, (axis, _) in pairs]
            (part,) = self._program(numbers, *blocks, *others)
            part = np.asarray(part)  # from here on tables may be written to
            total = part if total is None else REDUCERS[p["op"]].join(total, part)
        assert total is not None, "there is one block at least"
        return total

    def _own(self, value: Leaf) -> np.ndarray:
        return np.asarray(self._ranks.for_owner(value))


def _pairs(operands: Sequence[Leaf]) -> list[tuple[Leaf, Leaf]]:
    return list(zip(operands[::2], operands[1::2], strict=True))


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    if len(rows) == size:
        return rows
    padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def _stored(table: HostRows, start: int, end: int, size: int) -> np.ndarray:
    return rows_back(_padded(table.rows[start:end], size), table.axis)


def _touched(rows: np.ndarray, route: Leaf, axis: int, start: int, end: int, size: int) -> np.ndarray:
    """Returns a block with some touched rows; all others are like the padding row."""
    touched = rows_first(rows, axis)
    block = np.empty((size, *touched.shape[1:]), touched.dtype)
    block[...] = touched[-1]
    first, last = np.searchsorted(route.rows[: route.count], (start, end))
    block[route.rows[first:last] - start] = touched[first:last]
    return rows_back(block, axis)


def _by_rows(value: np.ndarray, axis: int, factor: int, extent: int) -> np.ndarray:
    """Returns an array as [V, factor, ...]: each row has `factor` elements of an axis."""
    first = rows_first(value, axis)
    return first.reshape(extent, factor, *first.shape[1:])


def _dense(rows: np.ndarray, numbers: np.ndarray, count: int, axis: int) -> np.ndarray:
    block = _padded(rows[numbers[:count]], len(numbers))
    return rows_back(block.reshape(-1, *block.shape[2:]), axis)
