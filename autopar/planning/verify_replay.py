"""`verify` of an asynchronous pipeline, which is another function than the step on one device: against its replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.ir.program import known
from autopar.planning.replay import replay_minibatches
from autopar.planning.verification import LeafCheck, Verification, as_floats
from autopar.run.asynchronous import AsynchronousRunner
from autopar.run.entry import Entry
from autopar.tables.kinds import copied, materialize

#: Error allowed where programs don't give the same bits twice, as a share of a leaf's largest value.
RELATIVE = 1e-4
#: What the planned step is compared with.
AGAINST = "a sequential replay of its own tasks, since without a flush it is another function than the plain step"


def compare_replay(entry: Entry, leaves: Sequence[Any], steps: int) -> Verification:
    """Compares a run with its replay, one action after the other in one process, by `replayed`.

    Args:
      entry: The step at these shapes.
      leaves: Flat arguments of each call; states go around.
      steps: How many calls. The pipeline is drained behind them.
    """
    program, runner = entry.compiled.analysed, entry.runner
    assert isinstance(runner, AsynchronousRunner), "the step has no flush"
    step = known(entry.compiled.program.staged)
    pipeline = entry.compiled.plan.pipeline
    assert pipeline is not None, "a step without a flush has stages"
    first = [copied(materialize(leaf)) for leaf in leaves]
    expected = replay_minibatches(step, program.new_states, [first] * steps, tensor=pipeline.tensor)
    given, found = [copied(leaf) for leaf in first], []
    states: dict[int, Any] = {}
    for _ in range(steps):
        states, others = runner.call(given)
        found += [] if others is None else [others]
        for leaf, out in program.new_states.items():
            given[leaf] = states[out]
    last = materialize(states)
    found += runner.rest_of(states)
    checks = []
    for k, output in enumerate(program.outputs):
        path = program.inputs[output.state].path if output.state is not None else output.path
        each = zip(expected, found, strict=True)
        pairs = [(expected[-1][k], last[k])] if k in last else [(e[k], f[k]) for e, f in each]
        sizes, errors = zip(*(compared_values(*pair) for pair in pairs), strict=True)
        checks.append(replayed(path, max(sizes), max(errors)))
    return Verification(tuple(checks), steps, AGAINST)


def replayed(path: str, size: float, error: float) -> LeafCheck:
    """Returns the comparison of a leaf with its replay: equal bit for bit, where a program gives the same bits twice.

    Args:
      path: The leaf's.
      size: Its largest value.
      error: Its largest difference.
    """
    allowed = 0.0 if jax_compat.repeats_bits() else RELATIVE * size
    return LeafCheck(path, size, error, 0.0, error <= allowed)


def compared_values(expected: Any, found: Any) -> tuple[float, float]:
    """Returns the largest value, and the largest difference."""
    pair = (jax.random.key_data(x) if jax_compat.is_key(getattr(x, "dtype", None)) else x for x in (expected, found))
    a, b = map(as_floats, pair)
    both = np.isnan(a) & np.isnan(b)
    error = np.where(both | (a == b), 0.0, np.abs(a - b))
    return float(np.max(np.abs(a), initial=0.0)), float(np.max(error, initial=0.0))
