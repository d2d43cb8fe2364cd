"""Runs clients and servers in one process, with messages in a chosen order: for replays, that of a timeline."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from autopar.backends.served import ServedPrograms
from autopar.errors import TimelineError
from autopar.jax_types import Array, Sent
from autopar.protocols import Compute, Receive, pulling_step
from autopar.servers.messages import Kept, Leave, Message, Pull, Pulled, Push, Read, Reply, Return
from autopar.servers.server import on_host, served, state_of
from autopar.servers.timeline import Timeline

#: Chooses which message arrives next: (server, message) of each that could -> the index of one; None: none may.
ChooseMessage = Callable[[Sequence[tuple[int, Message]]], int | None]
#: A client's generator: yields messages by server; or None to wait, and is sent the servers' answers, in their order.
Messages = Generator[Mapping[int, Message] | None, Sequence[Sequence[Array]], None]


class Answering(Protocol):
    def take(self, message: Sent) -> list[tuple[int, Reply]]:
        """Returns answers that are due now, each with its client."""
        ...


def run_clients(clients: Sequence[Messages], servers: Sequence[Answering], choose: ChooseMessage) -> None:
    """Runs all clients and servers. Messages from one client to one server stay in order; `choose` decides otherwise.
    Raises TimelineError if no message may come next, or none is left while a client waits."""
    sent = {(c, n): deque[Message]() for c in range(len(clients)) for n in range(len(servers))}
    waiting, busy = [set[int]() for _ in clients], set(range(len(clients)))
    answers: list[dict[int, Sequence[Array]]] = [{} for _ in clients]

    def go_on(c: int, given: Sent) -> None:
        try:
            messages = clients[c].send(given)
            while messages is not None:
                for n, message in messages.items():
                    sent[c, n].append(message)
                    if not isinstance(message, Push | Leave):
                        waiting[c].add(n)
                messages = next(clients[c])
        except StopIteration:
            busy.discard(c)

    for c in range(len(clients)):
        go_on(c, None)
    while pending := [(key, queue) for key, queue in sent.items() if queue]:
        chosen = choose([(n, queue[0]) for (_, n), queue in pending])
        if chosen is None:
            raise TimelineError(f"none of {[(n, queue[0]) for (_, n), queue in pending]} can have come next")
        (_, n), queue = pending[chosen]
        for c, reply in servers[n].take(queue.popleft()):
            assert isinstance(reply, Pulled), "nobody reads"
            answers[c][n] = reply.values
            waiting[c].discard(n)
            if not waiting[c]:
                given, answers[c] = [answers[c][k] for k in sorted(answers[c])], {}
                go_on(c, given)
    if busy:
        raise TimelineError(f"workers {sorted(busy)} wait for pulls that no message will bring")


class LocalJob:
    """Runs workers and servers of a step, all in this process. `leaves`: the step's flat arguments, with the state that
    they begin with. `staleness`: the bound; None: there is none."""

    def __init__(self, programs: ServedPrograms, leaves: Sequence[Array], workers: int, staleness: int | None) -> None:
        self._programs = programs
        self.servers = [served(programs, n, leaves, workers, staleness) for n in range(len(programs.servers))]
        self._clocks = [{k: leaves[k] for k in programs.step.clocks} for _ in range(workers)]

    def kept(self) -> list[Kept]:
        replies = [server.take(Read(0)) for server in self.servers]
        return [reply for ((_, reply),) in replies if isinstance(reply, Kept)]

    def state(self) -> dict[int, Array]:
        """Returns the state now, by number of the step's input (`state_of`)."""
        clocks = {k: on_host(x) for k, x in self._clocks[0].items()}
        return self._programs.step.whole_leaves(state_of(clocks, self.kept()))

    def run(
        self, steps: Sequence[int], minibatch: Callable[[int, int], Sequence[Array]], choose: ChooseMessage
    ) -> list[list[dict[int, Array]]]:
        """Trains, by `run_clients`; returns each worker's results of each step, by number of the output.

        `steps`: each worker's number of steps. `minibatch`: worker, step -> the step's flat arguments, whose state
        isn't read. `choose`: chooses the next message.
        """
        results: list[list[dict[int, Array]]] = [[] for _ in steps]
        workers = [self._worker(w, count, minibatch, results[w]) for w, count in enumerate(steps)]
        run_clients(workers, self.servers, choose)
        return results

    def _worker(
        self, w: int, steps: int, minibatch: Callable[[int, int], Sequence[Array]], results: list[dict[int, Array]]
    ) -> Messages:
        pulled: Sequence[Sequence[Array]] = ()
        pushed: Sequence[Sequence[Array]] = ()
        for step in range(steps):
            arguments = [self._clocks[w].get(k, x) for k, x in enumerate(minibatch(w, step))]
            for want in pulling_step(step):
                if isinstance(want, Compute):
                    pushed, own, self._clocks[w] = self._programs.work(pulled, arguments)
                    results.append(own)
                elif isinstance(want, Receive):
                    pulled = yield None
                elif want.kind == "pull":
                    yield {n: Pull(w, step, ids) for n, ids in enumerate(self._programs.ids(arguments))}
                else:
                    yield {n: Push(w, step, values) for n, values in enumerate(pushed)}
        yield dict.fromkeys(range(len(self.servers)), Leave(w))


class RecordedOrder:
    """Chooses messages in the order of a timeline. The servers have no bound."""

    def __init__(self, timeline: Timeline) -> None:
        self._events = [[tuple(event) for event in events[:, :2].tolist()] for events in timeline.pushes]
        self._seen = [{(w, step): v for w, step, v in events.tolist()} for events in timeline.pushes]
        #: For each server: version -> the pulls of it that are to come; and the version now.
        self._pulls = [Counter(each.values()) for each in self._seen]
        self._now = [0] * len(self._events)

    def __call__(self, messages: Sequence[tuple[int, Message]]) -> int:
        for k, (n, sent) in enumerate(messages):
            if isinstance(sent, Leave):
                return k
            assert not isinstance(sent, Return | Read), "clients train"
            now, event = self._now[n], (sent.worker, sent.step)
            if isinstance(sent, Pull):
                if self._seen[n].get(event) == now:
                    self._pulls[n][now] -= 1
                    return k
            elif self._events[n][now : now + 1] == [event] and not (isinstance(sent, Push) and self._pulls[n][now]):
                self._now[n] += 1
                return k
        self.check_done()
        clients = sorted({message.worker for _, message in messages})
        raise TimelineError(f"clients {clients} have more minibatches than the timeline has steps, or exchanges")

    def check_done(self) -> None:
        """Checks that all messages have come, or raises TimelineError."""
        left = [[*events[now]] for events, now in zip(self._events, self._now, strict=True) if now < len(events)]
        if left:
            raise TimelineError(f"none of {left} can have come next")
