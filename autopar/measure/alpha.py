"""alpha: the share of a table's rows that a batch touches, measured on an example batch.

Only the equations that the ids depend on are run (no forward pass, no gradient). Where the ids depend on arguments of
which only the shapes are known, the number of ids is an upper bound. Parallax (5.3.1) calls alpha the sparsity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.emit import emit
from autopar.ir.program import Block, Program
from autopar.ir.row_ids import RowIds, collect_ids
from autopar.ir.rowspace import RowSpace
from autopar.ir.slicing import eliminate_dead, needed_equations
from autopar.table import materialize


@dataclass(frozen=True, slots=True)
class Alpha:
    """Rows touched of `extent`, by `ids` looked-up ids; `measured` on a batch, or an upper bound."""

    rows: int
    extent: int
    ids: int
    measured: bool

    @property
    def share(self) -> float:
        """Touched rows over all rows."""
        return self.rows / self.extent


def measure_alpha(program: Program, space: RowSpace, leaves: Sequence[Any] | None) -> Alpha:
    """alpha of one family.

    Args:
      program: An analysed program.
      space: The family.
      leaves: Flat arguments; None (or a ShapeDtypeStruct) for those whose values aren't known.
    """
    ids = collect_ids(program.block, space)
    found = example_ids(program, ids, leaves)
    if found is None:
        return Alpha(min(space.extent, ids.count), space.extent, ids.count, False)
    flat = np.concatenate(found) if found else np.zeros((0,), np.int32)
    return Alpha(int(np.unique(flat[flat < space.extent]).size), space.extent, ids.count, True)


def example_ids(program: Program, ids: RowIds, leaves: Sequence[Any] | None) -> list[np.ndarray] | None:
    """The flat ids of a family in an example, int32; None where they aren't known.

    Args:
      program: An analysed program.
      ids: How the ids are computed.
      leaves: Flat arguments; None (or a ShapeDtypeStruct, or a tracer) for those whose values aren't known.
    """
    block, used = id_program(program, ids)
    if leaves is None or any(e.effects for e in block.walk()):
        return None
    needed = [x for x, u in zip(leaves, used, strict=True) if u]
    if any(x is None or isinstance(x, (jax.ShapeDtypeStruct, jax_compat.Tracer)) for x in needed):
        return None
    inputs = tuple(v for v, u in zip(block.inputs, used, strict=True) if u)
    run = jax.jit(emit(Block(inputs, block.equations, block.outputs)))
    return [np.asarray(x) for x in run(*materialize(needed))]


def id_program(program: Program, ids: RowIds) -> tuple[Block, list[bool]]:
    """The ids of a family, flat, as a program of the step's inputs; and which of those it reads."""
    roots = [a for e in ids.equations for a in e.inputs]
    equations = (*needed_equations(program.block, roots), *ids.equations)
    return eliminate_dead(Block(program.block.inputs, equations, ids.results))


def id_inputs(program: Program) -> list[bool]:
    """Which of the step's inputs the ids of any table depend on."""
    used = [False] * len(program.inputs)
    for space in program.rows.spaces:
        found = id_program(program, collect_ids(program.block, space))[1]
        used = [a or b for a, b in zip(used, found, strict=True)]
    return used
