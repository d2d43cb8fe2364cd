"""Replay of elastic averaging (`autopar.sync.Elastic`): workers' steps and exchanges in one process, as they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.backends.across import local
from autopar.errors import TimelineError
from autopar.planning.replayed_client import ReplayedClient, with_means
from autopar.run.entry import Entry
from autopar.run.replicas import Weights, fragments_of
from autopar.run.runner import Runner
from autopar.servers.center import Center
from autopar.servers.elastic import CenterParts, pulled
from autopar.servers.messages import Exchange, Pulled
from autopar.servers.timeline import Timeline
from autopar.sync import Elastic
from autopar.tables.kinds import materialize

Array = Any


class _Worker(ReplayedClient):
    """A worker's steps up to its next exchange.

    Attributes:
      exchanges: How many are done.
      sent: Whether the next step is beside one.
      moves: What came of that, by number of the server.
    """

    def __init__(
        self, runner: Runner, states: Mapping[int, int], start: Sequence[Any], calls: Sequence[Any], every: int
    ) -> None:
        super().__init__(runner, states, start, calls)
        self._every = every
        self.exchanges, self.sent = 0, False
        self.moves: dict[int, Sequence[Array]] = {}

    def advance(self) -> None:
        """Do steps until one is to be exchanged, or all are done."""
        while not self.is_done and not (self.turn and self.turn % self._every == 0):
            self.end(self.computed(), {})
        self.sent = not self.is_done

    def exchanged(self, parts: CenterParts) -> None:
        """Do the step beside which an exchange was, and those up to the next one."""
        moves, results = parts.joined([self.moves[n] for n in range(parts.count)]), self.computed()
        weights = {k: jnp.asarray(materialize(results[self._states[k]])) for k in moves}
        self.end(results, pulled(weights, moves))
        self.exchanges, self.moves = self.exchanges + 1, {}
        self.advance()


def replay_elastic(
    entry: Entry, start: Sequence[Any], calls: Sequence[Sequence[Sequence[Any]]], timeline: Timeline
) -> tuple[list[Any], list[list[list[Any]]]]:
    """Do what a timeline says.

    Args:
      entry: The step at these shapes.
      start: A call's flat arguments; of these the state.
      calls: For each worker its calls' flat arguments; those of the state aren't read.
      timeline: All exchanges.

    Returns:
      The flat arguments of the end, with the centre's weights and the mean of all else; and each worker's flat results.

    Raises:
      TimelineError: an exchange comes before its worker can have sent it, or the workers have others.
    """
    sync, plan, program = entry.options.sync, entry.compiled.plan.sync, entry.compiled.analysed
    assert isinstance(sync, Elastic) and plan is not None, "there is a centre"
    weights = {k: jnp.asarray(materialize(start[k])) for some in fragments_of(plan, program) for k in some}
    parts = CenterParts(weights, len(timeline.events))
    if parts.count != len(timeline.events):
        raise TimelineError(f"{program.name} has {parts.count} servers at most, not {len(timeline.events)}")
    centers = [Center(dict(enumerate(parts.of(n, weights))), sync.alpha, timeline.workers) for n in range(parts.count)]
    workers = [_Worker(entry.own_runner, program.new_states, start, own, sync.interval) for own in calls]
    todo = [deque(events[:, :2].tolist()) for events in timeline.pushes]
    for worker in workers:
        worker.advance()
    while any(todo):
        before = sum(map(len, todo))
        for n, (center, events) in enumerate(zip(centers, todo, strict=True)):
            while events and _can_come(workers[events[0][0]], events[0][1], n):
                number, step = events.popleft()
                worker = workers[number]
                own = Weights(worker.leaves)
                values = [x.copy() for x in parts.of(n, {k: local(own[k]) for k in weights})]
                ((_, reply),) = center.take(Exchange(number, step, values))
                assert isinstance(reply, Pulled), "nobody reads"
                worker.moves[n] = reply.values
                if len(worker.moves) == parts.count:
                    worker.exchanged(parts)
        if sum(map(len, todo)) == before:
            raise TimelineError(f"none of {[events[0] for events in todo if events]} can have come next")
    if waiting := [k for k, worker in enumerate(workers) if worker.sent]:
        raise TimelineError(f"workers {waiting} have more minibatches than the timeline has exchanges for")
    made = with_means(start, workers)
    for k, x in parts.joined([[*center.leaves.values()] for center in centers]).items():
        made[k] = jnp.asarray(x)
    return made, [worker.results for worker in workers]


def _can_come(worker: _Worker, step: int, server: int) -> bool:
    return worker.sent and worker.exchanges == step and server not in worker.moves
