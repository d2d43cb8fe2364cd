"""Several devices of one process: autopar's methods against plain data parallelism, XLA's own sharding of the rows,
and a parameter server of devices written by hand.

`python -m benchmarks devices` starts this file in a process of its own: JAX fixes the number of devices at its start.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.program import known
from autopar.ir.strategy import OPTIMIZATIONS
from autopar.passes import choose
from benchmarks.lookup import CLIP, EPS, IDS, RATE, bare_step, loss_of, make_state, plain_step, zipf_batches
from benchmarks.models import TX, gpt, perceptron, step_of
from benchmarks.timing import Runner, alternate, median_ms, ratio

DEVICES = 4
METHODS = ("ps", "allgather", "allreduce_rows", "auto")


def devices() -> None:
    """Runs this module with several CPU devices."""
    for rows in (200_000, 800_000):
        subprocess.run([sys.executable, "-m", "benchmarks.devices", str(rows)], check=True)


#: What follows a lookup of rows of 64 floats.
FOLLOWING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "[..., :8]": lambda rows: rows[..., :8],
    "cast to bfloat16": lambda rows: rows.astype(jnp.bfloat16).astype(jnp.float32),
    "sum of columns": lambda rows: rows.sum(-1, keepdims=True),
}


def border() -> None:
    """What follows a lookup where the rows are, and where it is written: 200,000 x 64, 2,048 Zipf ids, Adagrad."""
    subprocess.run([sys.executable, "-m", "benchmarks.devices", "border"], check=True)


def shards() -> None:
    """Dense parameters in shards ("ps") and whole ("allreduce"): layers of a perceptron, clip and Adam."""
    subprocess.run([sys.executable, "-m", "benchmarks.devices", "shards"], check=True)


def whole() -> None:
    """Eight tables of which owners add up bags, whole on one device each, and spread."""
    subprocess.run([sys.executable, "-m", "benchmarks.devices", "whole"], check=True)


def _placed(state: Any, mesh: Mesh, rows: int | None) -> Any:
    """Replicated; leaves with so many rows spread along them."""
    specs = jax.tree.map(lambda x: P("data") if rows is not None and x.shape[:1] == (rows,) else P(), state)
    return jax.device_put(state, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))


def hand_step(mesh: Mesh, rows: int, capacity: int) -> Any:
    """The same function by hand: rows distributed cyclically over the devices, sums before the wire, three all_to_alls.

    Exact for batches in which no device asks another one for more than `capacity` rows (which isn't checked).
    """
    count, share = DEVICES, rows // DEVICES
    requested_rows = IDS[0] * IDS[1]
    spread = P("data")

    def exchange(x: jax.Array) -> jax.Array:
        split = x.reshape(count, capacity, *x.shape[1:])
        return jax.lax.all_to_all(split, "data", 0, 0).reshape(x.shape)

    def local(emb: jax.Array, acc: jax.Array, dense: Any, slots: Any, ids: jax.Array) -> Any:
        me = jax.lax.axis_index("data")
        places = ids.ravel() % count * share + ids.ravel() // count
        requested, inverse = jnp.unique(places, return_inverse=True, size=requested_rows, fill_value=rows)
        owner = jnp.minimum(requested // share, count - 1)
        first = jnp.searchsorted(requested, jnp.arange(count) * share)
        slot = jnp.where(
            requested < rows, owner * capacity + jnp.arange(requested_rows) - first[owner], count * capacity
        )
        wanted = exchange(jnp.full((count * capacity,), rows, jnp.int32).at[slot].set(requested, mode="drop"))
        owned = jnp.unique(wanted, size=count * capacity, fill_value=rows)
        back = jnp.searchsorted(owned, wanted)
        numbers = jnp.where(owned < rows, owned - me * share, share + jnp.arange(owned.size))
        mine, mine_acc = emb.at[numbers].get(mode="clip"), acc.at[numbers].get(mode="clip")
        fetched = exchange(mine.at[back].get(mode="clip")).at[slot].get(mode="clip")

        def loss_fn(fetched: jax.Array, dense: Any) -> jax.Array:
            return loss_of(fetched[inverse.reshape(ids.shape)], dense["w1"], dense["w2"]) / count

        loss, (g_rows, g_dense) = jax.value_and_grad(loss_fn, (0, 1))(fetched, dense)
        sent = jnp.zeros((count * capacity, g_rows.shape[1])).at[slot].set(g_rows, mode="drop")
        g = jnp.zeros_like(mine).at[jnp.where(wanted < rows, back, owned.size)].add(exchange(sent), mode="drop")
        loss, g_dense, squares = jax.lax.psum((loss, g_dense, jnp.sum(g * g)), "data")
        norm = jnp.sqrt(squares + sum(jnp.sum(x * x) for x in jax.tree.leaves(g_dense)))
        scale = jnp.where(norm < CLIP, 1.0, CLIP / norm)

        def adagrad(p: jax.Array, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
            a = a + (g * scale) ** 2
            return p - RATE * g * scale * jnp.where(a > 0, jax.lax.rsqrt(a + EPS), 0.0), a

        mine, mine_acc = adagrad(mine, mine_acc, g)
        new = {k: adagrad(dense[k], slots[k], g_dense[k]) for k in dense}
        options = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
        emb, acc = emb.at[numbers].set(mine, **options), acc.at[numbers].set(mine_acc, **options)
        return emb, acc, {k: p for k, (p, _) in new.items()}, {k: a for k, (_, a) in new.items()}, loss

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spread, spread, P(), P(), spread),
        out_specs=(spread, spread, P(), P(), P()),
        check_vma=False,
    )

    def step(state: Any, batch: Any) -> Any:
        *state, loss = mapped(*state, batch["ids"])
        return tuple(state), loss

    return jax.jit(step, donate_argnums=0)


def _hand_state(rows: int, mesh: Mesh) -> Any:
    """Rows in cyclic order (row r of shard k is r * N + k)."""
    state = make_state(rows)
    dense = {k: state["params"][k] for k in ("w1", "w2")}
    acc, *slots = jax.tree.leaves(state["opt"])
    tables = (state["params"]["emb"], acc)
    cyclic = [jnp.swapaxes(x.reshape(-1, DEVICES, x.shape[1]), 0, 1).reshape(x.shape) for x in tables]
    return _placed((*cyclic, dense, dict(zip(dense, slots, strict=True))), mesh, rows)


def measure(rows: int, rounds: int = 8) -> None:
    """All steps of `rows` rows in one run, taking turns."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    batches = zipf_batches(rows, (DEVICES * IDS[0], IDS[1]))
    data = NamedSharding(mesh, P("data"))

    def batch(k: int) -> Any:
        return jax.device_put(batches(k), data)

    # Replicas of the large table would not fit into memory beside each other.
    methods = METHODS if rows <= 400_000 else ("ps",)
    planned = {m: autopar.parallelize(plain_step, strategy=m, mesh=mesh) for m in methods}
    runners = {}
    for method, step in planned.items():
        runners[method] = Runner(step, make_state(rows))
        runners[method].seconds(batch(0))
        assert step.plan is not None
        (family,) = step.latest.compiled.bound.families
        print(f"{method}: {family.method}, capacity {family.bounds.capacity}", flush=True)
    ps = planned["ps"].plan
    assert ps is not None and ps.families[0].capacity is not None
    useful = [np.unique(np.asarray(part)).size for part in np.split(np.asarray(batches(1)["ids"]), DEVICES)]
    capacity = ps.families[0].capacity
    print(f"rows sent by a device, padding included, over useful ones: {DEVICES * capacity / np.mean(useful):.2f}")
    runners["hand"] = Runner(hand_step(mesh, rows, capacity), _hand_state(rows, mesh))
    times = alternate(runners, batch, rounds)
    for name, found in times.items():
        print(
            f"V={rows:,} {name}: {median_ms(found):.1f} ms, {ratio(found, times['hand']):.2f} of the hand's", flush=True
        )
    ps_runner = runners["ps"]
    runners.clear()
    against_xla("the MLP's step", plain_step, ps_runner, rows, mesh, batch)
    del ps_runner
    bare = Runner(autopar.parallelize(bare_step, strategy="ps", mesh=mesh), make_state(rows))
    against_xla("lookup, clip and Adagrad alone", bare_step, bare, rows, mesh, batch)


def against_xla(what: str, step: Any, planned: Runner, rows: int, mesh: Mesh, batch: Callable[[int], Any]) -> None:
    """`ps` beside XLA's own sharding of the rows, and beside plain data parallelism."""
    planned.seconds(batch(0))
    kept = {"ps": planned}
    for name, spread in (("row sharding by XLA", rows), ("data parallel", None)):
        state = _placed(make_state(rows), mesh, spread)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        kept[name] = Runner(jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), state)
        times = alternate(kept, batch, 3, turns={"ps": 20, name: 2})
        shown = f"{median_ms(times[name]):.0f} ms, ps {median_ms(times['ps']):.1f} ms"
        print(f"{what}: {name} {shown}: {ratio(times[name], times['ps']):.1f} times ps's", flush=True)
        del kept[name]


