"""Where batches come from: a stream of batches, or examples that can be indexed.

Of examples that can be indexed a process reads only those that its own devices hold, of a stream whole batches.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.batches.parts import Held, Part, axes_of, size_of
from autopar.batches.readers import Reader
from autopar.errors import ArgumentsError
from autopar.ir.examples import BatchAxis

#: What is done with a batch that isn't full.
Last = Literal["error", "drop", "pad"]


class Stream:
    """An iterable of batches. One whose iterator keeps its own position, as Grain's do (`get_state`, `set_state`), goes
    on from it.

    Attributes:
      full: Examples in its first batch, once that was read.
      latest: The latest batch, once there is one.
    """

    def __init__(self, source: Iterable[Any], batch_axis: BatchAxis, added: Sequence[str], epochs: int | None) -> None:
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
        """Batches of an epoch from number `start` on; those before are read, too, and left out, unless the source's own
        position is known: `kept`, of the part before."""
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
                yield dataclasses.replace(part, kept=_position_of(batches, self.full))
        if batch is not None:
            self.latest = self._part(number, batch)

    def _part(self, number: int, batch: Any) -> Part:
        batch = jax.tree.map(lambda x: x if isinstance(x, (jax.Array, np.ndarray)) else np.asarray(x), batch)
        axes = axes_of(batch, self._batch_axis, self._added)
        size = size_of(batch, axes, f"batch {number}")
        return Part(number, batch, axes, size, size, (size,), Held(((0, size),)))


def _position_of(batches: Any, full: int) -> str | None:
    """A source's own position, and how many examples its first batch had, as JSON; None if it keeps none."""
    if not hasattr(batches, "get_state"):
        return None
    state = batches.get_state()
    known = {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"state": state}
    try:
        return json.dumps({"full": full, **known}, default=lambda value: value.item())
    except (TypeError, ValueError, AttributeError):
        return None  # it can't be kept


def _set_position(batches: Any, kept: str) -> int:
    """Take a source to a position; returns how many examples its first batch had."""
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
      reader: Reads them by their numbers.
      size: Examples that this source gives to a batch.
      counts: Examples in each of the sources that a batch is made of.
      seed: Of the order of this source's examples, another one each epoch; None: as they are.
      member: Which of the sources this one is.
      last: What is done with the rest.
      held: Which examples of its part of a batch this process needs.
      first: Where that part begins in the global batch.
      turns: C, the clients that take a batch each, one after the other; this one's is `turn`.
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
        """Batches of an epoch from number `start` on, of clients those whose turn it is; a part's number is that of the
        last batch that somebody has then."""
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
            places = np.minimum(number * self._size + mine, count - 1)
            batch, axes = self._reader.read(places if order is None else order[places])
            reals = tuple(min(max(n - number * self._size, 0), self._size) for n in self._counts)
            last = first + self._turns - 1
            yield Part(last, batch, axes, len(mine), self._size * len(self._counts), reals, held)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        """The examples of an epoch by their numbers; that of the latest one is kept."""
        if self._known is None or self._known[0] != epoch:
            random = np.random.default_rng((seed, epoch, self._member))
            self._known = epoch, random.permutation(self._reader.count)
        return self._known[1]
