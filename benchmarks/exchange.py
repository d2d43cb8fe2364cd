"""Exchanges between ranks by themselves: 640 Zipf ids a rank of 800,000 rows of 256 floats, and AllReduce.

Against what one writes first with mpi4py: counts by `Alltoall`, everything else by `Alltoallv`, sums by `np.add.at`,
an `Allreduce` for each array. Both take turns in the same processes; a round's time is that of its slowest rank.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autopar.mpi.buffers import Buffers
from autopar.mpi.exchange import Exchange

RANKS, ROWS, DIM, IDS, ROUNDS = 4, 800_000, 256, 640, 300


def exchange() -> None:
    """Starts the ranks, which print their figures."""
    launcher = Path(sys.executable).with_name("mpiexec")
    command = [launcher if launcher.exists() else "mpiexec", "-n", str(RANKS), sys.executable, "-m", "mpi4py.run"]
    subprocess.run([*command, "-m", "benchmarks.exchange"], check=True, timeout=600)


class Textbook:
    """The same exchanges, written with mpi4py alone."""

    def __init__(self, comm: Any, share: int) -> None:
        from mpi4py import MPI

        self._comm, self._share, self._unit = comm, share, MPI.FLOAT

    def ids(self, places: np.ndarray) -> None:
        self._counts = np.bincount(places // self._share, minlength=self._comm.size)
        self._requested = np.empty_like(self._counts)
        self._comm.Alltoall(self._counts, self._requested)
        self._local = np.empty(self._requested.sum(), np.int32)
        self._comm.Alltoallv([places % self._share, self._counts], [self._local, self._requested])
        self._rows, self._back = np.unique(self._local, return_inverse=True)

    def fetch(self, table: np.ndarray) -> np.ndarray:
        out = np.empty((self._counts.sum(), table.shape[1]), np.float32)
        sends = [table[self._local], self._requested * table.shape[1]]
        self._comm.Alltoallv(sends, [out, self._counts * table.shape[1]])
        return out

    def deliver(self, sums: np.ndarray) -> np.ndarray:
        parts = np.empty((self._requested.sum(), sums.shape[1]), np.float32)
        self._comm.Alltoallv([sums, self._counts * sums.shape[1]], [parts, self._requested * sums.shape[1]])
        total = np.zeros((len(self._rows), sums.shape[1]), np.float32)
        np.add.at(total, self._back, parts)
        return total


def _milliseconds(comm: Any, calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, np.ndarray]:
    """By call, `[rounds]`: the slowest rank's milliseconds."""
    found = {name: np.empty(rounds) for name in calls}
    for k in range(rounds + 3):
        for name, call in calls.items():
            comm.Barrier()
            start = time.perf_counter()
            call(k)
            seconds = time.perf_counter() - start
            if k >= 3:
                found[name][k - 3] = comm.allreduce(seconds, max) * 1e3
    return found


def _row(name: str, values: np.ndarray, base: np.ndarray | None = None) -> None:
    ratio = "" if base is None else f"   x{np.median(base / values):.2f}"
    print(f"  {name:40s} {np.median(values):8.3f} ms (best tenth {np.quantile(values, 0.1):.3f}){ratio}", flush=True)


def _steps(comm: Any, exchanges: dict[str, Exchange], say: Callable[..., None]) -> None:
    share = ROWS // comm.size
    permuted = np.random.default_rng(0).permutation(ROWS)  # the same on all ranks: balanced owners
    table = np.ones((share, DIM), np.float32)
    batches = [
        np.unique(permuted[np.random.default_rng([k, comm.rank]).zipf(1.3, IDS).clip(max=ROWS) - 1]).astype(np.int32)
        for k in range(16)
    ]
    textbook, gradients = Textbook(comm, share), np.ones((IDS, DIM), np.float32)

    def plain(k: int) -> None:
        places = batches[k % 16]
        textbook.ids(places)
        textbook.fetch(table)
        textbook.deliver(gradients[: places.size])

    calls: dict[str, Callable[[int], Any]] = {"textbook: all three": plain}
    for way, ours in exchanges.items():
        buffers, requested = Buffers(), {}

        def ask(k: int, ours: Exchange = ours, requested: dict[str, Any] = requested) -> None:
            requested[""] = ours.ask(batches[k % 16], share)

        def fetch(
            k: int, ours: Exchange = ours, requested: dict[str, Any] = requested, buffers: Buffers = buffers
        ) -> None:
            found = requested[""]
            ours.fetch(found, table[found.rows], buffers.take("rows", (found.size, DIM), np.float32))

        def deliver(
            k: int, ours: Exchange = ours, requested: dict[str, Any] = requested, buffers: Buffers = buffers
        ) -> None:
            found = requested[""]
            out = buffers.take("sums", (len(found.rows), DIM), np.float32)
            ours.deliver(found, gradients[: found.size], out)

        calls |= {f"{way}: ask": ask, f"{way}: fetch": fetch, f"{way}: deliver": deliver}
        calls[f"{way}: all three"] = lambda k, parts=(ask, fetch, deliver): [part(k) for part in parts]
    found = _milliseconds(comm, calls, ROUNDS)
    for name, values in found.items():
        base = found["textbook: all three"] if name.endswith("all three") else None
        say(name, values, base)


def _reductions(
    comm: Any, exchanges: dict[str, Exchange], megabytes: int, rounds: int, say: Callable[..., None]
) -> None:
    total = megabytes << 18
    arrays = [np.ones(total // 2, np.float32), np.ones((256, total // 1024), np.float32)]
    arrays += [np.ones(total // 16, np.float32)] * 4 + [np.ones((), np.float32)] * 4
    results = [np.empty_like(a) for a in arrays]

    def plain(k: int) -> None:
        for array, result in zip(arrays, results, strict=True):
            comm.Allreduce(array, result)

    def one(k: int) -> None:
        comm.Allreduce(whole, summed)

    whole, summed = np.ones(total, np.float32), np.ones(total, np.float32)
    base = f"textbook: reduce {megabytes} MB"
    calls: dict[str, Callable[[int], Any]] = {base: plain, f"one Allreduce, nothing packed, {megabytes} MB": one}
    for way, ours in exchanges.items():
        buffers, nbytes = Buffers(), ours.packed_bytes(arrays)

        def reduce(k: int, ours: Exchange = ours, buffers: Buffers = buffers, nbytes: int = nbytes) -> None:
            ours.reduce(arrays, memory=buffers.take("reduce", nbytes, np.uint8))

        calls[f"{way}: reduce {megabytes} MB"] = reduce
    found = _milliseconds(comm, calls, rounds)
    for name, values in found.items():
        say(name, values, found[base])


def main() -> None:
    """What each rank does."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    exchanges = {
        way: Exchange(comm.rank, comm.size, comm.Dup(), polling=way == "polling") for way in ("blocking", "polling")
    }

    def say(name: str, values: np.ndarray, base: np.ndarray | None) -> None:
        if comm.rank == 0:
            _row(name, values, base)

    if comm.rank == 0:
        print(f"  {comm.size} ranks; median of rounds; x: of the textbook's times to these, round by round")
    _steps(comm, exchanges, say)
    _reductions(comm, exchanges, 1, 100, say)
    _reductions(comm, exchanges, 16, 25, say)


if __name__ == "__main__":
    main()
