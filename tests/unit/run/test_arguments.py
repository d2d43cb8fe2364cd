"""Which arguments are state, in the forms in which people write steps."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.analysis.per_device import use_as_key
from autopar.ir.trace import block_of
from autopar.run import step as step_module
from tests.support.explained import explained

TX = optax.adagrad(0.1)
IDS = jnp.array([[1, 4], [7, 4]], jnp.int32)


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {"emb": jnp.asarray(rng.normal(size=(40, 3)), jnp.float32), "w": jnp.eye(3)}


def loss_of(params: Any, ids: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(params["emb"][ids] @ params["w"]) ** 2)


def update(params: Any, opt: Any, ids: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(params, ids)
    updates, opt = TX.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss


def same(planned: Any, plain: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), planned, plain)


def lifted(step: autopar.ParallelStep) -> list[str]:
    assert step.plan is not None
    return [p.path for p in step.plan.parameters if p.lifted]


def test_params_and_optimizer_state_apart() -> None:
    step = autopar.parallelize(update, strategy="ps", donate=False)
    params = make_params()
    same(step(params, TX.init(params), IDS), jax.jit(update)(params, TX.init(params), IDS))
    assert lifted(step) == ["params/emb"]
    entry = step.planned_for(params, TX.init(params), IDS)
    paths = [i.path for i in entry.compiled.program.inputs]
    assert "opt/0/sum_of_squares/emb" in paths and paths[-1] == "ids"


def test_keyword_arguments() -> None:
    step = autopar.parallelize(update, strategy="ps", donate=False)
    params = make_params()
    expected = jax.jit(update)(params, TX.init(params), IDS)
    same(step(params, ids=IDS, opt=TX.init(params)), expected)
    same(step(params=params, ids=IDS, opt=TX.init(params)), expected)
    assert lifted(step) == ["params/emb"]


def test_keyword_state_is_donated() -> None:
    step = autopar.parallelize(update, strategy="ps")
    params = make_params()
    step(params=params, ids=IDS, opt=TX.init(params))
    assert params["emb"].is_deleted()


def test_static_arguments() -> None:
    def by_name(params: Any, opt: Any, ids: jax.Array, kind: str) -> Any:
        new, opt, loss = update(params, opt, ids)
        return new, opt, {kind: loss * (2 if kind == "double" else 1)}

    step = autopar.parallelize(by_name, static_argnums=3, strategy="ps", donate=False)
    params = make_params()
    plain = jax.jit(by_name, static_argnums=3)
    same(step(params, TX.init(params), IDS, "loss"), plain(params, TX.init(params), IDS, "loss"))
    with pytest.warns(autopar.RecompileWarning, match="static argument"):
        same(step(params, TX.init(params), IDS, "double"), plain(params, TX.init(params), IDS, "double"))
    with pytest.raises(autopar.ArgumentsError, match="static argument kind is a ndarray, which can't be hashed"):
        step(params, TX.init(params), IDS, np.zeros(2))  # nor compared with the last one


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_random_keys_in_the_state(make_key: Any) -> None:
    def noisy(state: Any, ids: jax.Array) -> Any:
        key, now = jax.random.split(state["key"])
        keep = jax.random.bernoulli(now, 0.5, IDS.shape)
        params, opt, loss = update(state["params"], state["opt"], jnp.where(keep, ids, 0))
        return {"params": params, "opt": opt, "key": key, "count": state["count"] + 1}, loss

    params = make_params()
    state = {"params": params, "opt": TX.init(params), "key": make_key(3), "count": jnp.int32(0)}
    step, plain = autopar.parallelize(noisy, strategy="ps", donate=False), jax.jit(noisy)
    mine = theirs = state
    for _ in range(3):
        mine, a = step(mine, IDS)
        theirs, b = plain(theirs, IDS)
        same(a, b)
    same(mine["params"], theirs["params"])
    assert int(mine["count"]) == 3 and lifted(step) == ["params/emb"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    ids: jax.Array
    weight: jax.Array


@pytest.mark.parametrize("form", ["dict", "tuple", "dataclass"])
def test_batches(form: str) -> None:
    def step(state: Any, batch: Any) -> Any:
        ids = {"dict": lambda: batch["ids"], "tuple": lambda: batch[0], "dataclass": lambda: batch.ids}[form]()
        params, opt, loss = update(*state, ids)
        return (params, opt), loss

    batch: Any = {"dict": {"ids": IDS}, "tuple": (IDS, 1.0), "dataclass": Batch(IDS, jnp.ones(2))}[form]
    params = make_params()
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    same(planned((params, TX.init(params)), batch), jax.jit(step)((params, TX.init(params)), batch))
    assert lifted(planned) == ["0/emb"]


def test_step_that_is_jitted_already() -> None:
    step = autopar.parallelize(jax.jit(update), strategy="ps", donate=False)
    params = make_params()
    same(step(params, TX.init(params), IDS), update(params, TX.init(params), IDS))
    assert lifted(step) == ["params/emb"]


def test_lone_arrays_as_state() -> None:
    def sgd(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return table - jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table), ids.sum()

    step = autopar.parallelize(sgd, strategy="ps", donate=False)
    table = make_params()["emb"]
    same(step(table, IDS), sgd(table, IDS))
    assert lifted(step) == ["table"]


def test_evaluation_reads_the_state_and_keeps_it() -> None:
    predict = autopar.parallelize(lambda params, ids: params["emb"][ids] @ params["w"])
    params = make_params()
    for _ in range(2):
        same(predict(params, IDS), params["emb"][IDS] @ params["w"])
    assert not params["emb"].is_deleted()
    assert "the step returns no argument updated" in explained(predict)


def test_a_prediction_of_the_inputs_shape_is_no_state() -> None:
    """An autoencoder's output looks like its input: the input must survive."""
    predict = autopar.parallelize(lambda params, x: x @ params["w"])
    x = jnp.ones((5, 3))
    predict(make_params(), x)
    assert not x.is_deleted()


