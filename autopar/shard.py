"""`shard`: batches from any source, placed over the devices, one ahead of the step."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError


def shard(
    source: Iterable[Any],
    *,
    mesh: Mesh | None = None,
    data_axis: str | None = None,
    last: Literal["error", "drop", "pad"] = "error",
    mask: str = "mask",
    ahead: int = 1,
) -> Iterator[Any]:
    """Global batches from a source, each spread over the devices along the first axis of its leaves.

    Args:
      source: Gives batches: pytrees of arrays, or of anything that NumPy makes arrays of (torch tensors). Leaves whose
        first axis isn't the batch's size (scalars, shared ids) every device gets.
      mesh, data_axis: As for `parallelize`.
      last: What is done with a batch that is smaller than the first one. "error"; "drop"; "pad": its last example is
        repeated, and every batch, which must be a dict, gets float32 [batch] weights under `mask`, 1 for an example and
        0 for padding, for the step's loss to use.
      mask: The name of the weights.
      ahead: How many batches are placed before they are asked for.

    Yields:
      Batches of `jax.Array`s.

    Raises:
      ArgumentsError: a batch without an array, a smaller batch under "error", or one that is no dict under "pad".
    """
    if last not in ("error", "drop", "pad"):
        raise ArgumentsError(f"last={last!r}: there are 'error', 'drop' and 'pad'")
    devices = Devices.of(mesh, data_axis)
    waiting: collections.deque[Any] = collections.deque()
    full: int | None = None
    for number, batch in enumerate(source):
        batch = jax.tree.map(_as_array, batch)
        size = _size(batch, number)
        full = size if full is None else full
        if size != full and last == "drop":
            continue
        if size > full or (size != full and last == "error"):
            raise ArgumentsError(
                f"batch {number} has {size} examples, the first one had {full}. "
                "shard(source, last='drop') leaves smaller ones out, last='pad' fills them up"
            )
        if last == "pad":
            batch = _padded(batch, size, full, mask)
        waiting.append(_placed(batch, full, devices))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)


def _size(batch: Any, number: int) -> int:
    """Examples in a batch: the most frequent first size of its leaves, the larger one of equally frequent ones."""
    sizes = collections.Counter(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
    if not sizes:
        raise ArgumentsError(f"batch {number} has no array with a first axis")
    return max(sizes, key=lambda n: (sizes[n], n))


def _padded(batch: Any, size: int, full: int, mask: str) -> dict[str, Any]:
    if not isinstance(batch, dict):
        kind = type(batch).__name__
        raise ArgumentsError(f"last='pad' adds weights to each batch, which must be a dict, not a {kind}")
    if mask in batch:
        raise ArgumentsError(f"the batch has a {mask!r} of its own; name the weights with shard(source, mask=...)")

    def fill(leaf: Any) -> Any:
        if not leaf.ndim or leaf.shape[0] != size or size == full:
            return leaf
        return np.concatenate([leaf, np.repeat(np.asarray(leaf)[-1:], full - size, axis=0)])

    weights = (np.arange(full) < size).astype(np.float32)
    return {**jax.tree.map(fill, batch), mask: weights}


def _placed(batch: Any, size: int, devices: Devices) -> Any:
    spread = size % devices.count == 0

    def place(leaf: Any) -> jax.Array:
        along = 0 if spread and leaf.ndim and leaf.shape[0] == size else None
        return jax.device_put(leaf, devices.sharding(along))

    return jax.tree.map(place, batch)
