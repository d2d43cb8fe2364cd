"""Equations of a block made from a JAX function: how a pass writes a few operations in place of one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.slicing import clone, eliminate_dead
from autopar.ir.trace import block_of


def expand(
    fun: Callable[..., Any], like: Equation, atoms: Sequence[Atom], output: Var | None = None, *, again: bool = False
) -> list[Equation]:
    """The equations of `fun(*atoms)`, with the line and context of `like`.

    Args:
      fun: Of arrays, returns one array that an equation computes.
      like: The equation that they are made for.
      atoms: What `fun` is given.
      output: The variable that is to hold the result; a new one by default, which is the last equation's output.
      again: Whether `fun` is an object that comes again, which holds nothing large: it is traced once for its shapes.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a.type, "weak_type", False)) for a in atoms]
    trace = _traced if again else _traced.__wrapped__
    block = trace(fun, tuple(shapes), jax.config.read("jax_enable_x64"))
    (result,) = block.outputs
    assert block.equations and result is block.equations[-1].outputs[0], "the last equation computes the result"
    env: dict[Var, Atom] = dict(zip(block.inputs, atoms, strict=True))
    if output is not None:
        env[block.equations[-1].outputs[0]] = output
    copy, _ = clone(block, env)
    return [dataclasses.replace(e, context=like.context, info=like.info, origin=like.origin) for e in copy.equations]


@functools.lru_cache(maxsize=256)
def _traced(fun: Callable[..., Any], shapes: tuple[jax.ShapeDtypeStruct, ...], x64: bool) -> Block:
    """A function's equations. `x64`: JAX's option, by which they differ."""
    return eliminate_dead(block_of(jax.make_jaxpr(fun)(*shapes)))[
        0
    ]  # a scatter of no updates leaves ids that none reads
