"""What the demo shows while it trains: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[[int, float, float], None]  # step, words per second, loss


class Screen:
    """Where the demo writes. `print` may be called while a bar is shown: the text then goes above it.

    Of several processes that do the same, one shows it.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.shown = shown
        self.console = Console(quiet=not shown)

    def print(self, thing: object = "") -> None:
        if not self.shown:
            return
        if not self.console.is_terminal:
            print(thing, flush=True)  # a log's lines are not to be wrapped at 80 columns
        elif hasattr(thing, "__rich__") or hasattr(thing, "__rich_console__"):
            self.console.print(thing)
        else:
            self.console.print(str(thing), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, steps: int) -> Iterator[Update]:
        """Gives the function to call now and then with the step, the words per second and the loss."""
        if not self.console.is_terminal:
            yield self._line_now_and_then(steps)
            return
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as bar:
            task = bar.add_task("", total=steps, measured="compiling ...")
            yield lambda step, speed, loss: bar.update(task, completed=step, measured=_measured(speed, loss))

    def _line_now_and_then(self, steps: int) -> Update:
        due = 0

        def update(step: int, speed: float, loss: float) -> None:
            nonlocal due
            if step >= due:
                due = step + max(1, steps // 10)
                self.print(f"step {step:>6} of {steps}   {_measured(speed, loss)}")

        return update


def _measured(speed: float, loss: float) -> str:
    return f"{speed:>8,.0f} words/s   loss {loss:.3f}"