def test_two_trees_of_one_form_are_ambiguous() -> None:
    def distill(student: Any, teacher: Any, ids: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean((p["emb"][ids] - teacher["emb"][ids]) ** 2))(student)
        return jax.tree.map(lambda p, g: p - g, student, grads)

    with pytest.raises(autopar.ArgumentsError, match=r"'student' and 'teacher'.*state_argnums"):
        autopar.parallelize(distill)(make_params(), make_params(), IDS)
    step = autopar.parallelize(distill, state_argnums=0, strategy="ps")
    student, teacher = make_params(), make_params()
    step(student, teacher, IDS)
    assert student["emb"].is_deleted() and not teacher["emb"].is_deleted()
    assert lifted(step) == ["emb"]


def test_an_only_output_of_the_first_arguments_shape_is_ambiguous() -> None:
    def denoise(x: jax.Array, params: Any) -> jax.Array:
        return x @ params["w"]

    with pytest.raises(autopar.ArgumentsError, match=r"state_argnums=\(0,\).*state_argnums=\(\)"):
        autopar.parallelize(denoise)(jnp.ones((5, 3)), make_params())
    x = jnp.ones((5, 3))
    autopar.parallelize(denoise, state_argnums=())(x, make_params())
    assert not x.is_deleted()


def test_state_that_comes_back_with_another_dtype() -> None:
    def halved(params: Any, ids: jax.Array) -> Any:
        new, _, loss = update(params, TX.init(params), ids)
        return {**new, "w": new["w"].astype(jnp.bfloat16)}, loss

    with pytest.raises(autopar.StateError, match=r"w: bf16\[3,3\], and was given f32\[3,3\]"):
        autopar.parallelize(halved)(make_params(), IDS)


def test_state_argnums_that_name_no_state() -> None:
    with pytest.raises(autopar.StateError, match="'ids'.*returns nothing of its structure"):
        autopar.parallelize(update, state_argnums=(0, 1, 2))(make_params(), TX.init(make_params()), IDS)


def test_batch_argnums_are_no_state() -> None:
    """An augmented batch looks like a new state."""

    def step(params: Any, batch: Any) -> Any:
        new = {**params, "emb": params["emb"] - 0.1 * jax.grad(lambda e: jnp.sum(e[batch["ids"]] ** 2))(params["emb"])}
        return new, {"ids": batch["ids"] + 1}

    batch = {"ids": IDS}
    autopar.parallelize(step, batch_argnums=1)(make_params(), batch)
    assert not batch["ids"].is_deleted()


