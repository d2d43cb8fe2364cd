"""What every rank runs in `test_worlds.py`: steps with tables in host memory, against the float64 oracle."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from autopar import jax_compat
from autopar.backends import deferred as rows
from autopar.backends.global_arrays import local
from autopar.backends.host import shape_buckets, storage, update_log
from autopar.ir import deferred
from autopar.mpi import machines
from autopar.mpi.machines import exchange
from autopar.passes import once_per_row
from autopar.planning.verify import compare_runs
from autopar.tables.host import HostTable
from tests.support import entry_steps as by_rows
from tests.support import host_reads, many_tables, stacked_tables
from tests.support.compilations import compilations
from tests.support.mpi.lookup_cases import check_a_branch_between_two_steps as check_a_branch_between_two_steps  # one
from tests.support.mpi.lookup_cases import check_a_sum_over_examples_times_rows as check_a_sum_over_examples_times_rows
from tests.support.mpi.lookup_cases import check_ids_of_other_examples as check_ids_of_other_examples  # one, too
from tests.support.mpi.lookup_cases import check_interactions as check_interactions
from tests.support.mpi.lookup_cases import check_models_in_which_examples_meet as check_models_in_which_examples_meet
from tests.support.mpi.lookup_cases import check_whole_reads as check_whole_reads  # one, too
from tests.support.mpi.refused_cases import check_loops_that_cannot_be as check_loops_that_cannot_be  # one of the cases
from tests.support.mpi.refused_cases import check_what_cannot_be as check_what_cannot_be  # another one
from tests.support.pairs import pairwise
from tests.support.pickled import assert_no_part_is_pickled
from tests.support.settings import set_options
from tests.zoo import MODELS, OPTIMIZERS
from tests.zoo.case import Case, concrete, initial_variables, zipf_ids

RANK, RANKS, DEVICES = jax.process_index(), jax.process_count(), jax.local_device_count()
HOSTS = ("ps", "hosts")
AXES = {
    "ranks": ("2", "4", "3", "1"),
    "devices": ("1", "2"),
    "model": ("normed", "averaged", "lstm_lm", "transformer_sampled", "two_tower", "multi_hot"),
    "optimizer": ("clipped", "adagrad", "rowwise_adagrad", "adamw"),
}
ROWS = pairwise(AXES)


class _State(TrainState):
    batch_stats: Any


class _Net(nn.Module):
    """A table, and a perceptron with or without batch norm."""

    norm: bool

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(61, 4, name="emb")(ids).mean(1)
        x = nn.Dense(8, use_bias=not self.norm)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return nn.Dense(3)(nn.tanh(x))


def net(tx: optax.GradientTransformation, *, norm: bool, batch: int = 24) -> Case:
    """Regression; a batch that 1 to 4 ranks with one or two devices divide."""
    module = _Net(norm)

    def batches(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        return {"ids": zipf_ids(rng, (batch, 5), 61), "y": rng.normal(size=(batch, 3)).astype(np.float32)}

    variables = initial_variables(module, batches(0)["ids"])
    stats = variables.get("batch_stats", {})
    state = _State.create(apply_fn=module.apply, params=variables["params"], tx=tx, batch_stats=stats)

    def step(state: _State, batch: Any) -> tuple[_State, Any]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            y, changed = state.apply_fn(variables, batch["ids"], mutable=["batch_stats"])
            return jnp.mean((y - batch["y"]) ** 2), changed.get("batch_stats", {})

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), (loss, optax.tree.norm(grads))

    return Case(step, concrete(state), batches, ("params/emb/embedding",))


def make(model: str, optimizer: str) -> Case:
    tx = OPTIMIZERS[optimizer].make()
    if model in ("normed", "averaged"):
        return net(tx, norm=model == "normed")
    return MODELS[model].make(tx)


def check_contract(every: int = 1) -> None:
    """Pairwise: ranks x devices x models x optimizers; of the rows for this world all, or every second one, ..."""
    once_per_row._MOVED = 0.0  # small models, too
    for row in [r for r in ROWS if (r["ranks"], r["devices"]) == (str(RANKS), str(DEVICES))][::every]:
        case = make(row["model"], row["optimizer"])
        step = autopar.parallelize(case.step, strategy=HOSTS, donate=False)
        entry = step.planned_for(case.state, case.batches(0))
        plan = entry.compiled.plan
        assert plan.on_hosts and {p.path for p in plan.parameters if p.lifted} == set(case.tables), row
        backend = "" if RANKS == 1 else "psum" if row["model"] in ("normed", "lstm_lm", "two_tower") else "mpi"
        if RANKS == 3 and row["model"] != "normed":  # a batch of 8 isn't spread
            backend = plan.reduction_backend
        assert plan.reduction_backend == backend, (row, plan.reduction_backend)
        numbers_agree(entry, case, str(row))


def check_some_of_the_contract() -> None:
    """Some models, over the worlds of `make test`."""
    check_contract(every=4 * RANKS)


def numbers_agree(entry: Any, case: Case, told: str, steps: int = 4) -> None:
    """Planned steps against the oracle, which rank 0 alone runs: the others only take part."""
    leaves = [jax.tree.leaves((case.state, case.batches(i))) for i in range(steps)]
    if RANK == 0:
        found = compare_runs(entry, leaves)
        assert found.ok, f"{told}\n{found}"
        return
    new = entry.compiled.analysed.new_states
    mine = list(leaves[0])
    for batch in leaves:
        mine = [x if k in new else batch[k] for k, x in enumerate(mine)]
        outputs = entry.run_called(*mine)
        for k, out in new.items():
            mine[k] = outputs[out]


def check_deferred() -> None:
    """Rows that move in every step, over many full logs; read in between, and kept where the step can't go on."""
    case = net(OPTIMIZERS["adamw"].make(), norm=False)
    plain, step = jax.jit(case.step), autopar.parallelize(case.step, strategy=HOSTS)
    set_options(step, log_steps=8)
    evaluation = autopar.parallelize(lambda params, ids: params["emb"]["embedding"][ids].sum())
    theirs, mine = case.state, jax.tree.map(jnp.copy, case.state)
    for k in range(60):
        if k == 30:  # another update log, beside tables that wait
            start = plain(case.state, case.batches(0))[0].opt_state
            theirs, mine = theirs.replace(opt_state=start), mine.replace(opt_state=jax.tree.map(jnp.copy, start))
        theirs, _ = plain(theirs, case.batches(k))
        mine, _ = step(mine, case.batches(k))
        if k in (3, 20):
            table, wanted = (s.params["emb"]["embedding"] for s in (mine, theirs))
            assert isinstance(table, HostTable)
            np.testing.assert_allclose(table[np.array([1, 60])], wanted[np.array([1, 60])], atol=1e-5)
        if k % 9 == 7:  # brings the rows up to date that it looks up
            ids = np.random.default_rng(k).integers(0, 61, (6, 4)).astype(np.int32)
            seen, wanted = evaluation(mine.params, ids), theirs.params["emb"]["embedding"][ids].sum()
            np.testing.assert_allclose(seen, wanted, atol=1e-4)
            log = mine.params["emb"]["embedding"].waiting.log
            assert log is not None and not log.is_up_to_date
    assert step.plan is not None and step.plan.defers
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=2e-5, err_msg=str(path))


