"""What is said of work that takes long; nothing waits here for more than what it waits for."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from rich.logging import RichHandler

import autopar
from autopar.launch import notices
from autopar.launch.notices import noticing, tell
from autopar.measure.figures import measuring
from autopar.run.planned_step import OneDeviceRunner

FOREVER = 3600.0


class Terminal(io.StringIO):
    """A stderr whose lines can be taken back."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        """What is seen in its only line."""
        screen = ""
        for text in self.getvalue().split("\r"):
            screen = text + screen[len(text) :]
        return screen.rstrip()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is shown by itself."""
    monkeypatch.setattr(notices, "AFTER_S", FOREVER)


@pytest.fixture
def terminal(environment: Callable[..., None]) -> Terminal:
    """One that `redirect_stderr` puts in place."""
    environment(TERM="xterm", COLUMNS="60")
    return Terminal()


@contextlib.contextmanager
def handling(logger: logging.Logger, *handlers: logging.Handler) -> Iterator[None]:
    """Within it, the logger has these handlers."""
    before = logger.handlers[:]
    logger.handlers[:] = handlers
    try:
        yield
    finally:
        logger.handlers[:] = before


def train_step(table: jax.Array, ids: jax.Array) -> Any:
    loss, grad = jax.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))(table)
    return table - 0.1 * grad, loss


def none_is_left() -> bool:
    for thread in threading.enumerate():
        if thread.name == "autopar notice":
            thread.join()
    return not notices._open


