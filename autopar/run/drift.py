"""Watches alpha while a step trains: do batches still touch as many rows as the one that it was planned for?

A sample is the ids of one call's batch, counted on a thread. It is taken every `EVERY` calls, and half as often after
each sample that agrees with the plan; it is judged when the next one is due. Calls pay for a counter; a sampled call
copies NumPy arrays that the ids depend on, as the user may refill them. Tables whose ids depend on the state aren't
watched, nor are tables on hosts, whose plans don't depend on alpha.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np

from autopar import jax_compat
from autopar.ir.program import Program
from autopar.ir.rowspace import RowSpace
from autopar.jax_types import Leaf
from autopar.measure.alpha import id_program, id_reader
from autopar.passes.choosing.capacity import device_ids
from autopar.run.planned_step import PlannedStep
from autopar.tables.kinds import is_table

_logger = logging.getLogger("autopar")

#: Calls before the first sample, and between samples that are not as planned; at most between those that are.
EVERY, RAREST = 100, 6400
#: Drift: this many times more or fewer rows than planned, in so many samples in a row.
DRIFT, IN_A_ROW = 1.5, 3
#: What to do about drift: on several devices, and on one.
DRIFT_REMEDY = (
    "Results are right, but another plan may be faster: parallelize the function once more, which plans by the batch "
    "of its first call, and go on with this state. parallelize(replan='off') watches nothing"
)
ONE_DEVICE = (
    "The plan of one device doesn't depend on it; what was measured on earlier batches (autopar.measure_alpha), and "
    "plans for clusters by it, are to be made again"
)
#: Samples that the running mean is over.
_RUNNING = 8


@dataclass(frozen=True, slots=True)
class SeenAlpha:
    """Rows of a table that steps touch."""

    planned: int  #: Rows that the plan was made for.
    rows: float  #: Running mean of the latest samples. It begins anew where samples leave the plan or come back to it.
    extent: int  #: V, the rows of the table.
    samples: int = 0  #: Number of samples since the plan was made.
    #: How many of the latest samples in a row had at least `DRIFT` times the planned rows; negative: so many times
    #: less.
    streak: int = 0

    @property
    def drifted(self) -> bool:
        """Says whether batches differ from the planned one for good."""
        return abs(self.streak) >= IN_A_ROW

    def with_sample(self, rows: int) -> SeenAlpha:
        count = self.samples + 1
        ratio = max(rows, 1) / max(self.planned, 1)
        way = 1 if ratio >= DRIFT else -1 if ratio <= 1 / DRIFT else 0
        goes_on = way * self.streak > 0 or way == self.streak == 0
        streak = self.streak + way if goes_on else way
        mean = self.rows + (rows - self.rows) / min(abs(streak) or count, _RUNNING) if goes_on else rows
        return replace(self, rows=mean, samples=count, streak=streak)

    def __str__(self) -> str:
        planned, rows = self.planned / self.extent, self.rows / self.extent
        return f"planned for {self.planned} of {self.extent} rows ({planned:.3%}), now {self.rows:.0f} ({rows:.3%})"


class AlphaWatch:
    """Watches the tables of one step: at first every `every` calls. `pool` counts samples; by default a thread does."""

    def __init__(self, every: int = EVERY, pool: Executor | None = None) -> None:
        self._every = self._interval = self._left = every
        self._plans: dict[PlannedStep, _Watched] = {}
        self._latest: _Watched | None = None
        self._pool = pool
        self._at_work: tuple[PlannedStep, Future[_Watched | dict[str, int]]] | None = None

    @property
    def seen(self) -> Mapping[str, SeenAlpha]:
        """Path of a table -> its samples under the plan of the latest one."""
        return {} if self._latest is None else self._latest.seen

    def is_due(self) -> bool:
        """Counts a call; returns whether to look at it."""
        self._left -= 1
        return self._left <= 0

    def look(self, planned: PlannedStep | None, leaves: Sequence[Leaf]) -> Mapping[str, SeenAlpha]:
        """Judges the sample before, and takes one of this call; returns the tables that have newly drifted."""
        done = self._collected()
        self._left = self._interval
        if not done or planned is None or not planned.way.is_watched:
            return {}
        watched = self._plans.get(planned)
        if watched is None:
            self._start(planned, _Watched, planned)
            return {}
        drifted = watched.drifted()
        if not drifted and (sample := watched.sample(leaves)) is not None:
            self._start(planned, watched.rows, sample)
        return drifted

    def forget(self, planned: PlannedStep) -> None:
        """Drops the samples of a plan."""
        self._plans.pop(planned, None)
        if self._at_work is not None and self._at_work[0] is planned:
            self._at_work = None

    def _start(self, planned: PlannedStep, work: Callable[..., _Watched | dict[str, int]], argument: object) -> None:
        self._pool = self._pool or ThreadPoolExecutor(1, "autopar-alpha")
        self._at_work = planned, self._pool.submit(work, argument)

    def _collected(self) -> bool:
        """Takes in a finished sample; returns False while one is being counted."""
        if self._at_work is None:
            return True
        planned, work = self._at_work
        if not work.done():
            return False
        self._at_work = None
        error = work.exception()
        if error is not None:  # arrays that the user gave away, or a context that only the caller has
            _logger.info("alpha isn't watched any more: %s: %s", type(error).__name__, error)
            self._plans.setdefault(planned, _Watched(None))
            return True
        outcome = work.result()
        if isinstance(outcome, _Watched):
            self._plans[planned] = outcome
        else:
            self._latest = watched = self._plans[planned]
            watched.take(outcome)
            strays = any(seen.streak for seen in watched.seen.values())
            self._interval = self._every if strays else min(2 * self._interval, max(RAREST, self._every))
        return True


class _Watched:
    """The tables of one plan (none without a plan)."""

    def __init__(self, planned: PlannedStep | None) -> None:
        self.seen: dict[str, SeenAlpha] = {}
        self._families = [] if planned is None else _families(planned.compiled.analysed)
        self._told: set[str] = set()
        self._wanted = [any(used) for used in zip(*(f.used for f in self._families), strict=True)]
        example = None if planned is None else planned.example
        self._planned = None if example is None else self.rows(example)

    def sample(self, leaves: Sequence[Leaf]) -> list[Leaf] | None:
        """Returns the leaves that ids depend on; None for a call that can't be counted."""
        kept = [x if wanted else None for x, wanted in zip(leaves, self._wanted, strict=True)] if self._wanted else []
        if not kept or any(jax_compat.is_tracer(x) or is_table(x) for x in kept):
            return None
        return [x.copy() if isinstance(x, np.ndarray) else x for x in kept]

    def drifted(self) -> dict[str, SeenAlpha]:
        """Returns newly drifted tables."""
        fresh = {path: seen for path, seen in self.seen.items() if seen.drifted and path not in self._told}
        self._told.update(fresh)
        return fresh

    def rows(self, leaves: Sequence[Leaf]) -> dict[str, int]:
        """Returns the number of rows that a call touches, by path."""
        # On the host: a program on all devices would meet those of the step in another order on each.
        host = [np.asarray(x) if isinstance(x, jax.Array) else x for x in leaves]
        return {path: count for f in self._families for path, count in f.rows(host).items()}

    def take(self, rows: Mapping[str, int]) -> None:
        """Takes one more sample. Without an example the first sample stands for the planned rows."""
        if not self.seen:
            planned = self._planned or rows
            self.seen = {p: SeenAlpha(planned[p], rows[p], f.extent) for f in self._families for p in f.paths}
        self.seen = {path: seen.with_sample(rows[path]) for path, seen in self.seen.items()}


