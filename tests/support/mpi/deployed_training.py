"""A training as the files of deploy/ start one, with `--checkpoint FOLDER`: what the processes of `test_deploy` run, as
ranks of MPI and as processes of `jax.distributed` alone. It saves after each step and at SIGTERM, and goes on there.

Environment: DIE, "rank:step": that rank kills itself before that step, if the training began before it; ENDLESS: it
trains until it is told to end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

BATCH, STEPS = 8, 4


@autopar.parallelize(strategy="allreduce")
def train_step(state: Any, batch: Any) -> Any:
    grad = jax.grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad, "step": state["step"] + 1}, grad.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    folder = parser.parse_args().checkpoint
    data = np.random.default_rng(0).normal(size=(20 * BATCH, 3)).astype(np.float32)
    batches = autopar.shard(data, batch_size=BATCH, epochs=None)
    first = {"w": jnp.ones(3), "step": jnp.int32(0)}
    try:
        state, position = autopar.restore(folder, first)
        batches.restore(position)
    except autopar.MissingCheckpointError:
        state = first
    began = int(state["step"])
    print(f"process {jax.process_index()} of {jax.process_count()} begins at {began}", flush=True)
    rank, at = map(int, os.environ.get("DIE", "-1:-1").split(":"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for batch in batches:
            step = int(state["step"])
            if step >= STEPS and "ENDLESS" not in os.environ:
                break
            if step == at and began < at and rank == jax.process_index():
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = train_step(state, batch)
            autopar.save(folder, state, position=batches.state())
            time.sleep(0.05)
    except KeyboardInterrupt:
        autopar.save(folder, state, position=batches.state())
        print(f"process {jax.process_index()} was told to end at {int(state['step'])}", flush=True)
        sys.exit(128 + signal.SIGTERM)
    print(f"process {jax.process_index()} ends", flush=True)


if __name__ == "__main__":
    main()
