"""`Upcoming`: which batch follows the one that a step is given, as `autopar.shard(source, step=step)` says."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import jax

from autopar.jax_types import Leaf, Pytree


class Upcoming:
    """The latest batch that was given out, and the one after it. Neither is kept alive by this."""

    def __init__(self) -> None:
        self._pairs: list[tuple[weakref.ref[Leaf], weakref.ref[Leaf]]] = []

    def announce(self, batch: Pytree, following: Pytree | None) -> None:
        """Takes a batch and the one after it; None: there is none, or it isn't known."""
        leaves, tree = jax.tree.flatten(batch)
        others, other = jax.tree.flatten(following)
        pairs = list(zip(leaves, others, strict=True)) if tree == other else []
        is_like = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
        self._pairs = [(weakref.ref(a), weakref.ref(b)) for a, b in pairs if is_like]

    def after(self, leaves: Sequence[Leaf]) -> Mapping[int, Leaf]:
        """Returns by number the arguments of the call after one with these leaves, as far as they are known."""
        known = [(now(), then()) for now, then in self._pairs]
        following = {id(now): then for now, then in known if now is not None and then is not None}
        return {k: following[id(leaf)] for k, leaf in enumerate(leaves) if id(leaf) in following}
