"""`Replica`: a leaf of a state of which each client has its own, until they are averaged (`autopar.sync`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.clients import Clients
from autopar.backends.global_arrays import is_global, place_array
from autopar.errors import DonatedStateError, donated
from autopar.ir.plan import FragmentIndex
from autopar.jax_types import Array, Json, Leaf, Pytree
from autopar.servers.sessions import CenterSession, RingSession, Session
from autopar.tables.kinds import materialize
from autopar.tables.leaf import StandingLeaf, TableLeaf
from autopar.tables.served import ServedLeaf, session_of, typed

#: Calls whose rows are kept by themselves; beyond that they are brought together.
_MOST_CALLS = 64


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a table."""

    axis: int  #: Of the rows.
    indices: np.ndarray  #: Their indices, int32[n], some of them several times.
    values: Array  #: [n, ...]: the rows.


@dataclass(frozen=True, eq=False)
class OnItsWay:
    """A mean that isn't merged yet."""

    due: int  #: The step behind which it is.
    #: Input -> the weight as it was when it was sent, or the rows that were sent of it.
    sent: Mapping[int, Array | Rows]
    #: Input -> what it becomes, or these rows do, but for what this client has changed since.
    new: Mapping[int, Array | Rows]


@dataclass(frozen=True, eq=False)
class Touched:
    """The rows of a table that a client's calls have looked up."""

    extent: int  #: Rows of the table.
    calls: tuple[np.ndarray, ...] = ()  #: For each call the rows by number.

    @staticmethod
    def of_bits(extent: int, bits: np.ndarray) -> Touched:
        """Returns the rows whose bits are set."""
        return Touched(extent, (np.nonzero(np.unpackbits(bits, count=extent))[0],))

    @property
    def bits(self) -> np.ndarray:
        """A bit for each row, uint8[extent/8]."""
        mask = np.zeros(self.extent, bool)
        for rows in self.calls:
            mask[rows] = True
        return np.packbits(mask)

    def with_call(self, rows: np.ndarray) -> Touched:
        """Returns these rows and those of one more call."""
        earlier = self.calls
        if len(earlier) >= _MOST_CALLS:
            earlier = (np.unique(np.concatenate(earlier)),)
        return Touched(self.extent, (*earlier, rows))


@dataclass(frozen=True, eq=False)
class Replicas:
    """Holds what is known of a state's replicas, behind one step, besides its leaves."""

    clients: Clients  #: Who has them.
    mode: str  #: What steps that go on with them have in common.
    steps: int = 0  #: How many steps each client has done.
    #: With an outer optimizer, input -> the weight as it was made last for all clients.
    anchors: Mapping[int, Array] = field(default_factory=dict)
    #: Fragment -> the state of the outer optimizer.
    outer: Mapping[FragmentIndex, Pytree] = field(default_factory=dict)
    on_way: Mapping[int, OnItsWay] = field(default_factory=dict)  #: Fragment -> its mean, while it is on its way.
    #: Table -> the rows that this client's calls have looked up since its last mean, where only these move.
    touched: Mapping[int, Touched] = field(default_factory=dict)
    center: CenterSession | None = None  #: By elastic averaging, what this process does for it.
    ring: RingSession | None = None  #: By averaging with neighbours at any time, what this process does for it.

    @property
    def shared(self) -> dict[str, Json]:
        """Arrays by name, as a checkpoint has them: the same on all clients. What is on its way is no part of it."""
        arrays: dict[str, Leaf] = {"steps": np.asarray(self.steps)}
        arrays |= {f"anchors/{k}": array for k, array in self.anchors.items()}
        for n, state in self.outer.items():
            arrays |= {f"outer/{n}/{i}": array for i, array in enumerate(jax.tree.leaves(state))}
        return arrays


class Replica(StandingLeaf[Replicas]):
    """This client's own copy of a leaf, which differs from those of the others between two means.

    A leaf of the state like an array: `jax.tree` maps over it, and the step that returned it takes it and goes on.
    Reading it (`np.asarray`, functions of JAX, indexing) exchanges nothing: it is what this client's last step
    returned, though with `sync.ADPSGD` a neighbour may have averaged with the weights since. `autopar.average(state)`,
    which all processes call, makes ordinary arrays, the same everywhere; `autopar.materialize(state)` makes such of
    this client's alone.
    """

    of_clients = True

    def __init__(self, leaf: Leaf, replicas: Replicas, index: int) -> None:
        """Takes a client's own leaf, what all leaves of the state share, and the step's input that it is."""
        super().__init__(replicas, index, leaf)
        self._leaf = leaf

    @property
    def own(self) -> Leaf:
        """The leaf as the client's step returned it.

        Raises:
          DonatedStateError: it was given to a step.
        """
        if self.is_deleted():
            raise donated("this replica")
        return self._leaf

    @property
    def is_whole_here(self) -> bool:
        leaf = self._leaf
        is_here = leaf.is_whole_here if isinstance(leaf, TableLeaf) else not is_global(leaf)
        return is_here and self.pending.clients.count == 1

    def is_deleted(self) -> bool:
        return isinstance(self._leaf, (jax.Array, TableLeaf)) and self._leaf.is_deleted()

    def block_until_ready(self) -> Replica:
        """Waits for the step that returned it, and for its mean, if that is merged."""
        jax.block_until_ready(self._leaf)
        return self

    def current(self) -> Leaf:
        """Returns this client's leaf: an array, or a table."""
        return self.own

    @property
    def _where(self) -> str:
        clients = self.pending.clients
        return f", the replica of client {clients.own} of {clients.count}"


