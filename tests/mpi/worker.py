"""One rank: runs the functions of a module whose names start with `check_`, in order. The first failure ends the job.

`python tests/mpi/worker.py <module> <devices of this rank> [<name> ...]`
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
import warnings


def main(module: str, devices: str, *names: str) -> None:
    import jax

    if jax.__version_info__ < (0, 11):  # halves the time of compiling; unknown to newer ones
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(cluster_detection_method="mpi4py")
    os.environ["XDG_CACHE_HOME"] += f"/{jax.process_index()}"  # where rates are kept: each rank on a machine of its own
    warnings.simplefilter("error")
    cases = {name: case for name, case in vars(importlib.import_module(module)).items() if name.startswith("check_")}
    for name, case in cases.items():
        if not names or name in names:
            start = time.perf_counter()
            try:
                case()
            except BaseException:
                print(
                    f"{name} failed on rank {jax.process_index()}\n{traceback.format_exc()}",
                    file=sys.stderr,
                    flush=True,
                )
                from mpi4py import MPI

                MPI.COMM_WORLD.Abort(1)
            if jax.process_index() == 0:
                print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
