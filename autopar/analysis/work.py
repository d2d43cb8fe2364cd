"""Counts a step's work on all devices together: operations of its products, and sums over examples.

It is no `Interpreter`, since it counts equations and ignores values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from autopar.analysis.primitives import MOVES
from autopar.ir.figures import Work
from autopar.ir.program import Block, Equation, Program, Var

#: Operations that multiply and sum; all operations that sum over an axis.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_SUMS = PRODUCTS | {"reduce_sum", "reduce_max", "reduce_min"}
#: Operations that XLA fuses away.
_PASSED = MOVES | {"optimization_barrier"}


def count_work(program: Program) -> Work:
    """Counts the work of an analysed program.

    A loop counts by its trips (a `while` once, since they are unknown), a cond by the branch with the most work.
    """
    return _of(program.block, program.batch)


def products(block: Block) -> float:
    return _of(block, {}).parameters


def equation_work(equation: Equation) -> tuple[float, float]:
    """Counts the floating-point operations of an equation's products, and the bytes that it reads and writes."""
    block = Block((), (equation,), ())
    inside = {a: 0 for e in block.walk() for a in (*e.inputs, *e.outputs) if isinstance(a, Var)}
    work = _of(block, inside)
    return work.examples + work.parameters, work.moved_bytes


def _of(block: Block, spread: Mapping[Var, int]) -> Work:
    examples = parameters = moved = 0.0
    sums: Counter[int] = Counter()
    for equation in block.equations:
        own = flops(equation)
        if any(isinstance(a, Var) and a in spread for a in equation.inputs):
            examples += own
            moved += _moved(equation, spread)
            if equation.op in _SUMS:
                sums.update(v.type.nbytes for v in equation.outputs if v not in spread)
        else:
            parameters += own
        bodies = [_of(body, spread) for body in equation.bodies]
        if equation.op == "cond":
            bodies = [max(bodies, key=lambda work: work.examples + work.parameters)]
        trips = equation.params["length"] if equation.op == "scan" else 1
        examples += trips * sum(work.examples for work in bodies)
        parameters += trips * sum(work.parameters for work in bodies)
        moved += trips * sum(work.moved_bytes for work in bodies)
        for size, count in (sum_ for work in bodies for sum_ in work.sums):
            sums[size] += trips * count
    return Work(examples, parameters, moved, tuple(sorted(sums.items())))


def _moved(equation: Equation, spread: Mapping[Var, int]) -> float:
    if equation.op in _PASSED or equation.bodies:
        return 0.0
    atoms = (*equation.inputs, *equation.outputs) if equation.op in PRODUCTS else equation.outputs
    return float(sum(a.type.nbytes for a in atoms if isinstance(a, Var) and a in spread))


def flops(equation: Equation) -> float:
    """Counts the floating-point operations of a product (two for each term); 0 for other equations."""
    if equation.op == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        summed = np.prod([equation.inputs[0].shape[k] for k in contracted])
        return float(2 * np.prod(equation.outputs[0].shape, dtype=float) * summed)
    if equation.op == "conv_general_dilated":
        kernel = equation.inputs[1].shape
        features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return float(2 * np.prod(equation.outputs[0].shape, dtype=float) * np.prod(kernel, dtype=float) / features)
    return 0.0
