"""What every rank does in `test_bytes.py`: exchanges and steps with tables on hosts, and the bytes that they sent.

`mpiexec -n 3 python -m tests.support.mpi.bytes_cases FOLDER EACH ROWS DIM WIDTH EXAMPLES LENGTH`: writes
FOLDER/RANK.json with, for each phase,
what was counted by `Exchange.sent_bytes` and `near_bytes`, and at the interface `eth0`. Ranks pretend
to be on machines with EACH of them; 0: on one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.mpi import machines
from autopar.mpi.machines import exchange
from benchmarks.network import sent_by_interface

#: The step whose bytes are counted; those before it plan, compile and grow.
COUNTED = 2


@dataclass(frozen=True)
class Sizes:
    """A table [rows, dim], a dense parameter [dim, width], and a batch of [examples, length] ids over all ranks."""

    rows: int
    dim: int
    width: int
    examples: int
    length: int

    def ids(self, seed: int) -> np.ndarray:
        """int32[examples, length], any row as likely as any other."""
        return np.random.default_rng(seed).integers(0, self.rows, (self.examples, self.length), dtype=np.int32)


def train_step(state: dict[str, jax.Array], ids: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """SGD, clipped by the norm over the dense and the sparse gradient together."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        rows = jnp.tanh(params["emb"][ids])  # by themselves: owners would add them up
        return jnp.mean((rows.mean(1) @ params["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
    scale = jnp.minimum(1.0, 1.0 / norm)
    return {k: state[k] - 0.1 * scale * grads[k] for k in state}, loss


class Counters:
    """What this rank has sent, counted from one phase to the next."""

    def __init__(self) -> None:
        self.exchange = exchange()
        self.found: dict[str, Any] = {}

    def phase(self, name: str, run: Callable[[], object]) -> None:
        """Everyone begins together, and nobody's messages of another phase count."""
        self._meet()
        before, near = dict(self.exchange.sent_bytes), dict(self.exchange.near_bytes)
        wire = sent_by_interface()
        run()
        sent = {k: v - before[k] for k, v in self.exchange.sent_bytes.items()}
        within = {k: v - near[k] for k, v in self.exchange.near_bytes.items() if k in ("ids", "rows", "gradients")}
        self._meet()
        after = sent_by_interface()
        on_wire = None if wire is None or after is None else after - wire
        self.found[name] = {"sent": sent, "near": within, "wire": on_wire}

    def _meet(self) -> None:
        self.exchange.gather(np.zeros(1))


def main(folder: str, each: str, *numbers: str) -> None:
    """A rank."""
    if int(each):
        machines.machine_name = lambda: f"machine {jax.process_index() // int(each)}"
    sizes = Sizes(*map(int, numbers))
    counters = Counters()
    count_exchanges(counters, sizes)
    count_step(counters, sizes)
    Path(folder, f"{counters.exchange.rank}.json").write_text(json.dumps(counters.found))


def count_exchanges(counters: Counters, sizes: Sizes) -> None:
    """Each kind by itself, of what the step's own exchanges have."""
    here = counters.exchange
    gradients = np.ones((sizes.dim, sizes.width), np.float32)
    counters.phase("reduce", lambda: here.reduce([gradients]))
    share = -(-sizes.rows // here.size)
    own = np.array_split(sizes.ids(0), here.size)[here.rank]
    # Places as the plan distributes rows cyclically: row r is on rank r mod N.
    indices = np.unique(own % here.size * share + own // here.size).astype(np.int32)
    requested = here.ask(indices, share)
    table = np.ones((requested.rows.size, sizes.dim), np.float32)
    counters.phase("fetch", lambda: here.fetch(requested, table))
    sums = np.ones((indices.size, sizes.dim), np.float32)
    counters.phase("deliver", lambda: here.deliver(requested, sums))


def count_step(counters: Counters, sizes: Sizes) -> None:
    """A whole step."""
    step = autopar.parallelize(train_step, strategy=("ps", "hosts"))
    state: Any = {"emb": jnp.full((sizes.rows, sizes.dim), 0.1), "w": jnp.full((sizes.dim, sizes.width), 0.1)}
    for seed in range(COUNTED):
        state, _ = step(state, sizes.ids(seed))

    def counted() -> None:
        nonlocal state
        state, loss = step(state, sizes.ids(COUNTED))
        assert np.isfinite(float(loss))

    counters.phase("step", counted)
    assert step.plan is not None and step.plan.reduction_backend == "mpi", step.plan and step.plan.reduction_backend


if __name__ == "__main__":
    main(*sys.argv[1:])
