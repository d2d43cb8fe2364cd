"""Replay of averaging with neighbours (`autopar.sync.ADPSGD`): steps and exchanges in one process, as they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.clients import mean_of
from autopar.errors import TimelineError
from autopar.ir.ring import Ring
from autopar.run.entry import Entry
from autopar.run.replicas import Weights, fragments_of
from autopar.run.runner import Runner
from autopar.servers.elastic import pulled
from autopar.servers.messages import Exchange, Pulled, Stepped
from autopar.servers.ring import Neighbor
from autopar.servers.timeline import Timeline
from autopar.tables.kinds import copied, materialize

Array = Any
_mean = jax.jit(mean_of)


class _Client:
    """A client's steps so far.

    Attributes:
      leaves: Its state, by number of the step's input.
      results: What its calls returned.
    """

    def __init__(self, runner: Runner, states: Mapping[int, int], start: Sequence[Any], calls: Sequence[Any]) -> None:
        self._runner, self._states, self._calls = runner, states, calls
        self.leaves = {k: copied(materialize(start[k])) for k in states}
        self.results: list[list[Any]] = []

    @property
    def turn(self) -> int:
        """Steps that it has done."""
        return len(self.results)

    @property
    def is_done(self) -> bool:
        """Whether it has no more minibatches."""
        return self.turn == len(self._calls)

    def sent(self, weights: Sequence[int]) -> list[np.ndarray]:
        """Returns copies of its weights."""
        found = Weights(self.leaves)
        return [np.array(found[k]) for k in weights]

    def step(self) -> list[Any]:
        """Returns the results of its next step."""
        call = [self.leaves.get(k, x) for k, x in enumerate(self._calls[self.turn])]
        return jax.block_until_ready(jax.tree.leaves(self._runner(call)))

    def behind(self, results: list[Any], weights: Mapping[int, Array]) -> None:
        """End a step with some weights in place of those that it made."""
        for k, array in weights.items():
            results[self._states[k]] = array
        self.leaves = {k: results[out] for k, out in self._states.items()}
        self.results.append(results)


def replay_ring(
    entry: Entry, start: Sequence[Any], calls: Sequence[Sequence[Sequence[Any]]], timeline: Timeline
) -> tuple[list[Any], list[list[list[Any]]]]:
    """Do what a timeline says. As `replay_elastic`; the state of the end is the mean of all clients'."""
    program, plan, ring = entry.compiled.analysed, entry.compiled.plan.sync, Ring(timeline.workers)
    assert plan is not None, "clients have replicas"
    if len(ring.passives) != len(timeline.events) or not timeline.ring:
        raise TimelineError(f"the timeline isn't of a ring of {timeline.workers} clients")
    states, numbers = program.new_states, [k for some in fragments_of(plan, program) for k in some]
    clients = [_Client(entry.own_runner, states, start, own) for own in calls]
    neighbors = [Neighbor(dict(enumerate(clients[c].sent(numbers))), timeline.workers) for c in ring.passives]
    todo = [deque(events[:, :2].tolist()) for events in timeline.pushes]

    def can_come(event: Sequence[int], passive: int) -> bool:
        number, step = event
        turn = clients[number].turn
        if clients[number].is_done:
            return False
        if number == passive:
            return step == turn
        return ring.is_active(number) and ring.neighbor(number, turn) == passive and ring.number(turn) == step

    def do(event: Sequence[int], n: int) -> None:
        number, step = event
        client = clients[number]
        sent = client.sent(numbers)
        results = client.step()
        made = Weights({k: results[states[k]] for k in numbers})
        message = Exchange(number, step, sent)
        if number == ring.passives[n]:
            message = Stepped(number, step, [np.array(made[k]) for k in numbers])
        ((_, reply),) = neighbors[n].take(message)
        assert isinstance(reply, Pulled), "nobody reads"
        values = dict(zip(numbers, reply.values, strict=True))
        is_whole = isinstance(message, Stepped)
        client.behind(results, {k: jnp.asarray(x) for k, x in values.items()} if is_whole else pulled(made, values))

    while any(todo):
        before = sum(map(len, todo))
        for n, events in enumerate(todo):
            while events and can_come(events[0], ring.passives[n]):
                do(events.popleft(), n)
        if sum(map(len, todo)) == before:
            raise TimelineError(f"none of {[events[0] for events in todo if events]} can have come next")
    if waiting := [c for c, client in enumerate(clients) if not client.is_done]:
        raise TimelineError(f"clients {waiting} have more minibatches than the timeline has steps")
    for n, c in enumerate(ring.passives):  # what came behind its last step
        clients[c].leaves |= dict(zip(numbers, neighbors[n].leaves.values(), strict=True))
    made = list(start)
    for k in states:
        own = [jnp.asarray(materialize(client.leaves[k])) for client in clients]
        made[k] = _mean(own) if jnp.issubdtype(own[0].dtype, jnp.floating) else own[0]
    return made, [client.results for client in clients]
