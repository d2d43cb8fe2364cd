"""Lets clients train in time, event by event: a clock, the wires that all share, steps that begin and end.

A message takes its sender's outgoing wire and its receiver's incoming one, each of which carries one message after the
other, in the order in which they come; what waits for the second one doesn't keep the first one busy.
"""

from __future__ import annotations

import abc
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from autopar.cost.clients import ClientLoad, ClientRun, ClientTime
from autopar.ir.cluster import ClusterSpec, Level

#: Of workers that are slow: so many times the steps are simulated at most, until all have done a few.
_MOST = 20
#: What was measured of messages between ranks, if something was.
_MEASURED = "mpi_all_to_all"

Action = Callable[[], None]


class Clock:
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


class Wires:
    """Carries messages between devices: inside of a machine each device has a link of its own, between machines all
    devices of one share it."""

    def __init__(self, clock: Clock, cluster: ClusterSpec) -> None:
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


class Training(abc.ABC):
    """Lets clients train until there is enough of it.

    Args:
      load: What they do.
      cluster: What connects them.
      period: Steps from an exchange of a client to its next one of the same kind.
    """

    def __init__(self, load: ClientLoad, cluster: ClusterSpec, period: int) -> None:
        self.clients = [ClientTime() for _ in range(load.count)]
        self._load, self._clock, self._period = load, Clock(), period
        self._wires = Wires(self._clock, cluster)
        self._seconds = [load.seconds(w) for w in range(load.count)]
        self._done, self._until = 0, float("inf")

    def run(self) -> ClientRun:
        """Returns what everyone did: `load.steps` minibatches on average, and the slowest client a few."""
        for w in range(self._load.count):
            self._begin(w)
        self._clock.run()
        return ClientRun(self.clients, self._until, self._period, self._events())

    @abc.abstractmethod
    def _begin(self, worker: int) -> None:
        """Let a client begin its next step."""

    def _events(self) -> Sequence[np.ndarray]:
        """Returns what servers did, if there are any."""
        return ()

    def _compute(self, worker: int, then: Callable[[int], None]) -> None:
        seconds = next(self._seconds[worker])
        self.clients[worker].compute(self._clock.now, seconds)
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
