"""A process's part of a batch: its examples, and the axes along which they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError
from autopar.ir.paths import BatchAxis, example_axes, path_name
from autopar.jax_types import Leaf, Pytree


@dataclass(frozen=True)
class Held:
    """The examples of a global batch that this process has: `runs` of consecutive ones."""

    runs: tuple[tuple[int, int], ...]

    @staticmethod
    def by(devices: Devices, size: int) -> Held:
        """Returns the examples of a batch of some size that this process's devices hold."""
        if size % devices.count:
            return Held(((0, size),))
        indices = devices.sharding(0).addressable_devices_indices_map((size,)).values()
        runs: list[tuple[int, int]] = []
        for start, stop, _ in sorted({index[0].indices(size) for index in indices if index is not None}):
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return Held(tuple(runs))

    @property
    def numbers(self) -> np.ndarray:
        """Their numbers in the batch."""
        return np.concatenate([np.arange(*run) for run in self.runs])

    def find(self, wanted: slice, size: int) -> slice | None:
        """Returns the position of a range of the batch's examples among those held; None if some are missing."""
        start, stop, _ = wanted.indices(size)
        before = 0
        for a, b in self.runs:
            if a <= start and stop <= b:
                return slice(before + start - a, before + stop - a)
            before += b - a
        return None


@dataclass(frozen=True)
class Part:
    """A batch, as far as a process has read it.

    Attributes:
      number: Its number in the epoch.
      batch, axes: A pytree of arrays, and the batch axis of each leaf.
      size, total: Number of examples along them here, and in the global batch.
      reals: For each source of the batch the number of examples that are no padding.
      held: The examples of the global batch that are here.
      kept: The source's own position after it, if it keeps one.
    """

    number: int
    batch: Pytree
    axes: Sequence[int | None]
    size: int
    total: int
    reals: tuple[int, ...]
    held: Held
    kept: str | None = None


def axes_of(batch: Pytree, batch_axis: BatchAxis, added: Sequence[str] = ()) -> list[int | None]:
    """Returns the batch axis of each leaf. `added`: leaves to come, which a pattern may name."""
    leaves = jax.tree_util.tree_leaves_with_path({"batch": batch})
    known = [(path_name(path), tuple(leaf.shape)) for path, leaf in leaves]
    for (path, _), (_, leaf) in zip(known, leaves, strict=True):
        if getattr(leaf.dtype, "kind", "") in "OSUMm":
            raise ArgumentsError(
                f"{path} is an array of {leaf.dtype}: batches are of numbers. Make it one, or take it out of the batch"
            )
    return example_axes(batch_axis, [*known, *((f"batch/{name}", (1,)) for name in added)])[: len(known)]


def map_axes(fun: Callable[[Pytree, int | None], Pytree], batch: Pytree, axes: Sequence[int | None]) -> Pytree:
    leaves, tree = jax.tree.flatten(batch)
    return jax.tree.unflatten(tree, [fun(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)])


def size_of(batch: Pytree, axes: Sequence[int | None], name: str) -> int:
    """Returns the number of examples in a batch: the most frequent size along the batch axes, the larger one in a
    tie."""
    sizes = [leaf.shape[axis] for leaf, axis in zip(jax.tree.leaves(batch), axes, strict=True) if axis is not None]
    if not sizes:
        shown = ", ".join(f"{type(x).__name__}{list(getattr(x, 'shape', []))}" for x in jax.tree.leaves(batch)[:4])
        raise ArgumentsError(
            f"{name} has no array with an axis for its examples ({shown or 'it has no leaves'}): give arrays "
            "[examples, ...], or say which axis that is with batch_axis="
        )
    return max(sizes, key=lambda n: (sizes.count(n), n))


def filled(part: Part, full: int) -> Part:
    """Returns a part with its last example repeated until there are `full`."""

    def fill(leaf: Leaf, axis: int | None) -> Leaf:
        if axis is None or leaf.shape[axis] != part.size or part.size == full:
            return leaf
        last = np.take(np.asarray(leaf), [-1], axis)
        return np.concatenate([leaf, np.repeat(last, full - part.size, axis)], axis)

    held = Held(((0, full),))
    return dataclasses.replace(part, batch=map_axes(fill, part.batch, part.axes), size=full, total=full, held=held)
