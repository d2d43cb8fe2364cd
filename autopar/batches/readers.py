"""Examples by their numbers, out of arrays or of an object that gives one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.batches.parts import axes_of, map_axes, size_of
from autopar.errors import ArgumentsError
from autopar.ir.examples import BatchAxis
from autopar.ir.paths import path_name


def reader_of(source: Any, batch_axis: BatchAxis, added: Sequence[str]) -> Reader:
    """What reads examples of a source; an ArgumentsError if it can't be indexed, or has no examples."""
    is_leaf = jax.tree_util.all_leaves([source])
    if isinstance(source, list) or (is_leaf and not hasattr(source, "shape")):
        if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
            raise ArgumentsError(
                "batch_size= makes batches of examples that can be indexed (arrays, or an object with __len__ and "
                f"__getitem__). A {type(source).__name__} can't; without batch_size= it gives batches of its own"
            )
        reader: Reader = Items(source, batch_axis, added)
    else:
        reader = Arrays(source, batch_axis, added)
    if not reader.count:
        raise ArgumentsError(f"the source, a {type(source).__name__}, has no examples")
    return reader


class Arrays:
    """A pytree of arrays with the examples, `count` of them, along their batch axes."""

    def __init__(self, source: Any, batch_axis: BatchAxis, added: Sequence[str]) -> None:
        self._source = jax.tree.map(lambda x: x if hasattr(x, "shape") else np.asarray(x), source)
        axes = axes_of(self._source, batch_axis, added)
        self.count = size_of(self._source, axes, "the source")
        leaves = zip(axes, jax.tree.leaves(self._source), strict=True)
        self._axes = [a if a is not None and leaf.shape[a] == self.count else None for a, leaf in leaves]

    def read(self, numbers: np.ndarray) -> tuple[Any, list[int | None]]:
        """Examples as a batch, and its batch axes."""
        in_order = bool(np.all(np.diff(numbers) == 1))  # then no copy is needed
        picked = slice(int(numbers[0]), int(numbers[-1]) + 1) if in_order else numbers

        def rows(leaf: Any, axis: int | None) -> np.ndarray:
            return np.asarray(leaf if axis is None else leaf[(slice(None),) * axis + (picked,)])

        return map_axes(rows, self._source, self._axes), self._axes


class Items:
    """An object that gives one example at an integer, `count` of them."""

    def __init__(self, source: Any, batch_axis: BatchAxis, added: Sequence[str]) -> None:
        self._source = source
        self._batch_axis = batch_axis
        self._added = added
        self.count = len(source)

    def read(self, numbers: np.ndarray) -> tuple[Any, list[int | None]]:
        """Examples as a batch, and its batch axes."""
        examples = [jax.tree.map(np.asarray, self._source[int(k)]) for k in numbers]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), examples[0])
        axes = axes_of(shapes, self._batch_axis, self._added)
        if None in axes:
            raise ArgumentsError("batch_axis: of examples one by one there is no leaf that all of a batch share (None)")
        for number, example in zip(numbers, examples, strict=True):
            if (other := _difference(examples[0], example)) is not None:
                raise ArgumentsError(
                    f"example {number} doesn't fit example {numbers[0]} of the same batch: {other}. Make all examples "
                    "of one form, by padding or cropping"
                )
        columns = zip(*map(jax.tree.leaves, examples), strict=True)
        leaves = [np.stack(column, axis or 0) for column, axis in zip(columns, axes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(examples[0]), leaves), axes


#: What reads examples by their numbers.
Reader = Arrays | Items


def _difference(first: Any, other: Any) -> str | None:
    """How an example isn't of the form of another one; None if it is."""
    if jax.tree.structure(first) != jax.tree.structure(other):
        return f"its structure is {jax.tree.structure(other)} instead of {jax.tree.structure(first)}"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(other), strict=True):
        if a.shape != b.shape:
            return f"{path_name(path) or 'it'} has shape {list(b.shape)} instead of {list(a.shape)}"
    return None
