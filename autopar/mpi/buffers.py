"""Host memory: aligned arrays, reused buffers, and tables that either fit or say so.

JAX takes over a NumPy array without a copy only if it starts at a multiple of 64 bytes, and then reads it for as long
as a program with it runs: a buffer mustn't be written again before that. Hence alternating sets.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from autopar.errors import HostMemoryError
from autopar.mpi.limits import available_bytes

#: Bytes: XLA's alignment on CPUs, and a cache line.
ALIGNMENT = 64

#: Bytes that a table leaves to everything else on the machine.
RESERVE = 256 << 20

_PAGE = 4096


def aligned(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Returns an uninitialised array in C order that starts at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, raw, offset=-raw.ctypes.data % ALIGNMENT)


class Buffers:
    """Aligned memory by name, which grows to the most that was asked for under a name.

    Each name has several buffers that take turns: an array from `take` stays as it is until its name has been taken
    `sets` times more. With two sets a program can read the buffer that its step filled while the next step fills the
    other one; before the step after next the program must be done (`jax.block_until_ready`).
    """

    def __init__(self, sets: int = 2) -> None:
        self._sets = sets
        self._turns: dict[str, int] = {}
        self._memory: dict[tuple[str, int], np.ndarray] = {}

    def take(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """Returns an uninitialised array in the next buffer of this name."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        wanted = math.prod(shape) * dtype.itemsize
        turn = self._turns[name] = (self._turns.get(name, -1) + 1) % self._sets
        memory = self._memory.get((name, turn))
        if memory is None or memory.nbytes < wanted:
            memory = self._memory[name, turn] = aligned(grown(wanted), np.uint8)
        return np.ndarray(shape, dtype, memory)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())


def grown(wanted: int) -> int:
    """Returns the next of eight sizes to an octave, so that slightly varying sizes seldom need new memory."""
    step = max(1 << max(wanted.bit_length() - 4, 0), ALIGNMENT)
    return -(-wanted // step) * step


def allocate_table(shape: tuple[int, ...], dtype: npt.DTypeLike, path: str) -> np.ndarray:
    """Allocates a table, or this rank's share of one: an aligned array of zeros, whose pages the process has. Raises
    HostMemoryError, with the path, if the machine or the container hasn't so much memory.

    Linux promises more memory than it has, and kills the process in silence when it writes to missing pages. So the
    available memory is looked up first, and the pages are taken at once: the next table sees what this one took.
    """
    dtype = np.dtype(dtype)
    wanted = math.prod(shape) * dtype.itemsize
    require_pages(wanted, path, f"{shape} of {dtype}")
    try:
        table = aligned(shape, dtype)
    except MemoryError:
        raise memory_refusal(path, f"{shape} of {dtype}", wanted, available_bytes()) from None
    table.reshape(-1).view(np.uint8).fill(0)
    return table


def require_pages(wanted: int, path: str, what: str, available: int | None = None) -> None:
    """Raises HostMemoryError if `wanted` bytes can't be had of the machine's `available` ones."""
    available = (available_bytes() if available is None else available) - RESERVE
    if wanted > _PAGE and wanted > available:
        raise memory_refusal(path, what, wanted, max(available, 0))


def memory_refusal(path: str, what: str, wanted: int, available: int, where: str = "here") -> HostMemoryError:
    return HostMemoryError(
        f"{path}: {what} takes {wanted / 1e9:.2f} GB of host memory, and {available / 1e9:.2f} GB are available "
        f"{where} ({RESERVE / 1e9:.2f} GB left to everything else). Spread the table over more machines (ranks on one "
        "machine share its memory), keep fewer slots (plain SGD has none, Adagrad one, Adam two), store it in "
        "bfloat16, or raise the container's limit of memory."
    )
