"""One rank of each system that `benchmarks.hosts` compares: autopar, plain JAX, and PyTorch.

`mpiexec -n 4 python -m benchmarks.hosts_systems ADDRESS SYSTEM FOLDER`. All begin with the same tables, which lie in
FOLDER, see the same batches, and compute the same function: the losses are compared, too.
"""

from __future__ import annotations

import abc
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lookup import CLIP, EPS, IDS, RATE, make_state, plain_step, zipf_ids
from benchmarks.served import serve

#: Optax's, which PyTorch is told.
FIRST_ACCUMULATOR = 0.1

RANK, SIZE = int(os.environ.get("PMI_RANK", "0")), int(os.environ.get("PMI_SIZE", "1"))

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
    import jax

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
        import jax

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

    def stages(self, rows: int, count: int) -> dict[str, list[float]]:
        """Seconds of each stage in each of the next `count` steps."""
        from benchmarks.stage_times import timed

        planned = self.planned[rows]
        with timed(planned.latest.runner, planned.plan.stages) as times:
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
        import jax
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
    names = ("prepare", "turn", "stages", "told")
    serve(address, RANK, {n: getattr(system, n) for n in names if hasattr(system, n)})


if __name__ == "__main__":
    main(*sys.argv[1:])
