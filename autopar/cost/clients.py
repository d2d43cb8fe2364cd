"""Clients in time: what each one's own steps take, how long it waits, and how many minibatches it does.

Clients that average over all replicas are simulated here, pairs of a ring in `cost.pairs`, workers and servers, and
rings whose active clients ask passive ones, message by message in `cost.served`.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Says what clients do between exchanges.

    Attributes:
      count: C.
      step_s: Seconds of a client's own step that nobody disturbs.
      steps: Steps of a client that are simulated, on average.
      slow: Client -> how many times as long its own steps take.
      variation: Standard deviation of a step's seconds over their mean.
    """

    count: int
    step_s: float
    steps: int
    slow: Mapping[int, float] = field(default_factory=dict)
    variation: float = 0.0

    def seconds(self, client: int) -> Iterator[float]:
        """Yields what each of a client's own steps takes, the same in each mode. They vary as gamma's distribution,
        which has no negative times."""
        mean, shape = self.step_s * self.slow.get(client, 1.0), self.variation**-2 if self.variation else 0.0
        if not shape:
            return itertools.repeat(mean)
        drawn = random.Random(client)
        return (mean / shape * drawn.gammavariate(shape, 1.0) for _ in itertools.count())


@dataclass(slots=True)
class ClientTime:
    """Says what a client did.

    Attributes:
      ends: When each of its minibatches was done: applied by all servers, or merged.
      own_steps: When each of its own steps begins, and its seconds.
      computing_s: Seconds of its own steps.
      slowest_s: Seconds for which it waited for slower clients: a mean's, or those that a staleness bound holds it for.
      exchange_s: Seconds for which it waited for wires, servers and copies.
      hidden_s: Seconds for which exchanges that it waits for were on their way while it did something else.
    """

    ends: list[float] = field(default_factory=list)
    own_steps: list[tuple[float, float]] = field(default_factory=list)
    computing_s: float = 0.0
    slowest_s: float = 0.0
    exchange_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def minibatches(self) -> int:
        """Returns how many it did."""
        return len(self.ends)

    @property
    def waiting(self) -> float:
        """Returns the share of its time in which it waited."""
        waited = self.slowest_s + self.exchange_s
        return waited / (waited + self.computing_s) if waited else 0.0

    def compute(self, now: float, seconds: float) -> None:
        """Begin a step of its own."""
        self.own_steps.append((now, seconds))
        self.computing_s += seconds

    def rate(self, until: float, period: int) -> float:
        """Returns its minibatches a second, in the second half of what it did until a time, in whole periods of so many
        steps; over all of its time where it did less than two periods."""
        count = bisect.bisect_right(self.ends, until)
        first, last = (n // period * period for n in (count // 2, count))
        if not 0 < first < last:
            return count / self.ends[count - 1] if count else 0.0
        return (last - first) / (self.ends[last - 1] - self.ends[first - 1])


@dataclass(frozen=True, slots=True)
class ClientRun:
    """Says what all clients did.

    Attributes:
      clients: Each of them.
      until: When the simulation stopped to begin steps.
      period: Steps from an exchange to the next.
      events: For each server its pushes, or exchanges, in order, int64[n, 3]: worker, step, version it was made of.
    """

    clients: Sequence[ClientTime]
    until: float
    period: int = 1
    events: Sequence[np.ndarray] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Returns the minibatches a second of each client."""
        return tuple(client.rate(self.until, self.period) for client in self.clients)


def simulate_averages(
    load: ClientLoad,
    *,
    means_s: Sequence[float],
    due: Callable[[int], Sequence[int]],
    every: int = 1,
    delay: int = 0,
) -> ClientRun:
    """Simulate clients whose weights become their mean now and then.

    Args:
      load: What they do.
      means_s: Seconds of each fragment's mean, once all clients have sent it. One after the other is on its way.
      due: Step, counted from 1 -> the fragments whose mean is taken behind it.
      every: k, steps from one mean of a fragment to its next.
      delay: d, steps after which a mean is merged; clients wait for it then, if it isn't there.
    """
    clients, own = [ClientTime() for _ in range(load.count)], [load.seconds(w) for w in range(load.count)]
    now, wires_free = [0.0] * load.count, 0.0
    on_their_way: list[tuple[int, float, float, float]] = []  # the step that merges it; when it was sent, begun, there
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
