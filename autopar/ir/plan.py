"""Holds every decision about a step and its reason as plain data, keyed by parameter paths.

`choose` makes a `Plan`; `explain` prints it, a file holds it, `diff` compares it, runners follow it. It outlives the
traced program, the process and JAX's version. `ir.program_plan.ProgramPlan` binds it to one traced program.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NewType

import numpy as np

from autopar.errors import ArgumentsError, PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import Alpha, RowGrowth, Sizes, Term, Work
from autopar.ir.pipeline import Calls, Pipeline
from autopar.ir.schedule import Schedule, StageDevices
from autopar.ir.strategy import HOSTED, METHODS, TENSOR, Method, Sparse, Where, is_optimize_text
from autopar.ir.topology import Everyone, Ring, Topology
from autopar.ir.typed_json import AGAIN, read_plan, write_plan

#: Metadata of fields that follow from others: files don't hold them, and comparisons ignore them.
_DERIVED: Mapping[str, bool] = {"saved": False}


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The plan of a table that is looked up by rows, with its optimizer slots."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axis: int  #: The row axis.
    slots: tuple[str, ...]  #: Paths of the leaves whose rows go with the table's, other tables of the family included.
    ids: int  #: Ids that a step looks up, over all devices, duplicates included.
    method: str  #: The way in which its gradient travels.
    where: Where
    lifted: bool  #: Only the touched rows are updated.
    reason: str = ""
    remedy: str = ""  #: A change by the user that would change the decision.
    line: str = ""  #: A line that looks it up.
    refused: bool = False  #: It can't be lifted at all.
    #: With "ps", the rows that a device asks another one for at most. `tight`: this was measured.
    capacity: int | None = None
    tight: bool = False
    cyclic: bool = False  #: Rows are distributed cyclically over the devices, rather than in shards of adjacent rows.
    owner: int | None = None  #: The rank that has all rows on hosts, or the device, if it is one.
    log_steps: int = 0  #: Most steps that untouched rows wait in the update log; 0 where no step moves them.
    pulled: bool = False  #: A dense leaf on hosts, of which every step takes all rows.
    unchanged: bool = False  #: The step only reads it.
    alpha: Alpha | None = None  #: Rows that a step touches, if known.
    #: Distinct rows that n devices touch together, each with as many ids as a device of the plan; None if unknown.
    growth: RowGrowth | None = None
    sizes: Sizes | None = None  #: On several devices, rows and bytes of the family's exchanges.
    family_bytes: int = 0  #: Bytes of a row of the family's tables and slots; 0: unknown.
    #: On several devices, method (or `taken`) -> its predicted exchanges and updates in a step, in order.
    terms: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    #: On several devices, method -> bytes that each device would send in a step for the family.
    sent: Mapping[str, int] = field(default_factory=dict, compare=False, metadata=_DERIVED)
    #: What would run at the owners of its rows if `optimize=` had "border"; None: that isn't known.
    unmoved: tuple[str, ...] | None = field(default=None, compare=False, metadata=_DERIVED)

    @property
    def nbytes(self) -> int:
        """Bytes of the table without its slots."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def taken(self) -> str:
        """The method's name in `terms`; "ps on hosts" for a table on hosts."""
        return HOSTED if self.where == "hosts" else self.method

    @property
    def pooled(self) -> bool:
        """Owners add up its rows by bags, in place of sending them."""
        return self.lifted and self.taken in ("ps", HOSTED) and self.sizes is not None and self.sizes.bags > 0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Predicted seconds a step of exchanges and updates, by method."""
        return {method: sum(t.seconds for t in terms) for method, terms in self.terms.items()}

    @property
    def bounds(self) -> Mapping[str, float]:
        """Lower bounds on `seconds` from bandwidths alone, where they are known."""
        known = {method: [t.bound_s for t in terms if t.bound_s is not None] for method, terms in self.terms.items()}
        return {method: sum(bounds) for method, bounds in known.items() if bounds}


@dataclass(frozen=True, slots=True)
class DensePlan:
    """The plan of a leaf of the state that isn't looked up by rows."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    sharded: bool = False  #: It is kept in shards, and gathered for use.
    unchanged: bool = False  #: The step only reads it.
    reason: str = field(default="", compare=False, metadata=_DERIVED)
    #: Method -> bytes that each device would send in a step for it.
    sent: Mapping[str, int] = field(default_factory=dict, compare=False, metadata=_DERIVED)

    @property
    def method(self) -> str:
        return "ps" if self.sharded else "allreduce"

    @property
    def taken(self) -> str:
        return self.method

    @property
    def lifted(self) -> bool:
        """Dense leaves are updated whole."""
        return False


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a step at one set of shapes.

    Attributes:
      devices: N, over which batches are spread; ranks, with tables on hosts.
      cluster: The machines that it was made for; None: the devices here.
      sparse: As `parallelize` takes it.
      tables: All tables that are looked up by rows, lifted or not.
      dense: The other leaves of the state.
      state_bytes: Bytes of the state on each device.
      optimize: The optimisations that are on: "all", "none" or names.
      microbatches: M, the parts of a batch that run one after the other before the update.
      sync: How clients average their replicas, if each trains its own; the rest is then a client's plan.
      served: How workers train a state that servers keep; the rest is then a worker's plan.
      tensor: Products that are divided over a tensor axis.
      work: The model's operations, and how much of its dense gradients is reduced.
      parts: Part of a step -> its predicted terms, on several devices (with tables on hosts: of a cluster only).
      reduction_backend: With tables on hosts, "mpi" (dense gradients are reduced between programs) or "psum" (within).
      stages: With tables on hosts, a step's compiled programs and exchanges, in order, in words.
      source: The file that it was read from; empty if it was made here.

    `autopar.plan` and files have all of them but `stages`; the plan of a compiled step (`step.plan`) has no
    predictions: no `alpha`, `growth`, `work` and `parts`.
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
    optimize: str = "all"

    @property
    def name(self) -> str:
        """The file that holds it, or "the plan of STEP"."""
        return self.source or f"the plan of {self.step}"

    @property
    def clients_plan(self) -> SyncPlan | ServedPlan | None:
        """The plan of clients with replicas or servers; None without clients."""
        return self.sync or self.served

    @property
    def seconds(self) -> float:
        """Predicted seconds a step; 0 where nothing is known of the devices."""
        return sum(term.seconds for terms in self.parts.values() for term in terms)

    @property
    def lifts(self) -> bool:
        """At least one table's step runs on its touched rows."""
        return any(table.lifted for table in self.tables)

    @property
    def on_hosts(self) -> bool:
        """At least one table is in host memory."""
        return any(table.where == "hosts" for table in self.tables)

    @property
    def defers(self) -> bool:
        """Rows of any table wait for later steps."""
        return any(table.log_steps for table in self.tables)

    @property
    def families(self) -> tuple[TablePlan, ...]:
        """One table of each family, whose sizes and terms are the whole family's."""
        families: list[TablePlan] = []
        for table in self.tables:
            if not any(table.path in other.slots for other in families):
                families.append(table)
        return tuple(families)

    @property
    def parameters(self) -> tuple[TablePlan | DensePlan, ...]:
        """The leaves that a decision was made about, tables and sharded dense leaves."""
        return *self.tables, *(leaf for leaf in self.dense if leaf.sharded and leaf.reason)

    @property
    def sharded(self) -> tuple[str, ...]:
        """Paths of the dense leaves that are kept in shards."""
        return tuple(leaf.path for leaf in self.dense if leaf.sharded)

    @property
    def strategy(self) -> Mapping[str, Method]:
        """The method of each path, longer paths first since a path covers those that begin with it."""
        methods: dict[str, Method] = dict.fromkeys(self.sharded, "ps")
        for table in self.tables:
            methods[table.path] = (table.method, "hosts") if table.where == "hosts" else table.method
        for group in () if self.tensor is None else self.tensor.groups:
            methods |= dict.fromkeys(group.weights, TENSOR if group.taken else "allreduce")
        return {path: methods[path] for path in sorted(methods, key=lambda path: (-path.count("/"), path))}

    @property
    def digest(self) -> str:
        """A digest of the decisions, equal on every process."""
        limits = [(t.path, t.lifted, t.ids, t.capacity, t.tight, t.cyclic, t.owner, t.log_steps) for t in self.tables]
        ways = (_stages_of(self), _tensor_of(self), self.sync, self.served, self.optimize)
        about = (self.devices, self.microbatches, self.strategy, limits, *ways)
        return hashlib.blake2b(repr(about).encode(), digest_size=8).hexdigest()

    def table(self, path: str) -> TablePlan:
        """Returns the table of a path.

        Raises:
          ArgumentsError: no table has that path.
        """
        table = next((t for t in self.tables if t.path == path), None)
        if table is None:
            shown = ", ".join(t.path for t in self.tables) or "none"
            raise ArgumentsError(f"{path!r} is no table of the plan of {self.step}; looked up by rows: {shown}")
        return table

    def with_reason(self, paths: Iterable[str], reason: str) -> Plan:
        """Returns the plan with one more reason for some tables."""
        among = set(paths)
        tables = tuple(replace(t, reason=f"{t.reason}; {reason}") if t.path in among else t for t in self.tables)
        return replace(self, tables=tables)

    def diff(self, new: Plan) -> PlanDifference:
        """Lists the facts, decisions and predictions (not reasons) that differ in a later plan.

        Raises:
          ArgumentsError: `new` isn't a plan.
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
        """Returns the plan in a file, equal to the one that was saved.

        Raises:
          PlanError: the file can't be read, or holds no undamaged plan of this version.
        """
        plan = read_plan(path, Plan)
        wrong = _impossible(plan)
        if wrong:
            raise PlanError(f"{path}: the plan is damaged: {wrong}. {AGAIN}")
        return replace(plan, source=str(path))


def require_plan(plan: object, what: str) -> Plan:
    """Returns `plan` if it is a Plan, or raises ArgumentsError; `what` names the calling function."""
    if not isinstance(plan, Plan):
        kind = "step" if hasattr(plan, "plan") else type(plan).__name__
        raise ArgumentsError(f"{what} takes a plan, step.plan or autopar.plan(step, state, batch), not a {kind}")
    return plan


def _impossible(plan: Plan) -> str:
    """Names the first value that no valid plan has; "" if there is none."""
    if plan.devices < 1:
        return f"devices is {plan.devices}"
    if not is_optimize_text(plan.optimize):
        return f"optimize is {plan.optimize!r}"
    for table in plan.tables:
        values = {
            "method": table.method in METHODS,
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
        "optimize": plan.optimize,
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
    """Maps facts of a parameter to words; plans whose words agree don't differ."""
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
        "rows": _order(entry),
        "bags added up by owners": str(entry.sizes.bags) if entry.sizes is not None and entry.pooled else "none",
        "update log": str(entry.log_steps),
        "alpha": "unknown" if entry.alpha is None else f"{entry.alpha.share:.3%}",
        "predicted": "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms",
    }


