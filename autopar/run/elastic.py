"""`ElasticRunner`: calls a worker's own step, and exchanges its weights with a centre (`autopar.sync.Elastic`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.across import local
from autopar.errors import CheckpointError
from autopar.measure.curvature import slope_of
from autopar.run.replicas import ReplicaRunner, Weights
from autopar.servers.elastic import CenterSession
from autopar.sync import Elastic, check_stable
from autopar.tables.kinds import materialize
from autopar.tables.replica import Replicas

Array = Any


class ElasticRunner(ReplicaRunner):
    """Calls a worker's own step. An exchange is of the weights before a step, and runs beside it.

    Args:
      arguments: As of `ReplicaRunner`.
      plain: The step as it was traced, on flat arrays.
    """

    def __init__(self, *arguments: Any, plain: Callable[..., Sequence[Any]]) -> None:
        super().__init__(*arguments)
        self._plain = plain

    def _begun(self, leaves: Sequence[Any]) -> Replicas:
        """As of averages; servers begin with the same weights."""
        if self._sync.curvature == "measure" and self.clients.own == 0 and self.clients.leads:
            weights = {k: self._new_states[k] for k in self.averaging.weights}
            check_stable(self._sync.alpha, slope_of(self._plain, [local(materialize(x)) for x in leaves], weights))
        return self.centered(super()._begun(leaves), dict(Weights(dict(enumerate(leaves)))))

    def centered(self, replicas: Replicas, weights: Mapping[int, Array]) -> Replicas:
        """Returns what replicas share, and a centre that begins with some weights. Collective."""
        first = {k: jnp.asarray(local(weights[k])) for k in self.averaging.weights}
        session = CenterSession(first, self._sync.alpha, self.clients, self.averaging.servers)
        return dataclasses.replace(replicas, center=session)

    @property
    def _sync(self) -> Elastic:
        assert isinstance(self.averaging.sync, Elastic), "there is a centre"
        return self.averaging.sync

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        anchors = {k: saved[name] for k in self.averaging.weights if (name := f"anchors/{k}") in saved}
        if len(anchors) < len(self.averaging.weights):
            raise CheckpointError(
                "the replicas were saved by a step without a centre: restore them by a step with the same sync=, or "
                "leave step= out to have their mean"
            )
        steps = int(saved["own_steps"][0])
        return self.centered(Replicas(self.clients, self.averaging.mode, steps), anchors)

    def _before(self, replicas: Replicas, leaves: Sequence[Any], own: Sequence[Any]) -> Replicas:
        if self._is_due(replicas):
            assert replicas.center is not None, "servers keep a centre"
            weights = Weights(dict(enumerate(own)))
            replicas.center.send({k: weights[k] for k in self.averaging.weights})
        return replicas

    def _behind(self, replicas: Replicas, results: Sequence[Any]) -> tuple[Replicas, dict[int, Array]]:
        is_due = self._is_due(replicas)
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        if not is_due:
            return replicas, {}
        assert replicas.center is not None, "servers keep a centre"
        moves = replicas.center.receive()
        numbers = list(moves)
        weights = Weights({k: results[self._new_states[k]] for k in numbers})
        return replicas, dict(zip(numbers, pulled([weights[k] for k in numbers], list(moves.values())), strict=True))

    def _is_due(self, replicas: Replicas) -> bool:
        every = self.averaging.sync.every
        return replicas.steps > 0 and replicas.steps % every == 0


@jax.jit
def pulled(weights: Sequence[Array], moves: Sequence[Array]) -> list[Array]:
    """Returns a worker's weights behind an exchange: x - e."""
    return [x - e for x, e in zip(weights, moves, strict=True)]
