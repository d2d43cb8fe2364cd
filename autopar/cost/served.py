"""Workers and servers in time, message by message: wires that all workers share, servers that do one thing at a time,
a staleness bound.

A message takes its sender's outgoing wire and its receiver's incoming one, each of which carries one message after the
other, in the order in which they come; what waits for the second one doesn't keep the first one busy. A server takes
one message after the other, too. Sources: MXNET-MPI, section 2.3 (a server's link is shared by all workers), and
`servers.server`, whose rules these are.
"""

from __future__ import annotations

import abc
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.clients import ClientLoad, ClientRun, ClientTime
from autopar.ir.cluster import ClusterSpec, Level

#: Of workers that are slow: so many times the steps are simulated at most, until all have done a few.
_MOST = 20
#: What was measured of messages between ranks, if something was.
_MEASURED = "mpi_all_to_all"

Action = Callable[[], None]


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
      receive_s, send_s: Seconds in which a worker copies what it pulled to its device, and what it pushes from there.
    """

    servers: Sequence[ServerLoad]
    cluster: ClusterSpec
    devices: Sequence[int]
    bound: int | None = None
    every: int = 0
    receive_s: float = 0.0
    send_s: float = 0.0


def simulate_served(load: ClientLoad, served: Served) -> ClientRun:
    """Simulate workers until they have done `load.steps` minibatches on average, and the slowest one a few.

    Args:
      load: What they do.
      served: How they train.
    """
    return (_Replicas if served.every else _Pullers)(load, served).run()


class _Clock:
    """Does what is to be done, in its order in time."""

    def __init__(self) -> None:
        self.now, self._numbers = 0.0, itertools.count()
        self._due: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        """Do something at a time, behind all else that is to be done then."""
        heapq.heappush(self._due, (time, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Do something in so many seconds."""
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Do everything."""
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()


class _Wires:
    """Carries messages between devices: inside of a machine each device has a link of its own, between machines all
    devices of one share it."""

    def __init__(self, clock: _Clock, cluster: ClusterSpec) -> None:
        self._clock, self._each = clock, cluster.devices
        levels: tuple[Level, ...] = ("inside", "between")
        self._links = {level: cluster.link(level, _MEASURED) for level in levels}
        self._free: dict[tuple[str, str, int], float] = {}

    def send(self, source: int, target: int, size: float, arrive: Action) -> None:
        """Send a message from a device to another. To itself it takes no time."""
        if source == target:
            self._clock.after(0.0, arrive)
            return
        ends = source // self._each, target // self._each
        level: Level = "inside" if ends[0] == ends[1] else "between"
        if level == "inside":
            ends = source, target
        link = self._links[level]
        seconds = size / link.bytes_s

        def enter() -> None:
            end = self._occupied(("in", level, ends[1]), seconds) + seconds
            self._clock.at(end + link.latency_s, arrive)

        self._clock.at(self._occupied(("out", level, ends[0]), seconds), enter)

    def _occupied(self, wire: tuple[str, str, int], seconds: float) -> float:
        """Have a wire carry something behind what it carries already; returns when it begins. Times of a wire never
        decrease, not by rounding either: messages don't overtake each other."""
        start = max(self._clock.now, self._free.get(wire, 0.0))
        self._free[wire] = start + seconds
        return start


@dataclass(slots=True)
class _Message:
    """Is what a worker asks of a server in a step, or in an exchange. `held`: since when it waits for the bound."""

    kind: Literal["pull", "push", "exchange"]
    worker: int
    step: int
    held: float | None = None


class _Server:
    """Takes one message after the other; keeps pulls that come too early."""

    def __init__(self, clock: _Clock, load: ServerLoad, workers: int, bound: int | None, training: _Training) -> None:
        self.load, self.applied = load, [0] * workers
        self.events: list[tuple[int, int, int]] = []
        self._clock, self._training, self._bound = clock, training, bound
        #: The version that each worker's last pull was given.
        self._given = [0] * workers
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
            self.events.append((worker, message.step, self._given[worker] if message.kind == "push" else version))
            self.applied[worker] += 1
            self._slowest = min(self.applied)
            self._queue.extendleft(reversed(self._waiting))
            self._waiting.clear()
            self._training.applied(worker)
        if message.kind != "push":
            self._training.answer(self, worker, held)
        self._next()


