"""Exchanges between ranks of which several share a machine: rows for another machine cross the network once.

For each rank on another machine one rank of this machine is the *node leader*; a rank of this machine is its own. Ranks
ask the node leaders, within the machine, and node leaders ask the owners for the rows that any of the machine's ranks
wants. Rows return the same way, and node leaders add up gradients before they send them on. This is Parallax's local
aggregation (papers/parallax.txt, 5.1 and 5.2), also for rows and their numbers.

Invariants, beside those of `exchange`:

- Two ranks of a machine exchange only what one of them wants. From a machine to an owner on another one each row's
  number and its gradients go once, and the row returns once.
- Sums are taken within each machine in the order of the ranks, and then in the order of the node leaders' ranks, an
  owner being the node leader of its own machine; that is the order of the machines, if ranks are numbered machine by
  machine. Sums of 16-bit and 8-bit floats are rounded once in each machine, and once at the owner.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.jax_types import Comm
from autopar.mpi.buffers import RESERVE, aligned, memory_refusal
from autopar.mpi.exchange import Exchange, Kind, Requested, Rounds, first_of, require_rows
from autopar.mpi.limits import machine_name, memory_levels
from autopar.mpi.rings import NodeRings, Rings
from autopar.mpi.waiting import Waiting
from autopar.mpi.world import World, world


def exchange(*, by_leaders: bool = True) -> Exchange:
    """Returns this process's exchanges with all other ranks of the job. Collective, the first time.

    `by_leaders`: by way of node leaders, if they save anything; else every rank exchanges by itself with all others.
    """
    usual = _connected()
    return usual if by_leaders or not isinstance(usual, LeaderExchange) else _connected_without_leaders()


@functools.cache
def _connected() -> Exchange:
    return connect(world())


@functools.cache
def _connected_without_leaders() -> Exchange:
    here, usual = world(), _connected()
    found = Exchange(here.rank, here.size, here.comm.Dup())
    found.near, found.near_ranks = usual.near, usual.near_ranks
    return found


def connect(here: World, machines: Sequence[Hashable] | None = None) -> Exchange:
    """Returns a job's exchange, by way of node leaders if they save anything. Collective.

    `machines`: by rank the machine that it is on, the same on all ranks; None: they ask each other.
    """
    if here.size == 1:
        return Exchange(here.rank, 1, None)
    named: Sequence[Hashable] = here.comm.allgather(machine_name()) if machines is None else machines
    if 1 < len(set(named)) < here.size:
        return LeaderExchange(here.rank, here.size, here.comm, named)
    found = Exchange(here.rank, here.size, here.comm)
    if len(set(named)) > 1:  # each is on a machine of its own
        found.near, found.near_ranks = Exchange(0, 1, None), (here.rank,)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RequestedByLeaders(Requested):
    """Rows that are wanted, by way of node leaders. `sources` are of node leaders' requests.

    Attributes:
      near: Requests between this rank and its machine's node leaders.
      far: Requests between this rank as a node leader, and owners.
    """

    near: Requested
    far: Requested


class LeaderExchange(Exchange):
    """One rank's exchanges with the others, rows by way of node leaders. `machines`: the ranks of each machine; `near`:
    exchanges within this one."""

    def __init__(self, rank: int, size: int, comm: Comm, machines: Sequence[Hashable]) -> None:
        """Connects at least 2 ranks. Collective."""
        super().__init__(rank, size, comm)
        self.knows_lists = False
        groups: dict[Hashable, list[int]] = {}
        for r, machine in enumerate(machines):
            groups.setdefault(machine, []).append(r)
        self.machines = tuple(tuple(ranks) for ranks in groups.values())
        mine = groups[machines[rank]]
        within = comm.Split(mine[0], rank)
        alone = len(mine) == 1
        if alone:
            within.Free()
        self.near = Exchange(mine.index(rank), len(mine), None if alone else within, polling=self.polling)
        self.near_ranks, self.near_bytes = tuple(mine), self.near.sent_bytes
        self._leaders = _leaders(mine, size)
        self._by_leader = sorted(range(size), key=lambda owner: (self._leaders[owner], owner))
        self._askable = frozenset(o for o in range(size) if o not in mine and mine[self._leaders[o]] == rank)
        self._askers = frozenset(ranks[_leaders(ranks, size)[rank]] for ranks in self.machines if rank not in ranks)

    def asking(self, indices: np.ndarray, shard_rows: int) -> Rounds[RequestedByLeaders]:
        total = self.size * shard_rows
        indices = indices.astype(np.int64, copy=False)
        bounds = self._bounds(indices, shard_rows)
        # Places of a table of which each node leader owns as many rows as there are in all.
        keys = np.empty(indices.size, np.int64)
        for owner, part, sent in self._parts(bounds):
            np.add(indices[part], self._leaders[owner] * total, out=keys[sent])
        near = yield from self.near.asking(keys, total)
        far = yield from super().asking(near.rows, shard_rows)
        return RequestedByLeaders(far.rows, bounds, far.sources, near, far)

    def fetching(self, requested: Requested, rows: np.ndarray, out: np.ndarray | None = None) -> Rounds[np.ndarray]:
        assert isinstance(requested, RequestedByLeaders), "what was asked by way of node leaders is fetched so"
        if self.near.size == 1:
            return (yield from super().fetching(requested.far, rows, out))
        require_rows(rows, len(requested.rows), "rows")
        shape = requested.size, *rows.shape[1:]
        result = aligned(shape, rows.dtype) if out is None else first_of(out, requested.size, rows)
        with self._scratch() as scratch:
            by_leaders = scratch.take("by leaders", (requested.far.size, *shape[1:]), rows.dtype)
            sorted_ = scratch.take("by node leader", shape, rows.dtype)
            fetched = yield from super().fetching(requested.far, rows, by_leaders)
            yield from self.near.fetching(requested.near, fetched, sorted_)
            for _, part, sent in self._parts(requested.bounds):
                result[part] = sorted_[sent]
        return result

    def delivering(self, requested: Requested, sums: np.ndarray, out: np.ndarray | None = None) -> Rounds[np.ndarray]:
        assert isinstance(requested, RequestedByLeaders), "what was asked by way of node leaders is delivered so"
        if self.near.size == 1:
            return (yield from super().delivering(requested.far, sums, out))
        require_rows(sums, requested.size, "sums")
        if out is not None:
            first_of(out, len(requested.rows), sums)  # refused before anything is sent
        with self._scratch() as scratch:
            sorted_ = scratch.take("by node leader", sums.shape, sums.dtype)
            for _, part, sent in self._parts(requested.bounds):
                sorted_[sent] = sums[part]
            by_leaders = scratch.take("by leaders", (requested.far.size, *sums.shape[1:]), sums.dtype)
            near = yield from self.near.delivering(requested.near, sorted_, by_leaders)
            return (yield from super().delivering(requested.far, near, out))

    def swap(self, kind: Kind, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]) -> None:
        super().swap(kind, sends, receives)
        mine = next(ranks for ranks in self.machines if self.rank in ranks)
        near = sum(m.nbytes for r, m in enumerate(sends) if m is not None and r in mine and r != self.rank)
        self.sent_bytes[kind] -= near
        self.near_bytes[kind] += near

    def _made_rings(self, waiting: Waiting) -> Rings | NodeRings:
        are_alike = len({len(ranks) for ranks in self.machines}) == 1
        if not are_alike:
            return super()._made_rings(waiting)
        machines = [next(m for m, ranks in enumerate(self.machines) if r in ranks) for r in range(self.size)]
        return NodeRings(self._comm, waiting, machines)

    def _parts(self, bounds: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
        end = 0
        for owner in self._by_leader:
            start, stop = bounds[owner], bounds[owner + 1]
            yield owner, slice(start, stop), slice(end, end + stop - start)
            end += stop - start


def _leaders(ranks: Sequence[int], size: int) -> list[int]:
    """Returns for each owner which of a machine's ranks is the node leader; owners on other machines are assigned in
    turn."""
    others = [r for r in range(size) if r not in ranks]
    leaders = {r: k for k, r in enumerate(ranks)} | {r: k % len(ranks) for k, r in enumerate(others)}
    return [leaders[r] for r in range(size)]


# --- memory for the tables of all ranks, before any is taken ---
#
# Ranks on one machine share its memory: each by itself would find memory for its own tables, and the system would then
# kill one of them. So they ask together, and if there is too little, every rank raises the same error.


def require_memory(exchange: Exchange, tables: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]]) -> None:
    """Raises HostMemoryError on every rank if the tables of all ranks together don't fit somewhere. Collective.

    `tables`: path -> shape and dtype that this rank is about to allocate. The error names the host, and the two
    largest tables there.
    """
    wanted = {path: math.prod(shape) * np.dtype(dtype).itemsize for path, (shape, dtype) in tables.items()}
    message = json.dumps({"host": os.uname().nodename, "levels": memory_levels(), "wanted": wanted}).encode()
    ranks = [json.loads(text.tobytes()) for text in exchange.gather(np.frombuffer(message, np.uint8))]
    for level in dict.fromkeys(name for rank in ranks for name in rank["levels"]):
        sharing = {r: rank for r, rank in enumerate(ranks) if level in rank["levels"]}
        available = min(rank["levels"][level] for rank in sharing.values()) - RESERVE
        sums: collections.Counter[str] = collections.Counter()
        for rank in sharing.values():
            sums.update(rank["wanted"])
        total = sum(sums.values())
        if total > max(available, 0):
            (largest, alone), *others = sums.most_common(2)
            hosts = " and ".join(sorted({rank["host"] for rank in sharing.values()}))
            where = f"on {hosts} for rank{'s' if len(sharing) > 1 else ''} {', '.join(map(str, sharing))}"
            what = "it"
            for second, nbytes in others:
                what = f"with {len(sums) - 1} more (it alone {alone / 1e9:.2f} GB, {second} {nbytes / 1e9:.2f} GB)"
            raise memory_refusal(largest, what, total, max(available, 0), where)
