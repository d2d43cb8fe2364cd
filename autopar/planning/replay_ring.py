"""Replay of averaging with neighbours (`autopar.sync.ADPSGD`): steps and exchanges in one process, as they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from autopar.errors import TimelineError
from autopar.ir.ring import Ring
from autopar.planning.replayed_client import ReplayedClient, with_means
from autopar.run.entry import Entry
from autopar.run.replicas import Weights, fragments_of
from autopar.run.ring_end import TableRingEnd
from autopar.run.touched_rows import TouchedRows
from autopar.servers.messages import Exchange, Pulled, Stepped
from autopar.servers.ring import Neighbor
from autopar.servers.timeline import Timeline


def replay_ring(
    entry: Entry, start: Sequence[Any], calls: Sequence[Sequence[Sequence[Any]]], timeline: Timeline
) -> tuple[list[Any], list[list[list[Any]]]]:
    """Do what a timeline says. As `replay_elastic`; the state of the end is the mean of all clients'."""
    program, plan, ring = entry.compiled.analysed, entry.compiled.plan.sync, Ring(timeline.workers)
    assert plan is not None, "clients have replicas"
    touched = TouchedRows(entry.compiled, plan)
    if len(ring.passives) != len(timeline.events) or not timeline.ring:
        raise TimelineError(f"the timeline isn't of a ring of {timeline.workers} clients")
    states, numbers = program.new_states, [k for some in fragments_of(plan, program) for k in some]
    clients = [ReplayedClient(entry.own_runner, states, start, own) for own in calls]
    ends = [TableRingEnd(numbers, touched, timeline.workers, c, equal=True) for c in range(timeline.workers)]
    first = Weights(clients[0].leaves)
    neighbors = [ends[c].spec({k: first[k] for k in numbers}, c).made(Neighbor) for c in ring.passives]
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
        client, end = clients[number], ends[number]
        rows = {k: some.calls[-1] for k, some in touched.after(touched.none(numbers), client.call).items()}
        sent = end.before(client.turn, Weights(client.leaves), rows)
        results = client.computed()
        made = Weights({k: results[states[k]] for k in numbers})
        is_own = number == ring.passives[n]
        message = Stepped(number, step, end.behind(made)) if is_own else Exchange(number, step, sent)
        ((_, reply),) = neighbors[n].take(message)
        assert isinstance(reply, Pulled), "nobody reads"
        client.end(results, end.after(made, reply.values))

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
    return with_means(start, clients), [client.results for client in clients]
