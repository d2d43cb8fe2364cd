"""`explain`: a step's plan, leaf by leaf, with reasons: `print(autopar.explain(step, state, batch))`.

It prints as text as wide as the terminal, in colours under `rich.print`, and as HTML in a notebook.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from autopar.cost.exchange import table_3
from autopar.cost.model import touched_bytes
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import format_bytes
from autopar.ir.plan import DensePlan, PipelinePlan, Plan, TablePlan
from autopar.ir.program import known
from autopar.ir.rowspace import RowSpace
from autopar.jax_types import Leaf, Pytree
from autopar.measure.alpha import Alpha, batch_alpha
from autopar.planning.notes import (
    emission_notes,
    formula_notes,
    hosted_text,
    hot_rows_notes,
    memory_notes,
    owner_balance_notes,
    owner_notes,
    predicted_note,
    replica_notes,
    server_notes,
    small_pages_note,
    stack_notes,
    stage_lines,
    tensor_notes,
)
from autopar.planning.plan import elsewhere, plan_of
from autopar.planning.predictions import predict, sources_text
from autopar.planning.switch_notes import switch_notes
from autopar.planning.text import LIST, PATH, Column, Columns, Paragraph, fold_paths, print_as, ranged, without_numbers
from autopar.run.object_step import AnyStep, require_step, unwrapped
from autopar.run.planned_step import PlannedStep
from autopar.run.slow_plans import gathered_bytes, undivided

#: Lines for tables, and for dense leaves, unless their treatments need more.
_LINES = 8


def explain(
    step: AnyStep, *args: Pytree, cluster: ClusterSpec | None = None, verbose: bool = False, **kwargs: Pytree
) -> Explanation:
    """Explains the plan of a step: what is done with each parameter, and why.

    Its text is as wide as the terminal or the environment variable COLUMNS says; 80 columns if neither is known. If
    there are many leaves, dense ones with the same treatment share a line, and so do tables that differ in sizes alone;
    `Explanation.rows` has each leaf, and `autopar.why` explains one table.

    Without arguments each process may call it by itself; with arguments several processes call it together.

    Args:
      step: The step that `parallelize` returned.
      *args, **kwargs: Arguments of a call: arrays or `jax.ShapeDtypeStruct`s. To measure alpha the equations that ids
        depend on are run, and nothing else. Without arguments it explains the plan in use.
      cluster: Plan for these machines instead of the devices here; the batch is that of all of them.
      verbose: List the passes with their times, and every value that all devices have whole.

    An argument of the step called `cluster` or `verbose` must be given by position.

    Raises:
      ArgumentsError: no arguments, and the step hasn't been called yet.
    """
    require_step(step, "explain")
    if args or kwargs:
        pure, arrays, named = unwrapped(step, args, kwargs, "explain")
        planned = (pure if cluster is None else elsewhere(pure, cluster)).planned_for(*arrays, **named)
        leaves: Sequence[Leaf] | None = pure.leaves(arrays, named)
    else:
        latest = step.latest
        if latest is None:
            raise ArgumentsError(f"{step.name} hasn't been called yet: explain(step, state, batch)")
        if cluster is not None:
            raise ArgumentsError("a cluster takes a step's arguments as well: explain(step, state, batch, cluster=...)")
        planned, leaves = latest, latest.example
    return _explain(planned, leaves, step.name, cluster, verbose)


def _explain(
    planned: PlannedStep, leaves: Sequence[Leaf] | None, name: str, cluster: ClusterSpec | None, verbose: bool
) -> Explanation:
    program, plan = planned.compiled.analysed, planned.compiled.plan
    rows = [_table_row(planned, space, k, leaves) for space in program.facts.spaces for k in space.tables]
    rows += [_dense_row(leaf, plan) for leaf in plan.dense]
    passes = tuple((r.name, r.note, r.seconds) for r in planned.compiled.records)
    details = (
        *owner_notes(planned),
        *stack_notes(planned),
        *emission_notes(planned, verbose),
        *(small_pages_note(planned) if cluster is None else ()),
    )
    if cluster is not None:
        details = predicted_note(predict(plan_of(planned, name, leaves, cluster))), *details
        if plan.devices == 1 and plan.pipeline is None:
            details = details[0], sources_text(cluster), *details[1:]
    bound = planned.compiled.bound
    if bound.uneven:
        k, axis = next(iter(bound.uneven.items()))
        size = program.block.inputs[k].shape[axis]
        each = f"each has {-(-size // plan.devices)} or fewer, padded and masked"
        details += (f"{plan.devices} devices don't divide the batch ({size}): {each}.",)
    if examples := undivided(planned):
        details += (f"All devices do the same: {plan.devices} devices don't divide the batch ({examples}).",)
    if gathered := gathered_bytes(planned):
        each = f"each of {plan.devices} sends {format_bytes(gathered * (plan.devices - 1) // plan.devices)}"
        details += (f"Results by example, {format_bytes(gathered)}, come whole to every process: {each} (results=).",)
    return Explanation(
        name,
        tuple(rows),
        passes,
        planned.trace_s,
        plan.sparse,
        devices=plan.devices,
        updates=any(input_.role == "state" for input_ in program.inputs),
        processes=1 if planned.devices is None else len(planned.devices.processes.members),
        hosted=hosted_text(planned, leaves) if plan.on_hosts else "",
        notes=(
            *replica_notes(plan),
            *server_notes(plan),
            *memory_notes(planned, cluster),
            *tensor_notes(plan),
            *formula_notes(planned),
            *switch_notes(planned, leaves, cluster),
            *owner_balance_notes(plan),
            *hot_rows_notes(plan, accelerators=planned.options.accelerators),
            *details,
            *planned.notes,
        ),
        pipeline=plan.pipeline,
        tensor=planned.options.tensor,
        microbatches=plan.microbatches,
        verbose=verbose,
    )


def _dense_row(leaf: DensePlan, plan: Plan) -> ExplainedLeaf:
    size = leaf.nbytes
    if leaf.unchanged:
        return ExplainedLeaf(
            leaf, size, 0, None, "dense, in shards, ps" if leaf.sharded else "none", 0, 0, sent=leaf.sent
        )
    action, kept = ("dense, in shards, ps", size // plan.devices) if leaf.sharded else ("dense", size)
    action, kept = _divided(plan, leaf.path, action, kept)
    return ExplainedLeaf(leaf, size, 0, None, action, 2 * size, 2 * kept, sent=leaf.sent)


def _divided(plan: Plan, path: str, action: str, touched: int) -> tuple[str, int]:
    if plan.tensor is None or path not in plan.tensor.axes:
        return action, touched
    return "tensor", touched // plan.tensor.devices


def _table_row(planned: PlannedStep, space: RowSpace, k: int, leaves: Sequence[Leaf] | None) -> ExplainedLeaf:
    """Returns a table's row. A family's slots and exchanges are counted with its first table."""
    program, bound, plan = planned.compiled.analysed, planned.compiled.bound, planned.compiled.plan
    devices = plan.devices
    table, first = bound.plan.table(program.inputs[k].path), k == space.tables[0]
    nbytes = program.block.inputs[k].type.nbytes
    slots = [leaf for leaf in space.leaves if leaf not in space.tables] if first else []
    size = nbytes + sum(program.block.inputs[leaf].type.nbytes for leaf in slots)
    is_read = program.inputs[k].role == "table"
    dense = size if is_read else touched_bytes(table_bytes=nbytes, family_bytes=size)
    alpha = batch_alpha(program, space, leaves, devices) if space.accesses else None
    action, kept, deferred = "dense", dense, ""
    if table.unchanged:
        action, dense, kept = "none", 0, 0
    if table.lifted:
        action = "sparse, lazy" if bound.plan.sparse == "lazy" else "sparse"
        kept = int(dense * alpha.share) if alpha else dense
    if k in bound.shards:
        action, kept = "dense, in shards", dense // devices
    action, kept = _divided(plan, table.path, action, kept)
    if table.log_steps:
        action += ", others deferred"
        deferred = f"{format_bytes(_log_bytes(planned, space.family))} for what they missed"
    if table.pulled:
        action = "pulled whole, ps on hosts"
    elif table.where == "hosts":
        action += ", ps on hosts"
    elif (table.sent or is_read) and table.lifted:
        action += f", {table.method}"
    row = ExplainedLeaf(table, size, len(slots), alpha, action, dense, kept, deferred)
    if not first:
        return row
    paper = table_3(b=nbytes, n=devices, alpha=alpha.local_share) if table.sent and alpha and not table.pulled else {}
    return replace(row, sent=table.sent, seconds=table.seconds, table_3=paper)


def _log_bytes(planned: PlannedStep, family: int) -> int:
    program, stacked, share = planned.compiled.program, planned.compiled.stacked, 1.0
    if stacked is not None:
        space = next(s for s in planned.compiled.analysed.facts.spaces if s.family == family)
        whole = known(stacked.program.facts.space_of(stacked.input_of(space.leaves[0])))
        family, share = whole.family, space.extent / whole.extent
    lead = f"update log {family}/"
    return round(share * sum(v.type.nbytes for v, input_ in program.named_inputs if input_.path.startswith(lead)))


@dataclass(frozen=True, slots=True)
class ExplainedLeaf:
    """A leaf of the plan, and the cost of its update on this batch.

    Attributes:
      nbytes, slots: Bytes of the parameter and its slots, and the number of these.
      alpha: The share of rows that a batch touches; None for a dense parameter.
      action, deferred: How it is updated, and the cost of deferred rows, in words.
      dense_bytes, planned_bytes: Memory traffic of its update in a step, plain and planned.
      sent: Method -> bytes that each of several devices would send in a step.
      seconds: Method -> predicted time of its exchanges and updates.
      table_3: The paper's figures for the table itself (`cost.exchange.transfer_bytes`).
    """

    plan: TablePlan | DensePlan
    nbytes: int
    slots: int
    alpha: Alpha | None
    action: str
    dense_bytes: int
    planned_bytes: int
    deferred: str = ""
    sent: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    table_3: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.plan.path

    @property
    def kind(self) -> str:
        """Returns "sparse" (looked up by rows) or "dense"."""
        return "sparse" if isinstance(self.plan, TablePlan) else "dense"

    @property
    def bounds(self) -> Mapping[str, float]:
        """Method -> lower bound of its time (`TablePlan.bounds`)."""
        return self.plan.bounds if isinstance(self.plan, TablePlan) else {}

    @property
    def reason(self) -> str:
        """The reason for its treatment; "" if there is nothing to say."""
        return "; ".join(filter(None, (self.plan.reason, self.deferred)))


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the table: leaves with the same treatment, whatever their sizes, and their sum."""

    name: str
    leaves: tuple[ExplainedLeaf, ...]
    whole: ExplainedLeaf

    @property
    def first(self) -> ExplainedLeaf:
        return self.leaves[0]

    @property
    def count(self) -> str:
        return f" ({len(self.leaves)})" if len(self.leaves) > 1 else ""

    @property
    def shape(self) -> str:
        shapes = [leaf.plan.shape for leaf in self.leaves]
        if len({len(shape) for shape in shapes}) > 1:
            return ""
        sizes = [sorted(set(along)) for along in zip(*shapes, strict=True)]
        return f"[{', '.join(str(n[0]) if len(n) == 1 else f'{n[0]}..{n[-1]}' for n in sizes)}]"

    @property
    def alpha(self) -> str:
        return ranged([_share(leaf.alpha) for leaf in self.leaves])

    @property
    def style(self) -> str:
        if self.whole.planned_bytes < self.whole.dense_bytes:
            return "green"
        return "yellow" if self.first.kind == "sparse" else ""

    def total(self, figures: Callable[[ExplainedLeaf], Mapping[str, float]]) -> Mapping[str, float]:
        return {method: sum(figures(leaf)[method] for leaf in self.leaves) for method in figures(self.first)}


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """The result of `explain`; `str()` is plain text, as wide as the terminal.

    Attributes:
      rows: The leaves of the state, tables first.
      passes: Name, note and seconds of each pass.
      updates: Whether there is a state.
      processes: Number of processes with these devices.
      hosted: For tables on hosts, who reduces, and the stages of the step; `devices` are ranks then.
      notes: Further lines on the plan.
      pipeline: The stages of a pipeline.
      tensor: T, the number of devices that divide products.
      microbatches: Number of parts of the batch that run one after the other.
      verbose: Whether the text lists the passes.
    """

    name: str
    rows: tuple[ExplainedLeaf, ...]
    passes: tuple[tuple[str, str, float], ...]
    trace_s: float
    sparse: str
    devices: int = 1
    updates: bool = True
    processes: int = 1
    hosted: str = ""
    notes: tuple[str, ...] = ()
    pipeline: PipelinePlan | None = None
    tensor: int = 1
    microbatches: int = 1
    verbose: bool = False

    @property
    def dense_bytes(self) -> int:
        """Memory traffic of all updates in a plain step."""
        return sum(r.dense_bytes for r in self.rows)

    @property
    def planned_bytes(self) -> int:
        """Memory traffic of all updates in the planned step."""
        return sum(r.planned_bytes for r in self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        before: RenderableType = ""
        for part in self._parts():
            if part or before:  # no two blank lines
                yield Paragraph(Text(part) if isinstance(part, str) else part) if isinstance(part, str | Text) else part
            before = part

    def __str__(self) -> str:
        return print_as(self, "text")

    __repr__ = __str__  # a prompt, and a notebook that shows no HTML, print a result's `repr`

    def _repr_html_(self) -> str:
        return print_as(self, "html")

    def _parts(self) -> Iterator[RenderableType]:
        if not self.rows:  # an evaluation
            yield Text.assemble(
                (f"Plan of {self.name}", "bold"),
                ": the step returns no argument updated, as far as autopar can follow: it runs as under jax.jit. If an "
                "argument is state, name it with parallelize(step, state_argnums=...)",
            )
            yield from self.notes
            return
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        yield Text(f"Plan of {self.name} ({self._where}{parts})", "bold")
        lines = self._lines()
        yield from ("", _table(lines), "")
        yield from _definitions(lines)
        yield from _reasons(lines)
        if any(line.first.sent or line.first.table_3 or line.first.seconds for line in lines):
            yield from ("", _exchanges(lines, "rank" if self.hosted else "device"), "")
        if self.pipeline is not None:
            yield from stage_lines(self.pipeline)
        yield from self.notes
        yield from self.hosted.splitlines()
        yield from self._totals()
        if self.verbose:
            columns = [
                Column("pass", [name for name, _, _ in self.passes]),
                Column("ms", [f"{1e3 * seconds:.0f}" for _, _, seconds in self.passes], "right"),
                Column("what it did", [note for _, note, _ in self.passes], breaks="(?<= )"),
            ]
            yield from ("", Columns(columns))

    @property
    def _where(self) -> str:
        if self.pipeline is not None:
            several = f" x {self.pipeline.tensor}" * (self.pipeline.tensor > 1)
            stages = f"{len(self.pipeline.stages)} stage{'s' * (len(self.pipeline.stages) > 1)}"
            return f"{stages} on {self.pipeline.devices}{several} devices"
        if self.hosted:
            return "one process" if self.devices == 1 else f"{self.devices} ranks"
        several = f" of {self.processes} processes" if self.processes > 1 else ""
        if self.tensor > 1:
            return f"{self.devices} x {self.tensor} devices{several}"
        return "one device" if self.devices == 1 else f"{self.devices} devices{several}"

    def _lines(self) -> Sequence[_Line]:
        """Returns lines of tables, then of dense leaves from the largest on, folded where there are many."""
        tables, dense = ([row for row in self.rows if row.kind == kind] for kind in ("sparse", "dense"))
        lines = sorted(_folded(_with_slots(dense)), key=lambda line: -line.whole.nbytes)
        return [*_folded(tables, others=[row.path for row in dense]), *lines]

    def _totals(self) -> Iterator[str]:
        less = self.dense_bytes / max(self.planned_bytes, 1)
        what = "Parameter updates touch" if self.updates else "Lookups in tables that are spread touch"
        text = f"{what} {format_bytes(self.planned_bytes)} a step in place of {format_bytes(self.dense_bytes)}"
        if less > 1.05:
            text += f": {less:.0f} times less" if less >= 2 else f": {less:.1f} times less"
        if self.sparse == "lazy":
            text += ". sparse='lazy': rows that a batch doesn't touch don't move, which is not what the plain step does"
        yield f"{text}."
        seconds = sum(s for _, _, s in self.passes)
        passes = ":" if self.verbose else " (verbose=True lists the passes)."
        yield f"Traced in {self.trace_s * 1e3:.0f} ms, planned in {seconds * 1e3:.0f} ms{passes}"


def _with_slots(rows: Sequence[ExplainedLeaf]) -> Sequence[ExplainedLeaf]:
    """Returns dense leaves with their optimizer slots: leaves of the same shape whose longer path ends with theirs."""
    parameters: dict[tuple[str, tuple[int, ...], str], ExplainedLeaf] = {}
    slots: dict[str, list[ExplainedLeaf]] = {}
    for row in sorted(rows, key=lambda row: row.path.count("/")):
        names = row.path.split("/")
        keys = [("/".join(names[k:]), row.plan.shape, row.action) for k in range(1, len(names))]
        parameter = next((parameters[key] for key in keys if key in parameters), row)
        slots.setdefault(parameter.path, []).append(row)
        if parameter is row and keys:
            parameters[keys[0]] = row
    return [_sum(leaves) for leaves in slots.values()]


def _sum(leaves: Sequence[ExplainedLeaf]) -> ExplainedLeaf:
    nbytes, dense, planned = (
        sum(figures) for figures in zip(*((r.nbytes, r.dense_bytes, r.planned_bytes) for r in leaves), strict=True)
    )
    return replace(leaves[0], nbytes=nbytes, slots=len(leaves) - 1, dense_bytes=dense, planned_bytes=planned)


def _folded(rows: Sequence[ExplainedLeaf], others: Collection[str] = ()) -> Sequence[_Line]:
    by_path = {row.path: row for row in rows}
    folded = fold_paths({row.path: _treatment(row) for row in rows}, _LINES, others)
    leaves = {name: tuple(by_path[path] for path in paths) for name, paths in folded.items()}
    return [_Line(name, among, _sum(among)) for name, among in leaves.items()]


def _treatment(row: ExplainedLeaf) -> Hashable:
    """Returns all that is printed of a leaf except its name and numbers."""
    methods = (row.plan.taken, *row.sent, *row.table_3, *row.seconds)
    return row.action, without_numbers(_action_and_reason(row)), without_numbers(_share(row.alpha)), row.slots, methods


def _table(lines: Sequence[_Line]) -> Columns:
    title = "parameters (their number)" if any(line.count for line in lines) else "parameter"
    columns = [
        Column(title, [line.name + line.count for line in lines], breaks=PATH),
        Column("bytes", [format_bytes(line.whole.nbytes) for line in lines], "right"),
        Column("alpha", [line.alpha for line in lines], "right"),
        Column("update", [line.first.action for line in lines], breaks=LIST),
        Column("touched", [format_bytes(line.whole.planned_bytes) for line in lines], "right"),
        Column("plain step", [format_bytes(line.whole.dense_bytes) for line in lines], "right", optional=True),
        Column("slots", [str(line.first.slots or "") for line in lines], "right", optional=True),
        Column("shape", [line.shape for line in lines], optional=True),
    ]
    return Columns(columns, styles=[line.style for line in lines])


def _definitions(lines: Sequence[_Line]) -> Iterator[str]:
    if any(line.first.action.startswith("sparse") for line in lines):
        yield "sparse: an update writes the rows that a batch touches; dense: it writes all elements."
    if any(line.alpha for line in lines):
        yield "alpha: the share of a table's rows that a batch touches."


def _share(alpha: Alpha | None) -> str:
    return "" if alpha is None else f"{'' if alpha.measured else '<= '}{alpha.share:.2%}"


def _reasons(lines: Sequence[_Line]) -> Iterator[Text]:
    """Yields a paragraph for each reason, led by the names of all lines that have it. Among many leaves of a kind,
    reasons that differ in numbers alone are one."""
    count, alike = Counter(leaf.kind for line in lines for leaf in line.leaves), {}
    for line in lines:
        if line.first.reason:
            reason = _action_and_reason(line.first)
            key = without_numbers(reason) if count[line.first.kind] > _LINES else reason
            alike.setdefault(key, []).append(line)
    for those in alike.values():
        names = ", ".join(line.name for line in those)
        yield Text.assemble(
            (names, "bold"), f": {ranged([_action_and_reason(leaf) for line in those for leaf in line.leaves])}"
        )


def _action_and_reason(row: ExplainedLeaf) -> str:
    alpha, line, remedy = row.alpha, "", ""
    facts = []
    if alpha is not None and alpha.local_rows < alpha.rows:
        facts.append(f"alpha {alpha.local_share:.2%} on each device")
    if isinstance(row.plan, TablePlan):
        line, remedy = row.plan.line, row.plan.remedy
        relative = os.path.relpath(line) if line else ""
        line = relative if relative and not relative.startswith("..") else line
    facts += [line] * bool(line)
    text = f"{row.action}: {row.reason}" + (f" ({'; '.join(facts)})" if facts else "")
    return f"{text}. To change it: {remedy}" if remedy else text


def _exchanges(lines: Sequence[_Line], unit: str) -> Columns:
    """Returns a table with a row for each method that a parameter has (marked ">") or could have."""

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.2f} ms"

    figures = (
        (f"each {unit} sends", [line.total(lambda leaf: leaf.sent) for line in lines], format_bytes),
        ("Parallax's table 3", [line.total(lambda leaf: leaf.table_3) for line in lines], format_bytes),
        ("predicted", [line.total(lambda leaf: leaf.seconds) for line in lines], milliseconds),
        ("at least", [line.total(lambda leaf: leaf.bounds) for line in lines], milliseconds),
    )
    methods = [dict.fromkeys(method for _, of_lines, _ in figures for method in of_lines[k]) for k in range(len(lines))]
    rows = [(k, method) for k in range(len(lines)) for method in methods[k]]
    names = [lines[k].name if method == next(iter(methods[k])) else "" for k, method in rows]
    marked = [f"{'>' if method == lines[k].first.plan.taken else ' '} {method}" for k, method in rows]
    columns = [Column("in a step", names, breaks=PATH), Column("method", marked)]
    for title, of_lines, shown in figures:
        if any(of_lines):
            cells = [shown(of_lines[k][method]) if method in of_lines[k] else "" for k, method in rows]
            columns.append(Column(title, cells, "right", optional=title == "at least"))
    return Columns(columns)
