"""`start`: connects ranks when autopar is imported under an MPI launcher; `watchdog`.

JAX must know all processes before its backend comes up, at its first use. So this happens when autopar is imported, and
a script needs no line for it. Without a launcher, or with one rank, nothing happens. On a dedicated server the import
doesn't return (`serve`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import logging
import os
import platform
import secrets
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import jax

from autopar import jax_compat
from autopar.errors import LaunchError
from autopar.interrupts import SIGNALS
from autopar.jax_types import Comm
from autopar.launch.binding import bind
from autopar.launch.faults import Hooks, report_fault
from autopar.launch.group import check_same
from autopar.launch.heartbeat import ALLOWANCE_S, ALLOWANCE_VARIABLE, Heartbeat, allowance
from autopar.launch.progress import LEFT, PAGE_VARIABLE, PROGRESS, SERVES
from autopar.launch.shutdown import Script, leave
from autopar.mpi.service import Service, service
from autopar.mpi.world import SERVERS_VARIABLE, World, claim, job, launched, world

#: Variables that say which accelerators a process may use; the launcher's cluster file sets them.
DEVICE_VARIABLES = ("JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS")

#: Least seconds that ranks wait for each other to import autopar, which takes time, even under a shorter watchdog.
IMPORTS_S = 60.0

#: The heartbeat of this process, if it is one of several.
_heartbeats: list[Heartbeat] = []


@functools.cache
def start() -> None:
    """Makes this process a part of its job: MPI, JAX's processes, hooks for faults, the watchdog."""
    if launched() is None or _is_launcher(sys.orig_argv):
        return
    claim()
    descriptor = os.environ.pop(PAGE_VARIABLE, "")
    if descriptor:
        PROGRESS.share(int(descriptor))
    here = _all_ranks_import_autopar()
    if here.size == 1:
        atexit.register(PROGRESS.flag, LEFT)
        return
    unlink_segments(here.comm)
    hooks = Hooks(here)
    hooks.install()
    bind(here, computes_on_one=_has_one_cpu())
    if here.servers:
        check_same(here, {SERVERS_VARIABLE: str(here.servers), **_versions()})
    workers = world()
    if here.is_server:
        jax.config.update("jax_platforms", "cpu")
        serve(_watched(here, hooks))
    script = Script()
    script.watch()
    if workers.size > 1:
        _start_jax(workers)
        share_compilations(workers)
    heartbeat = _watched(here, hooks)
    # Registered after JAX's exit handler, and so called before it.
    atexit.register(leave, here, heartbeat, script)
    _heartbeats.append(heartbeat)
    if here.servers:
        service()  # which is there on the servers


def _all_ranks_import_autopar() -> World:
    """Starts MPI, which waits for all ranks to import autopar, and returns this rank's job.

    If that takes longer than a rank may hang, one may have left before, and this process ends, and so the job. Only a
    timer of C's can end it, as MPI holds Python meanwhile.
    """
    if (allowed := _allowance()) is None:
        return job()
    before = PROGRESS.last
    PROGRESS.mark(before.step, "waiting until all ranks have imported autopar", "waits")
    faulthandler.dump_traceback_later(max(allowed, IMPORTS_S), exit=True, file=2)
    try:
        return job()
    finally:
        faulthandler.cancel_dump_traceback_later()
        PROGRESS.mark(before.step, before.what, before.kind)


def _is_launcher(arguments: Sequence[str]) -> bool:
    """Says whether this process is `python -m autopar launch ...`, which a rank may run, as in a shell that srun
    started."""
    k = arguments.index("-m") if "-m" in arguments else 0
    return list(arguments[k : k + 3]) == ["-m", "autopar", "launch"]


def _watched(here: World, hooks: Hooks) -> Heartbeat:
    """Starts the heartbeat of a rank. Collective over the job."""
    from mpi4py import MPI

    heartbeat = Heartbeat(here, hooks, _allowance())
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:  # the user may have started MPI without it
        heartbeat.start()
    elif here.rank == 0:
        report_fault("warning: MPI was started for calls from one thread only, so there is no watchdog")
    return heartbeat


def _versions() -> dict[str, str]:
    return {"JAX version": jax.__version__, "Python version": platform.python_version()}


def watchdog(seconds: float | None) -> None:
    """Sets how long this rank may hang from now on; 300 seconds by default.

    A rank that makes no progress for longer while others wait for it, or that gives no sign of life, is named, and the
    job ends. Call it on all ranks alike; around long work of one rank (an evaluation) `None` switches it off. Without
    an MPI launcher it does nothing.

    Args:
      seconds: The allowance in seconds; None: no limit.

    Raises:
      ArgumentsError: `seconds` is no positive number.

    >>> watchdog(600)
    """
    allowed = allowance(seconds)
    for heartbeat in _heartbeats:
        heartbeat.allowance_s = allowed


