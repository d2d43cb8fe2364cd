"""Tables in the memory of the hosts, over four processes: autopar against PyTorch DistributedDataParallel, and against
plain JAX data parallelism across the same number of processes; where autopar's step goes; and binding ranks to cores.

Each system's ranks are processes of their own (`benchmarks.ranks`), which begin with the same tables, see the same
batches and compute the same function: the losses are compared, too. They take turns in one run; what counts is the
median of the ratios turn by turn. PyTorch is a benchmark-only extra, `bench-torch`.
"""

from __future__ import annotations

import abc
import contextlib
import cProfile
import importlib.util
import math
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks.lookup import CLIP, EPS, IDS, RATE, D, make_state, plain_step, zipf_batches, zipf_ids
from benchmarks.ranks import RANK, SIZE, Ranks, serve, started
from benchmarks.timing import median_ms, ratio

if TYPE_CHECKING:
    from autopar.run.hosts import HostRunner

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
    with started(name, RANKS, "benchmarks.hosts", name, folder, environment=environment) as ranks:
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
        f"  autopar compiled {told['compilations']} times; dense gradients: {told['reduction_backend']}; "
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
    print(f"autopar's segments at V={rows:,}, {RANKS} processes, medians of {steps} steps:")
    print("\n".join(table(planned("segments", rows=rows, count=steps))), flush=True)


def tiny(rows: int = 1_000, dim: int = 8, hidden: int = 16, ids: tuple[int, int] = (8, 8), steps: int = 400) -> None:
    """A step of a tiny model in one process, everything included: its time is autopar's own."""
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
    """Segments, and the functions that a step's time goes to."""
    with timed(planned.latest.runner) as times:
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


#: How ranks are bound -> environment and mpirun's flags.
BINDINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "unbound": ({"AUTOPAR_BIND": "none"}, []),
    "bound by autopar": ({}, []),
    "bound by mpirun": ({}, ["-bind-to", "core"]),
}


