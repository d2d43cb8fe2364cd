"""The one engine of the analyses: runs a block, values of a lattice in place of arrays, through branches and loops.

A lattice says what a single equation makes of values (`plain`), what a value is that is one of several (`join`), and
what it is in a loop's body that is a stack outside (`inside`, `outside`). What a loop carries is a fixed point: it
starts as what comes in, and is widened until a turn returns what went in.
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
    """One interpretation. `values` has what is known of the variables that it has come to, inner ones too."""

    def __init__(self) -> None:
        self.values: dict[Var, V] = {}

    # --- the lattice ---

    @abc.abstractmethod
    def plain(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of an equation without bodies."""

    @abc.abstractmethod
    def unknown(self, atom: Atom) -> V:
        """Returns what is said of a value of which nothing is known, such as a literal."""

    @abc.abstractmethod
    def join(self, values: Sequence[V], atoms: Sequence[Atom]) -> V:
        """Returns what a value is that is one of these; `atoms` are they, each in its own block."""

    def inside(self, value: V) -> V:
        """Returns one turn's part of a value that a loop takes apart along its first axis."""
        return value

    def outside(self, value: V) -> V:
        """Returns what a loop stacks of a value of each turn."""
        return value

    def widen(self, equation: Equation, k: int, carry: V, result: V) -> V:
        """Joins carry `k` of a loop with what a turn returns of it."""
        start = equation.inputs[equation.border.head + equation.border.consts + k]
        return self.join([carry, result], [start, equation.bodies[-1].outputs[k]])

    def end(self, carry: V, result: V) -> V:
        """Returns a loop's result, of what it carries and what a turn returns of it."""
        return carry

    def mark(self) -> Any:
        """Returns what has been noted so far: a body is run again after `restore`."""

    def restore(self, mark: Any) -> None:
        """Forgets what was noted since."""

    def loop_ended(self, equation: Equation, operands: Sequence[V]) -> None:
        """Ends a loop whose carries have converged: a hook for subclasses."""

    def unconverged(self, equation: Equation) -> Sequence[V]:
        """Returns the results of a loop whose carries don't converge, and of one whose bodies aren't followed."""
        return [self.unknown(v) for v in equation.outputs]

    def while_loop(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of a while loop."""
        return self.unconverged(equation)

    def followed(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of a while loop of which both bodies are run."""
        consts = equation.border.head
        carries = self.loop(equation, operands[consts:])
        self.body(equation, equation.bodies[0], [*operands[:consts], *carries])
        return carries

    # --- the engine ---

    def value(self, atom: Atom) -> V:
        """Holds what is known of a value."""
        return self.values[atom] if isinstance(atom, Var) and atom in self.values else self.unknown(atom)

    def run(self, equations: Sequence[Equation]) -> None:
        """Interprets equations, which are in an order that can be run."""
        values: dict[Leaf, V] = self.values
        unknown = self.unknown
        for equation in equations:
            operands = [values[a] if a in values else unknown(a) for a in equation.inputs]
            values.update(zip(equation.outputs, self.equation(equation, operands), strict=True))

    def equation(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of any equation."""
        return self.nested(equation, operands) if equation.bodies else self.plain(equation, operands)

    def nested(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Returns the results of a loop, a branch or a checkpoint."""
        if equation.op == "scan":
            fixed = equation.border.fixed
            return self.loop(equation, [*operands[:fixed], *map(self.inside, operands[fixed:])])
        if equation.op in ("remat", "cond"):
            return self.branches(equation, operands[equation.border.head :])
        return self.while_loop(equation, operands)

    def body(self, equation: Equation, block: Block, operands: Sequence[V]) -> list[V]:
        """Returns what a nested block returns."""
        self.values.update(zip(block.inputs, operands, strict=True))
        self.run(block.equations)
        return [self.value(a) for a in block.outputs]

    def branches(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Runs the bodies, of which one counts."""
        returned = [self.body(equation, body, operands) for body in equation.bodies]
        atoms = zip(*(body.outputs for body in equation.bodies), strict=True)
        return [self.join(values, outputs) for values, outputs in zip(zip(*returned, strict=True), atoms, strict=True)]

    def loop(self, equation: Equation, operands: Sequence[V]) -> Sequence[V]:
        """Runs the last body over and over, on these as its inputs."""
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
