"""Lookups that are followed: by ids that depend on rows of the table itself, though which rows may be meant is known
before, behind reshapes that split rows or merge them evenly, and where other rows are joined to the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.ir.plan import TablePlan

ROWS, WIDTH, BATCH, CANDIDATES = 640, 6, 16, 24


def state_of() -> Any:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH))) for name in ("table", "users")}


def batch_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    batch = {name: rng.integers(-3, ROWS, BATCH) for name in ("ids", "next", "users")}
    batch |= {"candidates": rng.integers(-3, ROWS, (BATCH, CANDIDATES)), "shared": rng.integers(-3, ROWS, CANDIDATES)}
    return {**batch, "reward": rng.normal(size=BATCH), "pick": rng.integers(-9, 2 * CANDIDATES, BATCH)}


def trained(name: str, rtol: float, **options: Any) -> TablePlan:
    """Trains three steps, planned and plain, compares what they return, and returns the plan of the table."""
    step: Any = autopar.parallelize(STEPS[name], state_argnums=0, **options)
    plain = jax.jit(STEPS[name])
    state, wanted = state_of(), state_of()
    for seed in range(3):
        state, loss = step(state, batch_of(seed))
        wanted, other = plain(wanted, batch_of(seed))
        np.testing.assert_allclose(loss, other, rtol=rtol)
    found = autopar.materialize(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=rtol), found, wanted)
    return step.plan.table("table")


def _moved(state: Any, table: Any, loss: Any) -> Any:
    return {**state, "table": table}, loss


def q_learning(state: Any, batch: Any) -> Any:
    """The best action in the next state: its column follows from the row."""
    q = state["table"]
    actions = jnp.argmax(q[batch["ids"]] + batch["reward"][:, None], -1)
    target = batch["reward"] + 0.9 * q[batch["next"], jnp.argmax(q[batch["next"]], -1)]
    error = target - q[batch["ids"], actions]
    return _moved(state, q.at[batch["ids"], actions].add(0.1 * error), jnp.square(error).mean())


def double_q(state: Any, batch: Any) -> Any:
    """Actions that one table prefers, valued by another."""
    q, target = state["table"], state["users"]
    best = jnp.argmax(q[batch["next"]], -1)

    def loss_fn(q: Any) -> Any:
        error = batch["reward"] + 0.9 * target[batch["next"], best] - q[batch["ids"], best]
        return jnp.square(error).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(q)
    return {"table": q - 0.1 * gradient, "users": target.at[batch["users"], best].add(0.1)}, loss


def _in_turns(step: Any, turns: int) -> Any:
    """A few train steps, each of a part of the batch, in the user's own loop."""

    def steps(state: Any, batch: Any) -> Any:
        parts = {k: x.reshape(turns, -1, *x.shape[1:]) for k, x in batch.items() if k != "shared"}
        state, losses = jax.lax.scan(step, state, parts)
        return state, losses.sum()

    return steps


def _q_of_rows(state: Any, batch: Any) -> Any:
    """One transition; the best action of the next state is looked up in a checkpoint, or a branch."""
    q, (row,), (following,) = state["table"], batch["ids"], batch["next"]
    value = jax.checkpoint(lambda q: q[following, jnp.argmax(q[following])])(q)
    value = jax.lax.cond(batch["reward"][0] > 0, lambda: value, lambda: q[following, jnp.argmin(q[following])])
    action = jnp.argmax(q[row])
    error = batch["reward"][0] + 0.9 * value - q[row, action]
    return _moved(state, q.at[row, action].add(0.1 * error), error)


def _q_by_gradient(state: Any, batch: Any) -> Any:
    """One transition, by the gradient of one element."""
    (row,), (following,), (reward,) = batch["ids"], batch["next"], batch["reward"]

    def loss_fn(q: Any) -> Any:
        value = jax.lax.stop_gradient(q[following, jnp.argmax(q[following])])
        return jnp.square(reward + 0.9 * value - q[row, jnp.argmax(q[row])])

    loss, gradient = jax.value_and_grad(loss_fn)(state["table"])
    return _moved(state, state["table"] - 0.1 * gradient, loss)


