"""What depends on single rows is computed once for each (`passes/once_per_row.py`): the numbers are those of `jax.jit`,
and the products are as much smaller as they can be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import jax_compat
from autopar.measure.cluster import NAMED
from autopar.passes import once_per_row
from tests.support.entry_steps import (
    EXAMPLES,
    TOKENS,
    D,
    Loss,
    Params,
    V,
    bags,
    batch_of,
    filled,
    make_state,
    perceptron,
    step_of,
    tower,
    whole,
)
from tests.support.explained import explained
from tests.support.pairs import diagonal


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Products decide, however small they are; and float64, so that what is summed in another order is the same."""
    monkeypatch.setattr(once_per_row, "_MOVED", 0.0)
    with jax_compat.enable_x64():
        yield


def compared(loss: Loss, batches: list[Any] | None = None, state: Params | None = None, rtol: float = 1e-11) -> Any:
    """The planned step after a few batches, whose results were those of `jax.jit`."""
    planned = autopar.parallelize(step_of(loss), strategy=("ps", "hosts"))
    theirs = make_state() if state is None else state
    mine = jax.tree.map(jnp.copy, theirs)
    for batch in batches or [batch_of(k) for k in range(3)]:
        mine, value = planned(mine, batch)
        theirs, wanted = jax.jit(step_of(loss))(theirs, batch)
        for a, b in zip(jax.tree.leaves((mine, value)), jax.tree.leaves((theirs, wanted)), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    return planned


# --- what becomes by entries, and by how much ---


def flat(p: Params, batch: Any) -> jax.Array:
    made = perceptron(p, p["emb"][batch["ids"]].reshape(-1, D)).reshape(EXAMPLES, TOKENS, D)
    return jnp.mean(jnp.tanh(made) * batch["x"][..., None])


def turned(p: Params, batch: Any) -> jax.Array:
    """The ids' axes don't lead."""
    made = jnp.einsum("btd,dh->hbt", p["emb"][batch["ids"]], p["w1"])
    return jnp.mean(jnp.einsum("hbt,hd->dbt", jax.nn.gelu(made), p["w2"]) ** 2)


def normed(p: Params, batch: Any) -> jax.Array:
    """A row that is zero (as padding is) has no finite norm."""
    rows = p["emb"][batch["ids"]]
    rows = rows / jnp.sqrt(jnp.sum(rows**2, -1, keepdims=True))
    return jnp.mean(jax.nn.softmax(rows @ p["w1"], -1) @ p["w2"] * jnp.log(jnp.abs(rows)))


def checkpointed(p: Params, batch: Any) -> jax.Array:
    return jax.checkpoint(lambda p: whole(p, batch))(p)


def chained(p: Params, batch: Any) -> jax.Array:
    """More equations in a row than Python calls functions."""
    made = perceptron(p, p["emb"][batch["ids"]])
    scale = jnp.ones((EXAMPLES, TOKENS, D))
    for k in range(300):
        scale = scale * (1.001 if k % 2 else 0.999)
        made = made * 1.003 - 0.001 * made
    return jnp.mean((made * scale).sum(-1) * batch["x"])


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        (whole, 0.22),
        (tower, 0.22),
        (bags, 0.35),
        (filled, 0.25),
        (flat, 0.22),
        (turned, 0.22),
        (normed, 0.22),
        (checkpointed, 0.22),
        (chained, 0.22),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_products_are_of_distinct_rows(loss: Loss, most: float) -> None:
    planned = compared(loss)
    made = planned.latest.runner.once_per_row
    assert made is not None
    assert V / EXAMPLES / TOKENS < made.share < most


# --- what must stay by lookups ---


def dropped(p: Params, batch: Any) -> jax.Array:
    rows = p["emb"][batch["ids"]]
    kept = jax.random.bernoulli(batch["key"], 0.5, rows.shape)
    return jnp.mean(perceptron(p, jnp.where(kept, rows, 0)) ** 2)


def positioned(p: Params, batch: Any) -> jax.Array:
    return jnp.mean(perceptron(p, p["emb"][batch["ids"]] + p["pos"]) ** 2)


def closed_over(p: Params, batch: Any) -> jax.Array:
    constant = np.random.default_rng(5).normal(size=(EXAMPLES, TOKENS, D))
    return jnp.mean(perceptron(p, p["emb"][batch["ids"]] * constant) ** 2)


@pytest.mark.parametrize("loss", [dropped, positioned, closed_over], ids=lambda x: x.__name__)
def test_what_an_example_has_of_its_own(loss: Loss) -> None:
    planned = compared(loss)
    assert not planned.latest.runner.once_per_row


# --- the same numbers ---


def attention(p: Params, batch: Any) -> jax.Array:
    rows = p["emb"][batch["ids"]]
    scores = jnp.einsum("bth,bsh->bts", rows @ p["w1"], jnp.tanh(rows @ p["w1"]))
    return jnp.mean(jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), rows) ** 2)


