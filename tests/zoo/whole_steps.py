"""What a step does around the lookup: with the loss, the gradients, the parameters, the whole state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.zoo.case import Case, Tree, concrete
from tests.zoo.single import (
    ROWS,
    WIDTH,
    Batches,
    Updated,
    clipped_adagrad,
    ids_batches,
    look_plain,
    make_params,
    objective,
    table_case,
)


def _reporting(report: Callable[[Updated], dict[str, Any]]) -> Callable[[], Case]:
    return lambda: table_case(report=lambda updated: {"loss": updated.loss, **report(updated)})


def select_state(batches: Batches | None = None) -> Case:
    """The whole new state is taken only if the loss is finite, and the batch isn't marked as bad."""
    case = table_case(batches=batches)

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        new, metrics = case.step(state, batch)
        ok = jnp.isfinite(metrics["loss"]) & batch.get("good", True)
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, state), {**metrics, "ok": ok}

    return dataclasses.replace(case, step=step)


def loss_scaled() -> Case:
    """Dynamic loss scaling: gradients of a scaled loss, all tested for finiteness, then selected."""
    tx, params = clipped_adagrad(), make_params(emb=(ROWS, WIDTH))
    state = {"params": params, "opt": tx.init(params), "scale": jnp.full((), 64.0, jnp.float32)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        old, scale = state["params"], state["scale"]
        loss, grads = jax.value_and_grad(lambda p: scale * objective(look_plain, p, batch))(old)
        grads = jax.tree.map(lambda g: g / scale, grads)
        ok = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt = tx.update(grads, state["opt"], old)
        new = {"params": optax.apply_updates(old, updates), "opt": opt}
        kept = {"params": old, "opt": state["opt"]}
        new = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, kept)
        return {**new, "scale": jnp.where(ok, scale * 2, scale / 2)}, {"loss": loss / scale}

    return Case(step, concrete(state), ids_batches(), ("params/emb",))


def accumulated() -> Case:
    """Gradients summed over three microbatches in a scan whose carry has the table's shape."""
    tx, params = clipped_adagrad(), make_params(emb=(ROWS, WIDTH))

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        params, opt = state

        def body(total: Tree, ids: jax.Array) -> tuple[Tree, jax.Array]:
            loss, grads = jax.value_and_grad(functools.partial(objective, look_plain))(params, {"ids": ids})
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = lax.scan(body, zeros, batch["ids"].reshape(3, 2, 5))
        grads = jax.tree.map(lambda g: g / 3, grads)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), losses.mean()

    return Case(step, concrete((params, tx.init(params))), ids_batches(), ("0/emb",))


def steps_in_scan() -> Case:
    """Three whole train steps in a scan: each reads the rows that the one before it wrote."""
    case = table_case()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return lax.scan(case.step, state, {"ids": batch["ids"].reshape(3, 2, 5)})

    return dataclasses.replace(case, step=step)


def steps_in_loop() -> Case:
    """Three whole train steps in a fori_loop, which is a scan, its bounds being known while tracing."""
    case = table_case()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        ids = batch["ids"].reshape(3, 2, 5)

        def body(k: Any, carry: Any) -> Any:
            state, total = carry
            state, metrics = case.step(state, {"ids": ids[k]})
            return state, total + metrics["loss"]

        state, total = lax.fori_loop(0, 3, body, (state, jnp.zeros((), jnp.float32)))
        return state, {"loss": total}

    return dataclasses.replace(case, step=step)


def steps_while() -> Case:
    """Whole train steps until the loss is small, or the batches end."""
    case = table_case()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        ids = batch["ids"].reshape(3, 2, 5)

        def body(carry: Any) -> Any:
            k, state, _ = carry
            state, metrics = case.step(state, {"ids": ids[k]})
            return k + 1, state, metrics["loss"]

        start = jnp.zeros((), jnp.int32), state, jnp.full((), jnp.inf, jnp.float32)
        _, state, loss = lax.while_loop(lambda c: (c[0] < 3) & (c[2] > 1e-3), body, start)
        return state, {"loss": loss}

    return dataclasses.replace(case, step=step)


