"""Optimizers, each with whether it lets a table be lifted.

Optimizers are made without seeing the parameters: those that treat leaves differently tell tables
from dense leaves by path, as users do (`is_table`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.zoo.case import Tree, key_path


@dataclass(frozen=True)
class Optimizer:
    """An optimizer; `make()` is a new Optax transformation, good for any parameters.

    `lifts`: no row's update depends on another row but through sums that untouched rows don't enter.
    `moves`: rows of the table whose gradient is zero move all the same, so that they are deferred.
    """

    name: str
    make: Callable[[], optax.GradientTransformation]
    lifts: bool
    moves: bool


def is_table(path: str) -> bool:
    """Whether the path of a parameter of the zoo (`emb/embedding`) is that of a table."""
    return any("emb" in segment or "softmax" in segment for segment in path.split("/"))


def _labels(params: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, _: "table" if is_table(key_path(path)) else "dense", params)


def _dense_mask(params: Tree) -> Tree:
    return jax.tree.map(lambda label: label == "dense", _labels(params))


def _per_row(reduce: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
    """The leaf [V, ...] reduced to one value a row, [V]; a vector's rows are its elements."""
    return reduce(leaf, axis=tuple(range(1, leaf.ndim)))


def _across_row(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Values [V] in a shape that broadcasts against the leaf [V, ...]."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - values.ndim))


class RowwiseAdagradState(NamedTuple):
    """One accumulator a row, [V], for each leaf."""

    accumulators: Tree


def rowwise_adagrad(learning_rate: float, initial: float = 0.1, eps: float = 1e-7) -> optax.GradientTransformation:
    """Adagrad with the mean of g^2 over the row as the accumulator, as recommenders use it."""

    def init(params: Tree) -> RowwiseAdagradState:
        return RowwiseAdagradState(jax.tree.map(lambda p: jnp.full(p.shape[:1], initial, p.dtype), params))

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, RowwiseAdagradState]:
        del params
        accumulators = jax.tree.map(lambda a, g: a + _per_row(jnp.mean, g * g), state.accumulators, updates)
        updates = jax.tree.map(
            lambda a, g: -learning_rate * g * _across_row(jax.lax.rsqrt(a + eps), g),
            accumulators,
            updates,
        )
        return updates, RowwiseAdagradState(accumulators)

    return optax.GradientTransformation(init, update)


class CountedSgdState(NamedTuple):
    """How often each row has had a gradient, int32 [V], for each leaf."""

    counts: Tree


def counted_sgd(learning_rate: float) -> optax.GradientTransformation:
    """SGD whose rate falls with the times that the row itself was touched: an integer slot."""

    def init(params: Tree) -> CountedSgdState:
        return CountedSgdState(jax.tree.map(lambda p: jnp.zeros(p.shape[:1], jnp.int32), params))

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, CountedSgdState]:
        del params
        counts = jax.tree.map(lambda c, g: c + _per_row(jnp.any, g != 0).astype(c.dtype), state.counts, updates)

        def leaf(count: jax.Array, g: jax.Array) -> jax.Array:
            rate = learning_rate * jax.lax.rsqrt(jnp.maximum(count, 1).astype(g.dtype))
            return -g * _across_row(rate, g)

        return jax.tree.map(leaf, counts, updates), CountedSgdState(counts)

    return optax.GradientTransformation(init, update)


def _partitioned() -> optax.GradientTransformation:
    # optax.partition's own type is a little wider than what a TrainState asks for.
    transforms: dict[Any, Any] = {"table": optax.adagrad(0.1), "dense": optax.adam(0.02)}
    return optax.partition(transforms, _labels)


def _injected() -> optax.GradientTransformation:
    schedule = optax.linear_schedule(0.1, 0.02, 10)
    return optax.inject_hyperparams(optax.adagrad)(learning_rate=schedule)


def _decay_dense() -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(1e-2, mask=_dense_mask), optax.adagrad(0.1))


_LIFTING: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1)),
    "scheduled": lambda: optax.sgd(optax.cosine_decay_schedule(0.2, 20)),
    "partitioned": _partitioned,
    "clip_value": lambda: optax.chain(optax.clip(0.01), optax.adagrad(0.1)),
    "clip_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.5)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.adagrad(0.1)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adagrad(0.1)),
    "injected": _injected,
    "decay_dense": _decay_dense,
    "rowwise_adagrad": lambda: rowwise_adagrad(0.1),
    "counted_sgd": lambda: counted_sgd(0.1),
    # The moments move on every row, the table itself doesn't.
    "rmsprop": lambda: optax.rmsprop(0.02),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adagrad(0.1), 3),
}

# Untouched rows of the table move.
_DEFERRED: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(0.02),
    "adamw": lambda: optax.adamw(0.02, weight_decay=1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
}

# A row's update depends on all rows (trust ratios).
_DENSE: dict[str, Callable[[], optax.GradientTransformation]] = {
    "lamb": lambda: optax.lamb(0.02),
}

OPTIMIZERS = {
    name: Optimizer(name, make, lifts, moves)
    for group, lifts, moves in ((_LIFTING, True, False), (_DEFERRED, True, True), (_DENSE, False, True))
    for name, make in group.items()
}
