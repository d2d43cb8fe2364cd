"""`check`: compares the bytes that a compiled step sends between devices with its plan.

XLA's compiled program (`measure.compiled_collectives`) lists collectives, and doesn't say what they are for:

- All-to-alls belong to the tables alone: their bytes must be the plan's.
- All-gathers belong to the tables, and to the model where its examples meet (negatives of the same batch).
- All-reduces of tables are found by their sizes. The rest are gradients of dense leaves, and sums over examples
  (losses, norms).

The *written* collectives are those in the program of one device that autopar made, without tables' rows. They are an
upper bound of what is sent: XLA merges equal ones and drops unread ones. All branches of a `cond` count. A loop whose
trip count XLA doesn't know is listed by the iteration. Collectives that XLA inserts in a program that it partitions are
in no plan. Two families with the same ids may exchange these once, which the plan doesn't know.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.cost.exchange import ID_TERMS
from autopar.ir.figures import format_bytes
from autopar.ir.local import sent_bytes
from autopar.ir.plan import DensePlan, PipelinePlan, Plan, TablePlan, TensorPlan
from autopar.ir.program import Block, Equation
from autopar.ir.reductions import REDUCERS
from autopar.ir.timeline import Run, Send, Timeline
from autopar.jax_types import Pytree
from autopar.measure.compiled_collectives import Collective, read_collectives
from autopar.measure.figures import NOWHERE
from autopar.planning.plan import plan_of
from autopar.planning.predictions import predict_method
from autopar.run.asynchronous import AsynchronousRunner
from autopar.run.object_step import AnyStep, unwrapped
from autopar.run.pipeline import PipelineRunner
from autopar.run.planned_step import PlannedStep
from autopar.run.stage_executor import StageExecutor

#: Collectives of a plan's exchanges, and other ones of XLA.
_EXCHANGES, _OTHER = ("all-to-all", "all-gather"), "collective-permute"
#: An upper bound may be exceeded by this factor.
_SLACK = 1.08
#: The "collective" of a pipeline's messages.
SEND = "send"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A line of a check: bytes that each device sends in a step."""

    collective: str  #: XLA's name of the collective; "send" in a pipeline.
    what: str  #: Its purpose.
    planned: int | None  #: Bytes by the plan; None: the plan doesn't say.
    compiled: int  #: Bytes by the compiled program.
    count: int  #: Number of arrays in the compiled program.
    at_most: bool = False  #: `planned` is an upper bound: XLA may add up values before it reduces them.

    @property
    def ok(self) -> bool:
        """Says whether the compiled program agrees with the plan, as far as the plan says anything."""
        if self.planned is None or self.at_most:
            return self.planned is None or self.compiled <= _SLACK * self.planned
        return self.planned == self.compiled

    def cells(self) -> tuple[str, ...]:
        planned = "not in the plan"
        if self.planned is not None:
            planned = f"planned{' at most' * self.at_most} {format_bytes(self.planned)}"
        arrays = f" ({self.count} array{'' if self.count == 1 else 's'})" if self.count else ""
        compiled = f"compiled {format_bytes(self.compiled)}{arrays}{'' if self.ok else ': DIFFERS'}"
        return self.collective, self.what, planned, compiled


