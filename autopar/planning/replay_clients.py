"""Replays the training of clients (`sync=`) sequentially in one process, and compares it with a run (`verify`).

Training with `sync=` is another function than the step on one device; the replay defines it. Clients that all average
at once are replayed from their minibatches, those that don't wait (`autopar.sync.Async`, `Elastic`, `ADPSGD`) from a
timeline. With a client's own compiled programs both give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import Clients, mean_of
from autopar.backends.served import ServedPrograms
from autopar.errors import ArgumentsError, TimelineError
from autopar.ir.program import Program
from autopar.jax_types import Array, Leaf, Pytree
from autopar.planning.local_clients import LocalJob, Messages, RecordedOrder, run_clients
from autopar.planning.verify import Verification, compared_values, replayed
from autopar.protocols import Compute, Send
from autopar.run.averaging import MeansRunner, RingEnd
from autopar.run.planned_step import PlannedStep, Runner
from autopar.run.replicas import TouchedRows, Weights, fragments_of
from autopar.run.step import ParallelStep
from autopar.servers.center import Center, Neighbor
from autopar.servers.sessions import CenterEnd, CenterParts, End, message
from autopar.servers.timeline import Timeline
from autopar.sync import Elastic
from autopar.tables.kinds import copied, materialize
from autopar.tables.replica import Replica, Replicas, average, replicas_of
from autopar.tables.served import session_of, typed
from autopar.ways.way import AllCalls, Replayed

#: Names of the reference in messages: for replicas, and for a state that servers keep.
_MEANS = "a sequential replay of all clients' steps and means, since replicas are another function than the plain step"
_SERVED = "a sequential replay of what its servers did, since asynchronous training is another function than the step"
_mean = jax.jit(mean_of)


def replay(step: ParallelStep, state: Pytree, minibatches: Iterable[Sequence[Leaf]]) -> Iterator[list[Leaf]]:
    """Trains replicas in one process, one client after the other, as several processes would.

    Clients' steps run by their own programs: on one kind of machine the numbers equal those of the processes, to the
    bit. So a way of training can be tried without processes.

    Args:
      step: The step that `parallelize(..., sync=...)` returned for a function `(state, batch)`.
      state: The state that all clients begin with.
      minibatches: For each step a list with a batch for each client.

    Yields:
      After each step the results of each client's call. The next step updates these states in place.

    Raises:
      ArgumentsError: a step without `sync=`, or a changing number of minibatches.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize(sync=autopar.sync.Average(every=2))
      ... def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w), None
      >>> minibatches = [[jnp.ones((2, 1)), 2 * jnp.ones((2, 1))]] * 2
      >>> *_, last = autopar.replay(step, jnp.zeros(1), minibatches)
      >>> [float(w[0]) for w, _ in last]
      [0.42..., 0.42...]
    """
    if isinstance(step, ParallelStep) and step.planner.way.has_timeline:
        raise ArgumentsError(
            "replay is for clients that average all at once, sync=Average(...): what others do depends on who comes "
            "when, and is replayed of a timeline, autopar.replay_timeline"
        )
    if not isinstance(step, ParallelStep) or step.clients is None:
        raise ArgumentsError("replay takes a step whose clients train replicas, parallelize(step, sync=...)")
    coming = iter(minibatches)
    first = next(coming, None)
    if first is None:
        return
    if not isinstance(first, Sequence) or not first:
        raise ArgumentsError("replay takes for each step a list of minibatches, one for each client")
    planned = _with_clients(step, len(first)).planned_for(state, first[0])

    def calls() -> Iterator[list[list[Leaf]]]:
        for k, batches in enumerate(itertools.chain([first], coming)):
            if len(batches) != len(first):
                raise ArgumentsError(f"replay: step {k} has {len(batches)} minibatches, the first one had {len(first)}")
            yield [step.leaves((state, batch), {}) for batch in batches]

    runner = replace(planned, clients=step.clients).runner
    assert isinstance(runner, MeansRunner), "clients have means"
    for results in replay_replicas(planned.compiled.analysed, runner, calls()):
        yield [planned.out_tree.unflatten(own) for own in results]


def _with_clients(step: ParallelStep, clients: int, servers: int | None = None) -> ParallelStep:
    """Returns the step as for `clients` clients and `servers` servers, which needn't exist; raises ArgumentsError if
    there can't be so many."""
    way = step.planner.way.among(clients, servers)
    return ParallelStep(replace(step.planner, way_of=way.by, clients=None))


