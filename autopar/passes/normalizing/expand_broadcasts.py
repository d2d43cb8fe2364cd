"""Write down the broadcasts that JAX leaves unsaid: `t - rate * g` with `rate[1, D]` multiplies [1, D] by [V, D].

Elementwise primitives take operands with axes of size 1 beside larger ones. Whoever follows an axis through an equation
(rows, examples, shards) would have to ask whether this operand has it at all; so each such operand is broadcast by an
equation of its own, which every analysis knows. XLA's lowering does the same.
"""

from __future__ import annotations

import dataclasses

import jax

from autopar.analysis.rules.elementwise import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Var


def expand_broadcasts(block: Block) -> Block:
    """The block, and those nested in it, with operands of elementwise equations in the shape of their results."""
    equations: list[Equation] = []
    made: dict[tuple[Atom, tuple[int, ...]], Var] = {}
    for equation in block.equations:
        equation = equation.with_bodies([expand_broadcasts(b) for b in equation.bodies])
        if equation.op in ELEMENTWISE:
            equation = _expanded(equation, equations, made)
        equations.append(equation)
    return block.with_equations(equations)


def _expanded(equation: Equation, equations: list[Equation], made: dict[tuple[Atom, tuple[int, ...]], Var]) -> Equation:
    """The equation on broadcast operands; `equations` grows by their broadcasts."""
    shape = equation.outputs[0].shape
    inputs = []
    for atom in equation.inputs:
        if atom.shape == shape or len(atom.shape) != len(shape):  # scalars go with any shape
            inputs.append(atom)
            continue
        if (atom, shape) not in made:
            made[atom, shape] = Var(dataclasses.replace(atom.type, shape=shape))
            equations.append(_broadcast(atom, made[atom, shape], equation))
        inputs.append(made[atom, shape])
    if all(a is b for a, b in zip(inputs, equation.inputs, strict=True)):
        return equation
    return dataclasses.replace(equation, inputs=tuple(inputs))


def _broadcast(atom: Atom, out: Var, like: Equation) -> Equation:
    shape = out.shape
    params = {"shape": shape, "broadcast_dimensions": tuple(range(len(shape))), "sharding": None}
    primitive = jax.lax.broadcast_in_dim_p
    return Equation(
        primitive.name,
        (atom,),
        (out,),
        params,
        primitive=primitive,
        context=like.context,
        info=like.info,
        origin=like.origin,
    )
