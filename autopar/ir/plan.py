"""`Plan`: all that is decided of a step, and why, as plain data, by the paths of its parameters.

`choose` makes it; `explain` prints it; a file holds it; `diff` compares it; runners follow it. It outlives the traced
program, the process and the version of JAX. An `ir.program_plan.ProgramPlan` is what follows from it for one program.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from autopar.errors import ArgumentsError, PlanError
from autopar.ir.cluster import ClusterSpec, state_budget
from autopar.ir.figures import Alpha, RowGrowth, Term, Work
from autopar.ir.plan_file import AGAIN, read_plan, write_plan
from autopar.ir.sizes import Sizes
from autopar.ir.stage_plan import PipelinePlan
from autopar.ir.strategy import HOSTED, METHODS, TENSOR, Method, Sparse, Where
from autopar.ir.sync_plan import ServedPlan, SyncPlan
from autopar.ir.tensor_plan import TensorPlan

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
      cyclic: Whether rows are distributed cyclically over the devices, rather than in shards of adjacent rows.
      pulled: Whether it is a dense leaf on hosts, of which every step takes all rows.
      log_steps: Steps that untouched rows wait for at most; 0 where no step moves them.
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
    cyclic: bool = False
    log_steps: int = 0
    pulled: bool = False
    alpha: Alpha | None = None
    growth: RowGrowth | None = None
    sizes: Sizes | None = None
    terms: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict, compare=False, metadata=_DERIVED)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the table without its slots."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def taken(self) -> str:
        """The name of its method among others: "ps on hosts" for what is there."""
        return HOSTED if self.where == "hosts" else self.method

    @property
    def seconds(self) -> Mapping[str, float]:
        """Method -> what its exchanges and updates are predicted to take in a step."""
        return {method: sum(t.seconds for t in terms) for method, terms in self.terms.items()}

    @property
    def bounds(self) -> Mapping[str, float]:
        """Method -> the least that these can take, by bandwidths alone; empty where they aren't known."""
        known = {method: [t.bound_s for t in terms if t.bound_s is not None] for method, terms in self.terms.items()}
        return {method: sum(bounds) for method, bounds in known.items() if bounds}


