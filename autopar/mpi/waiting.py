"""Waiting for other ranks: one policy, in one place.

All ranks of a job wait in the same way, as a blocking collective doesn't match a nonblocking one:

- blocking: MPI's own calls, which spin on a core until the message is there. The fastest if each rank has a core.
- polling: a nonblocking call, then `Test` and yield, over and over, for as long as a message usually takes; after that
  a sleep after every few tests, the longer the longer it has waited. For jobs with more ranks than cores, and for
  programs in which other threads (gloo's, XLA's) need the core.

A single `Test` moves a message by one step only, so that a sleep after each turns 30 us into 3 ms: hence the yields
first, and several tests between sleeps.

A core on which everyone sleeps is idle, and an idle core comes back late: on a virtual machine whose host has other
guests after some ms, so that a step of 23 ms took 33 to 70. A rank that is bound to one core therefore yields for
longer: others that want the core are on it already, and get it. An unbound rank must not: a core that yields to nobody
looks busy, and the scheduler leaves the other ranks where they are (80 ms became 120).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.jax_types import Comm, Pytree, Request
from autopar.mpi.limits import affinity, cores, machine_name
from autopar.mpi.world import world

#: Seconds of polling before the first sleep, and for a rank that is bound to one core, longer than most waits.
PATIENCE_S, BOUND_PATIENCE_S = 50e-6, 20e-3


#: Lets another thread or process have the core, if one wants it.
_give_way: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A way to wait.

    Attributes:
      polling: Whether to poll; else MPI blocks.
      patience_s: Seconds of polling before the first sleep.
      pause_s: Seconds of the first sleep between tests (the kernel adds some 50 us).
      growth: Later sleeps, as a part of the time waited so far: a wait becomes longer by this part at most.
      longest_s: Seconds of the longest sleep.
      tests: Tests between two sleeps.
      yields: Whether to yield after each test.
    """

    polling: bool
    patience_s: float = PATIENCE_S
    pause_s: float = 50e-6
    growth: float = 0.15
    longest_s: float = 2e-3
    tests: int = 4
    yields: bool = True
    sleep: Callable[[float], None] = time.sleep

    def finish(self, requests: Sequence[Request]) -> None:
        """Waits for these requests of mpi4py."""
        if not requests:
            return
        kind = type(requests[0])
        if self.polling:
            self._poll(kind, requests)
        else:
            kind.Waitall(requests)

    def collective(self, comm: Comm, name: str, *arguments: Pytree) -> None:
        """Runs a collective of mpi4py, such as "Allreduce", by its blocking or its nonblocking form."""
        if self.polling:
            self.finish([getattr(comm, "I" + name.lower())(*arguments)])
        else:
            getattr(comm, name)(*arguments)

    def _poll(self, kind: type[Request], requests: Sequence[Request]) -> None:
        if kind.Testall(requests):
            return
        start = time.perf_counter()
        while time.perf_counter() - start < self.patience_s:
            _give_way()
            if kind.Testall(requests):
                return
        while True:
            waited = time.perf_counter() - start
            self.sleep(min(max(self.pause_s, self.growth * waited), self.longest_s))
            for _ in range(self.tests):
                if kind.Testall(requests):
                    return
                if self.yields:
                    _give_way()


#: For a thread beside the rank's programs. MPI's own waiting would take a core from these. A thread that yields gets it
#: back late (a sum of 20 ms took 80 beside a program of 80 ms); one that has slept gets it at once.
BESIDE = Waiting(polling=True, patience_s=0, pause_s=200e-6, growth=0, yields=False)


