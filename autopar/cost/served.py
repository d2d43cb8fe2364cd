"""Simulates workers and servers, message by message: wires that all workers share, servers that do one thing at a time,
a staleness bound. In a ring passive clients are the servers: each takes its neighbours' messages, and its own.

A server takes one message after the other. Sources: MXNET-MPI, section 2.3 (a server's link is shared by all workers),
and `servers.server` and `servers.ring`, whose rules these are.
"""

from __future__ import annotations

import abc
import functools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.clients import ClientLoad, ClientRun
from autopar.cost.training import Clock, Training
from autopar.ir.cluster import ClusterSpec
from autopar.ir.ring import Ring

#: What a worker asks of a server; "step": a passive client of a ring adds what its own step changed.
_Kind = Literal["pull", "push", "exchange", "step"]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Says what a server does.

    Attributes:
      device: The device whose process it is in.
      pull_bytes, push_bytes: Of what a worker pulls of it, and pushes to it.
      read_s, update_s: Seconds that it takes to answer a pull, and to apply a push.
    """

    device: int
    pull_bytes: float
    push_bytes: float
    read_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """Says how workers train with servers.

    Attributes:
      servers: Each of them.
      cluster: What connects them.
      devices: The device of each worker that speaks to servers.
      bound: s, the staleness bound; None: there is none.
      every: Of workers that train replicas, steps from an exchange with a centre to the next; 0: they have none, and
        pull and push in each step.
      ring: The ring whose passive clients are the servers; an active one asks one of them in a step. None: there is
        none.
      receive_s, send_s: Seconds in which a worker copies what it pulled to its device, and what it pushes from there.
    """

    servers: Sequence[ServerLoad]
    cluster: ClusterSpec
    devices: Sequence[int]
    bound: int | None = None
    every: int = 0
    ring: Ring | None = None
    receive_s: float = 0.0
    send_s: float = 0.0


def simulate_served(load: ClientLoad, served: Served) -> ClientRun:
    """Simulate workers until they have done `load.steps` minibatches on average, and the slowest one a few.

    Args:
      load: What they do.
      served: How they train.
    """
    if served.ring is not None:
        return _Neighbors(load, served, served.ring).run()
    return (_Replicas if served.every else _Pullers)(load, served).run()


@dataclass(slots=True)
class _Message:
    """Is what a worker asks of a server in a step, or in an exchange. `held`: since when it waits for the bound."""

    kind: _Kind
    worker: int
    step: int
    held: float | None = None


class _Server:
    """Takes one message after the other; keeps pulls that come too early."""

    def __init__(self, clock: Clock, load: ServerLoad, workers: int, bound: int | None, training: _Served) -> None:
        self.load, self.applied = load, Counter[int]()
        self.events: list[tuple[int, int, int]] = []
        self._clock, self._training, self._workers, self._bound = clock, training, range(workers), bound
        #: The version that each worker's last pull was given; of a passive client, that its last step made.
        self._given = Counter[int]()
        self._queue, self._is_busy, self._slowest = deque[_Message](), False, 0
        self._waiting: list[_Message] = []

    def take(self, message: _Message) -> None:
        """Put a message at the end of the queue."""
        self._queue.append(message)
        self._next()

    def _next(self) -> None:
        while self._queue and not self._is_busy:
            message = self._queue.popleft()
            if message.kind == "pull" and self._bound is not None and message.step > self._slowest + self._bound:
                message.held = self._clock.now if message.held is None else message.held
                self._waiting.append(message)
                continue
            held = 0.0 if message.held is None else self._clock.now - message.held
            self._is_busy = True
            seconds = self.load.read_s if message.kind == "pull" else self.load.update_s
            self._clock.after(seconds, functools.partial(self._done, message, held))

    def _done(self, message: _Message, held: float) -> None:
        worker, version, self._is_busy = message.worker, len(self.events), False
        if message.kind == "pull":
            self._given[worker] = version
        else:
            self.events.append((worker, message.step, version if message.kind == "exchange" else self._given[worker]))
            self.applied[worker] += 1
            if message.kind == "step":
                self._given[worker] = version + 1
            if self._bound is not None:
                self._slowest = min(self.applied[w] for w in self._workers)
            self._queue.extendleft(reversed(self._waiting))
            self._waiting.clear()
            self._training.applied(worker)
        if message.kind != "push":
            self._training.answer(self, worker, held)
        self._next()


class _Served(Training):
    """Has workers ask servers, and go on by what these answer."""

    def __init__(self, load: ClientLoad, served: Served, period: int) -> None:
        super().__init__(load, served.cluster, period)
        self._served = served
        self.servers = [_Server(self._clock, each, load.count, served.bound, self) for each in served.servers]
        #: Of each worker the replies that are still to come, and for how long the last one was held.
        self._open, self._held = [0] * load.count, [0.0] * load.count

    def applied(self, worker: int) -> None:
        """Called when a server has applied what a worker sent."""

    def answer(self, server: _Server, worker: int, held: float) -> None:
        """Send a worker what it asked for. `held`: for how many seconds the bound kept its pull."""
        arrive = functools.partial(self._answered, worker, held)
        self._wires.send(server.load.device, self._served.devices[worker], server.load.pull_bytes, arrive)

    @abc.abstractmethod
    def _received(self, worker: int) -> None:
        """Go on with a worker that has all replies."""

    def _events(self) -> Sequence[Sequence[tuple[int, int, int]]]:
        return [server.events for server in self.servers]

    def _answered(self, worker: int, held: float) -> None:
        self._open[worker], self._held[worker] = self._open[worker] - 1, held
        if not self._open[worker]:
            self._received(worker)

    def _ask(self, kind: _Kind, worker: int, step: int, servers: Sequence[_Server] | None = None) -> None:
        """Send a message to some servers; by default to each."""
        asked = self.servers if servers is None else servers
        self._open[worker] += 0 if kind == "push" else len(asked)
        for server in asked:
            size = 0.0 if kind == "pull" else server.load.push_bytes
            arrive = functools.partial(server.take, _Message(kind, worker, step))
            self._wires.send(self._served.devices[worker], server.load.device, size, arrive)


class _Pullers(_Served):
    """Workers that pull weights before each step, and push gradients behind it."""

    def __init__(self, load: ClientLoad, served: Served) -> None:
        super().__init__(load, served, period=1)
        self._asked, self._steps = [0.0] * load.count, [0] * load.count

    def _begin(self, worker: int) -> None:
        if not self._is_over:
            self._asked[worker] = self._clock.now
            self._ask("pull", worker, self._steps[worker])

    def _received(self, worker: int) -> None:
        client, waited = self.clients[worker], self._clock.now - self._asked[worker]
        client.slowest_s += self._held[worker]
        client.exchange_s += waited - self._held[worker] + self._served.receive_s + self._served.send_s
        self._clock.after(self._served.receive_s, functools.partial(self._compute, worker, self._computed))

    def _computed(self, worker: int) -> None:
        self._clock.after(self._served.send_s, functools.partial(self._push, worker))

    def _push(self, worker: int) -> None:
        self._ask("push", worker, self._steps[worker])
        self._steps[worker] += 1
        self._begin(worker)

    def applied(self, worker: int) -> None:
        if min(server.applied[worker] for server in self.servers) > self.clients[worker].minibatches:
            self._end(worker)


class _Replicas(_Served):
    """Workers that train replicas; every some steps an exchange with a centre runs beside the step."""

    def __init__(self, load: ClientLoad, served: Served, period: int | None = None) -> None:
        super().__init__(load, served, served.every if period is None else period)
        self._exchanges = [0] * load.count
        #: When each worker's exchange began, and its own step was done that is beside it; None: it isn't.
        self._asked_at, self._computed_at = [0.0] * load.count, list[float | None]([None] * load.count)

    def _begin(self, worker: int) -> None:
        if self._is_over:
            return
        steps = self.clients[worker].minibatches
        if not steps or steps % self._served.every:
            self._compute(worker, self._next_step)
        else:
            self._begin_beside(worker)

    def _begin_beside(self, worker: int) -> None:
        """Let a worker begin a step that has an exchange beside it."""
        self._computed_at[worker] = None
        self.clients[worker].exchange_s += self._served.send_s
        self._clock.after(self._served.send_s, functools.partial(self._exchange, worker))

    def _exchange(self, worker: int) -> None:
        self._ask_exchange(worker, self._exchanges[worker])
        self._exchanges[worker] += 1
        self._asked_at[worker] = self._clock.now
        self._compute(worker, self._computed)

    def _ask_exchange(self, worker: int, number: int) -> None:
        """Ask for a worker's exchange, which are counted from 0."""
        self._ask("exchange", worker, number)

    def _computed(self, worker: int) -> None:
        self._computed_at[worker] = self._clock.now
        self._join(worker)

    def _received(self, worker: int) -> None:
        computed = self._computed_at[worker]
        end = self._clock.now if computed is None else computed
        self.clients[worker].hidden_s += end - self._asked_at[worker]
        self._join(worker)

    def _join(self, worker: int) -> None:
        """End a step whose exchange ran beside it, once both are done."""
        computed = self._computed_at[worker]
        if computed is None or self._open[worker]:
            return
        self.clients[worker].exchange_s += self._clock.now - computed + self._served.receive_s
        self._clock.after(self._served.receive_s, functools.partial(self._next_step, worker))

    def _next_step(self, worker: int) -> None:
        self._end(worker)
        self._begin(worker)


class _Neighbors(_Replicas):
    """Clients of a ring: active ones exchange weights with a passive neighbour beside each step, left and right in
    turn; passive ones add what their own steps change."""

    def __init__(self, load: ClientLoad, served: Served, ring: Ring) -> None:
        super().__init__(load, served, period=2)
        self._ring, self._passives = ring, dict(zip(ring.passives, self.servers, strict=True))

    def _begin(self, worker: int) -> None:
        if self._is_over:
            return
        if self._ring.is_active(worker):
            self._begin_beside(worker)
        else:
            self._compute(worker, self._stepped)

    def _ask_exchange(self, worker: int, number: int) -> None:
        partner = self._passives[self._ring.neighbor(worker, number)]
        self._ask("exchange", worker, self._ring.number(number), [partner])

    def _stepped(self, worker: int) -> None:
        """Have what a passive client's step changed added to what its neighbours' exchanges made of its weights."""
        self._asked_at[worker] = self._computed_at[worker] = self._clock.now
        step, own = self.clients[worker].minibatches, [self._passives[worker]]
        self._clock.after(self._served.send_s, functools.partial(self._ask, "step", worker, step, own))
