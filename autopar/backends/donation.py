"""Orders a step's results so that each new state is written into its old one's buffer.

JAX pairs donated buffers with results of their shape and dtype, first come, first served. Where a result takes the
buffer of another leaf's old value, XLA copies both, whole tables in every step. So new states are returned first, in
the order of their inputs, and everything else after them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.program import Program


def donation_order(new: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Returns the order of `count` results in which each new state takes its old one's buffer.

    `new`: donated input -> the result that is its new value; no result twice.
    """
    first = [new[k] for k in sorted(new)]
    return (*first, *sorted(set(range(count)) - set(first)))


def has_unread_states(program: Program) -> bool:
    """Returns whether a state's old value isn't read at all (the last gradient, say).

    JAX drops unread arguments and pairs the other ones, so such a state needs `jit(keep_unused=True)`.
    """
    read = {a for e in program.block.equations for a in e.inputs} | set(program.block.outputs)
    return any(program.block.inputs[k] not in read for k in program.new_states)