def replay_replicas(
    program: Program, runner: MeansRunner, minibatches: Iterable[Sequence[Sequence[Leaf]]]
) -> Iterator[list[list[Leaf]]]:
    """Yields each client's flat results of each step.

    `minibatches`: for each step each client's flat arguments; the state is that of the first step.
    """
    states, touched = program.new_states, runner.touched
    leaves: list[dict[int, Leaf]] = []
    shared: list[Replicas] = []
    for step in minibatches:
        if not leaves:
            made = [{k: copied(materialize(x)) for k, x in enumerate(first) if k in states} for first in step]
            leaves = [{k: runner.clients.placed(x) for k, x in own.items()} for own in made]
            shared = [runner.first(Weights(own)) for own in leaves]
        calls = [[own.get(k, x) for k, x in enumerate(given)] for own, given in zip(leaves, step, strict=True)]
        rows = [touched.after(each.touched, call) for each, call in zip(shared, calls, strict=True)]
        # One after the other: collectives of two programs could wait for each other's threads.
        results = [jax.block_until_ready(jax.tree.leaves(runner.inner(call))) for call in calls]
        weights = [Weights({k: own[states[k]] for k in runner.weights}) for own in results]
        shared = [replace(each, steps=each.steps + 1, touched=some) for each, some in zip(shared, rows, strict=True)]
        exchanges = [runner.exchange(*pair) for pair in zip(shared, weights, strict=True)]
        unions = [np.bitwise_or.reduce(bits) for bits in zip(*map(next, exchanges), strict=True)]
        sent = [exchange.send(unions) for exchange in exchanges]
        # All means come before `send` below, which updates the sent arrays in place.
        means = []
        for c, each in enumerate(shared):
            partners = runner.topology(len(sent)).partners(c, each.steps)
            means.append([_mean(parts) for parts in zip(*(sent[other] for other in partners), strict=True)])
        for c, own in enumerate(results):
            shared[c], new = exchanges[c].send(means[c])
            for k, array in new.items():
                own[states[k]] = array
            leaves[c] = {k: own[out] for k, out in states.items()}
        yield results


def timeline(state: Pytree) -> Timeline:
    """Returns the order in which servers applied pushes or exchanges since the first call, and the version of the
    weights that each was made from.

    `autopar.replay_timeline` computes the numbers again from it; its `staleness` and `steps` describe the training.
    Waits for all pushes; servers continue afterwards. Collective: all processes call it.

    Args:
      state: A state that a step with `sync=autopar.sync.Async(...)`, or `Elastic(...)`, returned.

    Raises:
      ArgumentsError: no server keeps anything of it.
      DonatedStateError: it was given to a step.
    """
    leaves = jax.tree.leaves(state)
    session, replicas = session_of(leaves), replicas_of(leaves)
    if session is None and replicas is not None:
        session = replicas.center or replicas.ring
    if session is None:
        raise ArgumentsError(
            "timeline takes a state that a step with sync=Async(...), Elastic(...) or ADPSGD() returned"
        )
    return session.timeline()


