"""Steps in which a table is looked up and stays dense, and what autopar advises to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

ROWS, WIDTH, BATCH = 1200, 8, 6

#: (table, ids) -> (the table's new value, something else).
Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Form:
    """A step whose table stays dense.

    Attributes:
      dense: The step.
      instead: What its remedy says; None where that is to do something else altogether.
      same: Whether that computes the same.
    """

    dense: Step
    instead: Step | None = None
    same: bool = True


def state_of() -> Any:
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def batch_of() -> Any:
    return jnp.asarray(np.random.default_rng(0).permutation(ROWS - 2)[:BATCH])


def descent(table: Any, gradient: Any, ids: Any) -> Any:
    return table - 0.1 * gradient


def training(look: Callable[[Any, Any], Any], update: Callable[[Any, Any, Any], Any] = descent) -> Step:
    """A train step of a loss of what is looked up."""

    def step(table: Any, ids: Any) -> tuple[Any, Any]:
        loss, gradient = jax.value_and_grad(lambda t: jnp.mean(jnp.sin(look(t, ids))))(table)
        return update(table, gradient, ids), loss

    return step


def lookup(table: Any, ids: Any) -> Any:
    return table[ids]


def _by_row(table: Any, ids: Any) -> Any:
    ones = jnp.ones(BATCH, table.dtype)
    return jax.ops.segment_sum(ones[:, None] * table[ids], jnp.arange(BATCH), BATCH)


def _bcoo(table: Any, ids: Any) -> Any:
    indices = jnp.stack([jnp.arange(BATCH), ids], 1)
    return sparse.BCOO((jnp.ones(BATCH, table.dtype), indices), shape=(BATCH, ROWS)) @ table


def _bcsr(table: Any, ids: Any) -> Any:
    return sparse.BCSR((jnp.ones(BATCH, table.dtype), ids, jnp.arange(BATCH + 1)), shape=(BATCH, ROWS)) @ table


def _turn(table: Any, ids: Any) -> tuple[Any, None]:
    return table - 0.1 * jax.grad(lambda t: jnp.square(t[ids]).sum())(table), None


def clients(table: Any, ids: Any) -> tuple[Any, Any]:
    """Clients train copies of the table, a few steps each."""

    def client(ids: Any) -> Any:
        return lax.scan(_turn, table, ids)[0] - table

    return table + jax.vmap(client)(ids.reshape(2, -1)).mean(0), ids.sum()


def clients_by_rows(table: Any, ids: Any) -> tuple[Any, Any]:
    def client(ids: Any) -> Any:
        rows, places = jnp.unique(ids, size=ids.size, fill_value=ROWS, return_inverse=True)
        start = table.at[rows].get(mode="fill", fill_value=0)
        return rows, lax.scan(_turn, start, places.reshape(ids.shape))[0] - start

    rows, changes = jax.vmap(client)(ids.reshape(2, -1))
    return table.at[rows].add(changes / 2, mode="drop"), ids.sum()


def _with_padding(table: Any, ids: Any) -> Any:
    return jnp.where((ids == 0)[:, None], 0.0, table[ids - 1])


def _one_by_one(table: Any, ids: Any) -> Any:
    return lax.map(lambda i: table[i], ids)


def _padded(ids: Any) -> Any:
    return jnp.where(jnp.arange(BATCH) % 2 == 0, ids, ROWS)


def _joined(table: Any, ids: Any) -> Any:
    zeros = jnp.zeros((3, WIDTH), table.dtype)
    low, high = jnp.minimum(ids, ROWS - 1), jnp.maximum(ids - ROWS, 0)
    return jnp.where((ids < ROWS)[:, None], table[low], zeros[high])


def _adjacent(table: Any, ids: Any) -> Any:
    return jax.vmap(lambda start: lax.dynamic_slice(table, (start, 0), (2, WIDTH)))(ids)


def _while(table: Any, ids: Any) -> Any:
    def turn(carry: Any) -> Any:
        k, total = carry
        return k + 1, total + table[ids[k]]

    return lax.stop_gradient(lax.while_loop(lambda c: c[0] < 3, turn, (0, jnp.zeros(WIDTH)))[1]) + table.sum()


def _fori(table: Any, ids: Any) -> Any:
    return lax.stop_gradient(lax.fori_loop(0, 3, lambda k, total: total + table[ids[k]], jnp.zeros(WIDTH)))


def _sines(table: Any, ids: Any) -> tuple[Any, Any]:
    return table.at[ids].apply(jnp.sin), table[ids].sum()


def _sines_of_rows(table: Any, ids: Any) -> tuple[Any, Any]:
    return table.at[ids].set(jnp.sin(table[ids])), table[ids].sum()


def _sevenths(table: Any, ids: Any) -> Any:
    return table[ids].sum(0) + (table * (jnp.arange(ROWS) % 7 == ids[0] % 7)[:, None]).sum(0)


def _sevenths_by_ids(table: Any, ids: Any) -> Any:
    rows = jnp.nonzero(jnp.arange(ROWS) % 7 == ids[0] % 7, size=ROWS // 7 + 1, fill_value=len(table))[0]
    return table[ids].sum(0) + table.at[rows].get(mode="fill", fill_value=0).sum(0)


def _by_a_mask(table: Any, ids: Any) -> Any:
    return table[ids].sum(0) + (jnp.arange(ROWS) % 7 == ids[0] % 7) @ table


def _noise(shape: Any) -> Any:
    return 1e-3 * jax.random.normal(jax.random.key(0), shape)


def _mask(ids: Any) -> Any:
    return (jax.random.uniform(jax.random.key(1), (ROWS,)) < 0.9).astype(jnp.float32)


FORMS: Mapping[str, Form] = {
    "divided unevenly": Form(
        training(lambda t, i: t.reshape(400, 8, 3)[i % 400]),
        training(lambda t, i: t[(i % 400)[:, None] * 3 + jnp.arange(3)].reshape(BATCH, 8, 3)),
    ),
    "reshaped and transposed": Form(
        training(lambda t, i: t.reshape(2, ROWS // 2, WIDTH).swapaxes(0, 1)[i // 2]),
        training(lambda t, i: t[i[:, None] // 2 + jnp.array([0, ROWS // 2])]),
    ),
    "sparse product": Form(training(_bcoo), training(_by_row)),
    "compressed sparse product": Form(training(_bcsr), training(_by_row)),
    "several 1s": Form(
        training(lambda t, i: jax.nn.one_hot(i.reshape(2, -1), ROWS).sum(1) @ t),
        training(lambda t, i: t[i.reshape(2, -1)].sum(1)),
    ),
    "weighted 1s": Form(
        training(lambda t, i: jnp.zeros((BATCH, ROWS)).at[jnp.arange(BATCH), i].add(1.0 + i % 3) @ t),
        training(lambda t, i: (1.0 + i % 3)[:, None] * t[i]),
    ),
    "clients": Form(clients, clients_by_rows),
    "padded": Form(training(lambda t, i: _one_by_one(jnp.pad(t, ((1, 0), (0, 0))), i)), training(_with_padding)),
    "a row of zeros behind": Form(
        training(lambda t, i: _one_by_one(jnp.concatenate([t, t[:1] * 0]), _padded(i))),
        training(lambda t, i: t.at[_padded(i)].get(mode="fill", fill_value=0)),
    ),
    "a row of zeros ahead, beside a lookup": Form(
        training(lambda t, i: t[i] + _one_by_one(jnp.pad(t, ((1, 0), (0, 0))), i)),
        training(lambda t, i: t[i] + _with_padding(t, i)),
    ),
    "joined": Form(
        training(lambda t, i: _one_by_one(jnp.concatenate([t, jnp.zeros((3, WIDTH))]), i)), training(_joined)
    ),
    "reversed": Form(training(lambda t, i: t[::-1][i]), training(lambda t, i: t[len(t) - 1 - i])),
    "repeated": Form(
        training(lambda t, i: jnp.broadcast_to(t, (2, ROWS, WIDTH))[:, i]),
        training(lambda t, i: jnp.broadcast_to(t[i], (2, BATCH, WIDTH))),
    ),
    "tiled": Form(training(lambda t, i: jnp.tile(t, (1, 2))[i]), training(lambda t, i: jnp.tile(t[i], (1, 2)))),
    "mapped": Form(training(lambda t, i: lax.map(lambda row: 2 * row, t)[i]), training(lambda t, i: 2 * t[i])),
    "sums of rows": Form(training(lambda t, i: jnp.cumsum(t, 0)[i])),
    "a product of all rows": Form(training(lambda t, i: (jnp.full((ROWS, ROWS), 0.01) @ t)[i])),
    "a transform": Form(training(lambda t, i: jnp.fft.fft(t, axis=0).real[i])),
    "adjacent rows": Form(training(_adjacent), training(lambda t, i: t[i[:, None] + jnp.arange(2)])),
    "sorted": Form(training(lambda t, i: jnp.sort(t, 0)[i]), training(lambda t, i: jnp.sort(t[i], 0)), same=False),
    "ids of its own rows": Form(training(lambda t, i: t[lax.top_k(t.sum(1), 3)[1]])),
    "a norm": Form(
        training(lambda t, i: (t / jnp.linalg.norm(t, axis=0))[i]),
        training(lambda t, i: t[i] / jnp.linalg.norm(t[i], axis=0)),
        same=False,
    ),
    "softmax": Form(training(lambda t, i: jax.nn.log_softmax(t[i] @ t.T))),
    "while": Form(training(_while), training(_fori), same=False),
    "noise": Form(
        training(lookup, lambda t, g, i: descent(t, g, i) + _noise(t.shape)),
        training(lookup, lambda t, g, i: descent(t, g, i).at[i].add(_noise((BATCH, WIDTH)))),
        same=False,
    ),
    "a mask of rows": Form(
        training(lookup, lambda t, g, i: descent(t, g, i) * _mask(i)[:, None]),
        training(lookup, lambda t, g, i: (lambda n: n.at[i].set(n[i] * _mask(i)[i, None]))(descent(t, g, i))),
        same=False,
    ),
    "rows by a mask": Form(training(_sevenths), training(_sevenths_by_ids)),
    "rows by a mask, as a product": Form(training(_by_a_mask), training(_sevenths_by_ids)),
    "a scatter of functions": Form(_sines, _sines_of_rows),
    "made anew": Form(lambda t, i: (jnp.zeros_like(t).at[i].set(1.0), t[i].sum())),
    "drawn anew": Form(lambda t, i: (_noise(t.shape), t[i].sum())),
    "orthogonal": Form(training(lookup, lambda t, g, i: jnp.linalg.qr(descent(t, g, i))[0])),
}