def _hard_negatives(state: Any, batch: Any, candidates: Any, **mode: Any) -> Any:
    def loss_fn(state: Any) -> Any:
        table, users = state["table"], state["users"][batch["users"]]
        among = table.at[candidates].get(**mode)
        scores = jnp.einsum("bd,...cd->bc" if candidates.ndim == 1 else "bd,bcd->bc", users, among)
        hardest = jax.lax.top_k(jax.lax.stop_gradient(scores), 3)[1]
        ids = candidates[hardest] if candidates.ndim == 1 else jnp.take_along_axis(candidates, hardest, 1)
        wrong = jnp.einsum("bd,bkd->bk", users, table.at[ids].get(**mode))
        return jax.nn.softplus(wrong).mean() - (users * table[batch["ids"]]).sum(-1).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), loss


def one_of_two(state: Any, batch: Any) -> Any:
    """Rows of the table that the batch names."""

    def loss_fn(state: Any) -> Any:
        both = jnp.stack([state["table"], state["users"]])
        return jnp.square(both[batch["pick"][0] % 2][batch["ids"]]).sum()

    loss, gradient = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), loss


def shared_candidates(state: Any, batch: Any) -> Any:
    return _hard_negatives(state, batch, batch["shared"])


def own_candidates(state: Any, batch: Any) -> Any:
    return _hard_negatives(state, batch, batch["candidates"])


def clipped_candidates(state: Any, batch: Any) -> Any:
    return _hard_negatives(state, batch, batch["shared"] * 2, mode="clip")


def _picked(mode: str) -> Any:
    """Picks that may be out of range, as no row that is known: of a scatter, of what follows from a pick."""

    def step(state: Any, batch: Any) -> Any:
        table = state["table"]
        pick = batch["pick"] + (table[batch["ids"]].sum(-1) > 0)
        ids = (batch["shared"].at[pick].get(mode=mode) + 1) % (ROWS + 2)
        table = table.at[ids].add(0.5 * table.at[ids].get(mode=mode), mode="drop")
        return _moved(state, table, table[batch["ids"]].sum())

    return step


