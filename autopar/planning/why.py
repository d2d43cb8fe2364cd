"""`why`: the road that a plan didn't take for a table, with all that it would cost, beside the one that was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost import Term, step_terms
from autopar.cost.exchange import host_terms
from autopar.cost.rates import NO_TIME
from autopar.errors import ArgumentsError
from autopar.ir.plan import Plan, TablePlan, require_plan
from autopar.ir.strategy import METHODS, Method, split_method
from autopar.planning.explain import format_bytes


@dataclass(frozen=True, slots=True)
class Road:
    """One way for a table's gradient: all that is done in a step, for the table's whole family.

    Attributes:
      name: The method, "ps on hosts" for that.
      terms: In order. Where times aren't known: what sends something.
      timed: Whether the terms have times.
    """

    name: str
    terms: tuple[Term, ...]
    timed: bool

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(t.sent for t in self.terms)

    @property
    def seconds(self) -> float | None:
        """What it is predicted to take; None if that isn't known."""
        return sum(t.seconds for t in self.terms) if self.timed else None

    def lines(self) -> list[str]:
        """Terms and totals, as text."""
        shown = [*self.terms, Term("in all", self.seconds or 0.0, self.sent)]
        return [self.name, *(f"  {t.name:<40}{_sent(t):>12}{_ms(t, self.timed)}" for t in shown)]


@dataclass(frozen=True, slots=True)
class Why:
    """What `why` returns; `str()` is a table.

    Attributes:
      path: Of the table.
      text: Why, in words.
      chosen: The road of the plan; None where nothing is known of what it takes.
      other: The one not taken; None where it can't be taken.
    """

    path: str
    text: str
    chosen: Road | None = None
    other: Road | None = None

    @property
    def ratio(self) -> float | None:
        """The other road over the chosen one: by time, or else by bytes; None where that isn't known."""
        if self.chosen is None or self.other is None:
            return None
        a, b = self.chosen.seconds, self.other.seconds
        if a is None or b is None:
            a, b = self.chosen.sent, self.other.sent
        return b / a if a else None

    def __str__(self) -> str:
        roads = [road for road in (self.chosen, self.other) if road is not None]
        lines = [f"{self.path}: {self.text}", *(line for road in roads for line in road.lines())]
        if self.ratio is not None:
            timed = all(road.timed for road in roads)
            what = "takes {} times as long" if timed else "sends {} times as many bytes; times aren't known"
            lines.append(f"{roads[1].name} {what.format(f'{self.ratio:.3g}')}")
        return "\n".join(lines)


def why(plan: Plan, path: str, method: Method) -> Why:
    """Why a table isn't trained by another method: what that would take, beside what was chosen.

    Args:
      plan: Of the step.
      path: Of a table.
      method: As in a strategy: `"allreduce"`, `("ps", "hosts")`.

    Raises:
      StrategyError: there is no such method.
      ArgumentsError: "auto" is none; or there is no such table.

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
    asked, where = split_method(method)
    if asked == "auto":
        raise ArgumentsError(f"'auto' is no method of its own; ask for one of {', '.join(METHODS[1:])}")
    table, name = plan.table(path), _name(asked, where)
    chosen, taken = _road(table, table.method, table.where), table.taken
    if name == taken:
        return Why(path, f"{name} is what was chosen ({table.reason})", chosen)
    if table.refused and asked != "allreduce":
        line = f", {table.line}" if table.line else ""
        remedy = f". To change it: {table.remedy}" if table.remedy else ""
        return Why(path, f"it can't have {name}: {table.reason}{line}{remedy}", chosen)
    text = f"{taken} was chosen, not {name} ({table.reason})"
    if plan.devices == 1:
        rows = "" if table.alpha is None else f": a step touches {table.alpha.rows} of {table.alpha.extent} rows"
        return Why(path, f"{text}. On one device nothing is sent{rows}")
    other = _road(table, asked, where)
    return Why(path, text if other is not None else f"{text}. What {name} would take isn't known", chosen, other)


def _name(method: str, where: str) -> str:
    return f"{method} on hosts" if where == "hosts" else method


def _road(table: TablePlan, method: str, where: str) -> Road | None:
    """A road, as far as it is known."""
    if (name := _name(method, where)) in table.terms:
        return Road(name, tuple(table.terms[name]), timed=True)
    if table.sizes is None:
        return None
    terms: Sequence[Term]
    if where == "hosts":
        terms = host_terms(table.sizes)
    else:
        terms = step_terms(NO_TIME, table.sizes.on_devices() if table.where == "hosts" else table.sizes)[method]
    return Road(name, tuple(t for t in terms if t.sent), timed=False)


def _sent(term: Term) -> str:
    return format_bytes(term.sent) if term.sent else ""


def _ms(term: Term, timed: bool) -> str:
    return f"{term.seconds * 1e3:>12.3f} ms" if timed else ""
