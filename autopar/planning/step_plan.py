"""`StepPlan`: the plan of a step as plain data, which can be kept, compared and reported on.

An `ir.plan.Plan` holds for one traced program: inputs by number. A StepPlan names parameters by their paths, so that
it outlives the program, the process and the version of JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autopar.analysis.work import Work, count_work
from autopar.cost import Growth, Rates, Term, step_terms
from autopar.cost.exchange import host_terms
from autopar.cost.memory import state_budget, state_bytes
from autopar.cost.planned_rates import planned_host_rates
from autopar.cost.rates import NO_HOST_TIME, HostRates
from autopar.cost.step_time import DenseLoad, step_parts, total
from autopar.errors import ArgumentsError, PlanError
from autopar.ir.decisions import Decisions
from autopar.ir.plan import HOSTED, METHODS, DensePlan, Emit, Sparse, TablePlan
from autopar.ir.program import Program
from autopar.ir.rowspace import RowSpace
from autopar.measure.alpha import Alpha, alpha_of, example_ids, growth_of, most
from autopar.measure.cluster import Cluster
from autopar.passes.choosing.capacity import device_ids
from autopar.planning.alpha import Alphas
from autopar.planning.distinct_rows import once_per_row_of
from autopar.planning.elsewhere import elsewhere
from autopar.planning.plan_difference import PlanDifference, difference
from autopar.planning.plan_file import AGAIN, read_plan, write_plan
from autopar.run.entry import Entry
from autopar.run.wrapped_step import AnyStep, require_step, unwrapped


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step.

    Attributes:
      step: The step's name.
      devices: N.
      cluster: The machines that it was made for; None: the devices here.
      sparse, emit: As `parallelize` was told.
      tables, dense: The state, by parameter.
      state_bytes: Bytes of the state on each device.
      work: Operations of the model, and what is reduced of its dense gradients.
      parts: On several devices, part of a step -> its terms, as predicted; with tables on hosts, of a cluster only.
      road: With tables on hosts, who sums dense gradients: "mpi" or "xla".
    """

    step: str
    devices: int
    cluster: Cluster | None
    sparse: Sparse
    emit: Emit
    tables: tuple[TablePlan, ...]
    dense: tuple[DensePlan, ...]
    state_bytes: int
    work: Work = field(default_factory=Work)
    parts: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    road: str = ""

    @property
    def seconds(self) -> float:
        """What a step is predicted to take; 0 where nothing is known of the devices."""
        return total(self.parts)

    def diff(self, new: StepPlan) -> PlanDifference:
        """What is other in a plan made later, for people: facts, decisions, predictions; not the words about them."""
        require_plan(new, "diff")
        mine, theirs = ({x.path: _facts(x) for x in (*p.tables, *p.dense)} for p in (self, new))
        return difference({"the step": _step_facts(self), **mine}, {"the step": _step_facts(new), **theirs})

    @property
    def families(self) -> tuple[TablePlan, ...]:
        """One table of each family: sizes and terms are those of a whole family."""
        found: list[TablePlan] = []
        for table in self.tables:
            if not any(table.path in other.slots for other in found):
                found.append(table)
        return tuple(found)

    def decisions(self, source: str = "") -> Decisions:
        """What a step is to follow that is run by this plan; `source`: where it comes from, in words."""
        shared = tuple(leaf.path for leaf in self.dense if leaf.shared)
        return Decisions(source or f"the plan of {self.step}", self.devices, self.tables, shared)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON.

        Raises:
          PlanError: the file can't be written.
        """
        write_plan(path, self)

    @staticmethod
    def load(path: str | Path) -> StepPlan:
        """The plan in a file; equal to the one that was saved.

        Raises:
          PlanError: the file can't be read, or is no plan, of another version, or damaged.
        """
        found = read_plan(path, StepPlan)
        wrong = _impossible(found)
        if wrong:
            raise PlanError(f"{path}: the plan is damaged: {wrong}. {AGAIN}")
        return found

    @property
    def missing_bytes(self) -> int:
        """Bytes that each device of the cluster would need more for the state; 0 if it fits, or without a cluster."""
        return 0 if self.cluster is None else max(0, self.state_bytes - state_budget(self.cluster.device.memory_bytes))

    def table(self, path: str) -> TablePlan:
        """The table of a path.

        Raises:
          ArgumentsError: there is none.
        """
        found = next((t for t in self.tables if t.path == path), None)
        if found is None:
            shown = ", ".join(t.path for t in self.tables) or "none"
            raise ArgumentsError(f"{path!r} is no table of the plan of {self.step}; looked up by rows: {shown}")
        return found


def _impossible(found: StepPlan) -> str:
    """What no plan says; empty if there is nothing."""
    if found.devices < 1:
        return f"devices is {found.devices}"
    for table in found.tables:
        values = {
            "method": table.method in METHODS[1:],
            "where": table.where in ("devices", "hosts"),
            "ids": table.ids >= 0,
            "capacity": table.capacity is None or table.capacity >= 0,
            "journal": table.journal >= 0,
        }
        wrong = next((name for name, is_right in values.items() if not is_right), "")
        if wrong:
            return f"{wrong} of {table.path} is {getattr(table, wrong)!r}"
    return ""


def _step_facts(plan: StepPlan) -> Mapping[str, str]:
    return {
        "name": plan.step,
        "devices": str(plan.devices),
        "cluster": "the devices here" if plan.cluster is None else str(plan.cluster),
        "sparse": plan.sparse,
        "emit": plan.emit,
        "bytes of state on a device": str(plan.state_bytes),
    }


def _facts(entry: TablePlan | DensePlan) -> Mapping[str, str]:
    """What is said of a parameter, in words that are the same where the difference doesn't matter."""
    shape = {"shape": str(list(entry.shape)), "dtype": entry.dtype}
    if isinstance(entry, DensePlan):
        return {"kind": "dense", **shape, "kept": "in shares" if entry.shared else "whole"}
    measured = "measured" if entry.tight else "a bound"
    seconds = entry.seconds.get(entry.taken)
    return {
        "kind": "table",
        **shape,
        "axis of rows": str(entry.axis),
        "slots": ", ".join(entry.slots) or "none",
        "ids": str(entry.ids),
        "method": entry.method,
        "where": entry.where,
        "rows updated": "touched" if entry.lifted else "all",
        "capacity": "none" if entry.capacity is None else f"{entry.capacity} ({measured})",
        "rows": "dealt out" if entry.dealt else "in shares of adjacent ones",
        "journal": str(entry.journal),
        "alpha": "unknown" if entry.alpha is None else f"{entry.alpha.share:.3%}",
        "predicted": "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms",
    }


