"""`Batches`: an iterator over batches that are placed over the devices ahead of the step, with its position.

If streams differ by process, the processes tell each other before each batch how many of its examples they have. All
see the same answers, so that all end, leave a batch out, or raise at the same one, and none waits for batches that
don't come. The exchange is on the host (`launch.group`) and doesn't wait for steps in flight.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np

from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import place_array
from autopar.batches.sources import Examples, Held, Last, Part, Stream, axes_of, filled, map_axes
from autopar.errors import ArgumentsError
from autopar.interrupts import SIGNALS, Loop, Tell
from autopar.ir.paths import BatchAxis, path_name
from autopar.jax_types import Index, Json, Leaf, Pytree
from autopar.launch.group import Group, MpiGroup, StoreGroup, everyone, next_compared, odd_one
from autopar.launch.progress import PROGRESS
from autopar.mpi.waiting import signal_channel


def agreed(source: Stream, processes: StoreGroup, last: Last, epoch: int, start: int) -> Iterator[Part]:
    """Yields batches of an epoch from index `start` on, joined from all processes' sources; `source` is this one's.

    `last`: what to do if sources differ in length. "error"; "drop": such a batch is left out, and the epoch ends with
    the first source that does; "pad": it is filled up with the source's last example, until all sources end.
    """
    parts = source.read(epoch, start)
    for number in itertools.count(start):
        part = next(parts, None)
        mine = {"size": 0 if part is None else part.size, "full": source.full, "leaves": _leaves(part or source.latest)}
        about = f"batch {number} of shard's source"
        answers = processes.values(mine, about)
        sizes = tuple(answer["size"] for answer in answers)
        if not any(sizes) or (last == "drop" and not all(sizes)):
            return
        full = max(answer["full"] or 0 for answer in answers)
        k = next((k for k, answer in enumerate(answers) if last == "drop" and answer["full"] != full), None)
        if k is not None:
            raise ArgumentsError(
                f"shard: batches of {processes.name(k)} have {answers[k]['full']} examples, those of others {full}: "
                "last='drop' would leave all of them out. Give all processes batches of one size"
            )
        _check_sizes(sizes, full, number, last, processes)
        _check_leaves([answer["leaves"] for answer in answers], number, processes)
        if last == "drop" and min(sizes) < full:
            continue
        part = part or source.latest
        assert part is not None, "a source without any batch was found above"
        rank, count = processes.rank, len(sizes)
        held = Held(((rank * full, (rank + 1) * full),))
        yield replace(filled(part, full), number=number, total=count * full, reals=sizes, held=held)


def _check_sizes(sizes: Sequence[int], full: int, number: int, last: Last, processes: StoreGroup) -> None:
    k = next((k for k, n in enumerate(sizes) if n > full or (n != full and last == "error")), None)
    if k is None:
        return
    what = f"has {sizes[k]} examples in batch {number}, its full size is {full}"
    if not sizes[k]:
        what = f"has {number} batches, other processes have more"
    raise ArgumentsError(
        f"shard: {processes.name(k)} {what}. shard(source, per_process=True, last='drop') leaves out what not all "
        "have, last='pad' fills it up"
    )


def _leaves(part: Part | None) -> list[list[Pytree]] | None:
    """Returns what must agree on all processes: paths, dtypes, shapes except the number of examples, and leaves that
    aren't by example."""
    if part is None:
        return None
    descriptions = []
    leaves = jax.tree_util.tree_leaves_with_path({"batch": part.batch})
    for (path, leaf), axis in zip(leaves, part.axes, strict=True):
        shape: list[Leaf] = list(leaf.shape)
        contents = None
        if axis is not None and shape[axis] == part.size:
            shape[axis] = "examples"
        else:
            contents = hashlib.blake2b(np.ascontiguousarray(leaf).tobytes(), digest_size=8).hexdigest()
        descriptions.append([path_name(path), str(leaf.dtype), shape, contents])
    return descriptions


def _check_leaves(descriptions: Sequence[list[list[Any]] | None], number: int, processes: StoreGroup) -> None:
    for k, theirs in enumerate(descriptions):
        if theirs is None:
            raise ArgumentsError(f"shard: the source of {processes.name(k)} gives no batch at all")
        if theirs != descriptions[0]:
            assert descriptions[0] is not None, "looked at first"
            pairs = itertools.zip_longest(descriptions[0], theirs, fillvalue=["no such leaf", "", [], None])
            a, b = next((a, b) for a, b in pairs if a != b)
            what = "is another one" if a[:3] == b[:3] else f"is {b[1]}{b[2]} there and {a[1]}{a[2]} here"
            raise ArgumentsError(
                f"shard: batch {number} of {processes.name(k)} doesn't fit that of "
                f"{processes.name(0)}: {b[0]} {what}. Only the examples may differ: what isn't by example "
                "(batch_axis=) is shared by all devices, and so the same on all processes"
            )


