"""Runs a block on values of a lattice in place of arrays, through branches and loops; the engine of all analyses.

A lattice defines the results of a single equation (`plain`), the join of values (`join`), and the value in a loop's
body of a stack outside (`inside`, `outside`). A loop's carry is a fixed point: it starts as the operand, and is widened
until a turn returns what went in.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from autopar.ir.program import Atom, Block, Equation, Var
from autopar.jax_types import Leaf

V = TypeVar("V")


class Interpreter(abc.ABC, Generic[V]):
    """An interpretation of a program. `values` has the values of all variables so far, inner ones too."""

    def __init__(self) -> None:
        self.values: dict[Var, V] = {}

    # --- the lattice ---

    @abc.abstractmethod
    def plain(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of an equation without bodies."""

    @abc.abstractmethod
    def unknown(self, atom: Atom) -> V:
        """Returns the value of an atom of which nothing is known, such as a literal."""

    @abc.abstractmethod
    def join(self, values: Sequence[V], atoms: Sequence[Atom]) -> V:
        """Returns the value of a variable that is one of these; `atoms` have them, each in its own block."""

    def inside(self, value: V) -> V:
        """Returns one turn's slice of a value that a loop slices along its first axis."""
        return value

    def outside(self, value: V) -> V:
        """Returns the stack of a value of each turn."""
        return value

    def widen(self, equation: Equation, k: int, carry: V, result: V) -> V:
        """Joins carry `k` of a loop with a turn's result."""
        start = equation.inputs[equation.border.head + equation.border.consts + k]
        return self.join([carry, result], [start, equation.bodies[-1].outputs[k]])

    def end(self, carry: V, result: V) -> V:
        """Returns a loop's result, from its carry and a turn's result."""
        return carry

    def mark(self) -> Any:
        """Returns a mark for `restore`, before a body is run that may be run again."""

    def restore(self, mark: Any) -> None:
        """Forgets findings since the mark."""

    def loop_ended(self, equation: Equation, operands: Sequence[V]) -> None:
        """Handles a loop whose carries have converged; a hook for subclasses."""

    def unconverged(self, equation: Equation) -> Sequence[V]:
        """Returns the results of a loop whose carries don't converge, or whose bodies aren't followed."""
        return [self.unknown(v) for v in equation.outputs]

    def while_loop(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        return self.unconverged(equation)

    def followed(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of a while loop by running both bodies."""
        consts = equation.border.head
        carries = self.loop(equation, operands[consts:])
        self.body(equation, equation.bodies[0], [*operands[:consts], *carries])
        return carries

    # --- the engine ---

    def value(self, atom: Atom) -> V:
        return self.values[atom] if isinstance(atom, Var) and atom in self.values else self.unknown(atom)

    def run(self, equations: Sequence[Equation]) -> None:
        """Interprets equations in an order in which they can run."""
        values: dict[Leaf, V] = self.values
        unknown = self.unknown
        for equation in equations:
            operands = [values[a] if a in values else unknown(a) for a in equation.inputs]
            values.update(zip(equation.outputs, self.equation(equation, operands), strict=True))

    def equation(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        return self.nested(equation, operands) if equation.bodies else self.plain(equation, operands)

    def nested(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        if equation.op == "scan":
            fixed = equation.border.fixed
            return self.loop(equation, [*operands[:fixed], *map(self.inside, operands[fixed:])])
        if equation.op in ("remat", "cond"):
            return self.branches(equation, operands[equation.border.head :])
        return self.while_loop(equation, operands)

    def body(self, equation: Equation, block: Block, operands: Sequence[V]) -> list[V]:
        """Interprets a nested block, and returns its results."""
        self.values.update(zip(block.inputs, operands, strict=True))
        self.run(block.equations)
        return [self.value(a) for a in block.outputs]

    def branches(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Joins the results of alternative bodies."""
        returned = [self.body(equation, body, operands) for body in equation.bodies]
        atoms = zip(*(body.outputs for body in equation.bodies), strict=True)
        return [self.join(values, outputs) for values, outputs in zip(zip(*returned, strict=True), atoms, strict=True)]

    def loop(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Runs the last body on these inputs until its carries converge."""
        body = equation.bodies[-1]
        first, count = equation.border.consts, equation.border.carries
        carries = list(operands[first : first + count])
        for _ in range(2 * count + 4):
            mark = self.mark()
            results = self.body(equation, body, [*operands[:first], *carries, *operands[first + count :]])
            widened = [
                self.widen(equation, k, carry, result)
                for k, (carry, result) in enumerate(zip(carries, results, strict=False))
            ]
            if widened == carries:
                self.loop_ended(equation, operands)
                ends = (self.end(c, r) for c, r in zip(carries, results, strict=False))
                return [*ends, *(self.outside(v) for v in results[count:])]
            self.restore(mark)
            carries = widened
        return self.unconverged(equation)


def union(sets: Iterable[int]) -> int:
    """Returns the union of sets that are the bits of integers."""
    return functools.reduce(operator.or_, sets, 0)