def _allowance() -> float | None:
    text = os.environ.get(ALLOWANCE_VARIABLE, "")
    if text == "off":
        return None
    try:
        return float(text) if text else ALLOWANCE_S
    except ValueError:
        raise LaunchError(f"{ALLOWANCE_VARIABLE}={text!r} is neither a number of seconds nor off") from None


def _start_jax(here: World) -> None:
    """Makes the ranks JAX's processes, unless the user has done so."""
    if jax.distributed.is_initialized():
        number, count = jax_compat.process()
        if (number, count) != (here.rank, here.size):
            raise LaunchError(
                f"rank {here.rank} of {here.size} is process {number} of {count} for jax.distributed, which was "
                "initialised before autopar was imported. Number JAX's processes as MPI does, or leave it to autopar"
            )
        return
    if jax_compat.backend_is_up():
        raise LaunchError(
            f"rank {here.rank}: JAX has been used before autopar was imported, so its processes can't be connected "
            "any more. Import autopar before the first use of JAX (arrays, jax.devices(), jax.random.key, ... at the "
            "top of a module count, too): move `import autopar` to the top of the script"
        )
    # Different versions of JAX might not even get to the comparison before the first step.
    check_same(here, _versions())
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as held:
        address = choose_coordinator(here, held)
        _check_host_name(here, address)
        jax.distributed.initialize(
            address,
            here.size,
            here.rank,
            _local_devices(here),
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,  # left out, it would be all of the host's
        )
    # JAX's preemption service takes SIGTERM, also from a handler of the user's, which is set again.
    if handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _has_one_cpu() -> bool:
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    on_cpus = jax.config.values["jax_platforms"] == "cpu" or not nvidia_gpus()
    return on_cpus and jax.config.values["jax_num_cpu_devices"] <= 1 and not forced


def _local_devices(here: World) -> list[int] | None:
    """Returns the numbers of this rank's accelerators on its host.

    Ranks that share a host have one each, in turn if there are fewer. None: all, or those that the environment names.
    """
    from mpi4py import MPI

    local = here.comm.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size = local.Get_rank(), local.Get_size()
    local.Free()
    gpus = nvidia_gpus()
    said = any(name in os.environ for name in DEVICE_VARIABLES)
    if size == 1 or said:
        return None
    if rank == 0 and 0 < gpus < size:
        report_fault(
            f"warning: {size} ranks on {gpus} GPU{'s' * (gpus > 1)} on {socket.gethostname()}. Servers of parameters "
            "and MPI's reductions work so; collectives of JAX (means, data parallelism on devices) hang or fail: "
            f"NCCL wants a GPU for each rank: start {gpus} on a machine"
        )
    return [rank % (gpus or size)]


def nvidia_gpus(devices: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs that CUDA sees, without starting it; 0 if unknown. `devices`: the driver's
    files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def _check_host_name(here: World, coordinator: str) -> None:
    """Warns if the host's name leads to no address that others reach: JAX's collectives on CPUs (gloo) listen there."""
    if coordinator.startswith("127."):
        return
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = str(error)
    if address.startswith("127.") or not address[:1].isdigit():
        report_fault(
            f"warning: the name of the host of rank {here.rank}, {name}, leads to {address}, where other hosts can't "
            "reach it. JAX's collectives on CPUs need it: give its network address in its /etc/hosts"
        )


# --- where JAX's coordination service listens, so that every rank can reach it ---
#
# A host's name won't do: in a network namespace, in a container, or under Debian's 127.0.1.1 it means something else to
# each host. So rank 0 listens, all others try its addresses in turn, and the first one that all of them reach is taken:
# loopback if all ranks are on one host, else a network's address. The listener must know a word that rank 0 sent
# through MPI, as another host's loopback may have a listener, too.

#: Seconds that an address is tried.
TRIAL_S = 3.0

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface.


def choose_coordinator(world: World, held: contextlib.ExitStack) -> str:
    """Returns an "address:port" at rank 0 that all ranks reach, or raises LaunchError, naming those who can't.
    Collective. `held`: until it is closed, no program but JAX's service is given the port."""
    word = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening(word)) if world.rank == 0 else None
        port = listener.getsockname()[1] if listener is not None else 0
        addresses = _own_addresses() if world.rank == 0 else []
        word, port, addresses = world.comm.bcast((word, port, addresses))
        failed: list[str] = []
        for address in addresses:
            reached = world.comm.allgather(world.rank == 0 or _answers(address, port, word))
            if all(reached):
                return f"{address}:{_free_port(world, address, held)}"
            far = ", ".join(str(rank) for rank, reaches in enumerate(reached) if not reaches)
            failed.append(f"{address} not from rank {far}")
    raise LaunchError(
        f"rank {world.rank}: JAX's processes need a TCP connection to rank 0's host, on any port, and there is none: "
        + "; ".join(failed)
        + ". Open the firewall between the hosts, or initialise JAX yourself (jax.distributed.initialize with a "
        "coordinator_address that works) before autopar is imported"
    )