def _order(entry: TablePlan) -> str:
    if entry.owner is not None:
        return f"all on {'rank' if entry.where == 'hosts' else 'device'} {entry.owner}"
    return "cyclic" if entry.cyclic else "in shards of adjacent ones"


# --- differences between two plans ---
#: Path of a parameter -> name of a fact -> its value in words.
Facts = Mapping[str, Mapping[str, str]]
#: The facts of a path that one of two plans lacks.
_GONE: Mapping[str, str] = {"kind": "none"}


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that differs in a later plan: the parameter's path (or "the step"), the fact, both values in words."""

    path: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The result of `Plan.diff`. `str()` has a line for each change; it is false if there is none."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "no difference"


def difference(old: Facts, new: Facts) -> PlanDifference:
    """Lists the facts that differ. A path that only one plan has counts as changed."""
    changes = []
    for path in {**old, **new}:
        before, after = old.get(path, _GONE), new.get(path, _GONE)
        changes += [Change(path, k, before[k], after[k]) for k in before if k in after and before[k] != after[k]]
    return PlanDifference(tuple(changes))


# --- products that are divided over the devices of a tensor axis ---


@dataclass(frozen=True, slots=True)
class TensorGroupPlan:
    """Weights whose products are divided together, if `taken`."""

    #: Path of each leaf -> the axis along which it is divided; optimizer slots and biases among them.
    axes: Mapping[str, int]
    weights: tuple[str, ...]  #: Paths of those that products read, in order.
    taken: bool
    reason: str  #: Why they are divided, or not.
    #: Numbers of AllReduces and AllGathers in a step.
    reduces: int
    gathers: int
    sent: int  #: Bytes that each device sends for them in a step.
    flops: float = 0.0  #: Operations of the products.
    #: Predicted seconds that dividing the products saves, and that the exchanges take; 0 where nothing is known of the
    #: devices.
    saved_s: float = 0.0
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All groups, in the order of their first products, over T devices."""

    devices: int
    groups: tuple[TensorGroupPlan, ...]

    @property
    def axes(self) -> Mapping[str, int]:
        """The axis of each leaf that is divided, by path."""
        return {path: axis for group in self.taken for path, axis in group.axes.items()}

    @property
    def taken(self) -> tuple[TensorGroupPlan, ...]:
        return tuple(group for group in self.groups if group.taken)

    @property
    def saved_flops(self) -> float:
        """Operations that dividing saves each device."""
        return sum(group.flops for group in self.taken) * (1 - 1 / self.devices)

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(group.sent for group in self.taken)


# --- a pipeline's stages: decisions and predictions ---


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage. Bytes and operations are those of a microbatch, on each device of a tensor axis."""

    devices: tuple[int, ...]  #: By number; several are replicas, which take microbatches in turn.
    weights: tuple[str, ...]  #: Paths of its parameters, in the order of their first use.
    #: Kind of task ("F", "B", "W": gradients of weights) -> seconds; empty if the devices' rates aren't known.
    seconds: Mapping[str, float] = field(default_factory=dict)
    update_s: float = 0.0  #: Seconds of the update of its weights and slots.
    flops: float = 0.0  #: Floating-point operations of its products.
    #: Bytes sent to later stages, and to earlier ones.
    ahead_bytes: int = 0
    back_bytes: int = 0
    state_bytes: int = 0  #: Bytes of its weights, slots and other leaves, and of copies of other stages' weights.
    gradient_bytes: int = 0  #: Bytes of the sums that it keeps over the microbatches; of tables the touched rows.
    weight_bytes: int = 0  #: Bytes of its weights.
    activation_bytes: int = 0  #: Bytes that the forward leaves for its backward.
    #: Bytes that each device of a tensor axis sends to the others, and the number of exchanges.
    exchanged_bytes: int = 0
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The stages of a step, and their schedule."""

    #: As in `ir.pipeline.Pipeline`.
    schedule: str
    microbatches: int
    stages: tuple[StagePlan, ...]
    stages_per_device: int = 1
    remat: bool = False
    tensor: int = 1  #: T, the devices that divide the products of a stage, or of each of its replicas.
    tied_bytes: int = 0  #: Bytes sent in each step for weights that several stages use: copies there, gradients back.
    send_byte_s: float = 0.0  #: Seconds for each byte from a device to another; 0 if unknown.
    #: In an asynchronous pipeline, the call of each stage's update, counted from the minibatch's.
    updates: tuple[int, ...] = ()
    last: int = 0  #: The call in which all of a minibatch is done, its results included.
    slack: int = 0  #: In an asynchronous pipeline, extra minibatches in flight for each border between stages.
    #: Predicted weights: by how many updates, for each stage's (forward, backward).
    ahead: tuple[tuple[int, int], ...] = ()
    #: Lines of sums over the batch that are taken over each microbatch, which changes the function.
    statistics: tuple[str, ...] = ()
    #: If the number of stages was chosen, the candidates in words, and their seconds.
    candidates: tuple[tuple[str, float], ...] = ()

    @property
    def stage_devices(self) -> StageDevices:
        return tuple(stage.devices for stage in self.stages)

    @property
    def devices(self) -> int:
        """Number of devices of all stages together, those of a tensor axis counted as one."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def size(self) -> int:
        """Number of devices, those of the tensor axis included."""
        return self.devices * self.tensor

    @property
    def pipeline(self) -> Pipeline:
        """The options of `parallelize` that ask for this plan."""
        return Pipeline(
            stages=tuple(stage.weights for stage in self.stages),
            schedule=self.schedule,
            microbatches=self.microbatches,
            replicas=tuple(len(stage.devices) for stage in self.stages),
            stages_per_device=self.stages_per_device,
            remat=self.remat,
            statistics="microbatch" if self.statistics else "batch",
            ahead=self.ahead or None,
            slack=self.slack if self.updates else None,
        )

    @property
    def calls(self) -> Calls:
        """The calls in which an asynchronous pipeline issues its tasks."""
        return Calls(self.stage_devices, self.updates, self.last, self.schedule == "stash", self.slack)

    def version_bytes(self, stage: int) -> int:
        """Counts the bytes of stashed versions, or of the last change, that a device of a stage keeps."""
        own = self.stages[stage]
        stashed = self.calls.stashed(stage) * own.weight_bytes if self.updates else 0
        return stashed + own.gradient_bytes * bool(self.ahead and any(self.ahead[stage]))

    @property
    def scheduled(self) -> Schedule:
        """The schedule; of an asynchronous pipeline, with enough minibatches for a steady state."""
        if self.updates:
            return self.calls.schedule(3 * (self.calls.last + 1) + 2)
        return self.pipeline.scheduled(self.microbatches)

    @property
    def is_timed(self) -> bool:
        """The devices' rates are known, and so the seconds of tasks."""
        return all(stage.seconds for stage in self.stages)


