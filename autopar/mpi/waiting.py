"""Waiting for other ranks: one policy, in one place.

Two ways, of which all ranks of a job take the same one (a blocking collective doesn't match a nonblocking one):

- blocking: MPI's own calls, which spin on a core until the message is there. The fastest where each rank has a core.
- polling: a nonblocking call, then `Test` and yield, over and over, for as long as a message usually takes; after that
  a sleep after every few tests, the longer the longer it has waited. For jobs with more ranks than cores, and for
  programs in which other threads (gloo's, XLA's) need the core.

A single `Test` moves a message by one step only, so that a sleep after each turns 30 us into 3 ms: hence the yields
first, and several tests between sleeps.

A core on which everyone sleeps is idle, and an idle core comes back late: on a virtual machine whose host has other
guests after some ms, so that a step of 23 ms took 33 to 70. A rank that is bound to one core therefore yields for
longer: whoever else wants the core is on it already, and gets it. One that isn't bound must not: a core that yields to
nobody looks busy, and the scheduler leaves the other ranks where they are (80 ms became 120).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.jax_types import Comm, Pytree, Request
from autopar.mpi.limits import affinity, cores, machine_name
from autopar.mpi.world import world

#: How long a wait polls without sleeping, in seconds, and that of a rank which is bound to one core: longer than most.
PATIENCE_S, BOUND_PATIENCE_S = 50e-6, 20e-3


#: Lets another thread or process have the core, where one wants it.
_give_way: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A way to wait.

    Attributes:
      polling: Whether to poll; else MPI blocks.
      patience_s: How long a wait polls without sleeping, in seconds.
      pause_s: What it then sleeps between tests at first, in seconds (the kernel adds some 50 us to it).
      growth: Later this part of what it has waited so far: a wait becomes longer by so much at most.
      longest_s: The longest sleep, in seconds.
      tests: Tests between two sleeps.
      yields: Whether to yield after each test.
      sleep: Sleeps for so many seconds.
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
        """Returns when all these requests of mpi4py are done."""
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

    def _poll(self, kind: Any, requests: Sequence[Request]) -> None:
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


#: Of a thread beside the rank's programs: MPI's own waiting would take a core from these, and who yields one gets it
#: back late (a sum of 20 ms took 80 beside a program of 80 ms); who has slept gets it at once.
BESIDE = Waiting(polling=True, patience_s=0, pause_s=200e-6, growth=0, yields=False)


def choose_waiting(
    comm: Comm, polling: bool | None = None, *, shares_cores: bool = False, own: Collection[int] | None = None
) -> Waiting:
    """Chooses the way to wait that suits all ranks. Collective.

    Args:
      polling: What the user wants; one rank that polls makes all poll. None: where some machine has more ranks than
        cores for them, or `shares_cores`.
      shares_cores: Whether other threads of the program communicate too, as gloo's do.
      own: The cores that this rank may run on, as the system says if left out.
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
    """Counts the cores that ranks of one machine have together. Equal affinities mean the same cores, and the same
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
# An MPI call counts in ints: what is longer than `limit` bytes travels in pieces. Both ends know how long a message is,
# and MPI keeps the order of messages between two ranks, so the pieces need no agreement.

#: Bytes of one MPI message at most.
LIMIT = 1 << 30


def pieces(message: np.ndarray, limit: int = LIMIT) -> Iterator[np.ndarray]:
    """Cuts a contiguous array's bytes into parts, none longer than the limit; none at all if there are no bytes."""
    if message.nbytes:
        flat = as_bytes(message)
        for start in range(0, flat.size, limit):
            yield flat[start : start + limit]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Views the bytes of a contiguous array, `[nbytes]`, without a copy."""
    assert array.flags.c_contiguous, "what is received into a copy is lost"
    return array.reshape(-1).view(np.uint8)


def swap(
    comm: Comm,
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
    requests: list[Request] = []
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
