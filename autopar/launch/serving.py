"""`serve`: what a dedicated server does instead of the user's script, from the import of autopar to the job's end.

Its main thread answers workers (`mpi/service.py`), inside the import, until all of them have come to their end. Another
thread couldn't: while autopar is being imported, Python lets no other one unpickle messages. Signals are for workers to
answer: one that was interrupted may save a checkpoint, of what servers keep.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from typing import NoReturn

from autopar.interrupts import SIGNALS
from autopar.launch.heartbeat import Heartbeat
from autopar.launch.progress import LEFT, PROGRESS, SERVES
from autopar.mpi.service import Service
from autopar.mpi.world import job


def serve(heartbeat: Heartbeat) -> NoReturn:
    """Answer workers until all of them have left, and end this process with exit code 0. Collective over the job.

    The process ends here: nothing of the script runs, no handler of its exceptions either.
    """
    from mpi4py import MPI

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    PROGRESS.flag(SERVES)
    PROGRESS.mark(-1, "serving", "serves")
    try:
        service = Service(job())
        service.serve(heartbeat.comm.Ibarrier().Test)
        heartbeat.stop()
        MPI.Finalize()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # which ends the job
    PROGRESS.flag(LEFT)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).exit(0)  # C's, unlike os._exit, which MPI's libraries need to say that they have ended
    raise AssertionError("a process survived its own exit")
