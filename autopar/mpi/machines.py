"""Exchanges of ranks of which several share a machine: what these want of another machine crosses the network once.

For each rank on another machine one rank of this machine is the *relay*; a rank of this machine is its own. Ranks ask
the relays, within the machine, and relays ask the owners for what any of the machine's ranks wants; rows come back the
same way, and gradients are added up at the relay before they are sent on. This is Parallax's local aggregation
(papers/parallax.txt, 5.1 and 5.2), and the same for rows and their numbers.

Invariants, beside those of `exchange`:

- Between two ranks of a machine nothing goes but what one of them wants; from a machine to an owner on another one
  each row's number and its gradients go once, and the row once in return.
- The order of sums: within each machine that of the ranks, and then that of the relays' ranks, an owner being the relay
  of its own machine: that of the machines, where ranks are numbered machine by machine. Sums of 16-bit and 8-bit floats
  are rounded once in each machine, and once at the owner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.mpi.buffers import aligned
from autopar.mpi.exchange import Asked, Exchange
from autopar.mpi.limits import machine_name
from autopar.mpi.rows import first_of, require_rows
from autopar.mpi.world import World


def connect(here: World, machines: Sequence[Hashable] | None = None) -> Exchange:
    """The exchange that suits a job: by way of relays where that saves anything. Collective.

    `machines`: by rank, what machine it is on, the same on all ranks; None: they ask each other.
    """
    if here.size == 1:
        return Exchange(here.rank, 1, None)
    named: Sequence[Hashable] = here.comm.allgather(machine_name()) if machines is None else machines
    if 1 < len(set(named)) < here.size:
        return RelayedExchange(here.rank, here.size, here.comm, named)
    return Exchange(here.rank, here.size, here.comm)


@dataclass(frozen=True, slots=True, eq=False)
class Relayed(Asked):
    """Who wants which rows, by way of relays. `sources` are those that the ranks asked for as relays.

    Attributes:
      near: What this rank asked its machine's relays for, and they it.
      far: What it asked the owners for as a relay, and the others' relays it.
    """

    near: Asked
    far: Asked


class RelayedExchange(Exchange):
    """One rank's exchanges with the others, rows by way of relays.

    Attributes:
      machines: The ranks of each machine.
      near: Exchanges with the ranks of this machine.
    """

    def __init__(self, rank: int, size: int, comm: Any, machines: Sequence[Hashable]) -> None:
        """Collective. Arguments as of an `Exchange`, of 2 ranks at least, and of `connect`."""
        super().__init__(rank, size, comm)
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
        self.near_bytes = self.near.sent_bytes
        self._relays = _relays(mine, size)
        self._by_relay = sorted(range(size), key=lambda owner: (self._relays[owner], owner))
        self._askable = frozenset(o for o in range(size) if o not in mine and mine[self._relays[o]] == rank)
        self._askers = frozenset(ranks[_relays(ranks, size)[rank]] for ranks in self.machines if rank not in ranks)

    def ask(self, places: np.ndarray, share: int) -> Relayed:
        """As of an `Exchange`, by way of relays."""
        total = self.size * share
        places = places.astype(np.int64, copy=False)
        bounds = self._bounds(places, share)
        # As places of a table of which each relay has as many rows as there are in all.
        keys = np.empty(places.size, np.int64)
        for owner, given, sent in self._parts(bounds):
            np.add(places[given], self._relays[owner] * total, out=keys[sent])
        near = self.near.ask(keys, total)
        far = super().ask(near.rows, share)
        return Relayed(far.rows, bounds, far.sources, near, far)

    def fetch(self, asked: Asked, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """As of an `Exchange`, by way of relays."""
        assert isinstance(asked, Relayed), "what was asked by way of relays is fetched so"
        if self.near.size == 1:
            return super().fetch(asked.far, rows, out)
        require_rows(rows, len(asked.rows), "rows")
        shape = asked.size, *rows.shape[1:]
        result = aligned(shape, rows.dtype) if out is None else first_of(out, asked.size, rows)
        relayed = self._scratch.take("relayed", (asked.far.size, *shape[1:]), rows.dtype)
        sorted_ = self._scratch.take("by relay", shape, rows.dtype)
        self.near.fetch(asked.near, super().fetch(asked.far, rows, relayed), sorted_)
        for _, given, sent in self._parts(asked.bounds):
            result[given] = sorted_[sent]
        return result

    def deliver(self, asked: Asked, sums: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """As of an `Exchange`, by way of relays, which add up what their machine has."""
        assert isinstance(asked, Relayed), "what was asked by way of relays is delivered so"
        if self.near.size == 1:
            return super().deliver(asked.far, sums, out)
        require_rows(sums, asked.size, "sums")
        if out is not None:
            first_of(out, len(asked.rows), sums)  # refused before anything is sent
        sorted_ = self._scratch.take("by relay", sums.shape, sums.dtype)
        for _, given, sent in self._parts(asked.bounds):
            sorted_[sent] = sums[given]
        relayed = self._scratch.take("relayed", (asked.far.size, *sums.shape[1:]), sums.dtype)
        return super().deliver(asked.far, self.near.deliver(asked.near, sorted_, relayed), out)

    def _parts(self, bounds: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
        """Each owner, where its places are among the given ones, and where they are among those sorted by relay."""
        end = 0
        for owner in self._by_relay:
            start, stop = bounds[owner], bounds[owner + 1]
            yield owner, slice(start, stop), slice(end, end + stop - start)
            end += stop - start


def _relays(ranks: Sequence[int], size: int) -> list[int]:
    """By owner, which of a machine's ranks is the relay; owners on other machines are dealt out."""
    others = [r for r in range(size) if r not in ranks]
    found = {r: k for k, r in enumerate(ranks)} | {r: k % len(ranks) for k, r in enumerate(others)}
    return [found[r] for r in range(size)]
