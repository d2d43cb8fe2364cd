"""Reads of whole tables on hosts: what can be computed where rows are, and what can't."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

#: Rows (no multiple of 2 or 3 ranks), columns, examples.
V, D, B = 37, 4, 24
HOSTS = ("ps", "hosts")
#: Gradient, old table, new table -> what a step returns of them.
Form = Callable[[Any, Any, Any], Any]

MASK = np.random.default_rng(1).normal(size=(V,)).astype(np.float32)
EDGES = np.linspace(-1, 1, 5)
_GROUPS = (np.arange(V) * 7 % 5).astype(np.int32)


def _kurtosis(g: Any, t: Any, n: Any) -> Any:
    return ((n - n.mean()) ** 4).mean() / n.var() ** 2


def _behind_a_barrier(g: Any, t: Any, n: Any) -> Any:
    held, _ = jax.lax.optimization_barrier((t, g.sum()))
    return (held**2).sum()


#: Computed by the owners of the rows.
REDUCED: Mapping[str, Form] = {
    "norm": lambda g, t, n: jnp.linalg.norm(t),
    "norm of the new table": lambda g, t, n: jnp.linalg.norm(n),
    "var": lambda g, t, n: (t.var(), n.var(axis=0)),
    "vdot": lambda g, t, n: (jnp.vdot(g, t), jnp.vdot(n, n)),
    "mean row": lambda g, t, n: (t.mean(0), n.mean(0)),
    "extrema": lambda g, t, n: (t.max(), n.min(), t.min(0)),
    "abs sum of columns": lambda g, t, n: jnp.abs(t).sum(0),
    "prod": lambda g, t, n: jnp.prod(1 + 0.1 * t, axis=0),
    "predicates": lambda g, t, n: (jnp.all(jnp.isfinite(n)), jnp.any(n > 1, axis=0), (t > 0.5).sum()),
    "signbit": lambda g, t, n: jnp.signbit(-g).sum(),
    "largest row": lambda g, t, n: jnp.linalg.norm(n, axis=1).max(),
    "gram": lambda g, t, n: t.T @ t,
    "logsumexp": lambda g, t, n: jax.nn.logsumexp(t, axis=0),
    "softmax": lambda g, t, n: jax.nn.softmax(n, axis=0).max(),
    "mask": lambda g, t, n: ((t * MASK[:, None]).sum(), MASK @ n),
    "masked gradient": lambda g, t, n: (g * MASK[:, None]).sum(0),
    "numbers of rows": lambda g, t, n: (t * jnp.arange(V)[:, None]).sum(0),
    "groups of rows": lambda g, t, n: jax.ops.segment_sum(t, _GROUPS, 5),
    "histogram": lambda g, t, n: (t[..., None] < EDGES).sum((0, 1)),
    "flat": lambda g, t, n: jnp.abs(t.reshape(-1)[None]).max(),
    "barrier": _behind_a_barrier,
    "kurtosis": _kurtosis,
    "tables": lambda g, t, n: (n, t),
    "a row": lambda g, t, n: (t[0], n[3]),
}
#: Refused when planning, and what the error names.
REFUSED: Mapping[str, tuple[Form, str]] = {
    "sort": (lambda g, t, n: jnp.sort(t.ravel())[:3], "by sort"),
    "histogram": (lambda g, t, n: jnp.histogram(t, 4)[0], "by a function of JAX that loops"),
    "bins": (lambda g, t, n: jnp.digitize(t, EDGES).sum(), "by a function of JAX that loops"),
    "a loop": (lambda g, t, n: jax.lax.fori_loop(0, 2, lambda k, total: total + t.sum(), 0.0), "in a loop or branch"),
    "argmax": (lambda g, t, n: jnp.argmax(n.sum(1)), "by argmax"),
    "cumsum": (lambda g, t, n: jnp.cumsum(t, axis=0)[-1], "by cumsum"),
    "an output of all rows": (lambda g, t, n: jnp.signbit(-g), "the output 1/1 needs them"),
    "the gradient": (lambda g, t, n: g, "the output 1/1 needs them"),
    "norms of rows": (lambda g, t, n: jnp.linalg.norm(n, axis=1), "the output 1/1 needs them"),
    "a branch": (
        lambda g, t, n: jax.lax.cond(g.sum() > 0, lambda t: (t**2).sum(), lambda t: 0.0, t),
        "in a loop or branch",
    ),
    "before and after": (lambda g, t, n: jnp.maximum(n, t).max(), "and the update as well"),
    "a callback": (lambda g, t, n: jax.debug.print("{}", t) or 0, "by debug_"),
}


def step_of(form: Form) -> Callable[[Any, Any], Any]:
    """A step with a table that is looked up, whose metrics read it whole."""

    def step(state: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda t: (t[batch["ids"]] ** 2).mean() * batch["scale"])(state["t"])
        new = state["t"] - 0.1 * grad
        return {"t": new}, (loss, form(grad, state["t"], new))

    return step


def all_forms(g: Any, t: Any, n: Any) -> dict[str, Any]:
    """All that can be computed, in one step."""
    return {name: form(g, t, n) for name, form in REDUCED.items()}


def start(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {"t": jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), dtype)}


def batch(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, V // 2, (B, 2))
    return {"ids": ids.astype(np.int32), "scale": np.float32(scale)}


def check_rows_that_differ(factor: float, **options: Any) -> None:
    """Reductions of a gradient whose untouched rows differ, by what each row alone knows, if `factor` isn't finite."""
    rows = 1100

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, g = jax.value_and_grad(lambda e: jnp.mean(e[batch["ids"]] ** 2))(state["emb"])
        hidden = (jnp.arange(rows) % 2 == 0)[:, None] | (state["emb"] < -0.5)
        g = jnp.where(hidden, g, g * batch["factor"])
        norm = jnp.sqrt(jnp.sum(jnp.where(jnp.isfinite(g), g * g, 1)))
        largest = jnp.max(jnp.where(jnp.isnan(g), 3 + state["emb"], g), 0)
        counts = {"nans": jnp.sum(jnp.isnan(g)), "any": jnp.any(jnp.isinf(g)), "largest": largest}
        return {"emb": state["emb"] - g * 0.1 / norm}, {"loss": value, "norm": norm, **counts}

    state = {"emb": np.random.default_rng(0).normal(size=(rows, D)).astype(np.float32)}
    planned = autopar.parallelize(step, strategy=HOSTS, donate=False, **options)
    for value in (1.0, factor):
        ids = np.arange(24, dtype=np.int32).reshape(12, 2) % 7 * 150
        batch = {"ids": ids, "factor": np.full((1,), value, np.float32)}
        (new, found), (wanted_new, wanted) = planned(state, batch), jax.jit(step)(state, batch)
        pairs = ((autopar.materialize(new), found), (wanted_new, wanted))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), *pairs)
    assert 0 < wanted["nans"] < rows * D - 100
