"""Runs one rank as a child; if it dies without a message, says which rank it was, and where, and ends the job.

`python -m autopar launch` starts every rank as `python .../supervise.py train.py args`. A process that is killed by a
signal (-9, a segmentation fault, the kernel for want of memory) or that leaves by `os._exit` can't report anything
itself, and MPI launchers name a process id at best. The parent sees how its child ended, and reads the child's last
step from a page of memory that both have mapped (`progress.PAGE`).

It runs as a script, by path, and imports nothing but the standard library: it starts in some milliseconds, without JAX
or MPI. The child is in the same process group, which launchers signal as a whole. If this process is killed alone, the
kernel kills the child with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

# As in progress.py, which can't be imported without autopar.
PAGE = struct.Struct("<qqq")
PAGE_BYTES = 4096
STARTED, REPORTED, LEFT, SERVES = 1, 2, 4, 8
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "PMIX_RANK")
PAGE_VARIABLE = "AUTOPAR_PROGRESS_FD"

#: Seconds for the launcher to pass on a message: hydra may lose it if the rank ends at once.
FORWARD_S = 0.3
#: Seconds that others go on before a rank is said to have ended without them.
ALONE_S = 3.0
#: Seconds for hydra to end the job.
LAST_S = 5.0

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Runs `python command`; returns its exit code, 128 + the signal's number for one that was killed."""
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE_BYTES)
        os.set_inheritable(file.fileno(), True)
        killed_before = _killed_for_memory()
        # Ctrl-C reaches the whole group; the child answers it, and what else MPI's launcher passes on. Handlers, as
        # what is ignored stays so after an exec.
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, frame: None)
        # Descriptors are kept open: some of them are the launcher's, through which MPI finds its peers.
        child = subprocess.Popen(
            [sys.executable, *command],
            close_fds=False,
            env={**os.environ, PAGE_VARIABLE: str(file.fileno())},
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(signal.SIGTERM))
        code = child.wait()
        with mmap.mmap(file.fileno(), PAGE_BYTES) as page:
            flags, step, length = PAGE.unpack_from(page, 0)
            what = page[PAGE.size : PAGE.size + length].decode(errors="replace")
    fault = _fault(code, flags, _killed_for_memory() - killed_before)
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    role = "a server, " if flags & SERVES else ""
    name = f"autopar: rank {rank} ({role}process {child.pid} on {socket.gethostname()})"
    if code == 0 and not flags and _others_go_on():
        _say(f"{name} has ended with exit code 0 and didn't import autopar: ranks that do wait for it.")
    if fault:
        where = f"in step {step} ({what})" if step >= 0 and flags else what or "before autopar was imported"
        _say(f"{name} {fault}, {where}.")
        time.sleep(FORWARD_S)
    result = 128 - code if code < 0 else code or int(fault is not None)
    if fault:
        _abort_job(result)
    return result


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _others_go_on() -> bool:
    """Says whether other ranks on this machine still run their script a while later."""
    end_s = time.monotonic() + ALONE_S
    while (found := _others_run()) and time.monotonic() < end_s:
        time.sleep(0.2)
    return found


def _others_run() -> bool:
    parents = {}
    for pid in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(pid)}/stat") as file:
            parents[int(pid)] = int(file.read().rpartition(")")[2].split()[1])
    others = {pid for pid, parent in parents.items() if parent == os.getppid() and pid != os.getpid()}
    return not others.isdisjoint(parents.values())


def _abort_job(code: int) -> None:
    """Ends the job by hydra's own command, through the child's line to it.

    It then takes this exit code, and not that of an innocent rank that it kills. Other launchers go by this process's
    end.
    """
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(LAST_S)  # Its answer is a SIGKILL.


def _fault(code: int, flags: int, killed_for_memory: int) -> str | None:
    """Says how a child failed; None if nothing is amiss, or if the child has said it itself."""
    if flags & REPORTED:
        return None
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if code != -signal.SIGKILL:
            return f"was killed by {name}"
        why = "by the kernel, for want of memory" if killed_for_memory > 0 else "by hand, or for want of memory"
        return f"was killed by {name} ({why})"
    if flags & STARTED and not flags & LEFT:
        return f"ended at once with exit code {code} (os._exit, or a library's exit)"
    return f"ended with exit code {code}" if code and not flags & LEFT else None


def _killed_for_memory() -> int:
    """Returns the number of processes in this control group that the kernel has killed for want of memory."""
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.events") as events:
        return sum(int(line.split()[1]) for line in events if line.startswith("oom_kill "))
    return 0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
