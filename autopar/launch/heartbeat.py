"""The watchdog's thread: ranks tell each other what they do, and end the job when one hangs.

Once a beat (a second, or less under a short allowance) a rank sends all that it knows to one other rank, the neighbour
1, 2, 4, ... further on in turn: news reaches everyone after log2(size) beats, around any rank that has stopped. The
messages have a communicator of their own and are polled, never waited for. A silent rank is sent a few more and then
none, since MPI's buffers, once full of messages that nobody takes, stop the sender's messages to all others. The thread
costs well below a thousandth of a core.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import ArgumentsError
from autopar.interrupts import INTERRUPTS
from autopar.jax_types import Request
from autopar.launch.faults import INTERRUPTED, Hooks, abort, name_rank, report_fault
from autopar.launch.progress import ANYBODY, KINDS, PROGRESS, TEXT_BYTES, MarkKind, describe_mark
from autopar.mpi.waiting import as_bytes
from autopar.mpi.world import World

#: Seconds that a rank may hang by default.
ALLOWANCE_S = 300.0

#: "off", or seconds: set by the launcher.
ALLOWANCE_VARIABLE = "AUTOPAR_WATCHDOG"

#: Seconds between beats, at most and at least, and beats in an allowance.
LONGEST_BEAT_S, SHORTEST_BEAT_S, BEATS = 1.0, 0.05, 20

#: Seconds after which a main thread that hasn't answered an interrupt is held up in foreign code.
ANSWER_S = 3.0

#: Messages that a silent rank is sent.
UNANSWERED = 4

_TAG = 1
_UNKNOWN_CODE = -1

#: The message about one rank.
_STATE = np.dtype(
    [
        ("beat", "<i8"),
        ("step", "<i8"),
        ("age_s", "<f8"),
        ("allowance_s", "<f8"),
        ("kind", "i1"),
        ("left", "i1"),
        ("code", "<i2"),
        ("needs", "<i8", 2),
        ("what", f"S{TEXT_BYTES}"),
    ]
)


def allowance(seconds: float | None) -> float:
    """Returns an allowance in seconds, infinity for None; raises ArgumentsError if it isn't positive."""
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
        raise ArgumentsError(f"watchdog: {seconds!r} seconds; it must be a positive number, or None for no watchdog")
    return math.inf if seconds is None else float(seconds)


