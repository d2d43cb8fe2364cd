"""Ways to write what features of an example have to do with each other, of `x` [B, F, D]; none needs other examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

F, D, V = 4, 4, 400
FIRST, SECOND = np.triu_indices(F, 1)
FLAT = FIRST * F + SECOND
MASK = np.triu(np.ones((F, F), bool), 1)
ONE_HOT = np.eye(F * F, dtype=np.float32)[FLAT]
#: Makes of any number of values of an example as many as there are pairs.
MIX = np.cos(np.arange(F * F * len(FIRST), dtype=np.float32)).reshape(-1, len(FIRST))
GROUPS = np.array([0, 1, 1, 0])


def dots(x: jax.Array) -> jax.Array:
    return jnp.einsum("bid,bjd->bij", x, x)


def flat(x: jax.Array) -> jax.Array:
    return dots(x).reshape(len(x), -1)


def everywhere(x: jax.Array) -> jax.Array:
    """Where each example's pairs are in `dots(x).ravel()`."""
    return jnp.arange(len(x))[:, None] * F * F + FLAT


def slices(x: jax.Array) -> jax.Array:
    return jnp.concatenate([dots(x)[:, i, i + 1 :] for i in range(F)], 1)


FORMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "index arrays": lambda x: dots(x)[:, FIRST, SECOND],
    "triu_indices": lambda x: dots(x)[:, *jnp.triu_indices(F, 1)],
    "an index mask": lambda x: dots(x)[:, MASK],
    "index arrays, filled": lambda x: dots(x).at[:, FIRST, SECOND].get(mode="fill", fill_value=0),
    "numbers of examples": lambda x: dots(x)[jnp.arange(len(x))[:, None], FIRST, SECOND],
    "index arrays of features": lambda x: (x[:, FIRST] * x[:, SECOND]).sum(-1),
    "take": lambda x: jnp.take(flat(x), FLAT, axis=1),
    "take of features": lambda x: (jnp.take(x, FIRST, axis=1) * jnp.take(x, SECOND, axis=1)).sum(-1),
    "flat": lambda x: flat(x)[:, FLAT],
    "flat, of all examples": lambda x: dots(x).ravel()[everywhere(x)],
    "take, of all examples": lambda x: jnp.take(dots(x), everywhere(x)),
    "where": lambda x: jnp.where(MASK, dots(x), 0),
    "triu": lambda x: jnp.triu(dots(x), 1),
    "tril": lambda x: jnp.tril(dots(x), -1),
    "vmapped": lambda x: jax.vmap(lambda x: (x @ x.T)[FIRST, SECOND])(x),
    "vmapped over pairs": lambda x: jax.vmap(lambda i, j: (x[:, i] * x[:, j]).sum(-1), out_axes=1)(FIRST, SECOND),
    "mapped": lambda x: jax.lax.map(lambda x: (x @ x.T)[FIRST, SECOND], x),
    "mapped over pairs": lambda x: jax.lax.map(lambda k: (x[:, k[0]] * x[:, k[1]]).sum(-1), (FIRST, SECOND)).T,
    "one-hot": lambda x: flat(x) @ ONE_HOT.T,
    "one-hot of positions": lambda x: jnp.einsum(
        "bij,pi,pj->bp", dots(x), jax.nn.one_hot(FIRST, F), jax.nn.one_hot(SECOND, F)
    ),
    "take_along_axis": lambda x: jnp.take_along_axis(flat(x), jnp.broadcast_to(FLAT, (len(x), len(FLAT))), axis=1),
    "segments of features": lambda x: jax.ops.segment_sum(jnp.swapaxes(x, 0, 1), GROUPS, 2).swapaxes(0, 1),
    "segments, vmapped": lambda x: jax.vmap(lambda x: jax.ops.segment_sum(x, GROUPS, 2))(x),
    "segments of examples": lambda x: jax.ops.segment_sum(x.reshape(-1, D), jnp.repeat(jnp.arange(len(x)), F), len(x)),
    "sorted segments of examples": lambda x: jax.ops.segment_sum(
        x.reshape(-1, D), np.repeat(np.arange(len(x)), F), len(x), indices_are_sorted=True
    ),
    "einsum": lambda x: jnp.einsum("bid,bjd,pij->bp", x, x, ONE_HOT.reshape(-1, F, F)),
    "sums": lambda x: x.sum(1) ** 2 - (x**2).sum(1),
    "one by one": lambda x: jnp.stack([(x[:, i] * x[:, j]).sum(-1) for i, j in zip(FIRST, SECOND, strict=True)], 1),
}


def step_of(forms: Sequence[Callable[[jax.Array], jax.Array]]) -> Callable[[Any, Any], Any]:
    """Returns a step of a model that has the sum of some forms in it."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = jnp.stack([params[f"t{k}"][batch["ids"][:, k]] for k in range(F)], 1)
            found = [jnp.tanh(form(x)).reshape(len(x), -1) for form in forms]
            told = sum((y if y.shape[1] == len(FIRST) else y @ MIX[: y.shape[1]]) @ params["w"] for y in found)
            return jnp.mean((told - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (len(FIRST),)} | {f"t{k}": (V, D) for k in range(F)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def make_batch(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, V, (size, F)).astype(np.int32), "y": rng.normal(size=size).astype(np.float32)}


#: Forms that are brought into another one, or need rules that no other equation does.
REWRITTEN = [FORMS[name] for name in ("flat, of all examples", "mapped", "segments of examples")]
