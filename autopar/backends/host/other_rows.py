"""Rows of a rank that a step doesn't touch, where they may differ from the padding row, block by block.

What becomes of them is the body of an equation (`passes/lift_rows.py`). It is compiled when it is first needed: no
finite step runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar.backends.emit import emit
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.storage import HostRows
from autopar.backends.host.view import RouteView, host_backends, padded
from autopar.backends.row_backend import reduce_some
from autopar.ir.program import Block, Equation
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.reductions import REDUCERS
from autopar.jax_types import Index, Leaf

#: First and last row of a block, and the operands of its program.
_Taken = tuple[int, int, tuple[Any, ...]]


class OtherRows:
    """The untouched form of an `ap.sweep` or `ap.reduce_others` equation."""

    def __init__(self, equation: Equation, bound: ProgramPlan, ranks: Ranks) -> None:
        self._params = p = equation.params
        self._ranks = ranks
        (body,) = equation.bodies
        chunk, *rest = body.inputs
        family = bound.family(chunk.type.family)
        assert family is not None and family.layout is not None, "rows on hosts have a layout"
        self._layout = family.layout
        self._size = p["rows"] // bound.devices
        is_sweep = equation.op == "ap.sweep"
        self._count = len(p["read_axes"]) + (len(p["axes"]) if is_sweep else 0)
        pulled = {v: k for k, v in enumerate(rest[: self._count])}
        pulls = {e: pulled[v] for e in body.equations if e.op == "ap.pull" and (v := e.inputs[0]) in pulled}
        #: Leaves of which the program takes rows.
        self._pulls = list(pulls.values())
        inputs = (chunk, *(e.outputs[0] for e in pulls), *rest[self._count :])
        block = Block(inputs, tuple(e for e in body.equations if e not in pulls), body.outputs)
        view = ranks.owner_view
        rows = emit(block, host_backends(bound, view), view)

        def reduced(which: Index, *operands: Leaf) -> Sequence[Leaf]:
            return [reduce_some(p, rows(*operands)[0], which).astype(p["dtype"])]

        self._run = ranks.compile(rows if is_sweep else reduced, "owner", [], [])

    def sweep(self, operands: Sequence[Leaf]) -> None:
        """Updates all rows of the rank's shard in place. Operands: leaves, and values of the step."""
        for start, end, taken in self._blocks(operands, self._layout.held_on(self._ranks.exchange.rank)):
            for leaf, value in zip(operands, self._run(*taken), strict=False):
                leaf.commit(taken[0].rows, end - start, np.asarray(value))

    def reduce(self, part: np.ndarray, touched: np.ndarray, operands: Sequence[Leaf]) -> np.ndarray:
        """Joins a reduction of the touched rows (indices in the shard) with that of all others."""
        rank = self._ranks.exchange.rank
        for start, end, taken in self._blocks(operands, int(self._layout.rows_on(np.int64(rank)))):
            which = np.arange(start, start + self._size) < end
            first, last = np.searchsorted(touched, (start, end))
            which[touched[first:last] - start] = False
            (reduced,) = self._run(which, *taken)
            part = REDUCERS[self._params["op"]].join(part, np.asarray(reduced))
        return part

    def _blocks(self, operands: Sequence[Leaf], count: int) -> Iterator[_Taken]:
        leaves: Sequence[HostRows] = operands[: self._count]
        frontier = [self._ranks.for_owner(x) for x in operands[self._count :]]
        for start in range(0, count, self._size):
            end = min(start + self._size, count)
            rows = padded(np.arange(start, end), self._size, self._layout.shard_rows)
            view = RouteView(rows, np.array([end - 1], np.int32), np.zeros((0,), np.int32))
            pulled = (leaves[k].pull(rows, end - start, end - 1, False) for k in self._pulls)
            yield start, end, (view, *pulled, *frontier)