def replay_timeline(
    step: ParallelStep, state: Pytree, minibatches: Sequence[Sequence[Leaf]], timeline: Timeline
) -> tuple[Pytree, list[list[Pytree]]]:
    """Repeats in one process what workers and servers computed, message by message in their order.

    The programs are the workers' own: on one kind of machine the numbers are theirs, to the bit. A worker of several
    devices is replayed on these if this process has them all, otherwise on one device, which rounds differently.

    Args:
      step: The step that `parallelize(..., sync=autopar.sync.Async(...))`, or `Elastic(...)`, returned for a function
        `(state, batch)`.
      state: The state that the workers began with.
      minibatches: For each worker its batches, one for each of its steps.
      timeline: The recorded events (`autopar.timeline`).

    Returns:
      The state that `autopar.average` gave at the end; and for each worker the results of its calls, None for leaves
        that servers keep. Replicas are updated in place: only the last call's are still there.

    Raises:
      ArgumentsError: a step without such a `sync=`, too few minibatches, or too few workers.
      TimelineError: the timeline can't be one of this step.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, autopar
      >>> @autopar.parallelize(sync=autopar.sync.Async())
      ... def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w), w.sum()
      >>> # Two workers pull at once; the push of each is made of the same weights.
      >>> done = autopar.Timeline(workers=2, bound=None, events=[np.array([[0, 0, 0], [1, 0, 0]])])
      >>> w, results = autopar.replay_timeline(step, jnp.zeros(1), [[jnp.ones((2, 1))]] * 2, done)
      >>> float(w[0])
      0.4
    """
    if not isinstance(step, ParallelStep) or not step.planner.way.has_timeline:
        raise ArgumentsError(
            "replay_timeline takes a step whose clients wait for nobody, sync=autopar.sync.Async(...), Elastic(...) or "
            "ADPSGD()"
        )
    if len(minibatches) != timeline.workers:
        raise ArgumentsError(
            f"replay_timeline was given minibatches of {len(minibatches)} workers, and the timeline has "
            f"{timeline.workers}"
        )
    first = next((own[0] for own in minibatches if own), None)
    if first is None:
        raise ArgumentsError("replay_timeline was given no minibatches")
    planned = _with_clients(step, timeline.workers, len(timeline.events)).planned_for(state, first)
    start = step.leaves((materialize(state), first), {})
    calls = [[step.leaves((state, batch), {}) for batch in own] for own in minibatches]
    leaves, done = planned.way.followed(planned, start, calls, timeline, step.clients)
    made = jax.tree.unflatten(jax.tree.structure((state, first)), leaves)[0]
    return made, [[planned.out_tree.unflatten(own) for own in each] for each in done]


def replay_served(
    planned: PlannedStep, start: Sequence[Leaf], calls: AllCalls, timeline: Timeline, programs: ServedPrograms
) -> Replayed:
    """Replays a timeline of servers by `programs`. Arguments and results as for `replay_center`, with None in place of
    the state. Raises ArgumentsError if there are too few calls, TimelineError if it can't be this step's timeline."""
    counts = timeline.steps.tolist()
    if any(len(a) < n for a, n in zip(calls, counts, strict=True)):
        raise ArgumentsError(
            f"replay_timeline was given {[len(own) for own in calls]} minibatches of {len(calls)} workers, and the "
            f"timeline has steps {counts}"
        )
    program = planned.compiled.analysed
    if len(programs.servers) != len(timeline.events):
        raise TimelineError(f"{program.name} has {len(programs.servers)} servers at most, not {len(timeline.events)}")
    job = LocalJob(programs, start, timeline.workers, None)
    done = job.run(counts, lambda w, c: calls[w][c], RecordedOrder(timeline))
    new, count = job.state(), range(len(program.outputs))
    leaves = [typed(new[k], jax_compat.is_weak(x)) if k in new else copied(x) for k, x in enumerate(start)]
    return leaves, [[[own.get(k) for k in count] for own in each] for each in done]


def replay_center(
    sync: Elastic, planned: PlannedStep, start: Sequence[Leaf], calls: AllCalls, timeline: Timeline
) -> Replayed:
    """Replays a timeline of clients with a centre. Arguments as for `Way.followed`.

    Returns:
      The final flat arguments, with the centre's weights and the mean of other leaves; and each client's flat results.

    Raises:
      TimelineError: a message comes before its client can have sent it, or the clients have others.
    """
    weights, servers = _weights(planned, start), len(timeline.events)
    parts = CenterParts(weights, servers)
    if parts.count != servers:
        name = planned.compiled.analysed.name
        raise TimelineError(f"{name} has {parts.count} servers at most, not {servers}")
    own = [dict(enumerate(parts.of(n, weights))) for n in range(servers)]
    centers = [Center(leaves, sync.alpha, timeline.workers) for leaves in own]
    clients = _run_timeline(planned, start, calls, [CenterEnd(parts, sync.interval) for _ in calls], centers, timeline)
    centre = parts.joined([[*center.leaves.values()] for center in centers])
    return _as_replayed(start, clients, {k: jnp.asarray(x) for k, x in centre.items()})


