"""Exchanges between ranks by themselves, and beside a step's computing.

The ways take turns in the same processes; a round's time is that of its slowest rank. Hosts are network namespaces that
share the machine's cores.
"""

from __future__ import annotations

import functools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.mpi.buffers import Buffers
from autopar.mpi.exchange import Exchange
from benchmarks.network import ENVIRONMENT, hosts, sent_by_interface
from benchmarks.ranks import RANK, mpiexec, serve, started

RATE = "1gbit"
RANKS, ROWS, DIM, IDS, ROUNDS = 4, 800_000, 256, 640, 300
#: Of eight tables that aren't alike.
FAMILY_ROWS, FAMILY_DIM, FAMILY_IDS = 20_000, 64, 1_664


def exchange() -> None:
    """Exchanges of rows against a textbook's: 640 Zipf ids a rank of 800,000 rows of 256 floats, and AllReduce.

    The textbook's are what one writes first with mpi4py: counts by `Alltoall`, everything else by `Alltoallv`, sums by
    `np.add.at`, an `Allreduce` for each array. And those of eight tables, one after the other and at once.
    """
    _start("exchange", RANKS)


def hot(ids: int = 2_048, exponent: float = 1.3, batches: int = 8) -> None:
    """Bytes of ids, rows and gradients, counted: all rows served by their owners, and the most frequent ones copied to
    every rank, as many as send least; and rows that one device gets from host memory if it keeps the most frequent."""
    for ranks in (2, 4, 8):
        rng = np.random.default_rng(0)
        drawn = [np.unique((rng.zipf(exponent, ids) - 1) % ROWS) for _ in range(batches * ranks)]
        for row in (4, 32, 256):
            sent: dict[int, float] = {}
            for copied in (0, *(1 << k for k in range(13))):
                served = sum(np.sum((own >= copied) & (own % ranks != k % ranks)) for k, own in enumerate(drawn))
                sent[copied] = served * (2 * row + 4) / len(drawn) + 2 * (ranks - 1) / ranks * copied * row
            best = min(sent, key=sent.__getitem__)
            less = f"{1 - sent[best] / sent[0]:.1%} less with {best} rows copied"
            print(f"{ranks} ranks, rows of {row} B: a rank sends {sent[0]:,.0f} B a step, {less}", flush=True)
    rng = np.random.default_rng(0)
    drawn = [np.unique((rng.zipf(exponent, ids) - 1) % ROWS) for _ in range(batches)]
    for kept in (256, 1_024, 8_192):
        moved, all_ = (np.mean([np.sum(own >= first) for own in drawn]) for first in (kept, 0))
        print(f"one device that keeps {kept} rows: {moved:.0f} of {all_:.0f} rows move in a step", flush=True)


def _start(what: str, ranks: int, wrapper: Sequence[str] = (), **environment: str) -> None:
    command = [mpiexec(), "-n", str(ranks), *wrapper, sys.executable, "-m", "mpi4py.run", "-m", "benchmarks.exchange"]
    subprocess.run([*command, what], check=True, timeout=900, env={**os.environ, **environment})


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

        rng = np.random.default_rng(comm.rank)
        families = [np.unique(rng.integers(0, FAMILY_ROWS * comm.size, FAMILY_IDS)).astype(np.int32) for _ in range(8)]

        def apart(k: int, ours: Exchange = ours, families: Sequence[np.ndarray] = families) -> None:
            asked = [ours.ask(ids, FAMILY_ROWS) for ids in families]
            fetched = [ours.fetch(one, np.ones((len(one.rows), FAMILY_DIM), np.float32)) for one in asked]
            for one, sums in zip(asked, fetched, strict=True):
                ours.deliver(one, sums)

        def at_once(k: int, ours: Exchange = ours, families: Sequence[np.ndarray] = families) -> None:
            asked = ours.together(ours.asking(ids, FAMILY_ROWS) for ids in families)
            rows = (np.ones((len(one.rows), FAMILY_DIM), np.float32) for one in asked)
            ours.together(map(ours.delivering, asked, ours.together(map(ours.fetching, asked, rows))))

        calls |= {f"{way}: 8 families, one by one": apart, f"{way}: 8 families at once": at_once}
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


