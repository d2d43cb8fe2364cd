"""Turns measured figures into rates of devices, and keeps them; those that weren't measured are assumed of similar
devices."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from autopar.backends.devices import Devices
from autopar.cost.rates import Curve, Rates, RowRate, StageRates
from autopar.ir.program import Program
from autopar.ir.strategy import METHODS
from autopar.jax_types import Leaf
from autopar.launch.notices import noticing
from autopar.measure.alpha import ids_by_family
from autopar.measure.loops import undisturbed
from autopar.mpi.limits import cores

#: Figure -> where it was measured (bytes, ids, a method) -> seconds; the content of a file.
Figures = dict[str, dict[str, float]]

#: Number of gathered or scattered rows; side of the multiplied matrices.
ROWS, SIDE = 1024, 512
#: Bytes of the dense parameters that are added to a whole step.
DENSE = tuple(4 * side**2 for side in (1, 64, 256, 1024))
#: The method of the step that others are compared with.
BASE = "allreduce"

#: Names, for people, of the figures by which methods are compared.
NAMES = {
    "all_to_all": "AllToAll",
    "all_gather": "AllGather",
    "all_reduce": "AllReduce",
    "route": "making ids unique",
    "walk": "passes over memory",
    "gather": "looking rows up",
    "scatter": "adding to rows",
    "update": "updates",
    "fixed": "what each method's call takes",
}
_CURVES = ("all_to_all", "all_gather", "all_reduce", "route", "walk")
_ROW_RATES = ("gather", "scatter")


def rates_of_figures(figures: Figures, assumed: Rates) -> Rates:
    """Returns rates by measured figures, and by `assumed` ones for the rest.

    A figure measured at one size scales the assumed curve. `Rates.assumed` names figures measured at fewer than two
    sizes, or not of all methods.
    """
    points = {name: _by_size(figures, name) for name in (*_CURVES, *_ROW_RATES, "update")}
    found: dict[str, Leaf] = {name: _curve(points[name], getattr(assumed, name)) for name in _CURVES}
    found |= {name: _row_rate(points[name], getattr(assumed, name)) for name in _ROW_RATES}
    found["update"] = _curve(points["update"], found["walk"]) if points["update"] else None
    missing = [name for name, measured in points.items() if len(measured) < 2]

    base, more = figures.get("call", {}).get(BASE, 0.0), {BASE: 0.0, **figures.get("more", {})}
    least = min(more.values())
    if base and set(more) == set(METHODS):
        found |= {"fixed": {m: s - least for m, s in more.items()}, "call_s": max(0.0, base + least)}
    else:
        found |= {"fixed": {}, "call_s": base}
        missing.append("fixed")
    dense = sorted(_by_size(figures, "dense").items())
    if len(dense) == len(DENSE):
        found["dense"] = Curve(tuple((size, max(s for _, s in dense[: k + 1])) for k, (size, _) in enumerate(dense)))
    else:
        missing.append("dense")
    for name, figure, operations in (("flop_s", "product", 2 * SIDE**3), ("moved_byte_s", "moved_byte", 1)):
        if figure in figures:
            (seconds,) = figures[figure].values()
            found[name] = seconds / operations
        else:
            missing.append(name)
    return replace(assumed, **found, assumed=tuple(missing))


def assumed_note(rates: Rates) -> str:
    """Names the assumed figures by which methods are compared; "" if all were measured."""
    names = [NAMES[name] for name in rates.assumed if name in NAMES]
    if not names:
        return ""
    return (
        f"Assumed, as of devices like these, for want of time to measure: {', '.join(names)}. The next process goes on "
        "measuring; python -m autopar calibrate measures all at once."
    )


def _by_size(figures: Figures, name: str) -> dict[float, float]:
    return {float(at): seconds for at, seconds in figures.get(name, {}).items()}


def _curve(measured: Mapping[float, float], assumed: Curve) -> Curve:
    if not measured:
        return assumed
    if len(measured) == 1:
        ((size, seconds),) = measured.items()
        return Curve(tuple((at, s * seconds / assumed(size)) for at, s in assumed.points))
    return Curve(tuple(undisturbed(sorted(measured.items()))))


def _row_rate(measured: Mapping[float, float], assumed: RowRate) -> RowRate:
    """Fits the rate of rows to the times of `ROWS` rows of two widths in bytes."""
    if not measured:
        return assumed
    (narrow, first), *others = sorted((width, s / ROWS) for width, s in measured.items())
    if not others:
        longer = first / assumed(1, narrow)
        return RowRate(assumed.row_s * longer, assumed.byte_s * longer)
    ((wide, last),) = others
    per_byte = max(0.0, (last - first) / (wide - narrow))
    return RowRate(max(0.0, first - per_byte * narrow), per_byte)


# --- figures are kept in the user's cache folder, and what is being measured is reported ---


#: Reports the next measurement.
Advance = Callable[[str], None]

#: Version of the measurements; files of other versions aren't read.
_VERSION = 12


def cache_file(devices: Devices, name: str) -> Path:
    """Returns the file that keeps measured figures of these devices, whatever the mesh calls its axes.

    Its name depends on the machine, the cores that this process may use, kind and number of devices, mesh, processes
    and JAX version, whose hash replaces {} in `name`.
    """
    first = devices.mesh.devices.flat[0]
    about = (
        _VERSION,
        platform.node(),
        cores(),
        first.platform,
        first.device_kind,
        devices.mesh.devices.shape,
        devices.mesh.axis_names.index(devices.axis),
        len(devices.processes.members),
        jax.__version__,
    )
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return cache_folder() / name.format(key)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def write_cache(file: Path, text: str) -> None:
    """Writes a file atomically; if it can't be written, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)
    except OSError:
        return


