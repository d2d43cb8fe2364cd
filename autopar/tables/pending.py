"""`PendingArray`: a leaf of the state whose last updates are still on their way through an asynchronous pipeline."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import jax

from autopar.errors import DonatedStateError
from autopar.tables.leaf import StandingLeaf

T = TypeVar("T")


class Flight(Protocol):
    """Minibatches that are in a pipeline together, and the leaves that they update."""

    @property
    def call(self) -> object:
        """Says which leaves are there: those of the last call, as long as no other has taken them."""
        ...

    @property
    def ended(self) -> int | None:
        """Number of the minibatch whose results the last call returned."""
        ...

    @property
    def is_of_several(self) -> bool:
        """Tells whether its stages are on several processes."""
        ...

    def drained(self) -> list[Any]:
        """Returns the leaves, once all minibatches have gone through. Collective over the ranks of the stages."""
        ...

    def hand_on(self) -> None:
        """Says that a step has taken the drained leaves, and updates them in place."""
        ...

    def rest(self) -> list[Any]:
        """Returns what minibatches returned besides the state that ended by that, in their order."""
        ...


class PendingArray(StandingLeaf):
    """A weight or slot that minibatches are still to update.

    A leaf of the state like an array: `jax.tree` maps over it, and the step that returned it takes it and goes on.
    Reading it (`np.asarray`, functions of JAX, indexing, saving) finishes these minibatches first, all leaves at once;
    so does `autopar.drain(state)`, which makes leaves that other steps take. With stages on several ranks every rank
    must read.
    """

    def __init__(self, flight: Flight, place: int, shape: tuple[int, ...], dtype: Any) -> None:
        """Takes the number, among the flight's leaves, of its `place`."""
        self._flight, self._place, self._shape, self._dtype = flight, place, shape, dtype
        self._call = flight.call

    @property
    def flight(self) -> Flight:
        """The minibatches that are on their way, shared by all leaves."""
        return self._flight

    @property
    def place(self) -> int:
        """Says which of their leaves it is."""
        return self._place

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def is_whole_here(self) -> bool:
        return not self._flight.is_of_several

    def is_deleted(self) -> bool:
        return self._call != self._flight.call

    def current(self) -> Any:
        """Returns the leaf behind all minibatches: an array, or a `StageArray`."""
        if self.is_deleted():
            raise DonatedStateError(
                "this leaf was given to a later step, which goes on with it: read the state that this returned. A "
                "state that is to stay is a copy, autopar.materialize(state)"
            )
        return self._flight.drained()[self._place]

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