def step_in_cond() -> Case:
    """The step is skipped on some batches by a cond over the whole state."""
    case = table_case()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        skipped = {"loss": jnp.zeros((), jnp.float32), "grad_norm": jnp.zeros((), jnp.float32)}
        return lax.cond(batch["ids"].sum() % 2 != 0, lambda: case.step(state, batch), lambda: (state, skipped))

    return dataclasses.replace(case, step=step)


def inner_step() -> Case:
    """Two SGD steps in one: the second looks up in the table that the first has just written."""
    params = make_params(emb=(ROWS, WIDTH))

    def step(params: Tree, batch: Tree) -> tuple[Tree, Tree]:
        def descend(params: Tree, ids: jax.Array) -> tuple[Tree, jax.Array]:
            loss, grads = jax.value_and_grad(functools.partial(objective, look_plain))(params, {"ids": ids})
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        inner, first = descend(params, batch["ids"])
        outer, second = descend(inner, batch["ids"] % 7 + 1)
        return outer, {"losses": jnp.stack([first, second])}

    return Case(step, params, ids_batches(), ("emb",))


def list_state() -> Case:
    """The state is a bare list of arrays; the optimizer is written out."""
    initial = make_params(emb=(ROWS, WIDTH))

    def step(state: list[jax.Array], batch: Tree) -> tuple[list[jax.Array], jax.Array]:
        def loss_fn(leaves: list[jax.Array]) -> jax.Array:
            return objective(look_plain, {"emb": leaves[0], "w": leaves[1]}, batch)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return [p - 0.1 * g for p, g in zip(state, grads, strict=True)], loss

    return Case(step, [initial["emb"], initial["w"]], ids_batches(), ("0",))


def _averaged(names: tuple[str, ...], copy: bool) -> Case:
    case = table_case()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        new, metrics = case.step({k: v for k, v in state.items() if k != "ema"}, batch)
        averages = {k: 0.9 * v + 0.1 * new["params"][k] for k, v in state["ema"].items()}
        return {**new, "ema": averages}, metrics

    averages = {name: case.state["params"][name] for name in names}
    state = {**case.state, "ema": concrete(averages) if copy else averages}
    return dataclasses.replace(case, step=step, state=state)


def max_norm() -> Case:
    """Every row of the new table is projected into a ball, touched or not."""
    case = table_case()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        new, metrics = case.step(state, batch)
        emb = new["params"]["emb"]
        norms = jnp.sqrt(jnp.sum(emb**2, axis=1, keepdims=True))
        params = {**new["params"], "emb": emb * jnp.minimum(1.0, 1.5 / norms)}
        return {**new, "params": params}, metrics

    return dataclasses.replace(case, step=step)


def touched_mask() -> Case:
    """Marks the rows that were looked up at any time, with a mask made anew in each step."""
    case = table_case()
    state = {**case.state, "seen": jnp.zeros((ROWS,), bool), "unseen": jnp.ones((ROWS,), bool)}

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        seen, unseen = state.pop("seen"), state.pop("unseen")
        new, metrics = case.step(state, batch)
        touched = jnp.zeros((ROWS,), bool).at[batch["ids"]].set(True)
        emb = jnp.where(touched[:, None], jnp.clip(new["params"]["emb"], -2.0, 2.0), new["params"]["emb"])
        new = {**new, "params": {**new["params"], "emb": emb}}
        return {**new, "seen": seen | touched, "unseen": unseen & ~touched}, metrics

    return dataclasses.replace(case, step=lambda s, b: step(dict(s), b), state=state)


#: A second write of a table in its step, at ids of which some may lie beyond the table.
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda table, ids: table,
    "set": lambda table, ids: table.at[ids].set(0.25),
    "add": lambda table, ids: table.at[ids].add(0.25),
    "max": lambda table, ids: table.at[ids].max(0.25),
    "multiply": lambda table, ids: table.at[ids].multiply(0.5),
    "drop": lambda table, ids: table.at[ids + ROWS // 2].set(0.25, mode="drop"),
    # By numbers of at least 1: an id that occurs often is divided by as often, and sines of 1e8 are nothing to compare.
    "divide": lambda table, ids: table.at[ids].divide(1 + jnp.linalg.norm(table[ids], axis=-1, keepdims=True)),
}


