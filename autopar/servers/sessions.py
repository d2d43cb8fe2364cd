"""`Session`: a worker's training of a state that servers keep; `ExchangeSession`: a client's exchanges of weights, with
a centre on servers or with neighbours in a ring."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.clients import Clients
from autopar.backends.global_arrays import local
from autopar.backends.served import ServedPrograms, copied
from autopar.ir.served import Span, center_shares
from autopar.jax_types import Array, Leaf
from autopar.launch.group import Group, before_waiting, everyone
from autopar.launch.shutdown import at_leaving
from autopar.launch.slowness import SLOWNESS
from autopar.protocols import Compute, Receive, Send, Want, elastic_step, pulling_step
from autopar.servers.center import CenterSpec, NeighborSpec
from autopar.servers.link import Link
from autopar.servers.messages import Exchange, Kept, Leave, Pull, Push, Read, Return, Spec, Stepped
from autopar.servers.server import StateSpec, on_host, sendable, state_of
from autopar.servers.timeline import Timeline


class End(abc.ABC):
    """A client's part of its exchanges: chooses the values that it sends, and applies answers.

    `ExchangeSession`, and in replays `planning.replay_clients`, send the messages.
    """

    @abc.abstractmethod
    def look_up(self, leaves: Sequence[Leaf], known: Collection[int]) -> None:
        """Finds the rows that a step will change. `leaves`: its flat arguments. `known`: those that the client's last
        step returned."""

    @abc.abstractmethod
    def step(self, number: int) -> Iterator[Want]:
        """Yields the actions of the client's next step, which `number` others precede (`protocols`)."""

    @abc.abstractmethod
    def sent(self, want: Send, weights: Mapping[int, Array]) -> Mapping[int, Sequence[Array]]:
        """Returns the values to send, by server, perhaps the weights' own arrays. All of the client's processes call
        it."""

    @abc.abstractmethod
    def applied(self, weights: Mapping[int, Array], answers: Sequence[Sequence[Array]]) -> dict[int, Array]:
        """Returns new weights, from those after a step and the servers' answers."""


def message(client: int, want: Send, values: Sequence[Array]) -> Exchange | Stepped:
    """Makes the message, with copies of the values: a step may update weights in place."""
    return (Exchange if want.kind == "exchange" else Stepped)(client, want.number, [np.array(x) for x in values])


