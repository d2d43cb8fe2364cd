"""Steps with dense parameters in host memory, against plain JAX: in one process, and by every rank of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.mpi.machines import exchange
from autopar.tables.host import HostTable

RANK, RANKS = jax.process_index(), jax.process_count()
HOSTS = ("ps", "hosts")
#: Of a weight [ROWS, WIDTH]; neither 2 nor 3 ranks divide its rows.
ROWS, WIDTH, EXAMPLES = 71, 6, 24
ALL = {"params/emb": HOSTS, "params/**": HOSTS}

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adamw": optax.adamw(0.01, mu_dtype=jnp.float32),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
    "lamb": optax.lamb(0.01),  # by the norms of the leaf and of its update
}


def make_state(tx: optax.GradientTransformation, dtype: Any = jnp.float32) -> Any:
    """A table, a weight (in `dtype`), a bias and a small weight."""
    rng = np.random.default_rng(0)
    shapes = {"emb": (40, 5), "w": (ROWS, WIDTH), "b": (WIDTH,), "v": (WIDTH, 5)}
    params = {k: jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for k, s in shapes.items()}
    params["w"] = params["w"].astype(dtype)
    return {"count": jnp.int32(0), "opt": tx.init(params), "params": params}


def batch_of(seed: int, examples: int = EXAMPLES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, ids = rng.normal(size=(examples, ROWS)), rng.integers(0, 40, examples)
    return {"x": x.astype(np.float32), "ids": ids.astype(np.int32)}


def loss_of(params: Any, batch: Any, *, norm: bool = False) -> jax.Array:
    h = batch["x"] @ params["w"].astype(jnp.float32)
    if norm:
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
    return jnp.mean((jnp.tanh(h + params["b"]) @ params["v"] - params["emb"][batch["ids"]]) ** 2)


def step_of(tx: optax.GradientTransformation, *, norm: bool = False) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        params = state["params"]
        value, grads = jax.value_and_grad(lambda p: loss_of(p, batch, norm=norm))(params)
        updates, opt = tx.update(grads, state["opt"], params)
        return {"count": state["count"] + 1, "opt": opt, "params": optax.apply_updates(params, updates)}, value

    return step


def hosted_paths(tree: Any) -> set[str]:
    """Paths of leaves on hosts, by their last names and that of the optimizer's part."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, HostTable))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, x in found if isinstance(x, HostTable)}


def trained(step: Callable[..., Any], state: Any, strategy: Any, examples: int = EXAMPLES) -> tuple[Any, Any]:
    """The planned step, and its state after four steps, each of which agrees with plain JAX."""
    planned, plain = autopar.parallelize(step, strategy=strategy), jax.jit(step)
    mine, theirs = jax.tree.map(jnp.copy, state), state
    for k in range(4):
        mine, value = planned(mine, batch_of(k, examples))
        theirs, expected = plain(theirs, batch_of(k, examples))
        np.testing.assert_allclose(float(value), float(expected), rtol=2e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        tolerance = 1e-2 if a.dtype == jnp.bfloat16 else 1e-5
        found, wanted = np.asarray(b, np.float32), np.asarray(a, np.float32)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=str(path))
    return planned, mine


def check_optimizers() -> None:
    """Each one's slots are with their leaf; what isn't named stays on the devices."""
    slots = {"sgd": 0, "momentum": 1, "adagrad": 1, "lamb": 2}
    for name, tx in OPTIMIZERS.items():
        _, state = trained(step_of(tx), make_state(tx), {"params/w": HOSTS})
        hosted = hosted_paths(state)
        assert len(hosted) == 1 + slots.get(name, 2) and all(path.endswith("/w") for path in hosted), (name, hosted)


def check_16_bit_weights() -> None:
    """Weights of 16 bits with a slot of 32."""
    _, state = trained(step_of(OPTIMIZERS["adamw"]), make_state(OPTIMIZERS["adamw"], jnp.bfloat16), {"params/w": HOSTS})
    assert state["params"]["w"].dtype == jnp.bfloat16 and state["opt"][0].mu["w"].dtype == jnp.float32
    assert len(hosted_paths(state)) == 3


def check_beside_a_table() -> None:
    """All parameters on hosts, the table by its touched rows, which are deferred; with MPI's reductions and by psum."""
    tx = OPTIMIZERS["clipped"]
    for norm in (False, True):
        planned, state = trained(step_of(tx, norm=norm), make_state(tx), ALL)
        hosted = hosted_paths(state)
        parts = ("params", "opt/1/0/mu", "opt/1/0/nu")
        assert hosted == {f"{part}/{k}" for part in parts for k in ("emb", "w", "b", "v")}
        assert planned.plan.table("params/emb").log_steps and not planned.plan.table("params/w").log_steps
        if RANKS > 1:
            assert planned.plan.reduction_backend == ("psum" if norm else "mpi")


