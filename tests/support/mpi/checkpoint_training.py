"""A training with a table and a dense weight on hosts that saves every other step, and may be told to die: what the
ranks of `test_checkpoint` run.

Environment: FOLDER; STEPS, how many in all; RESULT, a file for the state at the end; ALSO, a step whose state is
written as well, to a file named by RESULT and the step; DIE, "where:rank:step": the rank kills itself with -9 before
that step, or in the save after it ("rows": in the middle of its files, "commit": before what was written becomes the
checkpoint, "clean": right after). Or KILLS, how often a rank is killed in all, at moments that chance chooses, while
`python -m autopar launch --max-restarts` starts the ranks again. BESIDE: `Checkpointer` saves, beside the training.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.mpi.world import world
from autopar.state import checkpoint

ROWS, WIDTH, BATCH = 101, 3, 12
#: Steps from a start on in which a rank may be killed by chance.
WITHIN = 6


def make_state(key: Any) -> Any:
    params = {"emb": jax.random.normal(key, (ROWS, WIDTH)), "w": jnp.ones((WIDTH,))}
    return {"params": params, "sums": jax.tree.map(lambda x: jnp.full_like(x, 0.1), params), "step": jnp.int32(0)}


@autopar.parallelize(strategy={"params/emb": ("ps", "hosts"), "params/w": ("ps", "hosts")})
def train_step(state: Any, batch: Any) -> Any:
    """Adagrad, clipped by the norm over everything."""

    def loss(params: Any) -> Any:
        return ((params["emb"][batch["ids"]] @ params["w"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
    sums = jax.tree.map(lambda s, g: s + g**2, state["sums"], grads)
    params = jax.tree.map(lambda p, g, s: p - 0.1 * g / jnp.sqrt(s), state["params"], grads, sums)
    return {"params": params, "sums": sums, "step": state["step"] + 1}, value


class Death:
    """Where this rank is to die."""

    def __init__(self, told: str) -> None:
        where, rank, step = told.split(":") if told else ("", "-1", "0")
        self.where = where if int(rank) == world().rank else ""
        self.step = int(step)
        self.now = 0

    def comes(self, where: str) -> None:
        if self.where == where and self.now == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_in_saving(self) -> None:
        """Be called where a save is."""
        write_rows, replace = checkpoint.write_rows, os.replace

        def write(version: Path, *args: Any) -> Any:
            written = write_rows(version, *args)
            if version.parent.name.startswith("step-"):  # by a thread: the training is further
                self.now = int(version.parent.name.removeprefix("step-")) - 1
            self.comes("rows")  # the rank's first array is there, others aren't
            return written

        def put(old: Any, new: Any) -> None:
            self.comes("commit")
            replace(old, new)
            self.comes("clean")

        checkpoint.write_rows, os.replace = write, put


class RandomDeath(Death):
    """Kills one of the ranks once, in one of the next few steps, or in the save after it.

    Args:
      kills: How often that is done in a training.
      tally: A file that has a byte for each rank that was killed.
    """

    def __init__(self, kills: int, tally: Path) -> None:
        super().__init__("")
        self._tally = tally
        killed = world().comm.bcast(tally.stat().st_size if tally.exists() else 0)
        self._chance = random.Random(killed)
        self._is_meant = killed < kills and self._chance.randrange(world().size) == world().rank
        self._steps_left = self._chance.randint(1, WITHIN)
        self._seen_s = time.monotonic()

    def comes(self, where: str) -> None:
        if where != "step":
            return
        before_s, self._seen_s = self._seen_s, time.monotonic()
        self._steps_left -= 1
        if self._is_meant and self._steps_left == 0:
            timer = threading.Timer(self._chance.uniform(0, 1.5 * (self._seen_s - before_s)), self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        with self._tally.open("a") as tally:
            tally.write(".")
        os.kill(os.getpid(), signal.SIGKILL)


def _trained(folder: Path, batches: Any, batch: Any, death: Death, steps: int) -> Any:
    try:
        state, position = autopar.restore(folder, step=train_step, batch=batch)
        batches.restore(position)
    except autopar.MissingCheckpointError:
        state = autopar.init(make_state, jax.random.key(0), step=train_step, batch=batch)
    print(f"begins at {int(state['step'])}")
    for step in range(int(state["step"]), steps):
        death.now = step
        death.comes("step")
        state, _ = train_step(state, next(batches))
        if os.environ.get("ALSO") == str(step + 1):
            _write(state, f"{os.environ['RESULT']}-{step + 1}.npz")
        if (step + 1) % 2 == 0:
            autopar.save(folder, state, position=batches.state())
    return state


def _trained_beside(folder: Path, batches: Any, batch: Any, death: Death, steps: int) -> Any:
    with autopar.Checkpointer(folder, step=train_step, batch=batch, every=2) as checkpoints:
        state, batches = checkpoints.resume(make_state, jax.random.key(0), batches=batches)
        print(f"begins at {checkpoints.steps}")
        while checkpoints.steps < steps:
            state, _ = train_step(state, next(batches))
            checkpoints.step(state)
    return state


def _write(state: Any, file: str) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    if world().rank == 0:
        np.savez(file, *leaves)


def main() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, 10 * BATCH).astype(np.int32)
    data = {"ids": ids, "y": rng.normal(size=ids.size).astype(np.float32)}
    batches = autopar.shard(data, batch_size=BATCH, epochs=None, shuffle=3)
    batch = {"ids": jax.ShapeDtypeStruct((BATCH,), np.int32), "y": jax.ShapeDtypeStruct((BATCH,), np.float32)}
    folder, kills = Path(os.environ["FOLDER"]), int(os.environ.get("KILLS", "0"))
    death = RandomDeath(kills, folder.with_name("kills")) if kills else Death(os.environ.get("DIE", ""))
    death.wait_in_saving()
    trained = _trained_beside if os.environ.get("BESIDE") else _trained
    state = trained(folder, batches, batch, death, int(os.environ["STEPS"]))
    _write(state, os.environ["RESULT"])


if __name__ == "__main__":
    main()
