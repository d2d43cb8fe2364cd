"""Is the method that "auto" takes the fastest one, and does a step take as long as is predicted?

Twenty-four cases on several devices: rows, width and ids of a table; a lookup, clipping and Adagrad, by themselves (so
that the methods differ by all that they do) or with an MLP. `python -m benchmarks choice` starts this file in a process
of its own: JAX fixes the number of devices at its start.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from benchmarks.lookup import bare_step, make_state, plain_step, transformation, zipf_batches
from benchmarks.timing import Runner, alternate

DEVICES = 4
METHODS = ("ps", "allgather", "allreduce_rows", "allreduce")
#: V, D, ids of a device, width of the MLP (0: none).
CASES = tuple(itertools.product((2_000, 40_000, 400_000), (16, 128), (64, 1024), (0, 256)))
#: A chosen method may take this much longer than the fastest one.
TOLERATED = 1.25


def choice() -> None:
    """Runs this module with several CPU devices."""
    subprocess.run([sys.executable, "-m", "benchmarks.choice"], check=True)


def _state(rows: int, dim: int, hidden: int) -> dict[str, Any]:
    if hidden:
        return make_state(rows, dim, hidden)
    params = {"emb": jax.random.normal(jax.random.key(0), (rows, dim)) * 0.01}
    return {"params": params, "opt": transformation().init(params)}


def measure(rows: int, dim: int, ids: int, hidden: int, rounds: int = 7) -> tuple[float, float]:
    """Time of the chosen method over the fastest one's, and its predicted time over its own."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    step = plain_step if hidden else bare_step
    batches = zipf_batches(rows, (DEVICES * ids // 16, 16))
    data = NamedSharding(mesh, P("data"))

    def batch(k: int) -> Any:
        return jax.device_put(batches(k % 10), data)

    def state() -> Any:
        return _state(rows, dim, hidden)

    plan = autopar.plan(autopar.parallelize(step, mesh=mesh), state(), batch(0))
    (table,) = plan.tables
    predicted = {m: plan.seconds + table.seconds[m] - table.seconds[table.method] for m in METHODS}
    runners = {m: Runner(autopar.parallelize(step, strategy=m, mesh=mesh), state()) for m in METHODS}
    first = {m: min(runner.seconds(batch(k)) for k in range(4)) for m, runner in runners.items()}
    # What is far behind isn't timed beside the others: a step over all rows slows down whatever comes after it.
    times = dict(first)
    close = {m: runner for m, runner in runners.items() if first[m] < 4 * min(first.values())}
    del runners
    turns = {m: int(np.clip(0.1 / first[m], 4, 64)) for m in close}
    # The best turn of each: a busy neighbour on the machine slows down what waits for others most.
    times |= {m: min(found) for m, found in alternate(close, batch, rounds, turns=turns).items()}
    best = min(times, key=lambda m: times[m])
    regret, error = times[table.method] / times[best], predicted[table.method] / times[table.method]
    shown = ", ".join(f"{m} {1e3 * times[m]:.2f} ({1e3 * predicted[m]:.2f})" for m in METHODS)
    print(
        f"V={rows:,} D={dim} ids={ids} a device{f' MLP {hidden}' if hidden else ''}: {table.method}, {regret:.2f} of "
        f"{best}'s time, predicted {error - 1:+.0%}; ms (predicted): {shown}",
        flush=True,
    )
    return regret, error


def main() -> None:
    """All cases."""
    regrets, errors = zip(*(measure(*case) for case in CASES), strict=True)
    good = sum(r <= TOLERATED for r in regrets)
    print(
        f"the chosen method is the fastest, or within {TOLERATED - 1:.0%}, in {good} of {len(CASES)} cases; worst "
        f"{max(regrets):.2f}. Its step's time is predicted with a median error of "
        f"{np.median([abs(e - 1) for e in errors]):.0%}; at most {max(abs(e - 1) for e in errors):.0%}"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