def shown_path(file: Path) -> str:
    """Returns a path for people, with "~" for the user's home folder."""
    home = re.escape(os.path.expanduser("~") + os.sep)
    return re.sub(f"^{home}", "~/", str(file))


@contextlib.contextmanager
def measuring(what: str, why: str, parts: int, kept: Path, *, shown: bool = True) -> Iterator[Advance]:
    """Shows a line that says what is measured, why, and where it is kept; with a bar on a terminal.

    The block calls the yielded function `parts` times. `kept`: the file of the figures. `shown`: this process shows it.
    """
    line = f"measuring {what}, {why}; kept in {shown_path(kept)}"
    with noticing(f"measuring {what}", parts=parts, at_once=line, shown=shown) as notice:
        done = itertools.count()
        yield lambda part: notice.tell(part, done=next(done))


# --- the machine whose figures a step is planned by: the devices here, or a cluster elsewhere ---


@dataclass(frozen=True, slots=True)
class Machine:
    """Functions that return measured figures, None if nobody measures. Across processes the first call is
    collective."""

    rates: Callable[[], Rates] | None = None  #: Rates of exchanges and updates.
    step_rates: Callable[[], Rates] | None = None  #: `rates` with those of whole steps.
    #: Bytes of memory of each device; returns None if there is no limit.
    memory: Callable[[], int | None] | None = None
    stages: Callable[[], StageRates] | None = None  #: Rates of the programs of a pipeline's stages.

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of each device's memory; None if there is no limit, or it is unknown."""
        return None if self.memory is None else self.memory()


@functools.cache
def memory_of(devices: Devices) -> int | None:
    """Returns the bytes of the smallest memory of all devices; None for devices without a memory of their own (CPUs).

    Collective at its first call, since all processes must plan by the same figure.
    """
    own = [d for d in devices.mesh.devices.flat if d.process_index == jax.process_index() and d.platform != "cpu"]
    stats = [device.memory_stats() or {} for device in own]
    smallest = min((int(s["bytes_limit"]) for s in stats if "bytes_limit" in s), default=None)
    all_ = devices.processes.values(smallest, "memory of the devices")
    return min((x for x in all_ if x is not None), default=None)


NOWHERE = Machine()


def looked_up(program: Program, example: Sequence[Leaf] | None) -> dict[int, Sequence[np.ndarray]]:
    """Maps families to the flat ids that an example batch looks up, if they are known. `example`: as in
    `example_ids`."""
    families = [space.family for space in program.facts.spaces if space.refusal is None]
    return ids_by_family(program, {family: program.ids[family] for family in families}, example)