def measure_border(rows: int = 200_000, width: int = 64, ids: int = 2_048, rounds: int = 8) -> None:
    """Both ways in turns, for each form in `FOLLOWING`."""
    optimizer = optax.adagrad(RATE)
    draws = [(np.random.default_rng(k).zipf(1.2, ids) % rows).astype(np.int32) for k in range(4)]
    ways: dict[str, Any] = {"moved": "all", "as written": [name for name in OPTIMIZATIONS if name != "border"]}
    for name, form in FOLLOWING.items():
        runners = {}
        for way, optimize in ways.items():
            table = jnp.full((rows, width), 0.1)
            planned: Any = autopar.parallelize(_step_with(form, optimizer), strategy="ps", optimize=optimize)
            runners[way] = Runner(planned, {"table": table, "slots": optimizer.init(table)})
        times = alternate(runners, lambda k: draws[k % len(draws)], rounds)
        shown = ", ".join(f"{way} {median_ms(found):.2f} ms" for way, found in times.items())
        print(f"{name}: {shown}: {ratio(times['moved'], times['as written']):.2f} of the time", flush=True)


#: Width and examples of the perceptrons of `shards`.
PERCEPTRONS = ((1_024, 64), (1_024, 512), (256, 2_048))


def measure_shards(rounds: int = 8) -> None:
    """Both ways in turns, and the GPT of the first week, whose leaves are many and small."""
    models = {f"4 layers of {w} x {w}, {n} examples": perceptron(4, w, n) for w, n in PERCEPTRONS}
    for name, model in (models | {"GPT": gpt()}).items():
        step, params = step_of(model.loss), model.init(jax.random.key(0))
        batches = [model.batch(k) for k in range(4)]
        runners = {}
        for way in ("ps", "allreduce"):
            own = jax.tree.map(jnp.copy, params)
            planned: Any = autopar.parallelize(step, strategy={"0/**": way})
            runners[way] = Runner(planned, (own, TX.init(own)))
        times = alternate(runners, lambda k, given=batches: given[k % len(given)], rounds)
        shown = ", ".join(f"{way} {median_ms(found):.1f} ms" for way, found in times.items())
        print(f"{name}: {shown}: {ratio(times['ps'], times['allreduce']):.2f} of the time", flush=True)


