"""Finds the axes along which values are constant."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from autopar.analysis.primitives import PLACED_ELEMENTWISE
from autopar.ir.program import Atom, Equation


def constant_axes(equation: Equation, known: Mapping[Atom, int]) -> int:
    """Returns the axes along which the result of an equation is constant, as bits. `known`: of its operands.

    Unlike `analysis.batch`, which finds what fits a guess, this holds: random bits and closed-over arrays are constant
    along no axis.
    """
    if len(equation.outputs) != 1:
        return 0
    out, op = equation.outputs[0], equation.op
    every = (1 << len(out.shape)) - 1
    if op == "ap.full":
        return every
    if op == "iota":
        return every & ~(1 << equation.params["dimension"])
    if op == "broadcast_in_dim":
        operand, dims = equation.inputs[0], equation.params["broadcast_dimensions"]
        sizes = enumerate(zip(dims, operand.shape, strict=True))
        varying = (to for k, (to, size) in sizes if size > 1 and not known.get(operand, 0) >> k & 1)
        return functools.reduce(lambda bits, to: bits & ~(1 << to), varying, every)
    if op in PLACED_ELEMENTWISE and all(fits(a.shape, out.shape) for a in equation.inputs):
        bits = (constant_along(a, known) for a in equation.inputs if a.shape)
        return functools.reduce(lambda a, b: a & b, bits, every) if out.shape else 0
    return 0


def constant_along(atom: Atom, known: Mapping[Atom, int]) -> int:
    """Returns the axes along which a value is constant, those of size 1 among them."""
    return functools.reduce(
        lambda bits, d: bits | (atom.shape[d] == 1) << d, range(len(atom.shape)), known.get(atom, 0)
    )


def fits(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Returns whether an operand of an elementwise equation is a scalar, or has the result's axes (some may be 1)."""
    same = len(shape) == len(result)
    return not shape or (same and all(a in (1, b) for a, b in zip(shape, result, strict=True)))