@dataclass(frozen=True, slots=True)
class DensePlan:
    """A leaf of the state that isn't looked up by rows.

    Attributes:
      path, shape, dtype, nbytes: Of the leaf.
      sharded: Whether it is kept in shards, and gathered for use.
      reason: Why, where there is something to say.
      sent: Method -> bytes that each device would send in a step for it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    sharded: bool = False
    reason: str = field(default="", compare=False, metadata=_DERIVED)
    sent: Mapping[str, int] = field(default_factory=dict, compare=False, metadata=_DERIVED)

    @property
    def method(self) -> str:
        """The way its gradient travels."""
        return "ps" if self.sharded else "allreduce"

    @property
    def taken(self) -> str:
        """The name of its method among others."""
        return self.method

    @property
    def lifted(self) -> bool:
        """Never: all of it is updated."""
        return False


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a step at one set of shapes.

    Attributes:
      step: The step's name.
      devices: N, over which batches are spread; ranks, with tables on hosts.
      cluster: The machines that it was made for; None: the devices here.
      sparse: As `parallelize` takes it.
      tables: Every table that is looked up by rows, lifted or not.
      dense: The other leaves of the state.
      state_bytes: Bytes of the state on each device.
      microbatches: M, the parts of a batch that run one after the other before the update.
      pipeline: Its stages, if it is run in stages.
      sync: How the replicas of clients come together, if each trains its own; the rest is then a client's plan.
      served: How workers train a state that servers keep, if they do; the rest is then a worker's plan.
      tensor: Products that are divided over the devices of a tensor axis, if there is one.
      work: Operations of the model, and what is reduced of its dense gradients.
      parts: On several devices, part of a step -> its terms, as predicted; with tables on hosts, of a cluster only.
      reduction_backend: With tables on hosts, what reduces dense gradients over the ranks: "mpi" between programs, or
        "psum" within them.
      reduction_reason: Why.
      stages: With tables on hosts, a step's compiled programs and exchanges, in order, in words.
      source: The file that it was read from; empty if it was made here.

    `autopar.plan` and files have all of them but `stages`; the plan of a compiled step (`step.plan`) has
    nothing that is predicted: no `alpha`, `growth`, `work` and `parts`.
    """

    step: str
    devices: int
    cluster: ClusterSpec | None
    sparse: Sparse
    tables: tuple[TablePlan, ...]
    dense: tuple[DensePlan, ...]
    state_bytes: int
    microbatches: int = 1
    pipeline: PipelinePlan | None = None
    tensor: TensorPlan | None = None
    sync: SyncPlan | None = None
    served: ServedPlan | None = None
    work: Work = field(default_factory=Work)
    parts: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    reduction_backend: str = ""
    reduction_reason: str = field(default="", compare=False, metadata=_DERIVED)
    stages: tuple[str, ...] = field(default=(), compare=False, metadata=_DERIVED)
    source: str = field(default="", compare=False, metadata=_DERIVED)

    @property
    def name(self) -> str:
        """The file that it is in, or whose plan it is."""
        return self.source or f"the plan of {self.step}"

    @property
    def clients_plan(self) -> SyncPlan | ServedPlan | None:
        """Returns the plan of clients, which have replicas of their own or servers, or None without clients."""
        return self.sync or self.served

    @property
    def seconds(self) -> float:
        """Returns what a step is predicted to take; 0 where nothing is known of the devices."""
        return sum(term.seconds for terms in self.parts.values() for term in terms)

    @property
    def lifts(self) -> bool:
        """Returns whether any table's step runs on its touched rows."""
        return any(table.lifted for table in self.tables)

    @property
    def on_hosts(self) -> bool:
        """Returns whether any table is in the memory of the hosts."""
        return any(table.where == "hosts" for table in self.tables)

    @property
    def defers(self) -> bool:
        """Returns whether rows of any table wait for later steps."""
        return any(table.log_steps for table in self.tables)

    @property
    def families(self) -> tuple[TablePlan, ...]:
        """One table of each family: sizes and terms are those of a whole family."""
        families: list[TablePlan] = []
        for table in self.tables:
            if not any(table.path in other.slots for other in families):
                families.append(table)
        return tuple(families)

    @property
    def parameters(self) -> tuple[TablePlan | DensePlan, ...]:
        """All of which something is decided: tables, and dense leaves in shards."""
        return *self.tables, *(leaf for leaf in self.dense if leaf.sharded and leaf.reason)

    @property
    def sharded(self) -> tuple[str, ...]:
        """Paths of the dense leaves that are kept in shards."""
        return tuple(leaf.path for leaf in self.dense if leaf.sharded)

    @property
    def strategy(self) -> Mapping[str, Method]:
        """The method of each path. Longer paths come first: a path covers those that begin with it."""
        methods: dict[str, Method] = dict.fromkeys(self.sharded, "ps")
        for table in self.tables:
            methods[table.path] = (table.method, "hosts") if table.where == "hosts" else table.method
        for group in () if self.tensor is None else self.tensor.groups:
            methods |= dict.fromkeys(group.weights, TENSOR if group.taken else "allreduce")
        return {path: methods[path] for path in sorted(methods, key=lambda path: (-path.count("/"), path))}

    @property
    def digest(self) -> str:
        """Returns the same for equal decisions, on every process."""
        limits = [(t.path, t.lifted, t.ids, t.capacity, t.tight, t.cyclic, t.log_steps) for t in self.tables]
        ways = (_stages_of(self), _tensor_of(self), self.sync, self.served)
        about = (self.devices, self.microbatches, self.strategy, limits, *ways)
        return hashlib.blake2b(repr(about).encode(), digest_size=8).hexdigest()

    @property
    def missing_bytes(self) -> int:
        """Bytes that each device of the cluster would need more for the state; 0 if it fits, or without a cluster."""
        return 0 if self.cluster is None else max(0, self.state_bytes - state_budget(self.cluster.device.memory_bytes))

    def table(self, path: str) -> TablePlan:
        """Returns the table of a path.

        Raises:
          ArgumentsError: there is none.
        """
        table = next((t for t in self.tables if t.path == path), None)
        if table is None:
            shown = ", ".join(t.path for t in self.tables) or "none"
            raise ArgumentsError(f"{path!r} is no table of the plan of {self.step}; looked up by rows: {shown}")
        return table

    def with_reason(self, paths: Iterable[str], reason: str) -> Plan:
        """Returns the plan with one more reason for some tables."""
        among = set(paths)
        tables = tuple(
            dataclasses.replace(t, reason=f"{t.reason}; {reason}") if t.path in among else t for t in self.tables
        )
        return dataclasses.replace(self, tables=tables)

    def diff(self, new: Plan) -> PlanDifference:
        """Returns what is other in a plan made later, for people: facts, decisions, predictions; not the words about
        them.

        Raises:
          ArgumentsError: what was given isn't a plan.
        """
        new = require_plan(new, "diff")
        mine, theirs = ({x.path: _facts(x) for x in (*p.tables, *p.dense)} for p in (self, new))
        return difference({"the step": _step_facts(self), **mine}, {"the step": _step_facts(new), **theirs})

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file, as JSON.

        Raises:
          PlanError: the file can't be written.
        """
        write_plan(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Returns the plan in a file; equal to the one that was saved.

        Raises:
          PlanError: the file can't be read, or is no plan, of another version, or damaged.
        """
        plan = read_plan(path, Plan)
        wrong = _impossible(plan)
        if wrong:
            raise PlanError(f"{path}: the plan is damaged: {wrong}. {AGAIN}")
        return dataclasses.replace(plan, source=str(path))