def require_plan(given: Any, what: str) -> None:
    """Raise an ArgumentsError if something isn't a plan; `what` names the function that wanted one."""
    if not isinstance(given, StepPlan):
        raise ArgumentsError(f"{what} takes a plan, autopar.plan(step, state, batch), not a {type(given).__name__}")


def plan(
    step: AnyStep,
    *args: Any,
    cluster: Cluster | None = None,
    alphas: Alphas | None = None,
    **kwargs: Any,
) -> StepPlan:
    """The plan of a step, as plain data.

    Args:
      step, *args, cluster, **kwargs: As for `explain`.
      alphas: What `measure_alpha` found on batches of the step. Each table's growth is taken from it, and its alpha
        where the batch is given as shapes. Without it growth is that of the devices' shares of the one batch.

    Raises:
      ArgumentsError: no arguments, `step` is no step of `parallelize`, or a table that `alphas` doesn't have.
    """
    require_step(step, "plan")
    if not args and not kwargs:
        raise ArgumentsError(f"plan takes a step's arguments as well: plan({step.name}, state, batch)")
    pure, arrays, named = unwrapped(step, args, kwargs, "plan")
    entry = (pure if cluster is None else elsewhere(pure, cluster)).entry(*arrays, **named)
    return plan_of(entry, step.name, pure.leaves(arrays, named), cluster, alphas)


