"""`python -m autopar launch`: starts the ranks of a job with mpirun, and prints the line that does it.

`mpirun -n 4 python train.py` is the same job. The launcher adds the mpiexec of the environment's own MPI, devices a
rank, a cluster file, and a supervisor for each rank (`launch/supervise.py`), which names a rank that is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

from autopar.errors import LaunchError
from autopar.launch.binding import BIND_VARIABLE
from autopar.launch.cluster_file import Host, HostFile, read_cluster
from autopar.mpi.world import CLIENTS_VARIABLE, RANK_PID_VARIABLE, SERVERS_VARIABLE

Flavor = Literal["hydra", "open-mpi", "other"]

#: Seconds that a host may take to start a process when a job is restarted.
REACHING_S = 30.0

#: The variable by which glibc is configured, and the value that lets it ask for huge pages.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
#: Variables that other hosts need, too. Hydra passes on the whole environment by itself.
_PASSED = ("PYTHONPATH", "LD_LIBRARY_PATH", "XLA_FLAGS")


@dataclass(frozen=True)
class Mpirun:
    """An mpirun: its path, and whose flags it has."""

    path: str
    flavor: Flavor


@dataclass(frozen=True)
class RankGroup:
    """Consecutive ranks that are started alike."""

    count: int
    variables: tuple[tuple[str, str], ...]


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code of the rank that failed, or 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    try:
        mpirun = find_mpirun(options.mpirun)
        cluster = read_cluster(options.cluster) if options.cluster else None
        command = _plan(options, mpirun, cluster)
        if cluster is not None and not options.dry_run:
            _check_hosts(cluster)
    except LaunchError as error:
        say(str(error))
        return 2
    print(shlex.join(command), flush=True)
    if options.dry_run:
        return 0

    def plan_again() -> list[str]:
        if cluster is None:
            return _plan(options, mpirun, None)
        options.n = None  # fewer may be left
        return _plan(options, mpirun, _reachable(mpirun, cluster))

    return run_job(command, options.max_restarts, plan_again)


def _plan(options: argparse.Namespace, mpirun: Mpirun, cluster: HostFile | None) -> list[str]:
    """Returns the command line that starts the job on these hosts."""
    script = Path(options.script).absolute()
    if not options.module and not script.is_file():
        raise LaunchError(f"{options.script}: there is no such script")
    program = ["-m", options.script] if options.module else [str(script)]
    ranks = plan_ranks(
        options.n,
        options.devices,
        cluster,
        watchdog=options.watchdog,
        bind=options.bind,
        servers=options.servers,
        clients=options.clients,
    )
    return mpirun_command(mpirun, ranks, cluster, [*program, *options.arguments])


def find_mpirun(mpirun: str | None = None) -> Mpirun:
    """Returns the given mpirun, that of the environment's mpich wheel, or the system's."""
    beside = [str(Path(sys.executable).parent / name) for name in ("mpiexec", "mpirun")]
    tried = [mpirun] if mpirun else [*beside, "mpirun", "mpiexec"]
    path = next((executable for name in tried if (executable := shutil.which(name))), None)
    if path is None:
        if mpirun:
            raise LaunchError(f"--mpirun {mpirun}: there is no such program")
        raise LaunchError("there is no mpirun: pip install 'autopar[mpi]' brings one, or name one with --mpirun PATH")
    path = os.path.abspath(path)
    return Mpirun(path, _flavor(path))


@functools.cache
def _flavor(path: str) -> Flavor:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path}: it can't be run: {error}") from error
    said = (done.stdout + done.stderr).lower()
    if "hydra" in said or "intel" in said:
        return "hydra"
    return "open-mpi" if "open mpi" in said or "openrte" in said or "prrte" in said else "other"


def plan_ranks(
    count: int | None,
    devices: int | None,
    cluster: HostFile | None,
    *,
    watchdog: str | None = None,
    bind: str | None = None,
    servers: int | None = None,
    clients: str | None = None,
) -> list[RankGroup]:
    """Returns the groups of ranks of a job, each with its environment variables.

    `count` and `devices` (CPU devices a rank) are None with a cluster, which has both. `watchdog`: seconds or "off".
    `bind`: "core" or "none". `servers`: number of dedicated servers among the ranks. `clients`: number of clients that
    the others are, or "machines".
    """
    total = count if cluster is None else cluster.processes
    if servers is not None and total is not None and servers >= total:
        raise LaunchError(f"--servers {servers} of {total} processes: one at least must be left to train")
    common = (("AUTOPAR_WATCHDOG", watchdog),) if watchdog else ()
    common += ((BIND_VARIABLE, bind),) if bind else ()
    common += ((SERVERS_VARIABLE, str(servers)),) if servers else ()
    if clients is not None:
        training = None if total is None else total - (servers or 0)
        if clients != "machines" and training is not None and training % int(clients):
            raise LaunchError(f"--clients {clients} of {training} processes that train: each client has as many")
        common += ((CLIENTS_VARIABLE, clients),)
    if cluster is None:
        if count is None:
            raise LaunchError("how many processes? -n 4, or --cluster cluster.toml")
        return [RankGroup(count, (*device_variables(devices), *common))]
    if count not in (None, cluster.processes):
        raise LaunchError(f"-n {count}, but the cluster file has {cluster.processes} processes; leave -n out")
    if devices is not None:
        raise LaunchError("--devices: the cluster file says how many devices each host has; leave --devices out")
    each = [
        (*device_variables(host.devices), *_accelerators(host, i), *common)
        for host in cluster.hosts
        for i in range(host.processes)
    ]
    return [RankGroup(len(list(ranks)), variables) for variables, ranks in itertools.groupby(each)]


def device_variables(count: int | None) -> tuple[tuple[str, str], ...]:
    """Returns the variables of a rank with so many CPU devices.

    XLA takes new memory for the temporaries of each device in each step; in pages of 4 KiB they cost a DLRM on four
    devices two fifths of its time. What the user says to glibc stays.
    """
    if count is None:
        return ()
    pages = ((TUNABLES, HUGE_PAGES),) if count > 1 and TUNABLES not in os.environ else ()
    return (("JAX_NUM_CPU_DEVICES", str(count)), *pages)


def _accelerators(host: Host, process: int) -> tuple[tuple[str, str], ...]:
    if not host.accelerators:
        return ()
    numbers = ",".join(map(str, host.accelerators[process]))
    return (("JAX_CUDA_VISIBLE_DEVICES", numbers), ("JAX_ROCM_VISIBLE_DEVICES", numbers))


def mpirun_command(
    mpirun: Mpirun, ranks: Sequence[RankGroup], cluster: HostFile | None, script: Sequence[str]
) -> list[str]:
    """Returns the command that starts all ranks; `script`: its absolute path, or -m and a module, and arguments."""
    code = importlib.util.find_spec("autopar.launch.supervise")
    assert code is not None and code.origin is not None, "autopar/launch/supervise.py is a part of the package"
    program = [sys.executable, "-I", code.origin, *script]
    if mpirun.flavor == "other" and (cluster is not None or any(r.variables for r in ranks)):
        raise LaunchError(
            f"{mpirun.path} is neither mpich's nor Open MPI's, and its flags for hosts and variables aren't known. "
            "Start the ranks with it yourself, and give them the variables of your flags (docs/processes.md)"
        )
    command = [mpirun.path, *_global_flags(mpirun.flavor, cluster)]
    for number, part in enumerate(ranks):
        if number:
            command.append(":")
        command += ["-n", str(part.count)]
        for name, value in part.variables:
            command += ["-env", name, value] if mpirun.flavor == "hydra" else ["-x", f"{name}={value}"]
        command += program
    return command


def _global_flags(flavor: Flavor, cluster: HostFile | None) -> list[str]:
    hosts = ",".join(f"{host.address}:{host.processes}" for host in cluster.hosts) if cluster else ""
    if flavor == "hydra":
        return ["-hosts", hosts] if hosts else []
    if flavor == "other":
        return []
    # Open MPI binds by default, which would leave one core to all devices of a rank.
    flags = ["--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if hosts:
        passed = [name for name in os.environ if name in _PASSED or name.startswith("JAX_")]
        flags += ["--host", hosts, *(flag for name in sorted(passed) for flag in ("-x", name))]
    return flags


def _check_hosts(cluster: HostFile) -> None:
    for host in cluster.hosts:
        try:
            socket.getaddrinfo(host.address, None)
        except OSError as error:
            raise LaunchError(f"{host.where}: the host {host.address} isn't known: {error.strerror}") from error


def _reachable(mpirun: Mpirun, cluster: HostFile, reaching_s: float = REACHING_S) -> HostFile:
    """Returns the hosts on which mpirun can start this Python; reports the others."""
    program = ["-n", "1", sys.executable, "-I", "-S", "-c", ""]
    tries = [
        subprocess.Popen(
            [mpirun.path, *_global_flags(mpirun.flavor, HostFile((host,))), *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # ssh then asks nobody for a password
        )
        for host in cluster.hosts
    ]
    end_s = time.monotonic() + reaching_s
    found = []
    for host, started in zip(cluster.hosts, tries, strict=True):
        try:
            code = started.wait(max(end_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            started.kill()
            code = started.wait()
        if code == 0:
            found.append(host)
        else:
            say(f"{host.name} can't be reached; without its {host.processes} processes")
    if not found:
        raise LaunchError(f"{', '.join(host.name for host in cluster.hosts)}: no host can be reached")
    return replace(cluster, hosts=tuple(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar launch",
        description="Start a script as several processes with mpirun, and print the line that does it.",
    )
    parser.add_argument("-n", type=_positive, metavar="N", help="processes")
    parser.add_argument("--devices", type=_positive, metavar="N", help="CPU devices a process (JAX_NUM_CPU_DEVICES)")
    parser.add_argument(
        "--servers",
        type=_positive,
        metavar="N",
        help="how many of the processes, the last ones, only keep what sync= and kvstore train (AUTOPAR_SERVERS)",
    )
    parser.add_argument(
        "--clients",
        type=_clients,
        metavar="N|machines",
        help="how many clients train by a sync= that doesn't say it, or one on each machine (AUTOPAR_CLIENTS)",
    )
    parser.add_argument("--cluster", metavar="FILE", help="hosts, processes and devices: cluster.toml or Parallax's")
    parser.add_argument("--watchdog", type=_watchdog, metavar="SECONDS|off", help="how long a rank may stand (300)")
    parser.add_argument(
        "--bind",
        choices=("core", "none"),
        help="keep each rank on one core, or not (by itself: where ranks of one device take every core of a machine)",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="how often a job that failed is started again, on the hosts that are left (0)",
    )
    parser.add_argument("--mpirun", metavar="PATH", help="the mpirun to use")
    parser.add_argument("--dry-run", action="store_true", help="print the mpirun line, and run nothing")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as in python -m")
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _clients(text: str) -> str:
    return text if text == "machines" else str(_positive(text))


def _watchdog(text: str) -> str:
    try:
        good = text == "off" or float(text) > 0
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seconds nor off")
    return text


# --- starting a failed job again: `--max-restarts N` ---
#
# MPI ends a job that has lost a rank. All ranks are then started again, as by torchrun, and the script goes on from its
# last checkpoint. The job before is over: mpirun has ended its ranks, and one that lived on out of reach couldn't save,
# since a checkpoint needs all ranks of its job.

#: Seconds that ranks may take to end after a second signal, and mpirun after that.
ENDING_S, KILLING_S = 10.0, 5.0

#: Seconds that hydra's process on a machine may outlive mpirun.
_PROXY_S = 1.0

#: Signals that end a job, and others that ranks may wait for.
_ENDING, _TOLD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), (signal.SIGUSR1, signal.SIGUSR2)
#: Prefixes of variables by which MPI tells a process that it is a rank; the launcher may be one of another job.
_RANKS_ENVIRONMENT = (
    *("PMI_", "PMI2_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", "PALS_RANKID"),
    *("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", RANK_PID_VARIABLE),
)

#: Has the kernel kill mpirun if the launcher is killed, and then becomes mpirun.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def run_job(
    command: Sequence[str],
    restarts: int,
    plan_again: Callable[[], Sequence[str]],
    *,
    ending_s: float = ENDING_S,
    killing_s: float = KILLING_S,
) -> int:
    """Runs mpirun until it ends well, is interrupted, or has failed once more often than `restarts`; returns the exit
    code of the last run, or 128 + the signal's number if mpirun was killed.

    `command`, `plan_again`: the line of the first run, and of another one, for the hosts that are there by then.
    `ending_s`, `killing_s`: seconds that ranks may take to end after a second signal, and mpirun after that.
    """
    with _Runner(ending_s, killing_s) as runner:
        code = runner.run(command)
        for restart in range(1, restarts + 1):
            if code == 0 or runner.interrupted:
                break
            say(f"the job ended with exit code {code}; restart {restart} of {restarts}")
            try:
                command = plan_again()
            except LaunchError as error:
                say(f"it can't be started again: {error}")
                break
            if runner.interrupted:
                break
            print(shlex.join(command), flush=True)
            code = runner.run(command)
    return code


def say(text: str) -> None:
    sys.stderr.write(f"autopar launch: {text}\n")  # in one piece: ranks write there, too
    sys.stderr.flush()


def remove_topologies(
    since_s: float, folder: Path = Path("/tmp"), processes: Path = Path("/proc"), *, proxy_s: float = _PROXY_S
) -> None:
    """Removes files with the machine's topology, which hydra leaves where its job fails. Nothing says whose they are:
    all stay while another job of hydra's runs.

    `since_s`: when the job began, by `time.time()`. `folder`, `processes`: where hydra writes them, and where the
    kernel lists processes. `proxy_s`: seconds that hydra's process may outlive mpirun.
    """
    end_s = time.monotonic() + proxy_s
    while is_there := any(_text(process / "comm") == "hydra_pmi_proxy" for process in processes.glob("[0-9]*")):
        if time.monotonic() > end_s:
            break
        time.sleep(0.05)
    for path in () if is_there else folder.glob("hydra_hwloc_xmlfile_*"):
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_uid == os.getuid() and found.st_mtime >= since_s:
                path.unlink()


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANKS_ENVIRONMENT)}


class _Runner:
    """Runs mpirun in a session of its own, and passes signals to all ranks (but no SIGHUP under nohup). After the first
    signal that ends a program, ranks may save a checkpoint, which takes its time; ranks that stay after a second one
    are killed. `interrupted`: there was a signal, so the job isn't restarted."""

    def __init__(self, ending_s: float, killing_s: float) -> None:
        self.interrupted = False
        self._patience = ending_s, killing_s
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._ending = [signal.SIGTERM]

    def __enter__(self) -> _Runner:
        numbers = [*_ENDING, *_TOLD]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        handlers = {number: self._pass_on for number in numbers} | {signal.SIGALRM: self._end}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Runs mpirun; returns its exit code."""
        guard = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *command]
        begun_s = time.time()
        self._process = subprocess.Popen(guard, stdin=subprocess.DEVNULL, env=_environment(), start_new_session=True)
        while self._early:
            self._process.send_signal(self._early.pop())
        code, told = None, False
        while code is None:  # an endless wait misses signals that came just before it, or to another thread
            if self.interrupted and not told:
                told = True
                say(
                    "all ranks were told to end, and may save a checkpoint first. After a second signal those that "
                    f"haven't ended within {self._patience[0]:g} seconds are killed"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=0.5)
        self._process = None
        if code:
            remove_topologies(begun_s)
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        passed_on = signal.SIGTERM if number == signal.SIGHUP else number  # mpirun would die of it, and tell no rank
        if self._process is not None:
            self._process.send_signal(passed_on)
        elif number in _ENDING:  # while mpirun is started
            self._early.append(passed_on)
        if number in _TOLD:
            return
        if self.interrupted:
            signal.setitimer(signal.ITIMER_REAL, *self._patience)
        self.interrupted = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.send_signal(self._ending.pop(0) if self._ending else signal.SIGKILL)
