"""Microbatches on several devices, and stages on devices of their own: the plain step's numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir import schedule as schedules
from autopar.measure.compiled_collectives import read_collectives
from autopar.planning.replay import replay
from tests.support import nano_gpt
from tests.support.explained import explained
from tests.support.microbatched import EXAMPLES, batch, difference, language_model, numbers, stages_of
from tests.support.pairs import diagonal, long

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "strategy",
    ["allreduce", "ps", long("allgather"), long("allreduce_rows"), {"params/layers/**": "ps", "**": "auto"}],
)
def test_microbatches_of_each_device(strategy: Any) -> None:
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, microbatches=3, strategy=strategy, mesh=jax.make_mesh((4,), ("data",)))
    assert difference(planned, step, make) < 1e-12


@pytest.mark.parametrize("options", [{"tied": True, "dropout": 0.2}, {"remat": True}, {"stacked": True}])
def test_microbatches_in_the_program_of_each_device(options: dict[str, Any]) -> None:
    """Dropout masks, checkpoints and loops in it; gradients travel once, behind the last microbatch."""
    step, make = language_model(CLIPPED, **options)
    planned = autopar.parallelize(step, microbatches=2, sparse="off", mesh=jax.make_mesh((4,), ("data",)))
    assert difference(planned, step, make) < 1e-12
    found = read_collectives(planned.lower(make(), batch(0)).compile().as_text())
    assert found and {c.op for c in found} == {"all-reduce"} and {c.times for c in found} == {1}
    assert autopar.check(planned, make(), batch(0)).ok


@pytest.mark.parametrize(
    "pipeline",
    [
        long(autopar.Pipeline(1, "1f1b", 3, replicas=2)),
        autopar.Pipeline(2, "gpipe", 1),
        autopar.Pipeline(2, "1f1b", 3, replicas=(2, 1)),
        autopar.Pipeline(3, "1f1b", 8),
        autopar.Pipeline(3, "gpipe", 4, replicas=(1, 3, 2)),
        long(autopar.Pipeline(4, "gpipe", 8)),
        autopar.Pipeline(4, "interleaved", 4),
        long(autopar.Pipeline(3, "zero-bubble", 8)),
        autopar.Pipeline(2, "zero-bubble", 8, replicas=2),
    ],
    ids=lambda p: f"{p.count} {p.schedule} {p.microbatches} {p.replicas}",
)
def test_stages(pipeline: autopar.Pipeline) -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    planned = autopar.parallelize(step, pipeline=pipeline)
    assert difference(planned, step, make) < 1e-12
    plan = planned.plan.pipeline
    assert (plan.stage_devices, plan.schedule, plan.microbatches) == (
        pipeline.stage_devices,
        pipeline.schedule,
        pipeline.microbatches,
    )


@pytest.mark.parametrize("tx", [CLIPPED, optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 9))])
def test_a_weight_of_two_stages(tx: optax.GradientTransformation) -> None:
    """Tied embeddings: first and last stage."""
    step, make = language_model(tx, tied=True, remat=True)
    assert difference(autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=4)), step, make) < 1e-12


BESIDE_TABLES = {
    "1f1b": autopar.Pipeline(3, "1f1b", 4),
    "zero-bubble": autopar.Pipeline(3, "zero-bubble", 4, replicas=(2, 1, 2), remat=True),
}


@pytest.mark.parametrize(("sampled", "pipeline"), diagonal([False, True], BESIDE_TABLES))
def test_tables_by_their_rows(sampled: bool, pipeline: autopar.Pipeline) -> None:
    """A table is at one stage, which gives its rows to others that look words up in it."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(1e-2))
    step, make = language_model(tx, dropout=0.2, sampled=sampled)
    planned = autopar.parallelize(step, pipeline=pipeline, strategy="ps")
    assert difference(planned, step, make) < 1e-12
    plan = planned.plan
    assert plan.table("params/words").lifted
    assert all(len(stage.seconds) > 1 for stage in plan.pipeline.stages)  # backwards aren't all at the last stage
    assert autopar.check(planned, make(), batch(0))


