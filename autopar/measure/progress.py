"""A line that says what is being measured, why, and that it is kept: with a bar on a terminal, else plain and once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

#: Says what is measured next.
Advance = Callable[[str], None]


@contextlib.contextmanager
def measuring(what: str, why: str, parts: int, kept: str, *, shown: bool = True) -> Iterator[Advance]:
    """Show that something is measured, for as long as the block runs, which calls what it is given `parts` times.

    `kept`: where the figures are kept; empty: nowhere. `shown`: whether this process is the one that says so.
    """
    console = Console(stderr=True)
    line = f"autopar: measuring {what}, {why}" + (f"; kept in {kept}" if kept else "")
    if not shown:
        yield lambda part: None
    elif not console.is_terminal:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
        yield lambda part: None
    else:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # takes long, and is rarely needed

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            console.print(line, highlight=False, markup=False)
            task = bar.add_task("starting", total=parts)
            yield lambda part: bar.update(task, advance=1, description=part)
