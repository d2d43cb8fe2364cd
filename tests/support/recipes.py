"""Random train steps: a `Recipe` names row-parallel equations on the table, lookups of many kinds, what is done to what
was looked up, a loss, a way to take the gradient (directly, rematerialised, over microbatches, through a loop), and an
optimizer written by hand. All are sparse by nature, but for optimizers that move the table as a whole. A number of the
batch, which needn't be finite, may enter anywhere (`bad_ingredients`; drawn by `bad_recipes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from tests.support import bad_ingredients as bad
from tests.support.ingredients import (
    AFTER,
    CHAIN,
    GRADIENTS,
    ID_KINDS,
    IDS,
    LOOKUPS,
    LOSSES,
    OPTIMIZERS,
    PARTS,
    ROWS,
    WIDTH,
    Tree,
)


@dataclass(frozen=True)
class Recipe:
    """What a random step is made of: names in the tables of `ingredients` and `bad_ingredients`."""

    chain: tuple[str, ...]
    lookups: tuple[tuple[str, str], ...]
    after: str
    loss: str
    gradient: str
    optimizer: str
    tables: int
    repeated: bool
    seed: int
    where: str = "nowhere"
    metric: str = "none"
    within: str = "nothing"
    hidden: bool = False


PLAIN = Recipe((), (("index", "as they are"),), "nothing", "square", "direct", "sgd", 1, False, 0)


def _tables(recipe: Recipe) -> list[str]:
    return [f"table{k}" for k in range(recipe.tables)]


def _loss(
    recipe: Recipe, params: Tree, ids: jax.Array, labels: tuple[jax.Array, jax.Array], step: jax.Array
) -> jax.Array:
    y, number = labels
    total = jnp.zeros((IDS, WIDTH))
    for name in _tables(recipe):
        table = params[name]
        for link in recipe.chain:
            table = bad.CHAIN[link](params, table)
        table = _enter(recipe, "table", table, number)
        for lookup, kind in recipe.lookups:
            total = total * 0.7 + bad.LOOKUPS[lookup](table, ID_KINDS[kind](ids, step))
    total = AFTER[recipe.after](_enter(recipe, "rows", total, number))
    loss = LOSSES[recipe.loss](total @ params["w"] + params["bias"], _enter(recipe, "labels", y, number))
    return _enter(recipe, "loss", loss, number)


def _enter(recipe: Recipe, part: str, value: jax.Array, number: jax.Array, leaf: jax.Array | None = None) -> jax.Array:
    """Where the recipe's number enters this part of the step, what it makes of the value."""
    where, change = bad.WHERE[recipe.where]
    return change(value, number, value if leaf is None else leaf) if where == part else value


def make_step(recipe: Recipe) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        params, count = state["params"], state["count"]
        numbers = batch.get("numbers", jnp.ones(batch["ids"].shape[:1]))

        def loss(params: Tree, ids: jax.Array, labels: tuple[jax.Array, jax.Array]) -> jax.Array:
            return _loss(recipe, params, ids, labels, count)

        value, grads = GRADIENTS[recipe.gradient](loss, params, batch["ids"], (batch["y"], numbers))
        number = jnp.prod(numbers)
        grads = {name: _enter(recipe, "gradient", g, number, params[name]) for name, g in grads.items()}
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        new, slots = {}, {}
        for name, p in params.items():
            update = bad.OPTIMIZERS["sgd" if p.ndim == 0 else recipe.optimizer]
            new[name], slots[name] = update(p, grads[name], state["slots"][name], count, norm)
        metrics = {"loss": value, "norm": norm, "metric": _metric(recipe, grads["table0"], params["table0"], number)}
        return {"params": new, "slots": slots, "count": count + 1}, metrics

    def repeated(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return lax.scan(step, state, jax.tree.map(lambda x: x[:, None], batch))

    return repeated if recipe.repeated else step


def _metric(recipe: Recipe, g: jax.Array, p: jax.Array, number: jax.Array) -> jax.Array:
    g = bad.hidden(g, p, number) if recipe.hidden else g
    return bad.WITHIN[recipe.within](bad.METRICS[recipe.metric], g, p, number)


def make_state(recipe: Recipe) -> Tree:
    rng = np.random.default_rng(recipe.seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    params = {name: normal(ROWS, WIDTH) for name in _tables(recipe)}
    params |= {"w": jnp.eye(WIDTH) + 0.1 * normal(WIDTH, WIDTH), "bias": normal(WIDTH), "scale": jnp.float32(1.25)}
    by_row = recipe.optimizer == "row-wise adagrad"
    slots = {name: jnp.zeros(p.shape[:-1] if by_row else p.shape) for name, p in params.items()}
    return {"params": params, "slots": slots, "count": jnp.zeros((), jnp.int32)}


def make_batch(seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-ROWS - 3, ROWS + 4, (PARTS, IDS)).astype(np.int32)
    y = rng.normal(0, 1, (PARTS, IDS, WIDTH)).astype(np.float32)
    return {"ids": jnp.asarray(ids), "y": jnp.asarray(y)}


#: Not drawn: a one-hot product is a lookup in a table as it is, not in what was made of it.
ALONE = {"one-hot", "in a checkpoint", "in a branch"}

RECIPES = st.builds(
    Recipe,
    chain=st.lists(st.sampled_from(sorted(CHAIN)), max_size=3).map(tuple),
    lookups=st.lists(
        st.tuples(st.sampled_from(sorted(set(LOOKUPS) - ALONE)), st.sampled_from(sorted(ID_KINDS))),
        min_size=1,
        max_size=3,
    ).map(tuple),
    after=st.sampled_from(sorted(AFTER)),
    loss=st.sampled_from(sorted(LOSSES)),
    gradient=st.sampled_from(sorted(GRADIENTS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    tables=st.integers(1, 2),
    repeated=st.booleans(),
    seed=st.integers(0, 2**16),
)
