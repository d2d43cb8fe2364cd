"""Messages between pairs of ranks, of any number of bytes.

An MPI call counts in ints: what is longer than `limit` bytes travels in pieces. Both ends know how long a message is,
and MPI keeps the order of messages between two ranks, so the pieces need no agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar.mpi.waiting import Waiting

#: Bytes of one MPI message at most.
LIMIT = 1 << 30


def pieces(message: np.ndarray, limit: int = LIMIT) -> Iterator[np.ndarray]:
    """The parts of a contiguous array's bytes, none longer than the limit; none at all of nothing."""
    if message.nbytes:
        flat = as_bytes(message)
        for start in range(0, flat.size, limit):
            yield flat[start : start + limit]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array, `[nbytes]`, without a copy."""
    assert array.flags.c_contiguous, "what is received into a copy is lost"
    return array.reshape(-1).view(np.uint8)


def swap(
    comm: Any,
    waiting: Waiting,
    send: Sequence[np.ndarray | None],
    receive: Sequence[np.ndarray | None],
    limit: int = LIMIT,
) -> int:
    """Sends `send[r]` to each rank r and fills `receive[r]` with what it sends; returns the bytes sent.

    Args:
      send: By rank, contiguous arrays; None or an empty one: nothing.
      receive: By rank, contiguous arrays of the lengths that the others send.
      limit: Bytes of one message at most.
    """
    size, sent = len(send), 0
    requests: list[Any] = []
    # Each rank begins with its neighbour, so that no rank is everyone's first.
    sources = [(comm.rank - step) % size for step in range(1, size)]
    for source in sources:
        if (message := receive[source]) is not None:
            requests.extend(comm.Irecv(piece, source) for piece in pieces(message, limit))
    for target in reversed(sources):
        if (message := send[target]) is not None:
            requests.extend(comm.Isend(piece, target) for piece in pieces(message, limit))
            sent += message.nbytes
    waiting.finish(requests)
    return sent
