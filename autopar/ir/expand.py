"""Equations of a block made from a JAX function: how a pass writes a few operations in place of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.ir.program import Atom, Equation, Var
from autopar.ir.trace import block_of


def expand(fun: Callable[..., Any], like: Equation, atoms: Sequence[Atom], output: Var | None = None) -> list[Equation]:
    """The equations of `fun(*atoms)`, with the line and context of `like`.

    Args:
      fun: Of arrays, returns one array that an equation computes.
      like: The equation that they are made for.
      atoms: What `fun` is given.
      output: The variable that is to hold the result; a new one by default, which is the last equation's output.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a.type, "weak_type", False)) for a in atoms]
    block = block_of(jax.make_jaxpr(fun)(*shapes))
    (result,) = block.outputs
    assert block.equations and result is block.equations[-1].outputs[0], "the last equation computes the result"
    env: dict[Atom, Any] = dict(zip(block.inputs, atoms, strict=True))
    if output is not None:
        env[result] = output
    return [
        dataclasses.replace(
            equation,
            inputs=tuple(env.get(a, a) for a in equation.inputs),
            outputs=tuple(env.get(v, v) for v in equation.outputs),
            context=like.context,
            info=like.info,
            origin=like.origin,
        )
        for equation in block.equations
    ]
