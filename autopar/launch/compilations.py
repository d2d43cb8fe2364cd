"""`Compilations`: programs that one rank of a machine compiles, and the others load.

Ranks run the same programs, each for devices of its own, and come to them at about the same time. The first one
compiles, and the others wait for it; no rank waits for one that doesn't compile, or longer than `WAIT_S`. Ranks may
come in any order, or never: this is no collective.

The programs are in a file of the job's, which has no name any more once all ranks of the machine have opened it: the
kernel removes it with the last of them, however they end. A rank holds a lock on a byte of it while it compiles, which
the kernel takes from a process that dies; the next rank then compiles. Locks belong to a file that was opened once
more, so that threads of a process exclude each other as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from autopar import jax_compat
from autopar.mpi.world import World

T = TypeVar("T")
_logger = logging.getLogger("autopar")

#: "alone": each rank compiles all of its programs; the same on all ranks.
COMPILE_VARIABLE = "AUTOPAR_COMPILE"
#: Seconds that a rank waits for another one's compilation before it compiles by itself.
WAIT_S = 300.0
#: Seconds between two looks at a lock.
_PAUSE_S = 0.01
#: A record's key and bytes before its program.
HEADER = struct.Struct("32sq")


class Compilations:
    """Compiled programs by key.

    Args:
      file: The descriptor of a file, empty at first, that all processes have opened.
      wait_s: As `WAIT_S`.
    """

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

        Args:
          key: 32 bytes, the same for the same program.
          compile_here, save, load: Compile it, make bytes of it, and the program of these.
          compiles: Compile it here in any case, for the others as well.
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
