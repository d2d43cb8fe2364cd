"""Decisions: what is lifted and how each parameter's gradient travels. The Program holds the facts.

Patterns over parameter paths: a pattern that matches a node covers its leaves; `*` stays within a segment, `**`
crosses segments; the first match wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from typing import Literal as Choice

from autopar.errors import StrategyError
from autopar.ir.figures import Alpha, Growth, Term
from autopar.ir.layout import RowLayout
from autopar.ir.sizes import Sizes

#: Methods that run a table's step on its touched rows.
ROW_METHODS = ("ps", "allgather", "allreduce_rows")
#: Methods by which every device has all rows of a table.
REPLICATED = ("allgather", "allreduce_rows", "allreduce")
METHODS = ("auto", "allreduce", *ROW_METHODS)
Sparse = Choice["exact", "lazy", "off"]
#: How a table on hosts is called among methods.
HOSTED = "ps on hosts"
#: Where a table's rows are.
Where = Choice["devices", "hosts"]
#: A method, or a method and where.
Method = str | tuple[str, Where]
Strategy = Method | Mapping[str, Method]
#: "pjit": one global program, partitioned by XLA. "pmap": each device's own program, with explicit reductions.
Emit = Choice["pjit", "pmap"]


def split_method(given: Method) -> tuple[str, Where]:
    """Method and place of what a user gives: `"ps"`, or `("ps", "hosts")`.

    Raises:
      StrategyError: there is no such method, or not there.
    """
    method, where = given if isinstance(given, tuple) and len(given) == 2 else (given, "devices")
    if not isinstance(method, str) or method not in METHODS:
        raise StrategyError(f"strategy: there is no method {method!r}; the methods are {', '.join(METHODS)}")
    if where not in ("devices", "hosts"):
        raise StrategyError(f"strategy: {given!r} is neither on 'devices' nor on 'hosts'")
    if where == "hosts" and method != "ps":
        raise StrategyError(f"strategy: {given!r}: tables on hosts are trained by 'ps' only")
    return method, "hosts" if where == "hosts" else "devices"


def asks_for_hosts(strategy: Strategy) -> bool:
    """Whether a strategy puts any table in the memory of the hosts."""
    given = strategy.values() if isinstance(strategy, Mapping) else [strategy]
    return any(split_method(method)[1] == "hosts" for method in given)


def without_hosts(strategy: Strategy) -> Strategy:
    """The same for a step whose tables can't be on hosts: they are trained where they are."""

    def of(given: Method) -> Method:
        return "auto" if split_method(given)[1] == "hosts" else given

    return {k: of(v) for k, v in strategy.items()} if isinstance(strategy, Mapping) else of(strategy)


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """A lifted family.

    Attributes:
      family: Its id in `Program.rows`.
      rows: Static bound on the rows a step touches, one padding row included.
      ids: Number of ids a step looks up, duplicates included.
      method: How its rows travel ("ps" on one device, where nothing travels).
      lazy: Only touched rows move, whatever the optimizer says.
      asked: Rows that all devices together ask for, where these travel by themselves ("ps", "allgather"); else None.
      capacity: The most rows that one device asks another one for; else None.
      layout: How the rows are spread; else None.
      imbalance: Of the example, the rows that a device asks one owner for at most over the average, if measured.
      where: Whether its rows are on the devices, or in the memory of the hosts, owned by ranks.
      journal: Steps that untouched rows may wait for before they are brought up to date (`ir.deferred`); 0 where no
        step moves them.
      tight: Whether `capacity` was measured, so that a batch may exceed it: then the step is run by the fallback.
    """

    family: int
    rows: int
    ids: int
    method: str
    lazy: bool
    asked: int | None = None
    capacity: int | None = None
    layout: RowLayout | None = None
    tight: bool = False
    imbalance: float | None = None
    where: Where = "devices"
    journal: int = 0

    @property
    def on_hosts(self) -> bool:
        """Whether the rows are in the memory of the hosts."""
        return self.where == "hosts"


#: Of fields that no file holds, and by which plans aren't compared: they follow from the others.
_DERIVED: Mapping[str, bool] = {"saved": False}


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A table that is looked up by rows, with its optimizer's slots: what is decided, why, and what it takes.

    Attributes:
      path, shape, dtype: Of the table.
      axis: Of its rows.
      slots: Paths of the leaves whose rows go with the table's; other tables of the family among them.
      ids: Ids that a step looks up, over all devices, duplicates included.
      method, where, lifted: How its gradient travels; where its rows are; whether the touched rows alone are updated.
      reason, remedy, line: Why; what would change it; where it is looked up.
      refused: Whether it can't be lifted at all.
      capacity, tight: By "ps", the rows that a device asks another one for at most; whether that was measured.
      dealt: Whether rows are distributed cyclically over the devices, rather than in shards of adjacent rows.
      journal: Steps that untouched rows wait for at most; 0 where no step moves them.
      alpha: Rows that a step touches; None where nothing is known of them.
      growth: Rows that n devices touch together, each with as many ids as a device of the plan has; None where that
        isn't known.
      sizes: On several devices, what a step does with the table's family.
      terms: On several devices, method (`taken` is one) -> all that it does in a step, in order, as far as times were
        asked for.
      sent: On several devices, method -> bytes that each device would send in a step for the table's family.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axis: int
    slots: tuple[str, ...]
    ids: int
    method: str
    where: Where
    lifted: bool
    reason: str = ""
    remedy: str = ""
    line: str = ""
    refused: bool = False
    capacity: int | None = None
    tight: bool = False
    dealt: bool = False
    journal: int = 0
    alpha: Alpha | None = None
    growth: Growth | None = None
    sizes: Sizes | None = None
    terms: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict, compare=False, metadata=_DERIVED)

    @property
    def taken(self) -> str:
        """The name of its method among others: "ps on hosts" for what is there."""
        return HOSTED if self.where == "hosts" else self.method

    @property
    def seconds(self) -> Mapping[str, float]:
        """Method -> what its exchanges and updates are predicted to take in a step."""
        return {method: sum(t.seconds for t in terms) for method, terms in self.terms.items()}


