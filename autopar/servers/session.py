"""`Session`: a worker's training of a state that servers keep."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.backends.served import ServedPrograms, copied
from autopar.jax_types import Array
from autopar.launch.group import Group, before_waiting, everyone
from autopar.launch.shutdown import at_leaving
from autopar.launch.slowness import SLOWNESS
from autopar.protocols import Compute, Receive, pulling_step
from autopar.servers.link import Link
from autopar.servers.messages import Kept, Leave, Pull, Push, Return
from autopar.servers.server import StateSpec, on_host, sendable, state_of
from autopar.servers.timeline import Timeline

#: Sessions of this process, for whose workers others may wait. Global, as the process leaves them at its exit.
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def leave_sessions() -> None:
    """Lets nobody wait for this process's workers until they go on."""
    for session in list(_sessions):
        session.leave()


def _leave_for(group: Group) -> None:
    """Leaves before this process waits for others than those of its own worker."""
    if group.size == everyone().size:
        leave_sessions()


class Session:
    """Trains a state that servers keep: this process is a worker, and perhaps a server. Collective to make.

    Args:
      programs: The workers' and servers' programs.
      leaves: The step's flat arguments, with the state, the same on all processes; copied.
      staleness: The bound; None: there is none.
      mode: Identifies the steps that may continue with the state.
      clients: The workers.

    Attributes:
      steps: Steps that this worker has done.
      clocks: Its own leaves, by number of the step's input.
    """

    def __init__(
        self, programs: ServedPrograms, leaves: Sequence[Array], staleness: int | None, mode: str, clients: Clients
    ) -> None:
        self.mode, self.steps, self._staleness, self._is_away = mode, 0, staleness, False
        self.clocks: Mapping[int, Array] = {k: copied(leaves[k]) for k in programs.step.clocks}
        self._step = programs.step
        self.link = Link(
            [StateSpec(programs, n, leaves, clients.count, staleness) for n in range(len(programs.servers))],
            clients,
            Leave(clients.own),
        )
        if not _sessions:
            at_leaving(leave_sessions)
            before_waiting(_leave_for)
        _sessions.add(self)

    @property
    def served(self) -> Mapping[int, Sequence[int]]:
        """Leaf -> the servers that keep it."""
        return {k: [n for n, _ in pieces] for k, pieces in self._step.homes.items()}

    def step(self, programs: ServedPrograms, leaves: Sequence[Array]) -> dict[int, Array]:
        """Does a step; returns its results that are no state, by number of the output. The state in `leaves` isn't
        read."""
        given, link = [self.clocks.get(k, x) for k, x in enumerate(leaves)], self.link
        link.drain()
        self._is_away = False
        pulled: Sequence[Sequence[Array]] = ()
        pushed: dict[int, Sequence[Array]] = {}
        results: dict[int, Array] = {}
        for want in pulling_step(self.steps):
            if isinstance(want, Receive):
                pulled = [reply.values for reply in link.receive()]
            elif isinstance(want, Compute):
                with SLOWNESS.computing():
                    made, results, self.clocks = programs.work(pulled, given)
                    pushed = {n: [sendable(local(x)) for x in made[n]] for n in filter(link.speaks_to, link.servers)}
            elif want.kind == "pull":
                for n, ids in enumerate(programs.ids(given)):
                    link.request(n, Pull(link.number, want.number, [np.asarray(local(x)) for x in ids]))
            else:
                for n, values in pushed.items():
                    link.tell(n, Push(link.number, want.number, values))
        self.steps += 1
        return results

    def read(self, leaf: int) -> Array:
        """Returns a leaf of the state as it is now."""
        if leaf in self.clocks:
            return self.clocks[leaf]
        kept: dict[int, Array] = {number: self.link.read(n, number) for n, number in self._step.homes[leaf]}
        return self._step.whole_leaves(kept)[leaf]

    def leave(self) -> None:
        """Lets nobody wait for this worker until it goes on."""
        if self._is_away or self.link.workers == 1:
            return
        self._is_away = True
        for n in self.link.servers:
            self.link.tell(n, Leave(self.link.number))

    def collect(self) -> dict[int, Array]:
        """Returns the state after all workers' steps, by index of the step's input. Collective."""
        kept, clocks = self._kept()
        return self._step.whole_leaves(state_of(clocks, kept))

    def timeline(self) -> Timeline:
        """Returns all servers' events. Collective."""
        return Timeline(self.link.workers, self._staleness, [kept.events for kept in self._kept()[0]])

    def _kept(self) -> tuple[list[Kept], dict[int, Array]]:
        self.leave()
        own = {k: on_host(local(x)) for k, x in self.clocks.items()}
        kept = self.link.collect(own, Return(self.link.number))
        self._is_away = False
        return kept