class _Training(abc.ABC):
    """Lets workers train until there is enough of it."""

    def __init__(self, load: ClientLoad, served: Served) -> None:
        self.clients = [ClientTime() for _ in range(load.count)]
        self._load, self._served, self._clock = load, served, _Clock()
        self._wires = _Wires(self._clock, served.cluster)
        self.servers = [_Server(self._clock, each, load.count, served.bound, self) for each in served.servers]
        self._seconds = [load.seconds(w) for w in range(load.count)]
        self._period, self._done, self._until = max(1, served.every), 0, float("inf")
        #: Of each worker the replies that are still to come, and for how long the last one was held.
        self._open, self._held = [0] * load.count, [0.0] * load.count

    def run(self) -> ClientRun:
        """Returns what everyone did."""
        for w in range(self._load.count):
            self._begin(w)
        self._clock.run()
        return ClientRun(self.clients, self._until, self._period, [server.events for server in self.servers])

    def applied(self, worker: int) -> None:  # noqa: B027, who doesn't wait doesn't care
        """Called when a server has applied what a worker sent."""

    def answer(self, server: _Server, worker: int, held: float) -> None:
        """Send a worker what it asked for. `held`: for how many seconds the bound kept its pull."""
        arrive = functools.partial(self._answered, worker, held)
        self._wires.send(server.load.device, self._served.devices[worker], server.load.pull_bytes, arrive)

    @abc.abstractmethod
    def _begin(self, worker: int) -> None:
        """Let a worker begin its next step."""

    @abc.abstractmethod
    def _received(self, worker: int) -> None:
        """Go on with a worker that has all replies."""

    def _answered(self, worker: int, held: float) -> None:
        self._open[worker], self._held[worker] = self._open[worker] - 1, held
        if not self._open[worker]:
            self._received(worker)

    def _ask(self, kind: Literal["pull", "push", "exchange"], worker: int, step: int) -> None:
        """Send a message to each server."""
        self._open[worker] += 0 if kind == "push" else len(self.servers)
        for server in self.servers:
            size = 0.0 if kind == "pull" else server.load.push_bytes
            arrive = functools.partial(server.take, _Message(kind, worker, step))
            self._wires.send(self._served.devices[worker], server.load.device, size, arrive)

    def _compute(self, worker: int, then: Callable[[int], None]) -> None:
        seconds = next(self._seconds[worker])
        self.clients[worker].computing_s += seconds
        self._clock.after(seconds, functools.partial(then, worker))

    def _end(self, worker: int) -> None:
        """Count a minibatch."""
        self.clients[worker].ends.append(self._clock.now)
        self._done += 1
        wanted = self._load.count * self._load.steps
        if self._done < wanted or self._is_over:
            return
        if self._done >= _MOST * wanted or min(c.minibatches for c in self.clients) >= 2 * self._period:
            self._until = self._clock.now

    @property
    def _is_over(self) -> bool:
        return self._until <= self._clock.now


class _Pullers(_Training):
    """Workers that pull weights before each step, and push gradients behind it."""

    def __init__(self, load: ClientLoad, served: Served) -> None:
        super().__init__(load, served)
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


class _Replicas(_Training):
    """Workers that train replicas; every some steps an exchange with a centre runs beside the step."""

    def __init__(self, load: ClientLoad, served: Served) -> None:
        super().__init__(load, served)
        self._exchanges = [0] * load.count
        #: When each worker's own step was done that has an exchange beside it; None: it isn't.
        self._computed_at: list[float | None] = [None] * load.count

    def _begin(self, worker: int) -> None:
        if self._is_over:
            return
        steps = self.clients[worker].minibatches
        if not steps or steps % self._served.every:
            self._compute(worker, self._next_step)
            return
        self._computed_at[worker] = None
        self.clients[worker].exchange_s += self._served.send_s
        self._clock.after(self._served.send_s, functools.partial(self._exchange, worker))

    def _exchange(self, worker: int) -> None:
        self._ask("exchange", worker, self._exchanges[worker])
        self._exchanges[worker] += 1
        self._compute(worker, self._computed)

    def _computed(self, worker: int) -> None:
        self._computed_at[worker] = self._clock.now
        self._join(worker)

    def _received(self, worker: int) -> None:
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