def replicas_of(leaves: Sequence[Leaf]) -> Replicas | None:
    """Returns what the replicas among some leaves share; None if there are none. Raises DonatedStateError if some are
    of one call, some of another."""
    found = {leaf.pending for leaf in leaves if isinstance(leaf, Replica)}
    if len(found) > 1:
        raise DonatedStateError("some replicas of the state are of another step than others: give a state as returned")
    return next(iter(found), None)


def moved(weight: Array, sent: Array | Rows, new: Array | Rows) -> Array:
    """Moves a weight, or some rows, to its new value, though this client went on from the one that it sent."""
    if isinstance(sent, Rows) and isinstance(new, Rows):
        return _moved_rows(weight, sent.indices, sent.values, new.values, sent.axis)
    return _moved(weight, sent, new)


@jax.jit
def _moved(weight: Array, sent: Array, new: Array) -> Array:
    return new + (weight - sent)


@functools.partial(jax.jit, static_argnums=4)
def _moved_rows(weight: Array, indices: Array, sent: Array, new: Array, axis: int) -> Array:
    rows = jnp.moveaxis(jnp.take(weight, indices, axis), axis, 0)
    return weight.at[(slice(None),) * axis + (indices,)].set(jnp.moveaxis(_moved(rows, sent, new), 0, axis))


def merged(leaf: Replica) -> Leaf:
    """Returns this client's leaf once its mean, if that is on its way, is merged."""
    way = next((way for way in leaf.pending.on_way.values() if leaf.index in way.new), None)
    return leaf.own if way is None else moved(leaf.read(), way.sent[leaf.index], way.new[leaf.index])


# --- `average`: ordinary arrays of a state of which each client has a replica ---


T = TypeVar("T")


def average(state: T) -> T:
    """Averages all clients' replicas, into ordinary arrays, the same on every process: to evaluate, or to go on with.

    Floating-point leaves are averaged, weights and optimizer slots alike; of others, such as counts and random keys, it
    is the first client's. A mean that is on its way counts as merged. With a centre (`sync.Elastic`) weights are that.
    Of a state that servers keep (`sync.Async`) it is that state, once all pushes of all workers are applied. The
    replicas stay as they are, and servers go on. Collective: all processes call it, those with replicas at the same
    step (with a centre at any).

    Args:
      state: A state that a step with `sync=` returned, or a part of one; of any other it is `autopar.materialize`.

    Raises:
      DonatedStateError: it was given to a step.
    """
    leaves, tree = jax.tree.flatten(state)
    if (session := session_of(leaves)) is not None:
        return jax.tree.unflatten(tree, _collected(leaves, session))
    replicas = replicas_of(leaves)
    if replicas is None:
        return materialize(state)
    # Before any mean: while a client's devices wait in one, a server in its process couldn't compute an exchange.
    center = {} if replicas.center is None else replicas.center.collect()
    own = {} if replicas.ring is None else replicas.ring.collect()
    indices = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Replica)]
    mine = {k: own.get(leaves[k].index, None) for k in indices}
    mine = {k: materialize(merged(leaves[k])) if x is None else x for k, x in mine.items()}
    if replicas.ring is not None:  # a passive client has its weights from its server, where an active one has shards
        whole = replicas.clients.devices.sharding(None)
        mine = {k: place_array(x, whole) for k, x in mine.items()}
    floats = [k for k in indices if jnp.issubdtype(mine[k].dtype, jnp.floating)]
    others = [k for k in indices if k not in floats]
    made = dict(zip(floats, replicas.clients.mean([jnp.asarray(mine[k]) for k in floats]), strict=True))
    made |= dict(zip(others, replicas.clients.first([mine[k] for k in others]), strict=True))
    made |= {k: jnp.asarray(center[leaves[k].index]) for k in indices if leaves[k].index in center}
    return jax.tree.unflatten(tree, [made[k] if k in made else materialize(leaf) for k, leaf in enumerate(leaves)])


def _collected(leaves: Sequence[Leaf], session: Session) -> list[Leaf]:
    """Returns ordinary arrays of a state that servers keep. Leaves that each worker has of its own are the first
    worker's."""
    whole = session.collect()
    return [
        typed(whole[leaf.index], leaf.is_weak) if isinstance(leaf, ServedLeaf) else materialize(leaf) for leaf in leaves
    ]
