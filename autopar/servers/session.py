"""`Session`: a worker's training of a state that servers keep, one in each of the first processes."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.backends.served import ServedPrograms
from autopar.launch.group import everyone
from autopar.launch.progress import PROGRESS
from autopar.launch.slowness import SLOWNESS
from autopar.mpi.service import service
from autopar.servers.messages import Kept, Leave, Pull, Push, Read
from autopar.servers.server import on_host, served, state_of
from autopar.servers.timeline import Timeline

Array = Any


class Session:
    """What this process does for the training of a state: it is a worker, and perhaps a server. Collective to make.

    Args:
      programs: What workers and servers run.
      leaves: The step's flat arguments; of these the state, the same on all processes. It is copied.
      staleness: The bound; None: there is none.
      mode: What steps that go on with the state have in common with the first one.

    Attributes:
      steps: How many this worker has done.
      clocks: Its own leaves, by number of the step's input.
    """

    def __init__(self, programs: ServedPrograms, leaves: Sequence[Array], staleness: int | None, mode: str) -> None:
        self.mode, self.steps, self._staleness = mode, 0, staleness
        self.clocks: Mapping[int, Array] = {k: jnp.copy(leaves[k]) for k in programs.step.clocks}
        self._programs, self._homes = programs, programs.step.homes
        self._service, self._servers = service(), range(len(programs.servers))
        here = self._service.rank
        server = served(programs, here, leaves, self._service.size, staleness) if here < len(programs.servers) else None
        self._number = self._service.register(None if server is None else server.take)
        everyone().gather(b"", "servers are there")
        weakref.finalize(self, self._service.release, self._number)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._service.rank

    @property
    def served(self) -> Mapping[int, int]:
        """Leaf -> the server that keeps it."""
        return self._homes

    def step(self, programs: ServedPrograms, leaves: Sequence[Array]) -> dict[int, Array]:
        """Do a step; returns its results that are no state, by number of the output.

        Args:
          programs: Those at these shapes.
          leaves: The step's flat arguments, of which those of the state aren't read.
        """
        given = [self.clocks.get(k, x) for k, x in enumerate(leaves)]
        rank = self._service.rank
        for n, ids in enumerate(programs.ids(given)):
            self._send(n, Pull(rank, self.steps, [np.asarray(x) for x in ids]))
        with PROGRESS.during("pulling weights", "pulls"):
            pulled = [self._receive(n).values for n in self._servers]
        with SLOWNESS.computing():
            pushed, results, self.clocks = programs.work(pulled, given)
            sent = [[np.asarray(x) for x in values] for values in pushed]
        for n, values in enumerate(sent):
            self._send(n, Push(rank, self.steps, values))
        self.steps += 1
        return results

    def read(self, leaf: int) -> Array:
        """A leaf of the state as it is now."""
        if leaf in self.clocks:
            return self.clocks[leaf]
        home = self._homes[leaf]
        self._send(home, Read(self._service.rank, (leaf,)))
        return jnp.asarray(self._receive(home).leaves[leaf])

    def settled(self) -> dict[int, Array]:
        """The state by number of the step's input, once all workers have done their steps: `state_of`. Collective."""
        kept, clocks = self._kept()
        return state_of(clocks, kept)

    def timeline(self) -> Timeline:
        """What all servers did. Collective."""
        return Timeline(self._service.size, self._staleness, [kept.events for kept in self._kept()[0]])

    def _kept(self) -> tuple[list[Kept], dict[int, Array]]:
        """What each server keeps once all workers have done their steps, and the first worker's own. Nobody waits for
        this worker until it goes on."""
        rank, processes = self._service.rank, everyone()
        for n in self._servers:
            self._send(n, Leave(rank))
            self._send(n, Read(rank, ()))
        with PROGRESS.during("the others' steps", "waits"):
            for n in self._servers:
                self._receive(n)
            processes.gather(b"", "all have pushed")
        mine = None
        if rank in self._servers:
            self._send(rank, Read(rank))
            mine = self._receive(rank)
        own = {k: on_host(x) for k, x in self.clocks.items()} if rank == 0 else {}
        all_ = [pickle.loads(x) for x in processes.gather(pickle.dumps((mine, own)), "what servers keep")]
        return [kept for kept, _ in all_[: len(self._servers)]], all_[0][1]

    def _send(self, server: int, message: Any) -> None:
        self._service.send(self._number, server, message)

    def _receive(self, server: int) -> Any:
        return self._service.receive(self._number, server)
