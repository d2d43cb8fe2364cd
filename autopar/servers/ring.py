"""`RingSession`: a client's exchanges with its neighbours in a ring (`autopar.sync.ADPSGD`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.ir.ring import Ring
from autopar.mpi.service import Handler
from autopar.servers.center import Center
from autopar.servers.elastic import pulled
from autopar.servers.link import Link
from autopar.servers.messages import Exchange, Pulled, Read, Reply, Stepped
from autopar.servers.spec import Spec
from autopar.servers.timeline import Timeline

Array = Any


class Neighbor(Center):
    """Keeps a passive client's weights, so that they can be averaged with an active one's at any time: both become the
    mean of one pair. What the client's own steps change is added in one transaction.

    Args:
      leaves: Its weights, by any number; they are copied.
      workers: C.
    """

    def __init__(self, leaves: Mapping[int, Array], workers: int) -> None:
        super().__init__(leaves, 0.5, workers)
        self._begun, self._seen = self._leaves, 0  # with which its step under way began, and the messages before it

    def take(self, message: Exchange | Stepped | Read) -> list[tuple[int, Reply]]:
        if not isinstance(message, Stepped):
            return super().take(message)
        version = self._count(message, self._seen)
        new = [jnp.array(x) for x in message.values]
        if self._leaves is not self._begun:
            new = _added(self._leaves, new, self._begun)
        self._leaves, self._begun, self._seen = new, new, version + 1
        return [(message.worker, Pulled(version, [np.array(x) for x in new]))]


@jax.jit
def _added(now: Sequence[Array], stepped: Sequence[Array], begun: Sequence[Array]) -> list[Array]:
    """The weights behind a step, while which they were averaged with others."""
    return [x + (new - old) for x, new, old in zip(now, stepped, begun, strict=True)]


@dataclass(frozen=True, slots=True)
class NeighborSpec(Spec):
    """Says what a passive client's neighbours are answered with.

    Attributes:
      leaves, workers: As of `Neighbor`.
    """

    leaves: Mapping[int, Array]
    workers: int

    def handler(self) -> Handler:
        return Neighbor(self.leaves, self.workers).take


class RingSession:
    """Does this process's part of averaging with neighbours. Collective to make.

    Args:
      weights: Its client's, by number of the step's input.
      clients: All of them, an even number.
    """

    def __init__(self, weights: Mapping[int, Array], clients: Clients) -> None:
        self._ring, self._places = Ring(clients.count), list(weights)
        passives = self._ring.passives
        self._own = passives.index(clients.own) if clients.own in passives else None
        here = dict(enumerate(self._sent(weights)))
        self._link = Link(
            [NeighborSpec(here, clients.count)] * len(passives), clients, places=[clients.leader(c) for c in passives]
        )
        #: The exchange under way, or the last one, and steps that are done.
        self._turn, self._steps = -1, 0

    def before(self, weights: Mapping[int, Array]) -> None:
        """Begin an exchange, if this client is active, beside a step that begins with some weights."""
        self._link.drain()  # of a step that was cut short, whose exchange is done all the same
        self._turn += 1
        if self._own is None:
            message = Exchange(self._link.number, self._ring.number(self._turn), self._sent(weights))
            self._link.request(self._partner, message)

    def behind(self, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Returns the weights behind a step. `weights`: as the step made them."""
        if self._own is None:
            reply = self._link.answer(self._partner)
            made = pulled(weights, dict(zip(self._places, reply.values, strict=True)))
        else:
            reply = self._link.ask(self._own, Stepped(self._link.number, self._steps, self._sent(weights)))
            made = {k: jnp.asarray(x) for k, x in zip(self._places, reply.values, strict=True)}
        self._steps += 1
        return made

    def settled(self) -> dict[int, Array]:
        """Returns a passive client's weights, once all that neighbours have sent are averaged with them; of an active
        one nothing, for they are what it has. Collective."""
        self._link.finish()
        if self._own is None:
            return {}
        kept = self._link.command(self._own, Read(jax.process_index()))
        return {k: jnp.asarray(x) for k, x in zip(self._places, kept.leaves.values(), strict=True)}

    def timeline(self) -> Timeline:
        """Returns what was done with the weights of each passive client, in order. Collective."""
        return Timeline(self._link.workers, None, [kept.events for kept in self._link.settled(None)[0]], ring=True)

    @property
    def _partner(self) -> int:
        """Returns the number of the passive client whose turn it is, among these."""
        return self._ring.passives.index(self._ring.neighbor(self._link.number, self._turn))

    def _sent(self, weights: Mapping[int, Array]) -> list[np.ndarray]:
        """Copies: a step may update the weights in place."""
        return [np.array(local(weights[k])) for k in self._places]
