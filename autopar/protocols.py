"""Protocols of `autopar.sync`, without IO: what a client asks of servers in a step, and what servers count.

A client's step is a generator of what it wants next. Its driver knows what that takes: MPI (`servers.sessions`), a
recorded timeline (`planning.replay_clients`), or a clock (`cost.client_times`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.errors import AutoparError
from autopar.ir.topology import Topology

#: Instead of a step's number in a server's events: nobody waits for the worker any more; others do again.
LEFT, CAME = -1, -2


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a message to servers. They answer all but a push."""

    #: "pull" asks for weights, "push" brings a gradient; "exchange" brings the weights that a step begins with, "step"
    #: those that it made.
    kind: Literal["pull", "push", "exchange", "step"]
    number: int  #: Counts the client's messages of this kind at a server, from 0.
    server: int | None = None  #: The server; None: all.


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes a step, or its gradient, while sent messages travel."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for all answers, and applies them."""


Want = Send | Compute | Receive


def pulling_step(step: int) -> Iterator[Want]:
    """Yields a step (numbered from 0) of asynchronous SGD (MXNET-MPI, section 2)."""
    yield Send("pull", step)
    yield Receive()
    yield Compute()
    yield Send("push", step)


def elastic_step(interval: int, step: int, exchanges: int) -> Iterator[Want]:
    """Yields a step (numbered from 0) of elastic averaging (MXNET-MPI, section 5): every `interval` steps weights and a
    centre move towards each other. `exchanges`: those that the client has begun."""
    is_due = step > 0 and step % interval == 0
    if is_due:
        yield Send("exchange", exchanges)
    yield Compute()
    if is_due:
        yield Receive()


def ring_step(topology: Topology, client: int, step: int, turn: int) -> Iterator[Want]:
    """Yields a step (numbered from 0) of averaging with neighbours. Passive clients are the servers: an active one asks
    them in turn, and a passive one's step is added to what neighbours made of its weights meanwhile. `turn`: exchanges
    that the client has begun, including those that were cut short."""
    if topology.is_active(client):
        (neighbor,) = topology.neighbors(client, turn)
        yield Send("exchange", topology.number(client, turn), topology.server(neighbor))
        yield Compute()
    else:
        yield Compute()
        yield Send("step", step, topology.server(client))
    yield Receive()


class Standing:
    """Each worker's progress, and who waits for whom by the staleness bound.

    Workers are compared by the steps since they came. A worker that comes back begins with as many as the slowest one
    that is there; if nobody is, all begin anew.

    Attributes:
      applied: Steps of each worker.
      limit: Steps since it came up to which a worker may begin.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        """Begins with all workers there, at step 0. `bound`: s; None: there is none."""
        self.applied, self.limit = [0] * workers, float("inf")
        self._bound, self._base, self._gone = bound, [0] * workers, set[int]()
        self._set_limit()

    @property
    def nobody(self) -> bool:
        return len(self._gone) == len(self.applied)

    def is_gone(self, worker: int) -> bool:
        return worker in self._gone

    def leave(self, worker: int) -> None:
        """Lets nobody wait for a worker any more."""
        self._gone.add(worker)
        self._set_limit()

    def come(self, worker: int) -> None:
        """Lets others wait for a worker that was gone."""
        if self.nobody:
            self._base = list(self.applied)
        else:
            self._base[worker] = self.applied[worker] - self._slowest
        self._gone.discard(worker)
        self._set_limit()

    def push(self, worker: int) -> None:
        self.applied[worker] += 1
        self._set_limit()

    def since(self, worker: int, step: int) -> int:
        return step - self._base[worker]

    def may_begin(self, worker: int, step: int) -> bool:
        """Says whether all pushes of steps up to c-1-s are applied. `step`: c."""
        return self.since(worker, step) <= self.limit

    @property
    def _slowest(self) -> int:
        return min(n - self._base[w] for w, n in enumerate(self.applied) if w not in self._gone)

    def _set_limit(self) -> None:
        if self._bound is not None:
            self.limit = float("inf") if self.nobody else self._slowest + self._bound


class Log:
    """Numbers changes of a server's values, and records the version that each was made of. `version`: changes so
    far."""

    def __init__(self, workers: int, bound: int | None = None) -> None:
        self.standing, self.version = Standing(workers, bound), 0
        self._seen, self._events = [0] * workers, array("q")

    @property
    def events(self) -> np.ndarray:
        """The events so far, as in `Timeline`, int64[n, 3]."""
        return np.array(self._events, np.int64).reshape(-1, 3)

    def see(self, worker: int) -> None:
        """Records that a worker's next change is made of the present version."""
        self._seen[worker] = self.version

    def check_next(self, worker: int, number: int, what: str) -> None:
        """Checks that no change of a worker was lost, or came twice, or raises AutoparError."""
        if (wanted := self.standing.applied[worker]) != number:
            raise AutoparError(f"worker {worker} {what} {number} where {wanted} is next. This is a bug of autopar")

    def change(self, worker: int, number: int) -> None:
        """Records a worker's change, of the version that it saw last."""
        self.standing.push(worker)
        self._events.extend((worker, number, self._seen[worker]))
        self.version += 1

    def leave(self, worker: int) -> None:
        """Records that nobody waits for a worker any more."""
        self.standing.leave(worker)
        self._events.extend((worker, LEFT, self.version))

    def come(self, worker: int) -> None:
        """Records that others wait for a worker again."""
        self.standing.come(worker)
        self._events.extend((worker, CAME, self.version))
