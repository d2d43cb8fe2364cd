"""Bags of rows that owners add up, with tables on hosts: in whatever form, by every optimizer, and their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.backends.global_arrays import local
from autopar.cost.exchange import host_terms
from autopar.ir.plan import Plan
from autopar.ir.program import known
from autopar.mpi.bags import BagIds, add_up, ask_bags, spread
from autopar.mpi.machines import LeaderExchange, connect, exchange
from autopar.mpi.world import World
from autopar.passes.choosing import families
from tests.support.settings import set_options

HOSTS = ("ps", "hosts")
RANK, RANKS = jax.process_index(), jax.process_count()
EXAMPLES, LENGTH, ROWS = 12, 10, 200

Batch = Mapping[str, Any]
Form = Callable[[jax.Array, Batch], jax.Array]


def _halves(table: jax.Array, batch: Batch) -> jax.Array:
    rows = table[batch["ids"]]
    return rows[:, :4].sum(1) - 2 * rows[:, 4:].mean(1)


def _two_sums(table: jax.Array, batch: Batch) -> jax.Array:
    rows = table[batch["ids"]]
    return rows.sum(1) * (rows * batch["mask"][..., None]).sum(1)


#: Lookups that owners add up.
BAGS: Mapping[str, Form] = {
    "sum": lambda table, batch: table[batch["ids"]].sum(1),
    "mean": lambda table, batch: jnp.take(table, batch["ids"], axis=0).mean(1),
    "masked mean": lambda table, batch: (
        (table[batch["ids"]] * batch["mask"][..., None]).sum(1) / jnp.maximum(batch["mask"].sum(1, keepdims=True), 1)
    ),
    "where": lambda table, batch: jnp.where(batch["mask"][..., None] > 0, table[batch["ids"]], 0).sum(1),
    "where with 3": lambda table, batch: jnp.where(batch["mask"][..., None] > 0, table[batch["ids"]], 3).mean(1),
    "weights": lambda table, batch: (table[batch["ids"]] * batch["w"][..., None] / (2 + batch["w"][..., None])).sum(1),
    "product": lambda table, batch: jnp.einsum("bld,bl->bd", table[batch["ids"]], batch["w"]),
    "product, turned": lambda table, batch: jnp.einsum("bl,bld->db", batch["w"], table[batch["ids"]]).T,
    "out of range": lambda table, batch: table[batch["far"]].sum(1),
    "out of range, clipped": lambda table, batch: jnp.take(table, batch["far"], axis=0, mode="clip").sum(1),
    "out of range, filled": lambda table, batch: table.at[batch["far"]].get(mode="fill", fill_value=0.5).sum(1),
    "several axes": lambda table, batch: table[batch["ids"].reshape(-1, 2, LENGTH // 2)].sum(2).mean(1),
    "flat": lambda table, batch: table[batch["ids"].reshape(-1)].reshape(-1, LENGTH, table.shape[1]).sum(1),
    "scaled": lambda table, batch: (0.5 * table[batch["ids"]] / (2 + batch["w"][:, :1, None])).sum(1),
    "halves": _halves,
    "two sums": _two_sums,
    "beside single rows": lambda table, batch: table[batch["ids"]].sum(1) * table[batch["id"]],
}


def _of_segments(rows: jax.Array, batch: Batch, which: str = "bag") -> jax.Array:
    return jax.ops.segment_sum(rows, batch[which], EXAMPLES)


#: Those of any number of rows, each of which the batch puts into a bag, or into none. Ranks add them up, devices don't.
SEGMENTS: Mapping[str, Form] = {
    "segments": lambda table, batch: _of_segments(table[batch["words"]], batch),
    "segments in any order": lambda table, batch: _of_segments(table[batch["words"]], batch, "mixed"),
    "mean of segments": lambda table, batch: (
        _of_segments(table[batch["words"]], batch)
        / jnp.maximum(_of_segments(jnp.ones_like(batch["v"]), batch), 1)[:, None]
    ),
    "weighted segments": lambda table, batch: _of_segments(table[batch["words"]] * batch["v"][:, None], batch),
    "masked segments": lambda table, batch: _of_segments(
        jnp.where(batch["v"][:, None] > 0, table[batch["words"]], 0), batch, "mixed"
    ),
    "segments of ids out of range": lambda table, batch: _of_segments(
        batch["v"][:, None] * table.at[batch["far"].reshape(-1)].get(mode="fill", fill_value=0.5), batch, "mixed"
    ),
    "segments of two axes": lambda table, batch: (
        jnp.zeros((EXAMPLES, table.shape[1])).at[batch["mixed"].reshape(EXAMPLES, -1)].add(table[batch["ids"]])
    ),
    "segments of two counts": lambda table, batch: (
        jnp.concatenate([_of_segments(table[batch["words"]], batch)[:6], jnp.zeros((6, table.shape[1]))])
        + jnp.tanh(jax.ops.segment_sum(table[batch["words"]], batch["bag"], 6)).sum(0)
    ),
    "segments and bags": lambda table, batch: (
        _of_segments(table[batch["ids"].reshape(-1)], batch) * table[batch["ids"]].sum(1)
    ),
}


def _attention(table: jax.Array, batch: Batch) -> jax.Array:
    rows = table[batch["ids"]]
    return jnp.einsum("bld,bl->bd", rows, jax.nn.softmax(jax.lax.stop_gradient(rows).sum(2)))


#: Those whose rows a rank needs one by one.
OTHERS: Mapping[str, Form] = {
    "nonlinear": lambda table, batch: jnp.tanh(table[batch["ids"]]).sum(1),
    "by their own weights": _attention,
    "nothing": lambda table, batch: table[batch["ids"]][:, :0].sum(1) + 0 * batch["w"][:, :1],
    "sum over examples": lambda table, batch: table[batch["ids"]].sum(0).sum(0) + 0 * batch["w"][:, :1],
}


def _two_fills(table: jax.Array, batch: Batch) -> jax.Array:
    far = batch["far"]
    return table.at[far].get(mode="fill", fill_value=0.5).sum(1) + table.at[far].get(mode="fill", fill_value=2).sum(1)


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Returns ids, single ones, and those that may be out of range; a mask with empty bags, and weights; and ids of
    which each has a bag, or none, in order or not, with weights."""
    rng, other = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    lengths = rng.integers(0, LENGTH + 1, (EXAMPLES, 1))
    bags = other.integers(-1, EXAMPLES + 1, EXAMPLES * LENGTH).astype(np.int32)
    return {
        "words": other.integers(0, ROWS, EXAMPLES * LENGTH).astype(np.int32),
        "bag": np.sort(bags),
        "mixed": bags,
        "v": other.normal(size=EXAMPLES * LENGTH).astype(np.float32),
        "ids": rng.integers(0, ROWS, (EXAMPLES, LENGTH)).astype(np.int32),
        "far": rng.integers(-ROWS // 4, ROWS + ROWS // 4, (EXAMPLES, LENGTH)).astype(np.int32),
        "id": rng.integers(0, ROWS, EXAMPLES).astype(np.int32),
        "mask": (np.arange(LENGTH) < lengths).astype(np.float32),
        "w": rng.normal(size=(EXAMPLES, LENGTH)).astype(np.float32),
    }


def step_of(forms: Mapping[str, Form], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns a step with a table for each form."""

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        terms = [jnp.tanh(form(params["tables"][name], batch)).mean(1) for name, form in forms.items()]
        return ((sum(terms) - params["b"] + batch["w"][:, 0]) ** 2).mean()

    def step(state: Any, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def start(forms: Mapping[str, Form], tx: optax.GradientTransformation, widths: Sequence[int]) -> Any:
    """Makes a state. `widths`: of the tables, in turn; tables of one width are stacked."""
    rng = np.random.default_rng(0)
    tables = {name: rng.normal(size=(ROWS, widths[k % len(widths)])) for k, name in enumerate(forms)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {"tables": tables, "b": np.ones(())})
    return {"params": params, "opt": tx.init(params)}


def _compare(mine: Any, theirs: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        np.testing.assert_allclose(np.asarray(b), a, rtol=1e-4, atol=2e-5, err_msg=str(path))


def _agrees(forms: Mapping[str, Form], tx: optax.GradientTransformation, widths: Sequence[int], steps: int = 3) -> Any:
    """Returns a planned step, whose results were the plain one's, and the state that it made."""
    step = step_of(forms, tx)
    planned, plain = autopar.parallelize(step, strategy={"params/tables/*": HOSTS}, donate=False), jax.jit(step)
    set_options(planned, least_saved=0)  # owners add up whatever saves a byte
    mine = theirs = start(forms, tx, widths)
    for k in range(steps):
        (mine, told), (theirs, wanted) = planned(mine, batch_of(k)), plain(theirs, batch_of(k))
        _compare((mine, told), (theirs, wanted))
    return planned, mine


def pooled(plan: Plan | None) -> set[str]:
    """Returns the tables whose bags owners add up."""
    assert plan is not None
    return {t.path.rpartition("tables/")[2] for t in plan.tables if t.pooled}


def check_forms() -> None:
    """Each table by itself; rows that a rank needs aren't added up elsewhere."""
    every = {**BAGS, **SEGMENTS, **OTHERS, "two fills": _two_fills}
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.3))
    found, apart = set[str](), list[str]()
    for k in range(4):  # in one program XLA compiles them for minutes
        forms = {name: every[name] for name in [*every][k::4]}
        planned, _ = _agrees(forms, tx, range(3, 3 + len(forms)))
        found |= pooled(planned.plan)
        apart += [t.reason for t in planned.plan.tables if "but its rows travel" in t.reason]
    every_bag = {*BAGS, *SEGMENTS}
    assert found == every_bag if RANKS == 2 else {"sum", "where", "product", "segments"} <= found <= every_bag, found
    assert len(apart) <= 1 and all("ids out of range mean different things" in reason for reason in apart), apart