def test_a_masked_batch_that_is_handed_back_is_no_state() -> None:
    def step(params: Any, batch: Any) -> Any:
        ids = jnp.where(batch["mask"], 7, batch["ids"])
        new = {**params, "emb": params["emb"] - 0.1 * jax.grad(lambda e: jnp.sum(e[ids] ** 2))(params["emb"])}
        return new, {"ids": ids, "mask": batch["mask"]}

    batch = {"ids": jnp.array(IDS), "mask": IDS > 2}
    planned = autopar.parallelize(step)
    planned(make_params(), batch)
    assert not batch["ids"].is_deleted()
    assert "batch/ids" not in explained(planned)


@pytest.mark.parametrize("option", ["state_argnums", "batch_argnums"])
def test_positions_of_no_argument(option: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=f"{option} names argument 5; update takes 3"):
        autopar.parallelize(update, **{option: 5})
    planned = autopar.parallelize(lambda *args: update(*args), **{option: 5})
    with pytest.raises(
        autopar.ArgumentsError, match=rf"{option} names argument 5; .* called with \[0, 1, 2\] by position"
    ):
        planned(make_params(), TX.init(make_params()), IDS)


def test_a_list_of_devices_is_no_mesh() -> None:
    with pytest.raises(autopar.ArgumentsError, match="mesh is a list"):
        autopar.parallelize(update, mesh=jax.devices())


def test_arguments_that_are_no_arrays() -> None:
    with pytest.raises(
        autopar.ArgumentsError, match="argument name is no array of numbers .str: 'x'.*static_argnums=1"
    ):
        autopar.parallelize(lambda params, name: (params, name))(make_params(), "x")


def test_changing_shapes_are_announced_and_bounded() -> None:
    step = autopar.parallelize(update, strategy="ps", donate=False)
    params = make_params()
    step(params, TX.init(params), IDS)
    with pytest.warns(autopar.RecompileWarning, match=r"ids was i32\[2,2\] and is i32\[3\]"):
        step(params, TX.init(params), jnp.zeros((3,), jnp.int32))
    with pytest.warns(autopar.RecompileWarning):
        with pytest.raises(autopar.ArgumentsError, match="different sets of shapes.*Pad the batches"):
            for n in range(4, 40):
                step.planned_for(params, TX.init(params), jax.ShapeDtypeStruct((n,), jnp.int32))


def test_plans_for_states_that_were_resized_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one goes first; those for the state's own shapes stay."""
    monkeypatch.setattr(step_module, "MAX_PLANS", 4)
    step = autopar.parallelize(lambda table, ids: (table.at[ids].add(1.0), ids.sum()), donate=False)
    evaluate = autopar.parallelize(lambda table, ids: table[ids].sum())

    def call(rows: int, ids: int = 3) -> bool:
        """Whether it was planned."""
        table, batch = jnp.zeros((rows, 2)), jnp.zeros(ids, jnp.int32)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step(table, batch)
            evaluate(table, batch)
        return {w.category for w in told} == {autopar.RecompileWarning}

    call(9)
    assert all(call(rows) for rows in (10, 11, 12))
    assert not call(9), "it is known"
    assert call(13) and not call(9), "10 had to go"
    assert call(10)
    assert all(call(10, ids) for ids in (4, 5, 6))
    for planned in (step, evaluate):
        with pytest.raises(autopar.ArgumentsError, match="4 different sets of shapes"):
            planned(jnp.zeros((10, 2)), jnp.zeros(7, jnp.int32))
    assert not any(call(10, ids) for ids in (3, 4, 5, 6)) and call(14)


def test_options_that_do_not_exist() -> None:
    for options, text in (
        ({"sparse": "maybe"}, "'exact', 'lazy' and 'off'"),
        ({"strategy": "mpi"}, "no method 'mpi'; the methods are auto"),
    ):
        with pytest.raises(autopar.ArgumentsError, match=text):
            autopar.parallelize(update, **options)
    with pytest.raises(autopar.ArgumentsError, match="takes a function"):
        autopar.parallelize(3)  # pyright: ignore


def test_decorator_with_options_and_attributes() -> None:
    @autopar.parallelize(strategy="ps", donate=False)
    def train_step(params: Any, ids: jax.Array) -> Any:
        """Doc."""
        return update(params, TX.init(params), ids)[::2]

    assert train_step.__wrapped__ is not None and train_step.__doc__ == "Doc." and train_step.plan is None
    text = train_step.lower(make_params(), IDS).as_text()
    assert "stablehlo" in text or "module" in text
    assert lifted(train_step) == ["emb"]


