"""`explain`: the plan, and why, as a table that a person enjoys reading.

Rich in a terminal, HTML in a notebook, plain text in a log: `print(autopar.explain(step, state, batch))`.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.cost.formulas import table_3
from autopar.cost.model import touched_bytes
from autopar.cost.units import format_bytes
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import DensePlan, Plan, TablePlan
from autopar.ir.rowspace import RowSpace
from autopar.ir.stage_plan import PipelinePlan
from autopar.measure.alpha import Alpha, batch_alpha
from autopar.planning.elsewhere import elsewhere
from autopar.planning.explain_notes import (
    hosted_text,
    is_undivided,
    isolated_notes,
    memory_notes,
    predicted_note,
    tensor_notes,
)
from autopar.planning.explain_stages import stage_notes, stage_table
from autopar.planning.plan import plan_of
from autopar.run.entry import Entry
from autopar.run.wrapped_step import AnyStep, require_step, unwrapped

#: Dense leaves that are listed one by one; the rest is summed up.
_SHOWN_DENSE = 8
#: Columns of a terminal below which the table leaves out shapes and sizes.
_WIDE = 130


@dataclass(frozen=True, slots=True)
class ExplainedLeaf:
    """A leaf of the plan, and what its update takes on this batch.

    Attributes:
      plan: What is decided of it, and why.
      nbytes: Bytes of the parameter and of its slots.
      slots: How many leaves are counted with it.
      alpha: Share of rows that a batch touches, None for a dense parameter.
      action: How it is updated, in words.
      dense_bytes, planned_bytes: Memory traffic of its update in a step, plain and planned.
      deferred: What deferred rows take, in words.
      sent: On several devices, method -> bytes that each device would send in a step.
      seconds: Method -> what its exchanges and updates were predicted to take.
      table_3: The paper's figures for the table itself (`cost.transfer_bytes`).
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
        """As in the state."""
        return self.plan.path

    @property
    def kind(self) -> str:
        """ "sparse" (looked up by rows) or "dense"."""
        return "sparse" if isinstance(self.plan, TablePlan) else "dense"

    @property
    def reason(self) -> str:
        """Why it is updated so; empty where there is nothing to say."""
        return "; ".join(filter(None, (self.plan.reason, self.deferred)))


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What `explain` returns; `str()` is plain text.

    Attributes:
      updates: Whether there is a state.
      notes: What is to be known of how the step was read.
      processes: Whose devices they are.
      hosted: With tables in the memory of the hosts, who reduces and which stages there are; `devices` are ranks then.
      pipeline: Its stages, if it is run in stages.
      tensor: T, over how many devices products may be divided.
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

    @property
    def dense_bytes(self) -> int:
        """Memory traffic of all updates in a plain step."""
        return sum(r.dense_bytes for r in self.rows)

    @property
    def planned_bytes(self) -> int:
        """Memory traffic of all updates in the planned step."""
        return sum(r.planned_bytes for r in self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.rows:  # an evaluation
            text = (
                "the step returns no argument updated, so there is no state: it runs as under jax.jit. If an argument "
                "is state, name it with parallelize(step, state_argnums=...)"
            )
            return [Text.assemble((f"Plan of {self.name}", "bold"), f": {text}"), *map(Text, self.notes)]
        parts: list[RenderableType] = [self._table(narrow=options.max_width < _WIDE)]
        parts += [_reason(r, "rank" if self.hosted else "device") for r in self.rows if r.reason]
        if self.pipeline is not None:
            parts += [stage_table(self.pipeline), *map(Text, stage_notes(self.pipeline))]
        parts += map(Text, self.notes)
        if self.hosted:
            parts.append(Text(self.hosted))
        parts.append(self._totals())
        for name, note, seconds in self.passes:
            parts.append(Text.assemble(("  " + name.ljust(15), "dim"), f"{note} ({seconds * 1e3:.0f} ms)"))
        return parts

    def __str__(self) -> str:
        return self._export(None).rstrip()

    __repr__ = __str__  # a prompt, and a notebook that shows no HTML, print a result's `repr`

    def _repr_html_(self) -> str:
        return self._export("html")

    def _export(self, kind: str | None) -> str:
        # A log has no width of its own; long lines are better than broken paths.
        # In a notebook a console would display what it is to write to the file.
        file = io.StringIO()
        console = Console(file=file, record=kind == "html", width=160, color_system=None, force_jupyter=False)
        console.print(self)
        if kind == "html":
            return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    @property
    def _where(self) -> str:
        if self.pipeline is not None:
            several = f" x {self.pipeline.tensor}" * (self.pipeline.tensor > 1)
            return f"{len(self.pipeline.stages)} stages on {self.pipeline.devices}{several} devices"
        if self.hosted:
            return "one process" if self.devices == 1 else f"{self.devices} ranks"
        several = f" of {self.processes} processes" if self.processes > 1 else ""
        if self.tensor > 1:
            return f"{self.devices} x {self.tensor} devices{several}"
        return "one device" if self.devices == 1 else f"{self.devices} devices{several}"

    def _table(self, narrow: bool) -> Table:
        table = Table(
            title=f"Plan of {self.name} ({self._where})",
            title_justify="left",
            title_style="bold",
        )
        table.add_column("parameter", overflow="fold")
        if not narrow:
            table.add_column("shape", no_wrap=True)
            table.add_column("bytes", justify="right", no_wrap=True)
            table.add_column("kind", no_wrap=True)
        table.add_column("alpha", justify="right", no_wrap=True)
        table.add_column("update", no_wrap=True)
        table.add_column("bytes touched a step", justify="right", no_wrap=not narrow)
        dense = [r for r in self.rows if r.kind == "dense"]
        shown = [r for r in self.rows if r.kind == "sparse"] + sorted(dense, key=lambda r: -r.nbytes)[:_SHOWN_DENSE]
        for row in shown:
            style = "green" if row.planned_bytes < row.dense_bytes else "yellow" if row.kind == "sparse" else ""
            slots = f" with {row.slots} slot{'s' if row.slots > 1 else ''}" if row.slots else ""
            shape = f"[{', '.join(map(str, row.plan.shape))}]".replace("[", r"\[")
            details = () if narrow else (shape, format_bytes(row.nbytes) + slots, row.kind)
            table.add_row(row.path, *details, _alpha(row.alpha), row.action, _traffic(row), style=style)
        rest = dense[:0] if len(dense) <= _SHOWN_DENSE else sorted(dense, key=lambda r: -r.nbytes)[_SHOWN_DENSE:]
        if rest:
            size = format_bytes(sum(r.nbytes for r in rest))
            traffic = format_bytes(sum(r.planned_bytes for r in rest))
            details = () if narrow else ("", size, "dense")
            table.add_row(f"{len(rest)} more", *details, "", "as it is", traffic)
        return table

    def _totals(self) -> Text:
        less = self.dense_bytes / max(self.planned_bytes, 1)
        what = "Parameter updates touch" if self.updates else "Lookups in tables that are spread touch"
        text = f"{what} {format_bytes(self.planned_bytes)} a step in place of {format_bytes(self.dense_bytes)}"
        if less > 1.05:
            text += f": {less:.0f} times less" if less >= 2 else f": {less:.1f} times less"
        if self.sparse == "lazy":
            text += ". sparse='lazy': rows that a batch doesn't touch don't move, which is not what the plain step does"
        seconds = sum(s for _, _, s in self.passes)
        return Text(f"{text}.\nTraced in {self.trace_s * 1e3:.0f} ms, planned in {seconds * 1e3:.0f} ms:")


def explain(step: AnyStep, *args: Any, cluster: ClusterSpec | None = None, **kwargs: Any) -> Explanation:
    """The plan of a step, per parameter, with the reasons.

    Args:
      step: What `parallelize` returned.
      *args, **kwargs: Arguments of a call: arrays or `jax.ShapeDtypeStruct`s. Nothing of the step is run but the
        equations that ids depend on, to measure alpha. Without arguments: the plan in use.
      cluster: Plan for these machines in place of the devices here; a batch is that of all of them. (An argument of
        the step that has this name must be given by its position.)

    Raises:
      ArgumentsError: no arguments, and the step hasn't been called yet.

    Across processes, all of them ask with arguments together; without arguments each may ask for itself.
    """
    require_step(step, "explain")
    if args or kwargs:
        pure, arrays, named = unwrapped(step, args, kwargs, "explain")
        entry = (pure if cluster is None else elsewhere(pure, cluster)).entry(*arrays, **named)
        leaves: Sequence[Any] | None = pure.leaves(arrays, named)
    else:
        latest = step.latest
        if latest is None:
            raise ArgumentsError(f"{step.name} hasn't been called yet: explain(step, state, batch)")
        if cluster is not None:
            raise ArgumentsError("a cluster takes a step's arguments as well: explain(step, state, batch, cluster=...)")
        entry, leaves = latest, latest.example
    return _explain(entry, leaves, step.name, cluster)


def _explain(entry: Entry, leaves: Sequence[Any] | None, name: str, cluster: ClusterSpec | None = None) -> Explanation:
    program, plan = entry.compiled.analysed, entry.compiled.plan
    rows = [_table_row(entry, space, k, leaves) for space in program.rows.spaces for k in space.tables]
    rows += [_dense_row(leaf, plan) for leaf in plan.dense]
    passes = tuple((r.name, r.note, r.seconds) for r in entry.compiled.records)
    updates = any(input_.role == "state" for input_ in program.inputs)
    processes = 1 if entry.devices is None else len(entry.devices.processes.members)
    hosted = hosted_text(entry, leaves, 1 if cluster is not None else jax.local_device_count()) if plan.on_hosts else ""
    facts = (entry.trace_s, plan.sparse, plan.devices, updates, processes, hosted)
    there = () if cluster is None or plan.devices == 1 else (predicted_note(plan_of(entry, name, leaves, cluster)),)
    there += isolated_notes(entry, 1 if cluster is not None else jax.local_device_count())
    if is_undivided(entry):
        there += (f"All devices do the same: {next(note for name, note, _ in passes if name == 'analyze_batch')}.",)
    return Explanation(
        name,
        tuple(rows),
        passes,
        *facts,
        (*memory_notes(entry, cluster), *tensor_notes(plan), *there, *entry.notes),
        plan.pipeline,
        entry.options.tensor,
    )


def _dense_row(leaf: DensePlan, plan: Plan) -> ExplainedLeaf:
    """A dense leaf's row: one in shards is updated on its owner, one that is divided where its products are."""
    size = leaf.nbytes
    action, kept = ("in shards, ps", size // plan.devices) if leaf.sharded else ("as it is", size)
    action, kept = _divided(plan, leaf.path, action, kept)
    return ExplainedLeaf(leaf, size, 0, None, action, 2 * size, 2 * kept, sent=leaf.sent)


def _divided(plan: Plan, path: str, action: str, touched: int) -> tuple[str, int]:
    """How a leaf is updated, and the bytes of that, if it is divided over the devices of a tensor axis."""
    if plan.tensor is None or path not in plan.tensor.axes:
        return action, touched
    return f"tensor, axis {plan.tensor.axes[path]}", touched // plan.tensor.devices


def _table_row(entry: Entry, space: RowSpace, k: int, leaves: Sequence[Any] | None) -> ExplainedLeaf:
    """A table's row; the family's slots, and what is exchanged, are counted with its first table."""
    program, bound, plan = entry.compiled.analysed, entry.compiled.bound, entry.compiled.plan
    devices = plan.devices
    table, first = bound.plan.table(program.inputs[k].path), k == space.tables[0]
    nbytes = program.block.inputs[k].type.nbytes
    slots = [leaf for leaf in space.leaves if leaf not in space.tables] if first else []
    size = nbytes + sum(program.block.inputs[leaf].type.nbytes for leaf in slots)
    is_read = program.inputs[k].role == "table"
    dense = size if is_read else touched_bytes(table_bytes=nbytes, family_bytes=size)
    alpha = batch_alpha(program, space, leaves, devices) if space.accesses else None
    action, planned, deferred = "all rows", dense, ""
    if table.lifted:
        action = "touched rows, lazy" if bound.plan.sparse == "lazy" else "touched rows"
        planned = int(dense * alpha.share) if alpha else dense
    if k in bound.shards:
        action, planned = "all rows, in shards", dense // devices
    action, planned = _divided(plan, table.path, action, planned)
    if table.log_steps:
        action += ", others deferred"
        deferred = f"{format_bytes(_log_bytes(entry, space.family))} for what they missed"
    if table.where == "hosts":
        action += ", ps on hosts"
    elif (table.sent or is_read) and table.lifted:
        action += f", {table.method}"
    row = ExplainedLeaf(table, size, len(slots), alpha, action, dense, planned, deferred)
    if not first:
        return row
    paper = table_3(b=nbytes, n=devices, alpha=alpha.local_share) if table.sent and alpha else {}
    return dataclasses.replace(row, sent=table.sent, seconds=table.seconds, table_3=paper)


def _log_bytes(entry: Entry, family: int) -> int:
    """Bytes of a family's update log: stamps, records, segments."""
    program = entry.compiled.program
    lead = f"update log {family}/"
    pairs = zip(program.inputs, program.block.inputs, strict=True)
    return sum(v.type.nbytes for input_, v in pairs if input_.path.startswith(lead))


def _short(line: str) -> str:
    """A path below the working directory, relative to it."""
    relative = os.path.relpath(line) if line else ""
    return relative if relative and not relative.startswith("..") else line


def _alpha(alpha: Alpha | None) -> str:
    if alpha is None:
        return ""
    mark = "" if alpha.measured else "<= "
    several = alpha.local_rows < alpha.rows
    return f"{mark}{alpha.share:.2%}" + (f" ({alpha.local_share:.2%} each)" if several else "")


def _traffic(row: ExplainedLeaf) -> str:
    if row.planned_bytes == row.dense_bytes:
        return format_bytes(row.dense_bytes)
    return f"{format_bytes(row.dense_bytes)} -> {format_bytes(row.planned_bytes)}"


def _reason(row: ExplainedLeaf, unit: str) -> Text:
    text = Text.assemble(("  " + row.path, "bold"), f": {row.action}: {row.reason}")
    if isinstance(row.plan, TablePlan):
        text.append(f" ({_short(row.plan.line)})" if row.plan.line else "")
        text.append(f". To change it: {row.plan.remedy}" if row.plan.remedy else "")
    if row.sent:
        shown = ", ".join(f"{method} {format_bytes(size)}" for method, size in row.sent.items())
        text.append(f"\n    each {unit} sends in a step: {shown}")
    if row.table_3:
        shown = ", ".join(f"{method} {format_bytes(size)}" for method, size in row.table_3.items())
        text.append(f"\n    transferred by Parallax's table 3: {shown}")
    if row.seconds:
        shown = ", ".join(f"{method} {seconds * 1e3:.2f} ms" for method, seconds in row.seconds.items())
        text.append(f"\n    exchanges and updates are predicted to take: {shown}")
    return text
