"""Measures how long exchanges take on some devices, in some ten seconds at first need; then read from a file.

Each figure is of a loop in one compiled program, less the same program with one turn: what a call costs isn't in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.across import place
from autopar.backends.devices import Devices
from autopar.backends.indices import find, sorted_unique
from autopar.cost.rates import Curve, Rates, RowRate
from autopar.ir.plan import METHODS
from autopar.measure.probe import Step, probe

Array = Any
Planner = Callable[[Step, str], Step]

_logger = logging.getLogger("autopar")

#: Of the result of a collective on one device, in bytes.
_BYTES = (1 << 10, 1 << 17, 1 << 22)
#: Of a dense gradient, which no cache holds.
_GRADIENT = 1 << 24
_IDS = (1 << 8, 1 << 13)
_WALKED = (1 << 15, 1 << 19, 1 << 23, 1 << 25)
_ROWS, _WIDTHS = 1024, (16, 256)
#: The table that is gathered from, in bytes on one device: larger than a cache.
_TABLE = 1 << 24
_TARGET_S = 0.008
#: What is measured, and how: files of others aren't read.
_VERSION = 5


#: What was found in this process.
_known: dict[Devices, Rates] = {}


def rates_of(devices: Devices, plan: Planner) -> Rates:
    """The rates of these devices: of this process, of an earlier one (a file in the user's cache), or measured now.

    Where the devices are of several processes, these measure together, and take the first one's figures.

    Args:
      devices: Those to measure.
      plan: Gives the planned form of a step by a method.
    """
    if devices not in _known:
        file = cache_file(devices)
        found = _of_first(devices, _read(file))
        if found is None:
            _logger.info("measuring what exchanges cost on %d devices, for %s", devices.count, file)
            # In a thread of its own, for the step may be called while JAX traces another one, and would be part of it.
            with ThreadPoolExecutor(1) as thread:
                measured = thread.submit(calibrate, devices, plan).result()
            found = _of_first(devices, measured)
            assert found is not None, "the first process has measured, too"
            if devices.processes.rank == 0:
                _write(file, json.dumps(found.as_dict()))
        _known[devices] = found
    return _known[devices]


def _of_first(devices: Devices, found: Rates | None) -> Rates | None:
    """What the first process of the mesh has found: all must choose by the same figures."""
    text = json.dumps(None if found is None else found.as_dict()).encode()
    first = json.loads(devices.processes.gather(text, "rates of the devices")[0])
    return None if first is None else Rates.of_dict(first)


def _read(file: Path) -> Rates | None:
    try:
        return Rates.of_dict(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_file(devices: Devices) -> Path:
    """Where the rates are kept: by machine, kind and number of devices, mesh, processes and JAX version."""
    first = devices.mesh.devices.flat[0]
    about = (
        _VERSION,
        platform.node(),
        os.cpu_count(),
        first.platform,
        first.device_kind,
        tuple(devices.mesh.shape.items()),
        devices.axis,
        len(devices.processes.members),
        jax.__version__,
    )
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "autopar" / f"rates-{name}.json"


def _write(file: Path, text: str) -> None:
    """All or nothing; where nothing can be written, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)
    except OSError:
        return