def _free_port(world: World, address: str, held: contextlib.ExitStack) -> int:
    """Returns a free port of rank 0, other than the one that was tried, whose connections linger."""
    port = 0
    if world.rank == 0:
        free = held.enter_context(socket.socket())
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does, which may share it so
        free.bind((address, 0))
        port = free.getsockname()[1]
    return world.comm.bcast(port)


@contextlib.contextmanager
def _listening(word: bytes) -> Iterator[socket.socket]:
    """Runs a server on all IPv4 addresses that sends a word to whoever connects."""
    with socket.create_server(("", 0), backlog=1024) as server:
        done = threading.Event()
        server.settimeout(0.1)

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(word)

        thread = threading.Thread(target=serve, name="autopar-coordinator", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            done.set()
            thread.join()


def _answers(address: str, port: int, word: bytes) -> bool:
    try:
        with socket.create_connection((address, port), timeout=TRIAL_S) as connection:
            return connection.recv(len(word), socket.MSG_WAITALL) == word
    except OSError:
        return False


def _own_addresses() -> list[str]:
    """Returns this host's IPv4 addresses, loopback first."""
    addresses = ["127.0.0.1"]
    with contextlib.suppress(OSError):
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", interface.encode()[:15])
                addresses.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    return list(dict.fromkeys(addresses))


# --- a dedicated server, from the import of autopar to the job's end ---
#
# Its main thread answers workers (`mpi/service.py`), inside the import, until all of them have come to their end.
# Another thread couldn't: while autopar is being imported, Python lets no other one unpickle messages. Workers answer
# signals: an interrupted one may save a checkpoint of what servers keep.


def serve(heartbeat: Heartbeat) -> NoReturn:
    """Answers workers until all of them have left, and ends this process with exit code 0. Collective over the job.

    Nothing of the script runs, and no handler of its exceptions.
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


# --- memory that mpich's ranks share on a machine ---
#
# Its name in /dev/shm is removed as soon as all ranks have mapped it. mpich does so at MPI_Finalize, which a failed
# job doesn't reach: each would leave 2 MB, and a container has 64.

_NAMES = "/dev/shm/mpich_shm_"


def unlink_segments(comm: Comm, maps: Path = Path("/proc/self/maps")) -> None:
    """Removes the names of shared segments that this process has mapped. Collective. `maps`: the kernel's list."""
    comm.Barrier()  # all have come out of MPI_Init, and so have mapped it
    with contextlib.suppress(OSError):
        paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if _NAMES in line}
        for path in paths:  # the first rank of a machine removes them
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


T = TypeVar("T")
_logger = logging.getLogger("autopar")

# --- programs that one rank of a machine compiles, and the others load ---
#
# Ranks run the same programs, each for devices of its own, and come to them at about the same time. The first one
# compiles, and the others wait for it; no rank waits for one that doesn't compile, or longer than `WAIT_S`. Ranks may
# come in any order, or never: this is no collective.
#
# The programs are in a file of the job's, which has no name any more once all ranks of the machine have opened it: the
# kernel removes it with the last of them, however they end. A rank holds a lock on a byte of it while it compiles,
# which the kernel takes from a process that dies; the next rank then compiles. Locks belong to a file that was opened
# once more, so that threads of a process exclude each other as well.

#: "alone": each rank compiles all of its programs; the same on all ranks.
COMPILE_VARIABLE = "AUTOPAR_COMPILE"
#: Seconds that a rank waits for another one's compilation before it compiles by itself.
WAIT_S = 300.0
#: Seconds between two looks at a lock.
_PAUSE_S = 0.01
#: A record's key and bytes before its program.
HEADER = struct.Struct("32sq")


