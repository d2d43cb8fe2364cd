"""Runners of steps beside which weights are exchanged: with a centre (`autopar.sync.Elastic`), or with neighbours in a
ring (`autopar.sync.ADPSGD`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.backends.across import local
from autopar.errors import CheckpointError
from autopar.run.replicas import ReplicaRunner, Weights
from autopar.servers.elastic import CenterSession, pulled
from autopar.servers.ring import RingSession
from autopar.sync import Elastic
from autopar.tables.replica import Replicas

Array = Any


class ElasticRunner(ReplicaRunner):
    """Calls a worker's own step. An exchange is of the weights before a step, and runs beside it."""

    def _first(self, weights: Mapping[int, Array]) -> Replicas:
        return self.centered(Replicas(self.clients, self.mode), weights)

    def centered(self, replicas: Replicas, weights: Mapping[int, Array]) -> Replicas:
        """Returns what replicas share, and a centre that begins with some weights. Collective."""
        assert isinstance(self._sync, Elastic), "there is a centre"
        first = {k: jnp.asarray(local(weights[k])) for k in self.weights}
        return dataclasses.replace(
            replicas, center=CenterSession(first, self._sync.alpha, self.clients, self._plan.servers)
        )

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        anchors = {k: saved[name] for k in self.weights if (name := f"anchors/{k}") in saved}
        if len(anchors) < len(self.weights):
            raise CheckpointError(
                "the replicas were saved by a step without a centre: restore them by a step with the same sync=, or "
                "leave step= out to have their mean"
            )
        steps = int(saved["own_steps"][0])
        return self.centered(Replicas(self.clients, self.mode, steps), anchors)

    def _before(self, replicas: Replicas, leaves: Sequence[Any], own: Sequence[Any]) -> Replicas:
        if self._is_due(replicas):
            assert replicas.center is not None, "servers keep a centre"
            weights = Weights(dict(enumerate(own)))
            replicas.center.send({k: weights[k] for k in self.weights})
        return replicas

    def _behind(self, replicas: Replicas, results: Sequence[Any]) -> tuple[Replicas, dict[int, Array]]:
        is_due = self._is_due(replicas)
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        if not is_due:
            return replicas, {}
        assert replicas.center is not None, "servers keep a centre"
        moves = replicas.center.receive()
        return replicas, pulled(Weights({k: results[self._new_states[k]] for k in moves}), moves)

    def _is_due(self, replicas: Replicas) -> bool:
        every = self._sync.period
        return replicas.steps > 0 and replicas.steps % every == 0


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
