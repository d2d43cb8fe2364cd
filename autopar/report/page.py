"""`Report`: figures and tables of a plan, shown in notebooks and written as one page or as images."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import ArgumentsError
from autopar.report.tables import TableRow

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


class Parts:
    """Collects what a report is put together from."""

    def __init__(self) -> None:
        self.figures: dict[str, ReportFigure] = {}
        self.captions: dict[str, str] = {}
        self.tables: dict[str, Sequence[TableRow]] = {}
        self.notes: list[str] = []

    def draw(self, name: str, caption: str, figure: ReportFigure) -> None:
        """Adds a figure."""
        self.figures[name], self.captions[name] = figure, caption

    def report(self, title: str) -> Report:
        """Returns the report."""
        return Report(title, self.figures, self.captions, self.tables, tuple(self.notes))


@dataclass(frozen=True, slots=True)
class Report:
    """Holds what `report` made.

    Attributes:
      title: Of which step, on what.
      figures: Name -> figure of matplotlib, which notebooks show; as wide as a column of a paper: 3.5 inches (with
        three panels 5.25).
      captions: Name of a figure -> what it shows, in words.
      tables: Name -> rows; a row is column -> value. `pandas.DataFrame(rows)` takes them.
      notes: What is left out, and why; of a step with `sync=` also what `explain` says of its clients.
    """

    title: str
    figures: Mapping[str, ReportFigure]
    captions: Mapping[str, str]
    tables: Mapping[str, Sequence[TableRow]]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Report of {self.title}: figures {', '.join(self.figures) or 'none'}; tables {', '.join(self.tables)}>"

    def _repr_html_(self) -> str:
        """Returns figures, then tables; nothing in it is loaded from elsewhere."""
        lines = [f"<style>{_STYLE}</style>", '<div class="autopar-report">', f"<h2>{escape(self.title)}</h2>"]
        lines += [f"<p>{escape(note)}</p>" for note in self.notes]
        lines += [_figure(figure, self.captions[name]) for name, figure in self.figures.items()]
        lines += [_table(name, rows) for name, rows in self.tables.items() if rows]
        return "\n".join([*lines, "</div>"])

    def save_html(self, path: str | Path) -> None:
        """Writes one page that holds all of it.

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
        """Writes each figure to a file of its name in a folder, which is made if need be.

        Returns:
          The files.

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
