"""Tables in the memory of the hosts, over four processes: autopar against PyTorch DistributedDataParallel, and against
plain JAX data parallelism across the same number of processes.

Each system's ranks are processes of their own (`benchmarks.served`), and take turns in one run; what counts is the
median of the ratios turn by turn. `python -m benchmarks hosts`; PyTorch is a benchmark-only extra, `bench-torch`.
"""

from __future__ import annotations

import contextlib
import cProfile
import importlib.util
import pstats
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lookup import D, make_state, plain_step, zipf_batches
from benchmarks.served import Ranks, started
from benchmarks.stage_times import table, timed
from benchmarks.timing import median_ms, ratio

RANKS = 4
#: Rows of the table against PyTorch, and against plain JAX, whose dense gradients of more wouldn't end.
ROWS, PLAIN_ROWS = 800_000, 100_000
#: Steps of a turn, the first half of which isn't timed.
TURNS = {"autopar": 40, "autopar by lookups": 40, "PyTorch": 12, "plain JAX": 4}
#: The loss of a step may differ by this much of itself between systems.
AGREEMENT = 1e-3


def hosts(rows: int = ROWS, plain_rows: int = PLAIN_ROWS, rounds: int = 8) -> None:
    """V=800,000, D=256, an MLP, 640 Zipf ids a rank, clip by the norm over all, Adagrad.

    PyTorch computes the model for each lookup; autopar is timed so, too, and as it is.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        write_table(Path(folder, "table.npy"), max(rows, plain_rows))
        with _system("autopar", folder) as planned:
            planned("prepare", rows=rows, by_lookups=True)
            planned("prepare", rows=rows)
            _against(
                {"autopar": {}, "autopar by lookups": {"by_lookups": True}}, planned, "PyTorch", rows, rounds, folder
            )
            _breakdown(planned, rows)
            planned("prepare", rows=plain_rows)
            _against({"autopar": {}}, planned, "plain JAX", plain_rows, rounds, folder)
    tiny()


def write_table(path: Path, rows: int, block: int = 50_000) -> None:
    """The table that all begin with."""
    found = np.lib.format.open_memmap(path, "w+", np.float32, (rows, D))
    for start in range(0, rows, block):
        part = found[start : start + block]
        part[...] = 0.01 * np.random.default_rng(start).standard_normal(part.shape, np.float32)
    found.flush()


@contextlib.contextmanager
def _system(name: str, folder: str) -> Iterator[Ranks]:
    """Each as it is usually started: PyTorch with a thread a rank; autopar binds its ranks by itself."""
    environment = {"OMP_NUM_THREADS": "1"} if name == "PyTorch" else {}
    module = "benchmarks.hosts_systems"
    with started(name, RANKS, module, name, folder, environment=environment) as ranks:
        yield ranks


def _against(
    ways: Mapping[str, Mapping[str, Any]], planned: Ranks, other: str, rows: int, rounds: int, folder: str
) -> None:
    """autopar in some ways, told apart by the options of a turn, and another system."""
    if other == "PyTorch" and importlib.util.find_spec("torch") is None:
        for options in ways.values():  # compiled all the same
            planned("turn", rows=rows, count=TURNS["autopar"], **options)
        print("PyTorch: skipped, torch isn't installed: pip install 'autopar[bench-torch]'", flush=True)
        return
    with _system(other, folder) as ranks:
        ranks("prepare", rows=rows)
        systems = {name: (planned, options) for name, options in ways.items()}
        times, busy, apart = _alternate({**systems, other: (ranks, {})}, rows, rounds)
    (told, *_) = planned("told", rows=rows)
    shown = ", ".join(f"{n} {median_ms(x):.1f} ms ({median_ms(busy[n]):.1f} busy)" for n, x in times.items())
    print(f"V={rows:,}, {RANKS} processes: {shown}; losses differ by at most {apart:.1e}", flush=True)
    for name in ways:
        ratios = sorted(b / a for a, b in zip(times[name], times[other], strict=True))
        print(
            f"  {other} / {name} {ratio(times[other], times[name]):.2f} (turns: {ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )
    print(
        f"  autopar compiled {told['compilations']} times; dense gradients: {', '.join(told['reduction_backend'])}; "
        f"once for each distinct row: {told['once_per_row'] or 'nothing'}",
        flush=True,
    )
    if not apart <= AGREEMENT:
        raise SystemExit(f"autopar and {other} don't compute the same: losses differ by {apart:.1e}")


def _alternate(
    systems: Mapping[str, tuple[Ranks, Mapping[str, Any]]], rows: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Seconds a step, a median for each turn, by system; a rank's processor time in it, which other programs on the
    machine change less; and how far apart losses of the same steps were."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    busy: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 1):
        for name, (ranks, options) in systems.items():
            answers = ranks("turn", rows=rows, count=TURNS[name], **options)
            slowest, mean = (f([a[k] for a in answers], axis=0) for k, f in enumerate((np.max, np.mean)))
            losses[name] += answers[0][2]
            if turn:  # the first one compiles
                found[name].append(float(np.median(slowest[len(slowest) // 2 :])))
                busy[name].append(float(np.median(mean[len(mean) // 2 :])))
    common = min(map(len, losses.values()))
    first, *others = (np.array(x[:common]) for x in losses.values())
    return found, busy, float(max(np.max(np.abs(x / first - 1)) for x in others))


def _breakdown(planned: Ranks, rows: int, steps: int = 60) -> None:
    """Where autopar's step goes."""
    print(f"autopar's stages at V={rows:,}, {RANKS} processes, medians of {steps} steps:")
    print("\n".join(table(planned("stages", rows=rows, count=steps))), flush=True)