def choose_waiting(
    comm: Comm, polling: bool | None = None, *, shares_cores: bool = False, own: Collection[int] | None = None
) -> Waiting:
    """Chooses the way to wait for all ranks. Collective.

    Args:
      polling: The user's wish; one rank that polls makes all poll. None: poll if some machine has more ranks than cores
        for them, or if `shares_cores`.
      shares_cores: Whether other threads of the program communicate too, as gloo's do.
      own: The cores that this rank may run on; by default those of the system.
    """
    own = affinity() if own is None else frozenset(own)
    processes = comm.allgather((polling, shares_cores, machine_name(), own, cores()))
    shared = any(shares for _, shares, *_ in processes)
    patience = BOUND_PATIENCE_S if len(own) == 1 and not shared else PATIENCE_S
    options = [option for option, *_ in processes if option is not None]
    if options:
        return Waiting(any(options), patience)
    machines: dict[str, list[tuple[frozenset[int], int]]] = {}
    for _, _, machine, allowed, quota in processes:
        machines.setdefault(machine, []).append((allowed, quota))
    crowded = any(len(ranks) > _together(ranks) for ranks in machines.values())
    return Waiting(crowded or shared, patience)


def _together(ranks: list[tuple[frozenset[int], int]]) -> int:
    """Returns the number of cores that ranks of one machine have together. Ranks of equal affinity share cores and
    quota."""
    quotas: dict[frozenset[int], int] = {}
    for allowed, quota in ranks:
        quotas[allowed] = min(quotas.get(allowed, quota), quota)
    return min(sum(quotas.values()), len(frozenset().union(*quotas)))


@functools.cache
def signal_channel() -> tuple[Comm, Waiting]:
    """Returns a communicator of all ranks for signals alone, and how to wait on it. Collective, the first time."""
    comm = world().comm.Dup()
    return comm, choose_waiting(comm, shares_cores=True)  # steps are under way on all cores


# --- messages between pairs of ranks, of any number of bytes ---
#
# An MPI call counts in ints: messages of more than `limit` bytes travel in pieces. Both ends know a message's length,
# and MPI keeps the order of messages between two ranks, so the pieces need no agreement.

#: Bytes of one MPI message at most.
LIMIT = 1 << 30


def pieces(message: np.ndarray, limit: int = LIMIT) -> Iterator[np.ndarray]:
    """Yields a contiguous array's bytes in parts up to the limit; none if there are no bytes."""
    if message.nbytes:
        flat = as_bytes(message)
        for start in range(0, flat.size, limit):
            yield flat[start : start + limit]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Views the bytes of a contiguous array, `[nbytes]`."""
    assert array.flags.c_contiguous, "what is received into a copy is lost"
    return array.reshape(-1).view(np.uint8)


def post(
    comm: Comm,
    send: Sequence[np.ndarray | None],
    receive: Sequence[np.ndarray | None],
    limit: int = LIMIT,
    tag: int = 0,
) -> tuple[list[Request], int]:
    """Begins to send `send[r]` to each rank r and to fill `receive[r]` from it; returns what to wait for, and the bytes
    sent.

    Both are contiguous arrays by rank, of the lengths that the other side has; None: nothing. Messages have at most
    `limit` bytes. Only those of the same tag are received.
    """
    size, sent = len(send), 0
    requests: list[Request] = []
    # Each rank begins with its neighbour, so that no rank is everyone's first.
    sources = [(comm.rank - step) % size for step in range(1, size)]
    for source in sources:
        if (message := receive[source]) is not None:
            requests.extend(comm.Irecv(piece, source, tag) for piece in pieces(message, limit))
    for target in reversed(sources):
        if (message := send[target]) is not None:
            requests.extend(comm.Isend(piece, target, tag) for piece in pieces(message, limit))
            sent += message.nbytes
    return requests, sent


def swap(
    comm: Comm,
    waiting: Waiting,
    send: Sequence[np.ndarray | None],
    receive: Sequence[np.ndarray | None],
    limit: int = LIMIT,
    tag: int = 0,
) -> int:
    """Sends `send[r]` to each rank r and fills `receive[r]` from it, as `post`; returns the bytes sent."""
    requests, sent = post(comm, send, receive, limit, tag)
    waiting.finish(requests)
    return sent
