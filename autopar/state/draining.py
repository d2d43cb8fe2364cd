"""Minibatches that are on their way through an asynchronous pipeline: whose results come with which call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

from autopar.tables.pending import Flight, PendingArray, drain

T = TypeVar("T")
#: Behind the last batch.
_END: Any = object()


def ended(state: Any) -> int | None:
    """Returns which minibatch the results are of that came with a state: its number since the pipeline was empty.

    None if they are of none yet, or of the call itself.
    """
    flight = _flight(state)
    return None if flight is None else flight.ended


def paired(step: Callable[[T, Any], tuple[T, Any]], state: T, batches: Iterable[Any]) -> Iterator[tuple[T, Any, Any]]:
    """Trains, and yields each batch with what its minibatch returned.

    An asynchronous step returns that some calls later, or, for the last ones, when the state is drained or read. Of any
    other step it is what the call returns.

    Args:
      step: Takes a state and a batch, and returns the new state and something else.
      state: The first state, which is given away.
      batches: Of each call.

    Yields:
      The state as far as it is, a batch, and what the step returned for it, in the order of the batches. With the last
      ones the state is drained.
    """
    waiting: collections.deque[Any] = collections.deque()
    coming = iter(batches)
    batch = next(coming, _END)
    while batch is not _END:
        flight = _flight(state)
        state, results = step(state, batch)
        waiting.append(batch)
        batch = next(coming, _END)
        rest = _rest(flight) if _flight(state) is not flight else []  # the state was read
        if batch is _END:
            flight, state = _flight(state), drain(state)
            later = _rest(flight)
        else:
            later = []
        for each in (*rest, *([] if results is None else [results]), *later):
            yield state, waiting.popleft(), each


def _flight(state: Any) -> Flight | None:
    return next((leaf.flight for leaf in jax.tree.leaves(state) if isinstance(leaf, PendingArray)), None)


def _rest(flight: Flight | None) -> list[Any]:
    return [] if flight is None else flight.rest()
