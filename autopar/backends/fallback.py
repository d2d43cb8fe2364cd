"""Runs a step with measured capacities, and another program when a batch exceeds them.

The first program returns the batch's need of each capacity. If one is exceeded, it returns the old states and a flag;
then a loop of one iteration (else of none) runs the second program, whose capacities no batch exceeds. A loop, because
XLA updates a loop's tables in place and copies those of a conditional. Until both are compiled as one, the first one
runs alone, and its caller reads the flag (`run.devices.LateFallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.program import Program
from autopar.jax_types import Array

Run = Callable[..., Sequence[Array]]


def without_fallback(tight: Run, program: Program) -> Run:
    """Returns `tight` with the batch's need of each capacity as one output, int32[capacities], before the flag."""
    count = sum(e.op == "ap.load" for e in program.block.equations)

    def run(*inputs: Array) -> Sequence[Array]:
        *outputs, exceeded = tight(*inputs)
        return [*outputs[:-count], jnp.stack(outputs[-count:]), exceeded]

    return run


def with_fallback(tight: Run, safe: Run, program: Program) -> Run:
    """Joins `tight` with `safe`, the same step without limits, which does its work if a batch exceeds one.

    Args:
      tight: Its last outputs are the batch's need of each capacity, int32[], and a flag if one is exceeded.
      safe: Has no such outputs.
      program: That of `tight`.

    Returns:
      A function like `safe`, whose last output is the batch's need of each capacity, int32[capacities].
    """
    new_states = program.new_states
    count = sum(e.op == "ap.load" for e in program.block.equations)
    batch = {k for k, input_ in enumerate(program.inputs) if input_.role == "batch"}

    def run(*inputs: Array) -> Sequence[Array]:
        *outputs, exceeded = tight(*inputs)
        outputs, loads = outputs[:-count], outputs[-count:]

        def again(turn: Array, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
            arguments = [
                outputs[new_states[k]] if k in new_states else _inside(turn, x) if k in batch else x
                for k, x in enumerate(inputs)
            ]
            return _strong(safe(*arguments))

        turns = jnp.where(exceeded, 1, 0)
        return [*jax.lax.fori_loop(0, turns, again, _strong(outputs)), jnp.stack(loads)]

    return run


def _inside(turn: Array, value: Array) -> Array:
    """Makes a value unknown before the loop.

    XLA would hoist everything that depends on the batch alone, the exchange of its ids above all, out of the loop, into
    every step.
    """
    return jnp.where(turn == 0, value, jnp.zeros_like(value))


def _strong(values: Sequence[Array]) -> tuple[Array, ...]:
    """Makes values strongly typed, since a loop's carry keeps its types."""
    return tuple(x if jax_compat.is_key(x.dtype) else jax_compat.strong(x) for x in map(jnp.asarray, values))