# --- a step that clients train on replicas of their own, or with servers (`autopar.sync`) ---


#: Clients that average weights: `sync.Replicated.partners` -> who with whom. "neighbors" don't wait for each other.
TOPOLOGIES: Mapping[str, type[Topology]] = {"all": Everyone, "pairs": Ring, "neighbors": Ring}

#: The number of a fragment of the weights; a type of its own, since dicts are also keyed by input numbers.
FragmentIndex = NewType("FragmentIndex", int)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Says when and how clients average their replicas."""

    name: str  #: The strategy in words; `way` as the user writes it.
    clients: int  #: C, the number of replicas.
    #: k and d, in steps.
    every: int
    delay: int
    outer: bool  #: An outer optimizer moves the weights by the mean change.
    #: Paths of the weights that are averaged together, each fragment k/p steps after the one before.
    fragments: tuple[tuple[str, ...], ...]
    fragment_bytes: tuple[int, ...]  #: Bytes of each fragment, with whole tables.
    mean_bytes: int  #: Bytes of all that is averaged; of tables, at most of the touched rows.
    by_rows: tuple[str, ...]  #: Paths of the tables of which only the rows that clients touched since are sent.
    own: tuple[str, ...]  #: Paths of the floating-point leaves of the state that aren't averaged.
    examples: int  #: Examples of a client's minibatch; 0 if unknown.
    servers: int = 0  #: Number of servers that keep a centre to exchange weights with; 0: weights are averaged.
    alpha: float = 0.0  #: The weight of an exchange with the centre.
    slope: float | None = None  #: eta h, if it was given.
    server_bytes: tuple[int, ...] = ()  #: Bytes of the centre on each server.
    way: str = "Average()"
    partners: str = "all"  #: With whom clients exchange weights, as `sync.Replicated` has it.
    #: With means in every step, where the update isn't linear in the gradients; "" if there is none, or none
    #: is known.
    nonlinear: str = ""
    averages_gradients: bool = False  #: The means are known to equal averaging gradients.
    server_ranks: tuple[int, ...] = ()  #: Ranks that only serve; (): servers are threads of processes that train.

    @property
    def sent_bytes(self) -> float:
        """Bytes that a client sends in a step on average, 2(C-1)/C of the weights every k steps.

        An upper bound where touched rows are sent, some of which steps share. To a centre or a neighbour go all
        weights.
        """
        sent = self.mean_bytes if self.servers else self.topology(self.clients).sent_bytes(self.mean_bytes)
        return sent / self.every

    @property
    def asks_neighbors(self) -> bool:
        """Says whether clients average with neighbors without waiting for them."""
        return self.partners == "neighbors"

    def topology(self, clients: int) -> Topology:
        """Says who averages with whom where there are so many clients, and no centre."""
        return TOPOLOGIES[self.partners](clients)

    def __str__(self) -> str:
        more = f", {len(self.fragments)} fragments" * (len(self.fragments) > 1)
        more += f", {self.delay} late" * bool(self.delay)
        return f"{self.clients} client{'s' * (self.clients > 1)}, {self.name}, every {self.every}{more}"

    def due(self, step: int) -> Sequence[FragmentIndex]:
        """Returns the fragments that are averaged after a step (counted from 1)."""
        distance = self.every // len(self.fragments)
        due = (k for k in range(len(self.fragments)) if (step - k * distance) % self.every == 0)
        return [FragmentIndex(k) for k in due]


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The leaves that a server keeps."""

    leaves: tuple[str, ...]  #: Their paths, with the index of a piece.
    leaf_bytes: int  #: Bytes of the leaves.
    #: Bytes that a worker pulls from it and pushes to it in a step.
    pull_bytes: int
    push_bytes: int
    #: Paths of leaves of which it keeps a piece -> the fraction.
    pieces: Mapping[str, float] = field(default_factory=dict)

    def part_of(self, path: str) -> float:
        """Returns the fraction of a leaf that it keeps."""
        return 1.0 if path in self.leaves else self.pieces.get(path, 0.0)


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """Says how workers train a state that servers keep."""

    name: str  #: The strategy in words.
    clients: int  #: N, the number of workers.
    staleness: int | None  #: s, the bound; None: there is none.
    servers: tuple[ServerPlan, ...]
    by_rows: tuple[str, ...]  #: Paths of the tables of which workers pull only rows.
    clocks: tuple[str, ...]  #: Paths of leaves that every process counts by itself.
    examples: int  #: Examples of a worker's minibatch; 0 if unknown.
    #: Ranks of servers that are processes of their own; (): they are threads of the workers.
    ranks: tuple[int, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes that a worker and all servers exchange in a step, those of a server in its own process included."""
        return sum(server.pull_bytes + server.push_bytes for server in self.servers)

    def __str__(self) -> str:
        servers = f"{len(self.servers)} server{'s' * (len(self.servers) > 1)}"
        return f"{self.clients} worker{'s' * (self.clients > 1)}, {servers}, {self.name}"