def replay_ring(planned: PlannedStep, start: Sequence[Leaf], calls: AllCalls, timeline: Timeline) -> Replayed:
    """Replays a timeline of a ring. Arguments, results and errors as for `replay_center`."""
    weights, count, plan = _weights(planned, start), timeline.workers, planned.compiled.plan.sync
    assert plan is not None, "clients have replicas"
    topology, rows = plan.topology(count), TouchedRows(planned.compiled, plan)
    passives = topology.passives
    if len(passives) != len(timeline.events) or not timeline.ring:
        raise TimelineError(f"the timeline isn't of a ring of {count} clients")
    ends = [RingEnd([*weights], rows, topology, c, equal=True) for c in range(count)]
    neighbors = [ends[c].neighbor(weights, c).made(Neighbor) for c in passives]
    clients = _run_timeline(planned, start, calls, ends, neighbors, timeline)
    for c, neighbor in zip(passives, neighbors, strict=True):  # exchanges after its last step
        clients[c].leaves |= dict(zip(weights, neighbor.leaves.values(), strict=True))
    return _as_replayed(start, clients, {})


def _weights(planned: PlannedStep, start: Sequence[Leaf]) -> dict[int, Array]:
    plan = planned.compiled.plan.sync
    assert plan is not None, "clients have replicas"
    fragments = fragments_of(plan, planned.compiled.analysed)
    return {k: jnp.asarray(materialize(start[k])) for some in fragments for k in some}


def _run_timeline(
    planned: PlannedStep,
    start: Sequence[Leaf],
    calls: AllCalls,
    ends: Sequence[End],
    servers: Sequence[Center],
    timeline: Timeline,
) -> list[_ReplayedClient]:
    runner, states, recorded = planned.own_runner, planned.compiled.analysed.new_states, RecordedOrder(timeline)
    clients = [_ReplayedClient(runner, states, start, own, end) for own, end in zip(calls, ends, strict=True)]
    run_clients([client.steps(c) for c, client in enumerate(clients)], servers, recorded)
    recorded.check_done()
    return clients


class _ReplayedClient:
    """Replays a client: `leaves` is its state after its steps so far, by index of the step's input, `results` the flat
    results of each of its calls."""

    def __init__(
        self,
        runner: Runner,
        states: Mapping[int, int],
        start: Sequence[Leaf],
        calls: Sequence[Sequence[Leaf]],
        end: End,
    ) -> None:
        self._runner, self._states, self._calls, self._end = runner, states, calls, end
        self.leaves = {k: copied(materialize(start[k])) for k in self._states}
        self.results: list[list[Leaf]] = []

    def steps(self, number: int) -> Messages:
        """Runs its steps and yields its messages. `number`: the client's."""
        for step, given in enumerate(self._calls):
            call = [self.leaves.get(k, x) for k, x in enumerate(given)]
            self._end.look_up(call, self._states)
            weights, results, new = Weights(self.leaves), list[Leaf](), dict[int, Array]()
            for want in self._end.step(step):
                if isinstance(want, Send):
                    sent = self._end.sent(want, weights)
                    yield {n: message(number, want, values) for n, values in sent.items()}
                elif isinstance(want, Compute):
                    results = jax.block_until_ready(jax.tree.leaves(self._runner(call)))
                    weights = Weights({k: results[out] for k, out in self._states.items()})
                else:
                    new = self._end.applied(weights, (yield None))
            for k, array in new.items():
                results[self._states[k]] = array
            self.leaves = {k: results[out] for k, out in self._states.items()}
            self.results.append(results)


def _as_replayed(start: Sequence[Leaf], clients: Sequence[_ReplayedClient], centre: Mapping[int, Array]) -> Replayed:
    """Returns the final flat arguments, and each client's results. Of leaves without a centre floats are the clients'
    mean, others the first client's."""
    made = list(start)
    for k in clients[0].leaves:
        own = [jnp.asarray(materialize(client.leaves[k])) for client in clients]
        made[k] = centre[k] if k in centre else _mean(own) if jnp.issubdtype(own[0].dtype, jnp.floating) else own[0]
    return made, [client.results for client in clients]


