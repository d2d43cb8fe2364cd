"""Arrays from one rank to another, while both go on with their work.

Both ends know what is sent next: MPI keeps the order of messages between two ranks, so that none needs a name.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from autopar.jax_types import Comm, Dtype, Request
from autopar.mpi.waiting import LIMIT, Waiting, choose_waiting, pieces
from autopar.mpi.world import world

#: Seconds between two looks at messages. A transfer of some MB takes a few of them.
_PAUSE_S = 0.5e-3


class Incoming:
    """An array on its way to this rank."""

    def __init__(
        self, buffer: np.ndarray, requests: list[Request], source: int, waiting: Waiting, open_: set[Incoming]
    ) -> None:
        """Takes requests under way; `open_` keeps all buffers that MPI still writes to, even if nobody else does."""
        self._buffer, self._requests, self.source, self._waiting, self._open = buffer, requests, source, waiting, open_
        open_.add(self)

    def wait(self) -> np.ndarray:
        if self._requests:
            self._waiting.finish(self._requests)
            self._requests = []
        self._open.discard(self)
        return self._buffer


class PointToPoint:
    """A rank's messages to and from single others. Collective to make. `sent_bytes`: by target."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm.Dup()
        self._waiting = choose_waiting(self._comm)
        #: Ranks whose memory this one doesn't share, as MPI sees it.
        self._far = _ranks_apart(self._comm)
        #: Requests, the array that they read, and the target.
        self._outgoing: list[tuple[list[Request], np.ndarray, int]] = []
        self._incoming: set[Incoming] = set()
        self.sent_bytes: dict[int, int] = {}

    def send(self, array: np.ndarray, target: int) -> None:
        """Begins to send an array, which mustn't change until `finish`."""
        message = np.ascontiguousarray(array)
        requests = [self._comm.Isend(piece, target) for piece in pieces(message, LIMIT)]
        self.sent_bytes[target] = self.sent_bytes.get(target, 0) + message.nbytes
        self._outgoing = [sending for sending in self._outgoing if not _are_done(sending[0])]
        self._outgoing.append((requests, message, target))

    def receive(self, shape: tuple[int, ...], dtype: Dtype, source: int) -> Incoming:
        buffer = np.empty(shape, dtype)
        requests = [self._comm.Irecv(p, source) for p in pieces(buffer, LIMIT)]
        return Incoming(buffer, requests, source, self._waiting, self._incoming)

    def during(self, is_done: Callable[[], bool]) -> None:
        """Lets messages between machines go on until other threads have computed something: over TCP they do only while
        MPI is called. (In shared memory the receiver copies by itself.)"""
        while not is_done() and self._is_far_open():
            self._comm.Iprobe()
            time.sleep(_PAUSE_S)

    def _is_far_open(self) -> bool:
        peers = [*(target for *_, target in self._outgoing), *(incoming.source for incoming in self._incoming)]
        return not self._far.isdisjoint(peers)

    def finish(self) -> None:
        """Waits until all messages have gone."""
        requests = [r for left, *_ in self._outgoing for r in left]
        self._waiting.finish(requests)
        self._outgoing = []


def _ranks_apart(comm: Comm) -> set[int]:
    """Returns the ranks on other machines. Collective."""
    from mpi4py import MPI

    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    apart = set(range(comm.Get_size())).difference(near.allgather(comm.Get_rank()))
    near.Free()
    return apart


def _are_done(requests: list[Request]) -> bool:
    return not requests or type(requests[0]).Testall(requests)


@functools.cache
def point_to_point() -> PointToPoint:
    """Returns this rank's messages. Collective, the first time."""
    return PointToPoint(world().comm)
