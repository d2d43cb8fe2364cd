"""Gradients that are added up while others are computed: where `split_segments` cuts a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.program import Equation, Var
from autopar.ir.trace import block_of
from autopar.passes.split_segments import _buckets

SIDE, LAYERS = 32, 6
LAYER_BYTES = SIDE * SIDE * 4
NAMES = [f"layer {k}" for k in range(LAYERS)]


def loss(layers: Any, x: jax.Array) -> jax.Array:
    for name in NAMES:
        x = jnp.tanh(x @ layers[name])
    return (x**2).mean()


def looped(layers: Any, x: jax.Array) -> jax.Array:
    """All gradients come from one equation."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([layers[name] for name in NAMES]))
    return (x**2).mean()


def buckets(least: int, model: Callable[..., Any] = loss) -> tuple[list[list[str]], Any, list[Equation]]:
    """The names of the layers whose gradients are in each bucket; the buckets; all equations."""
    layers, x = {name: jnp.ones((SIDE, SIDE)) for name in NAMES}, jnp.ones((8, SIDE))
    step = lambda layers, x: jax.tree.map(lambda g: g / 2, jax.grad(model)(layers, x))  # noqa: E731
    block = block_of(jax_compat.trace(step, (layers, x), {}).jaxpr)
    sums = [Equation("ap.reduce", (g,), (Var(g.type),), {"op": "sum"}) for g in block.outputs]
    made = _buckets(block.equations, sums, least)
    names = [[name for name, e in zip(NAMES, sums, strict=True) if e in some] for _, some in made]
    return names, made, list(block.equations)


def test_gradients_come_in_the_order_in_which_they_are_computed() -> None:
    """That is the reverse one, though the optimizer sees them by name. The first layer's is the last: nothing is left
    to be computed beside it."""
    names, made, equations = buckets(LAYER_BYTES)
    assert names == [[name] for name in reversed(NAMES[1:])]
    done: set[Any] = set()
    for part, sums in made:
        done.update(part)
        known = {v for e in done for v in e.outputs}
        assert all(e.inputs[0] in known for e in sums)
    assert done < set(equations) and sum(len(part) for part, _ in made) == len(done)


def test_buckets_have_as_many_bytes_as_are_asked_for() -> None:
    names, _, _ = buckets(2 * LAYER_BYTES)
    assert names == [NAMES[4:], NAMES[2:4]]  # the first two are reduced with the rest
    assert buckets(LAYERS * LAYER_BYTES)[0] == []


def test_what_one_loop_computes_is_not_cut() -> None:
    assert buckets(LAYER_BYTES, looped)[0] == []
