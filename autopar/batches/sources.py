"""Sources of batches: streams of batches, and examples that can be indexed.

A process reads whole batches of a stream, but only those indexed examples that its own devices hold.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError
from autopar.ir.paths import BatchAxis, example_axes, path_name
from autopar.jax_types import Leaf, Pytree


def reader_of(source: Pytree, batch_axis: BatchAxis, added: Sequence[str]) -> Reader:
    """Returns the reader of a source's examples; raises ArgumentsError if it can't be indexed, or has no examples."""
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
    """A pytree of arrays with `count` examples along their batch axes."""

    def __init__(self, source: Pytree, batch_axis: BatchAxis, added: Sequence[str]) -> None:
        self._source = jax.tree.map(lambda x: x if hasattr(x, "shape") else np.asarray(x), source)
        axes = axes_of(self._source, batch_axis, added)
        self.count = size_of(self._source, axes, "the source")
        leaves = zip(axes, jax.tree.leaves(self._source), strict=True)
        self._axes = [a if a is not None and leaf.shape[a] == self.count else None for a, leaf in leaves]

    def read(self, numbers: np.ndarray) -> tuple[Pytree, list[int | None]]:
        """Returns examples as a batch, and its batch axes."""
        in_order = bool(np.all(np.diff(numbers) == 1))  # then no copy is needed
        picked = slice(int(numbers[0]), int(numbers[-1]) + 1) if in_order else numbers

        def rows(leaf: Leaf, axis: int | None) -> np.ndarray:
            return np.asarray(leaf if axis is None else leaf[(slice(None),) * axis + (picked,)])

        return map_axes(rows, self._source, self._axes), self._axes


class Items:
    """An object that gives one of `count` examples at an integer."""

    def __init__(self, source: Pytree, batch_axis: BatchAxis, added: Sequence[str]) -> None:
        self._source = source
        self._batch_axis = batch_axis
        self._added = added
        self.count = len(source)

    def read(self, numbers: np.ndarray) -> tuple[Pytree, list[int | None]]:
        """Returns examples as a batch, and its batch axes."""
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


#: Reads examples by number.
Reader = Arrays | Items


def _difference(first: Pytree, other: Pytree) -> str | None:
    if jax.tree.structure(first) != jax.tree.structure(other):
        return f"its structure is {jax.tree.structure(other)} instead of {jax.tree.structure(first)}"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(other), strict=True):
        if a.shape != b.shape:
            return f"{path_name(path) or 'it'} has shape {list(b.shape)} instead of {list(a.shape)}"
    return None


#: What to do with a batch that isn't full.
Last = Literal["error", "drop", "pad"]


class Stream:
    """An iterable of batches. If its iterator keeps its own position (`get_state`, `set_state`), as Grain's do, it goes
    on from it. `full`: examples in its first batch, and `latest`: the latest batch, once read."""

    def __init__(
        self, source: Iterable[Pytree], batch_axis: BatchAxis, added: Sequence[str], epochs: int | None
    ) -> None:
        self._source = source
        self._batch_axis = batch_axis
        self._added = added
        self._once = isinstance(source, Iterator)
        self._begun = False
        self.full: int | None = None
        self.latest: Part | None = None
        if self._once and epochs != 1:
            raise ArgumentsError(
                f"epochs={epochs}: a {type(source).__name__} can be read once only. Give something that can be read "
                "again: a list, a data loader, an object with an __iter__"
            )

    def read(self, epoch: int, start: int, kept: str | None = None) -> Iterator[Part]:
        """Yields batches of an epoch from number `start` on. Earlier ones are read and left out, unless `kept` is the
        source's own position."""
        if self._once and self._begun and kept is None:
            raise ArgumentsError(
                f"a {type(self._source).__name__} can be read once only: restore a position before the first batch is "
                "asked for, with a fresh one"
            )
        self._begun = True
        number, batch = 0, None
        try:
            batches = iter(self._source)
        except TypeError as error:
            raise ArgumentsError(
                "shard takes batches to go through, or, with batch_size=, examples that can be indexed, not a "
                f"{type(self._source).__name__}"
            ) from error
        first = 0
        if kept is not None and hasattr(batches, "set_state"):
            first, self.full = start, _set_position(batches, kept)
        for number, batch in enumerate(batches, first):
            if number < start and self.full is not None:
                continue
            part = self.latest = self._part(number, batch)
            self.full = part.size if self.full is None else self.full
            if number >= start:
                yield replace(part, kept=_position_of(batches, self.full))
        if batch is not None:
            self.latest = self._part(number, batch)

    def _part(self, number: int, batch: Pytree) -> Part:
        batch = jax.tree.map(lambda x: x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x), batch)
        axes = axes_of(batch, self._batch_axis, self._added)
        size = size_of(batch, axes, f"batch {number}")
        return Part(number, batch, axes, size, size, (size,), Held(((0, size),)))