@dataclass(frozen=True, slots=True)
class DensePlan:
    """A leaf of the state that isn't looked up by rows.

    Attributes:
      path, shape, dtype, nbytes: Of the leaf.
      shared: Whether it is kept in shards, and gathered for use.
      reason: Why, where there is something to say.
      sent: Method -> bytes that each device would send in a step for it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shared: bool = False
    reason: str = field(default="", compare=False, metadata=_DERIVED)
    sent: Mapping[str, int] = field(default_factory=dict, compare=False, metadata=_DERIVED)

    @property
    def method(self) -> str:
        """How its gradient travels."""
        return "ps" if self.shared else "allreduce"

    @property
    def lifted(self) -> bool:
        """Never: all of it is updated."""
        return False


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step at one set of shapes.

    Attributes:
      families: The tables that are lifted, with their slots.
      tables: Every table, lifted or not, with the reason.
      dense: The other leaves of the state.
      sparse: "exact", "lazy" or "off".
      devices: N, over which batches are spread.
      placements: For each input of the program the axis along which it is spread over the devices; None: each device
        holds all of it.
      layouts: Input -> (layout, row axis) of those that are stored otherwise than as they are.
      fallback: The families once more with the capacity that no batch exceeds, if some are tight.
      shares: Dense leaves that are spread and gathered for use -> the axis.
      emit: Whether XLA partitions one program over the devices, or each device's own is written.
      road: Of a step with tables on hosts, who reduces dense gradients over the ranks: "mpi" between programs, or
        "xla" within them; and why.
      stages: The same step's compiled programs and exchanges, in order.
      isolated: What is kept from XLA's partitioner, which gets it wrong (`passes.shield`), in words.
    """

    families: tuple[FamilyPlan, ...]
    tables: tuple[TablePlan, ...]
    dense: tuple[DensePlan, ...]
    sparse: Sparse
    devices: int = 1
    placements: tuple[int | None, ...] = ()
    layouts: Mapping[int, tuple[RowLayout, int]] = field(default_factory=dict)
    fallback: tuple[FamilyPlan, ...] = ()
    shares: Mapping[int, int] = field(default_factory=dict)
    emit: Emit = "pjit"
    road: tuple[str, str] = ("", "")
    stages: tuple[str, ...] = ()
    isolated: tuple[str, ...] = ()

    @property
    def on_hosts(self) -> bool:
        """Whether any table is in the memory of the hosts."""
        return any(f.on_hosts for f in self.families)

    @property
    def defers(self) -> bool:
        """Whether rows of any table wait for later steps."""
        return any(f.journal for f in self.families)

    @property
    def rewrites(self) -> bool:
        """Whether the step is run otherwise than as JAX traced it."""
        return self.lifts or bool(self.shares) or self.emit == "pmap" or bool(self.isolated)

    @property
    def lifts(self) -> bool:
        """Whether anything is lifted."""
        return bool(self.families)

    @property
    def parameters(self) -> tuple[TablePlan | DensePlan, ...]:
        """All of which something is decided: tables, and dense leaves in shards."""
        return *self.tables, *(leaf for leaf in self.dense if leaf.shared and leaf.reason)

    def told(self, paths: Iterable[str], reason: str) -> Plan:
        """The plan with one more reason for some tables."""
        among = set(paths)
        tables = tuple(
            dataclasses.replace(t, reason=f"{t.reason}; {reason}") if t.path in among else t for t in self.tables
        )
        return dataclasses.replace(self, tables=tables)

    def with_sizes(self, sizes: Mapping[int, tuple[int, int]]) -> Plan:
        """The plan with other bounds for families on hosts: family -> (rows of an owner, rows that a rank asks for)."""
        families = []
        for family in self.families:
            if family.family in sizes:
                rows, asked = sizes[family.family]
                family = dataclasses.replace(family, rows=self.devices * rows, asked=self.devices * asked)
            families.append(family)
        return dataclasses.replace(self, families=tuple(families))

    def without_limits(self) -> Plan:
        """The fallback's plan."""
        return dataclasses.replace(self, families=self.fallback, fallback=())

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What the program depends on: plans of one step whose decisions are equal are compiled to the same."""
        families = [dataclasses.replace(f, imbalance=None) for f in (*self.families, *self.fallback)]
        return families, len(self.fallback), self.placements, self.layouts, self.shares, self.emit

    def changes(self, old: Plan) -> str:
        """What became other than in an earlier plan of the same step, in words."""
        before = {p.path: _shown(p) for p in old.parameters}
        pairs = [(p.path, before.get(p.path, ""), _shown(p)) for p in self.parameters]
        return ", ".join(f"{path} {a} -> {b}" for path, a, b in pairs if a != b) or "nothing changes"

    def family(self, family: int) -> FamilyPlan | None:
        """The plan of a family, None if it stays dense."""
        return next((f for f in self.families if f.family == family), None)


def _shown(parameter: TablePlan | DensePlan) -> str:
    """Its method, and its capacity where rows are sharded."""
    sizes = parameter.sizes if isinstance(parameter, TablePlan) else None
    return f"{parameter.method}, capacity {sizes.capacity}" if sizes and parameter.method == "ps" else parameter.method
