"""Buffers of the state: copies before they are donated, and errors where they are used afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax

from autopar import jax_compat
from autopar.errors import AutoparError, DonatedStateError
from autopar.ir.paths import path_name
from autopar.jax_types import Leaf, Pytree
from autopar.tables.kinds import copied, is_table


def with_own_buffers(leaves: Sequence[Leaf], states: Collection[int]) -> list[Leaf]:
    """Copies leaves of the state (numbers in `states`) that share a buffer with another leaf: each is updated in
    place."""
    own_leaves, states = list(leaves), frozenset(states)
    if not states:
        return own_leaves
    seen = {buffer for k, leaf in enumerate(leaves) if k not in states for buffer in _buffers(leaf)}
    for k in sorted(states):
        own = _buffers(leaves[k])
        if seen.intersection(own):
            own_leaves[k] = copied(leaves[k])
        seen.update(own)
    return own_leaves


@contextlib.contextmanager
def naming_donated(name: str, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> Iterator[None]:
    """Adds the leaf's name to errors about a donated argument (`check_not_donated`)."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        check_not_donated(name, args, kwargs, error)
        raise


def check_not_donated(name: str, args: Sequence[Pytree], kwargs: Mapping[str, Pytree], cause: Exception) -> None:
    """Raises `DonatedStateError` if `cause` says that an argument was donated before the call."""
    if not isinstance(cause, DonatedStateError) and not any(word in str(cause) for word in ("deleted", "donated")):
        return  # a step that failed itself has updated leaves in place, too
    gone = first_deleted((args, dict(kwargs)))
    if gone is not None:
        raise DonatedStateError(
            f"{name} got a state that was given before ({gone}): a step updates its state in place, so that the old "
            "one is gone. Go on with the state that the step returned, or keep old states with parallelize(step, "
            "donate=False). If it is no state, say so: parallelize(step, batch_argnums=...)"
        ) from cause


def is_shared_buffer(error: Exception) -> bool:
    """Says whether JAX reports a buffer that is donated twice, or donated and used."""
    text = str(error)
    return "donate" in text and any(phrase in text for phrase in ("same buffer", "same call", "twice", "also used"))


def _buffers(tree: Pytree) -> list[Leaf]:
    """Returns the addresses of all arrays' buffers."""
    return [
        address
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not jax_compat.is_tracer(leaf) and not leaf.is_deleted() and leaf.size
        for address in _addresses(leaf)
    ]


def _addresses(leaf: jax.Array) -> list[int]:
    if jax_compat.is_key(leaf.dtype):
        return [id(leaf)]
    if len(leaf.sharding.device_set) == 1:
        return [leaf.unsafe_buffer_pointer()]
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def first_deleted(arguments: tuple[Pytree, Pytree]) -> str | None:
    """Returns the name of the first leaf in (args, kwargs) that was donated, if any."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if is_table(leaf) or (isinstance(leaf, jax.Array) and not jax_compat.is_tracer(leaf)):
            if leaf.is_deleted():
                inner = path_name(path[2:])
                return f"argument {path_name(path[1:2])}" + (f", {inner}" if inner else "")
    return None


def noting_lost_state(call: Callable[..., Pytree]) -> Callable[..., Pytree]:
    """Wraps a step's `__call__` so that errors tell a user when the state is gone.

    The error itself stays, for those who catch JAX's own. Autopar's errors, and warnings that are errors, come before a
    step begins and need no note.
    """

    @functools.wraps(call)
    def noting(step: Pytree, *args: Pytree, **kwargs: Pytree) -> Pytree:
        try:
            return call(step, *args, **kwargs)
        except (AutoparError, Warning):
            raise
        except BaseException as error:
            deleted = first_deleted((args, kwargs))
            if deleted is not None:
                error.add_note(
                    f"autopar: {step.name} updates its state in place, and had begun to: {deleted} is gone, and the "
                    "new state isn't complete. Go on from a checkpoint (autopar.restore), or keep old states with "
                    "parallelize(step, donate=False)"
                )
            raise

    return noting
