"""Interrupts (Ctrl-C, and other signals that have a Python handler), and the state that a step updates in place.

Once a step is dispatched the old state is gone, and until the caller has assigned the step's results nobody has the new
one: a KeyboardInterrupt in between loses the training. An `uninterrupted` call therefore holds signals back. They are
answered when the next such call begins, or a moment after the call, whichever comes first. A second one goes through at
once, whatever is lost: the call may be waiting for a process that is gone.

A loop over batches has more to lose: the source moves on with each batch, the state with each step, and a checkpoint
needs both at the same batch. A `Loop` holds signals back while its body runs, and answers them before it asks for the
next batch. Of several open loops only the outermost one does.

How: from the first such call on, the signals' handlers are wrapped by ours, which stay, because the last moment (the
call has returned, and its caller hasn't stored the results yet) comes after all of our code. Python answers signals
between two instructions, and there is one such point between the call's return and the assignment. A signal that is
first seen outside of a call is therefore answered at the next one: a thread sends it once more, a millisecond later.
In a call, or in the frame that is just leaving it, that thread goes on trying. (Without that thread 12 of 3,605
interruptions from another process lost the state of a small step; with it none of 8,083 did.)

Invariants: only the main thread, where Python answers signals, ever holds or answers one; a held signal is answered
once; a user's handler is never replaced, but called by ours, and one that is set later is wrapped by the next call.
Signals without a Python handler (SIGTERM, as a rule) are left alone, and so are those of an asyncio loop, which is told
of each signal by other means.
"""

from __future__ import annotations

# signal.getsignal takes 3 us to find that a function is no signal.Handlers.
import _signal  # pyright: ignore[reportMissingImports]
import _thread
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from autopar.errors import users_line

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Signals that are held back if they have a Python handler.
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))

#: Seconds until a held signal is sent again, at first and at most.
PAUSE_S, LONGEST_PAUSE_S = 1e-3, 0.5

#: Seconds after which a signal counts as a second one; earlier it may be the same, from a launcher and a terminal.
SECOND_S = 0.2

#: Seconds by which a signal may come later to this rank than to another one that has told of it.
LATE_S = 1.0

#: Seconds until the user is told that a signal waits for the end of a loop's body.
SAY_S = 1.0
_WAITS = "waits until the loop at {} asks for its next batch. A second one goes through at once"
_CUT = "cuts the loop at {} short: its position may be one batch ahead of the state"


class Handler:
    """Holds a signal back, or calls the handler before."""

    def __init__(self, interrupts: Interrupts, previous: Callable[[int, FrameType | None], Any]) -> None:
        self._interrupts = interrupts
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A handler of the user's that was set since, and calls this one, is answered: it is called once a signal.
        if _signal.getsignal(number) is self and self._interrupts.holds(number, frame):
            return
        self._interrupts.answer(number, frame, self.previous)


@dataclass(frozen=True)
class Note:
    """A handler that only notes a signal, for a caller that asks after a step: it is never held back."""

    write: Callable[[int, FrameType | None], None]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        INTERRUPTS.received_s = time.monotonic()
        self.write(number, frame)


