"""Find the bytes of a family's rows that travel: those that are looked up, and those of gradients.

A step may look up a few columns of a table, cast it first, or look up what it makes of its rows: what is sent is what
is looked up. Gradients are sent as they are scattered, those that are added up together (`passes.merge_pushes`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar import jax_compat
from autopar.analysis.row_ids import RowIds, append_new
from autopar.analysis.values import Numbering
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, Var
from autopar.ir.rowspace import Access, RowSpace
from autopar.ir.slicing import hoist


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of a row, each value that travels by itself counted.

    Attributes:
      looked_up: Of the values that lookups read.
      gradients: Of the sums of gradients that are sent.
      reduced: Of each gradient that is reduced over the devices.
    """

    looked_up: int
    gradients: int
    reduced: tuple[int, ...]


def row_bytes(program: Program, space: RowSpace, ids: RowIds, *, on_cpus: bool) -> RowBytes:
    """Bytes of the family's rows that travel in a step.

    Args:
      program: The analysed program.
      space: The family.
      ids: Its ids.
      on_cpus: There XLA adds up small floats as float32, and merges what a checkpoint computes anew.
    """
    numbering = Numbering()
    for equation in program.block.equations if on_cpus else ():
        numbering.find(equation)
    read: dict[Atom, int] = {}
    totals: dict[Var, int] = {}
    reduced: list[int] = []
    for access in space.accesses:
        equation, path = access.equation, access.path
        if access.is_lookup:
            atom, turns = _outside(path, equation.inputs[0])
            if on_cpus and path and all(e.op == "remat" for e in path):
                inner, value, _ = hoist(path, equation.inputs[0])
                atom = append_new(inner, value, [], numbering)
            read[atom] = turns * _bytes_of_row(equation.inputs[0].type, space.extent)
        elif equation.op == "scatter-add" and ids.axes.get(equation) is not None:
            made = equation.outputs[0].type
            total, turns = _total(program.block, access)
            totals[total] = turns * _bytes_of_row(made, space.extent)
            is_small = on_cpus and jax_compat.is_float(made.dtype) and made.dtype.itemsize < 4
            reduced.append(_bytes_of_row(made, space.extent, 4 if is_small else 0))
    return RowBytes(sum(read.values()), sum(totals.values()), tuple(reduced))


def _bytes_of_row(type_: ArrayType, extent: int, itemsize: int = 0) -> int:
    return (type_.size * itemsize or type_.nbytes) // extent


def _turns(path: Sequence[Equation]) -> int:
    """How often a step does what is in these loops."""
    return math.prod(e.params["length"] for e in path if e.op == "scan")


def _outside(path: Sequence[Equation], atom: Atom) -> tuple[Atom, int]:
    """The value as the outermost block has it that computes it, and how often a step does."""
    for depth in range(len(path) - 1, -1, -1):
        equation = path[depth]
        body = next((b for b in equation.bodies if atom in b.inputs), None)
        constant = 0 if body is None else equation.params.get("num_consts", len(body.inputs))
        if body is None or not isinstance(atom, Var) or body.inputs.index(atom) >= constant:
            return atom, _turns(path[: depth + 1])
        atom = equation.inputs[len(equation.inputs) - len(body.inputs) + body.inputs.index(atom)]
    return atom, 1


def _total(block: Block, access: Access) -> tuple[Var, int]:
    """The sum that a gradient is part of, as the outermost block has it, and how often a step makes it."""
    blocks, within = [block], (*access.path, access.equation)
    for outer, inner in itertools.pairwise(within):
        blocks.append(next(b for b in outer.bodies if any(e is inner for e in b.equations)))
    path, total = list(access.path), access.equation.outputs[0]
    while True:
        block = blocks[-1]
        uses = Counter((*(a for e in block.equations for a in e.inputs), *block.outputs))
        user = next((e for e in block.equations if total in e.inputs), None)
        if uses[total] == 1 and user is not None and _adds(user, total):
            total = user.outputs[0]
        elif uses[total] == 1 and user is None and path and _is_handed_on(path[-1], k := block.outputs.index(total)):
            total = path.pop().outputs[k]
            blocks.pop()
        else:
            return total, _turns(path)


def _is_handed_on(equation: Equation, k: int) -> bool:
    """Whether a body's result is one around it as it is: of a loop what it carries."""
    return equation.op != "scan" or k < equation.params["num_carry"]


def _adds(equation: Equation, term: Var) -> bool:
    """Whether an equation adds something to a value."""
    if equation.op == "scatter-add":
        return equation.inputs[0] is term
    return equation.op in ("add", "add_any") and all(a.shape == term.shape for a in equation.inputs)
