"""Workers and servers in one process, whose messages arrive in a chosen order: at random, or as a `Timeline` says. The
programs are those that run on several processes, and so are the numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from autopar.backends.served import ServedPrograms
from autopar.errors import TimelineError
from autopar.servers.messages import Kept, Leave, Message, Pull, Pulled, Push, Read
from autopar.servers.server import on_host, served, state_of
from autopar.servers.timeline import Timeline

Array = Any
#: Messages that could arrive next, each with its server -> the one that does, by its place; None: none may.
Choice = Callable[[Sequence[tuple[int, Message]]], int | None]


class Job:
    """Workers and servers of a step that begin with a state.

    Args:
      programs: What they run.
      leaves: The step's flat arguments; of these the state.
      workers: N.
      staleness: The bound; None: there is none.
    """

    def __init__(self, programs: ServedPrograms, leaves: Sequence[Array], workers: int, staleness: int | None) -> None:
        self._programs = programs
        self.servers = [served(programs, n, leaves, workers, staleness) for n in range(len(programs.servers))]
        self._clocks = [{k: leaves[k] for k in programs.step.clocks} for _ in range(workers)]

    def kept(self) -> list[Kept]:
        """Returns what each server keeps now."""
        replies = [server.take(Read(0)) for server in self.servers]
        return [reply for ((_, reply),) in replies if isinstance(reply, Kept)]

    def state(self) -> dict[int, Array]:
        """The state now, by number of the step's input (`state_of`)."""
        clocks = {k: on_host(x) for k, x in self._clocks[0].items()}
        return self._programs.step.whole_leaves(state_of(clocks, self.kept()))

    def run(
        self, steps: Sequence[int], minibatch: Callable[[int, int], Sequence[Array]], choose: Choice
    ) -> list[list[dict[int, Array]]]:
        """Train.

        Args:
          steps: How many of each worker.
          minibatch: Worker, step -> the step's flat arguments; those of the state aren't read.
          choose: The message that arrives next. Those from one worker to one server stay in their order.

        Returns:
          Each worker's results of each step, by number of the output.

        Raises:
          TimelineError: no message may arrive, or none is left while a worker waits.
        """
        results: list[list[dict[int, Array]]] = [[] for _ in steps]
        sent = {(w, n): deque() for w in range(len(steps)) for n in range(len(self.servers))}
        pulled: list[dict[int, Pulled]] = [{} for _ in steps]

        def begin(w: int) -> None:
            if (step := len(results[w])) == steps[w]:
                messages: Sequence[Message] = [Leave(w)] * len(self.servers)
            else:
                messages = [Pull(w, step, ids) for ids in self._programs.ids(arguments(w))]
            for n, message in enumerate(messages):
                sent[w, n].append(message)

        def arguments(w: int) -> list[Array]:
            return [self._clocks[w].get(k, x) for k, x in enumerate(minibatch(w, len(results[w])))]

        def end(w: int) -> None:
            step = len(results[w])
            pushed, own, self._clocks[w] = self._programs.work(
                [pulled[w].pop(n).values for n in range(len(self.servers))], arguments(w)
            )
            results[w].append(own)
            for n, values in enumerate(pushed):
                sent[w, n].append(Push(w, step, values))
            begin(w)

        for w in range(len(steps)):
            begin(w)
        while pending := [(key, queue) for key, queue in sent.items() if queue]:
            chosen = choose([(n, queue[0]) for (_, n), queue in pending])
            if chosen is None:
                raise TimelineError(f"none of {[(n, queue[0]) for (_, n), queue in pending]} can have come next")
            (_, n), queue = pending[chosen]
            for w, reply in self.servers[n].take(queue.popleft()):
                assert isinstance(reply, Pulled), "nobody reads"
                pulled[w][n] = reply
                if len(pulled[w]) == len(self.servers):
                    end(w)
        if waiting := [w for w, done in enumerate(results) if len(done) < steps[w]]:
            raise TimelineError(f"workers {waiting} wait for pulls that no message will bring")
        return results


def as_recorded(timeline: Timeline) -> Choice:
    """Returns the choice by which messages arrive as they did in a timeline: for a `Job` without a bound."""
    pushes = [[tuple(event) for event in events[:, :2].tolist()] for events in timeline.pushes]
    versions = [{(w, step): v for w, step, v in events.tolist()} for events in timeline.pushes]
    #: Of each server and version how many pulls are still to come.
    wanted = [Counter(each.values()) for each in versions]
    now = [0] * len(pushes)

    def choose(messages: Sequence[tuple[int, Message]]) -> int | None:
        for k, (n, message) in enumerate(messages):
            if not isinstance(message, Pull | Push):
                return k
            event = (message.worker, message.step)
            if isinstance(message, Pull) and versions[n].get(event) == now[n]:
                wanted[n][now[n]] -= 1
                return k
            if isinstance(message, Push) and not wanted[n][now[n]] and pushes[n][now[n]] == event:
                now[n] += 1
                return k
        return None

    return choose
