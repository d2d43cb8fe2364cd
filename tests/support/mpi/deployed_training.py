"""A training as the files of deploy/ start one, with `--checkpoint FOLDER`: what the processes of `test_deploy` run, as
ranks of MPI and as processes of `jax.distributed` alone.

Environment: DIE, "rank:step": that rank kills itself before that step, if the training began before it; ENDLESS: it
trains until it is told to end.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

BATCH, STEPS = 8, 4


def make_state() -> Any:
    return jnp.ones(3)


@autopar.parallelize(strategy="allreduce")
def train_step(state: Any, batch: Any) -> Any:
    return state - 0.1 * jax.grad(lambda w: ((batch @ w) ** 2).mean())(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    folder = parser.parse_args().checkpoint
    data = np.random.default_rng(0).normal(size=(20 * BATCH, 3)).astype(np.float32)
    batches = autopar.shard(data, batch_size=BATCH, epochs=None)
    shapes = jax.ShapeDtypeStruct((BATCH, 3), np.float32)
    process, (dying, at) = jax.process_index(), map(int, os.environ.get("DIE", "-1:-1").split(":"))
    with autopar.Checkpointer(folder, step=train_step, batch=shapes, every=1, async_save=False) as checkpoints:
        state, batches = checkpoints.resume(make_state, batches=batches)
        began = checkpoints.steps
        print(f"process {process} of {jax.process_count()} begins at {began}", flush=True)
        try:
            while checkpoints.steps < STEPS or "ENDLESS" in os.environ:
                if process == dying and checkpoints.steps == at > began:
                    os.kill(os.getpid(), signal.SIGKILL)
                state = train_step(state, next(batches))
                checkpoints.step(state)
                time.sleep(0.05)
        finally:
            print(f"process {process} ends at {checkpoints.steps}", flush=True)


if __name__ == "__main__":
    main()
