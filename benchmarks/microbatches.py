"""Microbatches: the temporary memory and the time of a deep perceptron's step, against the whole batch at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.timing import Runner, alternate, median_ms

LAYERS, WIDTH, EXAMPLES = 16, 256, 4096
COUNTS = (1, 2, 4, 8, 16)


def _step(ws: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss_of(ws: Any) -> jax.Array:
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_of)(ws)
    return [w - g for w, g in zip(ws, grads, strict=True)], loss


def _state() -> Any:
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in jax.random.split(jax.random.key(0), LAYERS)]


def microbatches() -> None:
    """16 layers of 256 x 256, 4096 examples."""
    x = jnp.ones((EXAMPLES, WIDTH))
    steps = {m: autopar.parallelize(_step, microbatches=m) for m in COUNTS}
    sizes = {m: s.lower(_state(), x).compile().memory_analysis().temp_size_in_bytes for m, s in steps.items()}
    runners = {str(m): Runner(s, _state()) for m, s in steps.items()}
    times = alternate(runners, lambda k: x, 8)
    for m in COUNTS:
        print(f"M={m}: {sizes[m] / 2**20:.1f} MiB of temporaries, {median_ms(times[str(m)]):.1f} ms a step", flush=True)
