"""What a user writes for each example by itself, in as many ways as JAX has primitives for it: examples never meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

#: Examples; features.
EXAMPLES, WIDTH = 8, 4

Each = Callable[[Any, Any], Any]


def _named(w: Any, x: Any) -> Any:
    def layer(w: Any, x: Any) -> Any:
        return checkpoint_name(jnp.sin(x @ w), "sin").sum(1)

    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("sin"))(w, x)


def _experts(w: Any, x: Any) -> Any:
    """A mixture: of each example the two best experts, weighted."""
    h = x @ w
    best, which = lax.top_k(h, 2)
    chosen = jnp.sin(h)[jnp.arange(len(x))[:, None], which]
    return (jax.nn.softmax(best) * chosen).sum(1)


def _last_token(w: Any, x: Any) -> Any:
    h = (x @ w).reshape(len(x), 2, 2)
    return h[jnp.arange(len(x)), (x[:, 0] > 0).astype(int)].sum(-1)


def _loop(w: Any, x: Any) -> Any:
    h = x @ w
    return (
        h * lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, lax.stop_gradient(h)))[1]
    ).sum(1)


def _loop_by_example(w: Any, x: Any) -> Any:
    h = x @ w
    halved = jax.vmap(lambda v: lax.while_loop(lambda v: v.sum() > 1, lambda v: v / 2, v))
    return (h * halved(lax.stop_gradient(jnp.abs(h)))).sum(1)


def _matrices(w: Any, x: Any) -> Any:
    return jnp.einsum("bi,bj->bij", x @ w, x @ w) + jnp.diag(jnp.arange(1.0, WIDTH + 1))


EACH: Mapping[str, Each] = {
    "named": _named,
    "experts": _experts,
    "last token": _last_token,
    "loop": _loop,
    "loop by example": _loop_by_example,
    "put": lambda w, x: sum(jax.device_put((x @ w, x))).sum(1),
    "a column set": lambda w, x: (x @ w).at[:, 1].set(0.5).sum(1),
    "searched": lambda w, x: jnp.searchsorted(jnp.arange(4.0), (x @ w)[:, 0]) + (x @ w).sum(1),
    "special": lambda w, x: (
        jax.scipy.special.i0e(x @ w).sum(1) + jax.scipy.special.polygamma(1, 2 + (x @ w) ** 2).sum(1)
    ),
    "cholesky": lambda w, x: jnp.linalg.cholesky(_matrices(w, x)).sum((1, 2)),
    "solved": lambda w, x: jnp.linalg.solve(_matrices(w, x), x[..., None]).sum((1, 2)),
    "eigenvalues": lambda w, x: jnp.linalg.eigvalsh(_matrices(w, x)).max(1),
    "one matrix": lambda w, x: jnp.linalg.solve(w + 3 * jnp.eye(WIDTH), x.T).T.sum(1),
}


def step_of(each: Mapping[str, Each]) -> Callable[[Any, Any], Any]:
    """A step that sums a mean of each, and returns them by example."""

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        def loss_of(w: Any) -> tuple[Any, Any]:
            by_example = {name: fun(w, x) for name, fun in each.items()}
            return sum(jnp.mean(value) for value in by_example.values()), by_example

        grad, by_example = jax.grad(loss_of, has_aux=True)(w)
        return w - 0.1 * grad, by_example

    return step


def given() -> tuple[Any, Any]:
    """Weights and a batch, in float64."""
    w, x = jax.random.split(jax.random.key(0))
    return jax.random.normal(w, (WIDTH, WIDTH), float), jax.random.normal(x, (EXAMPLES, WIDTH), float)
