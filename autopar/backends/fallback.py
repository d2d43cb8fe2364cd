"""A step with measured capacities, and what does its work when a batch exceeds them.

The first program returns the old states and a flag if it was exceeded; then a loop of one iteration (and else of none)
runs the second, whose capacities no batch exceeds. A loop, because XLA updates a loop's tables in place and copies
those of a conditional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.program import Program

Array = Any
Run = Callable[..., Sequence[Array]]


def with_fallback(tight: Run, safe: Run, program: Program) -> Run:
    """A function like `tight`, whose last output says whether `safe`, the same without limits and without that flag,
    did its work."""
    new_states = program.new_states
    batch = {k for k, input_ in enumerate(program.inputs) if input_.role == "batch"}

    def run(*inputs: Array) -> Sequence[Array]:
        *outputs, exceeded = tight(*inputs)

        def again(turn: Array, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
            arguments = [
                outputs[new_states[k]] if k in new_states else _inside(turn, x) if k in batch else x
                for k, x in enumerate(inputs)
            ]
            return _strong(safe(*arguments))

        count = jnp.where(exceeded, 1, 0)
        return [*jax.lax.fori_loop(0, count, again, _strong(outputs)), exceeded]

    return run


def _inside(turn: Array, value: Array) -> Array:
    """The value, in the only turn, as something that isn't known before the loop.

    XLA does what depends on the batch alone, the exchange of its ids above all, ahead of the loop: in every step.
    """
    return jnp.where(turn == 0, value, jnp.zeros_like(value))


def _strong(values: Sequence[Array]) -> tuple[Array, ...]:
    """A loop's carry keeps its types."""
    return tuple(x if jax_compat.is_key(x.dtype) else jax_compat.strong(x) for x in map(jnp.asarray, values))