class Interrupts:
    """The signals of this process. There is one, as handlers are the process's.

    Attributes:
      received_s: `time.monotonic()` when Python last handled a signal, if only to hold it back.
      depth: Number of nested calls under way that aren't to be interrupted.
      open_at: The depth at which signals are answered: 0, or that of a call that lets them through.
      main: The main thread.
      bodies: Bodies of open loops. Signals wait for the end of the first one.
    """

    def __init__(self) -> None:
        self.received_s = float("-inf")
        self.depth = 0
        self.open_at = 0
        self.bodies: list[Body] = []
        #: Held signals -> `time.monotonic()` since when.
        self._held: dict[int, float] = {}
        #: Held signals that were sent again, and not seen since.
        self._sent: set[int] = set()
        #: Whoever sends a held signal again has this meanwhile.
        self._sending = _thread.RLock()
        #: Held signals that were last seen outside of a call.
        self._outside: set[int] = set()
        #: Signals that another rank had first -> `time.monotonic()`.
        self._from_others: dict[int, float] = {}
        self._answering = False
        #: Handlers when a call last began. While they stay the same and no signal is held, a call has nothing to do.
        self._prepared: list[Any] = []
        self.main = threading.main_thread().ident

    def forget(self) -> None:
        """Begins anew in a forked child, which has no loop under way, and another main thread."""
        self.bodies.clear()
        self.main = threading.main_thread().ident
        self._sending = _thread.RLock()  # a thread that isn't there may have it

    @property
    def holding(self) -> bool:
        """Says whether signals wait for the end of a call or of a loop's body."""
        return self.depth != self.open_at or bool(self.bodies)

    def begin(self) -> None:
        """Begins a call that isn't to be interrupted: answers held signals, then holds all."""
        if self.depth == 0:
            self.open_at = 0
            if self._held or [*map(_signal.getsignal, SIGNALS)] != self._prepared:
                for number in SIGNALS:
                    self._prepare(number)
                self._prepared = [*map(_signal.getsignal, SIGNALS)]
        self.depth += 1
        self._outside.clear()

    def let_through(self, depth: int) -> None:
        """Answers signals at this depth from now on."""
        self.open_at = depth
        self._outside.clear()

    def end_body(self, body: Body, tell: Tell) -> None:
        """Ends the body of a loop (or begins its first one): answers held signals, on all ranks alike."""
        if body not in self.bodies:
            self.bodies.append(body)
        for number in SIGNALS:
            self._prepare(number)
        if self.bodies[0] is not body or self.depth:
            return
        mine = tuple(self._held)
        numbers = tell(mine)
        self._from_others.update({number: time.monotonic() for number in numbers if number not in mine})
        self.answer_all(numbers)

    def leave(self, body: Body) -> None:
        """Notes that a loop ends, or is left."""
        if body in self.bodies:
            self.bodies.remove(body)

    def answer_held(self) -> None:
        """Answers held signals here, unless a loop's body runs."""
        if not self.bodies:
            self.answer_all(tuple(self._held))

    def answer_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            handler = _signal.getsignal(number)
            if isinstance(handler, Handler):
                self.answer(number, sys._getframe(1), handler.previous)

    def holds(self, number: int, frame: FrameType | None) -> bool:
        """Says whether an arriving signal is to wait, or has been answered already."""
        self.received_s = now_s = time.monotonic()
        was_sent, was_held = number in self._sent, number in self._held
        self._sent.discard(number)
        if self._answering:  # A handler of the user's that calls one of ours.
            return False
        if was_sent and not was_held:  # It was answered in the meantime.
            return True
        if now_s - self._from_others.pop(number, float("-inf")) < LATE_S:  # It was answered when another rank had it.
            return True
        if self.holding or (frame is not None and frame.f_code in _LEAVING):
            self._outside.discard(number)
            is_second = not was_sent and now_s - self._held.get(number, now_s) >= SECOND_S
            if not (is_second and self.holding):
                return self._hold(number)
            for body in self.bodies[:1]:  # a thread writes, as the interrupted code may be writing
                _thread.start_new_thread(sys.stderr.write, (body.line(number, _CUT),))
            return False
        if number in self._outside:
            return False
        self._outside.add(number)
        return self._hold(number)

    def answer(self, number: int, frame: FrameType | None, previous: Callable[[int, FrameType | None], Any]) -> None:
        self._let_go(number)
        self._answering = True
        try:
            previous(number, frame)
        finally:
            self._answering = False

    def _let_go(self, number: int) -> None:
        """Holds a signal no longer. From then on none is sent again: it would hide the next one, or be taken for it."""
        self._held.pop(number, None)
        self._outside.discard(number)
        with self._sending:  # a thread that has found it held may have lost the core since
            pass

    def _prepare(self, number: int) -> None:
        handler = _signal.getsignal(number)
        if isinstance(handler, Handler):
            if number in self._held and not self.bodies:
                self.answer(number, sys._getframe(1), handler.previous)
        elif callable(handler) and getattr(handler, "__module__", None) != "asyncio.unix_events":  # which does nothing
            self._let_go(number)  # That one has answered it.
            self._sent.discard(number)
            if not isinstance(handler, Note):
                signal.signal(number, Handler(self, handler))

    def _hold(self, number: int) -> bool:
        if number in self._held:
            return True
        self._held[number] = self.received_s
        try:  # not by `threading`, of which the interrupted code may hold a lock
            _thread.start_new_thread(self._send, (number, self.received_s))
        except RuntimeError:  # The interpreter ends: no thread can be started.
            return self.holding
        return True

    def _send(self, number: int, since_s: float) -> None:
        """Sends a held signal again, in a thread, until it is answered."""
        pause_s, said = PAUSE_S, False
        while self._held.get(number) == since_s:
            time.sleep(pause_s)
            if not said and time.monotonic() - since_s >= SAY_S:
                said = True
                sys.stderr.writelines(body.line(number, _WAITS) for body in self.bodies[:1])
            if self.holding or number in self._sent:  # Later; it doesn't disturb what is under way.
                pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = PAUSE_S
                with self._sending:
                    if self._held.get(number) == since_s:
                        self._sent.add(number)
                        _send_to_main(number)


