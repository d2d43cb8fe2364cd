"""AllReduce of one buffer of 4, 16 and 64 MB: MPI's own, in rings (`autopar.mpi.rings`), and gloo's by JAX.

`python -m benchmarks rings`: of 4 ranks that share a machine, of 4 hosts (network namespaces that share its cores) and
of 3 at 1 Gbit/s, and of 2 hosts of 2 ranks each. In turn in the same processes; a round's time is that of its slowest
rank, and bytes are those of the interface (figures 17 to 20 of MXNET-MPI).
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.support.mpi.namespaces import ENVIRONMENT, hosts, sent_by_interface

RATE, SIZES, ROUNDS = "1gbit", (4, 16, 64), 7


def rings() -> None:
    """Starts the ranks, which print their figures."""
    _start(4, ())
    for count, each in ((4, 1), (3, 1), (2, 2)):
        with tempfile.TemporaryDirectory() as folder, hosts(count, Path(folder), each, RATE) as made:
            _start(count * each, made.wrapper)


def _start(ranks: int, wrapper: Sequence[str]) -> None:
    launcher = Path(sys.executable).with_name("mpiexec")
    apart = {name: value for name, value in ENVIRONMENT.items() if "ALGORITHM" not in name}  # MPI's own choice
    command = [launcher if launcher.exists() else "mpiexec", "-n", str(ranks), *wrapper, sys.executable]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(apart if wrapper else {})}
    subprocess.run([*command, "-m", "mpi4py.run", "-m", "benchmarks.rings"], check=True, timeout=900, env=environment)


def main() -> None:
    """What each rank does."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from autopar.mpi.exchange import Exchange
    from autopar.mpi.machines import connect
    from autopar.mpi.world import world

    here = world()
    machines = here.comm.allgather(socket.gethostname())
    mesh = Mesh(np.array(jax.devices()), ("ranks",), axis_types=(AxisType.Auto,))
    add = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    ways: dict[str, Exchange] = {"MPI": connect(here, machines), "rings": connect(here, machines)}
    ways["rings"].rings_from = 0
    if here.rank == 0:
        print(f"{here.size} ranks on {len(set(machines))} machines:")
    for megabytes in SIZES:
        own = np.ones((1, megabytes << 18), np.float32)
        memory = {way: np.empty(own.nbytes, np.uint8) for way in ways}
        spread = jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), own)

        def reduce(way: str, array: np.ndarray = own[0], memory: dict[str, np.ndarray] = memory) -> object:
            return ways[way].reduce([array], memory=memory[way])

        calls: dict[str, Callable[[], object]] = {way: functools.partial(reduce, way) for way in ways}
        calls["gloo"] = lambda spread=spread: add(spread).block_until_ready()
        for way, call in calls.items():
            call()
            before, seconds = sent_by_interface() or 0, []
            for _ in range(ROUNDS):
                here.comm.Barrier()
                start = time.perf_counter()
                call()
                seconds.append(max(here.comm.allgather(time.perf_counter() - start)))
            sent = dict(zip(machines, here.comm.allgather((sent_by_interface() or 0) - before), strict=True))
            if here.rank == 0:
                share = sum(sent.values()) / len(sent) / ROUNDS / own.nbytes
                shown = f", {share:.3f} of it sent by a machine" if len(sent) > 1 else ""
                print(f"  {megabytes:3d} MB {way:6s} {np.median(seconds) * 1e3:8.1f} ms{shown}", flush=True)


if __name__ == "__main__":
    main()
