"""A step with measured capacities, and what does its work when a batch exceeds them.

The first program returns what the batch needs of them. If that is more, it returns the old states and a flag; then a
loop of one iteration (and else of none) runs the second, whose capacities no batch exceeds. A loop, because XLA updates
a loop's tables in place and copies those of a conditional. Until both are compiled as one, the first one runs alone,
and its caller looks at the flag (`run.devices.LateFallback`).
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
    """Makes a function of `tight` alone: its last outputs are what the batch needs of each capacity, int32[capacities],
    and whether that is more, so that it changed nothing."""
    count = sum(e.op == "ap.load" for e in program.block.equations)

    def run(*inputs: Array) -> Sequence[Array]:
        *outputs, exceeded = tight(*inputs)
        return [*outputs[:-count], jnp.stack(outputs[-count:]), exceeded]

    return run


def with_fallback(tight: Run, safe: Run, program: Program) -> Run:
    """Makes a function of `tight`, and of `safe`, the same without limits, which does its work where a batch exceeds
    one.

    Args:
      tight: Its last outputs are what the batch needs of each capacity, int32[], and whether that is more.
      safe: Has no such outputs.
      program: That of `tight`.

    Returns:
      A function like `safe`, whose last output is what the batch needs of each capacity, int32[capacities].
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
    """Returns the value, in the only turn, as something that isn't known before the loop.

    XLA does what depends on the batch alone, the exchange of its ids above all, ahead of the loop: in every step.
    """
    return jnp.where(turn == 0, value, jnp.zeros_like(value))


def _strong(values: Sequence[Array]) -> tuple[Array, ...]:
    """Makes values strongly typed: a loop's carry keeps its types."""
    return tuple(x if jax_compat.is_key(x.dtype) else jax_compat.strong(x) for x in map(jnp.asarray, values))