def calibrate(devices: Devices, plan: Planner) -> Rates:
    """Measure now; arguments as for `rates_of`."""
    count, axis = devices.count, devices.axis

    def to_all(x: Array) -> Array:
        return jax.lax.all_to_all(x.reshape(count, -1), axis, 0, 0).reshape(-1)

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(x, axis, tiled=True)[: x.shape[0]] + x

    def reduce(x: Array) -> Array:
        return jax.lax.psum(x, axis) * (1 / count)

    def collective(step: Callable[[Array], Array], parts: int, sizes: tuple[int, ...] = _BYTES) -> Curve:
        """By bytes of the result, of which a device gives one of `parts`."""
        points = []
        for size in sizes:
            length = max(1, size // 4 // count) * count
            x = jnp.ones((count * length // parts,), jnp.float32)
            points.append((4.0 * length, _loop_seconds(devices, step, x)))
        return _curve(points)

    def route(ids: Array) -> Array:
        mixed = (ids * 1103515245 + 12345) & 0xFFFFF
        rows = sorted_unique(mixed, mixed.shape[0], 1 << 30)
        return find(rows, mixed, 1 << 30) * 31 + mixed

    def walk(x: Array) -> Array:
        return x * 0.9 + 0.1

    random = np.random.default_rng(0)
    ids = {size: jnp.asarray(random.integers(0, 1 << 20, count * size), jnp.int32) for size in _IDS}
    routes = _curve([(float(k), _loop_seconds(devices, route, x)) for k, x in ids.items()])
    walked = [(2.0 * b, _loop_seconds(devices, walk, jnp.ones((count * b // 4,), jnp.float32))) for b in _WALKED]
    gathered, scattered = [], []
    for width in _WIDTHS:
        rows = _TABLE // 4 // width
        table = jnp.ones((count * rows, width), jnp.float32)
        index = jnp.asarray(random.integers(0, rows, count * _ROWS), jnp.int32)
        gathered.append(_loop_seconds(devices, _gather_rows, index, table))
        values = jnp.ones((count * _ROWS, width), jnp.float32)
        scattered.append(_loop_seconds(devices, _scatter_rows, values, index % _ROWS))
    return Rates(
        all_to_all=collective(to_all, 1),
        all_gather=collective(gather, count),
        all_reduce=collective(reduce, 1, (*_BYTES, _GRADIENT)),
        route=routes,
        walk=_curve(walked),
        gather=_row_rate(gathered),
        scatter=_row_rate(scattered),
        fixed=probe(plan, tuple(m for m in METHODS if m != "auto"), devices.count),
    )


def _curve(points: list[tuple[float, float]]) -> Curve:
    """Through points of growing sizes; what took longer than something larger was disturbed."""
    return Curve(tuple((size, min(s for _, s in points[k:])) for k, (size, _) in enumerate(points)))


def _gather_rows(index: Array, table: Array) -> Array:
    found = table.at[index].get(mode="clip")
    return (index + found.sum(1).astype(jnp.int32)) % table.shape[0]


def _scatter_rows(values: Array, index: Array) -> Array:
    return jnp.zeros_like(values).at[index].add(values) * 0.5


def _row_rate(seconds: list[float]) -> RowRate:
    """From the times of rows of two widths."""
    (narrow, wide), (a, b) = (np.asarray(seconds) / _ROWS).tolist(), (4.0 * w for w in _WIDTHS)
    per_byte = max(0.0, (wide - narrow) / (b - a))
    return RowRate(max(0.0, narrow - per_byte * a), per_byte)


def _loop_seconds(devices: Devices, step: Callable[..., Array], start: Array, *constant: Array) -> float:
    """Seconds of one `step` on all devices at once; `start` and the constants are spread, and shapes stay."""

    def looped(turns: Array, x: Array, *constant: Array) -> Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: step(x, *constant), x)

    given = (None, 0, *(0 for _ in constant))
    run = jax.jit(lambda turns, x, *constant: devices.local(looped, given, 0, turns, x, *constant))
    operands = [place(x, devices.sharding(0)) for x in (start, *constant)]

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(turns, *operands))
        return time.perf_counter() - begin

    seconds(1)
    wanted = int(np.clip(_TARGET_S / max(seconds(3) / 3, 1e-7), 2, 1000))
    # As many on every process: each turn may wait for all.
    turns = int(devices.processes.gather(str(wanted).encode(), "measuring rates")[0])
    runs = 3 if turns == 2 else 6
    # The fastest runs: what disturbs a run makes it longer.
    many, one = min(seconds(turns + 1) for _ in range(runs)), min(seconds(1) for _ in range(runs))
    return max((many - one) / turns, 1e-8)
