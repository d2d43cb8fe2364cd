"""`CenterSession`: a worker's exchanges with a centre of all weights, which servers keep (`autopar.sync.Elastic`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.ir.balance import balanced
from autopar.servers.center import CenterSpec
from autopar.servers.link import Link
from autopar.servers.messages import Exchange
from autopar.servers.server import state_of
from autopar.servers.timeline import Timeline

Array = Any


class CenterSession:
    """Does this process's part of elastic averaging: it is a worker, and perhaps a server. Collective to make.

    Args:
      weights: By number of the step's input, the same on all processes: where the centre begins.
      alpha: How far an exchange pulls.
      clients: The workers.
      servers: How many keep the centre at most.

    Attributes:
      exchanges: How many this worker has begun.
    """

    def __init__(self, weights: Mapping[int, Array], alpha: float, clients: Clients, servers: int) -> None:
        self._parts = center_parts(weights, servers)
        specs = [CenterSpec({k: weights[k] for k in part}, alpha, clients.count) for part in self._parts]
        self._link = Link(specs, clients)
        self.exchanges = 0

    def send(self, weights: Mapping[int, Array]) -> None:
        """Begin an exchange. Copies are sent: the step may update the weights in place meanwhile."""
        self._link.drain()
        for n, part in enumerate(self._parts):
            values = [np.array(local(weights[k])) for k in part]
            self._link.request(n, Exchange(self._link.number, self.exchanges, values))
        self.exchanges += 1

    def receive(self) -> dict[int, Array]:
        """Returns how far the weights move by the exchange that was begun last."""
        moves: dict[int, Array] = {}
        for part, reply in zip(self._parts, self._link.receive(), strict=True):
            moves |= zip(part, reply.values, strict=True)
        return moves

    def settled(self) -> dict[int, Array]:
        """The centre behind all exchanges. Collective."""
        return state_of({}, self._link.settled(None)[0])

    def timeline(self) -> Timeline:
        """Returns all exchanges, in their order on each server. Collective."""
        return Timeline(self._link.workers, None, [kept.events for kept in self._link.settled(None)[0]])


def center_parts(weights: Mapping[int, Array], servers: int) -> list[list[int]]:
    """Returns the weights of each server that has any, balanced by bytes."""
    numbers = list(weights)
    parts = balanced([weights[k].nbytes for k in numbers], servers)
    return [[numbers[n] for n in part] for part in parts if part]
