"""One rank: runs functions whose names start with `check_`, in order. The first failure ends the job. A rank that is
still there `STACKS_S` seconds from its start prints where each of its threads is.

`python -m tests.support.mpi.worker <devices of this rank> <folder for what is kept> <module>[:<name> ...] ...`
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time

import jax


def main(devices: str, folder: str, *modules: str) -> None:
    faulthandler.dump_traceback_later(float(os.environ["STACKS_S"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests may have it ignored
    jax.config.update("jax_num_cpu_devices", int(devices))
    importlib.import_module("autopar")  # connects the ranks
    importlib.import_module("tests.support.shared_cache").share_cache()
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{jax.process_index()}"  # each rank as on a machine of its own
    wide = jax.config.read("jax_enable_x64")
    for module, *names in (each.split(":") for each in modules):
        jax.config.update("jax_enable_x64", wide)  # as the one before found it
        known = vars(importlib.import_module(module))
        for name in names or [name for name in known if name.startswith("check_")]:
            start = time.perf_counter()
            known[name]()
            if jax.process_index() == 0:
                sys.stdout.write(f"{name}: {time.perf_counter() - start:.1f} s\n")  # in one piece
                sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
