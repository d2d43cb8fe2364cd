"""Products divided over the devices of a tensor axis: the plain step's numbers, and one AllReduce a pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.rates import StageRates
from autopar.measure.compiled_collectives import read_collectives
from autopar.planning import check as checking
from tests.support.explained import explained
from tests.support.machines import on_machine
from tests.support.pairs import long

DIM, HEADS, WORDS, LENGTH, EXAMPLES = 16, 4, 32, 6, 8
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


def _mesh(data: int, tensor: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"))


def _dense(key: Any, *shape: int) -> jax.Array:
    return 0.3 * jax.random.normal(key, shape, jnp.float64)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


def _layer(p: Any, x: jax.Array) -> jax.Array:
    y = _norm(x, p["scale"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, p["attention"][name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 2)
    x = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), p["attention"]["o"])
    hidden = jax.nn.gelu(x @ p["mlp"]["up"] + p["mlp"]["bias"])
    return x + hidden @ p["mlp"]["down"] + p["mlp"]["offset"]


def _layer_weights(key: Any) -> Any:
    keys = jax.random.split(key, 6)
    heads = {name: _dense(k, DIM, HEADS, 4) for name, k in zip("qkv", keys, strict=False)}
    return {
        "scale": jnp.ones(DIM),
        "attention": {**heads, "o": _dense(keys[3], HEADS, 4, DIM)},
        "mlp": {
            "up": _dense(keys[4], DIM, 4 * DIM),
            "bias": jnp.zeros(4 * DIM),
            "down": _dense(keys[5], 4 * DIM, DIM),
            "offset": jnp.zeros(DIM),
        },
    }


def transformer(layers: str = "listed", *, tied: bool = False) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A step and what makes its state; `layers`: "listed", or "stacked" for a scan."""

    def logits(p: Any, words: jax.Array) -> jax.Array:
        x = p["embedding"][words]
        if layers == "stacked":
            x, _ = jax.lax.scan(lambda x, w: (_layer(w, x), None), x, p["layers"])
        else:
            for weights in p["layers"]:
                x = _layer(weights, x)
        return x @ (p["embedding"].T if tied else p["out"])

    def step(state: Any, words: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            log = jax.nn.log_softmax(logits(p, words[:, :-1]))
            return -jnp.mean(jnp.take_along_axis(log, words[:, 1:, None], -1))

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, slots = ADAM.update(gradients, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, value

    def make() -> Any:
        first, *keys = jax.random.split(jax.random.key(0), 4)
        each = [_layer_weights(k) for k in keys[:2]]
        stacked = layers == "stacked"
        params = {
            "embedding": _dense(first, WORDS, DIM),
            "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *each) if stacked else each,
            **({} if tied else {"out": _dense(keys[2], DIM, WORDS)}),
        }
        return {"params": params, "slots": ADAM.init(params)}

    return step, make


def words() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (EXAMPLES, LENGTH + 1), 0, WORDS)


def _difference(planned: Any, step: Any, make: Any, steps: int = 3) -> float:
    state, plain = make(), make()
    for _ in range(steps):
        state, loss = planned(state, words())
        plain, expected = jax.jit(step)(plain, words())
        np.testing.assert_allclose(loss, expected, atol=1e-12)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True)
    )


@pytest.mark.parametrize(
    ("layers", "shape"),
    [long("listed", (1, 4)), long("listed", (4, 2)), long("stacked", (2, 2)), ("tied", (2, 2))],
    ids=str,
)
def test_a_transformer(layers: str, shape: tuple[int, int]) -> None:
    step, make = transformer("listed" if layers == "tied" else layers, tied=layers == "tied")
    planned = autopar.parallelize(step, mesh=_mesh(*shape), strategy="tensor")
    assert _difference(planned, step, make) < 1e-12
    new, _ = planned(make(), words())
    axis = int(layers == "stacked")
    first = new["params"]["layers"] if axis else new["params"]["layers"][0]
    slot = new["slots"][1][0].mu["layers"] if axis else new["slots"][1][0].mu["layers"][0]
    for leaves in (first, slot):
        assert _divided(leaves["mlp"]["up"]) == axis + 1
        assert _divided(leaves["mlp"]["down"]) == _divided(leaves["attention"]["o"]) == axis
        assert _divided(leaves["mlp"]["bias"]) == axis
        assert _divided(leaves["attention"]["q"]) == axis + 1
        assert _divided(leaves["mlp"]["offset"]) is None
    if layers == "tied":
        assert _divided(new["params"]["embedding"]) == 0
    checked = autopar.check(planned, make(), words())
    assert checked and "XLA's own" not in str(checked), str(checked)


