"""Ways of looking rows up: kinds of lookup, of ids, of tables, all within the step of `single.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.zoo.case import Case
from tests.zoo.single import (
    IDS,
    ROWS,
    WIDTH,
    Batch,
    Batches,
    Look,
    Params,
    ids_batches,
    look_plain,
    make_params,
    table_case,
)

# --- ways of looking up ---------------------------------------------------------------------------


def _row_normalised(p: Params, b: Batch) -> jax.Array:
    norms = jnp.sqrt(jnp.sum(p["emb"] ** 2, axis=1, keepdims=True) + 1e-6)
    return (p["emb"] / norms)[b["ids"]]


def _in_scan(p: Params, b: Batch, wrap: Callable[..., Any] = lambda body: body) -> jax.Array:
    def body(h: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ p["w"] + p["emb"][ids])
        return h, h

    return lax.scan(wrap(body), jnp.zeros((IDS[0], WIDTH), jnp.float32), b["ids"].T)[1]


def _in_scan_counter(p: Params, b: Batch) -> jax.Array:
    """The ids of each iteration come from a counter in the carry."""

    def body(carry: Any, _: None) -> tuple[Any, jax.Array]:
        h, k = carry
        h = jnp.tanh(h @ p["w"] + p["emb"][(b["ids"][:, 0] + 3 * k) % ROWS])
        return (h, k + 1), h

    start = jnp.zeros((IDS[0], WIDTH), jnp.float32), jnp.zeros((), jnp.int32)
    return lax.scan(body, start, None, length=4)[1]


def _decode(p: Params, b: Batch) -> jax.Array:
    """Each iteration's ids depend on the rows that the one before it looked up."""

    def body(carry: Any, _: None) -> tuple[Any, jax.Array]:
        h, ids = carry
        h = jnp.tanh(h @ p["w"] + p["emb"][ids])
        return (h, jnp.argmax(h, -1).astype(jnp.int32)), h

    start = jnp.zeros((IDS[0], WIDTH), jnp.float32), b["ids"][:, 0]
    return lax.scan(body, start, None, length=3)[1]


def _in_while(p: Params, b: Batch) -> jax.Array:
    """Adds the sum of some rows, without gradient, read one after another in a while loop."""
    table, ids = lax.stop_gradient(p["emb"]), jnp.ravel(b["ids"])
    start = jnp.zeros((), jnp.int32), jnp.zeros((WIDTH,), jnp.float32)
    _, total = lax.while_loop(
        lambda c: (c[0] < 4) & (c[1][0] < 9), lambda c: (c[0] + 1, c[1] + table[ids[c[0]]]), start
    )
    return p["emb"][b["ids"]] + total


def _in_cond(p: Params, b: Batch) -> jax.Array:
    ids = b["ids"]
    return lax.cond(ids.sum() % 2 == 0, lambda: p["emb"][ids], lambda: 2 * p["emb"][ids[::-1]])


