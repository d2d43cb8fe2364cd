"""Replay and `verify` of replicas: all clients' steps and means, one after the other in one process.

The oracle of `sync=`, which is another function than the step on one device: with a client's own compiled programs it
gives the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import Clients, check_ring, mean_of
from autopar.errors import ArgumentsError
from autopar.ir.program import Program
from autopar.planning.verification import Verification
from autopar.planning.verify_replay import compared_values, replayed
from autopar.run.entry import Entry
from autopar.run.means import MeansRunner
from autopar.run.replicas import Weights
from autopar.run.step import ParallelStep
from autopar.tables.averaging import average
from autopar.tables.kinds import copied, materialize
from autopar.tables.replica import Replica, Replicas

Array = Any
#: What replicas are compared with.
AGAINST = "a sequential replay of all clients' steps and means, since replicas are another function than the plain step"
_mean = jax.jit(mean_of)


def replay(step: ParallelStep, state: Any, minibatches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
    """Trains replicas in one process, one client after the other: what so many processes must have computed.

    A client's steps are run by the programs that it has itself. So on one kind of machine the numbers are those of the
    processes, to the bit; and how a way of training works out can be seen without them.

    Args:
      step: What `parallelize(..., sync=...)` returned, of a function `(state, batch)`.
      state: What all clients begin with.
      minibatches: For each step a batch for each client, in their order, as many each time.

    Yields:
      After each step what each client's call returned. The next step updates these states in place.

    Raises:
      ArgumentsError: a step without `sync=`, or another number of minibatches than before.

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
    if isinstance(step, ParallelStep) and step.options.sync is not None and step.options.sync.is_asynchronous:
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
    check_ring(step.options.sync, len(first))
    options = dataclasses.replace(step.options, clients=len(first))
    entry = ParallelStep(dataclasses.replace(step.planner, options=options, clients=None)).entry(state, first[0])

    def calls() -> Iterator[list[list[Any]]]:
        for k, batches in enumerate(itertools.chain([first], coming)):
            if len(batches) != len(first):
                raise ArgumentsError(f"replay: step {k} has {len(batches)} minibatches, the first one had {len(first)}")
            yield [step.leaves((state, batch), {}) for batch in batches]

    runner = dataclasses.replace(entry, clients=step.clients).runner
    assert isinstance(runner, MeansRunner), "clients have means"
    for results in replay_replicas(entry.compiled.analysed, runner, calls()):
        yield [entry.out_tree.unflatten(own) for own in results]


def replay_replicas(
    program: Program, runner: MeansRunner, minibatches: Iterable[Sequence[Sequence[Any]]]
) -> Iterator[list[list[Any]]]:
    """Yields each client's flat results of each step.

    Args:
      program: The analysed step.
      runner: What runs a client's steps, and says what is behind them.
      minibatches: Of each step, for each client its flat arguments. States are taken from the first step's; all clients
        have the same then.
    """
    states, touched = program.new_states, runner.touched
    leaves: list[dict[int, Any]] = []
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
        shared = [
            dataclasses.replace(each, steps=each.steps + 1, touched=some)
            for each, some in zip(shared, rows, strict=True)
        ]
        exchanges = [runner.exchange(*pair) for pair in zip(shared, weights, strict=True)]
        unions = [np.bitwise_or.reduce(bits) for bits in zip(*map(next, exchanges), strict=True)]
        sent = [exchange.send(unions) for exchange in exchanges]
        # All means first, as what is sent is updated in place.
        means = []
        for c, each in enumerate(shared):
            partners = runner.partners(c, each.steps, len(sent))
            means.append([_mean(parts) for parts in zip(*(sent[other] for other in partners), strict=True)])
        for c, own in enumerate(results):
            shared[c], new = exchanges[c].send(means[c])
            for k, array in new.items():
                own[states[k]] = array
            leaves[c] = {k: own[out] for k, out in states.items()}
        yield results


def compare_replicas(entry: Entry, leaves: Sequence[Any], steps: int) -> Verification:
    """Compares a run of all clients with its replay, by `replayed`. Collective.

    Args:
      entry: The step at these shapes.
      leaves: Flat arguments of this client's calls; replicas begin from their mean.
      steps: How many calls.
    """
    program, runner = entry.compiled.analysed, entry.runner
    assert isinstance(runner, MeansRunner), "clients have means"
    clients, first = runner.clients, average(list(leaves))
    calls = calls_of_all(clients, program, first)
    *_, last = replay_replicas(program, runner, [calls] * steps)
    expected = last[clients.own]
    found: list[Any] = []
    state = {k: copied(first[k]) for k in program.new_states}
    for _ in range(steps):
        found = jax.tree.leaves(runner([state.get(k, x) for k, x in enumerate(first)]))
        state = {k: found[out] for k, out in program.new_states.items()}
    pairs = zip(expected, found, strict=True)
    mine = [compared_values(materialize(a), materialize(b.own if isinstance(b, Replica) else b)) for a, b in pairs]
    return compared(clients, program, mine, steps, AGAINST)


def calls_of_all(clients: Clients, program: Program, first: Sequence[Any]) -> list[list[Any]]:
    """Returns all clients' flat arguments, of this one's; the state is one. Collective."""
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


def compared(clients: Clients, program: Program, mine: Sequence[Any], steps: int, against: str) -> Verification:
    """Returns the comparison of what all clients found of each output, `compared_values`. Collective."""
    all_ = clients.processes.values(mine, "comparing replicas with their replay")
    checks = []
    for k, output in enumerate(program.outputs):
        path = program.inputs[output.state].path if output.state is not None else output.path
        size, error = (max(values) for values in zip(*(each[k] for each in all_), strict=True))
        checks.append(replayed(path, size, error))
    return Verification(tuple(checks), steps, against)