def test_schedules_agree_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same programs on the same values, as with one microbatch after the other: when they run changes nothing."""
    step, make = language_model(optax.sgd(0.1), dropout=0.2)

    def in_sequence(stage_devices: schedules.StageDevices, microbatches: int, kinds: str = "FB") -> schedules.Schedule:
        orders = [
            tuple(schedules.Task(kind, stage, m) for m in range(microbatches) for kind in kinds)
            for stage in range(len(stage_devices))
        ]
        return schedules.Schedule("sequence", stage_devices, tuple(orders))

    known = {"sequence": in_sequence, "sequence W": functools.partial(in_sequence, kinds="FBW")}
    for name, schedule in known.items():
        monkeypatch.setitem(schedules.SCHEDULES, name, schedules.Rule(name, schedule))
    # The interleaved one is on two devices.
    for names in (("sequence", "1f1b", "gpipe", "interleaved"), ("sequence W", "zero-bubble")):
        found = []
        for schedule in names:
            planned, state = autopar.parallelize(step, pipeline=autopar.Pipeline(stages_of(4), schedule, 4)), make()
            for k in range(3):
                state, metrics = planned(state, batch(k))
            found.append([np.asarray(x) for x in jax.tree.leaves((state["params"], metrics))])
        for first, *others in zip(*found, strict=True):
            assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    "pipeline",
    [
        autopar.Pipeline(4, microbatches=4),
        autopar.Pipeline(2, "zero-bubble", 4, replicas=(1, 3)),
        autopar.Pipeline(4, "interleaved", 4),
        autopar.Pipeline(2, "gpipe", 2, remat=True),
    ],
    ids=lambda p: p.schedule,
)
def test_a_replay_has_the_same_bits(pipeline: autopar.Pipeline) -> None:
    """One action after the other on one device: clipping by a norm of all stages, a weight of two of them, dropout."""
    step, make = language_model(CLIPPED, dropout=0.2, tied=True)
    planned, given = autopar.parallelize(step, pipeline=pipeline, donate=False), (make(), batch(0))
    results = jax.tree.leaves(planned(*given))
    assert planned.latest is not None
    staged = planned.latest.compiled.program.staged
    arguments = dict(zip(staged.inputs, jax.tree.leaves(given), strict=True))
    found = {value.var: x for value, x in replay(staged, planned.latest.runner.timeline, arguments).items()}
    for var, result in zip(staged.outputs, results, strict=True):
        np.testing.assert_array_equal(numbers(found[var]), numbers(result))


@pytest.mark.parametrize(
    "pipeline", [autopar.Pipeline(2, "1f1b", 4), autopar.Pipeline(3, "gpipe", 4, replicas=(1, 1, 2))]
)
def test_verify_of_leaves_on_their_stages(pipeline: autopar.Pipeline) -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    planned = autopar.parallelize(step, pipeline=pipeline)
    state = autopar.init(make, step=planned, batch=batch(0))
    assert autopar.verify(planned, state, batch(0), steps=2).ok
    state, _ = planned(state, batch(0))
    assert autopar.verify(planned, state, batch(1)).ok
    assert autopar.verify(planned, make(), batch(1)).ok


def test_verify_runs_the_stages() -> None:
    """What they compute is compared, not the program that they were cut from."""
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(2, "1f1b", 4))
    known = planned.planned_for(make(), batch(0))
    run = known.runner

    def wrong(leaves: Any) -> Any:
        state, metrics = run(leaves)
        return state, jax.tree.map(lambda x: x + 1, metrics)

    known.runner = wrong
    with pytest.raises(autopar.VerificationError, match="differs from the plain one"):
        autopar.verify(planned, make(), batch(0))


def test_each_stage_keeps_its_weights() -> None:
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(4, microbatches=4))
    state, _ = planned(make(), batch(0))
    homes = {jax.tree_util.keystr(path): x.device.id for path, x in jax.tree_util.tree_leaves_with_path(state)}
    assert {device for path, device in homes.items() if path.startswith("['params']")} == {0, 1, 2, 3}
    for path, device in homes.items():
        if ".mu" in path or ".nu" in path:  # moments are where their weights are
            assert device == homes["['params']" + path.split("u", 1)[1]], path
    assert "(4 stages on 4 devices, 4 microbatches)" in explained(planned, state, batch(0))


def test_replicas_hold_the_same_weights_and_donate_them() -> None:
    step, make = language_model(CLIPPED)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=4, replicas=(1, 3)))
    old, _ = planned(make(), batch(0))
    last = old["params"]["out"]
    assert last.is_fully_replicated and {d.id for d in last.devices()} == {1, 2, 3}
    for shard in last.addressable_shards:
        assert np.array_equal(shard.data, last)
    planned(old, batch(1))
    assert last.is_deleted()
    with pytest.raises(autopar.DonatedStateError):
        planned(old, batch(1))


def test_a_shared_mask_is_drawn_once_by_each_stage() -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=3))
    staged = planned.planned_for(make(), batch(0)).compiled.program.staged
    draws = {p.phase for p in staged.programs for e in p.block.walk() if e.op in ("random_bits", "threefry2x32")}
    assert draws == {"before"}


def test_a_sum_that_no_microbatch_makes() -> None:
    """Of weights alone: each microbatch has it."""

    def step(state: Any, x: jax.Array) -> tuple[Any, Any]:
        def loss(p: Any) -> Any:
            scale = jnp.sum(p["b"] ** 2)
            each = (jnp.tanh(x @ p["a"]) @ p["b"]).sum(-1)
            return jnp.mean(each) + scale, (jnp.broadcast_to(scale, each.shape), each)

        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), metrics

    params, x = {"a": jnp.eye(4), "b": jnp.eye(4)}, jnp.arange(16.0).reshape(4, 4) / 16
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=2), donate=False)
    for a, b in zip(jax.tree.leaves(planned(params, x)), jax.tree.leaves(jax.jit(step)(params, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-13)


def test_statistics_of_microbatches_are_those_of_gpipe() -> None:
    """Batch norm over each microbatch; moving averages over all of them."""
    count = 4

    def run(params: Any, stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        h = x @ params["a"]
        mean = h.mean(0)
        var = jnp.mean((h - mean) ** 2, 0)
        h = jnp.tanh((h - mean) * jax.lax.rsqrt(var + 1e-5) * params["g"])
        new = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        return h @ params["c"], new

    def gradients(state: Any, given: Any) -> Any:
        def loss(params: Any) -> Any:
            y, stats = run(params, state["stats"], given["x"])
            return jnp.mean((y - given["y"]) ** 2), stats

        return jax.value_and_grad(loss, has_aux=True)(state["params"])

    def updated(state: Any, found: Any) -> Any:
        (loss, stats), grads = found
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "stats": stats}, loss

    def step(state: Any, given: Any) -> Any:
        return updated(state, gradients(state, given))

    def gpipe(state: Any, given: Any) -> Any:
        parts = [jax.tree.map(lambda x, k=k: jnp.split(x, count)[k], given) for k in range(count)]
        return updated(state, jax.tree.map(lambda *xs: sum(xs) / count, *(gradients(state, part) for part in parts)))

    random = np.random.default_rng(0)
    params = {"a": random.standard_normal((6, 8)), "g": np.ones(8), "c": random.standard_normal((8, 3))}
    state = jax.tree.map(jnp.asarray, {"params": params, "stats": {"mean": np.zeros(8), "var": np.ones(8)}})
    given = {"x": random.standard_normal((16, 6)), "y": random.standard_normal((16, 3))}
    with pytest.raises(autopar.StrategyError, match=r"test_pipelines.py:\d+\).*statistics='microbatch'"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=count))(state, given)
    pipeline = autopar.Pipeline(2, microbatches=count, statistics="microbatch")
    planned = autopar.parallelize(step, pipeline=pipeline, donate=False)
    ours, theirs = planned(state, given), gpipe(state, given)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-13)
    assert abs(float(ours[1] - step(state, given)[1])) > 1e-3  # another function
    assert "is not what the plain step computes" in explained(planned)
    assert planned.plan.pipeline.pipeline.statistics == "microbatch"


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
    assert "jax.jit: autopar.materialize(state)" in " ".join(explained(three).split())
    together = autopar.materialize(state)
    assert float(jax.jit(lambda s: s["params"]["out"].sum() + s["params"]["words"].sum())(together))
    with pytest.raises(autopar.DonatedStateError):
        three(old, batch(1))


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_sent_but_activations_their_gradients_and_sums(tied: bool) -> None:
    """Slots stay with their weights; the update of a stage reads scalars of the others, and sums of tied weights."""
    step, make = language_model(CLIPPED, tied=tied)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=3))
    staged = planned.planned_for(make(), batch(0)).compiled.program.staged
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
            if source is None or source.stage == program.stage:
                continue
            if program.phase == "update":
                assert var.shape == () or (tied and var in sums), f"{var.type} crosses stages in the update"
            elif source.phase != "before":
                assert var.shape[0] == EXAMPLES // 3, f"{var.type} is no microbatch's, and crosses stages"
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
        ({"stages": 9}, {}, "9 stages need 9 devices, and there are 8"),
        ({"stages": 2, "schedule": "zigzag"}, {}, "there are 'gpipe', '1f1b'"),
        ({"stages": 2, "microbatches": 5}, {}, f"doesn't divide the batch: batch/ids has {EXAMPLES} examples"),
        ({"stages": 2}, {"strategy": ("ps", "hosts")}, "tables on hosts have no stage"),
        ({"stages": 2}, {"microbatches": 2}, "microbatches= given together with pipeline="),
        ({"stages": 0}, {}, "give a number"),
        ({"stages": "all"}, {}, "or 'auto'"),
        ({"stages": "auto", "replicas": 2}, {}, "chooses replicas"),
        ({"stages": 2, "statistics": "none"}, {}, "there are 'batch' and 'microbatch'"),
        ({"stages": 2, "profile": "yes"}, {}, "profile='yes': give True or False"),
        ({"stages": 4, "replicas": (2, 2)}, {}, "2 numbers for 4 stages"),
        ({"stages": 4, "replicas": (2, 4, 1, 2)}, {}, "4 stages need 9 devices"),
        ({"stages": 4, "stages_per_device": 2}, {}, "take schedule='interleaved'"),
        ({"stages": 5, "schedule": "interleaved"}, {}, "5 stages can't be 2 on each device"),
        ({"stages": 4, "schedule": "interleaved", "microbatches": 3}, {}, "a multiple of their number"),
        ({"stages": 4, "schedule": "interleaved", "replicas": 2}, {}, "whose stages have none"),
        ({"stages": 4, "schedule": "interleaved", "replicas": 2, "remat": "auto"}, {}, "whose stages have none"),
        ({"stages": "auto", "stages_per_device": 2}, {}, "several stages on a device take schedule='interleaved'"),
    ],
)
def test_bad_pipelines(pipeline: dict[str, Any], options: dict[str, Any], said: str) -> None:
    step, make = language_model(CLIPPED)
    with pytest.raises(autopar.AutoparError) as error:
        autopar.parallelize(step, pipeline=autopar.Pipeline(**pipeline), **options)(make(), batch(0))
    assert said in str(error.value).replace("given/", "batch/")


@pytest.mark.parametrize("of_loss", [False, True])
def test_effects_are_refused(of_loss: bool) -> None:
    step, make = language_model(CLIPPED)

    def talking(state: Any, given: Any) -> Any:
        new, metrics = step(state, given)
        jax.debug.print("{}", metrics["loss"] if of_loss else state["opt"][1][0].count)
        return new, metrics

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

    with pytest.raises(autopar.StrategyError, match="1 weights and layers to cut between"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=2))(np.eye(4), np.ones((4, 4)))


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        long(autopar.Pipeline(2, "1f1b", 4), {}),
        long(autopar.Pipeline(4, "zero-bubble", 8), {}),
        long(autopar.Pipeline(4, "1f1b", 2), {"strategy": "tensor", "mesh": (4, 2)}),
    ],
    ids=["2 stages", "4 stages", "4 stages of 2 devices"],
)
def test_a_gpt(pipeline: autopar.Pipeline, options: dict[str, Any]) -> None:
    """Of a library, with a fused product for attention, tied words, dropout, decay by mask and a schedule."""
    if options:
        options = {**options, "mesh": jax.make_mesh(options["mesh"], ("data", "tensor"))}
    step, make = nano_gpt.nano_gpt()
    planned = autopar.parallelize(step, pipeline=pipeline, **options)
    state, plain = make(), make()
    for k in range(3):
        state, metrics = planned(state, nano_gpt.batch(k))
        plain, expected = jax.jit(step)(plain, nano_gpt.batch(k))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-12)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-11)
    assert len(planned.plan.pipeline.stages) == pipeline.count and planned.plan.pipeline.tied_bytes
