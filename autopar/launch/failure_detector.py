"""`detect`: who hangs, from what the ranks were last seen doing.

In synchronous training one rank that hangs makes all others wait, so standing still is no proof. Blamed is, in
this order: who gives no sign of life; who has left while others wait for it in a later step; who neither waits nor
goes on while others wait; and, where all wait for each other, who is in the earliest step. A compilation takes its
time: nobody is blamed while a rank compiles. A dedicated server that nobody asks has nothing to do, and isn't blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.launch.progress import ANYBODY, MarkKind, describe_mark

#: For this long a rank waits in a later step for one that has left before that is a fault.
LATE_S = 1.0

#: The same where all that are left wait in the step in which it left: its last messages may be on their way.
LAST_S = 10.0

FAULT_REMEDY = "autopar.watchdog(seconds), or launch --watchdog, gives ranks more time; None (off) any"


@dataclass(frozen=True)
class Seen:
    """What is known of a rank.

    Attributes:
      name: The rank, in messages.
      age_s: Seconds since its last mark.
      silent_s: Seconds since the last sign of life.
      allowance_s: How long it may hang; None: for ever.
      left: Whether it waits for the others at its exit.
      code: Its exit code, where known.
      needs: The ranks that it waits for, if it waits.
    """

    rank: int
    name: str
    step: int
    what: str
    kind: MarkKind
    age_s: float
    silent_s: float
    allowance_s: float | None
    left: bool = False
    code: int | None = None
    needs: range = ANYBODY

    def exceeds(self, seconds: float) -> bool:
        return self.allowance_s is not None and seconds > self.allowance_s

    @property
    def waits(self) -> bool:
        return self.kind in ("waits", "pulls") and not self.left

    def waits_for(self, other: Seen) -> bool:
        """Whether it can't go on if the other one has left: servers answer all the same."""
        return self.kind == "waits" and not self.left and other.rank in self.needs

    @property
    def where(self) -> str:
        return describe_mark(self.step, self.what)


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and what is said about it."""

    culprits: tuple[int, ...]
    message: str


def detect(ranks: Sequence[Seen]) -> Verdict | None:
    """Who hangs; None while nobody does. `ranks`: all of them, in order."""
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
    return _verdict(behind, ["All ranks wait for each other:", *lines])


def unawaited(ranks: Sequence[Seen]) -> list[Seen]:
    """Ranks that make no progress in a step while others go on without them, as in asynchronous training: no fault, but
    somebody should know. `ranks`: all of them, in order."""
    running = [r for r in ranks if not r.left and r.step >= 0]
    stuck = [r for r in running if r.kind == "computes" and r.exceeds(r.age_s)]
    return stuck if any(not r.exceeds(r.age_s) for r in running) else []


def _left_while_awaited(left: Sequence[Seen], running: Sequence[Seen]) -> Verdict | None:
    """Ranks that have left, others being at a wait where they can't be met any more."""
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
    """ "rank 1 waits", "ranks 0, 1, 3 wait"."""
    numbers = ", ".join(str(r.rank) for r in ranks)
    return f"rank {numbers} waits" if len(ranks) == 1 else f"ranks {numbers} wait"
