"""`Leaving`: Ctrl-C and SIGTERM wait until a training comes to a place where its state can be saved.

The handlers here only note a signal. The training asks for it after each step, where the state is whole, and all
processes are told of what any of them was sent. Where JAX's preemption service listens to SIGTERM it is asked instead.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from autopar import jax_compat
from autopar.batches.loops import telling
from autopar.interrupts import SAY_S, SECOND_S, Handler, Note
from autopar.launch.faults import Hooks
from autopar.launch.group import Group

#: Signals, and the handlers that they have where nobody set one.
_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
#: How often this process has asked JAX's preemption service. A process that was sent SIGTERM before it asked at all
#: leaves at the first time, whatever the number of the step is that a training goes on behind.
_ASKED = itertools.count(1)


class Leaving:
    """Holds signals back while it is entered, where Python's own handlers would answer them.

    Args:
      group: All processes.
      seldom: As for `telling`.
    """

    def __init__(self, group: Group, *, seldom: bool = False) -> None:
        self._tell = telling(group, seldom=seldom)
        self._before: dict[int, Any] = {}
        #: Signals, and when the first one came, by `time.monotonic()`.
        self._noted: dict[int, float] = {}

    def enter(self) -> None:
        """Take the place of Python's own handlers, in the main thread: no other one gets signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, default in _DEFAULTS.items():
            handler = signal.getsignal(number)
            found = handler.previous if isinstance(handler, Handler) else handler
            if number == signal.SIGTERM and jax_compat.listens_for_preemption():
                continue
            if found is default or Hooks.have_set(found):
                self._before[number] = handler
                signal.signal(number, Note(self._note))

    def exit(self, *, answers: bool) -> None:
        """Give the signals back to the handlers before.

        Args:
          answers: Whether to leave by a signal that came behind the last step.
        """
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        noted = next(iter(self._noted), None)
        self._noted.clear()
        if answers and noted is not None:
            self._leave(noted)

    def answer(self, save: Callable[[], None]) -> None:
        """Save and leave, if any process is asked to. Collective: all are at the same step."""
        told = self._tell(tuple(self._noted))
        if not told and not jax_compat.reached_preemption(next(_ASKED)):
            return
        save()
        self._leave(told[0] if told else signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._noted:
            self._noted[number] = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(self._say, (number,))  # `threading` has locks, which the code here may hold
        elif time.monotonic() - self._noted[number] >= SECOND_S:  # whatever is lost
            self._leave(number)

    def _say(self, number: int) -> None:
        """In a thread: say that a signal waits."""
        time.sleep(SAY_S)
        if number in self._noted:
            name = signal.Signals(number).name
            sys.stderr.write(f"autopar: {name} waits for checkpoints.step(state). A second one goes through at once\n")

    def _leave(self, number: int) -> NoReturn:
        """End as by a signal: by a KeyboardInterrupt, or with the exit code that shells give it."""
        self._noted.clear()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)