class ExchangeSession:
    """Runs a client's exchanges, of which this process does its part. Collective to make. `servers`, `clients`,
    `processes`: as for `Link`."""

    is_ring: ClassVar[bool] = False

    def __init__(
        self, end: End, servers: Sequence[Spec], clients: Clients, processes: Sequence[int] | None = None
    ) -> None:
        self.end, self._link = end, Link(servers, clients, processes=processes)
        #: The remaining actions of the step under way, and the server whose answer they wait for; None: all servers'.
        self._wants: Iterator[Want] = iter(())
        self._asked: int | None = None

    def begin(self, weights: Mapping[int, Array], number: int) -> None:
        """Begins a step, and the exchange beside it. `number`: of the steps before it."""
        self._link.drain()  # servers finished the exchange of a step that was cut short
        self._wants = self.end.step(number)
        self._go_on(weights)

    def finish(self, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Returns the new weights after a step's exchange; none if it has no exchange."""
        return self._go_on(weights)

    def receive(self, server: int | None) -> list[Sequence[Array]]:
        """Returns the values of one server's answer, or of all servers' (None)."""
        replies = self._link.receive() if server is None else [self._link.answer(server)]
        return [reply.values for reply in replies]

    def timeline(self) -> Timeline:
        """Returns all exchanges, in each server's order. Collective."""
        kept, _ = self._link.collect(leaves=())
        return Timeline(self._link.workers, None, [each.events for each in kept], ring=self.is_ring)

    def _go_on(self, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Runs actions up to the computation, or to the end of the step."""
        made: dict[int, Array] = {}
        for want in self._wants:
            if isinstance(want, Compute):
                break
            if isinstance(want, Send):
                self._asked = want.server
                for n, values in self.end.sent(want, weights).items():
                    if self._link.speaks_to(n):
                        self._link.request(n, message(self._link.number, want, values))
            else:
                made = self.end.applied(weights, self.receive(self._asked))
        return made


class CenterParts:
    """Divides weights over `count` servers, at most `servers`, and joins their parts again."""

    def __init__(self, weights: Mapping[int, Array], servers: int) -> None:
        self.numbers = list(weights)
        self._like = [(x.shape, x.dtype) for x in weights.values()]
        self._shares = center_shares([x.nbytes for x in weights.values()], servers)
        self.count = len(self._shares)

    def of(self, server: int, weights: Mapping[int, Array]) -> list[np.ndarray]:
        """Returns a server's part of some weights, flat, without a copy if possible."""
        return [self._flat(span, weights) for span in self._shares[server]]

    def joined(self, parts: Sequence[Sequence[Array]]) -> dict[int, np.ndarray]:
        """Returns weights by index of the step's input, from all servers' parts."""
        pieces: list[list[tuple[int, Array]]] = [[] for _ in self.numbers]
        for share, values in zip(self._shares, parts, strict=True):
            for span, value in zip(share, values, strict=True):
                pieces[span.weight].append((span.start, np.asarray(value)))
        made = {}
        for k, (shape, _), some in zip(self.numbers, self._like, pieces, strict=True):
            flat = [value for _, value in sorted(some, key=lambda piece: piece[0])]
            made[k] = (flat[0] if len(flat) == 1 else np.concatenate(flat)).reshape(shape)
        return made

    def _flat(self, span: Span, weights: Mapping[int, Array]) -> np.ndarray:
        _, dtype = self._like[span.weight]
        flat = np.asarray(weights[self.numbers[span.weight]]).reshape(-1)
        return flat[span.start // dtype.itemsize : span.stop // dtype.itemsize]


def pulled(weights: Mapping[int, Array], moves: Mapping[int, Array]) -> dict[int, Array]:
    """Returns a worker's weights after an exchange: x - e."""
    made = _differences([weights[k] for k in moves], [*moves.values()])
    return dict(zip(moves, made, strict=True))


@jax.jit
def _differences(weights: Sequence[Array], moves: Sequence[Array]) -> list[Array]:
    return [x - e for x, e in zip(weights, moves, strict=True)]


class CenterEnd(End):
    """A client's end of exchanges with a centre: all weights, every `interval` steps."""

    def __init__(self, parts: CenterParts, interval: int) -> None:
        self._parts, self._interval, self._exchanges = parts, interval, 0

    def look_up(self, leaves: Sequence[Leaf], known: Collection[int]) -> None:
        pass  # weights are exchanged whole

    def step(self, number: int) -> Iterator[Want]:
        return elastic_step(self._interval, number, self._exchanges)

    def sent(self, want: Send, weights: Mapping[int, Array]) -> Mapping[int, Sequence[Array]]:
        self._exchanges += 1
        whole = {k: local(weights[k]) for k in self._parts.numbers}
        return {n: self._parts.of(n, whole) for n in range(self._parts.count)}

    def applied(self, weights: Mapping[int, Array], answers: Sequence[Sequence[Array]]) -> dict[int, Array]:
        return pulled(weights, self._parts.joined(answers))


class CenterSession(ExchangeSession):
    """Exchanges with a centre of all weights on servers (`autopar.sync.Elastic`). The centre begins with `weights`, the
    same on all processes."""

    def __init__(
        self, weights: Mapping[int, Array], alpha: float, interval: int, clients: Clients, servers: int
    ) -> None:
        self._parts = parts = CenterParts(weights, servers)
        specs = [CenterSpec(dict(enumerate(parts.of(n, weights))), alpha, clients.count) for n in range(parts.count)]
        super().__init__(CenterEnd(parts, interval), specs, clients)

    def collect(self) -> dict[int, Array]:
        """Returns the centre after all exchanges. Collective."""
        return self._parts.joined([[*kept.leaves.values()] for kept in self._link.collect()[0]])


class RingSession(ExchangeSession):
    """Exchanges with neighbours in a ring (`autopar.sync.ADPSGD`); passive clients answer active ones. `weights`:
    numbers of the step's inputs that are averaged. `neighbors`: each passive client -> the server that answers for
    it."""

    is_ring = True

    def __init__(
        self, end: End, weights: Collection[int], neighbors: Mapping[int, NeighborSpec], clients: Clients
    ) -> None:
        self._indices = list(weights)
        self._own = [*neighbors].index(clients.own) if clients.own in neighbors else None
        super().__init__(end, [*neighbors.values()], clients, [clients.leader(c) for c in neighbors])

    def collect(self) -> dict[int, Array]:
        """Returns a passive client's weights after all neighbours' exchanges; {} for an active one, which has its own.
        Collective."""
        self._link.finish()
        if self._own is None:
            return {}
        kept = self._link.command(self._own, Read(jax.process_index()))
        return {k: jnp.asarray(x) for k, x in zip(self._indices, kept.leaves.values(), strict=True)}


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
      leaves: The step's flat arguments, with the state, the same on all processes; copied.
      staleness: The bound; None: there is none.
      mode: Identifies the steps that may continue with the state.

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
