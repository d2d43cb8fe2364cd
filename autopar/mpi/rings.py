"""Reduces a buffer over the ranks in rings, by reduce-scatter and allgather: bucket algorithms (MXNET-MPI, section 6).

Each rank sends to the next one and receives from the one before, in p - 1 turns, a p-th of the buffer each. So an
AllReduce sends 2(p - 1)/p of it, the least possible. A turn has to wait for the addition of the last one; the buffer
is therefore divided over several rings, of which one adds while pieces of the others are on their way (figure 9).

A node's vectors are summed first (6.1): those of a rank's devices before they come here; and ranks of one machine
scatter their sum among themselves, reduce each part with the other machines, and gather (`NodeRings`). So each of m
machines sends 2(m - 1)/m of the buffer through the network.

Results have the same bits on every rank, and in each run: a piece is added up in the order of a ring.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from autopar.jax_types import Comm, Request
from autopar.mpi.buffers import ALIGNMENT, Buffers
from autopar.mpi.waiting import Waiting, as_bytes

#: Number of rings between machines.
RINGS = 2
#: Bytes that are added between two tests of messages: over TCP these go on only while MPI is called.
_BETWEEN_LOOKS = 1 << 18
#: MPI's name of a reduction -> NumPy's function.
_UFUNCS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
}


class Rings:
    """One rank's part in collectives between equally distant ranks.

    All calls are collective and in place, on arrays `[n]` in C order, of one dtype and length on all ranks, no longer
    than a message may be.
    """

    def __init__(self, comm: Comm, waiting: Waiting, rings: int = RINGS) -> None:
        """Takes an mpi4py communicator that nothing else uses meanwhile."""
        self._comm, self._waiting, self._rings = comm, waiting, rings
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._scratch = Buffers(sets=1)
        #: What this rank has sent, in bytes.
        self.sent_bytes = 0

    def all_reduce(self, flat: np.ndarray, op: str) -> None:
        """Reduces an array on every rank. `op`: MPI's name ("SUM")."""
        self.reduce_scatter(flat, op)
        self.all_gather(flat)

    def reduce_scatter(self, flat: np.ndarray, op: str) -> None:
        """Reduces an array; a rank gets its pieces of the result (`own`), and anything in the others."""
        self._go_round(flat, -1, _UFUNCS[op])

    def all_gather(self, flat: np.ndarray) -> None:
        """Completes an array of which each rank has its own pieces (`own`)."""
        self._go_round(flat, 0, None)

    def own(self, flat: np.ndarray) -> list[np.ndarray]:
        """Returns this rank's piece of each ring."""
        return [ring[self.rank] for ring in self._pieces(flat)]

    def _pieces(self, flat: np.ndarray) -> list[list[np.ndarray]]:
        """Returns for each ring its pieces by rank, nearly equal and cut at cache lines."""
        lines = -(-flat.nbytes // ALIGNMENT)
        count, each = self._rings * self.size, max(ALIGNMENT // flat.itemsize, 1)
        cuts = [k * lines // count * each for k in range(count)] + [flat.size]
        parts = [flat[a:b] for a, b in itertools.pairwise(cuts)]
        return [parts[k : k + self.size] for k in range(0, count, self.size)]

    def _go_round(self, flat: np.ndarray, first: int, ufunc: np.ufunc | None) -> None:
        """Does p - 1 turns in all rings. `first`: the piece that a rank begins with, counted from its own."""
        rings = self._pieces(flat)
        under_way: deque[tuple[int, int, list[Request]]] = deque()

        def received(ring: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
            """Returns a turn's target, and the buffer that receives its piece."""
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
    """One rank's part in an AllReduce over machines with equal numbers of ranks."""

    def __init__(self, comm: Comm, waiting: Waiting, machines: Sequence[Hashable]) -> None:
        """Takes the machine of each rank, and arguments of `Rings`. Collective."""
        rank = comm.Get_rank()
        number = list(machines[:rank]).count(machines[rank])
        self._near = Rings(comm.Split(machines.index(machines[rank]), rank), waiting, 1)
        self._far = Rings(comm.Split(number, rank), waiting)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other machines."""
        return self._far.sent_bytes

    def all_reduce(self, flat: np.ndarray, op: str) -> None:
        """Reduces as `Rings` does: within machines, between them, and back."""
        self._near.reduce_scatter(flat, op)
        for part in self._near.own(flat):
            self._far.all_reduce(part, op)
        self._near.all_gather(flat)


def _combine(ufunc: np.ufunc, target: np.ndarray, other: np.ndarray, under_way: Sequence[Request]) -> None:
    """Combines two arrays into the first one, and tests messages in between."""
    step = max(_BETWEEN_LOOKS // target.itemsize, 1)
    with np.errstate(all="ignore"):  # what overflows is infinite, as in JAX
        for start in range(0, target.size, step):
            part = target[start : start + step]
            ufunc(other[start : start + step], part, out=part)
            if under_way:
                type(under_way[0]).Testall(under_way)