def two_tables(p: Params, batch: Any) -> jax.Array:
    one, two = perceptron(p, p["emb"][batch["ids"]]), perceptron(p, p["other"][batch["more"]])
    return jnp.mean(jnp.sum(one * two, -1) * batch["x"])


def both_of_one(p: Params, batch: Any) -> jax.Array:
    """Two lookups in one table; one of them meets the other."""
    one, two = p["emb"][batch["ids"]] @ p["w1"], p["emb"][batch["more"]] @ p["w1"]
    return jnp.mean((one - two) ** 2) + jnp.mean(jnp.tanh(one) ** 4)


def same_ids(p: Params, batch: Any) -> jax.Array:
    return jnp.mean((p["emb"][batch["ids"]] @ p["w1"] - p["other"][batch["ids"]] @ p["w1"]) ** 2)


def shaped(p: Params, batch: Any) -> jax.Array:
    rows = p["emb"][batch["ids"]]
    some = jnp.cumsum(rows, -1)[..., 1:5, None].squeeze(-1)
    best = jnp.where(jnp.argmax(rows, -1)[..., None] > 2, rows.max(-1, keepdims=True), 1.5)
    made = jnp.broadcast_to(some[:, :, None], (EXAMPLES, TOKENS, 2, 4)) * best[..., None]
    return jnp.mean(jnp.einsum("btkd,dh->kbth", made, p["w1"][:4]).transpose(3, 1, 2, 0) ** 2)


def with_itself(p: Params, batch: Any) -> jax.Array:
    """Both operands of a product are the same value by entries."""
    rows = jnp.tanh(p["emb"][batch["ids"]] @ p["w1"])
    return jnp.mean(jnp.einsum("btd,bte->de", rows, rows) ** 2) / 100


def kept_for_later(p: Params, batch: Any) -> jax.Array:
    rows = p["emb"][batch["ids"]]
    made = jnp.minimum(rows @ p["w1"], 3.0) * (2.0 * jnp.ones((EXAMPLES, TOKENS, 1)) + 1)
    return jnp.mean((made - made.mean((0, 1))) ** 2) + jnp.mean(made / (1 + jnp.abs(batch["x"][..., None])))


@pytest.mark.parametrize(
    "loss",
    [attention, two_tables, both_of_one, same_ids, shaped, with_itself, kept_for_later],
    ids=lambda x: x.__name__,
)
def test_numbers(loss: Loss) -> None:
    compared(loss)


@pytest.mark.parametrize(("loss", "wrong"), diagonal([whole, tower, filled], [V, V + 4, 2**31 - 1, -V - 3]))
def test_ids_out_of_range(loss: Loss, wrong: int) -> None:
    """Looked up and dropped as plain JAX does it: the nearest row, or NaN for `jnp.take`."""
    batch = batch_of(0)
    batch["ids"][3, 2] = wrong
    compared(loss, [batch])


@pytest.mark.parametrize(("loss", "value"), diagonal([whole, tower], [np.nan, np.inf, -np.inf]))
def test_rows_that_are_not_finite(loss: Loss, value: float) -> None:
    for looked_up in (True, False):
        batch, state = batch_of(0), make_state()
        batch["ids"][batch["ids"] == 4] = 5
        state["emb"] = state["emb"].at[5 if looked_up else 4, 1].set(value)
        compared(loss, [batch], state)


