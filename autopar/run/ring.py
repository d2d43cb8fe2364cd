"""`RingRunner`: calls a client's own step; weights are averaged with a neighbour's beside it (`sync.ADPSGD`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import CheckpointError
from autopar.run.replicas import ReplicaRunner, Weights
from autopar.run.ring_end import TableRingEnd
from autopar.servers.ring import RingSession
from autopar.tables.replica import Replica, Replicas

Array = Any


class RingRunner(ReplicaRunner):
    """Calls a client's own step, beside which its weights are averaged with a neighbour's."""

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        if "own_steps" not in saved:
            raise CheckpointError(
                "the replicas were saved by a step whose clients form no ring: restore them by a step with the same "
                "sync=, or leave step= out to have their mean"
            )
        return Replicas(self.clients, self.mode, int(saved["own_steps"][0]))

    def _first(self, weights: Mapping[int, Array]) -> Replicas:
        return Replicas(self.clients, self.mode)

    def _before(self, replicas: Replicas, leaves: Sequence[Any], own: Sequence[Any]) -> Replicas:
        weights = Weights(dict(enumerate(own)))
        # Of a leaf that the user has put in place of a replica, all rows may have changed.
        known = {k for k in self.weights if isinstance(leaves[k], Replica) or not replicas.steps}
        touched = {k: some.calls[-1] for k, some in self.touched.after(self.touched.none(known), own).items()}
        ring = replicas.ring
        if ring is None:
            count, number = self.clients.count, self.clients.own
            end = TableRingEnd(self.weights, self.touched, count, number, equal=not replicas.steps)
            ring = RingSession(end, {k: weights[k] for k in self.weights}, self.clients)
        ring.before(weights, touched)
        return dataclasses.replace(replicas, ring=ring)

    def _behind(self, replicas: Replicas, results: Sequence[Any]) -> tuple[Replicas, dict[int, Array]]:
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        assert replicas.ring is not None, "a step has begun"
        weights = Weights({k: results[self._new_states[k]] for k in self.weights})
        return replicas, replicas.ring.behind(weights)