def test_a_quick_call_says_nothing(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    autopar.parallelize(train_step)(jnp.ones((8, 2)), np.arange(3))
    assert caplog.messages == [] and capsys.readouterr() == ("", "") and none_is_left()


def test_a_slow_call_says_what_it_does(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing, and the first call of what it is run by, wait until it is said; the second call says nothing."""
    said = {what: threading.Event() for what in ("tracing", "compiling")}

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.get(record.getMessage().split(": ")[-1], threading.Event()).set()

    def slow_step(table: jax.Array, ids: jax.Array) -> Any:
        assert said["tracing"].wait(FOREVER)
        return train_step(table, ids)

    call = OneDeviceRunner.__call__

    def slow_call(self: OneDeviceRunner, leaves: Any) -> Any:
        assert said["compiling"].wait(FOREVER)
        return call(self, leaves)

    monkeypatch.setattr(notices, "AFTER_S", 0.0)
    monkeypatch.setattr(OneDeviceRunner, "__call__", slow_call)
    handler = Hears()
    logging.getLogger().addHandler(handler)
    try:
        planned = autopar.parallelize(slow_step)
        table, _ = planned(jnp.ones((8, 2)), np.arange(3))
        caplog.clear()
        planned(table, np.arange(3))
    finally:
        logging.getLogger().removeHandler(handler)
    assert caplog.messages == [] and none_is_left()


def test_each_phase_is_a_line_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with noticing("train_step", "tracing") as notice:
        notice.show()
        notice.show()
        tell("compiling", parts=3, done=1)
        notice.show()
        tell("compiling", parts=3, done=2)
        notice.show()
    notice.show()
    tell("nobody's")
    assert caplog.messages == ["train_step: tracing", "train_step: compiling"] and none_is_left()


def test_a_terminal_has_one_line_that_goes(
    caplog: pytest.LogCaptureFixture, terminal: Terminal, environment: Callable[..., None]
) -> None:
    with contextlib.redirect_stderr(terminal), noticing("train_step", "tracing with a rather long name") as notice:
        notice.show()
        assert re.fullmatch(r"autopar: train_step: tracing with a rather long name, \d+ s", terminal.shown)
        tell("compiling", parts=4, done=1)
        for columns, shown in (("80", r" \[#####\.{15}\] 1 of 4, \d+ s"), ("60", r" 1 of 4, \d+ s"), ("31", "")):
            environment(COLUMNS=columns)
            notice.show()
            assert re.fullmatch("autopar: train_step: compiling" + shown, terminal.shown), terminal.shown
    assert terminal.shown == "" and "\n" not in terminal.getvalue() and caplog.messages == []


def test_only_the_innermost_block_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    with noticing("step", "planning") as outer:
        with noticing("another", "compiling") as inner:
            outer.show()
            inner.show()
        outer.show()
    assert caplog.messages == ["another: compiling", "step: planning"]


def test_what_is_known_to_take_long_is_said_at_once(
    caplog: pytest.LogCaptureFixture, terminal: Terminal, environment: Callable[..., None]
) -> None:
    environment(COLUMNS="100")
    home = Path.home()
    with contextlib.redirect_stderr(terminal), measuring("links", "for plans", 2, home / "a file") as advance:
        assert caplog.messages == ["measuring links, for plans; kept in ~/a file"]
        advance("between devices")
        notices._open[-1].show()
        assert "measuring links: between devices [....................] 0 of 2" in terminal.shown
        advance("between ranks")
        notices._open[-1].show()
        assert "[##########..........] 1 of 2" in terminal.shown


def test_parts_of_what_was_said_at_once_are_no_lines_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with noticing("measuring", at_once="measuring links"), noticing("_step", "compiling") as inner:
        inner.show()
    assert caplog.messages == ["measuring links"]


def test_of_several_processes_the_first_one_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with noticing("step", "compiling", at_once="said") as notice:
        tell("planning")
        assert notice not in notices._open
    assert caplog.messages == []


@pytest.mark.parametrize("live", [True, False])
def test_logging_silences_it(
    live: bool, caplog: pytest.LogCaptureFixture, terminal: Terminal, environment: Callable[..., None]
) -> None:
    environment(TERM="xterm" if live else "dumb")
    caplog.set_level(logging.WARNING, logger="autopar")
    with contextlib.redirect_stderr(terminal), noticing("step", "compiling", at_once="at once") as notice:
        notice.show()
    assert caplog.messages == [] and terminal.getvalue() == ""


def console_of_absl() -> logging.Handler:
    handler = absl.logging.ABSLHandler(absl.logging.PythonFormatter())
    handler.python_handler.stream = sys.stderr
    return handler


CONSOLES: dict[str, Callable[[], list[logging.Handler]]] = {
    "no handlers": list,
    "basicConfig": lambda: [logging.StreamHandler()],
    "stdout": lambda: [logging.StreamHandler(sys.stdout)],
    "absl": lambda: [console_of_absl()],
    "rich": lambda: [RichHandler(console=Console(file=sys.stderr))],
}


@pytest.mark.parametrize("name", CONSOLES)
def test_stderr_has_it_once_whoever_configured_the_root_logger(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = io.StringIO()
    with (
        handling(notices.LOG, *notices.LOG.handlers[:1]),  # without pytest's
        handling(logging.getLogger(), *CONSOLES[name](), logging.StreamHandler(log)),
        noticing("step", "compiling") as notice,
    ):
        notice.show()
    assert capsys.readouterr() == ("", "autopar: step: compiling\n") and log.getvalue() == "step: compiling\n"


def test_a_handler_of_the_users_has_it_in_place_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    mine, root = io.StringIO(), io.StringIO()
    with (
        handling(notices.LOG, *notices.LOG.handlers, logging.StreamHandler(mine)),
        handling(logging.getLogger(), logging.StreamHandler(root)),
        noticing("step", "compiling") as notice,
    ):
        notice.show()
    assert capsys.readouterr() == ("", "") and mine.getvalue() == root.getvalue() == "step: compiling\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_ends_it(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(error), noticing("step", "compiling") as notice:
        raise error
    notice.show()
    assert caplog.messages == [] and none_is_left()


def test_a_process_that_can_start_no_thread_works_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with noticing("step", "compiling"):
        done = True
    assert done and not notices._open


def test_a_closed_stderr_ends_it_in_silence(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), noticing("step", "compiling") as notice:
        terminal.close()
        notice.wait(0.0)
    assert none_is_left()