def test_gradients_of_the_parameters_form_are_no_state() -> None:
    gradients = autopar.parallelize(lambda params, ids: jax.grad(loss_of)(params, ids))
    params = make_params()
    gradients(params, IDS)
    assert not params["emb"].is_deleted()


def _split_in_a_loop(key: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jax.random.split(c[1])[0]), (0, key))[1]


def _swapped_in_a_loop(key: Any) -> Any:
    def body(_: Any, carry: Any) -> Any:
        return carry[1], carry[0]

    return jax.random.bits(jnp.stack(jax.lax.fori_loop(0, 3, body, (key[0], key[1]))))


def _put_together(x: Any) -> Any:
    """Of two examples two keys: the first word of each is its own."""
    return jax.vmap(lambda seed: jax.random.bits(jnp.stack([seed, jnp.uint32(7)])))(x)


OTHER = jax.random.PRNGKey(8)
#: What is done with a uint32[2], and whether it is a key's words.
USES = {
    "split": (jax.random.split, "key"),
    "of a batch of one": (lambda key: jax.vmap(jax.random.bits)(key[None]), "key"),
    "in a scan": (lambda key: jax.lax.scan(lambda k, _: (jax.random.split(k)[0], None), key, None, 3)[0], "key"),
    "in a loop": (_split_in_a_loop, "key"),
    "in a branch": (lambda key: jax.lax.cond(key[0] > 3, jax.random.bits, lambda k: k[0], key), "key"),
    "selected": (lambda key: jax.random.bits(jnp.where(key[0] > 3, key, OTHER)), "key"),
    "of a branch": (lambda key: jax.random.bits(jax.lax.cond(True, lambda k: k, lambda k: k + 1, key)), "key"),
    "taken apart": (lambda key: jax.random.bits(jnp.stack([key[0] + 1, key[1]])), "key"),
    "unpacked": (lambda key: (lambda a, b: jax.random.bits(jnp.concatenate([b[None], a[None]])))(*key), "key"),
    "split in two": (lambda key: jax.random.bits(jnp.concatenate(jnp.split(key, 2))), "key"),
    "unstacked": (lambda key: jax.random.bits(jnp.stack(jnp.unstack(key)[::-1])), "key"),
    "xor": (lambda key: jax.random.bits(key ^ jnp.uint32(7)), "key"),
    "as int32": (lambda key: jax.random.bits(jax.lax.bitcast_convert_type(key.view(jnp.int32) + 1, "uint32")), "key"),
    "reversed": (lambda key: jax.random.bits(key[::-1]), "key"),
    "added in place": (lambda key: jax.random.bits(key.at[1].add(3)), "key"),
    "row of keys": (lambda key: jax.random.bits(jnp.stack([key, OTHER])[jnp.argmax(OTHER)]), "key"),
    "swapped in a loop": (_swapped_in_a_loop, "unclear"),
    "one word": (lambda x: jax.random.bits(OTHER ^ x[0]), "unclear"),
    "sum": (lambda x: jax.random.bits(OTHER + x.sum()), "unclear"),
    "two examples' keys": (_put_together, "unclear"),
    "numbers": (lambda x: x * 2 + x[0], "never"),
    "seeds": (lambda x: jax.vmap(lambda seed: jax.random.bits(jax.random.key(seed)))(x), "never"),
    "folded in": (lambda x: jax.random.bits(jax.random.fold_in(OTHER, x.sum())), "never"),
    "ids": (lambda x: jnp.arange(10)[x], "never"),
    "number of a key": (lambda x: jax.random.bits(jnp.stack([OTHER, OTHER])[x[0]]), "never"),
    "condition": (lambda x: jax.random.bits(jnp.where(x[0] > 3, OTHER, OTHER + 1)), "never"),
}


@pytest.mark.parametrize("name", USES)
def test_keys_are_told_by_their_use(name: str) -> None:
    use, expected = USES[name]
    block = block_of(jax.make_jaxpr(use)(jax.random.PRNGKey(0)))
    assert use_as_key(block, block.inputs[0]) == expected