class Heartbeat:
    """Tells other ranks what this one does, and hears of them."""

    def __init__(self, world: World, hooks: Hooks, allowance_s: float | None) -> None:
        from mpi4py import MPI

        self._world = world
        self._hooks = hooks
        self.pid = hooks.pid
        #: For the heartbeat and the barrier at exit alone.
        self.comm = world.comm.Dup()
        self._names: list[str] = self.comm.allgather(name_rank(world))
        self._states = np.zeros(world.size, _STATE)
        self._states["step"] = -1
        self._states["code"] = _UNKNOWN_CODE
        self._states["what"] = str(PROGRESS.last).encode()
        self._heard_s = np.full(world.size, time.monotonic())
        self._sending: dict[int, tuple[Request, object]] = {}
        self._unanswered = np.zeros(world.size, np.int64)
        self._received = np.empty_like(self._states)
        self._status = MPI.Status()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._interrupts: socket.socket | None = None
        self._interrupted_s: float | None = None
        #: The time of the last look before an interrupt, and of the last look.
        self._before_interrupt_s = self._listened_s = time.monotonic()
        self._detected_s: float | None = None
        #: Ranks and their steps that were reported by `_name_unawaited`.
        self._named: set[tuple[int, int]] = set()
        self.allowance_s = allowance(allowance_s)
        self._states["allowance_s"] = self.allowance_s  # Until the others have said theirs.
        self._left = False
        self._code: int | None = None

    def start(self) -> None:
        self._listen_to_interrupts()
        PROGRESS.watched = True
        self._thread = threading.Thread(target=self._run, name="autopar-heartbeat", daemon=True)
        self._thread.start()

    def leave(self, code: int | None) -> None:
        """Tells the others that this rank is at its end, with this exit code (None: unknown)."""
        self._code = code
        self._left = True

    def stop(self) -> None:
        """Ends the thread after all ranks have left. Collective."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        if self._interrupts is not None:
            signal.set_wakeup_fd(-1)
            self._interrupts.close()
        # All have sent their last message once all are here; what is left in the queues is taken out.
        done = None
        while done is None or not done.Test():
            self._receive()
            self._sending = {r: sent for r, sent in self._sending.items() if not sent[0].Test()}
            if done is None and not self._sending:
                done = self.comm.Ibarrier()
            time.sleep(0.001)
        self._receive()

    @property
    def staying(self) -> list[int]:
        """The ranks that haven't left, as far as is known. Servers, which leave last, don't count."""
        return [r for r in range(self._world.workers) if not self._states[r]["left"] and r != self._world.rank]

    def _run(self) -> None:
        from mpi4py import MPI

        beat, last_s = 0, time.monotonic()
        while not self._stop.wait(self._beat_s()):
            if os.getpid() != self.pid or MPI.Is_finalized():
                return
            now_s = time.monotonic()
            if now_s - last_s > 3 * self._beat_s() + 1:
                self._heard_s += now_s - last_s  # This process was stopped itself: it can't tell about the others.
            last_s = now_s
            self._tell(beat, now_s)
            self._send(beat)
            self._receive()
            self._check_interrupt(now_s)
            self._detect(now_s)
            beat += 1

    def _beat_s(self) -> float:
        known = min(self.allowance_s, LONGEST_BEAT_S * BEATS)
        return min(max(known / BEATS, SHORTEST_BEAT_S), LONGEST_BEAT_S)

    def _tell(self, beat: int, now_s: float) -> None:
        mark = PROGRESS.seen
        code = _UNKNOWN_CODE if self._code is None else self._code
        kind, what = KINDS.index(mark.kind), mark.what.encode()[:TEXT_BYTES]
        self._states[self._world.rank] = (
            *(beat + 1, mark.step, now_s - mark.time_s, self.allowance_s),
            *(kind, self._left, code, (mark.needs.start, mark.needs.stop), what),
        )
        self._heard_s[self._world.rank] = now_s

    def _send(self, beat: int) -> None:
        size = self._world.size
        hops = 1 << (beat % max((size - 1).bit_length(), 1))
        to = (self._world.rank + hops) % size
        pending = self._sending.get(to)
        if to == self._world.rank or self._unanswered[to] >= UNANSWERED or (pending and not pending[0].Test()):
            return
        self._unanswered[to] += 1
        message = self._states.copy()
        self._sending[to] = (self.comm.Isend(as_bytes(message), dest=to, tag=_TAG), message)

    def _receive(self) -> None:
        # The source is named: over TCP (UCX) mpich 5.0.2 loses messages to receives from any source, for good.
        while self.comm.Iprobe(tag=_TAG, status=self._status):
            self.comm.Recv(as_bytes(self._received), source=self._status.source, tag=_TAG)
            newer = self._received["beat"] > self._states["beat"]
            self._states[newer] = self._received[newer]
            self._heard_s[newer] = time.monotonic()
            self._unanswered[newer] = 0

    def _detect(self, now_s: float) -> None:
        """Ends the job if a rank hangs. The first rank that is not to blame reports it; the others wait a little, in
        case that one can't."""
        seen = self._seen(now_s)
        verdict = detect(seen)
        if verdict is None:
            self._detected_s = None
            self._name_unawaited(seen)
            return
        rank = self._world.rank
        if self._detected_s is None:
            self._detected_s = now_s
            if rank in verdict.culprits and not self._left:
                report_fault(f"{self._names[rank]} is at\n{_main_stack()}")
        others = [r for r in range(self._world.size) if r not in verdict.culprits]
        order = [*others, *verdict.culprits]
        if now_s - self._detected_s >= self._beat_s() + 0.5 + 2 * order.index(rank):
            abort(self._world, verdict.message)

    def _name_unawaited(self, seen: Sequence[Seen]) -> None:
        """Reports once of each rank that the others go on without it; the first of these does."""
        stuck = unawaited(seen)
        numbers = {r.rank for r in stuck}
        if not stuck or self._world.rank != next(r.rank for r in seen if not r.left and r.rank not in numbers):
            return
        for r in stuck:
            if (r.rank, r.step) not in self._named:
                self._named.add((r.rank, r.step))
                report_fault(
                    f"{r.name} has made no progress for {r.age_s:.0f} s, {r.where}; the others go on without it."
                )

    def _seen(self, now_s: float) -> list[Seen]:
        return [
            Seen(
                rank=r,
                name=self._names[r],
                step=int(s["step"]),
                what=s["what"].decode(errors="replace"),
                kind=KINDS[s["kind"]],
                age_s=float(s["age_s"]) + max(now_s - float(heard_s), 0.0),
                silent_s=max(now_s - float(heard_s), 0.0),
                allowance_s=None if math.isinf(s["allowance_s"]) else float(s["allowance_s"]),
                left=bool(s["left"]),
                code=None if s["code"] == _UNKNOWN_CODE else int(s["code"]),
                needs=range(*map(int, s["needs"])),
            )
            for r, (s, heard_s) in enumerate(zip(self._states, self._heard_s, strict=True))
        ]

    def _listen_to_interrupts(self) -> None:
        """Makes Python write signals' numbers where this thread reads them, even while the main thread is held up in a
        collective and its handlers can't run."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
        if before != -1:  # Somebody else's, who needs it.
            os.close(signal.set_wakeup_fd(before))
            reading.close()
            return
        # A child has a main thread of its own, whose signals are no news here.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._interrupts = reading

    def _check_interrupt(self, now_s: float) -> None:
        if self._interrupts is None:
            return
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while some := self._interrupts.recv(4096):  # all: one that is read late would seem to be unanswered
                numbers += some
        if signal.SIGINT in numbers and self._hooks.answers_interrupts():
            self._interrupted_s, self._before_interrupt_s = now_s, self._listened_s
        self._listened_s = now_s
        answered = self._hooks.answered_s >= self._before_interrupt_s
        # In a loop over batches nobody leaves before all are at the end of its body, so nobody waits in vain.
        if self._interrupted_s is None or answered or INTERRUPTS.bodies:
            self._interrupted_s = None
            return
        if now_s - self._interrupted_s > ANSWER_S:
            name = self._names[self._world.rank]
            abort(self._world, f"{name} was interrupted, {PROGRESS.last}, where it can't answer.", INTERRUPTED)


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (no Python frame)"


# --- who hangs, from what the ranks were last seen doing ---
#
# In synchronous training one rank that hangs makes all others wait, so standing still is no proof. These are to blame,
# in this order: ranks without a sign of life; ranks that have left while others wait for them in a later step; ranks
# that neither wait nor go on while others wait; and, if all wait for each other, those in the earliest step. Nobody is
# to blame while a rank compiles, which takes its time. A dedicated server without requests isn't either.

#: Seconds that a rank waits in a later step for one that has left before that is a fault.
LATE_S = 1.0

#: The same if all others wait in the step in which it left: its last messages may be on their way.
LAST_S = 10.0

FAULT_REMEDY = "autopar.watchdog(seconds), or launch --watchdog, gives ranks more time; None (off) any"


@dataclass(frozen=True)
class Seen:
    """The last news of a rank."""

    rank: int
    name: str  #: The rank's name in messages.
    step: int
    what: str
    kind: MarkKind
    age_s: float  #: Seconds since its last mark.
    silent_s: float  #: Seconds since its last sign of life.
    allowance_s: float | None  #: Seconds that it may hang; None: for ever.
    left: bool = False  #: Whether it waits for the others at its exit.
    code: int | None = None  #: Its exit code, if known.
    needs: range = ANYBODY  #: The ranks that it waits for.

    def exceeds(self, seconds: float) -> bool:
        return self.allowance_s is not None and seconds > self.allowance_s

    @property
    def waits(self) -> bool:
        return self.kind in ("waits", "pulls") and not self.left

    def waits_for(self, other: Seen) -> bool:
        """Says whether it can't go on if the other one has left; servers answer all the same."""
        return self.kind == "waits" and not self.left and other.rank in self.needs

    @property
    def where(self) -> str:
        return describe_mark(self.step, self.what)


