"""Simulates workers and servers, message by message: wires that all workers share, servers that do one thing at a time,
a staleness bound. In a ring passive clients are the servers: each takes its neighbours' messages, and its own.

A server takes one message after the other. Source: MXNET-MPI, section 2.3 (a server's link is shared by all workers).
Clients and servers follow `autopar.protocols`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.clients import ClientLoad, ClientRun
from autopar.cost.training import Clock, Training
from autopar.ir.cluster import ClusterSpec
from autopar.ir.ring import Ring
from autopar.protocols import Compute, Log, Send, Want, elastic_step, pulling_step, ring_step


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

    @property
    def pulls(self) -> bool:
        """Says whether workers pull and push, and train no replicas."""
        return self.ring is None and not self.every

    @property
    def period(self) -> int:
        """Returns the steps from an exchange of a worker to its next one of the same kind."""
        return 2 if self.ring is not None else self.every or 1

    def step(self, worker: int, number: int) -> Iterator[Want]:
        """Yields a step of a worker; they are counted from 0."""
        if self.ring is not None:
            return ring_step(self.ring, worker, number, number)
        return elastic_step(self.every, number, number // self.every - 1) if self.every else pulling_step(number)


def simulate_served(load: ClientLoad, served: Served) -> ClientRun:
    """Simulate workers until they have done `load.steps` minibatches on average, and the slowest one a few.

    Args:
      load: What they do.
      served: How they train.
    """
    return _Served(load, served).run()


@dataclass(slots=True)
class _Message:
    """Is what a worker sends. `held`: since when it waits for the bound."""

    worker: int
    sent: Send
    held: float | None = None


class _Server:
    """Takes one message after the other; keeps pulls that come too early."""

    def __init__(self, clock: Clock, load: ServerLoad, log: Log, training: _Served) -> None:
        self.load, self.log, self._clock, self._training = load, log, clock, training
        self._queue, self._is_busy = deque[_Message](), False
        self._waiting: list[_Message] = []

    def take(self, message: _Message) -> None:
        """Put a message at the end of the queue."""
        self._queue.append(message)
        self._next()

    def _next(self) -> None:
        while self._queue and not self._is_busy:
            message = self._queue.popleft()
            is_pull = message.sent.kind == "pull"
            if is_pull and not self.log.standing.may_begin(message.worker, message.sent.number):
                message.held = self._clock.now if message.held is None else message.held
                self._waiting.append(message)
                continue
            held = 0.0 if message.held is None else self._clock.now - message.held
            self._is_busy = True
            seconds = self.load.read_s if is_pull else self.load.update_s
            self._clock.after(seconds, functools.partial(self._done, message, held))

    def _done(self, message: _Message, held: float) -> None:
        worker, sent, self._is_busy = message.worker, message.sent, False
        if sent.kind in ("pull", "exchange"):
            self.log.see(worker)
        if sent.kind != "pull":
            self.log.change(worker, sent.number)
            self._queue.extendleft(reversed(self._waiting))
            self._waiting.clear()
        if sent.kind == "step":
            self.log.see(worker)
        if sent.kind == "push":
            self._training.applied(worker)
        else:
            self._training.answer(self, worker, held)
        self._next()


@dataclass(slots=True)
class _Worker:
    """Is where a worker is in its protocol.

    Attributes:
      wants: What it does next in its step.
      begun: Steps that it has begun.
      open: Replies that are still to come.
      held_s: How long the bound held the last one.
      asked_at, there_at: When it asked, and when all replies were there.
      waits_from: Since when it waits for them; None: it does something else.
    """

    wants: Iterator[Want] = field(default_factory=lambda: iter(()))
    begun: int = 0
    open: int = 0
    held_s: float = 0.0
    asked_at: float = 0.0
    there_at: float = 0.0
    waits_from: float | None = None


class _Served(Training):
    """Has workers do what their protocols say, and servers answer."""

    def __init__(self, load: ClientLoad, served: Served) -> None:
        super().__init__(load, served.cluster, served.period)
        self._served, self._workers = served, [_Worker() for _ in range(load.count)]
        logs = [Log(load.count, served.bound) for _ in served.servers]
        self.servers = [_Server(self._clock, each, log, self) for each, log in zip(served.servers, logs, strict=True)]

    def applied(self, number: int) -> None:
        """Count a worker's minibatch, once all servers have applied its push."""
        if min(server.log.standing.applied[number] for server in self.servers) > self.clients[number].minibatches:
            self._end(number)

    def answer(self, server: _Server, number: int, held_s: float) -> None:
        """Send a worker what it asked for. `held_s`: how long the bound kept its pull."""
        arrive = functools.partial(self._answered, number, held_s)
        self._wires.send(server.load.device, self._served.devices[number], server.load.pull_bytes, arrive)

    def _events(self) -> Sequence[np.ndarray]:
        return [server.log.events for server in self.servers]

    def _begin(self, worker: int) -> None:
        if not self._is_over:
            there = self._workers[worker]
            there.wants = self._served.step(worker, there.begun)
            there.begun += 1
            self._go_on(worker)

    def _go_on(self, number: int) -> None:
        want = next(self._workers[number].wants, None)
        if want is None:
            if not self._served.pulls:
                self._end(number)
            self._begin(number)
        elif isinstance(want, Compute):
            self._compute(number, self._go_on)
        elif not isinstance(want, Send):
            self._workers[number].waits_from = self._clock.now
            self._receive(number)
        elif want.kind == "pull":
            self._send(number, want)
        else:
            self.clients[number].exchange_s += self._served.send_s
            self._clock.after(self._served.send_s, functools.partial(self._send, number, want))

    def _send(self, number: int, want: Send) -> None:
        worker = self._workers[number]
        asked = self.servers if want.server is None else [self.servers[want.server]]
        worker.open += 0 if want.kind == "push" else len(asked)
        worker.asked_at = self._clock.now
        for server in asked:
            size = 0.0 if want.kind == "pull" else server.load.push_bytes
            arrive = functools.partial(server.take, _Message(number, want))
            self._wires.send(self._served.devices[number], server.load.device, size, arrive)
        self._go_on(number)

    def _answered(self, number: int, held_s: float) -> None:
        worker = self._workers[number]
        worker.open, worker.held_s, worker.there_at = worker.open - 1, held_s, self._clock.now
        self._receive(number)

    def _receive(self, number: int) -> None:
        """Let a worker that waits go on, once it has all replies."""
        worker, client = self._workers[number], self.clients[number]
        if worker.waits_from is None or worker.open:
            return
        client.hidden_s += min(worker.waits_from, worker.there_at) - worker.asked_at
        client.slowest_s += worker.held_s
        client.exchange_s += self._clock.now - worker.waits_from - worker.held_s + self._served.receive_s
        worker.waits_from = None
        self._clock.after(self._served.receive_s, functools.partial(self._go_on, number))
