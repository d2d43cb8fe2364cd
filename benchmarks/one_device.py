"""One device: autopar against plain jit and against the best that one can write by hand.

Every baseline is jitted and donated, on the same batch and dtype, alternating with autopar in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from benchmarks.lookup import (
    HIDDEN,
    IDS,
    D,
    bare_step,
    hand_step,
    loss_of,
    make_state,
    plain_step,
    transformation,
    zipf_batches,
    zipf_ids,
)
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
        entry = planned.planned_for(state, batch)
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


# --- AdamW moves every row in every step; autopar leaves untouched ones to later steps, and is exact ---

RATE, DECAY, B1, B2, EPS, CLIP = 1e-3, 1e-2, 0.9, 0.999, 1e-8, 1.0
#: Turns, and steps of one, of which the first few aren't timed: a plain step leaves a machine slow for a while.
TURNS, STEPS, SKIPPED = 6, {"plain": 2, "autopar": 360, "lazy by hand": 60}, 10

Step = Callable[[Any, Any], tuple[Any, Any]]


def _layer(rows: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(rows @ w) - rows) ** 2)


#: What is done with the rows, and the shapes of its weights.
MODELS: dict[str, tuple[Callable[..., jax.Array], list[tuple[int, int]]]] = {
    "a layer": (_layer, [(D, D)]),
    "an MLP": (loss_of, [(D, HIDDEN), (HIDDEN, D)]),
}


def adamw_transformation() -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(RATE, 100_000)
    adam = optax.adamw(schedule, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
    return optax.chain(optax.clip_by_global_norm(CLIP), adam)


def _adamw_steps(model: Callable[..., jax.Array]) -> tuple[Step, Step]:
    """What a user writes, and lazy AdamW by hand: the same on the touched rows; the others don't move."""

    def plain_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
        def loss_fn(params: dict[str, Any]) -> jax.Array:
            return model(params["emb"][batch["ids"]], *params["weights"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = adamw_transformation().update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def lazy_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
        ids, params = batch["ids"], state["params"]
        extent = params["emb"].shape[0]
        unique, inverse = jnp.unique(ids.ravel(), return_inverse=True, size=min(extent, ids.size), fill_value=extent)
        at = jnp.where(unique < extent, unique, extent + jnp.arange(unique.size, dtype=unique.dtype))

        def pull(leaf: jax.Array) -> jax.Array:
            return leaf.at[unique].get(mode="fill", fill_value=0, indices_are_sorted=True)

        def commit(leaf: jax.Array, rows: jax.Array) -> jax.Array:
            return leaf.at[at].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)

        is_table = [leaf.shape == params["emb"].shape for leaf in jax.tree.leaves(state)]
        leaves, tree = jax.tree.flatten(state)
        rows = tree.unflatten([pull(x) if t else x for x, t in zip(leaves, is_table, strict=True)])
        new, loss = plain_step(rows, {"ids": inverse.reshape(ids.shape)})
        pairs = zip(leaves, jax.tree.leaves(new), is_table, strict=True)
        return tree.unflatten([commit(old, x) if t else x for old, x, t in pairs]), loss

    return plain_step, lazy_step


def adamw(rows: int = 800_000) -> None:
    """V=800,000, D=256, 640 Zipf ids, clip by the norm over all, AdamW with decay and a schedule; two models."""
    for name in MODELS:
        _adamw(rows, name)


def _adamw(rows: int, name: str) -> None:
    model, shapes = MODELS[name]
    plain_step, lazy_step = _adamw_steps(model)
    planned = autopar.parallelize(plain_step)
    steps: dict[str, Step] = {
        "plain": jax.jit(plain_step, donate_argnums=0),
        "autopar": planned,
        "lazy by hand": jax.jit(lazy_step, donate_argnums=0),
    }
    states = {name: _adamw_state(rows, shapes) for name in steps}
    batches = [{"ids": jnp.asarray(zipf_ids(rows, IDS, seed))} for seed in range(1000)]
    touched: set[int] = set()
    for batch in batches:
        touched.update(np.asarray(batch["ids"]).ravel().tolist())
    _compare(steps, states, batches, f"{name}, {len(touched) / rows:.1%} of the rows touched")
    _evaluations(planned, states, batches, model)
    print(autopar.explain(planned))
    everything = np.random.default_rng(0).permutation(rows)
    for start in range(0, rows, IDS[0] * IDS[1]):
        ids = np.resize(everything[start : start + IDS[0] * IDS[1]], IDS).astype(np.int32)
        states["autopar"], _ = planned(states["autopar"], {"ids": jnp.asarray(ids)})
    _compare(steps, states, batches, f"{name}, every row touched")


def _evaluations(step: Step, states: dict[str, Any], batches: list[Any], model: Callable[..., jax.Array]) -> None:
    """Seconds of an evaluation that looks rows up, 20 steps after the last one."""

    def evaluate(state: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
        return model(state["params"]["emb"][batch["ids"]], *state["params"]["weights"])

    sides = {"autopar": autopar.parallelize(evaluate), "plain": jax.jit(evaluate)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(1, 12):
        for k in range(20):
            states["autopar"], _ = step(states["autopar"], batches[20 * turn + k])
        jax.block_until_ready(states["autopar"])
        for name, side in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(side(states[name], batches[-turn]))
            seconds[name].append(time.perf_counter() - start)
    mine, plain = (1e3 * float(np.median(seconds[name][1:])) for name in sides)  # the first one compiles
    print(f"  evaluation, 20 steps after the last one: autopar {mine:.2f} ms, plain {plain:.2f}")


def _adamw_state(rows: int, shapes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    weights = [jax.random.normal(k, shape) * 0.05 for k, shape in zip(keys[1:], shapes, strict=True)]
    params = {"emb": jax.random.normal(keys[0], (rows, D)) * 0.01, "weights": weights}
    return {"params": params, "opt": adamw_transformation().init(params)}


def _compare(steps: Mapping[str, Step], states: dict[str, Any], batches: list[Any], told: str) -> None:
    """Seconds a step, a mean of each turn, and how even steps are."""
    means: dict[str, list[float]] = {name: [] for name in steps}
    every: dict[str, list[float]] = {name: [] for name in steps}
    first: dict[str, float] = {}
    done = 0
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            count = STEPS[name]
            seconds = []
            for k in range(count):
                start = time.perf_counter()
                states[name], loss = step(states[name], batches[(done + k) % len(batches)])
                jax.block_until_ready((states[name], loss))
                seconds.append(time.perf_counter() - start)
            if turn == 0:  # this one compiles, also beside the steps
                first[name] = float(np.median(seconds[1:]))
            else:
                timed = seconds[min(SKIPPED, count - 1) :]
                means[name].append(float(np.mean(timed)))
                every[name] += timed
        done += max(STEPS.values())
    total = {name: float(np.mean(found)) * 1e3 for name, found in means.items()}
    shares = {name: np.quantile(found, (0.5, 0.99, 1)) * 1e3 for name, found in every.items()}
    shown = "\n".join(
        f"  {name}: mean {total[name]:.1f} ms, median {p50:.1f}, p99 {p99:.1f}, longest {longest:.1f}; "
        f"before that, in {STEPS[name]} steps, median {1e3 * first[name]:.1f}"
        for name, (p50, p99, longest) in shares.items()
    )
    print(
        f"{told}:\n{shown}\n  plain / autopar {total['plain'] / total['autopar']:.1f}, "
        f"autopar / lazy {total['autopar'] / total['lazy by hand']:.2f}",
        flush=True,
    )


# --- microbatches ---

LAYERS, WIDTH, EXAMPLES = 16, 256, 4096
COUNTS = (1, 2, 4, 8, 16)


def _perceptron_step(ws: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss_of(ws: Any) -> jax.Array:
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_of)(ws)
    return [w - g for w, g in zip(ws, grads, strict=True)], loss


def _perceptron() -> Any:
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in jax.random.split(jax.random.key(0), LAYERS)]


def microbatches() -> None:
    """16 layers of 256 x 256, 4096 examples."""
    x = jnp.ones((EXAMPLES, WIDTH))
    steps = {m: autopar.parallelize(_perceptron_step, microbatches=m) for m in COUNTS}
    sizes = {m: s.lower(_perceptron(), x).compile().memory_analysis().temp_size_in_bytes for m, s in steps.items()}
    runners = {str(m): Runner(s, _perceptron()) for m, s in steps.items()}
    times = alternate(runners, lambda k: x, 8)
    for m in COUNTS:
        print(f"M={m}: {sizes[m] / 2**20:.1f} MiB of temporaries, {median_ms(times[str(m)]):.1f} ms a step", flush=True)