class Compilations:
    """Keeps compiled programs by key. `file`: the descriptor of a file, empty at first, that all processes have
    opened."""

    def __init__(self, file: int, wait_s: float = WAIT_S) -> None:
        self._file, self._wait_s = file, wait_s
        self._known: dict[bytes, tuple[int, int]] = {}  # key -> offset and size of its program
        self._end = 0  # of the records that are known
        self._reads = threading.Lock()

    def program(
        self,
        key: bytes,
        compile_here: Callable[[], T],
        save: Callable[[T], bytes],
        load: Callable[[bytes], T],
        *,
        compiles: bool = False,
    ) -> T:
        """Returns a program, compiled here or by another process.

        `key`: 32 bytes, the same for the same program. `compile_here`, `save`, `load`: compile it, make bytes of it,
        and the program of these. `compiles`: compile it here in any case, for the others as well.
        """
        found = None if compiles else self._find(key)
        if found is None:
            with self._turn(key) as is_mine:
                found = self._find(key)
                if found is None or compiles:
                    made = compile_here()
                    if is_mine and found is None:
                        self._share(key, made, save)
                    return made
        try:
            return load(found)
        except Exception as error:
            _logger.warning(
                "a program that another rank has compiled can't be loaded, so this one compiles it: %s", error
            )
            return compile_here()

    def _share(self, key: bytes, made: T, save: Callable[[T], bytes]) -> None:
        try:
            self._add(key, save(made))
        except Exception as error:  # it can't be saved, or the disk is full
            _logger.warning("a compiled program can't be shared, so that each rank compiles it: %s", error)

    def _find(self, key: bytes) -> bytes | None:
        with self._index():  # if it can't be read, what was known counts
            offset, size = self._known.get(key, (0, 0))
        return os.pread(self._file, size, offset) if size else None

    def _add(self, key: bytes, program: bytes) -> None:
        with self._index() as is_mine:
            if not is_mine:
                raise TimeoutError("another rank doesn't let go of the file of compiled programs")
            offset = self._end + HEADER.size
            written = 0
            while written < len(program):
                written += os.pwrite(self._file, program[written:], offset + written)
            os.pwrite(self._file, HEADER.pack(key, len(program)), self._end)  # at last: now it is there

    @contextlib.contextmanager
    def _index(self) -> Iterator[bool]:
        """Reads the records that are new; yields whether no process adds any meanwhile."""
        with self._reads, _locked(self._file, 0, time.monotonic() + self._wait_s) as is_mine:
            while is_mine and len(header := os.pread(self._file, HEADER.size, self._end)) == HEADER.size:
                key, size = HEADER.unpack(header)
                if not size:  # a process died before it wrote the header
                    break
                offset = self._end + HEADER.size
                self._known[key] = offset, size
                self._end = offset + size
            yield is_mine

    def _turn(self, key: bytes) -> contextlib.AbstractContextManager[bool]:
        """Waits until no other process or thread compiles the program; yields whether that came to pass."""
        return _locked(self._file, 1 + int.from_bytes(key[:6]), time.monotonic() + self._wait_s)


@contextlib.contextmanager
def _locked(file: int, at: int, end: float) -> Iterator[bool]:
    """Locks a byte of a file, if that succeeds until `end`; yields whether it did."""
    is_locked = False
    try:
        own = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    except OSError:  # too many files are open
        yield False
        return
    try:
        while not is_locked:
            with contextlib.suppress(BlockingIOError, PermissionError):  # another one has it
                fcntl.fcntl(own, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
                is_locked = True
            if not is_locked:
                if time.monotonic() > end:
                    break
                time.sleep(_PAUSE_S)
        yield is_locked
    finally:
        os.close(own)


def share_compilations(here: World) -> None:
    """Lets the ranks of each machine share what they compile for CPUs. Collective.

    Where the system has no such locks, or ranks no common folder for temporary files, each compiles by itself.
    """
    from mpi4py import MPI

    if not hasattr(fcntl, "F_OFD_SETLK") or os.environ.get(COMPILE_VARIABLE) == "alone":
        return
    ranks = here.comm.Split_type(MPI.COMM_TYPE_SHARED)
    if ranks.Get_size() > 1:
        path, file = "", -1
        with contextlib.suppress(OSError):
            if ranks.Get_rank() == 0:
                file, path = tempfile.mkstemp(prefix="autopar-")
        path = ranks.bcast(path)
        with contextlib.suppress(OSError):
            if ranks.Get_rank() > 0:
                file = os.open(path, os.O_RDWR)
        ranks.Barrier()
        if ranks.Get_rank() == 0 and path:
            os.unlink(path)
        if file >= 0:
            jax_compat.share_compilations(Compilations(file).program)
    ranks.Free()
