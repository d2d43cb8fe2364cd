"""What every rank runs in `test_worlds.py`: stages on several ranks, against one device's numbers."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.mpi.world import world
from autopar.planning.replay import replay_minibatches
from autopar.run.stage_executor import StageExecutor
from tests.support.microbatched import batch, difference, language_model, numbers, stages_of
from tests.support.pickled import assert_no_part_is_pickled

jax.config.update("jax_enable_x64", True)
RANK, RANKS, COUNT = jax.process_index(), jax.process_count(), jax.device_count()
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def _params(state: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(autopar.materialize(state["params"]))]


def check_schedules() -> None:
    step, make = language_model(CLIPPED, dropout=0.2, tied=True)
    pipelines = [autopar.Pipeline(COUNT, "1f1b", 4), autopar.Pipeline(COUNT, "zero-bubble", 4)]
    pipelines += [autopar.Pipeline(2 * COUNT, "interleaved", 4)] if COUNT == 2 else []
    pipelines += [autopar.Pipeline(2, "gpipe", 4, replicas=(1, COUNT - 1))] if COUNT > 2 else []
    for pipeline in pipelines:
        assert difference(autopar.parallelize(step, pipeline=pipeline), step, make) < 1e-12, pipeline


def check_the_bits_are_those_of_one_process() -> None:
    """Of as many devices of one's own, in the same stages."""
    step, make = language_model(CLIPPED)
    pipeline = autopar.Pipeline(stages_of(2), microbatches=4)
    own = jax.sharding.Mesh(jax.local_devices(), ("data",))
    states = []
    for planned in (
        autopar.parallelize(step, pipeline=pipeline, mesh=jax.sharding.Mesh(jax.devices()[:: COUNT // 2], ("data",))),
        autopar.parallelize(step, pipeline=pipeline, mesh=own),
    ):
        state = make()
        for k in range(3):
            state, _ = planned(state, batch(k))
        states.append(_params(state))
    for a, b in zip(*states, strict=True):
        assert np.array_equal(a, b)


def check_runs_without_a_flush() -> None:
    """Bit for bit their own replay, whatever tasks take."""
    run, delays = StageExecutor._run, random.Random(RANK)

    def delayed(*args: Any) -> None:
        time.sleep(0.01 * delays.random() ** 4)
        run(*args)

    StageExecutor._run = delayed
    for schedule, slack, options in (
        ("stash", 1, {"tied": True, "dropout": 0.2}),
        ("spectrain", 0, {"tx": CLIPPED}),
    ):
        step, make = language_model(options.pop("tx", optax.sgd(0.1, momentum=0.9)), **options)
        planned = autopar.parallelize(step, pipeline=autopar.Pipeline(COUNT, schedule, slack=slack))
        batches = [batch(k) for k in range(2 * COUNT + 1)]
        state, _, results = [*autopar.train_batches(planned, make(), batches)][-1]
        compiled = planned.latest.compiled
        minibatches = [jax.tree.leaves((make(), given)) for given in batches]
        expected = replay_minibatches(compiled.program.staged, compiled.analysed.new_states, minibatches)[-1]
        mine = jax.tree.leaves(autopar.materialize((state, results)))
        for a, b in zip(mine, expected, strict=True):
            assert np.array_equal(numbers(a), numbers(b)), schedule
    StageExecutor._run = run


def check_states_without_a_flush() -> None:
    """Saved in mid-epoch; onto other stages; read by all ranks."""
    step, make = language_model(optax.sgd(0.1, momentum=0.9))
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(stages_of(COUNT), "spectrain"))
    state, folder = make(), Path(os.environ["XDG_CACHE_HOME"]).parent / "asynchronous"
    for k in range(3):
        state, _ = planned(state, batch(k))
    autopar.save(folder, state)
    assert_no_part_is_pickled(state["params"]["words"], RANK)
    read = np.asarray(state["params"]["words"])
    other = autopar.parallelize(step, pipeline=autopar.Pipeline(stages_of(COUNT), microbatches=2))
    found = autopar.restore(folder, make(), step=other, batch=batch(0)).state
    assert np.array_equal(read, np.asarray(found["params"]["words"]))
    assert_no_part_is_pickled(found["params"]["words"], RANK)
    other(found, batch(3))


def check_bytes_are_those_of_the_plan() -> None:
    """What ranks send in a step: activations and their gradients at each border, and some scalars for the update."""
    step, make = language_model(optax.sgd(0.1))
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(COUNT, microbatches=4))
    state, _ = planned(make(), batch(0))
    messages = planned.latest.runner.messages
    before = sum(messages.sent_bytes.values())
    state, _ = planned(state, batch(1))
    mine = sum(messages.sent_bytes.values()) - before
    pipeline = planned.plan.pipeline
    predicted = 4 * sum(stage.ahead_bytes + stage.back_bytes for stage in pipeline.stages) + pipeline.tied_bytes
    sent = world().comm.allreduce(mine)
    metrics = 2048  # results, which go to all ranks, and norms
    assert predicted <= sent <= predicted + metrics * COUNT, (predicted, sent)


def check_tables_by_their_rows() -> None:
    step, make = language_model(optax.adagrad(0.1), sampled=True)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(COUNT, microbatches=4), strategy="ps")
    assert difference(planned, step, make) < 1e-12
    assert planned.plan.table("params/words").lifted