def exchange_rank() -> None:
    """Times one rank's exchanges."""
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


# --- AllReduce ---

SIZES, TIMED = (4, 16, 64), 7


def rings() -> None:
    """AllReduce of one buffer of 4, 16 and 64 MB: MPI's own, in rings (`autopar.mpi.exchange`), and gloo's by JAX.

    Of 4 ranks that share a machine, of 4 hosts and of 3 at 1 Gbit/s, and of 2 hosts of 2 ranks each; bytes are those of
    the interface (figures 17 to 20 of MXNET-MPI).
    """
    _start("rings", 4, JAX_PLATFORMS="cpu")
    apart = {name: value for name, value in ENVIRONMENT.items() if "ALGORITHM" not in name}  # MPI's own choice
    for count, each in ((4, 1), (3, 1), (2, 2)):
        with tempfile.TemporaryDirectory() as folder, hosts(count, Path(folder), each, RATE) as made:
            _start("rings", count * each, made.wrapper, JAX_PLATFORMS="cpu", **apart)


def rings_rank() -> None:
    """Times one rank's sums."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from autopar.mpi.machines import connect
    from autopar.mpi.world import world

    here = world()
    machines = here.comm.allgather(socket.gethostname())
    mesh = Mesh(np.array(jax.devices()), ("ranks",), axis_types=(AxisType.Auto,))
    add = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    ways: dict[str, Exchange] = {"MPI": connect(here, machines), "rings": connect(here, machines)}
    ways["rings"].rings_from = 0
    if here.rank == 0:
        print(f"{here.size} ranks on {len(set(machines))} machines:")
    for megabytes in SIZES:
        own = np.ones((1, megabytes << 18), np.float32)
        memory = {way: np.empty(own.nbytes, np.uint8) for way in ways}
        spread = jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), own)

        def reduce(way: str, array: np.ndarray = own[0], memory: dict[str, np.ndarray] = memory) -> object:
            return ways[way].reduce([array], memory=memory[way])

        calls: dict[str, Callable[[], object]] = {way: functools.partial(reduce, way) for way in ways}
        calls["gloo"] = lambda spread=spread: add(spread).block_until_ready()
        for way, call in calls.items():
            call()
            before, seconds = sent_by_interface() or 0, []
            for _ in range(TIMED):
                here.comm.Barrier()
                start = time.perf_counter()
                call()
                seconds.append(max(here.comm.allgather(time.perf_counter() - start)))
            sent = dict(zip(machines, here.comm.allgather((sent_by_interface() or 0) - before), strict=True))
            if here.rank == 0:
                share = sum(sent.values()) / len(sent) / TIMED / own.nbytes
                shown = f", {share:.3f} of it sent by a machine" if len(sent) > 1 else ""
                print(f"  {megabytes:3d} MB {way:6s} {np.median(seconds) * 1e3:8.1f} ms{shown}", flush=True)


# --- beside the backward pass ---

STEPS, TURNS = 8, 5
STEP_ROWS, WIDTH, LAYERS = 100_000, 768, 6
EXAMPLES = (64, 256, 1024)
#: Bytes from which on sums go in rings, and beside the backward pass.
WAYS: Mapping[str, tuple[int | None, int | None]] = {"MPI": (None, None), "rings": (0, None), "beside": (0, 1 << 20)}


def overlap() -> None:
    """A step on 2 and 4 hosts at 1 Gbit/s: gradients added up by MPI, in rings, and in rings beside the backward pass.

    A table in the hosts' memory, dense layers whose gradients are added up, minibatches of several sizes. Computing is
    a step whose sums nobody makes.
    """
    for count in (2, 4):
        with tempfile.TemporaryDirectory() as folder, hosts(count, Path(folder), rate=RATE) as made:
            options: Any = {"wrapper": made.wrapper, "environment": {**ENVIRONMENT, "PJRT_NPROC": "2"}}
            options["environment"]["XDG_CACHE_HOME"] = folder
            with started("hosts", count, "benchmarks.exchange", "overlap", **options) as ranks:
                found = ranks("calibrate")[0]
                size = LAYERS * WIDTH * WIDTH * 4 / 1e6
                print(f"{count} hosts at {RATE}/s, {size:.1f} MB of dense gradients; calibration: {found}", flush=True)
                for examples in EXAMPLES:
                    ranks("prepare", examples=examples)
                    times: dict[str, list[float]] = {name: [] for name in (*WAYS, "computing")}
                    for _ in range(TURNS):
                        for name, taken in times.items():
                            taken.append(max(ranks("train", way=name)) / STEPS * 1e3)
                    ms = {name: statistics.median(taken) for name, taken in times.items()}
                    longer = max(ms["computing"], ms["rings"] - ms["computing"])
                    shown = ", ".join(f"{name} {value:.0f}" for name, value in ms.items())
                    share = ms["beside"] / longer
                    print(f"  {examples:5d} examples: {shown} ms; beside is {share:.2f} of the longer part", flush=True)


class _OverlapRank:
    """The steps of one rank."""

    def __init__(self) -> None:
        self._steps: dict[str, Any] = {}
        self._add: Any = None

    def calibrate(self) -> str:
        import autopar
        from autopar.measure.cluster import reductions_here

        autopar.calibrate(again=True)
        return str(reductions_here())

    def prepare(self, examples: int) -> None:
        """Makes a step of each way, and runs it once."""
        import jax

        import autopar
        import autopar.run.hosts
        from autopar.cost.collectives import Reductions
        from autopar.mpi import machines

        def make() -> Any:
            keys = jax.random.split(jax.random.key(0), LAYERS + 1)
            layers = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[1:]]
            return {"words": jax.random.normal(keys[0], (STEP_ROWS, WIDTH)), "layers": layers}

        def loss(state: Any, ids: Any) -> Any:
            x = state["words"][ids]
            for layer in state["layers"]:
                x = x + jax.nn.relu(x @ layer)
            return (x**2).mean()

        def step(state: Any, ids: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state, ids)
            return jax.tree.map(lambda p, g: p - 1e-4 * g, state, gradients), value

        self._ids = (
            np.random.default_rng(0).integers(0, STEP_ROWS, machines.exchange().size * examples).astype(np.int32)
        )
        for name in (*WAYS, "computing"):
            autopar.run.hosts.reductions_here = lambda name=name: Reductions(*WAYS.get(name, ()))
            planned = autopar.parallelize(step, strategy={"words": ("ps", "hosts"), "layers": "allreduce"})
            self._steps[name] = planned, make()
            self.train(name, 2)

    def train(self, way: str, steps: int = STEPS) -> float:
        """Seconds of some steps."""
        import jax

        from autopar.mpi import machines

        here = machines.exchange()
        here.rings_from = WAYS.get(way, (None, None))[0]
        self._add = self._add or here.reduce
        here.reduce = (lambda arrays, *_, **__: list(arrays)) if way == "computing" else self._add
        planned, state = self._steps[way]
        start = time.perf_counter()
        for _ in range(steps):
            state, value = planned(state, self._ids)
            float(value)
        jax.block_until_ready(state)
        taken = time.perf_counter() - start
        self._steps[way] = planned, state
        return taken


def main(address: str, what: str = "") -> None:
    """Runs one rank: of `exchange` or `rings`, or one that serves `overlap` at an address."""
    if what != "overlap":
        {"exchange": exchange_rank, "rings": rings_rank}[address]()
        return
    rank = _OverlapRank()
    serve(address, RANK, {name: getattr(rank, name) for name in ("calibrate", "prepare", "train")})


if __name__ == "__main__":
    main(*sys.argv[1:])
