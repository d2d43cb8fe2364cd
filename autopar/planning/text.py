"""Tables and paragraphs as wide as the terminal, and many paths under few names.

Long texts are wrapped, never cut. A name such as `params/layer_{0..11}/kernel` leaves no path out.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

#: Places where a path, and a list in words, may be wrapped.
PATH, LIST = r"(?<=[/ ])", r"(?<=, )"
#: A free-standing number with its unit; no part of a name, a path or a line in a file.
_NUMBER = re.compile(r"(?<![\w./:{}-])\d+(?:\.\d+)?(?:%| (?:[KMG]i)?B\b)?(?!\w|/|\.\w)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
#: Spaces between two columns.
_GAP = 2
#: The width down to which columns that can be wrapped are narrowed, whatever their longest part is.
_NARROW = 12


@dataclass(frozen=True)
class Paragraph:
    """A text whose continuation lines are indented by two more than its first line."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = len(self.text.plain) - len(self.text.plain.lstrip(" "))
        lines = self.text[indent:].wrap(console, options.max_width - indent - 2, overflow="fold")
        for k, line in enumerate(lines):
            yield Text(" " * (indent + 2 * (k > 0))).append_text(line)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "left"
    breaks: str = ""  #: A regular expression that matches where cells may be wrapped; "": nowhere.
    optional: bool = False  #: Whether the column is left out of a table that is too wide.

    @property
    def roomy(self) -> int:
        """The width with its title, and each cell, in one line."""
        return max(cell_len(self.title), self.natural)

    @property
    def natural(self) -> int:
        """The width with each cell in one line."""
        return max(map(cell_len, [*self.title.split(), *self.cells]), default=0)

    @property
    def least(self) -> int:
        """The width with cells wrapped wherever `breaks` allows."""
        pieces = [piece.rstrip() for cell in self.cells for piece in self._pieces(cell)]
        return max(map(cell_len, [*self.title.split(), *pieces]), default=0)

    @property
    def narrow(self) -> int:
        """The width with overlong parts of cells broken as well."""
        return min(self.least, max(_NARROW, *map(cell_len, self.title.split()))) if self.breaks else self.least

    def _pieces(self, cell: str) -> Sequence[str]:
        return re.split(self.breaks, cell) if self.breaks else [cell]

    def wrapped(self, k: int, width: int) -> str:
        """Returns the cell of a row, in lines of this width as far as it can be wrapped."""
        lines = [""]
        for piece in self._pieces(self.cells[k]):
            if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class Columns:
    """A table with a line for each row, if that fits.

    If it doesn't, optional columns are left out, the last one first. Then titles are wrapped, and then cells, both from
    the last column on. Columns without room make a table of their own below, with the first column.
    """

    columns: Sequence[Column]
    styles: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, width = list(self.columns), options.max_width
        while _total(c.natural for c in columns) > width and any(c.optional for c in columns):
            columns.remove([c for c in columns if c.optional][-1])
        widths = [c.roomy for c in columns]
        for least in zip(*((c.natural, c.least, c.narrow) for c in columns), strict=True):
            for k in reversed(range(len(columns))):
                widths[k] = max(least[k], widths[k] - max(0, _total(widths) - width))
        fit = max(2, *[k for k in range(len(columns) + 1) if _total(widths[:k]) <= width])
        yield self._table(columns[:fit], widths)
        if columns[fit:]:
            yield ""
            yield Columns([columns[0], *columns[fit:]], self.styles)

    def _table(self, columns: Sequence[Column], widths: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        for column, size in zip(columns, widths, strict=False):
            table.add_column(column.title, justify=column.justify, width=size, overflow="fold")
        for k in range(len(columns[0].cells)):
            cells = (Text(column.wrapped(k, size)) for column, size in zip(columns, widths, strict=False))
            table.add_row(*cells, style=self.styles[k] if self.styles else "")
        return table


def _total(widths: Iterable[int]) -> int:
    sizes = list(widths)
    return sum(sizes) + _GAP * (len(sizes) - 1)


def without_numbers(text: str) -> str:
    """Returns a text with "#" in place of numbers."""
    return _NUMBER.sub("#", text)


def ranged(texts: Sequence[str]) -> str:
    """Returns one text for several that differ in numbers alone: "3 rows" and "40 rows" are "3 to 40 rows"."""
    numbers = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ranges = (sorted(dict.fromkeys(each), key=_size) for each in numbers)
    return _NUMBER.sub(lambda _: " to ".join(dict.fromkeys([(r := next(ranges))[0], r[-1]])), texts[0])


def _size(number: str) -> float:
    figure, _, unit = number.rstrip("%").partition(" ")
    return float(figure) * _UNITS.get(unit, 1)


def print_as(what: RenderableType, kind: Literal["text", "html"]) -> str:
    """Returns it as wide as the terminal is, or as COLUMNS says; 80 columns if neither is known."""
    width, file = shutil.get_terminal_size().columns, io.StringIO()
    # In a notebook rich would otherwise display the output instead of writing it to the file.
    console = Console(file=file, record=kind == "html", width=width, color_system=None, force_jupyter=False)
    console.print(what)
    if kind == "html":
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


#: Name -> the paths that it stands for.
Folded = Mapping[str, tuple[str, ...]]


def fold_paths(decided: Mapping[str, Hashable], lines: int, others: Collection[str] = ()) -> Folded:
    """Returns the finest folding into at most `lines` names, or the coarsest one.

    Paths with different decisions never share a name. A name stands for all given paths that it matches, and matches
    none of `others`.
    """
    if len(decided) <= lines:
        return {path: (path,) for path in decided}
    foldings = [_fold_at(decided, depth, others) for depth in range(max(path.count("/") for path in decided) + 2)]
    return next((folded for folded in reversed(foldings) if len(folded) <= lines), foldings[0])


def _fold_at(decided: Mapping[str, Hashable], depth: int, others: Collection[str]) -> Folded:
    """Cuts paths after `depth` parts, or further down where the decisions below a part differ."""
    below: dict[str, set[Hashable]] = {}
    for path, decision in [*dict.fromkeys(others).items(), *decided.items()]:
        for prefix in _prefixes(path):
            below.setdefault(prefix, set()).add(decision)
    cut: dict[str, list[str]] = {}
    for path in decided:
        prefixes = _prefixes(path)
        start = min(depth, len(prefixes) - 1)
        cut.setdefault(next(prefix for prefix in prefixes[start:] if len(below[prefix]) == 1), []).append(path)
    names = {_name(prefix, paths): paths for prefix, paths in cut.items()}
    folded: dict[str, tuple[str, ...]] = {}
    for decision in dict.fromkeys(decided.values()):
        among = [name for name, paths in names.items() if decided[paths[0]] == decision]
        folded |= {
            name: tuple(p for each in merged for p in names[each]) for name, merged in fold_numbers(among).items()
        }
    return folded


def _prefixes(path: str) -> Sequence[str]:
    parts = path.split("/")
    return ["/".join(parts[:k]) for k in range(len(parts) + 1)]


def _name(prefix: str, paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    return f"{prefix}/**" if prefix else "**"


def fold_numbers(names: Iterable[str]) -> Folded:
    """Folds names that differ in a number: `layer_{0..11}/kernel`. Each set of numbers is written in full."""
    rows = {tuple(re.split(r"(\d+)", name)): (name,) for name in names}
    for k in range(1, max(map(len, rows), default=0), 2):
        groups: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
        for words, merged in rows.items():
            number = words[k] if k < len(words) else ""
            groups.setdefault((*words[:k], "", *words[k + 1 :]), {})[number] = merged
        rows = {
            (*words[:k], _numbers(list(group)), *words[k + 1 :]): tuple(n for m in group.values() for n in m)
            for words, group in groups.items()
        }
    return {"".join(words): merged for words, merged in rows.items()}


def _numbers(numbers: Sequence[str]) -> str:
    """Writes numbers as a shell would: 3, {0,2}, {0..11}, {0..3,5}."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda number: (int(number), number)):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs) + "}"
