"""`ServedLeaf`: a worker's handle of a leaf that servers keep (`autopar.sync.Async`)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from autopar import jax_compat
from autopar.errors import DonatedStateError, donated
from autopar.jax_types import Leaf
from autopar.servers.sessions import Session
from autopar.tables.leaf import StandingLeaf


class ServedLeaf(StandingLeaf[Session]):
    """A leaf of the state that a worker's step returned, while servers keep its values.

    It is a leaf like an array: `jax.tree` maps over it, and the step takes and returns it. Reading it (`np.asarray`,
    functions of JAX, indexing) asks its server for the current value, pushes of other workers included; no other worker
    takes part. `autopar.materialize(state)` copies the current values to ordinary arrays; `autopar.average(state)`,
    collective, makes the same arrays on all processes.
    """

    of_clients = True

    def __init__(self, session: Session, index: int, aval: Leaf) -> None:
        """Makes the handle of the step's input `index`, of the shape and dtype of `aval`."""
        super().__init__(session, index, aval)
        self._step = session.steps

    @property
    def is_weak(self) -> bool:
        return bool(getattr(self._aval, "weak_type", False))

    @property
    def is_whole_here(self) -> bool:
        return True  # servers answer one worker by itself

    def is_deleted(self) -> bool:
        return self._step != self.pending.steps

    def current(self) -> Leaf:
        """Returns its value now.

        Raises:
          DonatedStateError: it was given to a step.
        """
        if self.is_deleted():
            raise donated("this leaf")
        return typed(self.pending.read(self.index), self.is_weak)

    @property
    def _where(self) -> str:
        session = self.pending
        homes = session.served.get(self.index, ())
        where = f" on server{'s' * (len(homes) > 1)} {', '.join(map(str, homes))}"
        return where if homes else f", worker {session.link.number}'s"


def typed(value: Leaf, is_weak: bool) -> Leaf:
    """Returns a server's value as an array of a leaf's type."""
    if jax_compat.is_key(value.dtype):
        return value
    array = jnp.asarray(value)
    return jax_compat.weak(array) if is_weak else array


def session_of(leaves: Sequence[Leaf]) -> Session | None:
    """Returns this process's session of the state that leaves belong to; None if servers keep none of them. Raises
    DonatedStateError if they are of several states, or were given to a step."""
    served = [leaf for leaf in leaves if isinstance(leaf, ServedLeaf)]
    if any(leaf.is_deleted() for leaf in served):
        raise donated("the state")
    if any(leaf.pending is not served[0].pending for leaf in served):
        raise DonatedStateError("some leaves are of another state that servers keep than others: give one as returned")
    return served[0].pending if served else None