@dataclass(frozen=True)
class Verdict:
    """The ranks to blame, and the message about them."""

    culprits: tuple[int, ...]
    message: str


def detect(ranks: Sequence[Seen]) -> Verdict | None:
    """Returns who hangs among all ranks, in order; None while nobody does."""
    silent = [r for r in ranks if r.exceeds(r.silent_s)]
    if silent:
        lines = [
            f"{r.name} has given no sign of life for {r.silent_s:.0f} s (stopped, or its machine is gone); "
            f"last seen {r.where}."
            for r in silent
        ]
        return _verdict(silent, lines)
    left, running = [r for r in ranks if r.left], [r for r in ranks if not r.left and r.kind != "serves"]
    late = _left_while_awaited(left, running)
    if late is not None:
        return late
    waiting = [r for r in ranks if r.waits and r.exceeds(r.age_s)]
    if not waiting or any(r.kind == "compiles" for r in running):
        return None
    idle = [r for r in running if not r.waits]
    if idle:
        stuck = [r for r in idle if r.exceeds(r.age_s)]
        names = _numbers(waiting)
        lines = [f"{r.name} has made no progress for {r.age_s:.0f} s, {r.where}; {names} for it." for r in stuck]
        return _verdict(stuck, lines) if stuck else None
    if len(waiting) < len(running):
        return None
    needed = [r for r in left if any(w.waits_for(r) for w in waiting)]
    if needed:
        return _left(needed, waiting)
    first = min(r.step for r in waiting)
    behind = [r for r in waiting if r.step == first]
    lines = [f"{r.name} has waited for {r.age_s:.0f} s, {r.where}." for r in waiting]
    if len({r.where for r in waiting}) > 1:
        lines.append(
            "Do all of them make the same calls (steps, evaluations, reads of tables, saves) in the same order?"
        )
    return _verdict(behind, ["All ranks wait for each other:", *lines])


