"""Replay and `verify` of training with servers (`autopar.sync.Async`, `Elastic`): what they did, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.backends.clients import Clients
from autopar.backends.served import ServedPrograms
from autopar.errors import ArgumentsError, TimelineError
from autopar.planning.replay_elastic import replay_elastic
from autopar.planning.replay_replicas import calls_of_all, compared
from autopar.planning.replay_ring import replay_ring
from autopar.planning.verification import Verification
from autopar.planning.verify_replay import compared_values
from autopar.run.entry import Entry
from autopar.run.served import ServedRunner
from autopar.run.step import ParallelStep
from autopar.servers.job import Job, as_recorded
from autopar.servers.timeline import Timeline
from autopar.sync import Async, Elastic, Replicated, Sync
from autopar.tables.averaging import average
from autopar.tables.kinds import copied, materialize
from autopar.tables.replica import Replica, replicas_of
from autopar.tables.served import session_of

Array = Any
#: What a state that servers keep is compared with.
AGAINST = "a sequential replay of what its servers did, since asynchronous training is another function than the step"


def timeline(state: Any) -> Timeline:
    """Returns what servers did with a state, since the first call with it: which push (or exchange) came after which,
    and what it had seen.

    `autopar.replay_timeline` computes the numbers again of it; its `staleness` and `steps` say how the training went.
    Waits for all pushes; servers go on afterwards. Collective: all processes call it.

    Args:
      state: A state that a step with `sync=autopar.sync.Async(...)`, or `Elastic(...)`, returned.

    Raises:
      ArgumentsError: servers keep nothing of it.
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
    step: ParallelStep, state: Any, minibatches: Sequence[Sequence[Any]], timeline: Timeline
) -> tuple[Any, list[list[Any]]]:
    """Compute in one process what workers and servers computed together, message by message as they came.

    The programs are theirs. So on one kind of machine the numbers are theirs, to the bit. Those of a worker of several
    devices, if this process has them all; else one device does it, which rounds otherwise.

    Args:
      step: What `parallelize(..., sync=autopar.sync.Async(...))`, or `Elastic(...)`, returned, of a function
        `(state, batch)`.
      state: What the workers began with.
      minibatches: For each worker its batches, one for each of its steps.
      timeline: What was done (`autopar.timeline`).

    Returns:
      The state that `autopar.average` gave at the end, and for each worker what each of its calls returned, with None
      for leaves of the state that servers keep; replicas are updated in place, and only those of the last call are
      still there.

    Raises:
      ArgumentsError: a step without such a `sync=`, too few minibatches, or those of too few workers.
      TimelineError: the timeline can't be of this step.

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
    sync = step.options.sync if isinstance(step, ParallelStep) else None
    if sync is None or not sync.is_asynchronous:
        raise ArgumentsError(
            "replay_timeline takes a step whose clients wait for nobody, sync=autopar.sync.Async(...), Elastic(...) or "
            "ADPSGD()"
        )
    if len(minibatches) != timeline.workers:
        raise ArgumentsError(
            f"replay_timeline was given minibatches of {len(minibatches)} workers, and the timeline has "
            f"{timeline.workers}"
        )
    options = dataclasses.replace(step.options, clients=timeline.workers, servers=len(timeline.events))
    first = next((own[0] for own in minibatches if own), None)
    if first is None:
        raise ArgumentsError("replay_timeline was given no minibatches")
    entry = ParallelStep(dataclasses.replace(step.planner, options=options, clients=None)).entry(state, first)
    start = step.leaves((materialize(state), first), {})
    calls = [[step.leaves((state, batch), {}) for batch in own] for own in minibatches]
    if isinstance(sync, Async):
        leaves, done = replay_served(entry, start, calls, timeline, _programs_here(entry, step.clients))
    else:
        leaves, done = _replay(sync)(entry, start, calls, timeline)
    made = jax.tree.unflatten(jax.tree.structure((state, first)), leaves)[0]
    return made, [[entry.out_tree.unflatten(own) for own in each] for each in done]


def replay_served(
    entry: Entry,
    start: Sequence[Any],
    calls: Sequence[Sequence[Sequence[Any]]],
    timeline: Timeline,
    programs: ServedPrograms,
) -> tuple[list[Any], list[list[list[Any]]]]:
    """Do what a timeline says. Arguments and results as of `replay_elastic`; results have None for the state.

    `programs`: what workers and servers run.

    Raises:
      ArgumentsError: too few calls.
      TimelineError: the timeline can't be of this step.
    """
    counts = timeline.steps.tolist()
    if any(len(a) < n for a, n in zip(calls, counts, strict=True)):
        raise ArgumentsError(
            f"replay_timeline was given {[len(own) for own in calls]} minibatches of {len(calls)} workers, and the "
            f"timeline has steps {counts}"
        )
    program = entry.compiled.analysed
    if len(programs.servers) != len(timeline.events):
        raise TimelineError(f"{program.name} has {len(programs.servers)} servers at most, not {len(timeline.events)}")
    job = Job(programs, start, timeline.workers, None)
    done = job.run(counts, lambda w, c: calls[w][c], as_recorded(timeline))
    new, count = job.state(), range(len(program.outputs))
    leaves = [_like(new[k], x) if k in new else copied(x) for k, x in enumerate(start)]
    return leaves, [[[own.get(k) for k in count] for own in each] for each in done]


def compare_served(entry: Entry, leaves: Sequence[Any], steps: int) -> Verification:
    """Compare what workers and servers do with the replay of their timeline, by `replayed`. Collective.

    Elastic exchanges are verified by one in each step, at least in two: whatever the interval, they are the same.

    Args:
      entry: The step at these shapes.
      leaves: Flat arguments of this worker's calls; servers begin with the state once all pushes are applied.
      steps: How many calls.
    """
    sync = entry.options.sync
    if isinstance(sync, Elastic):
        sync, steps = dataclasses.replace(sync, interval=1), max(steps, 3)
        entry = dataclasses.replace(entry, options=dataclasses.replace(entry.options, sync=sync))
    program, clients, runner = entry.compiled.analysed, entry.clients, entry.runner
    assert clients is not None, "processes are workers"
    first = average(list(leaves))
    calls = [[own] * steps for own in calls_of_all(clients, program, first)]
    found: list[Any] = []
    state = {k: copied(first[k]) for k in program.new_states}
    for _ in range(steps):
        found = jax.tree.leaves(runner([state.get(k, x) for k, x in enumerate(first)]))
        state = {k: found[out] for k, out in program.new_states.items()}
    done = timeline(state)
    now = average(found)
    if isinstance(runner, ServedRunner):
        made, results = replay_served(entry, first, calls, done, runner.programs)
    else:
        made, results = _replay(sync)(entry, first, calls, done)
    *_, expected = results[clients.own]
    pairs = [[(expected[k], x)] for k, x in enumerate(found)]
    for k, out in program.new_states.items():  # replicas, if there are, and what servers keep
        own = pairs[out] if isinstance(sync, Replicated) else []
        pairs[out] = [*own, (made[k], now[out])]
    mine = [_worst(some) for some in pairs]
    return compared(clients, program, mine, steps, AGAINST)


def _replay(sync: Sync | None) -> Callable[..., tuple[list[Any], list[list[list[Any]]]]]:
    """Returns what replays a way of replicas that wait for nobody."""
    return replay_elastic if isinstance(sync, Elastic) else replay_ring


def _programs_here(entry: Entry, clients: Clients | None) -> ServedPrograms:
    """Returns what workers and servers run, on the devices of this process's worker if no other process has some."""
    compiled, devices = entry.compiled, None if clients is None else clients.devices
    if devices is not None and (devices.mesh.size == 1 or not devices.sharding(None).is_fully_addressable):
        devices = None
    return ServedPrograms(compiled.program, compiled.analysed, devices)


def _worst(pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """The largest value and difference of some pairs."""
    plain = [[materialize(x.own if isinstance(x, Replica) else x) for x in pair] for pair in pairs]
    sizes, errors = zip(*(compared_values(a, b) for a, b in plain), strict=True)
    return max(sizes), max(errors)


def _like(value: Any, old: Any) -> Any:
    if jax_compat.is_key(value.dtype):
        return value
    array = jnp.asarray(value)
    return jax_compat.weak(array) if jax_compat.is_weak(old) else array
