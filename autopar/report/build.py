"""`report`: figures, tables and notes on a plan, shown in notebooks, and written as one page or as images."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.measure.cluster import require_cluster
from autopar.planning.replay import Staleness
from autopar.report.tables import Measured, TableRow, parameter_rows, switch_rows, timings
from autopar.servers.timeline import Timeline

if TYPE_CHECKING:
    from autopar.report.style import ReportFigure

_STYLE = """
.autopar-report { font-family: sans-serif; font-size: 14px; max-width: 62em; }
.autopar-report figure { display: inline-block; vertical-align: top; margin: 1em 1.5em 1em 0; max-width: 28em; }
.autopar-report figcaption { font-size: 13px; }
.autopar-report img { max-width: 100%; }
.autopar-report table { border-collapse: collapse; margin: 0.5em 0 1.5em; }
.autopar-report th, .autopar-report td { padding: 0.15em 0.8em 0.15em 0; text-align: left; }
.autopar-report th { border-bottom: 1px solid #bbb; font-weight: 600; }
.autopar-report td.number { text-align: right; font-variant-numeric: tabular-nums; }
""".strip()


def report(
    plan: Plan,
    *,
    cluster: ClusterSpec | None = None,
    measured: Measured | None = None,
    table: str | None = None,
    staleness: Staleness | None = None,
    timeline: Timeline | None = None,
) -> Report:
    """Draws a plan: bytes by method, times of a step, and what limits it on more devices.

    Figures, as far as the plan has the figures for them (`Report.notes` says what is left out, and why):

    - updates: on one device, the memory that updates read and write, in a plain step and by the plan.
    - bytes_by_alpha, bytes_by_devices: bytes that a device sends in a step by each method, and where another sends
      least.
    - table_3: Parallax's table 3 beside that, for the methods of which it says something else.
    - parts, methods: predicted time of a step by part, and of its work on the table by method.
    - speedup: simulated on 1 to 10,000 devices, with what takes most of a step.
    - measured: predicted against measured times.
    - For a pipeline, schedule and devices: each device's tasks in time, and how long it computes and waits. For an
      asynchronous one also staleness: the distance of stale weights, and of predicted ones, to those that they stand
      for.
    - For a step with `sync=`, stragglers: simulated minibatches if one client is slower, by this way and others; steps:
      the time of a step by gradients, update, and communication, hidden or waited for. With `timeline`, staleness:
      pushes by their staleness at servers; workers: the minibatches of each. `Report.notes` has what `explain` says of
      clients.

    Args:
      plan: A plan of `autopar.plan`.
      cluster: The kind of devices to simulate; by default the plan's.
      measured: Times of steps in seconds: label -> (predicted, measured), or (label, predicted, measured) of each.
      table: Path of the table for the figures; by default the one with the most bytes.
      staleness: The result of `autopar.staleness`.
      timeline: Events of servers, or of a ring's clients: `autopar.timeline(state)`, or of a simulation.

    Raises:
      ArgumentsError: matplotlib isn't installed; `plan` is none; there is no such table, or its sizes aren't known;
        `measured` has another form; or `timeline` isn't of such a plan's clients.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> table, ids = jax.ShapeDtypeStruct((1_000_000, 64), "float32"), jax.ShapeDtypeStruct((6144,), "int32")
      >>> plan = autopar.plan(step, table, ids, cluster=autopar.Cluster.named("parallax-8x6"))
      >>> list(autopar.report(plan).figures)
      ['bytes_by_alpha', 'bytes_by_devices', 'table_3', 'parts', 'methods', 'speedup']
    """
    try:
        from autopar.report import clients, devices  # they draw
    except ImportError as error:
        raise ArgumentsError(
            f"reports need matplotlib, which can't be imported ({error}): pip install 'autopar[report]'"
        ) from error
    made = Parts()
    if not isinstance(plan, Plan):
        raise ArgumentsError("report takes a plan: report(autopar.plan(step, state, batch, cluster=...))")
    times = () if measured is None else timings(measured)
    cluster = plan.cluster if cluster is None else require_cluster(cluster)
    if timeline is not None:
        _check_timeline(plan, timeline)
    made.tables["parameters"] = parameter_rows(plan)
    if plan.optimize != "all":
        made.notes.append(f"optimize= is {plan.optimize!r}; the table of optimisations has what is left out.")
        made.tables["optimisations"] = switch_rows(plan)
    if plan.pipeline is not None:
        title = devices.add_stages(made, plan.pipeline, staleness)
    elif plan.clients_plan is not None:
        title = clients.add_clients(made, plan, cluster, timeline)
    else:
        title = devices.add_devices(made, plan, cluster, table)
    if times:
        devices.add_measured(made, times)
    return made.report(f"{plan.step} {title}")


def _check_timeline(plan: Plan, timeline: Timeline) -> None:
    """Checks that a timeline can be shown beside a plan, or raises ArgumentsError."""
    is_ring = plan.sync is not None and plan.sync.asks_neighbors
    has_servers = plan.served is not None or (plan.sync is not None and plan.sync.servers > 0)
    if not isinstance(timeline, Timeline):
        raise ArgumentsError(f"timeline is a {type(timeline).__name__}; give what servers did, autopar.timeline(state)")
    if not has_servers and not is_ring:
        raise ArgumentsError(
            f"timeline= is what servers did, and {plan.name} has none: leave it out, or plan the step with "
            "sync=autopar.sync.Async(...), Elastic(...) or ADPSGD()"
        )
    if timeline.ring != is_ring:
        done, by = ("a ring", "servers") if timeline.ring else ("servers", "a ring")
        raise ArgumentsError(f"the timeline is of {done}, and {plan.name} trains by {by}: give that of its own state")


class Parts:
    """Collects the parts of a report."""

    def __init__(self) -> None:
        self.figures: dict[str, ReportFigure] = {}
        self.captions: dict[str, str] = {}
        self.tables: dict[str, Sequence[TableRow]] = {}
        self.notes: list[str] = []

    def draw(self, name: str, caption: str, figure: ReportFigure) -> None:
        self.figures[name], self.captions[name] = figure, caption

    def report(self, title: str) -> Report:
        return Report(title, self.figures, self.captions, self.tables, tuple(self.notes))


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `report`.

    Attributes:
      title: The step, and what it runs on.
      figures: Name -> figure of matplotlib, which notebooks show; 3.5 inches wide, as a column of a paper (with three
        panels 5.25).
      captions: Name of a figure -> caption.
      tables: Name -> rows; a row is column -> value. `pandas.DataFrame(rows)` takes them.
      notes: What is left out, and why; with `sync=` also what `explain` says of clients.
    """

    title: str
    figures: Mapping[str, ReportFigure]
    captions: Mapping[str, str]
    tables: Mapping[str, Sequence[TableRow]]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Report of {self.title}: figures {', '.join(self.figures) or 'none'}; tables {', '.join(self.tables)}>"

    def _repr_html_(self) -> str:
        # Figures, then tables; nothing in it is loaded from elsewhere.
        lines = [f"<style>{_STYLE}</style>", '<div class="autopar-report">', f"<h2>{escape(self.title)}</h2>"]
        lines += [f"<p>{escape(note)}</p>" for note in self.notes]
        lines += [_figure(figure, self.captions[name]) for name, figure in self.figures.items()]
        lines += [_table(name, rows) for name, rows in self.tables.items() if rows]
        return "\n".join([*lines, "</div>"])

    def save_html(self, path: str | Path) -> None:
        """Writes one page with everything.

        Raises:
          ArgumentsError: the file can't be written.
        """
        head = (
            f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(self.title)}</title></head>'
        )
        page = f"{head}\n<body>\n{self._repr_html_()}\n</body>\n</html>\n"
        try:
            Path(path).write_text(page, encoding="utf-8")
        except OSError as error:
            raise ArgumentsError(f"{path}: the report can't be written: {error.strerror}") from error

    def save_png(self, folder: str | Path) -> list[Path]:
        """Writes each figure to a file of its name in a folder, made if necessary; returns the files.

        Raises:
          ArgumentsError: they can't be written.
        """
        written = []
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, figure in self.figures.items():
                written.append(Path(folder) / f"{name}.png")
                written[-1].write_bytes(figure.png())
        except OSError as error:
            raise ArgumentsError(f"{folder}: the figures can't be written: {error.strerror}") from error
        return written


def _figure(figure: ReportFigure, caption: str) -> str:
    data = base64.b64encode(figure.png()).decode("ascii")
    image = f'<img width="{figure.shown_width}" alt="{escape(caption)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(name: str, rows: Sequence[TableRow]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    body = "\n".join(f"<tr>{''.join(_cell(value) for value in row.values())}</tr>" for row in rows)
    return f"<h3>{escape(name.replace('_', ' '))}</h3>\n<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _cell(value: str | int | float) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f'<td class="number">{text}</td>'