def _reshaped(look: Any) -> Any:
    """A train step of what is looked up in a reshaped table."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(table: Any) -> Any:
            return jnp.square(look(table, batch["ids"]) - 1).mean()

        loss, gradient = jax.value_and_grad(loss_fn)(state["table"])
        return _moved(state, state["table"] - 0.1 * gradient, loss)

    return step


def _in_groups(table: Any) -> Any:
    return table.reshape(20, 32, WIDTH)


def _scaled_and_twice(table: Any, ids: Any) -> Any:
    halved = -_in_groups(table) / 2
    return halved[ids // 32, ids % 32] * halved[ids // 40, ids.astype(jnp.int16) % 7]


def _written(state: Any, batch: Any) -> Any:
    table, ids = state["table"], batch["ids"]
    table = _in_groups(table).at[ids // 32, ids % 32].add(table[ids]).reshape(ROWS, WIDTH)
    table = _in_groups(table).at[ids // 32, ids % 40].max(1.0, mode="drop").reshape(ROWS, WIDTH)
    return _moved(state, table, table[batch["next"]].sum())


def _in_a_loop(table: Any, ids: Any) -> Any:
    def turn(total: Any, i: Any) -> Any:
        return total + _in_groups(table)[i // 32, i % 32] * grouped[i // 40, i % 9], grouped[i // 32, i % 32, 1]

    grouped = jnp.tanh(_in_groups(table))
    return jax.lax.scan(turn, jnp.zeros(WIDTH), ids)


def _carried(table: Any, ids: Any) -> Any:
    """A reshaped table that a loop changes, and another array of this shape, which is no table."""

    def turn(carry: Any, i: Any) -> Any:
        grouped, other = carry
        row = grouped[i // 32, i % 32]
        return (grouped.at[i // 32, i % 32].add(jnp.sin(row)), jnp.cos(other) + i), row

    grouped = _in_groups(table)
    (grouped, other), rows = jax.lax.scan(turn, (grouped, jnp.zeros_like(grouped)), ids)
    return rows + grouped[ids // 32, ids % 32] + other[0, 0]


def _in_a_branch(table: Any, ids: Any) -> Any:
    grouped = _in_groups(table)
    branches = [
        lambda g: g[ids // 32, ids % 32],
        lambda g: g[ids // 40, ids % 7] * 2,
        lambda g: jnp.zeros((BATCH, WIDTH)),
    ]
    looked_up = jax.lax.switch(ids[0] % 3, branches, grouped)
    return looked_up + jax.checkpoint(lambda g: jnp.sin(g[ids // 32, ids % 32]))(grouped)


def _in_train_steps(state: Any, batch: Any) -> Any:
    step = _reshaped(lambda t, i: _in_groups(t)[i // 32, i % 32])
    ids = batch["ids"].reshape(4, -1)
    state, losses = jax.lax.scan(lambda s, i: step(s, {"ids": i}), state, ids)
    return jax.lax.scan(lambda s, i: step(s, {"ids": i}), state, ids)[0], losses.sum()


def _zeros_written(state: Any, batch: Any) -> Any:
    """A gradient that is added to reshaped zeros."""
    table, ids = state["table"], batch["ids"]
    gradient = jnp.zeros(ROWS * WIDTH).reshape(ROWS, WIDTH).at[ids].add(table[ids])
    return _moved(state, table - 0.1 * gradient, table[batch["next"]].sum())


RESHAPED: Mapping[str, Any] = {
    "rows in groups": _reshaped(lambda t, i: _in_groups(t)[i // 32, i % 32]),
    "rows in groups, filled": _reshaped(lambda t, i: _in_groups(t).at[i // 30, i % 40].get(mode="fill", fill_value=2)),
    "rows in groups, clipped": _reshaped(lambda t, i: _in_groups(t).at[i // 30, i % 40].get(mode="clip")),
    "rows of all groups": _reshaped(lambda t, i: _in_groups(t)[:, i % 32]),
    "groups": _reshaped(lambda t, i: _in_groups(t)[i // 400]),
    "halves": _reshaped(lambda t, i: t.reshape(2 * ROWS, WIDTH // 2)[2 * i[:, None] + jnp.arange(2)]),
    "pairs": _reshaped(lambda t, i: t.reshape(ROWS // 2, 2 * WIDTH)[i // 2]),
    "pairs, filled": _reshaped(lambda t, i: t.reshape(ROWS // 2, 2 * WIDTH).at[i].get(mode="fill", fill_value=-2)),
    "elements": _reshaped(lambda t, i: t.reshape(-1)[i * WIDTH + 1]),
    "groups of groups": _reshaped(lambda t, i: _in_groups(t).reshape(4, 5, 32, WIDTH)[i // 200, 1, i % 32]),
    "a column of groups": _reshaped(lambda t, i: t.reshape(20, 32, 3, 2)[:, i % 32, 1]),
    "scaled, and twice": _reshaped(_scaled_and_twice),
    "written": _written,
    "one row": _reshaped(lambda t, i: _in_groups(t)[i[0] // 32, i[1] % 32] * _in_groups(t)[i[2] // 32]),
    "in a loop": _reshaped(lambda t, i: jnp.concatenate([x.ravel() for x in _in_a_loop(t, i)])),
    "carried": _reshaped(_carried),
    "in a branch": _reshaped(_in_a_branch),
    "in train steps": _in_train_steps,
    "largest columns of groups": _reshaped(
        lambda t, i: _in_groups(t)[i // 32, i % 32, jnp.argmax(_in_groups(t)[i // 32, i % 32], -1)]
    ),
    "columns of groups, filled": _reshaped(
        lambda t, i: _in_groups(t).at[i // 30, i % 40, i % 8 - 1].get(mode="fill", fill_value=-2)
    ),
    "columns of groups, dropped": lambda state, batch: _moved(
        state,
        _in_groups(state["table"]).at[(i := batch["ids"]) // 30, i % 40, i % 8 - 1].add(0.5).reshape(ROWS, WIDTH),
        0.0,
    ),
    "side by side": _reshaped(lambda t, i: jax.vmap(lambda own, i: own[i])(t.reshape(4, 160, WIDTH), i.reshape(4, -1))),
    "side by side, filled": _reshaped(
        lambda t, i: jax.vmap(lambda own, i: own.at[i].get(mode="fill", fill_value=2.0))(
            t.reshape(4, 160, WIDTH), i.reshape(4, -1) // 3
        )
    ),
    "side by side, a column": _reshaped(
        lambda t, i: jnp.take_along_axis(t.reshape(4, 160, 2, WIDTH // 2), i.reshape(4, -1, 1, 1), 1, mode="clip")
    ),
    "reshaped zeros": _zeros_written,
}


def _joined_tables(state: Any, batch: Any) -> Any:
    def loss_fn(state: Any) -> Any:
        both = jnp.concatenate([state["table"] * 2, state["users"]]) / 3
        own = both[(batch["ids"] * 2)] * jax.lax.stop_gradient(both)[batch["next"]]
        return jnp.square(own + both.at[batch["users"] + ROWS].get(mode="clip")).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), loss


def _padding(ids: Any) -> Any:
    """Ids of which some are of padding, or out of range."""
    return jnp.where(jnp.arange(BATCH) % 3 == 0, ROWS - 1 + jnp.arange(BATCH) % 5, ids)


def _behind(table: Any) -> Any:
    return jnp.concatenate([table, table[:1] * 0, jnp.ones((2, WIDTH))])


JOINED: Mapping[str, Any] = {
    "zeros behind": _reshaped(lambda t, i: _behind(t)[_padding(i)]),
    "zeros behind, filled": _reshaped(lambda t, i: _behind(t).at[_padding(i)].get(mode="fill", fill_value=3)),
    "zeros behind, clipped": _reshaped(lambda t, i: _behind(t).at[_padding(i)].get(mode="clip")),
    "zeros around": _reshaped(lambda t, i: jnp.pad(t, ((1, 2), (0, 0)))[_padding(i)] + t[i]),
    "a row ahead, and columns": _reshaped(
        lambda t, i: (
            jnp.pad(t, ((1, 0), (0, 0)), constant_values=2).at[_padding(i), i % 8 - 1].get(mode="fill", fill_value=5)
        )
    ),
    "zeros behind, in train steps": lambda state, batch: jax.lax.scan(
        lambda s, i: JOINED["zeros behind"](s, {"ids": i}), state, jnp.stack([batch["ids"], batch["next"]])
    ),
    "two tables": _joined_tables,
}
STEPS: Mapping[str, Any] = {
    **RESHAPED,
    **JOINED,
    "Q-learning": q_learning,
    "double Q-learning": double_q,
    "Q-learning in turns": _in_turns(q_learning, 4),
    "double Q-learning in turns": _in_turns(double_q, 2),
    "Q-learning, one by one": _in_turns(_q_of_rows, BATCH),
    "Q-learning by gradient, one by one": _in_turns(_q_by_gradient, BATCH),
    "one of two tables": one_of_two,
    "shared candidates": shared_candidates,
    "candidates of each example": own_candidates,
    "candidates, clipped": clipped_candidates,
    **{f"picks, {mode}": _picked(mode) for mode in ("fill", "clip", "promise_in_bounds")},
}