def _step_with(form: Callable[[jax.Array], jax.Array], optimizer: optax.GradientTransformation) -> Any:
    def step(state: Any, ids: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda table: jnp.mean(jnp.tanh(form(table[ids])) ** 2))(state["table"])
        update, slots = optimizer.update(grad, state["slots"], state["table"])
        return {"table": state["table"] + update, "slots": slots}, loss

    return step


def measure_whole(rounds: int = 8) -> None:
    """Measures tables that are whole, and spread ones, for bags of 10 and of 50 ids."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params: Any, batch: Any) -> Any:
        pooled = [table[ids].sum(1) for table, ids in zip(params["tables"], batch, strict=True)]
        return (jnp.tanh(jax.nn.relu(jnp.concatenate(pooled, -1) @ params["in"]) @ params["out"]) ** 2).mean()

    optimizer = optax.adagrad(0.05)

    def train_step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, slots = optimizer.update(gradients, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, value

    for rows, length in ((20_000, 10), (100_000, 50)):
        rng = np.random.default_rng(0)
        params = {"tables": [jnp.zeros((rows, 64)) for _ in range(8)]}
        params |= {"in": jnp.ones((512, 64)) / 512, "out": jnp.ones((64, 1)) / 64}
        batches = [list(rng.integers(0, rows, (8, 512 * DEVICES, length)).astype(np.int32)) for _ in range(4)]
        runners, sent = dict[str, Runner](), dict[str, float]()
        for way in ("whole", "spread"):
            with mock.patch.object(choose, "device_owners", choose.device_owners if way == "whole" else _nowhere):
                step = autopar.parallelize(train_step, mesh=mesh, strategy={"params/tables/*": "ps"})
                state = autopar.materialize({"params": params, "slots": optimizer.init(params)})
                plan = known(step.planned_for(state, batches[0])).compiled.plan
            sent[way] = sum(table.sent["ps"] for table in plan.tables) / 2**20
            runners[way] = Runner(step, state)
        found = alternate(runners, lambda n, of=batches: of[n % len(of)], rounds, turns=dict.fromkeys(runners, 4))
        turns = sorted(b / a for a, b in zip(found["whole"], found["spread"], strict=True))
        print(
            f"8 tables of {rows} x 64, bags of {length}: a device sends {sent['whole']:.2f} MiB in place of "
            f"{sent['spread']:.2f}; {median_ms(found['whole']):.1f} and {median_ms(found['spread']):.1f} ms: "
            f"{ratio(found['spread'], found['whole']):.2f} times as fast (turns {turns[0]:.2f} to {turns[-1]:.2f})",
            flush=True,
        )


def _nowhere(*_: Any) -> tuple[dict[int, int], dict[int, str]]:
    return {}, {}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    measures = {"border": measure_border, "shards": measure_shards, "whole": measure_whole}
    if sys.argv[1] in measures:
        measures[sys.argv[1]]()
    else:
        measure(int(sys.argv[1]))