def check_results() -> None:
    """A state that goes round: tables stay where they are, are read by all, and are gone once given away."""
    case = make("averaged", "clipped")
    step = autopar.parallelize(case.step, strategy={"params/emb*": HOSTS})
    plain = jax.jit(case.step)
    start = jax.tree.map(jnp.copy, case.state)
    state, wanted = start, case.state
    for batch in autopar.shard([case.batches(i) for i in range(5)]):
        old, (state, (loss, _)) = state, step(state, batch)
    for i in range(5):
        wanted, (theirs, _) = plain(wanted, case.batches(i))
    table = state.params["emb"]["embedding"]
    assert isinstance(table, HostTable) and table.storage.rows.shape == (-(-61 // RANKS), 4)
    np.testing.assert_allclose(np.asarray(table), wanted.params["emb"]["embedding"], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(table[np.array([[3, 60], [-1, 0]])], np.asarray(table)[np.array([[3, 60], [60, 0]])])
    assert abs(float(loss) - float(theirs)) < 1e-5
    gone = old.params["emb"]["embedding"]
    assert gone.is_deleted()
    try:
        np.asarray(gone)
    except autopar.DonatedStateError as error:
        assert "params/emb/embedding was given to a step" in str(error)
    else:
        raise AssertionError("a table that was given away can be read")
    evaluate = autopar.parallelize(lambda params, ids: params["emb"]["embedding"][ids].sum())
    ids = case.batches(7)["ids"]
    found = float(evaluate(state.params, ids))
    assert_no_part_is_pickled(table, RANK)
    whole = np.asarray(table)
    assert abs(found - whole[ids].sum()) < 1e-3
    for results in (None, "spread"):
        lookup = lambda params, ids: (params["emb"]["embedding"][ids].sum(1), ids)  # noqa: E731
        sums, again = autopar.parallelize(lookup, results=results)(state.params, ids)
        assert results == "spread" or sums.is_fully_addressable
        np.testing.assert_allclose(np.asarray(local(sums)), whole[ids].sum(1), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(local(again)), ids)
    ordinary = autopar.materialize(state)
    assert isinstance(ordinary.params["emb"]["embedding"], jax.Array)


def check_examples_that_are_handed_back() -> None:
    """A leaf of the batch that a step returns as it was given it: every rank has all of it, and may give it again."""

    def step(table: jax.Array, rest: Any, batch: Any) -> Any:
        grads = jax.grad(lambda t: jnp.mean(t[batch["ids"]] ** 2))(table)
        return table - 0.1 * grads, rest, (batch["ids"], batch["ids"] * 2)

    planned = autopar.parallelize(step, strategy=HOSTS, donate=False)
    table, slots = jnp.arange(40.0 * 3).reshape(40, 3), np.arange(40.0 * 3, dtype=np.float32).reshape(40, 3)
    batch = {"ids": np.arange(24, dtype=np.int32) % 7}
    new, rest, (ids, doubled) = planned(table, {"slots": slots}, batch)
    np.testing.assert_array_equal(rest["slots"], slots)
    np.testing.assert_array_equal(ids, batch["ids"])
    assert doubled.shape == (24,)
    new, rest, _ = planned(new, rest, batch)
    np.testing.assert_array_equal(rest["slots"], slots)
    wanted, *_ = jax.jit(step)(jax.jit(step)(table, rest, batch)[0], rest, batch)
    np.testing.assert_allclose(np.asarray(new), wanted, rtol=1e-6)


def check_init() -> None:
    """Bit for bit what jax.jit makes, in shards."""

    def make_state(key: jax.Array) -> dict[str, Any]:
        return {"table": jax.random.normal(key, (1003, 6)), "w": jax.random.uniform(key, (6, 2))}

    def update(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
        loss, grads = jax.value_and_grad(lambda s: ((s["table"][batch["ids"]] @ s["w"]) ** 2).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    step = autopar.parallelize(update, strategy={"table": HOSTS})
    batch = {"ids": np.arange(24, dtype=np.int32)}
    state = autopar.init(make_state, jax.random.key(3), step=step, batch=batch)
    wanted = jax.jit(make_state)(jax.random.key(3))
    assert isinstance(state["table"], HostTable) and len(state["table"].storage.rows) == -(-1003 // RANKS)
    np.testing.assert_array_equal(np.asarray(state["table"]), wanted["table"])
    np.testing.assert_array_equal(state["w"], wanted["w"])
    new, loss = step(state, batch)
    theirs, expected = jax.jit(update)(wanted, batch)
    np.testing.assert_allclose(np.asarray(new["table"]), theirs["table"], atol=1e-6)
    assert abs(float(loss) - float(expected)) < 1e-6


def check_init_of_several_tables() -> None:
    """Bit for bit, whichever rank made them: of one initializer, of one key, of one number, of 16 bits, by columns,
    twice, as given. Each has memory of its own."""

    def make_state(key: jax.Array, given: jax.Array) -> dict[str, Any]:
        first, *keys = jax.random.split(key, 4)
        drawn = jax.random.normal(first, (1003, 6))
        tables = {"a": drawn * 0.3, "b": jnp.tanh(drawn) + 1, "c": jax.random.normal(keys[0], (517, 6), jnp.bfloat16)}
        tables |= {"d": jax.random.uniform(keys[0], (6, 517)), "e": jnp.full((90, 6), 0.1), "f": jnp.zeros((301,))}
        tables |= {f"g{k}": jnp.exp(jax.random.normal(key, (100 + k, 6))) for k, key in enumerate(keys)}
        tied = jax.random.normal(keys[1], (44, 6))
        tables |= {"given": given, "twin": tables["g1"]}
        return {"tables": tables | {"tied": tied / 3}, "w": jnp.cos(tied) * 2, "count": 0}

    def update(state: dict[str, Any], ids: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        def loss_of(tables: dict[str, Any], w: jax.Array) -> jax.Array:
            read = {name: t[:, ids].T if name == "d" else t[ids] for name, t in tables.items()}
            return sum(jnp.mean(x.astype(jnp.float32) ** 2) for x in read.values()) + jnp.mean(w**2)

        loss, (tables, w) = jax.value_and_grad(loss_of, (0, 1))(state["tables"], state["w"])
        tables = jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), state["tables"], tables)
        return {"tables": tables, "w": state["w"] - 0.1 * w, "count": state["count"] + 1}, loss

    step = autopar.parallelize(update, strategy={"tables/*": HOSTS})
    ids, ours, given = np.arange(24, dtype=np.int32), exchange(), jnp.ones((71, 6))
    with mock.patch.object(storage, "_BLOCK_BYTES", 500):
        state = autopar.init(make_state, jax.random.key(3), given, step=step, batch=ids)
    wanted = jax.jit(make_state)(jax.random.key(3), given)
    assert all(isinstance(x, HostTable) for x in state["tables"].values())
    jax.tree.map(lambda mine, theirs: np.testing.assert_array_equal(np.asarray(mine), theirs), state, wanted)
    rows = [x.storage.rows for x in state["tables"].values()]
    assert not any(np.shares_memory(a, b) for k, a in enumerate(rows) for b in rows[:k])
    state["tables"]["given"].storage.rows[...] = 7
    assert (np.asarray(given) == 1).all()
    assert ours.near.size == len(ours.near_ranks) and ours.near_ranks[ours.near.rank] == RANK


def check_init_without_memory_for_a_whole_table() -> None:
    """It's refused on every rank where all shards would fit, but not beside them the table as one rank makes it."""

    def update(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(lambda t: (t[ids] ** 2).sum())(table)
        return table - 0.1 * grads, loss

    def make(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (1000, 8))

    step, ids = autopar.parallelize(update, strategy=HOSTS), np.arange(24, dtype=np.int32)
    for room, fits in ((40_000, RANKS == 1 or not jax_compat.rounds_by_shape()), (80_000, True)):  # the table: 32,000 B
        with mock.patch.object(machines, "memory_levels", lambda room=room: {"all": machines.RESERVE + room}):
            try:
                autopar.init(make, jax.random.key(0), step=step, batch=ids)
            except autopar.HostMemoryError as error:
                assert not fits and "table (made whole by one rank of a machine) 0.00 GB" in str(error), error
            else:
                assert fits, room


def check_batches_that_devices_do_not_divide() -> None:
    """The ranks divide them: each device of a rank has all of its rank's part."""
    batches = [net(OPTIMIZERS["clipped"].make(), norm=False, batch=3 * RANKS).batches(i) for i in range(3)]
    case = net(OPTIMIZERS["clipped"].make(), norm=False)
    step = autopar.parallelize(case.step, strategy=HOSTS, donate=False)
    state, wanted = case.state, case.state
    for mine, theirs in zip(autopar.shard(batches), batches, strict=True):
        state, (loss, _) = step(state, mine)
        wanted, (expected, _) = jax.jit(case.step)(wanted, theirs)
        assert abs(float(loss) - float(expected)) < 1e-5
    found = np.asarray(state.params["emb"]["embedding"])
    np.testing.assert_allclose(found, wanted.params["emb"]["embedding"], rtol=1e-4, atol=1e-6)


def check_a_batch_that_ranks_do_not_divide() -> None:
    """Each computes all of it, which is told."""
    case = net(OPTIMIZERS["clipped"].make(), norm=False, batch=16 * RANKS + 1)
    step = autopar.parallelize(case.step, strategy=HOSTS, donate=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.SlowPlanWarning)
        step(case.state, case.batches(0))
    text = f"{RANKS} ranks don't divide a batch of {16 * RANKS + 1}"
    told = [str(w.message) for w in caught if text in str(w.message)]
    assert len(told) == (RANKS > 1) and all(f"{16 * RANKS} or {17 * RANKS}" in line for line in told), caught


def _poison() -> tuple[Callable[..., Any], np.ndarray]:
    def update(table: jax.Array, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        grad = jax.grad(lambda t: (t[batch["ids"]] ** 2).sum() * batch["scale"][0])(table)
        norm = jnp.sqrt((grad**2).sum())
        return table - 0.1 * grad / norm, norm

    return update, np.linspace(0.5, 2, 40 * 3, dtype=np.float32).reshape(40, 3)


def check_nonfinite() -> None:
    """A factor that is NaN poisons every row, as in plain JAX, on every rank."""
    update, table = _poison()
    step = autopar.parallelize(update, strategy=HOSTS, donate=False, batch_axis={"batch/scale": None})
    ids = np.arange(24, dtype=np.int32) % 7
    for scale in (1.0, np.inf, np.nan, 0.0):
        batch = {"ids": ids, "scale": np.full((1,), scale, np.float32)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            new, _ = step(jnp.asarray(table), batch)
            wanted, _ = jax.jit(update)(table, batch)
            np.testing.assert_allclose(np.asarray(new), wanted, rtol=1e-5)
    host_reads.check_rows_that_differ(np.inf, batch_axis={"batch/factor": None})


def check_growth() -> None:
    """Batches of more and more rows: few compilations, and the same numbers."""
    case = net(OPTIMIZERS["clipped"].make(), norm=False, batch=48)
    step = autopar.parallelize(case.step, strategy=HOSTS)
    plain = jax.jit(case.step)
    state, wanted = jax.tree.map(jnp.copy, case.state), case.state
    for i in range(12):
        batch = case.batches(i)
        batch["ids"] = np.minimum(batch["ids"], 5 * i)
        state, _ = step(state, batch)
        wanted, _ = plain(wanted, batch)
    assert step.latest is not None
    assert step.latest.runner.compilations <= 4
    kinds = [each.split()[0] for each in step.latest.compiled.plan.stages]
    assert kinds.count("reduce") == (RANKS > 1), "dense gradients go along with the norm of the rows' ones"
    mine, theirs = (np.asarray(s.params["emb"]["embedding"]) for s in (state, wanted))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert exchange().size == RANKS


def check_growth_beside() -> None:
    """Rows that grow a little from step to step, on some ranks before others: no step after the first few compiles."""
    for do_meet in (False, True):
        _check_growth_beside(do_meet)


def _check_growth_beside(do_meet: bool) -> None:
    """`do_meet`: the devices of all ranks run each program together, as examples meet in it."""

    def step(state: Any, ids: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            x = jnp.tanh(p["emb"][ids] @ p["w"])
            return jnp.mean((x - x.mean(0) if do_meet else x) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    rng = np.random.default_rng(0)
    wanted = {"emb": jnp.asarray(rng.normal(size=(4000, 4)), np.float32), "w": jnp.eye(4)}
    make = functools.partial(jax.tree.map, jnp.copy, wanted)
    planned, plain = autopar.parallelize(step, strategy={"emb": HOSTS}), jax.jit(step)
    ids = np.zeros((RANKS, 256 * DEVICES), np.int32)
    mine = autopar.init(make, step=planned, batch=ids.ravel())
    beside = 0
    for k in range(60):
        ids = np.stack([rng.integers(0, 200 + (10 + r) * k, ids.shape[1]) for r in range(RANKS)]).astype(np.int32)
        with compilations() as made:
            mine, value = planned(mine, ids.ravel())
        wanted, expected = plain(wanted, ids.ravel())
        np.testing.assert_allclose(float(value), float(expected), rtol=1e-4)
        assert k < 12 or not made.here, (k, do_meet)
        beside += made.beside
    assert planned.latest is not None and planned.plan is not None
    assert beside and planned.latest.runner.compilations >= 3
    assert RANKS == 1 or planned.plan.reduction_backend == ("psum" if do_meet else "mpi")
    for name, leaf in mine.items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(wanted[name]), rtol=1e-4, atol=1e-5, err_msg=name)


def check_once_per_row() -> None:
    """What depends on single rows, computed once for each that this rank asks for; ids of no row among them."""
    once_per_row._MOVED = 0.0
    for loss in (by_rows.whole, by_rows.tower, by_rows.bags, by_rows.filled):
        planned = autopar.parallelize(by_rows.step_of(loss), strategy=HOSTS)
        plain = jax.jit(by_rows.step_of(loss))
        mine, wanted = by_rows.make_state(np.float32), by_rows.make_state(np.float32)
        for k in range(3):
            batch = by_rows.batch_of(k, np.float32, examples=96)
            batch["ids"][0, 0] = -99 if loss is by_rows.tower else 0
            mine, value = planned(mine, batch)
            wanted, expected = plain(wanted, batch)
            for a, b in zip(jax.tree.leaves((mine, value)), jax.tree.leaves((wanted, expected)), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5, err_msg=str(loss))
        assert planned.latest is not None
        assert planned.latest.runner.once_per_row, loss


def check_shape_buckets() -> None:
    """Ranks whose rows vary by themselves run programs for different shape buckets in one step, and change them."""
    once_per_row._MOVED = 0.0
    shape_buckets._WATCHED = 8

    def step(state: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            rows = jnp.tanh(p["emb"][batch["ids"]] @ p["w"])
            beside = batch["x"] @ p["v"] @ p["w"] + p["b"]  # nothing of rows: known before they are
            return jnp.mean((rows - 1) ** 2) + jnp.mean((beside - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + norm), state, grads), value

    rng = np.random.default_rng(0)
    shapes = {"emb": (500, 8), "w": (8, 8), "v": (4, 8), "b": (8,)}
    state = {k: jnp.asarray(rng.normal(size=s), np.float32) for k, s in shapes.items()}
    planned, plain = autopar.parallelize(step, strategy={"emb": HOSTS}), jax.jit(step)
    mine, wanted = jax.tree.map(jnp.copy, state), state
    used = []
    for k in range(30):
        most = [500 if k == 0 else 20 + 60 * ((k + r) % 2) for r in range(RANKS)]
        batch = {
            "ids": np.concatenate([rng.integers(0, n, 240) for n in most]).astype(np.int32),
            "x": rng.normal(size=(240 * RANKS, 4)).astype(np.float32),
        }
        mine, value = planned(mine, batch)
        wanted, expected = plain(wanted, batch)
        np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
        assert planned.latest is not None
        used.append(planned.latest.runner.once_per_row.counts[0][0])
    for name, leaf in mine.items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(wanted[name]), rtol=1e-4, atol=1e-5, err_msg=name)
    assert used[-1] != used[-2] and max(used[-2:]) < used[0], used


def check_deferred_growth() -> None:
    """Adam: a short update log, flushes of all rows, rows that outgrow their bucket, and reads in between."""
    deferred.SEGMENTS = 3
    rows._LEAST_ELEMENTS, update_log._SOME_ELEMENTS = 1, 64  # some rows after each step
    case = net(optax.adamw(0.1, weight_decay=1e-2), norm=False, batch=48)
    step = autopar.parallelize(case.step, strategy=HOSTS)
    set_options(step, log_steps=5)
    plain = jax.jit(case.step)
    state, wanted = jax.tree.map(jnp.copy, case.state), case.state
    for i in range(24):
        batch = case.batches(i)
        batch["ids"] = np.minimum(batch["ids"], 60 if i == 13 else 7)
        state, _ = step(state, batch)
        wanted, _ = plain(wanted, batch)
        if i % 7 == 3:
            np.asarray(state.params["emb"]["embedding"])
    assert step.plan is not None and step.plan.defers
    mine, theirs = (np.asarray(s.params["emb"]["embedding"]) for s in (state, wanted))
    np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=1e-3)


def check_stacked_tables() -> None:
    """Tables that are alike have one exchange of ids, of rows and of gradients a step."""
    for name, tx in stacked_tables.OPTIMIZERS.items():
        step = stacked_tables.step_of(tx, stacked_tables.LOOKUPS["in bags"])
        planned = autopar.parallelize(step, strategy=HOSTS)
        mine, theirs, plain = stacked_tables.start(tx), stacked_tables.start(tx), jax.jit(step)
        for k in range(12):
            given = stacked_tables.batch(k, out_of_range=k % 3 == 2)
            (mine, loss), (theirs, wanted) = planned(mine, given), plain(theirs, given)
            np.testing.assert_allclose(loss, wanted, rtol=1e-4, err_msg=name)
            if k == 5:
                table, like = (s["params"]["tables"]["t1"] for s in (mine, theirs))
                np.testing.assert_allclose(np.asarray(table), like, rtol=1e-3, atol=1e-4)
        assert stacked_tables.stacks(planned) == [5]
        operations = [e.op for e in planned.latest.compiled.program.block.walk()]
        assert [operations.count(op) for op in ("ap.route", "ap.fetch", "ap.deliver")] == [2, 2, 2]  # and of t5
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
            np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-3, atol=1e-4, err_msg=f"{name}{path}")


def _with_exact_bytes(planned: Any) -> Callable[..., Any]:
    """Returns a step that counts what each call sends: each distinct row of each table that another rank owns goes one
    way as its id and as a gradient, and the other way as a row."""
    here = exchange()

    def step(state: Any, batch: Any) -> Any:
        widths = [t.shape[1] * t.dtype.itemsize for t in state["params"]["tables"].values()]
        before, results = dict(here.sent_bytes), planned(state, batch)
        parts = np.split(batch["ids"], RANKS)
        asked = [[np.unique(part[:, t]) for t in range(part.shape[1])] for part in parts]
        rows = sum(
            width * np.sum(ids % RANKS == RANK)
            for rank, tables in enumerate(asked)
            for width, ids in zip(widths, tables, strict=True)
            if rank != RANK
        )
        others = [np.sum(ids % RANKS != RANK) for ids in asked[RANK]]
        gradients = sum(width * count for width, count in zip(widths, others, strict=True))
        routes = [e.op for e in planned.latest.compiled.program.block.walk()].count("ap.route")
        ids = 4 * (routes * (RANKS - 1) + sum(others))  # to each owner the number of rows, and their ids
        sent = {name: here.sent_bytes[name] - before[name] for name in ("ids", "rows", "gradients")}
        assert sent == {"ids": ids, "rows": rows, "gradients": gradients}, (sent, ids, rows, gradients)
        return results

    return step


def check_bytes_of_stacked_tables() -> None:
    tx = stacked_tables.OPTIMIZERS["momentum"]
    planned = autopar.parallelize(stacked_tables.step_of(tx), strategy=HOSTS)
    step, state = _with_exact_bytes(planned), stacked_tables.start(tx)
    for k in range(3):
        state, _ = step(state, stacked_tables.batch(k))
    assert stacked_tables.stacks(planned) == [5]


def check_many_tables(first: int = 0) -> None:
    """2, 8 and 26 of them, of mixed widths, dtypes and optimizers; and their bytes. `first`: the first one's index."""
    for count, name in list(zip(many_tables.COUNTS, many_tables.OPTIMIZERS, strict=True))[first:]:
        many_tables.check(count, name, lambda step: _with_exact_bytes(autopar.parallelize(step, strategy=HOSTS)))


def check_as_many_tables_as_categories() -> None:
    """26 of them, trained by two optimizers."""
    check_many_tables(first=2)