def check_batches_that_ranks_do_not_divide() -> None:
    """Every rank computes the gradient of all examples, and it counts once."""
    trained(step_of(OPTIMIZERS["sgd"]), make_state(OPTIMIZERS["sgd"]), {"params/w": HOSTS}, examples=7)


def check_the_state() -> None:
    """What is made in shards, read, evaluated, given away, planned by a file, and verified."""
    tx = OPTIMIZERS["momentum"]
    step = autopar.parallelize(step_of(tx), strategy={"params/w": HOSTS})
    start = autopar.init(lambda key: make_state(tx), jax.random.key(0), step=step, batch=batch_of(0))
    weight = start["params"]["w"]
    assert isinstance(weight, HostTable) and weight.storage.rows.shape == (-(-ROWS // RANKS), WIDTH)
    np.testing.assert_array_equal(np.asarray(weight), make_state(tx)["params"]["w"])
    state, _ = step(start, batch_of(0))
    assert start["params"]["w"].is_deleted()
    whole = autopar.materialize(state)
    assert not hosted_paths(whole)
    np.testing.assert_array_equal(state["params"]["w"][np.array([3, -1])], np.asarray(whole["params"]["w"])[[3, -1]])
    for evaluate in (lambda s, batch: loss_of(s["params"], batch), lambda s, _: jnp.abs(s["opt"][0].trace["w"]).max()):
        found, wanted = autopar.parallelize(evaluate)(state, batch_of(9)), jax.jit(evaluate)(whole, batch_of(9))
        np.testing.assert_allclose(float(found), float(wanted), rtol=1e-6)
    found = autopar.verify(step, make_state(tx), batch_of(0), steps=3)
    assert found.ok, str(found)
    same = autopar.parallelize(step_of(tx), plan=step.plan)
    again, _ = same(make_state(tx), batch_of(0))
    np.testing.assert_array_equal(np.asarray(again["params"]["w"]), np.asarray(whole["params"]["w"]))


def check_bytes() -> None:
    """A rank sends what `explain` says, (N - 1) / N of the leaf each way; ids are sent in the first step only."""
    tx, rows = OPTIMIZERS["momentum"], 12 * RANKS

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch[:, :rows] @ w) ** 2))(state["w"])
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value

    planned = autopar.parallelize(step, strategy={"w": HOSTS})
    weight = jnp.ones((rows, WIDTH))
    state, here = {"w": weight, "opt": tx.init(weight)}, exchange()
    sent = []
    for k in range(3):
        before = dict(here.sent_bytes)
        state, _ = planned(state, batch_of(k)["x"])
        sent.append({name: n - before[name] for name, n in here.sent_bytes.items()})
    each = (RANKS - 1) * weight.nbytes // RANKS
    assert sent[2]["rows"] == sent[2]["gradients"] == each and sent[2]["ids"] == 0, sent
    assert RANKS == 1 or (sent[0]["ids"] > 0 and planned.plan.table("w").sent["ps on hosts"] == 2 * each)


def check_what_is_refused() -> None:
    """One error each: what, where, and what to do."""

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda s: loss_of(s["params"], batch) * s["scale"])(state | {"copy": 0.0, "numbers": 0.0})
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads["params"])
        rest = {"scale": state["scale"] * 0.9, "copy": grads["params"]["w"], "numbers": state["numbers"] + 1}
        return {"params": new, **rest}

    params = make_state(OPTIMIZERS["sgd"])["params"]
    state = {"params": params, "scale": jnp.ones(()), "copy": jnp.zeros((ROWS, WIDTH)), "numbers": jnp.arange(5)}
    for path, told in (
        ("scale", "scale can't be on hosts: it has a single element"),
        ("numbers", "numbers can't be on hosts: it is i32[5]"),
        ("copy", "'copy' matches no parameter that can be on hosts"),
        ("**", "'params/x' matches no parameter"),
    ):
        strategy = {"params/x" if path == "**" else path: HOSTS}
        _refused(autopar.StrategyError, told, step, strategy, state)
    tx = OPTIMIZERS["sgd"]
    _refused(autopar.StrategyError, "microbatches=2", step_of(tx), {"params/w": HOSTS}, make_state(tx), microbatches=2)
    sync = autopar.sync.Average(every=2)
    _refused(autopar.ArgumentsError, "sync=", step_of(tx), {"params/w": HOSTS}, make_state(tx), sync=sync)


def _refused(error: type[Exception], told: str, step: Any, strategy: Any, state: Any, **options: Any) -> None:
    try:
        autopar.parallelize(step, strategy=strategy, **options)(state, batch_of(0))
    except error as found:
        assert told in str(found), str(found)
    else:
        raise AssertionError(f"{told}: it is taken")