def _send_to_main(number: int) -> None:
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, number)  # It wakes a main thread that sleeps.
    else:
        _thread.interrupt_main(signal.Signals(number))


#: The signals of this process.
INTERRUPTS = Interrupts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=INTERRUPTS.forget)


def uninterrupted(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps a function so that signals neither cut it short nor keep its result from its caller.

    They are held back until the caller has assigned the result. A second one cuts it short.
    """

    def uncut(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _thread.get_ident() != INTERRUPTS.main:
            return call(*args, **kwargs)
        INTERRUPTS.begin()
        try:
            return call(*args, **kwargs)
        finally:
            INTERRUPTS.depth -= 1

    _LEAVING.add(uncut.__code__)
    return functools.wraps(call)(uncut)


#: The code of frames that are about to return a result: one code object for all such functions.
_LEAVING: set[Any] = set()


@contextmanager
def interruptible(when: bool = True) -> Iterator[None]:
    """Lets a part of an `uninterrupted` call be cut short: planning and compiling, where the state isn't gone yet.
    `when`: no other process waits for this one."""
    if not when or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    before = INTERRUPTS.open_at
    INTERRUPTS.let_through(INTERRUPTS.depth)
    try:
        INTERRUPTS.answer_held()
        yield
    finally:
        INTERRUPTS.let_through(before)


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """The body of an open loop. `where`: file:line of the user's code that asked for its first batch."""

    where: str

    def line(self, number: int, text: str) -> str:
        """Returns the line to print about a signal."""
        return f"autopar: {signal.Signals(number).name} {text.format(self.where)}\n"


#: This rank's held signals -> all ranks'. Collective.
Tell = Callable[[tuple[int, ...]], Sequence[int]]


class Loop(Iterator[_T]):
    """A loop over batches whose body signals don't cut short: they are answered before the next batch is asked for.

    It ends where its batches do, or when nobody has it any more (`break`, an exception).
    """

    def __init__(self, batches: Iterator[_T], tell: Tell = tuple) -> None:
        self._batches = batches
        self._tell = tell
        self._body: Body | None = None

    def __next__(self) -> _T:
        if threading.get_ident() != threading.main_thread().ident:
            return next(self._batches)
        if self._body is None:
            self._body = Body(users_line(sys._getframe(1)))
        try:
            INTERRUPTS.end_body(self._body, self._tell)
            return next(self._batches)
        except BaseException:
            INTERRUPTS.leave(self._body)
            raise

    def __del__(self) -> None:
        if self._body is not None:
            INTERRUPTS.leave(self._body)