@dataclass(frozen=True, slots=True)
class Check:
    """The result of `check`; true if all is as planned; `str()` is a table. `note`: says what it doesn't cover."""

    step: str
    devices: int
    rows: tuple[CheckRow, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Says whether all is as planned."""
        return all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.devices == 1:
            text = "nothing travels, and the compiled program has no collective"
            first = f"{self.step} on one device: {text if self.ok else 'nothing is to travel'}"
        else:
            said = "what the plan says" if self.ok else "not what the plan says"
            first = f"{self.step} on {self.devices} devices: each sends in a step {said}"
        cells = [row.cells() for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([first, *(f"  {line}" for line in lines), *[self.note] * bool(self.note)])

    __repr__ = __str__


def check(step: AnyStep, *args: Pytree, **kwargs: Pytree) -> Check:
    """Compiles a planned step and compares its collectives with the plan; runs nothing.

    With replicas (`sync=`) it checks a client's own step. Several processes call it together.

    Args:
      step: The step that `parallelize` returned.
      *args, **kwargs: Arguments of a call: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ArgumentsError: no arguments, or the step has tables on hosts, or a state that servers keep (`sync=Async(...)`),
        whose exchanges aren't in compiled programs.
    """
    pure, arrays, named = unwrapped(step, args, kwargs, "check")
    return compare_step(pure.planned_for(*arrays, **named), step.name)


def compare_step(planned: PlannedStep, name: str) -> Check:
    """Compares a planned step, called `name`, with its plan. Raises ArgumentsError as `check` does."""
    made = planned.way.sends(planned, name)
    if made is not None:
        return made
    untimed = replace(planned, machine=NOWHERE)
    plan = plan_of(untimed, name, None)
    collectives = read_collectives(planned.runner.lower().compile().as_text())
    program = planned.compiled.program
    written = None if program.local is None else written_collectives(program.block, plan.devices, collectives)
    if plan.tensor is None or planned.devices is None:
        return compare_collectives(plan, collectives, written)
    tensor = [c for c in collectives if _is_over_tensor_axis(c, planned.devices)]
    rest = compare_collectives(plan, [c for c in collectives if c not in tensor], written)
    return Check(name, planned.devices.mesh.size, (*_compare_tensor(plan.tensor, tensor), *rest.rows))


def _is_over_tensor_axis(collective: Collective, devices: Devices) -> bool:
    assert devices.tensor_axis is not None, "there is a tensor axis"
    shape, along = devices.mesh.devices.shape, devices.mesh.axis_names.index(devices.tensor_axis)
    groups = collective.groups or (tuple(range(devices.mesh.size)),)
    coordinates = [np.stack(np.unravel_index(group, shape)) for group in groups]
    return all((np.delete(each, along, 0) == np.delete(each, along, 0)[:, :1]).all() for each in coordinates)


def _compare_tensor(plan: TensorPlan, collectives: Sequence[Collective]) -> list[CheckRow]:
    """Compares collectives over the tensor axis: all-reduces, and all-gathers if the plan has some."""
    rows = []
    gathers = any(group.gathers for group in plan.taken)
    for op in dict.fromkeys(("all-reduce", *(c.op for c in collectives))):
        counts = _all_sent([c for c in collectives if c.op == op and c.arrays[0][0] != "pred"], plan.devices)
        planned = plan.sent if op == "all-reduce" or gathers else 0
        what = "sums of divided products" if op == "all-reduce" else "parts of divided products"
        rows.append(CheckRow(op, what, planned, *counts, at_most=True))
    return rows


def _all_sent(collectives: Sequence[Collective], devices: int, times: int = 1) -> tuple[int, int]:
    """Returns the bytes that each device sends for collectives that run `times` times, and the number of arrays."""
    counts = [(c.times * c.sent(devices), c.times * len(c.arrays)) for c in collectives]
    return times * sum(sent for sent, _ in counts), times * sum(arrays for _, arrays in counts)


def compare_pipeline(planned: PlannedStep, step: str) -> Check:
    """Compares what a pipeline's devices send, between stages and within them, with the plan."""
    runner, plan = planned.runner, planned.compiled.plan.pipeline
    assert isinstance(runner, (PipelineRunner, AsynchronousRunner)) and plan is not None, "there are stages"
    made = compare_sends(step, plan, runner.timeline)
    return replace(made, rows=(*made.rows, *_compare_stages(plan, runner.executor)))


def _compare_stages(plan: PipelinePlan, executor: StageExecutor) -> list[CheckRow]:
    """Compares the exchanges within this process's stages, over all microbatches. All stages make one row: the plan
    counts a sum where it is read, and the stage before may have computed it."""
    planned, rows = plan.microbatches * sum(stage.exchanged_bytes for stage in plan.stages), []
    made = [] if plan.tensor == 1 else executor.collectives()
    for op in dict.fromkeys(c.op for c in made):
        counts = _all_sent([c for c in made if c.op == op], plan.tensor, plan.microbatches)
        rows.append(CheckRow(op, "divided products within stages", planned, *counts, at_most=True))
    return rows


def compare_sends(step: str, plan: PipelinePlan, timeline: Timeline) -> Check:
    """Compares a pipeline's plan with its devices' sends: those of microbatches by stage, or by device if a device has
    several stages; then the rest (sums, norms, results, weights of several stages)."""
    rows, sent, count = [], list(timeline.sends()), timeline.microbatches
    tasks = [run for run in timeline.actions if isinstance(run, Run) and run.program.phase in ("F", "B", "W")]
    made = {value for run in tasks for value in run.writes}
    parts = [send for send in sent if send.value in made]
    stage_of = {device: k for k, stage in enumerate(plan.stages) for device in stage.devices}
    if plan.stages_per_device > 1:
        for device in range(plan.devices):
            planned = sum(s.ahead_bytes + s.back_bytes for s in plan.stages if device in s.devices)
            own = [send for send in parts if send.source == device]
            rows.append(CheckRow(SEND, f"device {device}", planned * count, _sent_bytes(own), len(own)))
    else:
        for k, stage in enumerate(plan.stages):
            own = [send for send in parts if stage_of[send.source] == k]
            ahead = [send for send in own if stage_of[send.target] > k]
            back = [send for send in own if stage_of[send.target] < k]
            for what, planned, made in (("later", stage.ahead_bytes, ahead), ("earlier", stage.back_bytes, back)):
                rows.append(
                    CheckRow(SEND, f"stage {k} to {what} stages", planned * count, _sent_bytes(made), len(made))
                )
    rest = [send for send in sent if send.value not in made]
    rows.append(CheckRow(SEND, "sums, norms, results, weights of several stages", None, _sent_bytes(rest), len(rest)))
    return Check(step, plan.devices, tuple(row for row in rows if row.compiled or row.planned))


def _sent_bytes(sends: Sequence[Send]) -> int:
    return sum(int(getattr(send.value.var.type, "nbytes", 0)) for send in sends)


def compare_collectives(
    plan: Plan, collectives: Sequence[Collective], written: Sequence[Collective] | None = None
) -> Check:
    """Compares a plan with the collectives of the compiled program. `written`: of `written_collectives`, if XLA doesn't
    partition the program."""
    if plan.devices == 1:
        rows = [CheckRow(c.op, "on one device", 0, c.times * c.nbytes, len(c.arrays)) for c in collectives]
        return Check(plan.step, 1, tuple(rows))
    found = _Unexplained.of(collectives, plan.devices)
    bound = None if written is None else _Unexplained.of(written, plan.devices)
    rows = [row for table in plan.families for row in _compare_reduction(table, found, bound)]
    rows += [row for op in _EXCHANGES for row in _compare_exchanges(plan, op, found, bound)]
    unplanned = None if _has_shards(plan) else 0
    rows.append(CheckRow(_OTHER, "arrays that XLA moves", unplanned, *found.take_all(_OTHER)))
    dense = _sizes_of([*plan.dense, *(t for t in plan.tables if not t.lifted)])

    def rest(op: str, what: str, sizes: Collection[int] | None = None) -> CheckRow:
        planned = None if bound is None else bound.take_all(op, sizes)[0]
        return CheckRow(op, what, planned, *found.take_all(op, sizes), at_most=planned is not None)

    rows += [
        rest("reduce-scatter", "gradients of leaves in shards"),
        rest("all-reduce", "gradients of dense leaves", dense),
        CheckRow("all-reduce", "as large as a whole table", 0, *found.take_all("all-reduce", _lifted_sizes(plan))),
        rest("all-reduce", "sums over examples"),
        rest("any", "flags"),
        _more_than_rings(collectives, plan.devices),
        *_compare_iterations(collectives, written or (), plan.devices),
    ]
    return Check(plan.step, plan.devices, tuple(row for row in rows if row.compiled or row.planned))


def _more_than_rings(collectives: Sequence[Collective], devices: int) -> CheckRow:
    """Returns by how many bytes all-reduces that send operands whole exceed rings."""
    whole = [c for c in collectives if c.is_whole]
    more = sum(c.times * (c.sent(devices) - replace(c, is_whole=False).sent(devices)) for c in whole)
    return CheckRow("all-reduce", "more for small sums, which go whole", None, more, len(whole))


def _compare_iterations(
    collectives: Sequence[Collective], written: Sequence[Collective], devices: int
) -> list[CheckRow]:
    """Compares an iteration of the loops of unknown trip count. Such loops may also do the tables' work in the compiled
    program: only written collectives are looked for."""
    once = ([replace(c, times=1) for c in each if not c.times] for each in (collectives, written))
    compiled, bound = (_Unexplained.of(each, devices) for each in once)
    rows = []
    for op in dict.fromkeys(array.op for array in bound.arrays):
        taken = [compiled.take(op, array.nbytes) for array in bound.arrays if array.op == op]
        sent, counts = map(sum, zip(*taken, strict=True))
        rows.append(CheckRow(op, "each turn of a while loop", bound.take_all(op)[0], sent, counts, at_most=True))
    return rows


class _SentArray(NamedTuple):
    op: str  #: The collective; "any" for flags.
    nbytes: int
    sent: int  #: Bytes that a device sends.


@dataclass(slots=True)
class _Unexplained:
    """The arrays of a program's collectives that no row of the check explains yet, in the program's order. Rows take
    theirs in the order of `compare_collectives`: those of known sizes first, then what is left."""

    arrays: list[_SentArray]

    @staticmethod
    def of(collectives: Sequence[Collective], devices: int) -> _Unexplained:
        arrays: list[_SentArray] = []
        for c in collectives:
            for array in c.arrays:
                one = Collective(c.op, (array,), 1)
                op = "any" if array[0] == "pred" else c.op
                arrays += [_SentArray(op, one.nbytes, one.sent(devices))] * c.times
        return _Unexplained(arrays)

    def take(self, op: str, nbytes: int) -> tuple[int, int]:
        """Takes one array of this size; returns the bytes that a device sends for it, and 1; zeros if there is none."""
        taken = next((array for array in self.arrays if (array.op, array.nbytes) == (op, nbytes)), None)
        if taken is None:
            return 0, 0
        self.arrays.remove(taken)
        return taken.sent, 1

    def take_all(self, op: str, sizes: Collection[int] | None = None) -> tuple[int, int]:
        """Takes a collective's arrays, of all sizes or of some; returns the bytes that a device sends, and their
        number."""

        def is_one(array: _SentArray) -> bool:
            return array.op == op and (sizes is None or array.nbytes in sizes)

        arrays = [array for array in self.arrays if is_one(array)]
        self.arrays = [array for array in self.arrays if not is_one(array)]
        return sum(array.sent for array in arrays), len(arrays)


def _compare_reduction(table: TablePlan, found: _Unexplained, bound: _Unexplained | None) -> list[CheckRow]:
    """Compares the all-reduce of a table's gradient, of all rows or of touched ones."""
    sizes, method = table.sizes, table.method
    if sizes is None or not sizes.spread or method not in ("allreduce", "allreduce_rows"):
        return []
    rows = sizes.extent if method == "allreduce" else sizes.routed
    arrays = [rows * row for row in sizes.reduced_gradients]
    planned = sum(Collective("all-reduce", (("u8", (nbytes,)),), 1).sent(sizes.devices) for nbytes in arrays)
    sent, counts = zip(*(found.take("all-reduce", nbytes) for nbytes in arrays), strict=True)
    if bound is not None:
        for nbytes in arrays:
            bound.take("all-reduce", nbytes)
    what, several = f"{table.path}, {method}", len(arrays) > 1  # of which XLA may make one
    return [CheckRow("all-reduce", what, planned, sum(sent), sum(counts), at_most=several)]


def _compare_exchanges(plan: Plan, op: str, found: _Unexplained, bound: _Unexplained | None) -> list[CheckRow]:
    """Compares a collective's exchanges of all tables' rows; the rest of all-gathers is the model's."""
    has_whole_table = any(array.op == op and array.nbytes in _lifted_sizes(plan) for array in found.arrays)
    sent, count = found.take_all(op)
    if any(table.lifted and table.sizes is None for table in plan.tables):
        return [CheckRow(op, "ids and rows of tables, some only read", None, sent, count)]
    possible = _possible_bytes(plan, op)
    planned = max((p for p in possible if p <= sent), default=max(possible))
    what = "ids, rows and gradients of tables"
    if op != "all-gather" or sent <= planned:
        return [CheckRow(op, what, planned if sent == planned else max(possible), sent, count)]
    most = None if _has_shards(plan) or not has_whole_table else 0
    if most is None and bound is not None:
        most = bound.take_all(op)[0]
    model = CheckRow(op, "arrays of the model", most, sent - planned, 0, at_most=bool(most))
    return [CheckRow(op, what, planned, planned, count), model]


def _possible_bytes(plan: Plan, op: str) -> set[int]:
    """Returns the numbers of bytes that a collective of tables may send: families with the same ids may share it."""
    totals, groups = {0}, collections.defaultdict(list)
    for table in plan.families:
        lifted = predict_method(table, table.method) if table.lifted else None
        terms = [] if lifted is None else [t for t in lifted.terms if t.collective == op]
        rest = sum(t.sent for t in terms if t.name not in ID_TERMS)
        totals = {total + rest for total in totals}
        for term in terms:
            if term.name in ID_TERMS and (s := table.sizes) is not None:
                groups[table.method, term.name, s.extent, s.ids, s.requested, s.capacity, term.sent].append(term.sent)
    for (first, *_), count in ((ids, len(ids)) for ids in groups.values()):
        totals = {total + times * first for total in totals for times in range(1, count + 1)}
    return totals


def _sizes_of(leaves: Sequence[TablePlan | DensePlan]) -> frozenset[int]:
    return frozenset(_nbytes(leaf.shape, leaf.dtype) for leaf in leaves if leaf.shape)


def _lifted_sizes(plan: Plan) -> frozenset[int]:
    return _sizes_of([table for table in plan.tables if table.lifted])


def _has_shards(plan: Plan) -> bool:
    return any(leaf.sharded for leaf in plan.dense) or any(t.method == "ps" and not t.lifted for t in plan.tables)


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return 0 if dtype.startswith("key<") else math.prod(shape) * jax.numpy.dtype(dtype).itemsize


def written_collectives(block: Block, devices: int, compiled: Sequence[Collective]) -> list[Collective]:
    """Returns the reductions and gathers in a device's own program, without tables' rows.

    `times` is how often a step runs each, as in `compiled`; 0 in a `while` loop whose trip count XLA doesn't know.
    """
    return [c if c.times else replace(c, times=_trip_count(c, compiled)) for c in _written(block, devices, 1)]


def _written(block: Block, devices: int, times: int) -> Iterator[Collective]:
    for equation in block.equations:
        if equation.op == "ap.reduce":
            yield from _reductions(equation, devices, times)
        elif equation.op == "ap.reduce_shards":
            yield _collective("reduce-scatter", equation.outputs[0].type.nbytes, times)
        elif equation.op == "ap.replicate":
            yield _collective("all-gather", devices * equation.inputs[0].type.nbytes, times)
        for body in equation.bodies:
            yield from _written(body, devices, times * _body_count(equation))


def _body_count(equation: Equation) -> int:
    """Returns how often an equation runs its bodies; 0 for a `while` loop."""
    names = {"scan": "length", "ap.microbatches": "count"}
    return 0 if equation.op == "while" else equation.params[names[equation.op]] if equation.op in names else 1


def _reductions(equation: Equation, devices: int, times: int) -> Iterator[Collective]:
    type_, op = equation.inputs[0].type, equation.params["op"]
    if type_.dtype == np.bool_ or REDUCERS[op].collective is None:
        yield _collective("all-gather", devices * type_.nbytes, times, "pred" if type_.dtype == np.bool_ else "u8")
        return
    yield _collective("all-reduce", sent_bytes(type_, op), times)
    if op != "sum" and jax_compat.is_float(type_.dtype):  # a flag says where there is a NaN
        yield _collective("all-reduce", 4 * math.prod(type_.shape), times)


def _collective(op: str, nbytes: int, times: int, dtype: str = "u8") -> Collective:
    return Collective(op, ((dtype, (nbytes,)),), times)


def _trip_count(written: Collective, compiled: Sequence[Collective]) -> int:
    alike = (c.times for c in compiled if c.op == written.op and written.nbytes in c.sizes)
    return max((times for times in alike if times > 1), default=0)
