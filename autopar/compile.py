"""The compiler: runs the passes that a way to run a step gives, each of which leaves a record.

The record (pass, program after it, what it did) is at once the debug dump, the text of golden tests and what
`explain` prints. The program is verified after every pass that changes it, always.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.collection import paused_collection
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.printer import format_program
from autopar.ir.program import Block, Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.verifier import verify_program
from autopar.passes.choose import check_facts, check_followed, choose

#: A name, and what finds out about a program.
Analysis = tuple[str, Callable[[Program], tuple[Program, str]]]
#: A name, and what does as a plan says, which may note in it what came of that.
Pass = tuple[str, Callable[[Program, ProgramPlan], tuple[Program, ProgramPlan, str]]]


class HasPasses(Protocol):
    """Names what the compiler asks of a way to run a step (`ways.way.Way`)."""

    @property
    def options(self) -> Options:
        """Returns what the user chose for the whole step."""
        ...

    @property
    def analyses(self) -> tuple[Analysis, ...]:
        """The analyses of a traced program, in this order."""
        ...

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Returns what makes a program of a plan, in this order; only what does something."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A pass, the program after it, what it says it did, and how long it took."""

    name: str
    program: Program
    note: str
    seconds: float

    def __str__(self) -> str:
        return f"--- {self.name}: {self.note}\n{format_program(self.program)}"


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The analysed program, the plan, the program as the plan has it (and as its fallback), and how it came about."""

    analysed: Program
    bound: ProgramPlan
    program: Program
    records: tuple[Record, ...]
    fallback: Program | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.bound.plan

    def with_reason(self, paths: Collection[str], reason: str) -> Compiled:
        """Returns it with one more reason for some tables in its plan."""
        bound = dataclasses.replace(self.bound, plan=self.plan.with_reason(paths, reason))
        return dataclasses.replace(self, bound=bound)


@dataclass(frozen=True, slots=True, eq=False)
class Analysed:
    """A program with all that analysis has found, and how that came about."""

    program: Program
    records: tuple[Record, ...]


def analyze_program(program: Program, way: HasPasses) -> Analysed:
    """Analyzes a traced program: what there is to measure follows from it."""
    records: list[Record] = []
    with paused_collection():
        for name, run in way.analyses:
            start, before = time.perf_counter(), program.block if records else None  # nothing has checked it yet
            program, note = run(program)
            records.append(_record(name, program, before, note, start))
    return Analysed(program, tuple(records))


def compile_program(analysed: Analysed, way: HasPasses, measured: Measurements = UNMEASURED) -> Compiled:
    """Chooses a plan, and makes the programs that follow it.

    Raises:
      NotDeferrable: rows of some leaves can't wait; analyze again without deferring them (`Options.undeferred`).
    """
    with paused_collection():
        bound, decided = decide(analysed, way, measured)
        program, bound, followed = run_passes(way.passes(bound, measured), analysed.program, bound)
        fallback = follow(analysed.program, bound.without_limits(), way) if bound.fallback else None
        return Compiled(analysed.program, bound, program, (*analysed.records, decided, *followed), fallback)


def decide(analysed: Analysed, way: HasPasses, measured: Measurements) -> tuple[ProgramPlan, Record]:
    """Chooses a plan.

    Raises:
      PlanError: an earlier plan doesn't fit the program.
    """
    start, program, options = time.perf_counter(), analysed.program, way.options
    earlier = options.plan
    if earlier is not None:
        check_facts(program, earlier, options.devices, options.tensor)
    bound, note = choose(program, options, measured)
    if earlier is not None:
        check_followed(program, earlier, bound)
    return bound, Record("choose", program, note, time.perf_counter() - start)


def run_passes(
    passes: Sequence[Pass], program: Program, bound: ProgramPlan
) -> tuple[Program, ProgramPlan, list[Record]]:
    """Runs passes one after the other, and checks the program after each."""
    records: list[Record] = []
    for name, run in passes:
        start, before = time.perf_counter(), program.block
        program, bound, note = run(program, bound)
        records.append(_record(name, program, before, note, start))
    return program, bound, records


def _record(name: str, program: Program, before: Block | None, note: str, start: float) -> Record:
    verify_program(program, before, name)
    return Record(name, program, note, time.perf_counter() - start)


def follow(analysed: Program, bound: ProgramPlan, way: HasPasses) -> Program:
    """Returns the program of another plan than the one that was chosen."""
    program = analysed
    for _, run in way.passes(bound):
        program, _, _ = run(program, bound)
    verify_program(program)
    return program
