"""Cuts a chain of layers into stages on devices by dynamic programming, so that the slowest stage is fastest.

Source: PipeDream (Narayanan et al., 2019), section 3.1: A(j, m), the time of the slowest stage of the best pipeline of
layers 0 to j on m devices. Here with every send, the memory of states and activations, and the AllReduce of replicas'
gradients: it is made once a step, so that each of M microbatches bears an M-th of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Times are equal up to this factor, for rounding.
_SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Layer:
    """The part of a step between two possible cuts."""

    seconds: float  #: Seconds of a microbatch's forward and backward.
    sent: float = 0.0  #: Bytes of a microbatch that cross the border ahead of it, both ways.
    state: float = 0.0  #: Bytes of weights with their slots.
    gradient: float = 0.0  #: Bytes of the weights' gradients.
    activation: float = 0.0  #: Bytes that a microbatch's forward leaves for its backward.


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages of a chain."""

    ends: tuple[int, ...]  #: Each stage's end, the first layer of the next one.
    replicas: tuple[int, ...]  #: Devices of each stage.
    seconds: float  #: Seconds of the slowest stage or send, for each microbatch.


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers in the order of the forward pass, and the devices (all are used) that run them."""

    layers: Sequence[Layer]
    devices: int
    microbatches: int  #: M.
    byte_s: float = 0.0  #: Seconds for each byte that is sent from a device to another.
    memory: float | None = None  #: Bytes of each device; None: no limit.

    def stage_seconds(self, start: int, end: int, replicas: int) -> float:
        """Returns the seconds of a stage for each microbatch."""
        own = self.layers[start:end]
        reduced = 2 * (replicas - 1) / replicas * sum(x.gradient for x in own) * self.byte_s / self.microbatches
        return sum(x.seconds for x in own) / replicas + reduced

    def stage_bytes(self, start: int, end: int, replicas: int, before: int) -> float:
        """Returns the memory of each device of a stage by 1F1B. `before`: devices of the stages ahead of it."""
        own = self.layers[start:end]
        held = -(-min(self.microbatches, self.devices - before) // replicas)
        return sum(x.state + x.gradient + held * x.activation for x in own)


def partition(chain: Chain, stages: int | None = None, replicas: Sequence[int] | None = None) -> Partition | None:
    """Finds the best partition into `stages` stages (default: any number), with given `replicas` (default: any).

    Among equally good ones it has the least seconds in all; None if no stages fit the memory.
    """
    count, devices = len(chain.layers), chain.devices
    prefix = {
        name: np.cumsum([0.0, *(getattr(x, name) for x in chain.layers)])
        for name in ("seconds", "state", "gradient", "activation")
    }
    sends = np.array([0.0, *(x.sent * chain.byte_s for x in chain.layers[1:])])
    # (stages, layers, devices) -> (slowest, in all, layers and devices of the stages ahead)
    best: dict[tuple[int, int, int], tuple[float, float, int, int]] = {(0, 0, 0): (0.0, 0.0, 0, 0)}
    for k in range(1, (stages or min(count, devices)) + 1):
        for used in range(1, devices + 1):
            for own in [replicas[k - 1]] if replicas is not None else range(1, used + 1):
                before = used - own
                starts = np.array([i for i in range(count) if (k - 1, i, before) in best], dtype=int)
                if before < 0 or not len(starts):
                    continue
                earlier = np.array([best[k - 1, i, before][:2] for i in starts])
                held = -(-min(chain.microbatches, devices - before) // own)
                for end in range(int(starts[0]) + 1, count + 1):
                    of = {name: total[end] - total[starts[starts < end]] for name, total in prefix.items()}
                    n = len(of["seconds"])
                    reduced = 2 * (own - 1) / own * of["gradient"] * chain.byte_s / chain.microbatches
                    seconds = of["seconds"] / own + reduced
                    slowest = np.maximum(np.maximum(earlier[:n, 0], seconds), sends[starts[:n]])
                    if chain.memory is not None:
                        size = of["state"] + of["gradient"] + held * of["activation"]
                        slowest = np.where(size <= chain.memory, slowest, np.inf)
                    if not np.isfinite(slowest.min()):
                        continue
                    total = np.where(slowest <= slowest.min() * _SAME, earlier[:n, 1] + seconds, np.inf)
                    at = int(total.argmin())
                    option = float(slowest[at]), float(total[at]), int(starts[at]), before
                    key = k, end, used
                    if key not in best or option[:2] < best[key][:2]:
                        best[key] = option
    keys = [(k, count, devices) for k in ([stages] if stages else range(1, devices + 1)) if (k, count, devices) in best]
    if not keys:
        return None
    key = min(keys, key=lambda key: best[key][:2])
    slowest, cuts = best[key][0], []
    while key[0]:
        _, _, start, before = best[key]
        cuts.append((key[1], key[2] - before))
        key = key[0] - 1, start, before
    ends, counts = zip(*reversed(cuts), strict=True)
    return Partition(tuple(ends), tuple(counts), slowest)
