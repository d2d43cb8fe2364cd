"""Simulates clients in time: their own steps, their waiting, and their minibatches.

Means over all replicas go in rounds. Pairs of a ring, workers and servers, and rings whose active clients ask passive
ones are simulated event by event on shared wires: a message takes its sender's outgoing wire, then its receiver's
incoming one. A wire carries one message after the other in order of arrival; a message that waits for the second wire
frees the first. A server handles one message after the other, too. Clients and servers follow `autopar.protocols`.
Source: MXNET-MPI, section 2.3 (all workers share a server's link).
"""

from __future__ import annotations

import abc
import bisect
import functools
import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.ir.cluster import ClusterSpec, Level
from autopar.ir.topology import Topology
from autopar.protocols import Compute, Log, Send, Want, elastic_step, pulling_step, ring_step

#: For slow workers at most this many times the steps are simulated, until all have done a few.
_MOST = 20
#: The measured collective of messages between ranks.
_MEASURED = "mpi_all_to_all"

Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The work of clients between exchanges."""

    count: int  #: C.
    step_s: float  #: Seconds of a client's own undisturbed step.
    steps: int  #: Simulated steps of a client, on average.
    slow: Mapping[int, float] = field(default_factory=dict)  #: Client -> factor of its own steps' seconds.
    variation: float = 0.0  #: Standard deviation of a step's seconds over their mean.

    def seconds(self, client: int) -> Iterator[float]:
        """Yields the seconds of a client's own steps, the same for each strategy. They follow a gamma distribution,
        so none is negative."""
        mean, shape = self.step_s * self.slow.get(client, 1.0), self.variation**-2 if self.variation else 0.0
        if not shape:
            return itertools.repeat(mean)
        drawn = random.Random(client)
        return (mean / shape * drawn.gammavariate(shape, 1.0) for _ in itertools.count())


@dataclass(slots=True)
class ClientTime:
    """A client's times."""

    #: When each of its minibatches was done (applied by all servers, or merged).
    ends: list[float] = field(default_factory=list)
    own_steps: list[tuple[float, float]] = field(default_factory=list)  #: (begin, seconds) of each of its own steps.
    computing_s: float = 0.0  #: Seconds of its own steps.
    slowest_s: float = 0.0  #: Seconds that it waited for slower clients, for a mean or a staleness bound.
    exchange_s: float = 0.0  #: Seconds that it waited for wires, servers and copies.
    hidden_s: float = 0.0  #: Seconds of awaited exchanges that overlapped with its other work.

    @property
    def minibatches(self) -> int:
        return len(self.ends)

    @property
    def waiting(self) -> float:
        waited = self.slowest_s + self.exchange_s
        return waited / (waited + self.computing_s) if waited else 0.0

    def compute(self, now: float, seconds: float) -> None:
        """Begins a step of its own."""
        self.own_steps.append((now, seconds))
        self.computing_s += seconds

    def rate(self, until: float, period: int) -> float:
        """Returns its minibatches a second in the second half of those before `until`, in whole periods of steps.

        If it did less than two periods, over all of its time.
        """
        count = bisect.bisect_right(self.ends, until)
        first, last = (n // period * period for n in (count // 2, count))
        if not 0 < first < last:
            return count / self.ends[count - 1] if count else 0.0
        return (last - first) / (self.ends[last - 1] - self.ends[first - 1])


@dataclass(frozen=True, slots=True)
class ClientRun:
    """The times of all clients."""

    clients: Sequence[ClientTime]
    until: float  #: When the simulation stopped to begin steps.
    period: int = 1  #: Steps from an exchange to the next.
    #: For each server its pushes, or exchanges, in order, int64[n, 3]: worker, step, version it was made of.
    events: Sequence[np.ndarray] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Minibatches a second of each client."""
        return tuple(client.rate(self.until, self.period) for client in self.clients)


def simulate_averages(
    load: ClientLoad, *, means_s: Sequence[float], due: Callable[[int], Sequence[int]], every: int = 1, delay: int = 0
) -> ClientRun:
    """Simulates clients whose weights are averaged now and then.

    Args:
      means_s: Seconds of each fragment's mean, once all clients have sent it. One is on its way at a time.
      due: Step, counted from 1 -> the fragments that are averaged after it.
      every: k, steps from one mean of a fragment to its next.
      delay: d, steps after which clients merge a mean, for which they wait if need be.
    """
    clients, own = [ClientTime() for _ in range(load.count)], [load.seconds(w) for w in range(load.count)]
    now, wires_free = [0.0] * load.count, 0.0
    on_their_way: list[tuple[int, float, float, float]] = []  # (step that merges it, when sent, when begun, when there)
    steps = -(-load.steps // (2 * every)) * 2 * every
    for step in range(1, steps + 1):
        for w, client in enumerate(clients):
            seconds = next(own[w])
            client.compute(now[w], seconds)
            now[w] += seconds
        for n in due(step):
            begun = max(wires_free, *now)
            wires_free = begun + means_s[n]
            on_their_way.append((step + delay, max(now), begun, wires_free))
        merged = [way for way in on_their_way if way[0] <= step]
        on_their_way = [way for way in on_their_way if way[0] > step]
        for w, client in enumerate(clients):
            done = now[w]
            for _, sent, begun, there in merged:
                client.hidden_s += max(0.0, min(done, there) - begun)
                client.slowest_s += max(0.0, sent - now[w])
                now[w] = max(now[w], sent)
                client.exchange_s += max(0.0, there - now[w])
                now[w] = max(now[w], there)
            client.ends.append(now[w])
    return ClientRun(clients, max(now), every)


class Clock:
    """Runs actions in the order of their times."""

    def __init__(self) -> None:
        self.now, self._numbers = 0.0, itertools.count()
        self._due: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        """Schedules an action at a time, after all others of that time."""
        heapq.heappush(self._due, (time, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self) -> None:
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()


class Wires:
    """Carries messages: inside a machine each device has its own link; its devices share one between machines."""

    def __init__(self, clock: Clock, cluster: ClusterSpec) -> None:
        self._clock, self._each = clock, cluster.devices
        levels: tuple[Level, ...] = ("inside", "between")
        self._links = {level: cluster.link(level, _MEASURED) for level in levels}
        self._free: dict[tuple[str, str, int], float] = {}

    def send(self, source: int, target: int, size: float, arrive: Action) -> None:
        """Sends a message from a device to another; to itself it takes no time."""
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
        """Occupies a wire after its earlier messages; returns when it begins.

        Times of a wire never decrease, even by rounding, so messages don't overtake each other.
        """
        start = max(self._clock.now, self._free.get(wire, 0.0))
        self._free[wire] = start + seconds
        return start


class Training(abc.ABC):
    """Simulates clients until they have trained enough. `period`: steps from an exchange of a client to its next one of
    the same kind."""

    def __init__(self, load: ClientLoad, cluster: ClusterSpec, period: int) -> None:
        self.clients = [ClientTime() for _ in range(load.count)]
        self._load, self._clock, self._period = load, Clock(), period
        self._wires = Wires(self._clock, cluster)
        self._seconds = [load.seconds(w) for w in range(load.count)]
        self._done, self._until = 0, float("inf")

    def run(self) -> ClientRun:
        """Returns all clients' times after `load.steps` minibatches on average and a few of the slowest client."""
        for w in range(self._load.count):
            self._begin(w)
        self._clock.run()
        return ClientRun(self.clients, self._until, self._period, self._events())

    @abc.abstractmethod
    def _begin(self, worker: int) -> None:
        """Begins a client's next step."""

    def _events(self) -> Sequence[np.ndarray]:
        return ()

    def _compute(self, worker: int, then: Callable[[int], None]) -> None:
        seconds = next(self._seconds[worker])
        self.clients[worker].compute(self._clock.now, seconds)
        self._clock.after(seconds, functools.partial(then, worker))

    def _end(self, worker: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Pairs:
    """Clients that average with their neighbours."""

    topology: Topology  #: Who averages with whom.
    cluster: ClusterSpec
    devices: int  #: Devices of a client, with adjacent numbers. Each sends the weights to its counterpart.
    sent_bytes: Callable[[int], float]  #: Step, counted from 1 -> bytes that each of them sends after it.


def simulate_pairs(load: ClientLoad, pairs: Pairs) -> ClientRun:
    """Simulates clients each of which averages with its neighbours of a turn after each step."""
    return _Pairs(load, pairs).run()


class _Pairs(Training):
    """Clients that wait for their neighbours in every step."""

    def __init__(self, load: ClientLoad, pairs: Pairs) -> None:
        super().__init__(load, pairs.cluster, pairs.topology.period)
        self._pairs, self._computed_at = pairs, [0.0] * load.count
        #: (client, step) -> when the weights that arrived were sent, its own and its neighbours' of each device.
        self._there: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def _begin(self, worker: int) -> None:
        if not self._is_over:
            self._compute(worker, self._computed)

    def _computed(self, worker: int) -> None:
        step, devices = self.clients[worker].minibatches + 1, self._pairs.devices
        size, self._computed_at[worker] = self._pairs.sent_bytes(step), self._clock.now
        sent = self._clock.now
        for other in self._pairs.topology.neighbors(worker, step):
            arrive = functools.partial(self._arrived, other, step, sent)
            for k in range(devices):
                self._wires.send(worker * devices + k, other * devices + k, size, arrive)
        self._arrived(worker, step, sent)

    def _arrived(self, worker: int, step: int, sent: float) -> None:
        """Ends a client's step once its own weights and its neighbours' have arrived."""
        there = self._there[worker, step]
        there.append(sent)
        if len(there) <= self._pairs.devices * len(self._pairs.topology.neighbors(worker, step)):
            return
        del self._there[worker, step]
        client, computed = self.clients[worker], self._computed_at[worker]
        client.slowest_s += max(there) - computed
        client.exchange_s += self._clock.now - max(there)
        self._end(worker)
        self._begin(worker)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server."""

    device: int  #: The device whose process it is in.
    #: Bytes that a worker pulls from it, and pushes to it.
    pull_bytes: float
    push_bytes: float
    #: Seconds to answer a pull, and to apply a push.
    read_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """Workers that train with servers."""

    servers: Sequence[ServerLoad]
    cluster: ClusterSpec
    devices: Sequence[int]  #: The device of each worker that speaks to servers.
    bound: int | None = None  #: s, the staleness bound; None: there is none.
    #: For replicas, steps from an exchange with a centre to the next; 0: workers pull and push in each step.
    every: int = 0
    #: The one whose passive clients are the servers, of which an active one asks one in a step.
    topology: Topology | None = None
    #: Seconds in which a worker copies what it pulled to its device, and what it pushes from there.
    receive_s: float = 0.0
    send_s: float = 0.0

    @property
    def pulls(self) -> bool:
        """Workers pull and push, and have no replicas."""
        return self.topology is None and not self.every

    @property
    def period(self) -> int:
        """Steps from an exchange of a worker to its next one of the same kind."""
        return self.every or 1 if self.topology is None else self.topology.period

    def step(self, worker: int, number: int) -> Iterator[Want]:
        """Yields the wants of a worker's step; steps are counted from 0."""
        if self.topology is not None:
            return ring_step(self.topology, worker, number, number)
        return elastic_step(self.every, number, number // self.every - 1) if self.every else pulling_step(number)


def simulate_served(load: ClientLoad, served: Served) -> ClientRun:
    """Simulates workers until they have done `load.steps` minibatches on average, and the slowest one a few."""
    return _Served(load, served).run()


@dataclass(slots=True)
class _Message:
    """A worker's message. `held`: since when it waits for the bound."""

    worker: int
    sent: Send
    held: float | None = None


class _Server:
    """Handles one message after the other; keeps pulls that come too early."""

    def __init__(self, clock: Clock, load: ServerLoad, log: Log, training: _Served) -> None:
        self.load, self.log, self._clock, self._training = load, log, clock, training
        self._queue, self._is_busy = deque[_Message](), False
        self._waiting: list[_Message] = []

    def take(self, message: _Message) -> None:
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
    """A worker, as far as it is in its protocol."""

    wants: Iterator[Want] = field(default_factory=lambda: iter(()))  #: The rest of its step.
    begun: int = 0  #: Number of steps that it has begun.
    open: int = 0  #: Number of outstanding replies.
    held_s: float = 0.0  #: Seconds for which the bound held the last one.
    #: When it asked, and when all replies had arrived.
    asked_at: float = 0.0
    there_at: float = 0.0
    waits_from: float | None = None  #: Since when it waits for them; None: it doesn't.


class _Served(Training):
    """Drives workers and servers by their protocols."""

    def __init__(self, load: ClientLoad, served: Served) -> None:
        super().__init__(load, served.cluster, served.period)
        self._served, self._workers = served, [_Worker() for _ in range(load.count)]
        logs = [Log(load.count, served.bound) for _ in served.servers]
        self.servers = [_Server(self._clock, each, log, self) for each, log in zip(served.servers, logs, strict=True)]

    def applied(self, number: int) -> None:
        """Counts a worker's minibatch once all servers have applied its push."""
        if min(server.log.standing.applied[number] for server in self.servers) > self.clients[number].minibatches:
            self._end(number)

    def answer(self, server: _Server, number: int, held_s: float) -> None:
        """Answers a worker's request. `held_s`: seconds for which the bound kept its pull."""
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
        """Resumes a waiting worker once it has all replies."""
        worker, client = self._workers[number], self.clients[number]
        if worker.waits_from is None or worker.open:
            return
        client.hidden_s += min(worker.waits_from, worker.there_at) - worker.asked_at
        client.slowest_s += worker.held_s
        client.exchange_s += self._clock.now - worker.waits_from - worker.held_s + self._served.receive_s
        worker.waits_from = None
        self._clock.after(self._served.receive_s, functools.partial(self._go_on, number))
