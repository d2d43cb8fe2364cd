"""`PendingArray`: a leaf of the state that minibatches in an asynchronous pipeline are still to update."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import jax

from autopar.errors import DonatedStateError
from autopar.jax_types import Leaf, Pytree
from autopar.tables.leaf import StandingLeaf

T = TypeVar("T")


class Flight(Protocol):
    """Minibatches that are in a pipeline together, and the leaves that they update."""

    @property
    def call(self) -> object:
        """Identifies the leaves that exist now: the last call's, until another pipeline takes them."""
        ...

    @property
    def finished(self) -> int | None:
        """Number of the minibatch whose results the last call returned."""
        ...

    @property
    def is_of_several(self) -> bool:
        """Tells whether its stages are on several processes."""
        ...

    def drained(self) -> list[Leaf]:
        """Returns the leaves, once all minibatches have gone through. Collective over the ranks of the stages."""
        ...

    def hand_on(self) -> None:
        """Notes that a step has taken the drained leaves, and updates them in place."""
        ...

    def rest(self) -> list[Leaf]:
        """Returns, in order, the results (without the state) of minibatches that finished when it was drained."""
        ...


class PendingArray(StandingLeaf[Flight]):
    """A weight or slot that minibatches are still to update.

    A leaf of the state like an array: `jax.tree` maps over it, and the step that returned it takes it and goes on.
    Reading it (`np.asarray`, functions of JAX, indexing, saving) finishes these minibatches first, all leaves at once;
    so does `autopar.drain(state)`, which makes leaves that other steps take. With stages on several ranks every rank
    must read.
    """

    def __init__(self, flight: Flight, index: int, aval: Leaf) -> None:
        """Takes the minibatches in flight, which all leaves share; `index` and `aval` as for `StandingLeaf`."""
        super().__init__(flight, index, aval)
        self._call = flight.call

    @property
    def is_whole_here(self) -> bool:
        return not self.pending.is_of_several

    def is_deleted(self) -> bool:
        return self._call != self.pending.call

    def current(self) -> Leaf:
        """Returns the leaf after all minibatches: an array, or a `StageArray`."""
        if self.is_deleted():
            raise DonatedStateError(
                "this leaf was given to a later step, which goes on with it: read the state that this returned. A "
                "state that is to stay is a copy, autopar.materialize(state)"
            )
        return self.pending.drained()[self.index]

    @property
    def _where(self) -> str:
        return ", minibatches on their way are finished when it is read"


def drain(state: T) -> T:
    """Drains a pipeline: returns the state once all minibatches have gone through, any other state as it is.

    A step without a flush (`Pipeline(schedule="spectrain")`) returns leaves that later calls still update. This ends
    that: epochs end so, and what evaluates or saves a state begins so. The next call fills the pipeline anew, and
    predicts nothing before its first update.

    Args:
      state: Any tree. With stages on several ranks all of them drain.

    Raises:
      DonatedStateError: a later call has taken the state.
    """
    return jax.tree.map(lambda leaf: leaf.current() if isinstance(leaf, PendingArray) else leaf, state)


# --- results, some calls after their batches ---


#: Follows the last batch.
_END: Any = object()


def finished_minibatch(state: Pytree) -> int | None:
    """Returns the number of the minibatch whose results the call returned that made this state.

    Minibatches are numbered from 0, beginning with the first one in the empty pipeline. None if the call returned no
    results yet, or its own minibatch's.
    """
    flight = _flight(state)
    return None if flight is None else flight.finished


def train_batches(
    step: Callable[[T, Pytree], tuple[T, Pytree]], state: T, batches: Iterable[Pytree]
) -> Iterator[tuple[T, Pytree, Pytree]]:
    """Trains on batches, and yields each batch with its own results.

    An asynchronous step returns a batch's results some calls later; those of the last batches come when the state is
    drained or read. Any other step returns them at once.

    Args:
      step: Maps (state, batch) to (new state, results).
      state: The first state, which is donated.
      batches: A batch for each call.

    Yields:
      (The newest state, a batch, its results), in the order of the batches; the last state is drained.
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


def _flight(state: Pytree) -> Flight | None:
    return next((leaf.pending for leaf in jax.tree.leaves(state) if isinstance(leaf, PendingArray)), None)


def _rest(flight: Flight | None) -> list[Leaf]:
    return [] if flight is None else flight.rest()