def _in_switch_in_scan(p: Params, b: Batch) -> jax.Array:
    """Each iteration takes one of three branches; one of them looks nothing up."""

    def body(h: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        branches = [
            lambda h: h + p["emb"][ids],
            lambda h: jnp.tanh(h @ p["w"]),
            lambda h: h * jnp.sin(p["emb"][ids[::-1]] @ p["w"]),
        ]
        h = lax.switch(ids[0] % 3, branches, h)
        return h, h

    return lax.scan(body, jnp.ones((IDS[0], WIDTH), jnp.float32), b["ids"].T)[1]


def _one_hot_first(ids: jax.Array) -> jax.Array:
    """The classes along the first axis, the ids' own axes swapped."""
    return jax.nn.one_hot(ids.T, ROWS, axis=0)


LOOKS: dict[str, Look] = {
    "flat_rows": lambda p, b: p["emb"].reshape(-1)[b["ids"][..., None] * WIDTH + jnp.arange(WIDTH)],
    "plain": look_plain,
    "two_lookups": lambda p, b: p["emb"][b["ids"]] + p["emb"][b["ids"] % 7],
    "same_ids_twice": lambda p, b: p["emb"][b["ids"]] * jnp.cos(p["emb"][b["ids"]]),
    "computed_ids": lambda p, b: p["emb"][jnp.where(b["ids"] > 3, b["ids"] // 2, 36)],
    "step_ids": lambda p, b: p["emb"][(7 * jnp.arange(6, dtype=jnp.int32) + 11 * b["step"]) % ROWS],
    "scalar_id_traced": lambda p, b: p["emb"][b["ids"][0, 0]],
    "dynamic_slice": lambda p, b: lax.dynamic_slice_in_dim(p["emb"], b["ids"][0, 0], 1),
    "static_row": lambda p, b: p["emb"][b["ids"]] + p["emb"][0],
    "static_slice": lambda p, b: p["emb"][b["ids"]] + p["emb"][:5],
    "take_along_axis": lambda p, b: jnp.take_along_axis(p["emb"], b["ids"].reshape(-1, 1), axis=0),
    "element_gather": lambda p, b: p["emb"][b["ids"][..., None], jnp.arange(WIDTH)],
    "vmapped": lambda p, b: jax.vmap(lambda i: p["emb"][i])(b["ids"]),
    "vmapped_twice": lambda p, b: jax.vmap(jax.vmap(lambda i: p["emb"][i]))(b["ids"]),
    "transposed": lambda p, b: jnp.moveaxis(p["emb"].T[:, b["ids"]], 0, -1),
    "cast_bfloat16": lambda p, b: p["emb"].astype(jnp.bfloat16)[b["ids"]].astype(jnp.float32),
    "scaled": lambda p, b: (p["emb"] * WIDTH**0.5)[b["ids"]],
    "row_normalised": _row_normalised,
    "table_matmul": lambda p, b: jnp.sin(p["emb"] @ p["w"])[b["ids"]],
    "padding_mask": lambda p, b: (p["emb"] * (jnp.arange(ROWS) != 0)[:, None])[b["ids"]],
    "padding_set_zero": lambda p, b: p["emb"].at[0].set(0.0)[b["ids"]],
    "checkpoint": lambda p, b: jax.checkpoint(lambda e: jnp.sin(e[b["ids"]]))(p["emb"]),
    "checkpoint_policy": lambda p, b: jax.checkpoint(
        lambda e, w: jnp.sin(e[b["ids"]] @ w), policy=jax.checkpoint_policies.dots_saveable
    )(p["emb"], p["w"]),
    "scan": _in_scan,
    "scan_counter": _in_scan_counter,
    "scan_of_checkpoint": functools.partial(_in_scan, wrap=jax.checkpoint),
    "checkpoint_of_scan": lambda p, b: jax.checkpoint(_in_scan)(p, b),
    "cond": _in_cond,
    "switch_in_scan": _in_switch_in_scan,
    "stacked_columns": lambda p, b: jnp.stack([p["emb"][:, 0], 2 * p["emb"][:, 1]], axis=1)[b["ids"]].repeat(2, -1),
    "unstacked_columns": lambda p, b: jnp.stack([c[b["ids"]] for c in jnp.unstack(p["emb"], axis=1)], -1),
    "split_columns": lambda p, b: jnp.concatenate([c[b["ids"]] for c in jnp.split(p["emb"], 2, axis=1)[::-1]], -1),
    "reversed_columns": lambda p, b: p["emb"][:, ::-1][b["ids"]],
    "one_hot_matmul": lambda p, b: jax.nn.one_hot(b["ids"], ROWS, dtype=jnp.float32) @ p["emb"],
    "one_hot_of_few_bits": lambda p, b: jax.nn.one_hot(b["ids"], ROWS, dtype=jnp.bfloat16) @ p["emb"],
    "one_hot_by_hand": lambda p, b: (jnp.arange(ROWS) == b["ids"][..., None]).astype(jnp.float32) @ p["emb"],
    "one_hot_copied": lambda p, b: jnp.dot(jnp.array(b["ids"][..., None] == jnp.arange(ROWS), jnp.float32), p["emb"]),
    "one_hot_of_booleans": lambda p, b: jnp.einsum("ijv,vd->ijd", b["ids"][..., None] == jnp.arange(ROWS), p["emb"]),
    "one_hot_where": lambda p, b: jnp.where(b["ids"][..., None] == jnp.arange(ROWS), 1.0, 0.0) @ p["emb"],
    "one_hot_einsum": lambda p, b: jnp.moveaxis(jnp.einsum("vd,vij->dji", p["emb"], _one_hot_first(b["ids"])), 0, -1),
    "one_hot_transposed": lambda p, b: (p["emb"].T @ jax.nn.one_hot(b["ids"].ravel(), ROWS).T).T,
    "one_hot_scaled_table": lambda p, b: jax.nn.one_hot(b["ids"], ROWS) @ (2 * p["emb"].astype(jnp.bfloat16)) * 1.0,
    "one_hot_checkpoint": lambda p, b: jax.checkpoint(lambda e: jnp.sin(jax.nn.one_hot(b["ids"], ROWS) @ e))(p["emb"]),
    "one_hot_and_lookup": lambda p, b: jax.nn.one_hot(b["ids"], ROWS) @ p["emb"] + p["emb"][b["ids"]],
    # The loop reads the whole old table; the lookup beside it is lifted all the same.
    "read_in_while": _in_while,
}

_OUT_OF_RANGE_LOOKS: dict[str, Look] = {
    "out_of_range_index": look_plain,
    "get_promise_in_bounds": lambda p, b: p["emb"].at[b["ids"]].get(mode="promise_in_bounds"),
    "get_clip": lambda p, b: p["emb"].at[b["ids"]].get(mode="clip"),
    "get_fill": lambda p, b: jnp.nan_to_num(p["emb"].at[b["ids"]].get(mode="fill")),
    "get_fill_value": lambda p, b: p["emb"].at[b["ids"]].get(mode="fill", fill_value=0.5),
    "get_drop": lambda p, b: jnp.nan_to_num(p["emb"].at[b["ids"]].get(mode="drop")),
    "take_default": lambda p, b: jnp.nan_to_num(jnp.take(p["emb"], b["ids"], axis=0)),
    "take_clip": lambda p, b: jnp.take(p["emb"], b["ids"], axis=0, mode="clip"),
    "take_wrap": lambda p, b: jnp.take(p["emb"], b["ids"], axis=0, mode="wrap"),
    "one_hot": lambda p, b: jax.nn.one_hot(b["ids"], ROWS) @ p["emb"],
    "take_fill": lambda p, b: jnp.take(p["emb"], b["ids"], axis=0, mode="fill", fill_value=0.25),
}

DENSE_LOOKS: dict[str, Look] = {
    "one_hot_in_scan": lambda p, b: lax.scan(
        lambda _, i: (None, jax.nn.one_hot(i, ROWS) @ p["emb"]), None, b["ids"].ravel()
    )[1],
    # No numbers of 0 and 1: smoothed labels touch every row.
    "weighted_one_hot": lambda p, b: jnp.where(b["ids"][..., None] == jnp.arange(ROWS), 2.0, 0.0) @ p["emb"],
    "smoothed_one_hot": lambda p, b: (0.9 * jax.nn.one_hot(b["ids"], ROWS) + 0.1 / ROWS) @ p["emb"],
    "one_hot_of_floats": lambda p, b: (b["ids"][..., None] * 1.0 == jnp.arange(ROWS)).astype(jnp.float32) @ p["emb"],
    "tied_softmax": lambda p, b: jax.nn.softmax(p["emb"][b["ids"]] @ p["emb"].T)[..., :WIDTH],
    "decode_feedback": _decode,
    "ids_from_own_rows": lambda p, b: p["emb"][jnp.argmax(p["emb"][b["ids"]], -1)],
    "nearest_row": lambda p, b: p["emb"][jnp.argmax(p["emb"][b["ids"]] @ p["emb"].T, -1)],
    "sorted_rows": lambda p, b: jnp.sort(p["emb"], axis=0)[b["ids"]],
    "cumsum_rows": lambda p, b: jnp.cumsum(p["emb"], axis=0)[b["ids"]],
    "centred_rows": lambda p, b: (p["emb"] - p["emb"].mean(axis=0))[b["ids"]],
    "softmax_over_rows": lambda p, b: jax.nn.softmax(p["emb"], axis=0)[b["ids"]],
    # A branch needs all rows, and so then does the cond.
    "softmax_in_cond": lambda p, b: lax.cond(
        b["ids"].sum() % 2 == 0, lambda: p["emb"][b["ids"]], lambda: jax.nn.softmax(p["emb"], axis=0)[b["ids"]]
    ),
}

# --- ids: ranks, dtypes, ranges -------------------------------------------------------------------


def _keyed(i: int) -> dict[str, Any]:
    return {"key": jax.random.key(i)}


def _uniform(low: int, high: int, shape: tuple[int, ...] = IDS) -> Batches:
    return lambda i: {"ids": np.random.default_rng(i).integers(low, high, shape, np.int32)}


def _sum_of_vmapped(p: Params, b: Batch) -> jax.Array:
    return jnp.ones((WIDTH,), jnp.float32) + jax.vmap(lambda i: p["emb"][i])(b["ids"]).sum(axis=0)


def _sum_of_indexed(p: Params, b: Batch) -> jax.Array:
    return jnp.ones((WIDTH,), jnp.float32) + p["emb"][b["ids"]].sum(axis=0)


def _random_ids(p: Params, b: Batch) -> jax.Array:
    ids = jax.random.randint(b["key"], (3,), 0, ROWS, jnp.int32)
    return p["emb"][b["ids"]] + p["emb"][ids].mean(axis=0)


def _row_dropout(p: Params, b: Batch) -> jax.Array:
    return (p["emb"] * jax.random.bernoulli(b["key"], 0.5, (ROWS, 1)))[b["ids"]]


ID_CASES: dict[str, Callable[[], Case]] = {
    **{
        f"ids_rank_{len(shape)}": functools.partial(table_case, batches=ids_batches(shape))
        for shape in ((), (6,), (6, 5), (2, 3, 4))
    },
    # int64 are int32 unless x64 is enabled.
    **{
        f"ids_{np.dtype(dtype).name}": functools.partial(table_case, batches=ids_batches(dtype=dtype))
        for dtype in (np.uint8, np.int8, np.int16, np.uint32, np.int64)
    },
    # Here the ids' dtype can't hold the number of rows, or the one after it.
    "ids_uint8_300_rows": lambda: table_case(
        params=make_params(emb=(300, WIDTH)), batches=ids_batches(rows=256, dtype=np.uint8)
    ),
    "ids_int8_127_rows": lambda: table_case(
        params=make_params(emb=(127, WIDTH)), batches=ids_batches(rows=127, dtype=np.int8)
    ),
    "ids_none": lambda: table_case(_sum_of_vmapped, batches=ids_batches((0,))),
    "ids_more_than_rows": lambda: table_case(batches=_uniform(0, ROWS, (6, ROWS))),
    "ids_all_equal": lambda: table_case(batches=lambda i: {"ids": np.full(IDS, 3 + i, np.int32)}),
    "ids_negative": lambda: table_case(batches=_uniform(-ROWS, 0)),
    "ids_random": lambda: table_case(_random_ids, batches=ids_batches(more=_keyed)),
    "row_dropout": lambda: table_case(_row_dropout, batches=ids_batches(more=_keyed)),
    **{
        name: functools.partial(table_case, look, batches=_uniform(-ROWS - 20, ROWS + 20))
        for name, look in _OUT_OF_RANGE_LOOKS.items()
    },
}

DENSE_ID_CASES: dict[str, Callable[[], Case]] = {
    # JAX makes no gather of an index by no ids, so that nothing shows that this is a table.
    "ids_none_no_gather": lambda: table_case(_sum_of_indexed, batches=ids_batches((0,))),
}

# --- tables: several of them, shapes, coincidences of sizes ---------------------------------------


def _emb_and_other(p: Params, b: Batch) -> jax.Array:
    return p["emb"][b["ids"]] * p["other"][b["ids"] % 11]


def _table_and_bias(p: Params, b: Batch) -> jax.Array:
    return p["emb"][b["ids"]] + p["bias"][b["ids"]][..., None]


def _rank_3(p: Params, b: Batch) -> jax.Array:
    return p["emb"][b["ids"]].reshape(*IDS, WIDTH)


def _ids_from_other(p: Params, b: Batch) -> jax.Array:
    """The ids of one table come from the rows of another, which is no obstacle to either."""
    return p["emb"][b["ids"]] + p["other"][jnp.argmax(p["emb"][b["ids"]], -1)]


def _one_tied(p: Params, b: Batch) -> jax.Array:
    """`emb` is tied to a full softmax; `other` is not, and must be lifted all the same."""
    return jax.nn.softmax(p["emb"][b["ids"]] @ p["emb"].T)[..., :WIDTH] + p["other"][b["ids"]]


def _square(n: int, shape: tuple[int, ...]) -> Case:
    return table_case(params=make_params(emb=(n, WIDTH)), batches=ids_batches(shape, rows=n))


TABLE_CASES: dict[str, Callable[[], Case]] = {
    "several_tables": lambda: table_case(
        _emb_and_other, params=make_params(emb=(ROWS, 4), other=(23, 4)), tables=("emb", "other")
    ),
    "equal_rows": lambda: table_case(
        _emb_and_other, params=make_params(emb=(ROWS, 4), other=(ROWS, 4)), tables=("emb", "other")
    ),
    "shared_ids": lambda: table_case(
        _table_and_bias, params=make_params(emb=(ROWS, 4), bias=(ROWS,)), tables=("bias", "emb")
    ),
    "ids_from_other_table": lambda: table_case(
        _ids_from_other, params=make_params(emb=(ROWS, 4), other=(ROWS, 4)), tables=("emb", "other")
    ),
    "one_of_two_tied": lambda: table_case(
        _one_tied, params=make_params(emb=(ROWS, 4), other=(ROWS, 4)), tables=("other",)
    ),
    "rows_equal_width": lambda: _square(WIDTH, IDS),
    "rows_equal_batch": lambda: _square(6, (6, 5)),
    "rows_equal_ids": lambda: _square(30, (6, 5)),
    "rows_width_batch_equal": lambda: _square(WIDTH, (WIDTH, WIDTH)),
    "rows_of_rank_1": lambda: table_case(
        lambda p, b: jnp.outer(p["emb"][b["ids"].ravel()], jnp.arange(1.0, 5.0, dtype=jnp.float32)),
        params=make_params(emb=(ROWS,)),
    ),
    "rows_of_rank_3": lambda: table_case(_rank_3, params=make_params(emb=(ROWS, 2, 2))),
    "columns_as_rows": lambda: table_case(
        lambda p, b: jnp.moveaxis(jnp.take(p["emb"], b["ids"], axis=1, mode="clip"), 0, -1),
        params=make_params(emb=(WIDTH, ROWS)),
    ),
}
