"""`average`: ordinary arrays of a state of which each client has a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar.backends.across import place_array
from autopar.servers.session import Session
from autopar.tables.kinds import materialize
from autopar.tables.replica import Replica, replicas_of, settled
from autopar.tables.served import ServedLeaf, session_of

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
        return jax.tree.unflatten(tree, _settled(leaves, session))
    replicas = replicas_of(leaves)
    if replicas is None:
        return materialize(state)
    # Before any mean: while a client's devices wait in one, a server in its process couldn't compute an exchange.
    center = {} if replicas.center is None else replicas.center.settled()
    own = {} if replicas.ring is None else replicas.ring.settled()
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Replica)]
    mine = {k: own.get(leaves[k].place, None) for k in places}
    mine = {k: materialize(settled(leaves[k])) if x is None else x for k, x in mine.items()}
    if replicas.ring is not None:  # a passive client has its weights from its server, where an active one has shards
        whole = replicas.clients.devices.sharding(None)
        mine = {k: place_array(x, whole) for k, x in mine.items()}
    floats = [k for k in places if jnp.issubdtype(mine[k].dtype, jnp.floating)]
    others = [k for k in places if k not in floats]
    made = dict(zip(floats, replicas.clients.mean([jnp.asarray(mine[k]) for k in floats]), strict=True))
    made |= dict(zip(others, replicas.clients.first([mine[k] for k in others]), strict=True))
    made |= {k: jnp.asarray(center[leaves[k].place]) for k in places if leaves[k].place in center}
    return jax.tree.unflatten(tree, [made[k] if k in made else materialize(leaf) for k, leaf in enumerate(leaves)])


def _settled(leaves: Sequence[Any], session: Session) -> list[Any]:
    """Returns ordinary arrays of a state that servers keep. Leaves that each worker has of its own are the first
    worker's."""
    whole = session.settled()
    return [leaf.typed(whole[leaf.place]) if isinstance(leaf, ServedLeaf) else materialize(leaf) for leaf in leaves]