def binding(rows: int = 100_000, steps: int = 40, rounds: int = 8) -> None:
    """The step of `hosts` by ranks that take all cores of the machine, started by mpirun: a rank on each core, and two.

    Unbound, bound by autopar and bound by mpirun take turns, whose second half is timed.
    """
    from autopar.mpi.limits import cores

    for count in (cores(), 2 * cores()):
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder, contextlib.ExitStack() as stack:
            write_table(Path(folder, "table.npy"), rows)
            systems = {
                name: stack.enter_context(
                    started(name, count, "benchmarks.hosts", "autopar", folder, flags=flags, environment=environment)
                )
                for name, (environment, flags) in BINDINGS.items()
            }
            for ranks in systems.values():
                ranks("prepare", rows=rows)
                ranks("turn", rows=rows, count=steps)
            seconds: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(rounds):
                for name, ranks in systems.items():
                    slowest = np.max([answer[0] for answer in ranks("turn", rows=rows, count=steps)], axis=0)
                    seconds[name].append(float(np.median(slowest[steps // 2 :])))
            shown = ", ".join(f"{name} {median_ms(found):.1f} ms" for name, found in seconds.items())
            gain = ratio(seconds["unbound"], seconds["bound by autopar"])
            print(f"{count} ranks on {cores()} cores: {shown}; unbound / bound by autopar {gain:.2f}", flush=True)


# --- one rank of each system ---

#: Optax's, which PyTorch is told.
FIRST_ACCUMULATOR = 0.1

#: Ids of this rank -> a step on them; it returns the loss, and what must be waited for has been.
Step = Callable[[np.ndarray], float]


class System(abc.ABC):
    """Steps by the number of the table's rows, and turns of them.

    `by_lookups`: with nothing computed once for each distinct row, which is autopar's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: dict[tuple[int, bool], Step] = {}
        self.done: dict[tuple[int, bool], int] = {}

    def prepare(self, rows: int, by_lookups: bool = False) -> None:
        """Makes the state with a table of so many rows."""
        key = rows, by_lookups
        self.steps[key], self.done[key] = self.make(rows), 0

    @abc.abstractmethod
    def make(self, rows: int) -> Step:
        """A step with a state of its own."""
        ...

    def turn(self, rows: int, count: int, by_lookups: bool = False) -> tuple[list[float], list[float], list[float]]:
        """The next `count` steps: (seconds of each, seconds of processor time of each, loss of each)."""
        key = rows, by_lookups
        first, step = self.done[key], self.steps[key]
        self.done[key] += count
        batches = [zipf_ids(rows, (SIZE * IDS[0], IDS[1]), seed) for seed in range(first, first + count)]
        seconds, busy, losses = [], [], []
        for ids in batches:
            start, before = time.perf_counter(), time.process_time()
            losses.append(step(ids))
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - before)
        return seconds, busy, losses

    def table(self, rows: int) -> np.ndarray:
        """The first rows of the table that all systems begin with, read from the disk where it is used."""
        return np.load(self.folder / "table.npy", mmap_mode="r")[:rows]

    @staticmethod
    def own(ids: np.ndarray) -> np.ndarray:
        """This rank's part of a global batch."""
        return np.split(ids, SIZE)[RANK]


def _join() -> None:
    import autopar  # noqa: F401  # under a launcher it may have started JAX's processes already

    if not jax.distributed.is_initialized():
        jax.distributed.initialize(cluster_detection_method="mpi4py")


class Planned(System):
    """autopar, the table in the memory of the hosts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        _join()
        from autopar.passes import once_per_row

        self.passes = once_per_row
        self.moved = once_per_row._MOVED
        self.planned: dict[int, Any] = {}

    def turn(self, rows: int, count: int, by_lookups: bool = False) -> tuple[list[float], list[float], list[float]]:
        """A step is compiled when it is first called, or needs more room."""
        self.passes._MOVED = math.inf if by_lookups else self.moved  # a benchmark may look inside
        return super().turn(rows, count, by_lookups)

    def make(self, rows: int) -> Step:
        import autopar

        planned = self.planned[rows] = autopar.parallelize(plain_step, strategy=("ps", "hosts"))
        # Leaves that no process has whole: the table is on the disk, and a slot is one number.
        state = make_state(8)
        accumulator, *slots = jax.tree.leaves(state["opt"])
        state["params"]["emb"] = self.table(rows)
        whole = np.broadcast_to(np.asarray(accumulator)[:1], (rows, accumulator.shape[1]))
        state["opt"] = jax.tree.unflatten(jax.tree.structure(state["opt"]), [whole, *slots])

        def step(ids: np.ndarray) -> float:
            nonlocal state
            state, loss = planned(state, {"ids": ids})
            jax.block_until_ready((state, loss))
            return float(loss)

        return step

    def segments(self, rows: int, count: int) -> dict[str, list[float]]:
        """Seconds of each segment in each of the next `count` steps."""
        planned = self.planned[rows]
        with timed(planned.latest.runner) as times:
            batches = [zipf_ids(rows, (SIZE * IDS[0], IDS[1]), 10_000 + k) for k in range(count)]
            for ids in batches:
                start = time.perf_counter()
                self.steps[rows, False](ids)
                times.finish(time.perf_counter() - start)
        return times.seconds

    def told(self, rows: int) -> dict[str, Any]:
        """About the plan and what was sent."""
        planned = self.planned[rows]
        runner = planned.latest.runner
        sent = dict(runner.ranks.exchange.sent_bytes)
        polling = runner.ranks.exchange.polling
        found = {
            "reduction_backend": planned.plan.reduction_backend,
            "compilations": runner.compilations,
            "sent": sent,
            "polling": polling,
        }
        return {**found, "once_per_row": runner.once_per_row and str(runner.once_per_row)}


class Plain(System):
    """Plain JAX: the same step under jit, state on all devices, batches spread, gradients reduced by XLA over gloo."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        _join()

    def make(self, rows: int) -> Step:
        from jax.sharding import AxisType, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((SIZE,), ("data",), axis_types=(AxisType.Auto,))
        everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        state = make_state(rows)
        state["params"]["emb"] = np.array(self.table(rows))
        state = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x), np.shape(x)), state
        )
        jitted = jax.jit(plain_step, donate_argnums=0, out_shardings=(everywhere, everywhere))

        def step(ids: np.ndarray) -> float:
            nonlocal state
            batch = {"ids": jax.make_array_from_process_local_data(spread, self.own(ids), ids.shape)}
            state, loss = jax.block_until_ready(jitted(state, batch))
            return float(loss)

        return step


class Torch(System):
    """PyTorch DistributedDataParallel on gloo, an embedding with sparse gradients, Adagrad on its touched rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torch

        torch.set_num_threads(1)  # as torchrun has it: the ranks share the cores
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=RANK, world_size=SIZE)

    def make(self, rows: int) -> Step:
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self, emb: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> None:
                super().__init__()
                self.emb = nn.Embedding(*emb.shape, sparse=True, _weight=torch.from_numpy(np.array(emb)))
                self.w1, self.w2 = (nn.Parameter(torch.from_numpy(np.array(w))) for w in (w1, w2))

            def forward(self, ids: Any) -> Any:
                rows = self.emb(ids)
                hidden = torch.relu(rows @ self.w1) @ self.w2
                return torch.mean((hidden - rows) ** 2) + torch.mean(hidden**2)

        dense = make_state(8)["params"]
        model = Model(self.table(rows), dense["w1"], dense["w2"])
        spread = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adagrad(
            model.parameters(), lr=RATE, initial_accumulator_value=FIRST_ACCUMULATOR, eps=EPS
        )

        def clip() -> None:
            """By the norm of dense and sparse gradients together, duplicates summed first, as Optax has it."""
            values = []
            for p in model.parameters():
                if p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
                values.append(p.grad._values() if p.grad.is_sparse else p.grad)
            norm = torch.sqrt(sum(torch.sum(v * v) for v in values))
            if norm >= CLIP:
                for v in values:
                    v.mul_(CLIP / norm)

        def step(ids: np.ndarray) -> float:
            optimizer.zero_grad(set_to_none=True)
            loss = spread(torch.from_numpy(self.own(ids)))
            loss.backward()
            clip()
            optimizer.step()
            return float(loss)

        return step

    def turn(self, rows: int, count: int, by_lookups: bool = False) -> tuple[list[float], list[float], list[float]]:
        """A rank's loss is that of its own examples: the mean of all ranks' is told."""
        import torch

        seconds, busy, losses = super().turn(rows, count, by_lookups)
        whole = torch.tensor(losses, dtype=torch.float64)
        torch.distributed.all_reduce(whole)
        return seconds, busy, (whole / SIZE).tolist()


SYSTEMS: dict[str, type[System]] = {"autopar": Planned, "plain JAX": Plain, "PyTorch": Torch}


def main(address: str, name: str, folder: str) -> None:
    """A rank's life."""
    system = SYSTEMS[name](Path(folder))
    names = ("prepare", "turn", "segments", "told")
    serve(address, RANK, {n: getattr(system, n) for n in names if hasattr(system, n)})


# --- seconds of each segment of a step with tables on hosts: a `SegmentedProgram`'s actions, timed from outside ---
#
# Results of a segment's compiled program are waited for before the next one begins, so that a program's time is its
# own; a step then takes a little longer than it does untimed. An exchange's time holds the wait for the slowest rank:
# the least of all ranks' times for the same segment of the same step is what it costs once everyone is there.

#: What is left of a step's time: finding the plan, placing arguments, handing on results.
AROUND = "around the segments"


class SegmentTimes:
    """Seconds by segment, a list of all steps for each.

    Args:
      programs: The segments of each of a step's programs, in words; a step runs one of these.
    """

    def __init__(self, programs: Iterable[Sequence[str]]) -> None:
        rows = (row for segments in programs for row in numbered(segments))
        self.seconds: dict[str, list[float]] = {row: [] for row in (*rows, AROUND)}
        #: Of the step that is under way.
        self._step = dict.fromkeys(self.seconds, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """A segment of this step took so long; where the step went on in another program, once more."""
        self._step[name] += seconds

    def finish(self, step_s: float) -> None:
        """A step is over; `step_s` is what all of it took, in seconds."""
        self._step[AROUND] = step_s - sum(self._step.values())
        for name, seconds in self._step.items():
            self.seconds[name].append(seconds)
        self._step = dict.fromkeys(self.seconds, 0.0)


@contextlib.contextmanager
def timed(runner: HostRunner) -> Iterator[SegmentTimes]:
    """Times the segments of the runner's steps, in all programs that it has; no other may be compiled meanwhile."""
    programs: list[Any] = list(runner._programs.values())  # a benchmark may look inside
    found = SegmentTimes(each.segments for each in programs)
    actions = [each._actions for each in programs]
    for each in programs:
        pairs = zip(numbered(each.segments), each._actions, strict=True)
        each._actions = [_timed(action, name, found) for name, action in pairs]
    try:
        yield found
    finally:
        assert len(programs) == len(runner._programs), "compiled again while its segments were timed"
        for each, before in zip(programs, actions, strict=True):
            each._actions = before


def _timed(action: Callable[[Any], None], name: str, times: SegmentTimes) -> Callable[[Any], None]:
    def act(step: Any) -> None:
        start = time.perf_counter()
        try:
            action(step)
            jax.block_until_ready(
                [v for v in step.values.values() if isinstance(v, jax.Array) and not v.is_deleted()],
            )
        finally:
            times.add(name, time.perf_counter() - start)

    return act


def numbered(segments: Sequence[str]) -> list[str]:
    """Returns each segment with its number and what it is for, told by its position: "device program of 5 equations"
    before the route finds the ids."""
    names = []
    kinds = [segment.split()[0] for segment in segments]
    for k, (kind, segment) in enumerate(zip(kinds, segments, strict=True)):
        meaning = ""
        if kind == "device":
            delivered = "deliver" in kinds[:k]
            meaning = "ids" if "route" not in kinds[:k] else "dense update" if delivered else "forward and backward"
        elif kind == "owner":
            meaning = "norm" if "reduce" in kinds[k:] else "row update"
        names.append(f"{k:2} {segment}: {meaning}" if meaning else f"{k:2} {segment}")
    return names


def table(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> list[str]:
    """Lines: medians over the steps, in ms, of the fastest rank in each step and of all ranks; of segments that ran."""
    lines = [f"  {'segment':46} {'fastest rank':>12} {'all ranks':>12}  ms"]
    fastest_total = mean_total = 0.0
    for name in by_rank[0]:
        seconds = np.array([rank[name] for rank in by_rank]) * 1e3
        if not seconds.any():
            continue
        fastest, mean = float(np.median(seconds.min(0))), float(np.median(seconds.mean(0)))
        fastest_total, mean_total = fastest_total + fastest, mean_total + mean
        lines.append(f"  {name:46} {fastest:12.3f} {mean:12.3f}")
    return [*lines, f"  {'sum':46} {fastest_total:12.3f} {mean_total:12.3f}"]


if __name__ == "__main__":
    main(*sys.argv[1:])
