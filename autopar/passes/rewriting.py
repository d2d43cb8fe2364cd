"""Walks programs in passes that replace equations, through loops, branches and checkpoints.

A pass is a `Rewriter`: `rule` replaces an equation, `look` notes facts about its results, `body` notes facts about a
nested block's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import jax.numpy as jnp

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.writer import expand
from autopar.jax_types import Leaf

#: Dtypes of ids; others don't hold a table's numbers of rows, or wrap around.
INTEGERS = frozenset("int8 int16 int32 int64 uint8 uint16".split())
#: Parameters of a gather or scatter by arbitrary ids.
UNORDERED = {"indices_are_sorted": False, "unique_indices": False}


class Rewriter:
    """Rewrites a block, and those nested in it."""

    def __init__(self) -> None:
        self.env: dict[Atom, Atom] = {}  #: Value -> its replacement.
        self.made: dict[Atom, Equation] = {}  #: Value -> the rewritten equation that makes it.
        self.count = 0  #: Number of rewritten equations, for the pass's note.

    def run(self, program: Program) -> tuple[Program, int]:
        return replace(program, block=self.block(program.block)), self.count

    def block(self, block: Block) -> Block:
        """Returns the rewritten block; itself if nothing in it changes."""
        equations: list[Equation] = []
        for equation in block.equations:
            inputs = tuple(self.env.get(a, a) for a in equation.inputs)
            if any(a is not b for a, b in zip(inputs, equation.inputs, strict=True)):
                equation = replace(equation, inputs=inputs)
            self.look(equation)
            written = self.nested(equation) if equation.bodies else self.rule(equation)
            self.made.update((v, e) for e in written for v in e.outputs)
            equations += written
        outputs = tuple(self.env.get(a, a) for a in block.outputs)
        same = all(a is b for a, b in zip(outputs, block.outputs, strict=True))
        return block.with_equations(equations) if same else Block(block.inputs, tuple(equations), outputs)

    def look(self, equation: Equation) -> None:
        """Notes facts about an equation's results, whatever replaces it."""

    def rule(self, equation: Equation) -> list[Equation]:
        """Returns the replacement of an equation without bodies."""
        return [equation]

    def nested(self, equation: Equation) -> list[Equation]:
        """Returns the replacement of a loop, branch or checkpoint."""
        return [equation.with_bodies([self.body(equation, body) for body in equation.bodies])]

    def body(self, equation: Equation, body: Block) -> Block:
        return self.block(body)


class LookupRewriter(Rewriter):
    """Rewrites lookups; knows which values are functions of the state alone."""

    keeps: Set[str] = ELEMENTWISE  #: Operations that map functions of the state to functions of the state.

    def __init__(self, program: Program) -> None:
        super().__init__()
        #: Functions of the state alone.
        self.pure: set[Atom] = {var for var, input_ in program.named_inputs if input_.role in ("state", "table")}
        self.uniform: dict[Atom, Atom] = {}  #: Value -> the scalar that all its elements are.

    def run(self, program: Program) -> tuple[Program, int]:
        rewritten, count = super().run(program)
        return (rewritten, count) if count else (program, 0)

    def look(self, equation: Equation) -> None:
        inputs = equation.inputs
        variables = [a for a in inputs if isinstance(a, Var)]
        if equation.op in self.keeps and variables and all(a in self.pure for a in variables):
            self.pure.update(equation.outputs)
        if equation.op == "broadcast_in_dim" and (inputs[0].shape == () or inputs[0] in self.uniform):
            self.uniform[equation.outputs[0]] = self.uniform.get(inputs[0], inputs[0])

    def body(self, equation: Equation, body: Block) -> Block:
        # Pure operands that all iterations read are pure in the body, too.
        if equation.op in ("scan", "remat", "cond"):
            border = equation.border
            operands = zip(body.inputs[: border.fixed], equation.inputs[border.head :], strict=False)
            self.pure.update(v for v, a in operands if a in self.pure)
        return super().body(equation, body)

    def is_known(self, equation: Equation, forms: Mapping[Atom, object]) -> bool:
        """Returns whether each operand is uniform, or has a form of another shape."""
        return all(a.shape == () or a in forms or a in self.uniform for a in equation.inputs)

    def again(self, equation: Equation, forms: Mapping[Atom, Atom], shape: Sequence[int]) -> list[Equation]:
        """Writes an elementwise equation on such operands in another shape."""
        atoms = [forms.get(a, self.uniform.get(a, a)) for a in equation.inputs]
        params = {**equation.params, "sharding": None} if "sharding" in equation.params else equation.params

        def compute(*operands: Leaf) -> Leaf:
            pairs = zip(operands, equation.inputs, strict=True)
            operands = tuple(jnp.broadcast_to(x, shape) if a.shape else x for x, a in pairs)
            return jax_compat.bind(equation.primitive, operands, params)[0]

        return expand(compute, equation, atoms)