def tiny(rows: int = 1_000, dim: int = 8, hidden: int = 16, ids: tuple[int, int] = (8, 8), steps: int = 400) -> None:
    """A step of a tiny model in one process, everything included: its time is autopar's own."""
    import jax

    import autopar

    planned = autopar.parallelize(plain_step, strategy=("ps", "hosts"))
    plain = jax.jit(plain_step, donate_argnums=0)
    made = zipf_batches(rows, ids)
    batches = [made(k) for k in range(steps)]
    states = {"autopar": make_state(rows, dim, hidden), "plain jit": make_state(rows, dim, hidden)}
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for batch in batches:
        for name, step in (("autopar", planned), ("plain jit", plain)):
            start = time.perf_counter()
            states[name], loss = step(states[name], batch)
            jax.block_until_ready((states[name], loss))
            seconds[name].append(time.perf_counter() - start)
    warm = {name: found[steps // 4 :] for name, found in seconds.items()}
    shown = ", ".join(f"{name} {median_ms(found):.3f} ms" for name, found in warm.items())
    print(f"V={rows:,}, D={dim}, {ids[0] * ids[1]} ids, one process, tables on hosts: a step takes {shown}", flush=True)
    _profile(planned, states["autopar"], batches[:200])


def _profile(planned: Any, state: Any, batches: Sequence[Any], lines: int = 14) -> None:
    """Stages, and the functions that a step's time goes to."""
    import jax

    with timed(planned.latest.runner, planned.plan.stages) as times:
        for batch in batches:
            start = time.perf_counter()
            state, _ = planned(state, batch)
            times.finish(time.perf_counter() - start)
    print("\n".join(table([times.seconds])))
    profile = cProfile.Profile()
    profile.enable()
    for batch in batches:
        state, loss = planned(state, batch)
        jax.block_until_ready((state, loss))
    profile.disable()
    stats: Any = pstats.Stats(profile)
    print("  us a step (profiled: slower), own time first")
    for place, (_, calls, own, whole, _) in sorted(stats.stats.items(), key=lambda item: -item[1][2])[:lines]:
        file, line, name = place
        where = f"{Path(file).name}:{line}" if line else ""
        per = 1e6 / len(batches)
        print(f"  {own * per:8.1f} {whole * per:8.1f}  {calls / len(batches):6.1f} calls  {name} {where}")
