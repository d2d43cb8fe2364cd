"""`why`: compares a method or schedule that a plan didn't take with the one that it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import ArgumentsError
from autopar.ir.figures import Term, format_bytes
from autopar.ir.pipeline import Calls
from autopar.ir.plan import PipelinePlan, Plan, TablePlan, require_plan
from autopar.ir.schedule import SCHEDULES, AsynchronousRule
from autopar.ir.strategy import METHODS, TENSOR, Method, split_method
from autopar.planning.predictions import Prediction, predict_method
from autopar.planning.switch_notes import left_out


@dataclass(frozen=True, slots=True)
class Why:
    """The result of `why`; `str()` is a table.

    Attributes:
      path: The table's path.
      text: The reason in words.
      chosen: The prediction for the plan's method; None if nothing is known of it.
      other: The prediction for the other method; None if it can't be taken.
      left_out: Optimisations that `optimize=` leaves out -> what that costs the table; "" for nothing.
    """

    path: str
    text: str
    chosen: Prediction | None = None
    other: Prediction | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Divides the other method's time, or else its bytes, by the chosen one's; None if these aren't known."""
        if self.chosen is None or self.other is None:
            return None
        a, b = self.chosen.seconds, self.other.seconds
        if a is None or b is None:
            a, b = self.chosen.sent, self.other.sent
        return b / a if a else None

    def __str__(self) -> str:
        ways = [way for way in (self.chosen, self.other) if way is not None]
        lines = [f"{self.path}: {self.text}", *(line for way in ways for line in _lines(way))]
        if self.ratio is not None:
            timed = all(way.timed for way in ways)
            what = "takes {} times as long" if timed else "sends {} times as many bytes; times aren't known"
            lines.append(f"{ways[1].name} {what.format(f'{self.ratio:.3g}')}")
        told = ((name, cost or "nothing is at stake for this table") for name, cost in self.left_out.items())
        lines += [f"optimize= leaves out {name!r}: {cost}" for name, cost in told]
        return "\n".join(lines)

    __repr__ = __str__


def why(plan: Plan, path: str, method: Method) -> Why:
    """Explains why a table isn't trained by another method, with predictions of both, and what optimisations that
    `optimize=` leaves out would save.

    For a weight in a pipeline's stage, `method` may be a schedule: the answer is which updates its tasks would miss.

    Args:
      plan: The step's plan.
      path: Path of a table, or of a weight in a stage.
      method: As in a strategy: `"allreduce"`, `("ps", "hosts")`; or a schedule: `"stash"`, `"1f1b"`.

    Raises:
      StrategyError: there is no such method.
      ArgumentsError: the method is "auto"; there is no such table or weight; or there is no pipeline for a schedule.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> table, ids = jax.ShapeDtypeStruct((1_000_000, 64), "float32"), jax.ShapeDtypeStruct((6144,), "int32")
      >>> plan = autopar.plan(step, table, ids, cluster=autopar.Cluster.named("parallax-8x6"))
      >>> autopar.why(plan, "table", "allreduce").ratio > 10
      True
    """
    require_plan(plan, "why")
    if isinstance(method, str) and method in SCHEDULES:
        if plan.pipeline is None:
            raise ArgumentsError(f"{method!r} is a schedule, and the plan of {plan.step} has no pipeline")
        return Why(path, schedule_text(plan.pipeline, path, method))
    wanted, where = split_method(method)
    if wanted == "auto":
        raise ArgumentsError(f"'auto' is no method of its own; ask for one of {', '.join(METHODS)}")
    if wanted == TENSOR:
        raise ArgumentsError(
            "'tensor' is no method of tables; explain(step, ...) says which products are divided, and why"
        )
    table, name = plan.table(path), f"{wanted} on hosts" if where == "hosts" else wanted
    return replace(_compared(plan, table, name), left_out=left_out(plan, table))


def _compared(plan: Plan, table: TablePlan, name: str) -> Why:
    """Compares a method, named as in `TablePlan.taken`, with the one that was taken."""
    chosen, taken = predict_method(table, table.taken), table.taken
    if name == taken:
        return Why(table.path, f"{name} is what was chosen ({table.reason})", chosen)
    if table.refused and name != "allreduce":
        line = f", {table.line}" if table.line else ""
        remedy = f". To change it: {table.remedy}" if table.remedy else ""
        return Why(table.path, f"it can't have {name}: {table.reason}{line}{remedy}", chosen)
    text = f"{taken} was chosen, not {name} ({table.reason})"
    if plan.devices == 1:
        rows = "" if table.alpha is None else f": a step touches {table.alpha.rows} of {table.alpha.extent} rows"
        return Why(table.path, f"{text}. On one device nothing is sent{rows}")
    other = predict_method(table, name)
    return Why(table.path, text if other is not None else f"{text}. What {name} would take isn't known", chosen, other)


def _lines(way: Prediction) -> Iterator[str]:
    """Yields a method's terms and totals: bytes, milliseconds, and lower bounds."""
    yield way.name
    total = Term("in all", way.seconds or 0.0, way.sent, bound_s=way.bound_s)
    for term in (*way.terms, total):
        sent = format_bytes(term.sent) if term.sent else ""
        time = f"{term.seconds * 1e3:>12.3f} ms" if way.timed else ""
        least = "" if term.bound_s is None else f"  (at least {term.bound_s * 1e3:.3f})"
        yield f"  {term.name:<40}{sent:>12}{time}{least}"


def schedule_text(plan: PipelinePlan, path: str, schedule: str) -> str:
    """Compares what tasks see of a weight by the plan's schedule with what they would see by another; raises
    ArgumentsError if the weight is in no stage."""
    stage = next((k for k, stage in enumerate(plan.stages) if path in stage.weights), None)
    if stage is None:
        raise ArgumentsError(f"{path!r} is no weight of a stage; explain(step, ...) lists those of each")
    own = f"it is in stage {stage} of {len(plan.stages)}. By {_versions(plan, stage, plan.schedule)}"
    return own if schedule == plan.schedule else f"{own}. By {_versions(plan, stage, schedule)}"


def _versions(plan: PipelinePlan, stage: int, schedule: str) -> str:
    """Describes the versions that a stage's tasks see by a schedule."""
    rule = SCHEDULES[schedule]
    if not isinstance(rule, AsynchronousRule):
        return f"{schedule} no task misses an update: each call ends with a flush, where devices wait for one another"
    calls = replace(plan.calls if plan.updates else Calls.soonest(plan.stage_devices), stashes=rule.stashes)
    forward, backward = calls.missed(stage)
    late = f"{forward} update{'s' * (forward != 1)}" if forward else "no update"
    text = f"{schedule} its forwards miss {late} of earlier minibatches, its backwards {backward or 'none'}"
    if stashed := calls.stashed(stage):
        size = format_bytes(stashed * plan.stages[stage].weight_bytes)
        text += f", for which {stashed} older version{'s' * (stashed > 1)} of the stage's weights ({size}) are kept"
    if rule.predicts and plan.ahead:
        text += ", and they predict the weights {} and {} updates ahead".format(*plan.ahead[stage])
    elif rule.predicts:
        text += ", and they predict the weights by the last change"
    return text
