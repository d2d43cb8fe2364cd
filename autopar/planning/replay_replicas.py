"""Replay and `verify` of replicas: all clients' steps and means, one after the other in one process.

The oracle of `sync=`, which is another function than the step on one device. With a client's own compiled programs it
must give the same bits; with the step's own jaxpr in float64 the same numbers but for rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.backends.clients import Clients, mean_of
from autopar.ir.program import Program
from autopar.planning.verification import LeafCheck, Verification
from autopar.planning.verify_replay import compared_values
from autopar.run.entry import Entry
from autopar.run.replicas import Averaging, ReplicaRunner, Weights
from autopar.run.touched_rows import TouchedRows
from autopar.tables.averaging import average
from autopar.tables.kinds import copied, materialize
from autopar.tables.replica import Replica, Replicas

Array = Any
#: What replicas are compared with.
AGAINST = "a sequential replay of all clients' steps and means, since replicas are another function than the plain step"
_mean = jax.jit(mean_of)


def replay_replicas(
    program: Program,
    clients: Clients,
    averaging: Averaging,
    touched: TouchedRows,
    run: Callable[[Sequence[Any]], Sequence[Any]],
    minibatches: Sequence[Sequence[Sequence[Any]]],
) -> list[list[Any]]:
    """Returns each client's flat results of its last step.

    Args:
      program: The analysed step.
      clients: Those of the run that is replayed.
      averaging: What happens behind the steps.
      touched: Which rows of tables steps touch.
      run: One step of a client, on flat arguments that it may update in place; returns flat results.
      minibatches: Of each step, for each client its flat arguments. States are taken from the first step's; all clients
        have the same then.
    """
    states = program.new_states
    leaves = [{k: copied(x) for k, x in enumerate(first) if k in states} for first in minibatches[0]]
    shared: list[Replicas] = []
    results: list[list[Any]] = []
    since = touched.none(averaging.weights)
    for step in minibatches:
        calls = [[own.get(k, x) for k, x in enumerate(given)] for own, given in zip(leaves, step, strict=True)]
        if not shared:
            shared = [averaging.begin(clients, Weights(own)) for own in leaves]
        for call in calls:
            since = touched.after(since, call)
        results = [list(run(call)) for call in calls]
        shared = [dataclasses.replace(each, steps=each.steps + 1) for each in shared]
        weights = [Weights({k: own[states[k]] for k in averaging.weights}) for own in results]
        sent = [averaging.sent(*pair) for pair in zip(shared, weights, strict=True)]
        rows = {k: touched.rows(k, since[k].bits) for k in sent[0] if k in touched}
        since |= touched.none(sent[0])
        for c, own in enumerate(results):
            means: dict[int, Array] = {}
            for k in sent[0]:
                some = rows.get(k)
                if some is None:
                    means[k] = _mean([each[k] for each in sent])
                else:
                    mean = _mean([touched.picked(k, each[k], some) for each in sent])
                    means[k] = touched.put(k, sent[c][k], some, mean, in_place=False)
            shared[c], new = averaging.merged(shared[c], weights[c], means)
            for k, array in new.items():
                own[states[k]] = weights[c].like(k, array)
            leaves[c] = {k: own[out] for k, out in states.items()}
    return results


def compare_replicas(entry: Entry, leaves: Sequence[Any], steps: int) -> Verification:
    """Compare a run of all clients with its replay: they must be equal bit for bit. Collective.

    Args:
      entry: The step at these shapes.
      leaves: Flat arguments of this client's calls; replicas begin from their mean.
      steps: How many calls.
    """
    program, runner = entry.compiled.analysed, entry.runner
    assert isinstance(runner, ReplicaRunner), "clients have replicas"
    first = average(list(leaves))
    batch = [k for k in range(len(first)) if k not in program.new_states]
    given = runner.clients.stacked([first[k] for k in batch], "the minibatches of all clients")
    calls = []
    for c in range(runner.clients.count):
        own = dict(zip(batch, (stack[c] for stack in given), strict=True))
        calls.append([own.get(k, x) for k, x in enumerate(first)])
    clients = runner.clients

    def run(call: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(runner.inner(call))

    expected = replay_replicas(program, clients, runner.averaging, runner.touched, run, [calls] * steps)[clients.own]
    found: list[Any] = []
    state = {k: copied(first[k]) for k in program.new_states}
    for _ in range(steps):
        found = jax.tree.leaves(runner([state.get(k, x) for k, x in enumerate(first)]))
        state = {k: found[out] for k, out in program.new_states.items()}
    pairs = zip(expected, found, strict=True)
    mine = [compared_values(materialize(a), materialize(b.own if isinstance(b, Replica) else b)) for a, b in pairs]
    all_ = clients.processes.values(mine, "comparing replicas with their replay")
    checks = []
    for k, output in enumerate(program.outputs):
        path = program.inputs[output.state].path if output.state is not None else output.path
        size, error = (max(values) for values in zip(*(each[k] for each in all_), strict=True))
        checks.append(LeafCheck(path, size, error, 0.0, error == 0))
    return Verification(tuple(checks), steps, AGAINST)
