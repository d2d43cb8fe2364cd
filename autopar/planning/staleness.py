"""`staleness`: measures how far the weights that an asynchronous pipeline's tasks see are from those that they stand
for.

Source: SpecTrain (Chen et al., 2018), section 3.2, figure 8.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar.cost.stage_time import stage_times, steps_ahead
from autopar.errors import ArgumentsError
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import Var
from autopar.ir.timeline import Value
from autopar.jax_types import Array, Pytree
from autopar.planning.replay import replay_minibatches
from autopar.planning.text import Column, Columns, print_as
from autopar.run.object_step import AnyStep, unwrapped
from autopar.tables.kinds import materialize


@dataclass(frozen=True, slots=True)
class TaskStaleness:
    """The staleness of a stage's forwards ("F") or backwards ("B").

    Attributes:
      ahead: s, updates of the stage from such a task's start to its minibatch's last backward.
      stale: For each version from the first update on, the RMS difference between its weights and those s updates
        later.
      predicted: The same for W + s u, which "spectrain" reads; u is the last update's change.
    """

    stage: int
    kind: str
    ahead: int
    stale: tuple[float, ...]
    predicted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of a pipeline's tasks whose s isn't 0; `str()` is a table of medians."""

    schedule: str
    tasks: tuple[TaskStaleness, ...]

    def __str__(self) -> str:
        if not self.tasks:
            return f"{self.schedule}: no task misses an update of its stage"
        lower = [sum(p < s for p, s in zip(t.predicted, t.stale, strict=True)) / len(t.stale) for t in self.tasks]
        columns = {
            "stage": [str(t.stage) for t in self.tasks],
            "task": [t.kind for t in self.tasks],
            "s": [str(t.ahead) for t in self.tasks],
            "RMSE stale": [f"{statistics.median(t.stale):.2e}" for t in self.tasks],
            "predicted": [f"{statistics.median(t.predicted):.2e}" for t in self.tasks],
            "nearer": [f"{share:.0%}" for share in lower],
        }
        return print_as(Columns([Column(title, of, "right") for title, of in columns.items()]), "text")

    __repr__ = __str__


def staleness(step: AnyStep, state: Pytree, batches: Iterable[Pytree]) -> Staleness:
    """Compares the weights that tasks of an asynchronous pipeline see with those that they stand for.

    The minibatches are replayed, task by task, in this process, which meanwhile has the whole state; `state` is left as
    it is.

    Args:
      step: The step that `parallelize` returned, with an asynchronous schedule. It takes a state and a batch.
      state: The first state.
      batches: A batch for each call; more than the pipeline has in flight.

    Returns:
      For each stage's forwards and backwards that miss updates, the distance of their weights, and of weights predicted
        from them, to the weights at the start of their minibatch's last backward.

    Raises:
      ArgumentsError: the step has another schedule, or there are too few batches.
    """
    minibatches = list(batches)
    if not minibatches:
        raise ArgumentsError("staleness: no batches")
    pure, arrays, named = unwrapped(step, (state, minibatches[0]), {}, "staleness")
    planned = pure.planned_for(*arrays, **named)
    staged, plan = planned.compiled.program.staged, planned.compiled.plan.pipeline
    if staged is None or staged.asynchronous is None or plan is None:
        raise ArgumentsError(
            f"staleness: {step.name} has no asynchronous pipeline, so nothing is stale: "
            "parallelize(step, pipeline=autopar.Pipeline(..., schedule='spectrain'))"
        )
    ahead = plan.ahead or steps_ahead(plan.calls, stage_times(plan))
    if len(minibatches) < max(map(max, ahead)) + 2:
        raise ArgumentsError(
            f"staleness: {len(minibatches)} batches; versions are compared over {max(map(max, ahead))} updates, "
            "behind the first one"
        )
    leaves = [pure.leaves(*unwrapped(step, (state, batch), {}, "staleness")[1:]) for batch in minibatches]
    watched = _Watched(staged, ahead)
    given = [[materialize(leaf) for leaf in each] for each in leaves]
    replay_minibatches(staged, planned.compiled.analysed.new_states, given, watched.see, plan.tensor)
    return Staleness(plan.schedule, tuple(watched.found()))


class _Watched:
    """Keeps the versions of each stage's weights during a replay, as far as they are compared."""

    def __init__(self, staged: StagedStep, ahead: Sequence[tuple[int, int]]) -> None:
        asynchronous = staged.asynchronous
        assert asynchronous is not None, "versions differ"
        self._ahead = ahead
        self._weights: dict[int, list[Var]] = {k: [] for k in range(len(ahead))}
        for v in staged.weights:
            if v in asynchronous.news and jnp.issubdtype(v.dtype, jnp.inexact):
                self._weights[staged.homes[v]].append(v)
        self._stages = {v: k for k, weights in self._weights.items() for v in weights}
        self._versions: dict[int, dict[int, dict[Var, Array]]] = collections.defaultdict(dict)
        self._errors: dict[tuple[int, str], list[tuple[float, float]]] = {}

    def see(self, value: Value, array: Array) -> None:
        """Takes in a version of a leaf."""
        stage = self._stages.get(value.var)
        if stage is None:
            return
        versions = self._versions[stage]
        version = versions.setdefault(value.version, {})
        is_new = value.var not in version
        version[value.var] = array
        if is_new and len(version) == len(self._weights[stage]):
            self._compare(stage, value.version)
            versions.pop(value.version - max(self._ahead[stage]) - 1, None)

    def _compare(self, stage: int, now: int) -> None:
        versions = self._versions[stage]
        for kind, ahead in zip("FB", self._ahead[stage], strict=True):
            if ahead and now > ahead:
                weights = self._weights[stage]
                lists = ([versions[v][x] for x in weights] for v in (now - ahead - 1, now - ahead, now))
                stale, predicted = _errors(ahead, *lists)
                self._errors.setdefault((stage, kind), []).append((float(stale), float(predicted)))

    def found(self) -> Iterable[TaskStaleness]:
        for (stage, kind), errors in sorted(self._errors.items(), key=lambda item: (item[0][0], item[0][1] != "F")):
            stale, predicted = zip(*errors, strict=True)
            yield TaskStaleness(stage, kind, self._ahead[stage]["FB".index(kind)], stale, predicted)


@jax.jit
def _errors(ahead: int, before: Sequence[Array], then: Sequence[Array], now: Sequence[Array]) -> tuple[Array, Array]:
    size = sum(w.size for w in now)

    def rmse(guesses: Iterable[Array]) -> Array:
        squares = (jnp.sum(jnp.square(jnp.abs(a - b).astype(jnp.float32))) for a, b in zip(guesses, now, strict=True))
        return jnp.sqrt(sum(squares) / size)

    return rmse(then), rmse(w + ahead * (w - old) for old, w in zip(before, then, strict=True))
