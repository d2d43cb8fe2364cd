"""Measures how long exchanges take on some devices, in some twenty seconds at first need; then read from a file."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import Devices
from autopar.backends.indices import find, sorted_unique
from autopar.cost.rates import Curve, Rates, RowRate
from autopar.ir.strategy import METHODS
from autopar.launch.notices import noticing
from autopar.measure import loops
from autopar.measure.probe import Step, probe

Array = Any
StepPlanner = Callable[[Step, str], Step]
#: Says what is measured next.
Advance = Callable[[str], None]

#: Of the result of a collective on one device, in bytes.
_BYTES = (1 << 10, 1 << 17, 1 << 22)
#: Of a dense gradient, which no cache holds.
_GRADIENT = 1 << 24
_IDS = (1 << 8, 1 << 13)
_WALKED = (1 << 15, 1 << 19, 1 << 23, 1 << 25)
_ROWS, _WIDTHS = 1024, (16, 256)
#: The table that is gathered from, in bytes on one device: larger than a cache.
_TABLE = 1 << 24
#: Rows and columns of the matrices that are multiplied.
_SIDE = 512
#: How many parts `calibrate` has.
PARTS = 7
#: What is measured, and how: files of others aren't read.
_VERSION = 9


#: What was found in this process.
_known: dict[Devices, Rates] = {}


def rates_of(devices: Devices, plan: StepPlanner) -> Rates:
    """The rates of these devices: of this process, of an earlier one (a file in the user's cache), or measured now.

    Where the devices are of several processes, these measure together, and take the first one's figures. `plan` gives
    the planned form of a step by a method.
    """
    if devices not in _known:
        file = cache_file(devices)
        kept = _first_rates(devices, _read(file))
        if kept is None:
            what, why = f"what exchanges cost on {devices.count} devices", "to choose each table's method"
            shown = devices.processes.rank == 0
            # In a thread of its own, for the step may be called while JAX traces another one, and would be part of it.
            with measuring(what, why, PARTS, file, shown=shown) as advance, ThreadPoolExecutor(1) as thread:
                measured = thread.submit(calibrate_rates, devices, plan, advance).result()
            kept = _first_rates(devices, measured)
            assert kept is not None, "the first process has measured, too"
            if devices.processes.rank == 0:
                write_cache(file, json.dumps(kept.as_dict()))
        _known[devices] = kept
    return _known[devices]


def _first_rates(devices: Devices, own: Rates | None) -> Rates | None:
    first = devices.processes.first(None if own is None else own.as_dict(), "rates of the devices")
    return None if first is None else Rates.of_dict(first)


def _read(file: Path) -> Rates | None:
    try:
        return Rates.of_dict(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cache_file(devices: Devices, name: str = "rates-{}.json") -> Path:
    """Where what was measured is kept: by machine, kind and number of devices, mesh, processes and JAX version."""
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
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "autopar" / name.format(key)


def write_cache(file: Path, text: str) -> None:
    """All or nothing; where nothing can be written, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)
    except OSError:
        return


@contextlib.contextmanager
def measuring(what: str, why: str, parts: int, kept: Path, *, shown: bool = True) -> Iterator[Advance]:
    """A line that says what is being measured, why, and that it is kept; with a bar on a terminal.

    The block calls what it is given `parts` times. `kept`: where the figures are kept, told from the user's home folder
    on. `shown`: whether this process is the one that says so.
    """
    home = re.escape(os.path.expanduser("~") + os.sep)
    line = f"measuring {what}, {why}; kept in {re.sub(f'^{home}', '~/', str(kept))}"
    with noticing(f"measuring {what}", parts=parts, at_once=line, shown=shown) as notice:
        done = itertools.count()
        yield lambda part: notice.tell(part, done=next(done))


def calibrate_rates(devices: Devices, plan: StepPlanner, advance: Advance = lambda part: None) -> Rates:
    """Measure now; arguments as for `rates_of`. `advance` is told what is measured next, `PARTS` times."""
    count = devices.count

    def collective(name: str, sizes: tuple[int, ...] = _BYTES) -> Curve:
        advance(name)
        return _curve(loops.collective_points(devices, name, sizes))

    def route(ids: Array) -> Array:
        mixed = (ids * 1103515245 + 12345) & 0xFFFFF
        rows = sorted_unique(mixed, mixed.shape[0], 1 << 30)
        return find(rows, mixed, 1 << 30) * 31 + mixed

    advance("products")
    # And once more at the end: others at work on the machine make it longer.
    product = loops.product_seconds(devices, _SIDE)
    advance("memory")
    random = np.random.default_rng(0)
    ids = {size: jnp.asarray(random.integers(0, 1 << 20, count * size), jnp.int32) for size in _IDS}
    routes = _curve([(float(k), loops.loop_seconds(devices, route, x)) for k, x in ids.items()])
    walked = [(2.0 * b, loops.walk_seconds(devices, b)) for b in _WALKED]
    # A gradient is read, and was written, beside a parameter and its slot: half as much again.
    updated = [(3.0 * b, loops.update_seconds(devices, b)) for b in _WALKED]
    advance("rows")
    gathered, scattered = [], []
    for width in _WIDTHS:
        rows = _TABLE // 4 // width
        table = jnp.ones((count * rows, width), jnp.float32)
        index = jnp.asarray(random.integers(0, rows, count * _ROWS), jnp.int32)
        gathered.append(loops.loop_seconds(devices, _gather_rows, index, table))
        values = jnp.ones((count * _ROWS, width), jnp.float32)
        scattered.append(loops.loop_seconds(devices, _scatter_rows, values, index % _ROWS))
    flop_s = min(product, loops.product_seconds(devices, _SIDE)) / (2 * _SIDE**3)
    advance("whole steps")
    probed = probe(plan, tuple(m for m in METHODS if m != "auto"), devices, flop_s)
    call = min(probed.calls.values())
    return Rates(
        all_to_all=collective("all_to_all"),
        all_gather=collective("all_gather"),
        all_reduce=collective("all_reduce", (*_BYTES, _GRADIENT)),
        route=routes,
        walk=_curve(walked),
        update=_curve(updated),
        gather=_row_rate(gathered),
        scatter=_row_rate(scattered),
        fixed={method: seconds - call for method, seconds in probed.calls.items()},
        call_s=call,
        dense=probed.dense,
        flop_s=flop_s,
        moved_byte_s=probed.moved_byte_s,
    )


def _curve(points: list[tuple[float, float]]) -> Curve:
    return Curve(tuple(loops.undisturbed(points)))


def _gather_rows(index: Array, table: Array) -> Array:
    rows = table.at[index].get(mode="clip")
    return (index + rows.sum(1).astype(jnp.int32)) % table.shape[0]


def _scatter_rows(values: Array, index: Array) -> Array:
    return jnp.zeros_like(values).at[index].add(values) * 0.5


def _row_rate(seconds: list[float]) -> RowRate:
    """From the times of rows of two widths."""
    (narrow, wide), (a, b) = (np.asarray(seconds) / _ROWS).tolist(), (4.0 * w for w in _WIDTHS)
    per_byte = max(0.0, (wide - narrow) / (b - a))
    return RowRate(max(0.0, narrow - per_byte * a), per_byte)
