"""Minibatches that are on their way through an asynchronous pipeline: finish them, and tell whose results are whose."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax

from autopar.tables.kinds import is_table
from autopar.tables.pending import Flight, PendingArray

T = TypeVar("T")
#: Behind the last batch.
_END: Any = object()


def drain(state: T) -> T:
    """The state once all minibatches that are on their way have gone through; any other state as it is.

    A step without a flush (`Pipeline(schedule="spectrain")`) returns leaves that later calls still update. This ends
    that: epochs end so, and what evaluates or saves a state begins so. The next call fills the pipeline anew, and
    predicts nothing before its first update.

    Args:
      state: Any tree. With stages on several ranks all of them drain.

    Raises:
      DonatedStateError: a later call has taken the state.
    """
    return jax.tree.map(
        lambda leaf: leaf.current() if isinstance(leaf, PendingArray) else leaf, state, is_leaf=is_table
    )


def ended(state: Any) -> int | None:
    """Returns which minibatch the results are of that came with a state: its number since the pipeline was empty.

    None if they are of none yet, or of the call itself.
    """
    flight = _flight(state)
    return None if flight is None else flight.ended


def paired(step: Callable[[T, Any], tuple[T, Any]], state: T, batches: Iterable[Any]) -> Iterator[tuple[T, Any, Any]]:
    """Train, and give each batch with what its minibatch returned.

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
    leaves = jax.tree.leaves(state, is_leaf=is_table)
    return next((leaf.flight for leaf in leaves if isinstance(leaf, PendingArray)), None)


def _rest(flight: Flight | None) -> list[Any]:
    """What minibatches returned that were finished when the state was read."""
    return [] if flight is None else flight.rest()
