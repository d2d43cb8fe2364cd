"""Runs a script in processes that `jax.distributed` connects; in each of them: `python deploy/connected.py train.py`.

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say which they are, as Kubeflow's Trainer sets them.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

import jax

if __name__ == "__main__":
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(os.environ["JAX_PROCESS_ID"]),
    )
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if Python had been given the script
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:  # JAX would wait for the other processes for minutes, and they for this one
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
