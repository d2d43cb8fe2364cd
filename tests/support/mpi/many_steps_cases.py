"""Many steps on ranks with all optimisations at work, prefetch among them: what a rank holds stays as it is."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.backends.host.ranks import Ranks
from tests.support.compilations import finish
from tests.support.mpi.ahead_cases import HOSTS, Batch, Fetches

ROWS, WIDTH, EXAMPLES, LENGTH, CYCLE = 3_000, 64, 64, 8, 10
#: Steps after which is looked. At the first time nothing is compiled any more, and garbage is let go.
EVERY = 100
#: What a rank's memory may grow by from then on; in a step it gets some 100 KB of rows.
TOLERATED_BYTES = 4 << 20
#: Python's own objects may be some more or less.
TOLERATED_OBJECTS = 50

#: Threads of TensorStore and gRPC, which begin more of them under load, and end those that were idle for some 20 s: a
#: case before this one may have saved.
BREATHING = ("ts_pool_worker", "event_engine")

TABLES = ("plain", "bags", "moved", "waiting")


def _batches(count: int) -> Iterator[Batch]:
    """Yields batches of which each tenth has many more distinct ids than the others."""
    for k in range(count):
        rng = np.random.default_rng(k % (CYCLE * CYCLE))
        ids = rng.zipf(1.3, (EXAMPLES, LENGTH)) if k % CYCLE else rng.integers(0, ROWS, (EXAMPLES, LENGTH))
        yield {"ids": (ids % ROWS).astype(np.int32), "y": rng.normal(size=EXAMPLES).astype(np.float32)}


def _made() -> tuple[Any, Any]:
    """Returns a step whose owners compute with rows, add up bags and clip, and its first state."""
    kinds = {"adagrad": optax.adagrad(0.1), "adamw": optax.adamw(1e-2)}
    labels = {"w": "adagrad", "tables": dict.fromkeys(TABLES, "adagrad") | {"waiting": "adamw"}}
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.partition(kinds, labels))

    @autopar.parallelize(strategy={"params/tables/*": HOSTS})
    def train_step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            tables, ids = params["tables"], batch["ids"]
            moved = tables["moved"][ids][..., : WIDTH // 4].astype(jnp.bfloat16).astype(jnp.float32)
            means = [jnp.tanh(rows).mean(1) for rows in (tables["plain"][ids], moved, tables["waiting"][ids])]
            hidden = jnp.concatenate([*means, tables["bags"][ids].sum(1)], -1)
            return ((jnp.tanh(hidden @ params["w"]).sum(-1) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, slots = update.update(grads, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, loss

    rng = np.random.default_rng(1)
    params = {
        "w": jnp.asarray(rng.normal(size=(3 * WIDTH + WIDTH // 4, WIDTH)) / 16, jnp.float32),
        "tables": {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for name in TABLES},
    }
    return train_step, {"params": params, "slots": update.init(params)}


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def _threads() -> int:
    names = list[str]()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((thread / "comm").read_text().strip())
    return sum(name not in BREATHING for name in names)


def _held(step: Any) -> dict[str, int]:
    """Returns what this rank holds."""
    finish()  # what is compiled beside the steps is there
    step.latest.runner.ranks.in_thread(lambda: None)()  # it lets go of its last work
    gc.collect()
    buffers = step.latest.runner.ranks.buffers
    return {
        "bytes": _resident_bytes(),
        "objects": len(gc.get_objects()),
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "threads of all kinds": _threads(),
        "buffers": buffers.nbytes,
    }


@mock.patch.object(Ranks, "hides_exchanges", staticmethod(lambda exchange: True))
def _check(count: int) -> None:
    step, state = _made()
    held = list[dict[str, int]]()
    with Fetches() as fetches:
        for k, batch in enumerate(autopar.shard(_batches(count + 2), step=step)):
            state, loss = step(state, batch)
            float(loss)
            if k < count and (k + 1) % EVERY == 0:
                held.append(_held(step))
    # Rows of two tables go ahead, some of them late; those of the third are fetched when they are needed.
    assert fetches.late >= 2 * 2 * 0.8 * count, (fetches.whole, fetches.late)
    grown = {what: n - held[1][what] for what, n in held[-1].items()}
    assert grown.pop("bytes") < TOLERATED_BYTES and grown.pop("objects") < TOLERATED_OBJECTS, held
    assert all(n <= 0 for n in grown.values()), held


def check_some_steps() -> None:
    _check(300)


def check_many_steps() -> None:
    _check(5_000)