def compare_replicas(planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification:
    """Compares clients that all average at once with their replay, both from the mean of their states. Collective."""
    program, runner = planned.compiled.analysed, planned.runner
    assert isinstance(runner, MeansRunner), "clients have means"
    first = average(list(leaves))
    *_, last = replay_replicas(program, runner, [_calls_of_all(runner.clients, program, first)] * steps)
    pairs = zip(last[runner.clients.own], _run_steps(runner, program, first, steps), strict=True)
    return _compared(runner.clients, program, [[pair] for pair in pairs], steps, _MEANS)


def compare_served(planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification:
    """Compares workers and servers with the replay of their timeline, both from the state after all pushes.
    Collective."""
    program, clients, runner = planned.compiled.analysed, planned.clients, planned.runner
    assert clients is not None, "processes are workers"
    first = average(list(leaves))
    calls = [[own] * steps for own in _calls_of_all(clients, program, first)]
    found = _run_steps(runner, program, first, steps)
    done, now = timeline([found[out] for out in program.new_states.values()]), average(found)
    made, results = planned.way.followed(planned, first, calls, done, clients)
    pairs = [[pair] for pair in zip(results[clients.own][-1], found, strict=True)]
    for k, out in program.new_states.items():  # replicas, if there are any, and servers' values
        pairs[out] = [*(pair for pair in pairs[out] if pair[0] is not None), (made[k], now[out])]
    return _compared(clients, program, pairs, steps, _SERVED)


def _calls_of_all(clients: Clients, program: Program, first: Sequence[Leaf]) -> list[list[Leaf]]:
    """Returns all clients' flat arguments, with the same state. Collective."""
    batch = [k for k in range(len(first)) if k not in program.new_states]
    keys = {k for k in batch if jax_compat.is_key(getattr(first[k], "dtype", None))}
    sent = [jax.random.key_data(first[k]) if k in keys else first[k] for k in batch]
    given = clients.stacked(sent, "the minibatches of all clients")
    calls = []
    for c in range(clients.count):
        own = dict(zip(batch, (stack[c] for stack in given), strict=True))
        own |= {k: jax.random.wrap_key_data(own[k], impl=jax.random.key_impl(first[k])) for k in keys}
        calls.append([own.get(k, x) for k, x in enumerate(first)])
    return calls


def _run_steps(runner: Runner, program: Program, first: Sequence[Leaf], steps: int) -> list[Leaf]:
    """Calls the step `steps` times with the same minibatch; returns the last call's flat results."""
    found: list[Leaf] = []
    state = {k: copied(first[k]) for k in program.new_states}
    for _ in range(steps):
        found = jax.tree.leaves(runner([state.get(k, x) for k, x in enumerate(first)]))
        state = {k: found[out] for k, out in program.new_states.items()}
    return found


def _compared(
    clients: Clients, program: Program, pairs: Sequence[Sequence[tuple[Leaf, Leaf]]], steps: int, against: str
) -> Verification:
    """Compares (expected, found) pairs of each output over all clients. Collective."""
    mine = [_worst(some) for some in pairs]
    all_ = clients.processes.values(mine, "comparing replicas with their replay")
    checks = []
    for k, output in enumerate(program.outputs):
        path = program.inputs[output.state].path if output.state is not None else output.path
        size, error = (max(values) for values in zip(*(each[k] for each in all_), strict=True))
        checks.append(replayed(path, size, error))
    return Verification(tuple(checks), steps, against)


def _worst(pairs: Sequence[tuple[Leaf, Leaf]]) -> tuple[float, float]:
    plain = [[materialize(x.own if isinstance(x, Replica) else x) for x in pair] for pair in pairs]
    sizes, errors = zip(*(compared_values(a, b) for a, b in plain), strict=True)
    return max(sizes), max(errors)


def programs_here(planned: PlannedStep, clients: Clients | None) -> ServedPrograms:
    """Returns the workers' and servers' programs, for the devices of this process's worker if it has them all."""
    compiled, devices = planned.compiled, None if clients is None else clients.devices
    if devices is not None and (devices.mesh.size == 1 or not devices.sharding(None).is_fully_addressable):
        devices = None
    return ServedPrograms(compiled.program, compiled.analysed, devices)
