"""Which inputs of a program hold the words of single PRNG keys: `jax.random.PRNGKey` is an ordinary uint32[2].

Such an array has no axis for examples, though it has an axis. It is told by its use: its words, moved and selected at
most, are made a key (`random_wrap`), which is the first thing that every function of `jax.random` does with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.program import ArrayType, Atom, Block, Equation, Var

#: How many words a key has: threefry's two; rbg's four.
_WORDS = (2, 4)
#: What leaves the words of each key together along the last axis, if its size stays the same.
_MOVES = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim slice dynamic_slice gather copy copy_p stop_gradient "
    "convert_element_type optimization_barrier".split()
)


def may_be_words(type_: ArrayType, axis: int | None) -> bool:
    """Whether an axis of an array could be that of a key's words."""
    if axis is None or type_.dtype != np.dtype(np.uint32):
        return False
    return axis == len(type_.shape) - 1 and type_.shape[axis] in _WORDS


def is_key(block: Block, var: Var) -> bool:
    """Whether the last axis of an input is that of a key's words."""
    return _reaches(block, {var})


def _reaches(block: Block, words: set[Atom]) -> bool:
    for equation in block.equations:
        if not words.intersection(equation.inputs):
            continue
        if equation.op == "random_wrap":
            return True
        if equation.bodies:
            if _inside(equation, words):
                return True
        elif equation.op in _MOVES:
            size = next(a.shape[-1] for a in equation.inputs if a in words)
            pairs = zip(equation.inputs, equation.outputs, strict=False)  # a barrier has several; indices say nothing
            words.update(v for a, v in pairs if a in words and v.shape and v.shape[-1] == size)
    return False


def _inside(equation: Equation, words: set[Atom]) -> bool:
    """The same of an equation's bodies; what they return is added to `words`."""
    for body, operands in zip(equation.bodies, _operands(equation), strict=True):
        words.update(v for v, a in zip(body.inputs, operands, strict=True) if a in words)
        if _reaches(body, words):
            return True
        words.update(v for v, a in zip(equation.outputs, body.outputs, strict=False) if a in words)
    return False


def _operands(equation: Equation) -> list[Sequence[Atom]]:
    """For each body the operands that are its inputs."""
    inputs = equation.inputs
    if equation.op != "while":
        return [inputs[len(inputs) - len(body.inputs) :] for body in equation.bodies]
    n, m = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    return [(*inputs[:n], *inputs[n + m :]), inputs[n:]]
