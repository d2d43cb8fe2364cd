"""One rank: runs the functions of a module whose names start with `check_`, in order. The first failure ends the job.

`python -m tests.support.mpi.worker <module> <devices of this rank> <folder for what is kept> [<name> ...]`
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import jax


def main(module: str, devices: str, folder: str, *names: str) -> None:
    jax.config.update("jax_num_cpu_devices", int(devices))
    importlib.import_module("autopar")  # connects the ranks
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{jax.process_index()}"  # each rank as on a machine of its own
    cases = {name: case for name, case in vars(importlib.import_module(module)).items() if name.startswith("check_")}
    for name in names or cases:
        start = time.perf_counter()
        cases[name]()
        if jax.process_index() == 0:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