#: Is told of each batch, as it is given out, and of the one after it; None: there is none.
Announce = Callable[[Pytree, Pytree | None], None]

#: An epoch, the next batch in it, and the source's own position, if it keeps one.
Position = tuple[int, int, str | None]


@dataclass(frozen=True)
class Options:
    """Options for making and placing batches."""

    devices: Devices
    batch_axis: BatchAxis
    last: Last
    mask: str
    per_process: bool
    epochs: int | None
    seed: int
    group: StoreGroup
    clients: Clients | None

    @property
    def sources(self) -> int:
        """The number of sources that a global batch is made of."""
        return len(self.devices.processes.members) if self.per_process else 1

    @property
    def member(self) -> int:
        """The index of this process's source among them."""
        return self.devices.processes.rank if self.per_process else 0


class Batches(Iterator[Pytree]):
    """An iterator over global batches that knows its position. `shard` makes it."""

    def __init__(
        self, source: Stream | Examples, options: Options, ahead: int, announce: Announce | None = None
    ) -> None:
        self._announce = announce
        self._source = source
        self._options = options
        self._ahead = ahead
        #: Number of batches that were read, and of the next one that processes compare.
        self._read = self._compared = 0
        self._go_to(0, 0)

    def __iter__(self) -> Iterator[Pytree]:
        group = everyone()
        options = self._options
        if group.members != options.group.members:
            return Loop(self, tuple)
        return Loop(self, telling(group, seldom=options.clients is not None))

    def __next__(self) -> Pytree:
        try:
            while self._failed is None and len(self._waiting) <= self._ahead:
                placed = next(self._coming, None)
                if placed is None:
                    break
                self._waiting.append(placed)
        except BaseException as error:  # A generator that failed is at its end; its source isn't.
            self._coming = self._placed(*(self._waiting[-1][0] if self._waiting else self._position))
            # Batches that were read before are given out first, unless others wait for this process.
            if not self._waiting or not isinstance(error, Exception) or self._options.devices.processes.several:
                raise
            self._failed = error
        if not self._waiting:
            failed, self._failed = self._failed, None
            raise StopIteration if failed is None else failed
        self._position, batch = self._waiting.popleft()
        if self._announce is not None:
            self._announce(batch, self._waiting[0][1] if self._waiting else None)
        return batch

    def state(self) -> dict[str, Json]:
        """Returns the position of the next batch that wasn't given out yet, whatever was read ahead.

        If a `for` loop over the batches is interrupted, its body has been run to its end for all batches before it.

        Returns:
          epoch, batch: Finished epochs, and batches of the source in this one.
          seed: The seed of `shuffle=`, or -1.
          sources: Number of sources of a batch: processes under `per_process`, else 1. A position in a source that is
            the same on all processes serves any number of processes.
          batch_size: The batch size of examples that can be indexed.
          source: The source's own position, a text; missing if it keeps none, and under `per_process`.
        """
        o, (epoch, batch, kept) = self._options, self._position
        own: dict[str, Json] = {} if kept is None or o.sources > 1 else {"source": kept}
        if isinstance(self._source, Examples):
            own["batch_size"] = self._source.batch_size
        return {"epoch": epoch, "batch": batch, "seed": o.seed, "sources": o.sources, **own}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Goes on from a position.

        Examples that can be indexed are found at once, and so are batches of a source whose iterator keeps its own
        position (`get_state`, `set_state`), as Grain's do. Other sources are read again up to the position, so their
        batches must come in the same order.

        Args:
          state: The result of `state()`, of a `shard` with the same source, batch size, seed and `per_process`.

        Raises:
          ArgumentsError: it has another seed, number of sources or batch size, or is after the last batch.
        """
        mine = {name: value for name, value in self.state().items() if name != "source"}
        try:
            kept = state["source"] if "source" in state else None
            known = [name for name in mine if name != "batch_size" or name in state]  # older positions have none
            state = {name: operator.index(state[name]) for name in known}
        except (TypeError, KeyError, IndexError) as error:
            raise ArgumentsError(f"{state!r} is no position: give what state() returned, such as {mine}") from error
        if min(state["epoch"], state["batch"]) < 0:
            raise ArgumentsError(f"{state} is no position: epoch and batch are 0 or more")
        options = {"seed": ("shuffle", ""), "sources": ("per_process", ", on as many processes")}
        for name, (option, also) in {**options, "batch_size": ("batch_size", "")}.items():
            if name in state and state[name] != mine[name]:
                raise ArgumentsError(
                    f"the position is one with {name}={state[name]}, and here it is {mine[name]}: it means other "
                    f"examples. Give shard the same {option}= as before{also}"
                )
        if isinstance(self._source, Examples) and state["batch"] > self._source.batches:
            raise ArgumentsError(
                f"the position is in front of batch {state['batch']} of an epoch, and the source has "
                f"{self._source.batches}: it had more examples"
            )
        self._go_to(state["epoch"], state["batch"], kept)

    def _go_to(self, epoch: int, batch: int, kept: str | None = None) -> None:
        self._position: Position = epoch, batch, kept
        self._waiting: collections.deque[tuple[Position, Pytree]] = collections.deque()
        self._coming = self._placed(*self._position)
        self._failed: Exception | None = None

    def _placed(self, epoch: int, start: int, kept: str | None) -> Iterator[tuple[Position, Pytree]]:
        """Yields all batches from a position on, each with the position after it."""
        while self._options.epochs is None or epoch < self._options.epochs:
            number = None
            for part in self._parts(epoch, start, kept):
                number = part.number
                yield (epoch, number + 1, part.kept), self._put(part)
            if number is None and start == 0:
                return  # a source without any batch, which may be gone through without end
            epoch, start, kept = epoch + 1, 0, None

    def _parts(self, epoch: int, start: int, kept: str | None) -> Iterator[Part]:
        options, source = self._options, self._source
        if isinstance(source, Examples):
            return source.read(epoch, start)
        if options.sources > 1:
            return agreed(source, options.devices.processes, options.last, epoch, start)
        return self._whole(source, epoch, start, kept)

    def _whole(self, source: Stream, epoch: int, start: int, kept: str | None) -> Iterator[Part]:
        """Yields batches that each process has whole."""
        for part in source.read(epoch, start, kept):
            full = source.full
            assert full is not None, "a batch was read"
            if self._read == self._compared and self._options.devices.processes.several:
                _check_same(part, self._read, self._options.devices.processes)
                self._compared = next_compared(self._read)
            self._read += 1
            if part.size != full and self._options.last == "drop":
                continue
            if part.size > full or (part.size != full and self._options.last == "error"):
                raise ArgumentsError(
                    f"batch {part.number} has {part.size} examples, the first one had {full}. "
                    "shard(source, last='drop') leaves smaller ones out, last='pad' fills them up"
                )
            yield filled(part, full)

    def _put(self, part: Part) -> Pytree:
        options, count = self._options, self._options.devices.count
        if part.total % count and options.sources > 1:
            raise ArgumentsError(
                f"a global batch of {part.total} examples can't be spread over {count} devices, and no process has all "
                "of it: under per_process=True the devices must divide it"
            )
        batch = map_axes(lambda leaf, axis: _put(leaf, axis, part, options.devices), part.batch, part.axes)
        return batch if options.last != "pad" else self._with_weights(batch, part)

    def _with_weights(self, batch: Pytree, part: Part) -> dict[str, Pytree]:
        mask, devices = self._options.mask, self._options.devices
        if not isinstance(batch, dict):
            kind = type(batch).__name__
            raise ArgumentsError(f"last='pad' adds weights to each batch, which must be a dict, not a {kind}")
        if mask in batch:
            raise ArgumentsError(f"the batch has a {mask!r} of its own; name the weights with shard(source, mask=...)")
        each = part.total // len(part.reals)
        weights = np.concatenate([np.arange(each) < real for real in part.reals]).astype(np.float32)
        whole = {**batch, mask: weights}
        axis = jax.tree.unflatten(jax.tree.structure(whole), axes_of(whole, self._options.batch_axis))[mask]
        return {**batch, mask: _placed(weights, None if part.total % devices.count else axis, devices)}


def _put(leaf: Leaf, axis: int | None, part: Part, devices: Devices) -> jax.Array:
    if axis is None or leaf.shape[axis] != part.size:
        return _placed(leaf, None, devices)
    along = None if part.total % devices.count else axis
    if part.held.runs == ((0, part.total),):
        return _placed(leaf, along, devices)
    shape = (*leaf.shape[:axis], part.total, *leaf.shape[axis + 1 :])
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)

    def own(index: Index) -> np.ndarray:
        held = part.held.find(index[axis], part.total)
        if held is None:
            raise ArgumentsError(
                "per_process=True: a device of this process is to hold examples of another one's source. The mesh's "
                "devices must be ordered by process along the data axis, and be as many of each"
            )
        return np.asarray(leaf)[(*index[:axis], held)].astype(dtype)

    return jax.make_array_from_callback(shape, devices.sharding(along), own)


def _placed(leaf: Leaf, along: int | None, devices: Devices) -> jax.Array:
    """Puts a leaf on the devices; on a single one uncommitted, like any other array.

    A committed batch would make a step's state committed, and the step would be compiled once more for that. NumPy
    arrays are copied: on CPUs JAX shares their memory, and a source may fill it with its next batch.
    """
    leaf = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
    return jax.device_put(leaf) if jax.device_count() == 1 else place_array(leaf, devices.sharding(along))


def _check_same(part: Part, number: int, processes: StoreGroup) -> None:
    """Compares the batch of that number, from 0, in this iterator."""
    digest = hashlib.blake2b(str(jax.tree.structure(part.batch)).encode(), digest_size=16)
    for leaf in jax.tree.leaves(part.batch):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    k = odd_one(processes.gather(digest.digest(), "comparing batches of shard"))
    if k is not None:
        which = "the first batch" if number == 0 else f"batch {number}, counted from 0,"
        raise ArgumentsError(
            f"shard: {which} isn't the same on {processes.name(k)} as on "
            f"{processes.name(0)}. If each process has a part of the data, say shard(source, per_process=True); if "
            "not, give the source the same seed everywhere"
        )


# --- a loop over batches that signals interrupt only between two of them, on all ranks between the same two ---


_T = TypeVar("_T")

#: Seconds between two exchanges of signals by the store, and most batches.
_SPACING_S, _MOST_BATCHES = 0.5, 32


def uninterrupted(batches: Iterable[_T]) -> Iterator[_T]:
    """Iterates over batches. Ctrl-C waits until the loop's body has ended, before the next batch is asked for.

    So the source's position and the state belong to the same batch when the loop is interrupted, whatever its body
    does. `autopar.shard` does this by itself; this is for other sources. Signals that have a Python handler (SIGINT,
    SIGTERM, SIGUSR1, SIGUSR2) wait alike. A second one, 0.2 s later, goes through at once.

    All ranks, or processes of `jax.distributed`, make the loop together, and all answer a signal that one of them gets,
    before the same batch. In other threads than the main one, where Python answers no signals, it does nothing.

    Args:
      batches: An iterable that moves on only when the next item is asked for, and knows its position: Grain's
        iterators, a StatefulDataLoader. Not something that reads ahead of it.

    Example:
      >>> import autopar
      >>> source, seen = iter([3, 4, 5]), []
      >>> try:
      ...     for batch in autopar.uninterrupted(source):
      ...         seen.append(batch)
      ... except KeyboardInterrupt:
      ...     print("the next one is", next(source))
      >>> seen
      [3, 4, 5]
    """
    return Loop(iter(batches), telling(everyone()))


def telling(group: Group, *, seldom: bool = False) -> Tell:
    """Returns a function of this process's signals that returns those of all.

    `seldom`: not before each batch, as for processes that do steps of their own and wait for nobody else.
    """
    if not group.several:
        return tuple
    return _tell_ranks if isinstance(group, MpiGroup) and not seldom else _Spaced(group)


class _Spaced:
    """Exchanges signals through the store, which takes some ms, before every so many batches. The first process says
    how many, so that all come to it before the same batch."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._every, self._left, self._latest_s = 1, 0, time.monotonic()

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        if self._left:
            self._left -= 1
            return []
        passed_s, self._latest_s = time.monotonic() - self._latest_s, time.monotonic()
        fitting = int(self._every * _SPACING_S / max(passed_s, 1e-6))
        wish = max(1, min(fitting, 2 * self._every, _MOST_BATCHES))
        answers = self._group.values([wish, list(numbers)], "signals before a batch")
        self._every = answers[0][0]
        self._left = self._every - 1
        return [number for number in SIGNALS if any(number in held for _, held in answers)]


def _tell_ranks(numbers: Sequence[int]) -> list[int]:
    """Exchanges signals between all ranks on a channel of its own, in some 0.1 ms on one machine. Collective."""
    comm, waiting = signal_channel()
    mine = np.array([number in numbers for number in SIGNALS], np.int32)
    counts = np.empty_like(mine)
    with PROGRESS.during("waiting for the others' batches", "waits"):
        waiting.collective(comm, "Allreduce", mine, counts)
    return [number for number, count in zip(SIGNALS, counts, strict=True) if count]
