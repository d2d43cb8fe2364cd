"""Finds what a step computes between the sum of a table's gradients and its update."""

from __future__ import annotations

from autopar.ir.program import Atom, Equation, Program
from autopar.ir.rowspace import Row


def after_the_sum(program: Program, family: int) -> tuple[list[Equation], list[Equation]]:
    """Returns the equations that compute a family's rows from sums of gradients, and those that add up over rows."""
    facts, known = program.facts, set[Atom]()
    by_row, sums = list[Equation](), list[Equation]()
    for e in program.block.equations:
        role, value = facts.roles.get(e), facts.value(e.outputs[0]) if e.outputs else None
        if role == "push" and isinstance(value, Row) and facts.find(value.family) == family:
            known.update(e.outputs)
        elif not known.isdisjoint(e.inputs) and role == "rows":
            known.update(e.outputs)
            by_row.append(e)
        elif not known.isdisjoint(e.inputs) and role in ("reduce", "contract"):
            sums.append(e)
    return by_row, sums