class _Family:
    """Counts the rows that calls touch of a family."""

    def __init__(self, program: Program, space: RowSpace) -> None:
        ids = program.ids[space.family]
        self.extent = space.extent
        self.paths = [program.inputs[k].path for k in space.tables]
        self.used = id_program(program, ids)[1]
        self._read = id_reader(program, ids)

    def rows(self, leaves: Sequence[Leaf]) -> dict[str, int]:
        flat = self._read(leaves)
        assert flat is not None, "what the ids depend on is at hand, and has no effects"
        (rows,) = device_ids(flat, [False] * len(flat), 1, self.extent)
        return dict.fromkeys(self.paths, rows.size)


def drift_message(drifted: Mapping[str, SeenAlpha]) -> str:
    """Returns a sentence on drifted tables."""
    return "batches touch other numbers of rows: " + "; ".join(f"{path} was {seen}" for path, seen in drifted.items())


def _families(program: Program) -> list[_Family]:
    """Returns the families that can be lifted and whose ids depend on the batch alone; none for a step with effects,
    whose plan doesn't depend on alpha."""
    if any(e.effects for e in program.block.equations):
        return []
    families = [_Family(program, space) for space in program.facts.spaces if space.accesses and space.refusal is None]
    plain = [i.role not in ("state", "table") and not jax_compat.is_key(v.dtype) for v, i in program.named_inputs]
    return [f for f in families if any(f.used) and all(p for p, u in zip(plain, f.used, strict=True) if u)]