@pytest.mark.parametrize("examples", [5, 7])
def test_examples_that_devices_do_not_divide(examples: int) -> None:
    step, make = transformer()
    planned = autopar.parallelize(step, mesh=_mesh(2, 2), strategy="tensor", donate=False)
    state, batch = make(), words()[:examples]
    for a, b in zip(*map(jax.tree.leaves, (planned(state, batch), jax.jit(step)(state, batch))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def _divided(array: jax.Array) -> int | None:
    """The axis along which it is over the tensor axis."""
    spec = array.sharding.spec
    return spec.index("tensor") if "tensor" in spec else None


def test_one_all_reduce_a_pair() -> None:
    """Two layers of a multilayer perceptron: one ahead for each, and one back for the second."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            y = x
            for up, down in p:
                y = jax.nn.relu(y @ up) @ down
            return jnp.sum(y**2)

        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))

    params = [(jnp.ones((DIM, 32)), jnp.ones((32, DIM))) for _ in range(2)]
    planned = autopar.parallelize(step, mesh=_mesh(1, 4), strategy={"*/0": "tensor", "*/1": "tensor"})
    plan = autopar.plan(planned, params, jnp.ones((8, DIM)))
    assert [(g.weights, g.reduces, g.gathers) for g in plan.tensor.groups] == [
        (("0/0", "0/1"), 1, 0),
        (("1/0", "1/1"), 2, 0),
    ]
    size = 8 * DIM * 8
    assert plan.tensor.sent == 3 * 2 * size * 3 // 4
    compiled = read_collectives(planned.lower(params, jnp.ones((8, DIM))).compile().as_text())
    assert [(c.op, c.nbytes) for c in compiled if c.op != "all-reduce"] == []
    assert sum(c.nbytes for c in compiled) == 3 * size
    halved = dataclasses.replace(plan.tensor.groups[1], sent=0)
    less = dataclasses.replace(plan.tensor, groups=(plan.tensor.groups[0], halved))
    assert all(row.ok for row in checking._compare_tensor(plan.tensor, compiled))
    assert not all(row.ok for row in checking._compare_tensor(less, compiled))


def test_microbatches_and_tables_beside_it() -> None:
    """The rows of a table go by themselves; each device divides its examples."""
    step, make = transformer()
    tables: Any = {"params/layers/**": "tensor", "params/embedding": "ps"}
    for strategy, microbatches in (("tensor", 2), (tables, 1), (tables, 2)):
        planned = autopar.parallelize(step, mesh=_mesh(2, 2), strategy=strategy, microbatches=microbatches)
        assert _difference(planned, step, make) < 1e-12
        assert len(planned.plan.tensor.axes) > 12
    assert planned.plan.table("params/embedding").lifted


def _rates(**figures: float) -> StageRates:
    return StageRates(**{"flop_s": 1e-9, "byte_s": 1e-9, "call_s": 0.0, "send_byte_s": 1e-9, **figures})


def test_auto_divides_what_pays() -> None:
    step, make = transformer()
    for figures, taken in (({"send_byte_s": 1.0}, False), ({"flop_s": 1.0}, True)):
        planned = autopar.parallelize(step, mesh=_mesh(2, 2), tensor_axis="tensor")
        on_machine(planned, stages=_rates(**figures))
        plan = autopar.plan(planned, make(), words())
        assert {g.taken for g in plan.tensor.groups} == {taken}
        shown = explained(planned, make(), words())
        assert ("divided;" if taken else "whole;") in shown and "(2 x 2 devices)" in shown
        assert all(g.saved_s > 0 and g.sent_s > 0 for g in plan.tensor.groups)
    with pytest.raises(autopar.ArgumentsError, match="'tensor' is no method of tables"):
        autopar.why(plan, "params/embedding", "tensor")
    kept = autopar.parallelize(step, mesh=_mesh(2, 2), tensor_axis="tensor", strategy={"params/layers/**": "allreduce"})
    on_machine(kept, stages=_rates(flop_s=1.0))
    plan = autopar.plan(kept, make(), words())
    assert [g.weights for g in plan.tensor.groups] == [("params/out",)]


def test_a_state_that_does_not_fit_is_divided() -> None:
    step, make = transformer()
    size = sum(x.nbytes for x in jax.tree.leaves(make()))
    planned = autopar.parallelize(step, mesh=_mesh(1, 4), tensor_axis="tensor")
    on_machine(planned, stages=_rates(send_byte_s=1.0), memory=size)
    plan = autopar.plan(planned, make(), words())
    assert all(g.taken and "doesn't fit" in g.reason for g in plan.tensor.groups)
    assert plan.state_bytes < size / 2
    assert _difference(planned, step, make, 1) < 1e-12


def test_plans_and_checkpoints(tmp_path: Any) -> None:
    step, make = transformer()
    planned = autopar.parallelize(step, mesh=_mesh(1, 4), strategy={"params/layers/**": "tensor"})
    plan = autopar.plan(planned, make(), words())
    plan.save(tmp_path / "plan.json")
    by_plan = autopar.parallelize(step, plan=tmp_path / "plan.json", mesh=_mesh(1, 4))
    assert _difference(by_plan, step, make) < 1e-12
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(autopar.PlanError, match="divides products over 4 devices.* over 2"):
        autopar.parallelize(step, plan=plan, mesh=_mesh(1, 2))(make(), words())
    state = autopar.init(make, step=planned, batch=words())
    assert _divided(state["params"]["layers"][0]["mlp"]["up"]) == 1
    state, _ = planned(state, words())
    autopar.save(tmp_path / "state", state)
    for other in (
        autopar.parallelize(step, mesh=_mesh(2, 2), strategy="tensor"),
        autopar.parallelize(step, mesh=jax.make_mesh((2,), ("data",))),
    ):
        like = jax.eval_shape(make)
        restored, _ = autopar.restore(tmp_path / "state", like, step=other, batch=words())
        again, _ = other(restored, words())
        expected, _ = jax.jit(step)(jax.tree.map(np.asarray, state), words())
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-12)


@pytest.mark.long
def test_plans_and_checkpoints_of_stages(tmp_path: Any) -> None:
    step, make = transformer("stacked")
    options = {"mesh": _mesh(3, 2), "tensor_axis": "tensor"}
    pipeline = autopar.Pipeline(2, microbatches=4, replicas=(1, 2))
    planned = autopar.parallelize(step, strategy={"params/layers/**": "tensor"}, pipeline=pipeline, **options)
    plan = autopar.plan(planned, make(), words())
    assert plan.pipeline.size == 6 and all(stage.exchanges for stage in plan.pipeline.stages)
    plan.save(tmp_path / "plan.json")
    by_plan = autopar.parallelize(step, plan=tmp_path / "plan.json", **options)
    state = autopar.init(make, step=by_plan, batch=words())
    state, _ = by_plan(state, words())
    assert by_plan.plan.tensor.axes == plan.tensor.axes and by_plan.plan.pipeline.stages == plan.pipeline.stages
    autopar.save(tmp_path / "state", state)
    times = autopar.simulate(plan, cluster=autopar.Cluster.named("dgx-h200"), devices=[6, 12])
    assert times.times[0].seconds < times.times[1].seconds
    plain, _ = jax.jit(step)(make(), words())
    for other in (planned, autopar.parallelize(step, mesh=_mesh(2, 2), strategy="tensor"), autopar.parallelize(step)):
        restored, _ = autopar.restore(tmp_path / "state", jax.eval_shape(make), step=other, batch=words())
        again, _ = other(restored, words())
        expected, _ = jax.jit(step)(plain, words())
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-12)


def test_what_can_not_be_divided_is_refused() -> None:
    step, make = transformer()
    with pytest.raises(autopar.ArgumentsError, match="an axis beside the data axis"):
        autopar.parallelize(step, strategy="tensor")
    with pytest.raises(autopar.ArgumentsError, match="there are 'tensor'"):
        autopar.parallelize(step, mesh=_mesh(2, 2), tensor_axis="model")
    planned = autopar.parallelize(step, mesh=_mesh(2, 2), strategy={"params/layers/*/scale": "tensor"})
    with pytest.raises(autopar.StrategyError, match=r"scale.*no product can be divided over 2 devices"):
        planned(make(), words())
    with pytest.raises(autopar.StrategyError, match="matches no parameter"):
        autopar.parallelize(step, mesh=_mesh(2, 2), strategy={"params/mlps/**": "tensor"})(make(), words())


def test_a_step_of_scans_and_dropout() -> None:
    """An LSTM's loop over time, whose gates are divided, and masks that are those of one device."""
    hidden = 8

    def step(params: Any, x: jax.Array, key: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            def turn(carry: Any, frame: jax.Array) -> Any:
                h, c = carry
                gates = [frame @ p["in"][k] + h @ p["own"][k] + p["bias"][k] for k in "ifgo"]
                i, f, g, o = (jax.nn.sigmoid(gates[0]), jax.nn.sigmoid(gates[1]), jnp.tanh(gates[2]), gates[3])
                c = f * c + i * g
                return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

            zeros = jnp.zeros((x.shape[0], hidden))
            (h, _), _ = jax.lax.scan(turn, (zeros, zeros), jnp.swapaxes(x, 0, 1))
            mask = jax.random.bernoulli(key, 0.8, h.shape)
            return jnp.mean(((h * mask) @ p["out"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = {
        "in": {k: _dense(next(keys), DIM, hidden) for k in "ifgo"},
        "own": {k: _dense(next(keys), hidden, hidden) for k in "ifgo"},
        "bias": {k: jnp.zeros(hidden) for k in "ifgo"},
        "out": _dense(next(keys), hidden, 4),
    }
    x, key = _dense(jax.random.key(3), EXAMPLES, 5, DIM), jax.random.key(2)
    planned = autopar.parallelize(step, mesh=_mesh(2, 2), strategy="tensor", donate=False)
    new, plain = planned(params, x, key), jax.jit(step)(params, x, key)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(
    ("layers", "pipeline"),
    [
        ("listed", autopar.Pipeline(2, "1f1b", 4)),
        ("stacked", autopar.Pipeline(2, "zero-bubble", 2)),
        ("tied", autopar.Pipeline(2, "gpipe", 4, replicas=(1, 3))),
        long("listed", autopar.Pipeline(4, "interleaved", 4, remat=True)),
    ],
    ids=lambda x: x if isinstance(x, str) else x.schedule,
)
def test_within_the_stages_of_a_pipeline(layers: str, pipeline: autopar.Pipeline) -> None:
    step, make = transformer("listed" if layers == "tied" else layers, tied=layers == "tied")
    planned = autopar.parallelize(step, mesh=_mesh(pipeline.devices, 2), strategy="tensor", pipeline=pipeline)
    assert _difference(planned, step, make) < 1e-12
    new, _ = planned(make(), words())
    if layers == "stacked":
        parts = new["params"]["layers"]["mlp"]["up"].values
        assert [_divided(part) for part in parts] == [2] * len(parts)
    else:
        last = new["params"]["layers"][1]["mlp"]
        assert (_divided(last["up"]), _divided(last["down"]), _divided(last["offset"])) == (1, 0, None)
        assert len(last["up"].devices()) == 2 * len(planned.plan.pipeline.stages[-1].devices)
    checked = autopar.check(planned, make(), words())
    (sums,) = [row for row in checked.rows if row.what == "divided products within stages"]
    assert checked and sums.collective == "all-reduce" and 2 * sums.compiled > sums.planned, str(checked)
    shown = explained(planned, make(), words())
    assert f"({pipeline.count} stages on {pipeline.devices} x 2 devices, " in shown and "exchanged" in shown


def _perceptron(params: Any, x: jax.Array, between: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for up, down in params:
        x = between(x @ up) @ down
    return jnp.mean(x**2)


def _in_two_stages(step: Any, state: Any, x: jax.Array) -> Any:
    """Runs a step in two stages of two devices each, and compares it with the plain one; returns the planned one."""
    pipeline = autopar.Pipeline(2, microbatches=4)
    planned = autopar.parallelize(step, mesh=_auto_mesh(), strategy="tensor", pipeline=pipeline, donate=False)
    for a, b in zip(*map(jax.tree.leaves, (planned(state, x), jax.jit(step)(state, x))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)
    assert planned.plan.tensor.axes
    return planned


def _auto_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def _pairs(dim: int = DIM) -> list[tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [(_dense(keys[k], dim, 2 * dim), _dense(keys[k + 1], 2 * dim, dim)) for k in (0, 2)]


def test_one_all_reduce_a_pair_within_stages() -> None:
    """One ahead for each stage's pair, the last one's in its backward, and one back for the second's."""

    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(_perceptron)(params, x, jnp.tanh))

    planned = _in_two_stages(step, _pairs(), _dense(jax.random.key(5), EXAMPLES, DIM))
    compiled = planned.latest.runner.executor._compiled
    sums = {
        (program.phase, program.stage): [(c.op, c.nbytes) for c in read_collectives(each.run.as_text())]
        for (program, _), each in compiled.items()
    }
    one = [("all-reduce", EXAMPLES // 4 * DIM * 8)]
    assert {key: made for key, made in sums.items() if made} == {("F", 0): one, ("B", 1): 2 * one}
    assert {("B", 0), ("update", 0), ("update", 1)} <= set(sums)


def test_sums_ahead_of_larger_products_within_stages() -> None:
    """What adds up features is linear: its partial sums would become those of a weight's whole gradient."""

    def step(params: Any, x: jax.Array) -> Any:
        def between(h: jax.Array) -> jax.Array:
            return jnp.cumsum(h, -1)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(_perceptron)(params, x, between))

    params, x = _pairs(), _dense(jax.random.key(5), EXAMPLES, DIM)
    checked = autopar.check(_in_two_stages(step, params, x), params, x)
    assert checked and any("within stages" in row.what for row in checked.rows), str(checked)


def test_whole_products_within_stages() -> None:
    """Of stages of two devices each, where dividing doesn't pay or nothing can be divided, both compute all."""

    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(_perceptron)(params, x, jnp.tanh))

    pipeline = autopar.Pipeline(2, microbatches=4)
    for dim, strategy in ((DIM, {"**": "allreduce"}), (3, "auto")):
        params, x = _pairs(dim), _dense(jax.random.key(5), EXAMPLES, dim)
        options: Any = {"tensor_axis": "tensor", "strategy": strategy, "donate": False}
        planned = autopar.parallelize(step, mesh=_mesh(2, 2), pipeline=pipeline, **options)
        for a, b in zip(*map(jax.tree.leaves, (planned(params, x), jax.jit(step)(params, x))), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-14)
            assert len(a.devices()) == 2 and _divided(a) is None


def test_a_constraint_within_stages() -> None:
    """It asks for what a device has anyway; its mesh has other stages' devices as well."""
    there = jax.sharding.NamedSharding(_auto_mesh(), jax.sharding.PartitionSpec(None, "tensor"))

    def step(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(_perceptron)(params, x, lambda h: jax.lax.with_sharding_constraint(jnp.tanh(h), there))
        return jax.tree.map(lambda p, g: p - g, params, grads)

    _in_two_stages(step, _pairs(), _dense(jax.random.key(5), EXAMPLES, DIM))


def test_a_callback_within_stages() -> None:
    """Of a whole gradient, on the first device of a stage; both have its result once."""
    seen = set()

    def rounded(gradient: Any) -> np.ndarray:
        g = np.asarray(gradient)
        seen.add(g.shape)
        return np.round(g, 3) + 1

    def step(params: Any, x: jax.Array) -> Any:
        ((up, *down), *rest) = jax.grad(_perceptron)(params, x, jnp.tanh)
        up = jax.pure_callback(rounded, jax.ShapeDtypeStruct(up.shape, jnp.float32), up.astype(jnp.float32))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, [(up, *down), *rest])

    _in_two_stages(step, _pairs(4), _dense(jax.random.key(5), EXAMPLES, 4))
    assert seen == {(4, 8)}
