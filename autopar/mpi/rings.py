"""AllReduce, reduce-scatter and allgather of one buffer in rings: bucket algorithms (MXNET-MPI, section 6).

Each rank sends to the next one and receives from the one before, in p - 1 turns a piece of a p-th each, so that an
AllReduce sends 2(p - 1)/p of the buffer, which is the least there is, by any number of ranks. A turn has to wait for
the addition of the last one; so the buffer is divided over several rings, of which one adds while the pieces of the
others are on their way (figure 9).

The vectors of a node are one (6.1): those of a rank's devices are added before they come here, and ranks of one
machine scatter their sum among themselves, reduce each part with the other machines, and gather (`NodeRings`). So the
network has 2(m - 1)/m of the buffer from each of m machines.

Results have the same bits on every rank, and in each run: a piece is added up in the order of a ring.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.mpi.buffers import ALIGNMENT, Buffers
from autopar.mpi.messages import as_bytes
from autopar.mpi.waiting import Waiting

#: How many rings a buffer is divided over, between machines.
RINGS = 2
#: Bytes that are added between two looks at what is on its way: over TCP messages go on only while MPI is called.
_BETWEEN_LOOKS = 1 << 18
#: MPI's name of a reduction -> what computes it here.
_UFUNCS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
}


class Rings:
    """One rank's part in collectives of ranks that are equally far from each other.

    All calls are collective, and in place: of arrays `[n]` of one dtype, in C order, as long on all ranks, each no
    longer than a message may be.
    """

    def __init__(self, comm: Any, waiting: Waiting, rings: int = RINGS) -> None:
        """`comm`: an mpi4py communicator that nothing else uses meanwhile."""
        self._comm, self._waiting, self._rings = comm, waiting, rings
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._scratch = Buffers(sets=1)
        #: What this rank has sent, in bytes.
        self.sent_bytes = 0

    def all_reduce(self, flat: np.ndarray, op: str) -> None:
        """Reduce an array, all of it on every rank. `op`: MPI's name ("SUM")."""
        self.reduce_scatter(flat, op)
        self.all_gather(flat)

    def reduce_scatter(self, flat: np.ndarray, op: str) -> None:
        """Reduce an array; a rank has its pieces of the result (`own`), and anything in the others."""
        self._go_round(flat, -1, _UFUNCS[op])

    def all_gather(self, flat: np.ndarray) -> None:
        """Complete an array of which each rank has its own pieces (`own`)."""
        self._go_round(flat, 0, None)

    def own(self, flat: np.ndarray) -> list[np.ndarray]:
        """Returns this rank's pieces of an array, of each ring one."""
        return [ring[self.rank] for ring in self._pieces(flat)]

    def _pieces(self, flat: np.ndarray) -> list[list[np.ndarray]]:
        """Returns for each ring its pieces, by rank: nearly equal ones, cut at cache lines."""
        lines = -(-flat.nbytes // ALIGNMENT)
        count, each = self._rings * self.size, max(ALIGNMENT // flat.itemsize, 1)
        cuts = [k * lines // count * each for k in range(count)] + [flat.size]
        parts = [flat[a:b] for a, b in itertools.pairwise(cuts)]
        return [parts[k : k + self.size] for k in range(0, count, self.size)]

    def _go_round(self, flat: np.ndarray, first: int, ufunc: np.ufunc | None) -> None:
        """Do p - 1 turns in all rings. `first`: which piece a rank begins with, counted from its own one."""
        rings = self._pieces(flat)
        under_way: deque[tuple[int, int, list[Any]]] = deque()

        def received(ring: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
            """Where a turn's piece belongs, and where it is received."""
            target = rings[ring][(self.rank + first - turn - 1) % self.size]
            if ufunc is None:
                return target, target
            return target, self._scratch.take(f"ring {ring}", target.shape, target.dtype)

        def begin(ring: int, turn: int) -> None:
            sent = rings[ring][(self.rank + first - turn) % self.size]
            _, buffer = received(ring, turn)
            after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
            requests = [self._comm.Irecv(as_bytes(buffer), before, ring), self._comm.Isend(as_bytes(sent), after, ring)]
            self.sent_bytes += sent.nbytes
            under_way.append((ring, turn, requests))

        for ring in range(self._rings if self.size > 1 else 0):
            begin(ring, 0)
        while under_way:
            ring, turn, requests = under_way.popleft()
            self._waiting.finish(requests)
            if ufunc is not None:
                _combine(ufunc, *received(ring, turn), [r for *_, others in under_way for r in others])
            if turn + 2 < self.size:
                begin(ring, turn + 1)


class NodeRings:
    """One rank's part in the AllReduce of a job whose machines have as many ranks each."""

    def __init__(self, comm: Any, waiting: Waiting, machines: Sequence[Any]) -> None:
        """Collective. `machines`: by rank, what machine it is on; other arguments as of `Rings`."""
        rank = comm.Get_rank()
        number = list(machines[:rank]).count(machines[rank])
        self._near = Rings(comm.Split(machines.index(machines[rank]), rank), waiting, 1)
        self._far = Rings(comm.Split(number, rank), waiting)

    @property
    def sent_bytes(self) -> int:
        """Returns what this rank has sent to other machines, in bytes."""
        return self._far.sent_bytes

    def all_reduce(self, flat: np.ndarray, op: str) -> None:
        """As of `Rings`."""
        self._near.reduce_scatter(flat, op)
        for part in self._near.own(flat):
            self._far.all_reduce(part, op)
        self._near.all_gather(flat)


def _combine(ufunc: np.ufunc, target: np.ndarray, other: np.ndarray, under_way: Sequence[Any]) -> None:
    """Combine two arrays into the first one, and look at messages in between."""
    step = max(_BETWEEN_LOOKS // target.itemsize, 1)
    with np.errstate(all="ignore"):  # what overflows is infinite, as in JAX
        for start in range(0, target.size, step):
            part = target[start : start + step]
            ufunc(other[start : start + step], part, out=part)
            if under_way:
                type(under_way[0]).Testall(under_way)
