"""The collectives that are written in a device's own program; `check` compares them with the compiled ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar import jax_compat
from autopar.ir.program import Block, Equation
from autopar.ir.reductions import REDUCERS
from autopar.measure.collectives import Collective


def own_collectives(block: Block, devices: int, compiled: Sequence[Collective]) -> list[Collective]:
    """Lists what a device's own program reduces and gathers besides tables' rows, as often as a step does it.

    All branches count, as in `compiled`. A `while` counts as often as XLA knows it to turn; where XLA doesn't know it,
    `times` is 0 on both sides.

    Args:
      block: The program.
      devices: N.
      compiled: The collectives of the compiled program.
    """
    return [c if c.times else replace(c, times=_turns(c, compiled)) for c in _written(block, devices, 1)]


def _written(block: Block, devices: int, times: int) -> Iterator[Collective]:
    for equation in block.equations:
        if equation.op == "ap.reduce":
            yield from _reduced(equation, devices, times)
        elif equation.op == "ap.replicate":
            yield _collective("all-gather", devices * equation.inputs[0].type.nbytes, times)
        for body in equation.bodies:
            yield from _written(body, devices, times * _body_turns(equation))


def _body_turns(equation: Equation) -> int:
    """Returns how often a step runs a body of the equation; 0 of a loop that ends by a condition."""
    names = {"scan": "length", "ap.microbatches": "count"}
    return 0 if equation.op == "while" else equation.params[names[equation.op]] if equation.op in names else 1


def _reduced(equation: Equation, devices: int, times: int) -> Iterator[Collective]:
    type_, op = equation.inputs[0].type, equation.params["op"]
    if type_.dtype == np.bool_ or REDUCERS[op].across is None:
        yield _collective("all-gather", devices * type_.nbytes, times, "pred" if type_.dtype == np.bool_ else "u8")
        return
    yield _collective("all-reduce", type_.nbytes, times)
    if op != "sum" and jax_compat.is_float(type_.dtype):  # and whether there is a NaN
        yield _collective("all-reduce", 4 * math.prod(type_.shape), times)


def _collective(op: str, nbytes: int, times: int, dtype: str = "u8") -> Collective:
    return Collective(op, ((dtype, (nbytes,)),), times)


def _turns(written: Collective, compiled: Sequence[Collective]) -> int:
    """Returns how often a loop turns by what XLA knows; 0 if it doesn't."""
    alike = (c.times for c in compiled if c.op == written.op and written.nbytes in c.sizes)
    return max((times for times in alike if times > 1), default=0)
