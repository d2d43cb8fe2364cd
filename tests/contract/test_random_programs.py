"""The contract over random train steps: `parallelize` returns what the plain step returns, and lifts what it must.

A `Recipe` is drawn by hypothesis. Each table must be lifted, but for those that the optimizer moves as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax import lax

import autopar
from autopar.planning.verify import compare_runs
from tests.support import bad_recipes
from tests.support.ingredients import AFTER, CHAIN, DEFERRED, ID_KINDS, IDS, LOOKUPS, ROWS, WIDTH, Tree
from tests.support.recipes import PLAIN, RECIPES, Recipe, make_batch, make_state, make_step


@settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # each try compiles three programs: shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(recipe=RECIPES)
def test_random_steps_keep_the_contract(recipe: Recipe) -> None:
    _check(recipe)


def test_an_infinite_scale_poisons_the_same_rows() -> None:
    _check(dataclasses.replace(PLAIN, optimizer="poisoned", tables=2))


#: Where a number that isn't finite enters, with something that it could be lost in.
NOT_FINITE = [
    ("loss", np.inf, "last gradient", "remat", (("in a checkpoint", "as they are"), ("one-hot", "modulo"))),
    ("one example", np.inf, "sgd", "microbatches", (("one-hot", "all equal"), ("index", "modulo"), ("fill", "masked"))),
    ("table, backward", -np.inf, "clipped by global norm", "direct", (("take", "bytes"), ("dynamic slice", "sorted"))),
    ("table, backward in a checkpoint", np.nan, "row-wise adagrad", "loop", (("vmapped", "modulo"),)),
    (
        "table, backward in a branch",
        np.inf,
        "guarded",
        "direct",
        (("in a branch", "modulo"), ("static rows", "sorted")),
    ),
    ("gradient divided", 0.0, "last gradient", "direct", (("one row", "modulo"),)),
    ("gradient by rows", np.nan, "clipped by global norm", "remat in a loop", (("index", "modulo"),)),
    ("gradient by what a row holds", -np.inf, "adagrad", "direct", (("of the transpose", "modulo"),)),
]


@pytest.mark.parametrize(("where", "value", "optimizer", "gradient", "lookups"), NOT_FINITE)
def test_what_is_not_finite_in_plain_is_not_here(
    where: str, value: float, optimizer: str, gradient: str, lookups: tuple[tuple[str, str], ...]
) -> None:
    recipe = dataclasses.replace(PLAIN, where=where, optimizer=optimizer, gradient=gradient, lookups=lookups)
    step, state = make_step(recipe), make_state(recipe)
    planned, plain = autopar.parallelize(step, strategy="ps", donate=False), jax.jit(step)
    mine = theirs = state
    for k, number in enumerate((1.0, value)):
        batch = {**make_batch(k), "numbers": jnp.array([number, 1.0], jnp.float32)}
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), (mine, a), (theirs, b))
    assert planned.plan is not None and planned.plan.lifts
    assert not all(np.isfinite(x).all() for x in jax.tree.leaves((theirs, b)))


def _on_one_device(step: Any) -> Any:
    return autopar.parallelize(step, strategy="ps", donate=False)


def _on_hosts(step: Any) -> Any:
    return autopar.parallelize(step, strategy=("ps", "hosts"), donate=False)


PLACES = {"one": _on_one_device, "hosts": _on_hosts}


@pytest.mark.parametrize("place", PLACES)
def test_random_steps_in_which_something_is_not_finite(place: str) -> None:
    bad_recipes.check(range(5), place, PLACES[place])


@pytest.mark.long
@pytest.mark.parametrize("first", range(5, 105, 10))
@pytest.mark.parametrize("place", PLACES)
def test_many_random_steps_in_which_something_is_not_finite(place: str, first: int) -> None:
    bad_recipes.check(range(first, first + 10), place, PLACES[place])


def _is_open(recipe: Recipe) -> bool:
    """Steps of which nobody says whether their tables must be lifted."""
    # A lookup by columns makes rows of a dense parameter's columns.
    by_columns = "projected" in recipe.chain and any(lookup == "columns too" for lookup, _ in recipe.lookups)
    # Zero off the rows after the first of the repeated steps, but not before it.
    # What becomes of an untouched row depends on its number or its mask, or on all steps of a loop: not deferred yet.
    masked = {"padding row masked", "mask from outside"}.intersection(recipe.chain)
    moves = recipe.optimizer in DEFERRED and (recipe.repeated or masked)
    # The norm of a step in a loop: a row may hide by what it holds that a factor of the step isn't finite.
    predicates = [k for k, name in enumerate(recipe.chain) if name in ("clipped", "leaky", "mask from outside")]
    factors = {"projected", "scaled by a scalar", "transposed twice"}
    hides = recipe.repeated and any(factors.intersection(recipe.chain[k:]) for k in predicates)
    return bool(by_columns or moves or hides or (recipe.repeated and recipe.optimizer == "last gradient"))


def _check(recipe: Recipe) -> None:
    step, state = make_step(recipe), make_state(recipe)
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    # Once a row is infinite itself, 0 * row is NaN in plain JAX: the contract is for finite tables.
    steps = 1 if recipe.repeated and recipe.optimizer == "poisoned" else 2
    batches = [make_batch(recipe.seed + k) for k in range(steps)]
    entry = planned.planned_for(state, batches[0])
    if not _is_open(recipe):
        lifted = [p.lifted for p in entry.compiled.plan.parameters if p.path.startswith("params/table")]
        assert lifted == [True] * recipe.tables, entry.compiled.plan.parameters
        assert entry.compiled.plan.defers == (recipe.optimizer in DEFERRED)
    found = compare_runs(entry, [jax.tree.leaves((state, batch)) for batch in batches])
    assert found.ok, str(found)


# --- steps that were wrong once ---


def _unused_table_over_microbatches(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The gradient of a table whose rows are only read is a zero that goes around the scan."""

    def loss(state: Tree, ids: jax.Array) -> jax.Array:
        return jnp.sum(state["a"][ids] ** 2) + jnp.sum(lax.stop_gradient(state["b"][ids]))

    def body(carry: Tree, ids: jax.Array) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(state, ids)), None

    value, grads = lax.scan(body, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state)), batch["ids"] % ROWS)[0]
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def _zeros_out_of_a_remat(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    ids = batch["ids"][0] % ROWS
    bias = jax.checkpoint(lambda k: jnp.zeros((ROWS, WIDTH)) + 0.0 * k)(jnp.float32(2))
    grads = jax.grad(lambda a: jnp.sum(a[ids] ** 2))(state["a"])
    return {**state, "a": state["a"] - 0.1 * (grads + bias)}, jnp.sum(state["b"][ids])


def _rows_transposed_within(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The last row is symmetric: that it doesn't change says nothing of the others."""
    ids = batch["ids"][0] % (ROWS - 1)
    grads = jax.grad(lambda m: jnp.sum(m[ids] ** 2))(state["m"])
    return {**state, "m": (state["m"] - 0.1 * grads).transpose(0, 2, 1)}, jnp.zeros(())


@pytest.mark.parametrize("step", [_unused_table_over_microbatches, _zeros_out_of_a_remat, _rows_transposed_within])
def test_steps_that_were_wrong_once(step: Callable[[Tree, Tree], tuple[Tree, Tree]]) -> None:
    table = jnp.arange(1.0, ROWS * WIDTH + 1).reshape(ROWS, WIDTH)
    cubes = jnp.arange(4.0 * ROWS).reshape(ROWS, 2, 2).at[-1].set(1.0)
    arguments = {"a": table, "b": table / 2, "m": cubes}, make_batch(0)
    entry = autopar.parallelize(step, strategy="ps", donate=False).planned_for(*arguments)
    found = compare_runs(entry, [jax.tree.leaves(arguments)])
    assert found.ok, str(found)


EACH = {
    **{f"chain: {name}": dataclasses.replace(PLAIN, chain=(name,)) for name in CHAIN},
    **{f"lookup: {name}": dataclasses.replace(PLAIN, lookups=((name, "as they are"),)) for name in LOOKUPS},
    **{f"ids: {name}": dataclasses.replace(PLAIN, lookups=(("index", name),)) for name in ID_KINDS},
    **{f"after: {name}": dataclasses.replace(PLAIN, after=name) for name in AFTER},
}


@pytest.mark.parametrize("name", EACH)
def test_each_ingredient_lifts_by_itself(name: str) -> None:
    recipe = EACH[name]
    planned = autopar.parallelize(make_step(recipe), strategy="ps")
    plan = planned.planned_for(make_state(recipe), make_batch(0)).compiled.plan
    assert [p.lifted for p in plan.parameters] == [True], plan.parameters


def test_columns_of_a_slot_are_not_its_rows() -> None:
    """A slot of which the first column is used is a slot still: it is updated on the table's touched rows."""

    def step(state: Tree, ids: jax.Array) -> tuple[Tree, jax.Array]:
        loss, g = jax.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))(state["table"])
        slot = state["slot"] + g * g
        return {"table": state["table"] - 0.1 * g * lax.rsqrt(slot[:, :1] + 1e-3), "slot": slot}, loss

    state = {"table": jnp.ones((ROWS, WIDTH)), "slot": jnp.zeros((ROWS, WIDTH))}
    compiled = autopar.parallelize(step, strategy="ps").planned_for(state, jnp.arange(IDS)).compiled
    (space,) = compiled.analysed.rows.spaces
    assert (space.leaves, space.refusal, space.notes) == ((0, 1), None, ())


def test_a_classifier_has_one_table() -> None:
    """Picking the labels' log probabilities reads columns of activations; it makes no table of the last layer."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = jnp.tanh(params["emb"][batch["ids"]]) @ params["w"] + params["bias"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], axis=1))

    def step(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"emb": jnp.ones((ROWS, WIDTH)), "w": jnp.ones((WIDTH, 5)), "bias": jnp.zeros(5)}
    batch = {"ids": jnp.arange(IDS), "labels": jnp.arange(IDS) % 5}
    plan = autopar.parallelize(step, strategy="ps").planned_for(params, batch).compiled.plan
    assert [(p.path, p.lifted) for p in plan.parameters] == [("emb", True)], plan.parameters