def _position_of(batches: Pytree, full: int) -> str | None:
    """Returns a source's own position and the size of its first batch, as JSON; None if it keeps none."""
    if not hasattr(batches, "get_state"):
        return None
    state = batches.get_state()
    known = {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"state": state}
    try:
        return json.dumps({"full": full, **known}, default=lambda value: value.item())
    except (TypeError, ValueError, AttributeError):
        return None  # JSON can't hold it


def _set_position(batches: Pytree, kept: str) -> int:
    """Takes a source to a position; returns the size of its first batch."""
    try:
        known = json.loads(kept)
        full, state = known["full"], base64.b64decode(known["bytes"]) if "bytes" in known else known["state"]
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentsError(f"source={kept!r} is no position of a source: give what state() returned") from error
    batches.set_state(state)
    return full


class Examples:
    """Batches of examples that can be indexed.

    Args:
      reader: Reads examples by number.
      size: Examples that this source gives to a batch.
      counts: Examples in each of the sources that a batch is made of.
      seed: Seed of the order of this source's examples, another one each epoch; None: in order.
      member: The number of this source.
      last: What to do with the rest.
      held: The examples of its part of a batch that this process needs.
      first: Where that part begins in the global batch.
      turns, turn: C, the clients that take a batch each in turn, and this one's number.
    """

    def __init__(
        self,
        reader: Reader,
        size: int,
        counts: Sequence[int],
        seed: int | None,
        member: int,
        last: Last,
        held: Held,
        first: int,
        turns: int = 1,
        turn: int = 0,
    ) -> None:
        self._reader, self._size, self._counts = reader, size, tuple(counts)
        self._seed, self._member, self._held, self._first = seed, member, held, first
        self._turns, self._turn, self._last = turns, turn, last
        self._known: tuple[int, np.ndarray] | None = None
        whole = [n // size for n in counts]
        self.batches = min(whole) if last == "drop" else max(-(-n // size) for n in counts)
        if last == "error" and any(n != self.batches * size for n in counts):
            shown = f"{counts[0]} examples" if len(counts) == 1 else f"{list(counts)} examples on the processes"
            raise ArgumentsError(
                f"the source has {shown}, which batches of {size * len(counts)} don't use up equally. "
                "shard(source, last='drop') leaves the rest out, last='pad' fills the last batch up"
            )
        if self.batches < turns:
            raise ArgumentsError(
                f"the source has {self.batches} minibatches for {turns} clients: give smaller ones, or more examples"
            )
        if last == "error" and self.batches % turns:
            raise ArgumentsError(
                f"the source has {self.batches} minibatches, which {turns} clients don't share equally. "
                "shard(source, last='drop') leaves the rest of each epoch out"
            )

    @property
    def batch_size(self) -> int:
        """Examples in a global batch."""
        return self._size * len(self._counts)

    def read(self, epoch: int, start: int) -> Iterator[Part]:
        """Yields batches of an epoch from number `start` on; with clients this one's. A part's number is that of the
        last batch in the round."""
        count, rest = self._reader.count, (self.batches - start) % self._turns
        if rest and self._last == "error":
            raise ArgumentsError(
                f"from minibatch {start} on {self.batches - start} are left, which {self._turns} clients don't share "
                "equally. shard(source, last='drop') leaves the rest of each epoch out"
            )
        order = None if self._seed is None else self._order(self._seed, epoch)
        mine = self._held.numbers
        held = Held(tuple((a + self._first, b + self._first) for a, b in self._held.runs))
        for first in range(start, self.batches - self._turns + 1, self._turns):
            number = first + self._turn
            indices = np.minimum(number * self._size + mine, count - 1)
            batch, axes = self._reader.read(indices if order is None else order[indices])
            reals = tuple(min(max(n - number * self._size, 0), self._size) for n in self._counts)
            last = first + self._turns - 1
            yield Part(last, batch, axes, len(mine), self._size * len(self._counts), reals, held)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self._known is None or self._known[0] != epoch:
            random = np.random.default_rng((seed, epoch, self._member))
            self._known = epoch, random.permutation(self._reader.count)
        return self._known[1]


# --- a process's part of a batch: its examples, and the axes along which they lie ---


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
        """Their indices in the batch."""
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
    """The part of a batch that a process has read.

    Attributes:
      number: The batch's index in the epoch.
      batch, axes: A pytree of arrays, and the batch axis of each leaf.
      size, total: Number of examples here, and in the global batch.
      reals: For each source of the batch the number of its examples, padding left out.
      held: The examples of the global batch that are here.
      kept: The source's own position after this batch, if it keeps one.
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
    """Returns the batch axis of each leaf. `added`: further leaves that a pattern may name."""
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
    """Returns a part with its last example repeated until it has `full` examples."""

    def fill(leaf: Leaf, axis: int | None) -> Leaf:
        if axis is None or leaf.shape[axis] != part.size or part.size == full:
            return leaf
        last = np.take(np.asarray(leaf), [-1], axis)
        return np.concatenate([leaf, np.repeat(last, full - part.size, axis)], axis)

    held = Held(((0, full),))
    return replace(part, batch=map_axes(fill, part.batch, part.axes), size=full, total=full, held=held)
