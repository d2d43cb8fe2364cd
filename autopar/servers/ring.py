"""`RingSession`: a client's exchanges with its neighbours in a ring (`autopar.sync.ADPSGD`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.ir.ring import Ring
from autopar.mpi.service import Handler
from autopar.servers.center import Center
from autopar.servers.link import Link
from autopar.servers.messages import Exchange, Pulled, Read, Reply, Stepped
from autopar.servers.shared_rows import SharedRows
from autopar.servers.spec import Spec
from autopar.servers.timeline import Timeline

Array = Any


class Neighbor(Center):
    """Keeps a passive client's weights, so that they can be averaged with an active one's at any time: both become the
    mean of one pair. What the client's own steps change is added in one transaction.

    Messages have the values of all other leaves first, and then of each table the rows' numbers, and the rows.

    Args:
      leaves: Its weights, by any number; they are copied.
      workers: C.
      tables: Those of them that are exchanged by rows -> the axis of these.
      neighbors: The active clients that exchange.
    """

    def __init__(
        self,
        leaves: Mapping[int, Array],
        workers: int,
        tables: Mapping[int, int] | None = None,
        neighbors: Sequence[int] = (),
    ) -> None:
        self._axes, self._order = tables or {}, tuple(leaves)
        super().__init__({k: x for k, x in leaves.items() if k not in self._axes}, 0.5, workers)
        self._tables = {
            k: SharedRows(np.moveaxis(np.asarray(leaves[k]), axis, 0), neighbors) for k, axis in self._axes.items()
        }
        self._begun = self._leaves  # with which its step under way began

    @property
    def leaves(self) -> dict[int, Array]:
        rows = {k: np.moveaxis(table.rows, 0, self._axes[k]) for k, table in self._tables.items()}
        whole = {**super().leaves, **rows}
        return {k: whole[k] for k in self._order}

    def take(self, message: Exchange | Stepped | Read) -> list[tuple[int, Reply]]:
        if isinstance(message, Read):
            return super().take(message)
        count = len(self._leaves)
        message, rows = replace(message, values=message.values[:count]), message.values[count:]
        ((worker, reply),) = self._stepped(message) if isinstance(message, Stepped) else super().take(message)
        assert isinstance(reply, Pulled), "nobody reads"
        made = list(reply.values)
        for table, places, values in zip(self._tables.values(), rows[::2], rows[1::2], strict=True):
            if isinstance(message, Stepped):
                made += table.step(places, values)
            else:
                made += table.exchange(worker, places, values)
        return [(worker, replace(reply, values=made))]

    def _stepped(self, message: Stepped) -> list[tuple[int, Reply]]:
        version = self._log.version
        self._count(message)
        new = [jnp.array(x) for x in message.values]
        if self._leaves is not self._begun:
            new = _added(self._leaves, new, self._begun)
        self._leaves = self._begun = new
        self._log.see(message.worker)
        return [(message.worker, Pulled(version, [np.array(x) for x in new]))]


@jax.jit
def _added(now: Sequence[Array], stepped: Sequence[Array], begun: Sequence[Array]) -> list[Array]:
    """The weights behind a step, while which they were averaged with others."""
    return [x + (new - old) for x, new, old in zip(now, stepped, begun, strict=True)]


@dataclass(frozen=True, slots=True)
class NeighborSpec(Spec):
    """Says what a passive client's neighbours are answered with.

    Attributes:
      leaves, workers, tables, neighbors: As of `Neighbor`.
    """

    leaves: Mapping[int, Array]
    workers: int
    tables: Mapping[int, int]
    neighbors: Sequence[int]

    def handler(self) -> Handler:
        return self.made(Neighbor).take

    def made(self, kind: type[Neighbor]) -> Neighbor:
        """Returns what answers them."""
        return kind(self.leaves, self.workers, self.tables, self.neighbors)


class RingEnd(Protocol):
    """Says what a client sends its neighbours, and makes of their answers (`autopar.run.ring_end`)."""

    def spec(self, weights: Mapping[int, Array], passive: int) -> NeighborSpec:
        """Returns what answers for a passive client that has some weights."""
        ...

    def before(
        self, turn: int, weights: Mapping[int, Array], touched: Mapping[int, np.ndarray]
    ) -> Sequence[np.ndarray]:
        """Returns what an active client sends with the weights that a step begins with."""
        ...

    def behind(self, weights: Mapping[int, Array]) -> Sequence[np.ndarray]:
        """Returns what a passive client's step has made."""
        ...

    def after(self, weights: Mapping[int, Array], values: Sequence[np.ndarray]) -> dict[int, Array]:
        """Returns the weights that an answer makes of those behind a step."""
        ...


class RingSession:
    """Does this process's part of averaging with neighbours. Collective to make.

    Args:
      end: What this client sends, and makes of answers.
      weights: Its client's, by number of the step's input.
      clients: All of them, an even number.
    """

    def __init__(self, end: RingEnd, weights: Mapping[int, Array], clients: Clients) -> None:
        self._end, self._ring, self._places = end, Ring(clients.count), list(weights)
        passives = self._ring.passives
        self._own = passives.index(clients.own) if clients.own in passives else None
        here = {k: np.array(local(x)) for k, x in weights.items()}  # of which a passive client's processes make use
        self._link = Link([end.spec(here, c) for c in passives], clients, places=[clients.leader(c) for c in passives])
        #: The exchange under way, or the last one, and steps that are done.
        self._turn, self._steps = -1, 0

    def before(self, weights: Mapping[int, Array], touched: Mapping[int, np.ndarray]) -> None:
        """Begin an exchange, if this client is active, beside a step that begins with some weights. `touched`: of
        tables by rows, the rows that it looks up."""
        self._link.drain()  # of a step that was cut short, whose exchange is done all the same
        self._turn += 1
        values = self._end.before(self._turn, weights, touched)
        if self._own is None:
            self._link.request(self._partner, Exchange(self._link.number, self._ring.number(self._turn), values))

    def behind(self, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Returns the weights behind a step. `weights`: as the step made them."""
        if self._own is None:
            reply = self._link.answer(self._partner)
        else:
            reply = self._link.ask(self._own, Stepped(self._link.number, self._steps, self._end.behind(weights)))
        self._steps += 1
        return self._end.after(weights, reply.values)

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
        kept, _ = self._link.settled(leaves=())
        return Timeline(self._link.workers, None, [each.events for each in kept], ring=True)

    @property
    def _partner(self) -> int:
        """Returns the number of the passive client whose turn it is, among these."""
        return self._ring.passives.index(self._ring.neighbor(self._link.number, self._turn))
