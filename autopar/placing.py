"""The state in place: what is done before its buffers are given away, and what is said when they are used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.arguments import Argument
from autopar.errors import DonatedStateError


def separate_buffers(
    states: Sequence[Argument], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Copy state leaves that share a buffer with another leaf: each is to be updated in place by itself."""
    positions = {s.position for s in states}
    seen: set[Any] = {b for k, a in enumerate(args) if k not in positions for b in _buffers(a)}

    def own(leaf: Any) -> Any:
        shared = seen.intersection(_buffers(leaf))
        seen.update(_buffers(leaf))
        return _copy(leaf) if shared else leaf

    placed = list(args)
    named = dict(kwargs)
    for state in states:
        if state.position is not None:
            placed[state.position] = jax.tree.map(own, args[state.position])
        else:
            named[state.name] = jax.tree.map(own, kwargs[state.name])
    return placed, named


def check_not_donated(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], cause: Exception) -> None:
    """Raise DonatedStateError if a leaf of the arguments is gone."""
    leaves = jax.tree_util.tree_leaves_with_path((args, dict(kwargs)))
    gone = [p for p, leaf in leaves if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()]
    if gone:
        raise DonatedStateError(
            f"{name} got a state that it was given before ({_path_of(gone[0])}): a step updates its state in "
            "place, so that the old one is gone. Go on with the state that the step returned, or keep old states "
            "with parallelize(step, donate=False)"
        ) from cause


def is_shared_buffer(error: Exception) -> bool:
    """Whether JAX says that a buffer is donated twice, or donated and used."""
    text = str(error)
    return "donate" in text and ("same buffer" in text or "twice" in text or "also used" in text)


def _path_of(path: Sequence[Any]) -> str:
    """A readable place in (args, kwargs)."""
    return jax.tree_util.keystr(tuple(path[1:]))


def is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax_compat.Tracer)


def _buffers(tree: Any) -> list[Any]:
    """Addresses of the buffers of all arrays in a tree."""
    return [
        id(leaf) if jax_compat.is_key(leaf.dtype) else leaf.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
        and not is_traced(leaf)
        and not leaf.is_deleted()
        and leaf.size
        and len(leaf.sharding.device_set) == 1
    ]


def _copy(leaf: jax.Array) -> jax.Array:
    if not jax_compat.is_key(leaf.dtype):
        return jax.numpy.copy(leaf)
    data = jax.numpy.copy(jax.random.key_data(leaf))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
