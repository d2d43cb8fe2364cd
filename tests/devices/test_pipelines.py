"""Microbatches on several devices, and stages on devices of their own: the plain step's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.support.microbatched import EXAMPLES, batch, difference, language_model

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "strategy", ["allreduce", "ps", "allgather", "allreduce_rows", {"params/layers/**": "ps", "**": "auto"}]
)
def test_microbatches_of_each_device(strategy: Any) -> None:
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, microbatches=3, strategy=strategy, mesh=jax.make_mesh((4,), ("data",)))
    assert difference(planned, step, make) < 1e-12


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 1), (2, 3), (3, 8), (4, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages(stages: int, count: int, schedule: str) -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    pipeline = autopar.Pipeline(stages, schedule, count)
    assert difference(autopar.parallelize(step, pipeline=pipeline), step, make) < 1e-12


@pytest.mark.parametrize("tx", [CLIPPED, optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 9))])
def test_a_weight_of_two_stages(tx: optax.GradientTransformation) -> None:
    """Tied embeddings: first and last stage."""
    step, make = language_model(tx, tied=True, remat=True)
    assert difference(autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=4)), step, make) < 1e-12


def test_schedules_agree_bit_by_bit() -> None:
    """The same programs on the same values: when they run changes nothing."""
    step, make = language_model(optax.sgd(0.1), dropout=0.2)
    found = []
    for schedule in ("1f1b", "gpipe"):
        planned, state = autopar.parallelize(step, pipeline=autopar.Pipeline(4, schedule, 4)), make()
        for k in range(3):
            state, metrics = planned(state, batch(k))
        found.append([np.asarray(x) for x in jax.tree.leaves((state["params"], metrics))])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)


def test_each_stage_keeps_its_weights() -> None:
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(4, microbatches=4))
    state, _ = planned(make(), batch(0))
    homes = {jax.tree_util.keystr(path): x.device.id for path, x in jax.tree_util.tree_leaves_with_path(state)}
    assert {device for path, device in homes.items() if path.startswith("['params']")} == {0, 1, 2, 3}
    for path, device in homes.items():
        if ".mu" in path or ".nu" in path:  # moments are where their weights are
            assert device == homes["['params']" + path.split("u", 1)[1]], path
    assert "stage 3: " in str(autopar.explain(planned, state, batch(0)))


def test_a_state_in_stages_is_donated_saved_and_goes_on_in_others(tmp_path: Any) -> None:
    step, make = language_model(CLIPPED)
    three, two = (autopar.parallelize(step, pipeline=autopar.Pipeline(n, microbatches=n)) for n in (3, 2))
    old, _ = three(make(), batch(0))
    autopar.save(tmp_path / "state", old)
    state, metrics = three(old, batch(1))
    assert all(x.is_deleted() for x in jax.tree.leaves((old["params"], optax.tree_utils.tree_get(old["opt"], "mu"))))
    restored = autopar.restore(tmp_path / "state", make()).state
    found, expected = two(restored, batch(1))
    for a, b in zip(
        jax.tree.leaves((state["params"], metrics)), jax.tree.leaves((found["params"], expected)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-12)
    together = jax.device_put(state, jax.devices()[0])
    assert float(jax.jit(lambda s: s["params"]["out"].sum() + s["params"]["words"].sum())(together))
    with pytest.raises(autopar.DonatedStateError):
        three(old, batch(1))


def test_nothing_is_sent_but_activations_their_gradients_and_sums() -> None:
    """Slots stay with their weights; the update of a stage reads scalars of the others."""
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=3))
    staged = planned.entry(make(), batch(0)).compiled.program.staged
    made = {v: p for p in staged.programs for v in p.block.outputs}
    given = {v for v, (_, join) in staged.joins.items() if isinstance(join, str)}
    sums = {whole: made[v] for v, (whole, _) in staged.joins.items() if v in given}
    for program in staged.programs:
        for var in program.block.inputs:
            home = staged.homes.get(var)
            assert home in (None, program.stage) or not var.shape, (
                f"{program.phase} {program.stage} reads a leaf of stage {home}"
            )
            source = made.get(var) or sums.get(var)
            if program.phase == "update" and source is not None and source.stage != program.stage:
                assert var.shape == (), f"{var.type} crosses stages in the update"
    assert max(p.level for p in staged.programs if p.phase == "update") == 2


def test_stages_by_patterns() -> None:
    step, make = language_model(CLIPPED)
    patterns = [["params/words", "params/layers/0"], ["params/layers/[1-3]", "params/out"]]
    with pytest.raises(autopar.StrategyError, match=r"params/layers/1/\w belongs to no stage"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(patterns))(make(), batch(0))
    patterns[1] = [f"params/layers/{k}" for k in (1, 2, 3)] + ["params/out"]
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(patterns, microbatches=4))
    assert difference(planned, step, make) < 1e-12
    with pytest.raises(autopar.StrategyError, match="'params/none' of stage 1 matches no weight"):
        autopar.parallelize(step, pipeline=autopar.Pipeline([*patterns[:1], [*patterns[1], "params/none"]]))(
            make(), batch(0)
        )


@pytest.mark.parametrize(
    ("pipeline", "options", "said"),
    [
        ({"stages": 9}, {}, "9 stages, and there are 8 devices"),
        ({"stages": 2, "schedule": "zigzag"}, {}, "there are 'gpipe', '1f1b'"),
        ({"stages": 2, "microbatches": 5}, {}, f"doesn't divide the batch: batch/ids has {EXAMPLES} examples"),
        ({"stages": 2}, {"strategy": "ps"}, "strategy= given together with pipeline="),
        ({"stages": 0}, {}, "give a number"),
    ],
)
def test_bad_pipelines(pipeline: dict[str, Any], options: dict[str, Any], said: str) -> None:
    step, make = language_model(CLIPPED)
    with pytest.raises(autopar.AutoparError) as error:
        autopar.parallelize(step, pipeline=autopar.Pipeline(**pipeline), **options)(make(), batch(0))
    assert said in str(error.value).replace("given/", "batch/")


def test_effects_are_refused() -> None:
    step, make = language_model(CLIPPED)

    def talking(state: Any, given: Any) -> Any:
        jax.debug.print("{}", state["opt"][1][0].count)
        return step(state, given)

    with pytest.raises(autopar.StrategyError, match=r"has an effect, debug_\w+ \(.*test_pipelines.py:\d+\)"):
        autopar.parallelize(talking, pipeline=autopar.Pipeline(2, microbatches=2))(make(), batch(0))


def test_leaves_of_one_value_have_buffers_of_their_own() -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))(state["params"])
        new = jax.tree.map(lambda p, g: p - g, state["params"], grads)
        return {"params": new, "copy": new}, loss

    params = {"a": jnp.eye(4), "b": jnp.eye(4)}
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=2))
    state, expected = {"params": params, "copy": params}, {"params": params, "copy": params}
    x = jnp.arange(16.0).reshape(4, 4) / 16
    for _ in range(3):
        expected, b = jax.jit(step)(expected, x)
        state, a = planned(state, x)
        np.testing.assert_allclose(a, b, atol=1e-14)


def test_more_stages_than_weights() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: (x @ w).sum())(w)
        return w - grad, loss

    with pytest.raises(autopar.StrategyError, match="1 weights to cut between"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=2))(np.eye(4), np.ones((4, 4)))
