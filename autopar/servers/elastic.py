"""`CenterSession`: a worker's exchanges with a centre of all weights, which servers keep (`autopar.sync.Elastic`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.ir.balance import Span, center_shares
from autopar.servers.center import CenterSpec
from autopar.servers.link import Link
from autopar.servers.messages import Exchange
from autopar.servers.timeline import Timeline

Array = Any


class CenterParts:
    """Divides weights between servers, and puts together again what these have of them.

    Args:
      weights: By number of the step's input; their shapes and types count.
      servers: How many keep them at most.

    Attributes:
      count: How many keep any.
    """

    def __init__(self, weights: Mapping[int, Array], servers: int) -> None:
        self._numbers = list(weights)
        self._like = [(x.shape, x.dtype) for x in weights.values()]
        self._shares = center_shares([x.nbytes for x in weights.values()], servers)
        self.count = len(self._shares)

    def of(self, server: int, weights: Mapping[int, Array]) -> list[np.ndarray]:
        """Returns a server's part of some weights, flat, without a copy where that is possible."""
        return [self._flat(span, weights) for span in self._shares[server]]

    def joined(self, parts: Sequence[Sequence[Array]]) -> dict[int, np.ndarray]:
        """Returns arrays by number of the step's input, of each server's part."""
        pieces: list[list[tuple[int, Array]]] = [[] for _ in self._numbers]
        for share, values in zip(self._shares, parts, strict=True):
            for span, value in zip(share, values, strict=True):
                pieces[span.weight].append((span.start, np.asarray(value)))
        made = {}
        for k, (shape, _), some in zip(self._numbers, self._like, pieces, strict=True):
            flat = [value for _, value in sorted(some, key=lambda piece: piece[0])]
            made[k] = (flat[0] if len(flat) == 1 else np.concatenate(flat)).reshape(shape)
        return made

    def _flat(self, span: Span, weights: Mapping[int, Array]) -> np.ndarray:
        _, dtype = self._like[span.weight]
        flat = np.asarray(weights[self._numbers[span.weight]]).reshape(-1)
        return flat[span.start // dtype.itemsize : span.stop // dtype.itemsize]


def pulled(weights: Mapping[int, Array], moves: Mapping[int, Array]) -> dict[int, Array]:
    """Returns a worker's weights behind an exchange: x - e."""
    made = _differences([weights[k] for k in moves], [*moves.values()])
    return dict(zip(moves, made, strict=True))


@jax.jit
def _differences(weights: Sequence[Array], moves: Sequence[Array]) -> list[Array]:
    return [x - e for x, e in zip(weights, moves, strict=True)]


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
        self._parts = CenterParts(weights, servers)
        parts = [self._parts.of(n, weights) for n in range(self._parts.count)]
        self._link = Link([CenterSpec(dict(enumerate(part)), alpha, clients.count) for part in parts], clients)
        self.exchanges = 0

    def send(self, weights: Mapping[int, Array]) -> None:
        """Begin an exchange. Copies are sent: the step may update the weights in place meanwhile."""
        self._link.drain()
        whole = {k: local(x) for k, x in weights.items()}  # by all of the worker's processes
        for n in filter(self._link.speaks_to, self._link.servers):
            values = [x.copy() for x in self._parts.of(n, whole)]
            self._link.request(n, Exchange(self._link.number, self.exchanges, values))
        self.exchanges += 1

    def receive(self) -> dict[int, Array]:
        """Returns how far the weights move by the exchange that was begun last, by number of the step's input."""
        return self._parts.joined([reply.values for reply in self._link.receive()])

    def settled(self) -> dict[int, Array]:
        """The centre behind all exchanges. Collective."""
        return self._parts.joined([[*kept.leaves.values()] for kept in self._link.settled()[0]])

    def timeline(self) -> Timeline:
        """Returns all exchanges, in their order on each server. Collective."""
        return Timeline(self._link.workers, None, [kept.events for kept in self._link.settled(leaves=())[0]])
