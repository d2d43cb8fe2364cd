"""Simulates clients of a ring that wait for their partners alone (`autopar.sync.DPSGD`): delays spread along it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from autopar.cost.clients import ClientLoad, ClientRun
from autopar.cost.training import Training
from autopar.ir.cluster import ClusterSpec
from autopar.ir.ring import Ring


@dataclass(frozen=True, slots=True)
class Pairs:
    """Says how clients average with their neighbours.

    Attributes:
      ring: Who does with whom.
      cluster: What connects them.
      devices: How many a client has, with adjacent numbers. Each sends the weights to its counterpart.
      sent_bytes: Step, counted from 1 -> what each of them sends behind it.
    """

    ring: Ring
    cluster: ClusterSpec
    devices: int
    sent_bytes: Callable[[int], float]


def simulate_pairs(load: ClientLoad, pairs: Pairs) -> ClientRun:
    """Simulate clients each of which averages with one neighbour behind each step, left and right in turn.

    Args:
      load: What they do.
      pairs: How they average.
    """
    return _Pairs(load, pairs).run()


class _Pairs(Training):
    """Lets clients train, each of which waits for its partner in every step."""

    def __init__(self, load: ClientLoad, pairs: Pairs) -> None:
        super().__init__(load, pairs.cluster, period=2)
        self._pairs, self._computed_at = pairs, [0.0] * load.count
        #: Client and step -> when the weights were sent that are there: its own, and its partner's of each device.
        self._there: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def _begin(self, worker: int) -> None:
        if not self._is_over:
            self._compute(worker, self._computed)

    def _computed(self, worker: int) -> None:
        step, devices = self.clients[worker].minibatches + 1, self._pairs.devices
        partner, size = self._pairs.ring.neighbor(worker, step), self._pairs.sent_bytes(step)
        self._computed_at[worker] = sent = self._clock.now
        arrive = functools.partial(self._arrived, partner, step, sent)
        for k in range(devices):
            self._wires.send(worker * devices + k, partner * devices + k, size, arrive)
        self._arrived(worker, step, sent)

    def _arrived(self, worker: int, step: int, sent: float) -> None:
        """End a client's step once its own weights and its partner's are there."""
        there = self._there[worker, step]
        there.append(sent)
        if len(there) <= self._pairs.devices:
            return
        del self._there[worker, step]
        client, computed = self.clients[worker], self._computed_at[worker]
        client.slowest_s += max(there) - computed
        client.exchange_s += self._clock.now - max(there)
        self._end(worker)
        self._begin(worker)
