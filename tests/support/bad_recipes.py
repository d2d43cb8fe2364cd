"""Random train steps in which something isn't finite: recipes by their seeds, what is known to differ from plain JAX of
them, and whether the others agree with it. On one device and hosts in tests/contract, on several in tests/devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.support.bad_ingredients import CHAIN, LOOKUPS, METRICS, OPTIMIZERS, WHERE, WITHIN
from tests.support.ingredients import AFTER, GRADIENTS, ID_KINDS, LOSSES, PARTS, Tree
from tests.support.recipes import Recipe, make_batch, make_state, make_step

#: Once the batch's number was what it is here, rows are; the steps before and after it have a 1.
STEPS, BAD_STEP = 3, 1


@dataclass(frozen=True)
class BadRecipe:
    """A step, the number that enters its second call, and in which parts of the batch."""

    recipe: Recipe
    number: float
    parts: tuple[int, ...]


def _drawn(rng: np.random.Generator) -> BadRecipe:
    def pick(names: Iterable[str]) -> str:
        return str(rng.choice(sorted(names)))

    gradient = pick(GRADIENTS)
    parts = (0,) if gradient in ("direct", "remat") else ((0,), (1,), (0, 1))[rng.integers(3)]
    recipe = Recipe(
        chain=tuple(pick(CHAIN) for _ in range(rng.choice([0, 0, 1, 2]))),
        lookups=tuple((pick(LOOKUPS), pick(ID_KINDS)) for _ in range(rng.integers(1, 4))),
        after="nothing" if rng.random() < 0.6 else pick(AFTER),
        loss=pick(LOSSES),
        gradient=gradient,
        optimizer=pick(set(OPTIMIZERS) - {"poisoned"}),  # its infinities are its own
        tables=int(rng.integers(1, 3)),
        repeated=False,
        seed=int(rng.integers(2**16)),
        where=pick(set(WHERE) - {"nowhere"}),
        metric=pick(METRICS),
        within=pick(WITHIN) if rng.random() < 0.5 else "nothing",
        hidden=bool(rng.integers(2)),
    )
    return BadRecipe(recipe, float(rng.choice([np.inf, -np.inf, np.nan, 0.0])), parts)


def draw(seed: int, place: str) -> BadRecipe:
    """The seed's program, of those that should agree with plain JAX at this place (`one`, `hosts`, `devices`)."""
    rng = np.random.default_rng(seed)
    while True:
        found = _drawn(rng)
        if not known_limits(found, place):
            return found


def _one_hot_forward(bad: BadRecipe) -> bool:
    part, _ = WHERE[bad.recipe.where]
    forward = part == "table" and "backward" not in bad.recipe.where
    return forward and any(lookup == "one-hot" for lookup, _ in bad.recipe.lookups)


#: What is refused, or left to differ (docs/design.md, "What isn't finite") -> whether a program at a place is so.
LIMITS: Mapping[str, Callable[[BadRecipe, str], bool]] = {
    "hosts: a metric in a loop or branch that rows may hide from is refused": (
        lambda b, at: at == "hosts" and b.recipe.hidden and b.recipe.within != "nothing"
    ),
    "a one-hot product spreads a table's infinities to all examples": lambda b, at: _one_hot_forward(b),
}


def known_limits(bad: BadRecipe, place: str) -> list[str]:
    return [reason for reason, holds in LIMITS.items() if holds(bad, place)]


def _start(recipe: Recipe) -> Tree:
    state = make_state(recipe)
    if recipe.optimizer == "counted rate":  # of some rows at first, so that others hide
        some = lambda s: s + (jnp.arange(s.shape[0]) % 3 == 0).reshape(-1, *(1,) * (s.ndim - 1)) if s.ndim else s  # noqa: E731
        state["slots"] = jax.tree.map(some, state["slots"])
    return state


def _batch(bad: BadRecipe, k: int) -> Tree:
    numbers = np.ones(PARTS, np.float32)
    if k == BAD_STEP:
        numbers[list(bad.parts)] = bad.number
    return {**make_batch(bad.recipe.seed + k), "numbers": numbers}


def _differ(mine: Tree, theirs: Tree) -> list[str]:
    """The leaves of two trees that differ, with how much of them isn't finite."""
    found = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.allclose(a, b, rtol=2e-4, atol=1e-5, equal_nan=True):
            here, there = (int(np.sum(~np.isfinite(x))) for x in (a, b))
            found.append(f"{jax.tree_util.keystr(path)}: {here} of {a.size} not finite, in plain {there}")
    return found


def disagreement(bad: BadRecipe, plan: Callable[[Any], Any]) -> list[str]:
    """Leaves that differ from plain JAX in the first step in which one does.

    Ends where rows of the state aren't finite: 0 times them is NaN in plain JAX, and the contract is for finite tables.
    """
    step = make_step(bad.recipe)
    planned, plain = plan(step), jax.jit(step)
    mine = theirs = jax.tree.map(np.asarray, _start(bad.recipe))
    for k in range(STEPS):
        batch = _batch(bad, k)
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        found = _differ((autopar.materialize(mine), a), (theirs, b))
        if found:
            return [f"step {k}", *found]
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(theirs)):
            break
    return []


def check(seeds: Iterable[int], place: str, plan: Callable[[Any], Any]) -> None:
    """Each seed's program agrees with plain JAX, or is refused when planning; most are not."""
    wrong, compared, refused = {}, 0, 0
    for seed in seeds:
        bad = draw(seed, place)
        try:
            found = disagreement(bad, plan)
        except autopar.StrategyError:  # all rows of a table on hosts are wanted at once, and the like
            refused += 1
            continue
        compared += 1
        if found:
            wrong[seed] = (bad, *found)
    assert not wrong, "\n".join(f"seed {seed}: {told}" for seed, told in wrong.items())
    assert compared > refused, f"{refused} programs are refused, {compared} compared"
