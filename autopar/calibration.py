"""`calibrate`: measures ahead the figures that plans are made by, in a script or by `python -m autopar calibrate`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.api import planned_by
from autopar.backends.devices import Devices
from autopar.cost.rates import Rates
from autopar.errors import ArgumentsError, AutoparError
from autopar.ir.figures import format_bytes
from autopar.measure.calibrate import rates_of
from autopar.measure.cluster import Cluster, measure_cluster, missing_links
from autopar.measure.figures import cache_folder, shown_path
from autopar.measure.loops import Budget

#: Seconds that measuring may take.
SECONDS = 60.0


def calibrate(mesh: Mesh | None = None, *, seconds: float = SECONDS, again: bool = False) -> Cluster:
    """Measures the devices here, and the ranks of an MPI job, for plans. Collective.

    It times exchanges, updates and whole steps, for the choice of methods and for predictions. Each collective gets a
    latency and a bandwidth on each level of links, by least squares over several sizes; the links' `source` says how
    well they fit. Everything is kept in the user's cache, where later plans and `Cluster.detect` find it. Nothing else
    should run on the machines meanwhile.

    Args:
      mesh: The devices; by default all.
      seconds: The time that it may take, about. What there is no time for is assumed, and measured by the next call.
      again: Whether to measure figures of earlier calls again.

    Returns:
      The cluster, with `measured`. Levels with one participant can't be measured: their links are assumed, and say so.

    Raises:
      ArgumentsError: the machines have different numbers of devices.

    Example:
      >>> import autopar
      >>> cluster = autopar.calibrate()
      >>> cluster.machines, cluster.device.memory_bytes_s > 0
      (1, True)
    """
    devices = Devices.of(mesh)
    budget = Budget(seconds, devices.processes)
    if devices.count > 1:
        rates_of(devices, functools.partial(planned_by, devices), steps=True, budget=budget, again=again)
    return measure_cluster(mesh, budget, again=again)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    start = time.monotonic()
    try:
        mesh = _mesh_of(options.devices)
        cluster = calibrate(mesh, seconds=options.seconds, again=options.again)
    except AutoparError as error:
        print(f"autopar calibrate: {error}", file=sys.stderr)
        return 1
    devices = Devices.of(mesh)
    lines = [f"{cluster}, after {time.monotonic() - start:.0f} s"]
    missing = missing_links(cluster)
    if devices.count > 1:
        rates = rates_of(devices, functools.partial(planned_by, devices), steps=True)
        lines += ["exchanges and steps, of all devices at once:", *_lines(rates), *_link_lines(cluster)]
        missing = [*rates.assumed, *missing]
    lines += [f"no time for: {', '.join(missing)}; call it again, or give it more --seconds"] if missing else []
    if devices.processes.rank == 0:
        print("\n".join([*lines, f"kept in {shown_path(cache_folder())}"]))
    return 0


def _mesh_of(count: int | None) -> Mesh | None:
    """Returns a mesh of the first `count` devices of each process (CPU devices are made as necessary), or raises
    ArgumentsError; None: all."""
    if count is None:
        return None
    with contextlib.suppress(RuntimeError):  # devices are there already, as many as JAX_NUM_CPU_DEVICES says
        jax.config.update("jax_num_cpu_devices", count)
    chosen = [[d for d in jax.devices() if d.process_index == k][:count] for k in range(jax.process_count())]
    for number, devices in enumerate(chosen):
        if len(devices) < count:
            raise ArgumentsError(f"--devices {count}: process {number} has {len(devices)}")
    return Mesh(np.array(chosen).reshape(-1), ("data",))


def _lines(rates: Rates) -> Iterator[str]:
    """Yields a table's lines on exchanges and parts of steps."""
    for collective in ("all_to_all", "all_gather", "all_reduce"):
        points = getattr(rates, collective).points
        yield _row(collective, *(f"{format_bytes(size)} {_ms(s)}" for size, s in points))
    for name, text in (("gather", "look up a row"), ("scatter", "add to a row")):
        rate = getattr(rates, name)
        yield _row(text, *(f"{format_bytes(width)} {1e6 * rate(1, width):.3f} us" for width in (64, 1024)))
    yield _row("products", f"{1e-9 / rates.flop_s:.1f} GFLOP/s")
    if rates.fixed:
        yield _row("a small step", *(f"{method} {_ms(rates.call_s + s)}" for method, s in rates.fixed.items()))


def _link_lines(cluster: Cluster) -> Iterator[str]:
    if cluster.measured:
        yield "links:"
    for collective, levels in cluster.measured.items():
        shown = (f"{k} {1e6 * x.latency_s:.1f} us a message, {x.bytes_s / 1e9:.2f} GB/s" for k, x in levels.items())
        yield _row(collective, *shown)


def _row(name: str, *figures: str) -> str:
    return f"  {name:<18}" + "  ".join(figures)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar calibrate",
        description="Measure ahead what plans are made by, and keep it for steps that are planned later.",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help=f"what it may take ({SECONDS:g})")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of each process (all); of CPUs as many as that"
    )
    parser.add_argument("--again", action="store_true", help="measure what is known from earlier calls as well")
    return parser
