"""`RingRunner`: calls a client's own step; weights are averaged with a neighbour's beside it (`sync.ADPSGD`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import CheckpointError
from autopar.run.replicas import ReplicaRunner, Weights
from autopar.servers.ring import RingSession
from autopar.tables.replica import Replicas

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
        mine = {k: weights[k] for k in self.weights}
        ring = replicas.ring or RingSession(mine, self.clients)
        ring.before(mine)
        return dataclasses.replace(replicas, ring=ring)

    def _behind(self, replicas: Replicas, results: Sequence[Any]) -> tuple[Replicas, dict[int, Array]]:
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        assert replicas.ring is not None, "a step has begun"
        weights = Weights({k: results[self._new_states[k]] for k in self.weights})
        return replicas, replicas.ring.behind(weights)
