"""A training step on hosts at 1 Gbit/s: gradients added up by MPI, in rings, and in rings beside the backward pass.

`python -m benchmarks overlap`: hosts are network namespaces that share the machine's cores. A table in their memory,
and dense layers whose gradients are added up; minibatches of several sizes. The ways take turns in the same processes,
and a way's time is the median of its turns, a turn's that of its slowest rank. Computing is a step whose sums nobody
makes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.served import serve, started
from tests.support.mpi.namespaces import ENVIRONMENT, hosts

RATE, STEPS, TURNS = "1gbit", 8, 5
ROWS, WIDTH, LAYERS = 100_000, 768, 6
EXAMPLES = (64, 256, 1024)
#: Bytes from which on sums go in rings, and beside the backward pass.
WAYS: Mapping[str, tuple[int | None, int | None]] = {"MPI": (None, None), "rings": (0, None), "beside": (0, 1 << 20)}


def overlap() -> None:
    """Each way's milliseconds a step."""
    for count in (2, 4):
        with tempfile.TemporaryDirectory() as folder, hosts(count, Path(folder), rate=RATE) as made:
            options: Any = {"wrapper": made.wrapper, "environment": {**ENVIRONMENT, "PJRT_NPROC": "2"}}
            options["environment"]["XDG_CACHE_HOME"] = folder
            with started("hosts", count, "benchmarks.overlap", **options) as ranks:
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


class _Rank:
    """What a rank is asked for."""

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
        import numpy as np

        import autopar
        import autopar.run.hosts
        from autopar.cost.collectives import Reductions
        from autopar.mpi.machines import exchange

        def make() -> Any:
            keys = jax.random.split(jax.random.key(0), LAYERS + 1)
            layers = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[1:]]
            return {"words": jax.random.normal(keys[0], (ROWS, WIDTH)), "layers": layers}

        def loss(state: Any, ids: Any) -> Any:
            x = state["words"][ids]
            for layer in state["layers"]:
                x = x + jax.nn.relu(x @ layer)
            return (x**2).mean()

        def step(state: Any, ids: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state, ids)
            return jax.tree.map(lambda p, g: p - 1e-4 * g, state, gradients), value

        self._ids = np.random.default_rng(0).integers(0, ROWS, exchange().size * examples).astype(np.int32)
        for name in (*WAYS, "computing"):
            autopar.run.hosts.reductions_here = lambda name=name: Reductions(*WAYS.get(name, ()))
            planned = autopar.parallelize(step, strategy={"words": ("ps", "hosts"), "layers": "allreduce"})
            self._steps[name] = planned, make()
            self.train(name, 2)

    def train(self, way: str, steps: int = STEPS) -> float:
        """Seconds of some steps."""
        import jax

        from autopar.mpi.machines import exchange

        here = exchange()
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


def main() -> None:
    """What each rank does."""
    from autopar.mpi.machines import exchange

    rank = _Rank()
    commands = {"calibrate": rank.calibrate, "prepare": rank.prepare, "train": rank.train}
    serve(sys.argv[1], exchange().rank, commands)


if __name__ == "__main__":
    main()