def check_stacks_and_optimizers() -> None:
    """Tables of two widths, in stacks, with rows that wait and rows that don't."""
    names = ("sum", "masked mean", "where", "out of range, filled", "beside single rows")
    several = {f"segments {k}": SEGMENTS["masked segments"] for k in range(4)}
    forms = {name: BAGS[name] for name in names} | {"weighted segments": SEGMENTS["weighted segments"], **several}
    for name, tx in {"adamw": optax.adamw(0.05, eps=1e-3), "momentum": optax.sgd(0.3, momentum=0.9)}.items():
        planned, _ = _agrees(forms, tx, (8,), steps=4)
        assert pooled(planned.plan) == set(forms), name
        assert "are exchanged and updated as one" in str(autopar.explain(planned)) and planned.plan.defers


def check_bytes() -> None:
    """Exact, by what each rank's ids are: what the plan says, less what no bag of an owner has."""
    form = {"masked mean": BAGS["masked mean"]}
    step = autopar.parallelize(step_of(form, optax.sgd(0.1)), strategy={"params/tables/*": HOSTS})
    set_options(step, least_saved=0)
    state = start(form, optax.sgd(0.1), (8,))
    for k in range(3):
        before = dict(exchange().sent_bytes)
        state, _ = step(state, batch_of(k))
    sent = {kind: n - before[kind] for kind, n in exchange().sent_bytes.items() if kind in ("ids", "rows", "gradients")}
    parts = np.split(batch_of(2)["ids"], RANKS)
    others = [r for r in range(RANKS) if r != RANK]
    bags = [[int((part % RANKS == owner).any(1).sum()) for owner in range(RANKS)] for part in parts]
    mine, owners = np.unique(parts[RANK]), parts[RANK] % RANKS
    asked = sum(int((mine % RANKS == owner).sum()) for owner in others)
    placed = sum(int((owners == owner).sum()) for owner in others)
    assert sent == {
        # To each owner the number of rows, and their ids; how many of them are in each bag; and which, with weights.
        "ids": 4 * (len(others) + asked) + len(others) * len(owners) + (2 + 4) * placed,
        "rows": 4 * 8 * sum(bags[r][RANK] for r in others),
        # With a byte that says whether any of a bag's ids gets no gradient.
        "gradients": sum(4 * 8 * bags[RANK][owner] + 1 for owner in others),
    }
    (table,) = step.plan.tables
    terms = {t.name: t.sent for t in host_terms(table.sizes)}
    assert terms["send sums"] == terms["send cotangents"] == len(others) * EXAMPLES // RANKS * 4 * 8
    assert sent["rows"] <= terms["send sums"] and table.sent["ps on hosts"] == sum(terms.values())
    assert f"{EXAMPLES // RANKS} bags" in str(autopar.explain(step))


