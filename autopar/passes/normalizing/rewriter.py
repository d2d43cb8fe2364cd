"""What passes that follow lookups through other forms of a table have in common."""

from __future__ import annotations

import abc
import dataclasses

from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Program, Var

#: Of ids: others don't hold a table's numbers of rows, or wrap around.
INTEGERS = frozenset("int8 int16 int32 int64 uint8 uint16".split())
#: Parameters of a gather or scatter by ids of which nothing is known.
UNORDERED = {"indices_are_sorted": False, "unique_indices": False}


class Rewriter(abc.ABC):
    """Rewrites blocks.

    Attributes:
      pure: Values that are made of states alone, element by element, and those into which something is scattered.
      uniform: Value -> the scalar that all its elements are.
      env: Value -> what takes its place.
      count: Lookups and scatters that were rewritten.
    """

    def __init__(self, program: Program) -> None:
        pairs = zip(program.block.inputs, program.inputs, strict=True)
        self.pure: set[Atom] = {var for var, input_ in pairs if input_.role in ("state", "table")}
        self.uniform: dict[Atom, Atom] = {}
        self.env: dict[Atom, Atom] = {}
        self.count = 0

    def run(self, program: Program) -> tuple[Program, int]:
        """Returns the program, rewritten, and how many lookups and scatters were."""
        block = self.block(program.block)
        return (dataclasses.replace(program, block=block), self.count) if self.count else (program, 0)

    def block(self, block: Block) -> Block:
        """Returns a block, rewritten."""
        equations: list[Equation] = []
        for equation in block.equations:
            inputs = tuple(self.env.get(a, a) for a in equation.inputs)
            if any(a is not b for a, b in zip(inputs, equation.inputs, strict=True)):
                equation = dataclasses.replace(equation, inputs=inputs)
            variables = [a for a in inputs if isinstance(a, Var)]
            if equation.op in ELEMENTWISE and variables and all(a in self.pure for a in variables):
                self.pure.update(equation.outputs)
            if equation.op == "broadcast_in_dim" and (inputs[0].shape == () or inputs[0] in self.uniform):
                self.uniform[equation.outputs[0]] = self.uniform.get(inputs[0], inputs[0])
            equations += self.nested(equation) if equation.bodies else self.rewritten(equation)
        outputs = tuple(self.env.get(a, a) for a in block.outputs)
        same = all(a is b for a, b in zip(outputs, block.outputs, strict=True))
        return block.with_equations(equations) if same else Block(block.inputs, tuple(equations), outputs)

    @abc.abstractmethod
    def nested(self, equation: Equation) -> list[Equation]:
        """Returns a loop, checkpoint or branch whose bodies are rewritten."""

    @abc.abstractmethod
    def rewritten(self, equation: Equation) -> list[Equation]:
        """Returns what takes an equation's place, with what else is to be known of its results."""
