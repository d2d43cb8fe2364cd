"""One device: autopar against plain jit and against the best that one can write by hand.

Every baseline is jitted and donated, on the same batch and dtype, alternating with autopar in one run.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from benchmarks.lookup import bare_step, hand_step, make_state, plain_step, transformation, zipf_batches
from benchmarks.timing import Runner, alternate, median_ms, ratio


def lookup(rows: int = 800_000, rounds: int = 5, hand_rounds: int = 30) -> None:
    """V=800,000, D=256, 640 Zipf ids, clip and Adagrad."""
    batches = zipf_batches(rows)
    planned = autopar.parallelize(plain_step)
    fast = {
        "autopar": Runner(planned, make_state(rows)),
        "hand": Runner(jax.jit(hand_step, donate_argnums=0), make_state(rows)),
    }
    times = alternate(fast, batches, hand_rounds)
    assert planned.plan is not None and planned.plan.lifts, "the table is lifted"
    told = {k: f"{median_ms(v):.2f} ms" for k, v in times.items()}
    print(f"V={rows:,}: {told}; autopar / by hand {ratio(times['autopar'], times['hand']):.3f}", flush=True)
    del fast["hand"]
    fast["plain"] = Runner(jax.jit(plain_step, donate_argnums=0), make_state(rows))
    times = alternate(fast, batches, rounds, turns={"autopar": 40, "plain": 2})
    told = {k: f"{median_ms(v):.2f} ms" for k, v in times.items()}
    print(f"V={rows:,}: {told}; plain / autopar {ratio(times['plain'], times['autopar']):.1f}", flush=True)


def crossover() -> None:
    """Dense against lifted for tables of few rows, without a model around them: where does lifting begin to pay?

    `cost.model.lifting_pays` has its constants from this.
    """
    for dim in (8, 64, 256):
        for ids in (64, 640, 6400):
            ratios = [(n, _against_plain(int(ids * n), dim, ids)) for n in (1, 2, 4, 8, 16, 32)]
            told = ", ".join(f"{n} rows/id {r:.2f}" for n, r in ratios)
            print(f"plain / lifted at D={dim}, {ids} ids: {told}", flush=True)


def _against_plain(rows: int, dim: int, ids: int) -> float:
    def uniform(k: int) -> dict[str, Any]:
        return {"ids": jnp.asarray(np.random.default_rng(k).integers(0, rows, (ids,)), jnp.int32)}

    def make() -> dict[str, Any]:
        params = {"emb": jax.random.normal(jax.random.key(0), (rows, dim)) * 0.1}
        return {"params": params, "opt": transformation().init(params)}

    runners = {
        "lifted": Runner(autopar.parallelize(bare_step, strategy="ps"), make()),
        "plain": Runner(jax.jit(bare_step, donate_argnums=0), make()),
    }
    times = alternate(runners, uniform, 12)
    return ratio(times["plain"], times["lifted"])


def dispatch(leaves: int = 300, calls: int = 50, rounds: int = 60) -> None:
    """What a call costs on top of the compiled function's own dispatch."""

    def touch(state: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [s + x for s in state], x

    planned, plain = autopar.parallelize(touch, donate=False), jax.jit(touch)
    state, x = [jnp.float32(k) for k in range(leaves)], jnp.float32(1)
    times: dict[str, list[float]] = {"planned": [], "plain": []}
    for _ in range(rounds + 3):
        for name, function in (("planned", planned), ("plain", plain)):
            start = time.perf_counter()
            for _ in range(calls):
                out = function(state, x)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / calls)
    added = ratio(times["planned"][3:], times["plain"][3:]) - 1
    print(f"{leaves} leaves: jit {median_ms(times['plain'][3:]):.3f} ms a call, autopar adds {added:+.1%}")


def planning() -> None:
    """autopar's own time, without JAX's tracing and lowering, against XLA's compile time."""
    for layers in (20, 80, 320):
        step, state, batch = _deep(layers)
        planned = autopar.parallelize(step, strategy="ps")
        start = time.perf_counter()
        entry = planned.entry(state, batch)
        own = time.perf_counter() - start - entry.trace_s
        lowered = planned.lower(state, batch)
        start = time.perf_counter()
        lowered.compile()
        compiling = time.perf_counter() - start
        count = entry.compiled.records[0].note.split()[0]
        print(f"{count} equations: autopar {own:.2f} s, XLA {compiling:.2f} s, {own / compiling:.1%}", flush=True)


def _deep(layers: int) -> tuple[Any, Any, jax.Array]:
    params = {"emb": jnp.ones((100_000, 8)), "w": [jnp.eye(8) for _ in range(layers)]}
    tx = transformation()

    def step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(p: Any) -> jax.Array:
            x = p["emb"][ids]
            for w in p["w"]:
                x = jnp.tanh(x @ w) + x
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": params, "opt": tx.init(params)}, jnp.zeros((4, 5), jnp.int32)