def check_bytes_of_segments() -> None:
    """A bag that has rows of an owner among a rank's ids is one sum, and one cotangent. A rank has fewer than 256 ids,
    all ranks have more."""
    form = {"segments": SEGMENTS["segments"]}
    step = autopar.parallelize(step_of(form, optax.sgd(0.1)), strategy={"params/tables/*": HOSTS})
    set_options(step, least_saved=0)

    def batch(seed: int) -> dict[str, np.ndarray]:
        given, more = batch_of(seed), batch_of(seed + 100)
        words, bags = (np.concatenate([given[k], more[k], given[k]]) for k in ("words", "mixed"))
        return given | {"words": words, "bag": np.sort(bags)}

    state = start(form, optax.sgd(0.1), (8,))
    for k in range(2):
        before = dict(exchange().sent_bytes)
        state, _ = step(state, batch(k))
    sent = {kind: n - before[kind] for kind, n in exchange().sent_bytes.items() if kind in ("ids", "rows", "gradients")}
    words, bags = (np.split(batch(1)[name], RANKS) for name in ("words", "bag"))
    owners, there = [mine % RANKS for mine in words], [(mine >= 0) & (mine < EXAMPLES) for mine in bags]
    counts = [
        [np.unique(bags[r][there[r] & (owners[r] == owner)]).size for owner in range(RANKS)] for r in range(RANKS)
    ]
    others = [r for r in range(RANKS) if r != RANK]
    asked = np.count_nonzero(np.unique(words[RANK]) % RANKS != RANK)
    assert sent == {
        "ids": 4 * (len(others) + asked) + len(others) * EXAMPLES + 2 * np.sum(there[RANK] & (owners[RANK] != RANK)),
        "rows": 4 * 8 * sum(counts[r][RANK] for r in others),
        "gradients": sum(4 * 8 * counts[RANK][owner] + 1 for owner in others),
    }
    (table,) = step.plan.tables
    filled = [np.unique(mine) for mine in np.split(batch(0)["bag"], RANKS)]
    most = max(((bags >= 0) & (bags < EXAMPLES)).sum() for bags in filled)
    terms = {t.name: t.sent for t in host_terms(known(table.sizes))}
    assert terms["send sums"] == terms["send cotangents"] == len(others) * 4 * 8 * most
    placed = words[0].size  # of which the owners' own stay
    assert terms["send bags"] == (2 * placed + RANKS * EXAMPLES) * len(others) // RANKS
    assert f"add up each rank's {most} bags: a rank sends" in table.reason


