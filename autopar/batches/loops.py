"""`uninterrupted`: a loop over batches that signals interrupt only between two of them, on all ranks between the same
two."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from autopar.interrupts import SIGNALS, Loop, Tell
from autopar.launch.group import Group, MpiGroup, everyone
from autopar.launch.progress import PROGRESS
from autopar.mpi.waiting import signal_channel

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