@pytest.mark.parametrize(
    ("dtype", "loss"), diagonal({"f32": np.float32, "bf16": jnp.bfloat16, "f16": np.float16}, [whole, tower])
)
def test_other_dtypes(loss: Loss, dtype: Any) -> None:
    rtol = {np.float32: 3e-5, jnp.bfloat16: 0.1, np.float16: 0.02}[dtype]
    batches = [batch_of(k, np.dtype(dtype)) for k in range(2)]
    compared(loss, batches, make_state(dtype), rtol)


def test_microbatches() -> None:
    """A loop's own lookups are computed by rows where those are fewer than an iteration's lookups."""

    def loss(p: Params, batch: Any) -> jax.Array:
        halves = jax.tree.map(lambda x: x.reshape(2, EXAMPLES // 2, TOKENS), {k: batch[k] for k in ("ids", "x")})
        return jax.lax.map(lambda part: tower(p, part), halves).mean()

    planned = compared(loss)
    assert planned.latest.runner.once_per_row


def test_a_step_without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of rows take fewer rows, too."""
    monkeypatch.undo()
    planned = compared(lambda p, batch: jnp.mean(jnp.tanh(p["emb"][batch["ids"]]) ** 2))
    assert planned.latest.runner.once_per_row.share == 1


def test_bits_of_neighbouring_ids() -> None:
    """An elementwise equation by name that takes the last axis of the ids away."""

    def loss(p: Params, batch: Any) -> jax.Array:
        some = batch["ids"].reshape(-1, 2)
        bits = jax.lax.bitcast_convert_type(p["w1"].astype(jnp.float32).ravel()[some % 6], jnp.float64)
        made = perceptron(p, p["emb"][some]).sum(-1)
        joined = jax.lax.bitcast_convert_type(made.astype(jnp.float32), jnp.float64)
        return jnp.mean(made**2) + 0 * jnp.nan_to_num(jnp.mean(jnp.tanh(bits)) + jnp.mean(jnp.tanh(joined)))

    compared(loss)


def test_a_batch_of_distinct_ids_is_left_alone() -> None:
    batch = batch_of(0)
    batch["ids"] = np.arange(20, dtype=np.int32).reshape(4, 5)
    batch["x"] = batch["x"][:4]
    planned = compared(tower, [batch])
    assert not planned.latest.runner.once_per_row


def test_ids_that_meet_other_axes() -> None:
    """One example's rows are spread over all examples: their axes aren't those of the ids any more."""

    def loss(p: Params, batch: Any) -> jax.Array:
        rows = jnp.tile(p["emb"][batch["ids"][:1]], (1, 8, 1)) + 0 * p["emb"][batch["ids"]].sum()
        made = jax.lax.add(jax.lax.mul(rows, 2.0), jnp.zeros((EXAMPLES, TOKENS * 8, D)))
        return jnp.mean(perceptron(p, made).sum(-1) ** 2)

    compared(loss)


def test_what_explain_and_plans_say() -> None:
    """By the ids of the batch that they are given, before any step."""
    step, state = step_of(whole), make_state(np.float32)
    planned = autopar.parallelize(step, strategy=("ps", "hosts"))
    few, batch = batch_of(0, np.float32), batch_of(0, np.float32)
    few["ids"] %= 3
    assert f"{14 + 2} rows for {EXAMPLES * TOKENS} lookups" in explained(planned, state, few)
    batch["ids"] = (np.arange(EXAMPLES * TOKENS) % V).reshape(EXAMPLES, TOKENS).astype(np.int32)
    told = explained(planned, state, batch)
    assert f"{V + 2} rows for {EXAMPLES * TOKENS} lookups" in told
    cluster = NAMED["hosts-10gbe"].of(1, 1)
    work = [autopar.plan(planned, state, some, cluster=cluster).work.examples for some in (few, batch)]
    assert work[0] < work[1]