def plan_of(
    entry: Entry,
    name: str,
    leaves: Sequence[Any] | None,
    cluster: Cluster | None = None,
    alphas: Alphas | None = None,
) -> StepPlan:
    """The same of an entry; `leaves` are flat arguments, by which alpha is measured."""
    program, made = entry.compiled.analysed, entry.compiled.plan
    decided = {t.path: t for t in made.tables}
    # What hosts take is known of clusters alone, and measuring the devices here says nothing of it.
    measure = entry.machine.rates if made.devices > 1 and not (made.on_hosts and cluster is None) else None
    rates = None if measure is None else measure()
    hosts = NO_HOST_TIME if cluster is None else planned_host_rates(cluster)
    tables = []
    for space in program.rows.spaces:
        for table in space.tables:
            path = program.inputs[table].path
            seen = None if alphas is None or not space.accesses else alphas.table(path).growth
            touched = _touched(program, space, leaves, made.devices, seen)
            found = dataclasses.replace(decided[path], alpha=touched.alpha, growth=touched.growth)
            tables.append(dataclasses.replace(found, terms=_terms(entry, found, rates, hosts)))
    state = state_bytes(program, made)
    given = (name, made.devices, cluster, made.sparse, made.emit, tuple(tables), made.dense, state)
    found = StepPlan(*given, work=_work(entry, leaves), road=made.road[0])
    return found if rates is None else dataclasses.replace(found, parts=_parts(found, rates, hosts))


def _work(entry: Entry, leaves: Sequence[Any] | None) -> Work:
    """What the step computes; of devices' own programs with the sums that these have, which stand after loops."""
    work, facts = count_work(entry.compiled.analysed), entry.compiled.program.local
    once = once_per_row_of(entry, leaves, devices=1)
    if once is not None:
        work = dataclasses.replace(work, examples=work.examples * once.share, moved_bytes=work.moved_bytes * once.share)
    if facts is None:
        return work
    sums = Counter(int(getattr(r.type, "nbytes", 0)) for r in facts.reductions)
    return dataclasses.replace(work, sums=tuple(sorted(sums.items())))


def _parts(found: StepPlan, rates: Rates, hosts: HostRates) -> Mapping[str, tuple[Term, ...]]:
    """What the whole step is predicted to take."""
    tables = [(t.taken, t.sizes) for t in found.families if t.sizes is not None]
    return step_parts(rates, dense_load(found), tables, found.devices, hosts)


def dense_load(found: StepPlan) -> DenseLoad:
    """What a step does on each device with all leaves whose rows don't go by themselves."""
    whole = [t for t in found.families if t.sizes is None and t.where == "devices"]  # looked up, but trained whole
    sizes = [(math.prod(t.shape) * np.dtype(t.dtype).itemsize, t) for t in whole]
    leaves = [leaf.nbytes // (found.devices if leaf.shared else 1) for leaf in found.dense]
    leaves += [size for size, table in sizes for _ in range(1 + len(table.slots))]
    sums, work = (*found.work.sums, *((size, 1) for size, _ in sizes)), found.work
    moved = work.moved_bytes / found.devices
    return DenseLoad(work.on(found.devices), sums, tuple(leaves), moved, by_mpi=found.road == "mpi")


@dataclass(frozen=True, slots=True)
class _Touched:
    """What rows a step looks up in a family."""

    alpha: Alpha | None
    growth: Growth | None


def _touched(
    program: Program, space: RowSpace, leaves: Sequence[Any] | None, devices: int, seen: Growth | None
) -> _Touched:
    """By the batch, as far as it is known, and by what was seen of others."""
    if not space.accesses:
        return _Touched(None, None)
    ids, extent = program.ids[space.family], space.extent
    each, flat = ids.count_on(devices), example_ids(program, ids, leaves)
    seen = None if seen is None else seen.with_ids(each)
    if flat is not None:
        asked = device_ids(flat, ids.batched, devices, extent)
        growth = seen or (growth_of(asked, extent, each) if any(ids.batched) else None)
        return _Touched(alpha_of(asked, extent, ids.count), growth)
    if seen is not None:
        return _Touched(Alpha(round(seen.rows(devices)), extent, ids.count, True, seen.rows(1)), seen)
    return _Touched(most(ids, extent, devices), None)


def _terms(entry: Entry, table: TablePlan, rates: Rates | None, hosts: HostRates) -> Mapping[str, tuple[Term, ...]]:
    """What each method does, by rates; of a step that is run by a plan what that one says, if it is of these sizes."""
    if table.sizes is None:
        return {}
    if table.where == "hosts":
        there = {} if rates is None else step_terms(rates, table.sizes.on_devices())
        return {HOSTED: host_terms(table.sizes, hosts), **there} if there else {}
    if rates is not None:
        return step_terms(rates, table.sizes)
    decisions = entry.options.decisions
    told = None if decisions is None else decisions.of(table.path)
    return told.terms if told is not None and told.sizes == table.sizes else {}
