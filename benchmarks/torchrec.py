"""Recommenders beside TorchRec: a DLRM of 26 tables and one large table, over four processes, devices, and on one.

Each side's ranks are processes of their own (`benchmarks.ranks`), bound to cores alike, which begin with the same
values and see the same batches; they take turns in one run, and their losses must be equal. TorchRec (gloo, CPU) runs
by each of its shardings and by its planner's choice, and the best of them counts.

TorchRec's wheel requires fbgemm-gpu, which is for GPUs, so that it is installed by itself, here or into an environment
of its own, whose interpreter is then named in TORCH_PYTHON (run on Python 3.11, beside 3.13 for JAX):

    pip install 'autopar[bench-torchrec]'
    pip install --no-deps torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from autopar.launch.launcher import device_variables
from benchmarks.ranks import Ranks, started

RANKS, FIRST, STEPS, TURNS = 4, 50, 30, 6
#: TorchRec's shardings.
WAYS = ("table-wise", "row-wise", "column-wise", "planner")
#: Losses of the first steps may differ by this much of themselves. What is rounded otherwise grows from step to step.
AGREEMENT = 1e-4


class Start(NamedTuple):
    """How a side is started, and what it does.

    Attributes:
      way: How the step is written, or how TorchRec has its tables in shards.
      library, place: As of `benchmarks.recommenders.main`.
      ranks, devices: Processes, and CPU devices of each.
      first, steps: How many steps it takes before the turns, and in each.
    """

    way: str
    library: str = "torch"
    place: str = ""
    ranks: int = RANKS
    devices: int = 1
    first: int = FIRST
    steps: int = STEPS


class Started:
    """A side that has taken its first steps; it collects seconds, and what it takes of the processors."""

    def __init__(self, ranks: Ranks, start: Start, begin: float, task: str, parts: int) -> None:
        self.ranks, self._start = ranks, start
        ranks("prepare", task=task, way=start.way, parts=parts)
        prepared_s = time.perf_counter() - begin
        self.losses: list[float] = []
        self._first, _ = self._turn(start.first)
        self._tenth_s, self._all_s = (prepared_s + self._first[:n].sum() for n in (10, start.first))
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._busy: list[float] = []

    def _turn(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slowest rank's seconds of each step, and the ranks' mean processor time."""
        seconds, busy, losses = (np.array(x) for x in zip(*self.ranks("turn", count=count), strict=True))
        self.losses += losses.mean(0).tolist()
        return seconds.max(0), busy.mean(0)

    def take_turn(self, has_loops: bool) -> None:
        """Takes some steps, whose second half is timed; `has_loops`: whether busy loops run beside."""
        seconds, busy = (x[len(x) // 2 :] for x in self._turn(self._start.steps))
        self.seconds[has_loops].append(float(np.median(seconds)))
        if not has_loops:
            self._busy.append(float(np.median(busy)))

    def __str__(self) -> str:
        step_ms, busy_ms, loops_ms = (1e3 * np.median(x) for x in (self.seconds[False], self._busy, self.seconds[True]))
        pauses = self._first[10:][self._first[10:] > 3 * np.median(self.seconds[False])]
        return (
            f"{step_ms:.1f} ms a step ({busy_ms:.1f} busy; beside two busy loops {loops_ms:.1f}); start to "
            f"10th step {self._tenth_s:.1f} s, to the {self._start.first}th {self._all_s:.1f}, {len(pauses)} of these "
            f"steps are pauses ({pauses.sum():.1f} s); {sum(self.ranks('resident_mib')):,.0f} MiB"
        )


@contextlib.contextmanager
def _side(start: Start) -> Iterator[Ranks]:
    """Starts the ranks of a side."""
    is_torch = start.library == "torch"
    environment = {**dict(device_variables(start.devices)), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environment |= {"OMP_NUM_THREADS": "1"} if is_torch and start.ranks > 1 else {}
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        arguments = [start.library, start.place or folder]
        python = _torch_python() if is_torch else sys.executable
        with started(
            start.way, start.ranks, "benchmarks.recommenders", *arguments, environment=environment, python=python
        ) as ranks:
            yield ranks


def _torch_python() -> str:
    return os.environ.get("TORCH_PYTHON", sys.executable)


@contextlib.contextmanager
def _busy_loops() -> Iterator[None]:
    """Keeps two cores busy with a loop each."""
    loop = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    cores = sorted(os.sched_getaffinity(0))[:2]
    loops = [subprocess.Popen([sys.executable, "-c", loop, str(core)]) for core in cores]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def _beside(task: str, sides: Mapping[str, Start], parts: int = RANKS) -> None:
    """Starts the sides one after the other, lets them take turns, and compares their losses, and times with the last.

    Raises:
      SystemExit: they don't compute the same.
    """
    has_torch = subprocess.run([_torch_python(), "-c", "import torchrec"], capture_output=True).returncode == 0
    begun: dict[str, Started] = {}
    with contextlib.ExitStack() as stack:
        for name, start in sides.items():
            if start.library == "torch" and not has_torch:
                print(f"  {name}: skipped, there is no torchrec: see the first lines of benchmarks/torchrec.py")
                continue
            begin = time.perf_counter()
            begun[name] = Started(stack.enter_context(_side(start)), start, begin, task, parts)
        for has_loops in (False, True):
            with _busy_loops() if has_loops else contextlib.nullcontext():
                for _ in range(TURNS):
                    for each in begun.values():
                        each.take_turn(has_loops)
        (*others, last), count = begun, min(start.first for start in sides.values())
        ours, losses = begun[last], np.array([each.losses[:count] for each in begun.values()])
        for name, each in begun.items():
            print(f"  {name}: {each}", flush=True)
    for name in others:
        plain, loops = (np.array(begun[name].seconds[k]) / np.array(ours.seconds[k]) for k in (False, True))
        print(
            f"  {name} / {last}: {np.median(plain):.2f} (turns: {plain.min():.2f} to {plain.max():.2f}), beside two "
            f"busy loops {np.median(loops):.2f}"
        )
    apart = float(np.max(np.abs(losses / losses[0] - 1)))
    print(f"  losses of the first {count} steps differ by at most {apart:.1e}", flush=True)
    if not apart <= AGREEMENT:
        raise SystemExit(f"{', '.join(begun)} don't compute the same: losses differ by {apart:.1e}")


def _best(task: str) -> str:
    """Returns TorchRec's fastest way to have its tables in shards."""
    found = {}
    with _side(Start("TorchRec")) as ranks:
        for way in WAYS:
            ranks("prepare", task=task, way=way, parts=RANKS)
            ranks("turn", count=10)
            found[way] = float(np.median(np.max([seconds for seconds, *_ in ranks("turn", count=STEPS)], 0)))
    print("TorchRec's shardings:", ", ".join(f"{way} {1e3 * s:.1f} ms" for way, s in found.items()), flush=True)
    return min(found, key=lambda way: found[way])


def torchrec() -> None:
    """A DLRM of 26 tables, on 4 ranks as both ways to write it, and on 4 devices of one process."""
    best = _best("DLRM")
    for way in ("slices", "pairs"):
        print(f"DLRM, {way}, {RANKS} processes:")
        _beside("DLRM", {f"TorchRec, {best}": Start(best), "autopar on hosts": Start(way, "jax", "hosts")})
    print(f"DLRM, pairs, {RANKS} processes and {RANKS} devices of one:")
    devices = Start("pairs", "jax", "devices", 1, RANKS)
    _beside("DLRM", {f"TorchRec, {best}": Start(best), "autopar on devices": devices})


def one_table() -> None:
    """A table of 800,000 x 256 and an MLP."""
    print(f"one table, {RANKS} processes:")
    sides = {"DistributedDataParallel": Start("DDP"), "TorchRec, row-wise": Start("row-wise")}
    _beside("one table", {**sides, "autopar on hosts": Start("", "jax", "hosts")})


def one_device() -> None:
    """The DLRM on one device, by 512 examples."""
    print("DLRM, pairs, one process:")
    sides = {
        "torch.nn.EmbeddingBag(sparse=True)": Start("EmbeddingBag", ranks=1),
        "plain jit": Start("pairs", "jax", "plain", 1, first=10, steps=2),
        "autopar": Start("pairs", "jax", "devices", 1),
    }
    _beside("DLRM", sides, parts=1)
