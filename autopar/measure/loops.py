"""Times operations in a loop of one compiled program, less the same program with one turn, which cancels a call's cost.

All devices work at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import Devices
from autopar.backends.global_arrays import jit_on, place_array
from autopar.backends.gloo import direct_all_gather, direct_all_reduce, uses_gloo
from autopar.ir.figures import SHARED_BYTES
from autopar.jax_types import Array
from autopar.launch.group import Group

_TARGET_S, _RUNS = 0.008, 6


def collective_points(
    devices: Devices,
    collective: str,
    sizes: Sequence[int],
    timed: Callable[..., float] | None = None,
    *,
    in_steps: bool = False,
) -> list[tuple[float, float]]:
    """Measures (bytes of the result on one device, seconds) of a collective ("all_reduce", "all_gather" or
    "all_to_all") over the axis of 2 devices or more.

    `sizes`: approximate bytes of the result. `timed`: times a step on its start, as `loop_seconds` does. `in_steps`:
    small ones go as in planned steps, by messages to all devices where XLA's would be rings.
    """
    count, axis = devices.count, devices.axis
    direct = in_steps and uses_gloo(devices.mesh) and max(sizes) <= SHARED_BYTES

    def to_all(x: Array) -> Array:
        return jax.lax.all_to_all(x.reshape(count, -1), axis, 0, 0).reshape(-1)

    def gather(x: Array) -> Array:
        gathered = direct_all_gather(x, axis).reshape(-1) if direct else jax.lax.all_gather(x, axis, tiled=True)
        return gathered[: x.shape[0]] + x

    def reduce(x: Array) -> Array:
        return (direct_all_reduce(x, axis) if direct else jax.lax.psum(x, axis)) * (1 / count)

    step = {"all_reduce": reduce, "all_gather": gather, "all_to_all": to_all}[collective]
    parts = count if collective == "all_gather" else 1  # a device contributes 1 / parts of the result
    points = []
    for size in sizes:
        length = max(1, size // 4 // count) * count
        x = jnp.ones((count * length // parts,), jnp.float32)
        points.append((4.0 * length, (timed or loop_seconds)(devices, step, x)))
    return points


def walk_seconds(devices: Devices, size: int, runs: int = _RUNS) -> float:
    """Measures the seconds of an elementwise pass over `size` bytes of each device, which reads and writes them."""
    start = jnp.ones((devices.count * (size // 4),), jnp.float32)
    return loop_seconds(devices, lambda x: x * 0.9 + 0.1, start, runs=runs)


def update_seconds(devices: Devices, size: int) -> float:
    """Measures the seconds of Adagrad's update of a parameter and its slot, of `size` bytes together on each device."""

    def update(x: Array) -> Array:
        x = x.reshape(2, -1)
        parameter, slot = x[0], x[1]
        gradient = parameter * 0.1
        slot = slot + gradient * gradient
        return jnp.stack([parameter - 0.01 * gradient * jax.lax.rsqrt(slot), slot * 0.99]).reshape(-1)

    return loop_seconds(devices, update, jnp.ones((devices.count * (size // 8 * 2),), jnp.float32))


def product_seconds(devices: Devices, length: int, runs: int = _RUNS) -> float:
    """Measures the seconds of a product of two float32 matrices `[length, length]` on each device."""
    x = jnp.ones((devices.count * length, length), jnp.float32)
    return loop_seconds(devices, lambda x, y: (x @ y) * (1 / length), x, x, runs=runs)


def loop_seconds(
    devices: Devices, step: Callable[..., Array], start: Array, *constant: Array, runs: int = _RUNS
) -> float:
    """Measures the seconds of one `step` on all devices at once.

    `step`: takes the carry and the constants, and returns a carry of the same shape. `start`, `*constant`: the first
    carry and the constants, spread. `runs`: number of timed runs; fewer for long steps.
    """

    def looped(turns: Array, x: Array, *constant: Array) -> Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: step(x, *constant), x)

    axes = (None, 0, *(0 for _ in constant))
    run = jit_on(devices.mesh, functools.partial(devices.local, looped, axes, 0))
    operands = [place_array(x, devices.sharding(0)) for x in (start, *constant)]

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(turns, *operands))
        return time.perf_counter() - begin

    seconds(1)
    turns = agreed_turns(devices, np.clip(_TARGET_S / max(seconds(3) / 3, 1e-7), 2, 1000))
    runs = min(runs, 3) if turns == 2 else runs
    # The fastest runs: disturbances only make a run longer.
    many, one = min(seconds(turns + 1) for _ in range(runs)), min(seconds(1) for _ in range(runs))
    # An upper bound if the machine was so busy that one turn took as long as many.
    return (many - one) / turns if many > one else many / (turns + 1)


def agreed_turns(devices: Devices, turns: float) -> int:
    """Returns the first process's number of turns, as each turn may wait for all processes."""
    return devices.processes.first(int(turns), "measuring rates")


def undisturbed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lowers (size, seconds) of growing sizes to the seconds of larger sizes: a smaller one that took longer was
    disturbed."""
    return [(size, min(s for _, s in points[k:])) for k, (size, _) in enumerate(points)]


# --- the time of measurements is limited ---


T = TypeVar("T")

#: Factor by which a measurement may take longer than earlier ones, as the load of the machine varies.
_MARGIN = 1.3
#: Seconds for measurements of one purpose that the user didn't ask for.
AT_FIRST_S = 5.0


class Budget:
    """Limits the time for measurements, to some seconds from now on, by the first process's clock.

    Most of a measurement is a compilation, which can't be interrupted. So one begins only if it should end in time, by
    its weight and the time that earlier ones took on this machine, as busy as it is.
    """

    def __init__(self, seconds: float, processes: Group, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self._processes, self._clock = seconds, processes, clock
        self._begin, self._weight = clock(), 0.0

    def run(self, weight: float, measure: Callable[[], T], among: Group | None = None) -> T | None:
        """Returns the result of `measure()`, or None if there is no time for it. Collective. `weight`: its expected
        duration, in measurements of small arrays. `among`: the processes that measure; all if left out."""
        elapsed = self._clock() - self._begin
        expected = _MARGIN * weight * elapsed / self._weight if self._weight else 0.0
        if not (among or self._processes).first(elapsed + expected < self._seconds, "time to measure"):
            return None
        found = measure()
        self._weight += weight
        return found