@mock.patch.object(families, "_BAGS_PAY", (1, 1))
def check_on_devices() -> None:
    """On the devices of all ranks; one batch exceeds a capacity."""
    forms, tx = {name: BAGS[name] for name in ("masked mean", "weights")}, optax.adagrad(0.3)
    one_row = {**batch_of(5), "ids": np.full((EXAMPLES, LENGTH), ROWS - 1, np.int32)}
    step = step_of(forms, tx)
    planned, plain = autopar.parallelize(step, strategy={"params/tables/*": "ps"}, donate=False), jax.jit(step)
    mine = theirs = start(forms, tx, (3, 4))
    for batch in (batch_of(0), one_row, batch_of(1)):
        (mine, told), (theirs, wanted) = planned(mine, batch), plain(theirs, batch)
        _compare(jax.tree.map(local, autopar.materialize((mine, told))), (theirs, wanted))
    assert pooled(planned.plan) == set(forms)
    assert autopar.check(planned, mine, batch_of(2)).ok


def check_bags_of_several_machines() -> None:
    """By way of node leaders, who ask for rows and for no bags, and without; some ids get no gradient."""
    rng, columns, count, length = np.random.default_rng(RANK), 5, 7, 6
    near = connect(World(RANK, RANKS, exchange()._comm.Dup()), [r // 2 for r in range(RANKS)])
    alone = connect(World(RANK, RANKS, exchange()._comm.Dup()), [0] * RANKS)
    assert isinstance(near, LeaderExchange) is (RANKS > 2) and not isinstance(alone, LeaderExchange)
    shard = 11
    for here, weighted, owners in itertools.product((near, alone), (False, True), (RANKS, RANKS - 1)):
        ids = rng.integers(0, shard * owners, (count, length)) if RANK else np.zeros((count, length), np.int64)
        places = np.unique(ids).astype(np.int32)
        weights = rng.normal(size=count * length).astype(np.float32) if weighted else None
        wanted = places.searchsorted(ids.ravel())
        told = BagIds(wanted, np.repeat(np.arange(count), length), count, length, weights, np.dtype(np.float32))
        requested = here.ask(places, shard)
        bags = ask_bags(here, requested, places, shard, told)
        table = np.random.default_rng(9).normal(size=(shard * RANKS, columns)).astype(np.float32)
        sums = add_up(here, bags, table[RANK * shard + requested.rows])
        factors = np.ones(ids.shape, np.float32) if weights is None else weights.reshape(ids.shape)
        np.testing.assert_allclose(sums, (table[ids] * factors[..., None]).sum(1), rtol=1e-5, atol=1e-5)
        cotangents = rng.normal(size=(count, columns)).astype(np.float32)
        for kept in (None, np.ones(ids.size, bool), rng.random(ids.size) < 0.5):
            mask = np.ones(ids.shape) if kept is None else kept.reshape(ids.shape)
            whole = np.zeros_like(table)
            np.add.at(whole, ids, cotangents[:, None] * (factors * mask)[..., None])
            (whole,) = exchange().reduce([whole])
            found = spread(here, bags, cotangents, kept)
            np.testing.assert_allclose(found, whole[RANK * shard + requested.rows], rtol=1e-5, atol=1e-5)


def check_long_bags() -> None:
    """Rounding errors of 20,000 float32 rows are about those of XLA, whose sums are trees, and not of a sequence."""
    rng, count, length, shard, columns = np.random.default_rng(RANK), 3, 20_000, 700, 8
    table = np.random.default_rng(9).random((shard * RANKS, columns)).astype(np.float32)
    lengths = np.array([length, 77, length // 2])
    ids = rng.integers(0, shard * RANKS, (count, length))
    mask, places = np.arange(length) < lengths[:, None], np.arange(shard * RANKS, dtype=np.int32)
    told = BagIds(ids[mask], np.repeat(np.arange(count), lengths), count, length, None, np.dtype(np.float32))
    requested = exchange().ask(places, shard)
    bags = ask_bags(exchange(), requested, places, shard, told)
    sums = add_up(exchange(), bags, table[RANK * shard + requested.rows])
    by_xla = jax.jit(lambda table: jnp.where(mask[..., None], table[ids], 0).sum(1))(table)
    exact = np.where(mask[..., None], table.astype(np.float64)[ids], 0).sum(1)
    errors = [float(np.sqrt(np.mean((x / exact - 1) ** 2))) for x in (sums, by_xla)]
    assert errors[0] < 3 * errors[1] < 1e-6, errors

    cotangents = rng.random((count, columns)).astype(np.float32)
    which, bag = ids[mask], np.repeat(np.arange(count), lengths)
    whole = np.asarray(jnp.zeros_like(table).at[which].add(cotangents[bag]))
    wanted = np.zeros(table.shape)
    np.add.at(wanted, which, cotangents[bag].astype(np.float64))
    whole, wanted = (exchange().reduce([x])[0][RANK * shard + requested.rows] for x in (whole, wanted))
    errors = [np.abs(x - wanted).max() / wanted.max() for x in (spread(exchange(), bags, cotangents, None), whole)]
    assert errors[0] < 3 * max(errors[1], 1e-7), errors
