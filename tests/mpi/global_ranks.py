"""Starts ranks: real processes under mpiexec, in a session of their own, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(ranks: int, command: Sequence[str], *, timeout_s: float = 120, **environment: str) -> str:
    """What the ranks print, of `python *command` on each; fails the test if one of them fails or is late."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks), sys.executable, *command]
    flags = os.environ.get("XLA_FLAGS", "")
    given = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as output:
        given["XDG_CACHE_HOME"] = cache
        # Output goes to a file: a pipe that is closed breaks mpiexec.
        process = subprocess.Popen(
            launcher, cwd=ROOT, env=given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # SIGTERM is caught by jax.distributed
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    assert code == 0, f"{'out of time' if code is None else f'exit status {code}'}:\n{text[-8000:]}"
    return text
