"""A program that isn't part of a job, and reaches a port of it."""

from __future__ import annotations

import re

import pytest

from tests.support.mpi.jobs import Run, coordinator


@pytest.mark.parametrize("restores", [False, True], ids=["together", "led"])
def test_who_writes_to_the_store_runs_no_code(run_ranks: Run, restores: bool) -> None:
    """A message that would run code when it is unpickled, in the name of a process that others wait for."""
    script = f"""
    import os, pathlib, pickle, subprocess, sys, jax, jax.numpy as jnp
    rank, address = int(os.environ.pop("PMI_RANK")), os.environ["COORDINATOR"]
    jax.distributed.initialize(address, 2, rank, cluster_detection_method="deactivate")
    import autopar
    jax.devices()  # the processes exchange what they have

    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + os.path.abspath("ran"),)

    about = b"the manifest" if {restores} else b"what is saved"
    if rank != {int(not restores)}:  # which is waited for
        try:
            (lambda: autopar.restore("saved") if {restores} else autopar.save("saved", jnp.ones(3)))()
        except autopar.LaunchError as error:
            print(error)
    else:
        pathlib.Path("forged").write_bytes(about + bytes(1) + pickle.dumps(Evil()))
        command = [sys.executable, "-m", "tests.support.mpi.stranger", address.split(":")[1], f"autopar/0-1/0/{{rank}}"]
        subprocess.run([*command, "forged"], check=True)
    print("ran:", os.path.exists("ran"))
    jax.distributed.shutdown()  # in order: a process that finds the coordinator gone is aborted
    """
    with coordinator() as address:
        job = run_ranks(2, script, COORDINATOR=address)
    assert job.code == 0 and job.output.count("ran: False") == 2, job.output
    process = int(not restores)
    message = f"what came in the name of process {process} is no message of autopar's .* let nobody else reach"
    assert re.search(message, job.output), job.output


def test_the_coordinator_of_one_machine_listens_to_that_machine(run_ranks: Run) -> None:
    """And to a port that no other program was given meanwhile."""
    script = """
    import jax, os, socket, unittest.mock

    def beginning(at, *args, **options):
        address, port = at.split(":")
        if os.environ["PMI_RANK"] == "0":
            try:
                socket.create_server((address, int(port))).close()
            except OSError as error:
                print(error)
        return begin(at, *args, **options)

    begin = jax.distributed.initialize
    with unittest.mock.patch("jax.distributed.initialize", side_effect=beginning) as initialize:
        import autopar
    address, port = initialize.call_args.args[0].split(":")
    socket.create_connection((address, int(port)), 10).close()
    try:
        socket.create_connection(("127.0.0.2", int(port)), 10).close()  # another address of this host
    except ConnectionRefusedError:
        print("refused at", address)
    """
    job = run_ranks(2, script)
    assert job.code == 0 and job.output.count("refused at 127.0.0.1") == 2, job.output
    assert "Address already in use" in job.ranks[0], job.output