def require_plan(plan: object, what: str) -> Plan:
    """Returns what was given as a plan; `what` names the function that wants one.

    Raises:
      ArgumentsError: it isn't one.
    """
    if not isinstance(plan, Plan):
        kind = "step" if hasattr(plan, "plan") else type(plan).__name__
        raise ArgumentsError(f"{what} takes a plan, step.plan or autopar.plan(step, state, batch), not a {kind}")
    return plan


def _impossible(plan: Plan) -> str:
    """Returns what no plan says; empty if there is nothing."""
    if plan.devices < 1:
        return f"devices is {plan.devices}"
    for table in plan.tables:
        values = {
            "method": table.method in METHODS[1:],
            "where": table.where in ("devices", "hosts"),
            "ids": table.ids >= 0,
            "capacity": table.capacity is None or table.capacity >= 0,
            "log_steps": table.log_steps >= 0,
        }
        wrong = next((name for name, is_right in values.items() if not is_right), "")
        if wrong:
            return f"{wrong} of {table.path} is {getattr(table, wrong)!r}"
    return ""


def _step_facts(plan: Plan) -> Mapping[str, str]:
    return {
        "name": plan.step,
        "devices": str(plan.devices),
        "cluster": "the devices here" if plan.cluster is None else str(plan.cluster),
        "sparse": plan.sparse,
        "microbatches": str(plan.microbatches),
        "pipeline": _stages_of(plan) or "none",
        "divided products": _tensor_of(plan) or "none",
        "replicas": str(plan.clients_plan or "none"),
        "bytes of state on a device": str(plan.state_bytes),
    }


def _stages_of(plan: Plan) -> str:
    if plan.pipeline is None:
        return ""
    stages = (f"{', '.join(s.weights)} on {', '.join(map(str, s.devices))}" for s in plan.pipeline.stages)
    remat = ", forwards twice" if plan.pipeline.remat else ""
    return f"{plan.pipeline.schedule}{remat}: {'; '.join(stages)}"


def _tensor_of(plan: Plan) -> str:
    if plan.tensor is None or not plan.tensor.axes:
        return ""
    axes = ", ".join(f"{path} axis {axis}" for path, axis in plan.tensor.axes.items())
    return f"over {plan.tensor.devices} devices: {axes}"


def _facts(entry: TablePlan | DensePlan) -> Mapping[str, str]:
    """Returns what is said of a parameter, in words that are the same where the difference doesn't matter."""
    shape = {"shape": str(list(entry.shape)), "dtype": entry.dtype}
    if isinstance(entry, DensePlan):
        return {"kind": "dense", **shape, "kept": "in shards" if entry.sharded else "whole"}
    measured = "measured" if entry.tight else "a bound"
    seconds = entry.seconds.get(entry.taken)
    return {
        "kind": "dense, pulled whole" if entry.pulled else "table",
        **shape,
        "axis of rows": str(entry.axis),
        "slots": ", ".join(entry.slots) or "none",
        "ids": str(entry.ids),
        "method": entry.method,
        "where": entry.where,
        "rows updated": "touched" if entry.lifted else "all",
        "capacity": "none" if entry.capacity is None else f"{entry.capacity} ({measured})",
        "rows": "cyclic" if entry.cyclic else "in shards of adjacent ones",
        "update log": str(entry.log_steps),
        "alpha": "unknown" if entry.alpha is None else f"{entry.alpha.share:.3%}",
        "predicted": "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms",
    }


# --- what is other in a plan made later, in words: one line for each change ---

#: Path of a parameter -> what is said of it -> in words.
Facts = Mapping[str, Mapping[str, str]]
#: Of what is in one of two plans only.
_GONE: Mapping[str, str] = {"kind": "none"}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is other in a later plan: of which parameter (or "the step"), what, and both values, in words."""

    path: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The result of `Plan.diff`; `str()` has one line for each change, and it is false where there is none."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "no difference"


def difference(old: Facts, new: Facts) -> PlanDifference:
    """Returns what both say, and say otherwise; of what one of them doesn't have, that it has none."""
    changes = []
    for path in {**old, **new}:
        before, after = old.get(path, _GONE), new.get(path, _GONE)
        changes += [Change(path, k, before[k], after[k]) for k in before if k in after and before[k] != after[k]]
    return PlanDifference(tuple(changes))
