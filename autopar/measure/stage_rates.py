"""Measures what the programs of a pipeline's stages take: in a second, once in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.devices import Devices
from autopar.cost.rates import StageRates
from autopar.measure.loops import product_seconds, walk_seconds

_SIDE = 512
#: Of a pass over memory, and of a send: beyond caches.
_BYTES = 1 << 24
_RUNS = 5

_known: dict[tuple[Any, ...], StageRates] = {}


def stage_rates_of(devices: Sequence[Any]) -> StageRates:
    """The rates of these devices, each at work by itself; measured at first need, in this process.

    Devices of one kind are taken to be equal: the first one is measured, and sends from it to the second.
    """
    key = tuple(devices[:2])
    if key not in _known:
        _known[key] = _measure(devices)
    return _known[key]


def _measure(devices: Sequence[Any]) -> StageRates:
    one = Devices.of(jax.sharding.Mesh(devices[:1], ("data",)))
    small = jax.device_put(jnp.ones((8,), jnp.float32), devices[0])
    add = jax.jit(lambda x: x + 1)
    large = jax.device_put(jnp.ones((_BYTES // 4,), jnp.float32), devices[0])
    sent = _seconds(lambda: jax.device_put(large, devices[1])) if len(devices) > 1 else 0.0
    return StageRates(
        flop_s=product_seconds(one, _SIDE) / (2 * _SIDE**3),
        byte_s=walk_seconds(one, _BYTES) / (2 * _BYTES),
        call_s=_seconds(lambda: add(small)),
        send_byte_s=sent / _BYTES,
    )


def _seconds(run: Callable[[], Any]) -> float:
    """Of the fastest of some runs: what disturbs one makes it longer."""
    jax.block_until_ready(run())
    found = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begin)
    return min(found)
