"""Where rows and weights meet, and where all rows are read, with tables on hosts; run with `host_cases.py`."""

from __future__ import annotations

from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends import global_arrays
from tests.support import host_reads, interactions
from tests.support.host_models import HOSTED, LOSSES, batch_of, start, step_of
from tests.support.host_reads import HOSTS

ROWS, IDS = 11, 8


def _agrees(step: Any, wrap: Any, steps: int, first: int = 0) -> Any:
    """The planned step, whose results were the plain one's.

    Args:
      step: (State, batch) -> new state, results.
      wrap: A table `t` and weights `w` and `b` -> the state.
      steps: How many.
      first: The lowest id.
    """
    rng = np.random.default_rng(0)
    shapes = {"t": (ROWS, 3), "w": (3, 2), "b": (3,)}
    theirs = mine = wrap({name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()})
    planned, plain = autopar.parallelize(step, strategy={"**t": HOSTS}, donate=False), jax.jit(step)
    for _ in range(steps):
        batch = {"ids": rng.integers(first, ROWS - first // 3, IDS), "y": rng.normal(size=(IDS, 2))}
        (mine, told), (theirs, wanted) = planned(mine, batch), plain(theirs, batch)
        for a, b in zip(jax.tree.leaves((mine, told)), jax.tree.leaves((theirs, wanted)), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)
    return planned


def _loss(params: Any, rows: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean(((rows + params["b"]) @ params["w"] - batch["y"]) ** 2)


def check_interactions() -> None:
    """Whatever way they are written in, no rank needs another one's examples between its programs."""
    for form in interactions.REWRITTEN:
        mine = theirs = interactions.make_params()
        planned = autopar.parallelize(interactions.step_of([form]), strategy={"t*": HOSTS}, donate=False)
        plain = jax.jit(interactions.step_of([form]))
        for k in range(2):
            batch = interactions.make_batch(8, k)
            (mine, told), (theirs, wanted) = planned(mine, batch), plain(theirs, batch)
        for a, b in zip(jax.tree.leaves((mine, told)), jax.tree.leaves((theirs, wanted)), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)
        assert planned.plan is not None and planned.plan.reduction_backend == "mpi"


def check_ids_of_other_examples() -> None:
    """Every rank looks up the ids of all examples, some of them out of range: in several batches."""

    def step(params: Any, batch: Any) -> Any:
        ids = jnp.pad(batch["ids"][:-1], (1, 0))

        def loss(params: Any) -> jax.Array:
            return _loss(params, params["t"].at[ids].get(mode="fill", fill_value=0.5), batch)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def through_weights(params: Any, batch: Any) -> Any:
        """Owners multiply their rows, and each has a part of the weights' gradient; the examples meet before."""

        def loss(params: Any) -> jax.Array:
            return jax.nn.logsumexp((params["t"] @ params["w"])[batch["ids"]] - batch["y"])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    for each, first in ((step, -ROWS), (through_weights, 0)):
        planned = _agrees(each, lambda params: params, steps=4, first=first)
        backend = "psum" if jax.process_count() > 1 else ""
        assert planned.plan is not None and planned.plan.reduction_backend == backend


def check_models_in_which_examples_meet() -> None:
    """Or whose rows are looked up several times, at each turn of a loop: with `psum` and with MPI's reductions."""
    for name, loss in LOSSES.items():
        plain = jax.jit(step_of(loss))
        for examples in (12, 3 * jax.process_count()):  # two devices of a rank don't divide the latter
            step = autopar.parallelize(step_of(loss), strategy=HOSTED)
            mine, theirs = start(), start()
            batches = [batch_of(seed, examples) for seed in range(3)]
            for part, batch in zip(autopar.shard(batches), batches, strict=True):
                (mine, told), (theirs, wanted) = step(mine, part), plain(theirs, batch)
                found = autopar.materialize(mine), told[:2], global_arrays.local(told[2])
                pairs = zip(jax.tree.leaves(found), jax.tree.leaves((theirs, wanted)), strict=True)
                for a, b in pairs:
                    np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5, err_msg=name)
            assert step.plan is not None
            backend = "mpi" if name == "looped" else "psum"
            assert step.plan.reduction_backend == (backend if jax.process_count() > 1 else ""), (name, step.plan)


def check_a_branch_between_two_steps() -> None:
    """It returns rows, which are their owners', and weights, which meet the examples of the second step."""

    def train(state: Any, batch: Any) -> Any:
        params, count = state
        grads = jax.grad(lambda params: _loss(params, params["t"][batch["ids"]], batch))(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        kept = jax.lax.cond(count % 3 < 2, lambda: new, lambda: params)
        return (kept, count + 1), sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    def step(state: Any, batch: Any) -> Any:
        state, first = train(state, batch)
        state, second = train(state, batch)
        return state, (first, second)

    _agrees(step, lambda params: (params, jnp.int32(0)), steps=3)


def check_a_sum_over_examples_times_rows() -> None:
    """Of whose gradients each rank has other numbers: what is broadcast to them is summed over the ranks before."""

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(lambda params: _loss(params, params["t"][batch["ids"]], batch))(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return {**new, "t": new["t"] - grads["t"] * grads["b"]}, grads["b"]

    _agrees(step, lambda params: params, steps=4)


def check_whole_reads() -> None:
    """Reductions over all rows, which the ranks don't divide: in programs of each rank, and in those of all."""

    def normed(state: Any, batch: Any) -> Any:
        def loss_fn(t: jax.Array) -> jax.Array:
            x = t[batch["ids"]].sum(1)
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
            return (x[:, 0] * x[:, 1] ** 2).mean() * jnp.linalg.norm(jax.lax.stop_gradient(t))

        loss, grad = jax.value_and_grad(loss_fn)(state["t"])
        new = state["t"] - 0.1 * grad * host_reads.MASK[:, None]  # some rows are frozen, by an array that has them all
        few = ("norm of the new table", "vdot", "mean row", "mask", "masked gradient", "groups of rows")
        return {"t": new}, (loss, {k: host_reads.REDUCED[k](grad, state["t"], new) for k in few})

    for case, backend in ((host_reads.step_of(host_reads.all_forms), "mpi"), (normed, "psum")):
        step, plain = autopar.parallelize(case, strategy={"t": HOSTS}), jax.jit(case)
        mine, theirs = host_reads.start(), host_reads.start()
        for i in range(2):
            mine, told = step(mine, host_reads.batch(i))
            theirs, wanted = plain(theirs, host_reads.batch(i))
            found = jax.tree_util.tree_leaves_with_path((autopar.materialize(mine), told))
            for (path, a), b in zip(found, jax.tree.leaves((theirs, wanted)), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5, err_msg=str(path))
        assert step.plan is not None and step.plan.reduction_backend == ("" if jax.process_count() == 1 else backend), (
            step.plan.reduction_backend
        )
    given = host_reads.start(), host_reads.batch(0)
    for name in ("sort", "norms of rows"):
        form, told = host_reads.REFUSED[name]
        try:
            autopar.explain(autopar.parallelize(host_reads.step_of(form), strategy={"t": HOSTS}), *given)
        except autopar.StrategyError as error:
            assert told in str(error), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} is taken")