def unawaited(ranks: Sequence[Seen]) -> list[Seen]:
    """Returns ranks that make no progress in a step while others go on without them, as in asynchronous training. That
    is no fault, but worth a report."""
    running = [r for r in ranks if not r.left and r.step >= 0]
    stuck = [r for r in running if r.kind == "computes" and r.exceeds(r.age_s)]
    return stuck if any(not r.exceeds(r.age_s) for r in running) else []


def _left_while_awaited(left: Sequence[Seen], running: Sequence[Seen]) -> Verdict | None:
    """Returns the ranks that have left while others wait for them."""
    for r in left:
        waiting = [w for w in running if w.waits_for(r) and w.step > r.step and w.age_s > LATE_S]
        if waiting:
            return _left([r], waiting)
    if running and all(w.age_s > LAST_S for w in running):
        needed = [r for r in left if all(w.waits_for(r) for w in running)]
        if needed:
            return _left(needed, running)
    return None


def _left(left: Sequence[Seen], waiting: Sequence[Seen]) -> Verdict:
    where = f"{_numbers(waiting)} for it {waiting[0].where}"
    lines = [f"{r.name} has left{_code(r)}, last seen {r.where}, while {where}." for r in left]
    return Verdict(tuple(r.rank for r in left), " ".join([*lines, "All ranks end."]))


def _verdict(culprits: Sequence[Seen], lines: Sequence[str]) -> Verdict:
    return Verdict(tuple(r.rank for r in culprits), " ".join([*lines, f"All ranks end ({FAULT_REMEDY})."]))


def _code(r: Seen) -> str:
    return "" if r.code is None else f" with exit code {r.code}"


def _numbers(ranks: Sequence[Seen]) -> str:
    numbers = ", ".join(str(r.rank) for r in ranks)
    return f"rank {numbers} waits" if len(ranks) == 1 else f"ranks {numbers} wait"