def _divided() -> Any:
    """Each rank's devices divide products."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(RANKS, -1), ("data", "tensor"))
    return {"mesh": mesh, "strategy": "tensor"}


def check_products_divided_within_stages() -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(RANKS, "zero-bubble", 4), **_divided())
    assert difference(planned, step, make) < 1e-12
    assert planned.plan.tensor.axes and planned.plan.pipeline.size == COUNT
    across = jax.sharding.Mesh(np.array(jax.devices()).reshape(RANKS, -1).T, ("data", "tensor"))
    with pytest.raises(autopar.ArgumentsError, match="are of several processes"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(2), mesh=across, strategy="tensor")


def check_the_state_of_divided_products() -> None:
    check_the_state(stacked=True, **_divided())


def check_the_state(*, stacked: bool = False, **divided: Any) -> None:
    """Made where its stages are, saved, and gone on with in other stages."""
    folder = Path(os.environ["XDG_CACHE_HOME"]).parent / f"state-{stacked}"
    step, make = language_model(CLIPPED, stacked=stacked)
    stages = RANKS if divided else COUNT
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(stages, microbatches=4), **divided)
    state = autopar.init(lambda key: make(), jax.random.key(0), step=planned, batch=batch(0))
    plain = jax.jit(make)()
    for a, b in zip(_params(state), jax.tree.leaves(plain["params"]), strict=True):
        assert np.array_equal(a, b)
    held = [value is not None for leaf in jax.tree.leaves(state["params"]) for value in leaf.values]
    assert any(held) and not all(held)
    old, _ = planned(state, batch(0))
    autopar.save(folder, old)
    state, _ = planned(old, batch(1))
    with pytest.raises(autopar.DonatedStateError):
        planned(old, batch(1))
    other = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=4, replicas=(1, COUNT - 1)))
    again = autopar.restore(folder, old).state
    moved, _ = other(again, batch(1))  # leaves go where the other pipeline has them
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(again["params"]))
    for a, b in zip(_params(moved), _params(state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    for like, again in ((jax.eval_shape(make), other), (state, planned)):
        step_of = {"step": again, "batch": batch(0)} if again is other else {}
        restored = autopar.restore(folder, like, **step_of).state
        assert isinstance(restored["params"]["words"], autopar.StageArray)
        restored, _ = again(restored, batch(1))
        for a, b in zip(_params(restored), _params(state), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def check_the_state_of_stacked_layers() -> None:
    check_the_state(stacked=True)


def check_what_is_refused() -> None:
    step, make = language_model(CLIPPED)
    if COUNT > 2:
        planned = autopar.Pipeline(2, microbatches=4)
        if RANK == RANKS - 1:
            with pytest.raises(autopar.ArgumentsError, match=f"this is process {RANK} of {RANKS}"):
                autopar.parallelize(step, pipeline=planned)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(COUNT, microbatches=4))
    state, _ = planned(make(), batch(0))
    words = np.asarray(state["params"]["words"])
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(state["params"]["words"]), words + 1)  # by all ranks
    assert "on rank 0" in repr(state["params"]["words"])
