"""`shard`: batches from any source, placed over the devices, one ahead of the step."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.arguments import path_name
from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError
from autopar.ir.examples import BatchAxis, check_batch_axis, example_axes


def shard(
    source: Iterable[Any],
    *,
    mesh: Mesh | None = None,
    data_axis: str | None = None,
    batch_axis: BatchAxis = 0,
    last: Literal["error", "drop", "pad"] = "error",
    mask: str = "mask",
    ahead: int = 1,
) -> Iterator[Any]:
    """Global batches from a source, each spread over the devices along its examples.

    Args:
      source: Gives batches: pytrees of arrays, or of anything that NumPy makes arrays of (torch tensors). Leaves that
        aren't of the batch's size along their batch axis (scalars, shared ids) every device gets.
      mesh, data_axis: As for `parallelize`.
      batch_axis: As for `parallelize`; the paths are those of a step whose argument is called `batch`.
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
    check_batch_axis(batch_axis)
    waiting: collections.deque[Any] = collections.deque()
    full: int | None = None
    for number, batch in enumerate(source):
        batch = jax.tree.map(_as_array, batch)
        axes = _axes(batch, batch_axis, added=[mask] if last == "pad" else [])
        size = _size(batch, axes, number)
        full = size if full is None else full
        if size != full and last == "drop":
            continue
        if size > full or (size != full and last == "error"):
            raise ArgumentsError(
                f"batch {number} has {size} examples, the first one had {full}. "
                "shard(source, last='drop') leaves smaller ones out, last='pad' fills them up"
            )
        if last == "pad":
            batch = _padded(batch, axes, size, full, mask)
            axes = _axes(batch, batch_axis)
        waiting.append(_placed(batch, axes, full, devices))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)


def _axes(batch: Any, batch_axis: BatchAxis, added: Sequence[str] = ()) -> list[int | None]:
    """The batch axis of each leaf. `added`: leaves to come, which a pattern may name."""
    leaves = jax.tree_util.tree_leaves_with_path({"batch": batch})
    known = [(path_name(path), leaf.shape) for path, leaf in leaves]
    return example_axes(batch_axis, [*known, *((f"batch/{name}", (1,)) for name in added)])[: len(known)]


def _map(fun: Callable[[Any, int | None], Any], batch: Any, axes: Sequence[int | None]) -> Any:
    """A function of leaves and their batch axes over a batch."""
    leaves, tree = jax.tree.flatten(batch)
    return jax.tree.unflatten(tree, [fun(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)])


def _size(batch: Any, axes: Sequence[int | None], number: int) -> int:
    """Examples in a batch: the most frequent size along the batch axes, the larger one of equally frequent ones."""
    pairs = zip(jax.tree.leaves(batch), axes, strict=True)
    sizes = collections.Counter(leaf.shape[axis] for leaf, axis in pairs if axis is not None)
    if not sizes:
        raise ArgumentsError(f"batch {number} has no array with an axis for its examples")
    return max(sizes, key=lambda n: (sizes[n], n))


def _padded(batch: Any, axes: Sequence[int | None], size: int, full: int, mask: str) -> dict[str, Any]:
    if not isinstance(batch, dict):
        kind = type(batch).__name__
        raise ArgumentsError(f"last='pad' adds weights to each batch, which must be a dict, not a {kind}")
    if mask in batch:
        raise ArgumentsError(f"the batch has a {mask!r} of its own; name the weights with shard(source, mask=...)")

    def fill(leaf: Any, axis: int | None) -> Any:
        if axis is None or leaf.shape[axis] != size or size == full:
            return leaf
        last = np.take(np.asarray(leaf), [-1], axis)
        return np.concatenate([leaf, np.repeat(last, full - size, axis)], axis)

    weights = (np.arange(full) < size).astype(np.float32)
    return {**_map(fill, batch, axes), mask: weights}


def _placed(batch: Any, axes: Sequence[int | None], size: int, devices: Devices) -> Any:
    spread = size % devices.count == 0

    def place(leaf: Any, axis: int | None) -> jax.Array:
        along = axis if spread and axis is not None and leaf.shape[axis] == size else None
        return jax.device_put(leaf, devices.sharding(along))

    return _map(place, batch, axes)