def results_by_row(table: Any) -> dict[str, Any]:
    """Results that have a value for each row of a table."""
    return {
        "twice": table * 2,
        "same": table + 0.0,
        "sines": jnp.sin(table).sum(1),
        "norms": jnp.linalg.norm(table, axis=1),
        "largest": jnp.argmax(table, axis=1),
    }


def written_again() -> Case:
    """Tables that are written once more after their update, each in another way; results with a value for each row."""
    params = make_params(**dict.fromkeys(WRITES, (ROWS, WIDTH)))

    def step(params: Tree, batch: Tree) -> tuple[Tree, Tree]:
        ids = batch["ids"].ravel()

        def loss_fn(params: Tree) -> jax.Array:
            return jnp.mean(jnp.tanh(sum(params[name][ids] for name in WRITES) @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        new |= {name: write(new[name], ids) for name, write in WRITES.items()}
        return new, {"loss": loss} | {name: results_by_row(new[name]) for name in WRITES}

    return Case(step, params, ids_batches(), tuple(WRITES))


STEPS: dict[str, Callable[[], Case]] = {
    "select_state": select_state,
    "select_state_skipping": lambda: select_state(ids_batches(more=lambda i: {"good": np.bool_(i != 1)})),
    "loss_scaled": loss_scaled,
    "accumulated": accumulated,
    "steps_in_scan": steps_in_scan,
    "steps_in_fori_loop": steps_in_loop,
    "inner_step": inner_step,
    "written_again": written_again,
    "list_state": list_state,
    "step_in_cond": step_in_cond,
    "touched_mask": touched_mask,
    "dense_ema": lambda: _averaged(("w",), copy=True),
    # The EMA's leaf starts as the very buffer of the parameter: donate neither without a copy.
    "dense_ema_by_reference": lambda: _averaged(("w",), copy=False),
    "l2_touched_rows": lambda: table_case(penalty=lambda p, b: 0.1 * jnp.mean(look_plain(p, b) ** 2)),
    "report_nothing": lambda: table_case(report=lambda u: {}),
    "report_old_norm": _reporting(lambda u: {"norm": optax.tree.norm(u.old)}),
    "report_new_norm": _reporting(lambda u: {"norm": optax.tree.norm(u.new)}),
    # It scatters by what a loop makes of rows.
    "report_old_histogram": _reporting(lambda u: {"histogram": jnp.histogram(u.old["emb"], 4)[0]}),
    "report_grad": _reporting(lambda u: {"grad": u.grads["emb"]}),
    "report_updates": _reporting(lambda u: {"updates": u.updates}),
    "report_update_norm": _reporting(lambda u: {"norm": optax.tree.norm(u.updates)}),
    "report_grad_max": _reporting(lambda u: {"max": jnp.abs(u.grads["emb"]).max()}),
    "report_grad_mean": _reporting(lambda u: {"mean": jnp.mean(u.grads["emb"] ** 2)}),
    "report_nonzero": _reporting(lambda u: {"nonzero": jnp.sum(u.grads["emb"] != 0)}),
}

DEFERRED_STEPS: dict[str, Callable[[], Case]] = {
    "weight_decay": lambda: table_case(tx=optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1))),
    "momentum": lambda: table_case(tx=optax.sgd(0.1, momentum=0.9)),
    "adam": lambda: table_case(tx=optax.adam(0.02)),
    "max_norm": max_norm,
    # The average moves on every row; it reads the updated table.
    "table_ema": lambda: _averaged(("emb", "w"), copy=True),
}

DENSE_STEPS: dict[str, Callable[[], Case]] = {
    "steps_while": steps_while,
    "l2_whole_table": lambda: table_case(penalty=lambda p, b: 1e-2 * jnp.sum(p["emb"] ** 2)),
}
