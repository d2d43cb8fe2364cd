"""Runs the passes of a way to run a step, and verifies the program after each.

Each pass leaves a record (pass, program after it, note), which is the debug dump, the text of golden tests and what
`explain` prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cost.rates import UNMEASURED, Measurements
from autopar.garbage import paused_collection
from autopar.ir.plan import Plan
from autopar.ir.printer import format_program
from autopar.ir.program import Block, Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.stacked import StackedProgram
from autopar.ir.verifier import verify_program
from autopar.passes.choose import check_facts, check_followed, choose
from autopar.passes.stack_tables import require_whole

if TYPE_CHECKING:
    from autopar.ways.way import Way

#: A name, and a function that adds facts to a program; it also returns a note.
Analysis = tuple[str, Callable[[Program], tuple[Program, str]]]
#: A name, and a function that rewrites a program by a plan, in which it may note findings.
Pass = tuple[str, Callable[[Program, ProgramPlan], tuple[Program, ProgramPlan, str]]]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A pass: the program after it, its note, and its seconds."""

    name: str
    program: Program
    note: str
    seconds: float

    def __str__(self) -> str:
        return f"--- {self.name}: {self.note}\n{format_program(self.program)}"


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The analysed program, the plan, the compiled program and that of the fallback, and the records of all passes."""

    analysed: Program
    bound: ProgramPlan
    program: Program
    records: tuple[Record, ...]
    fallback: Program | None = None
    stacked: StackedProgram | None = None

    @property
    def plan(self) -> Plan:
        return self.bound.plan

    @property
    def as_run(self) -> Compiled:
        """The program that is run, with its plan: where tables are stacked another one than the user's."""
        if self.stacked is None:
            return self
        return replace(self, analysed=self.stacked.program, bound=self.stacked.plan, stacked=None)

    def with_reason(self, paths: Collection[str], reason: str) -> Compiled:
        """Adds a reason for some tables to the plan."""
        bound = replace(self.bound, plan=self.plan.with_reason(paths, reason))
        return replace(self, bound=bound)


@dataclass(frozen=True, slots=True, eq=False)
class Analysed:
    """A program with the findings of all analyses, and their records."""

    program: Program
    records: tuple[Record, ...]


def analyze_program(program: Program, way: Way) -> Analysed:
    """Runs the analyses; they say what there is to measure."""
    records: list[Record] = []
    with paused_collection():
        for name, run in way.analyses:
            start, before = time.perf_counter(), program.block if records else None  # nothing has checked it yet
            program, note = run(program)
            records.append(_record(name, program, before, note, start))
    return Analysed(program, tuple(records))


def compile_program(analysed: Analysed, way: Way, measured: Measurements = UNMEASURED) -> Compiled:
    """Chooses a plan, and compiles the programs that follow it. Raises NotDeferrable if rows of some leaves can't wait;
    analyze again without deferring them (`Options.undeferred`)."""
    with paused_collection():
        bound, decided = decide(analysed, way, measured)
        analysed, bound, decided = _with_border(analysed, bound, decided, way, measured)
        stacked = way.stacked(analysed.program, bound)
        require_whole(analysed.program, bound, stacked, way.options)
        source, followed = (analysed.program, bound) if stacked is None else (stacked.program, stacked.plan)
        program, done, records = run_passes(way.passes(followed, measured), source, followed)
        fallback = follow(source, done.without_limits(), way) if done.fallback else None
        if stacked is None:
            bound = done
        else:
            bound, stacked = replace(bound, plan=done.plan), replace(stacked, plan=done)
        return Compiled(analysed.program, bound, program, (*analysed.records, *decided, *records), fallback, stacked)


def decide(analysed: Analysed, way: Way, measured: Measurements) -> tuple[ProgramPlan, Record]:
    """Chooses a plan, or checks an earlier one; raises PlanError if that doesn't fit the program."""
    start, program, options = time.perf_counter(), analysed.program, way.options
    earlier = options.plan
    if earlier is not None:
        check_facts(program, earlier, options.devices, options.tensor)
    bound, note = choose(program, options, measured)
    if earlier is not None:
        check_followed(program, earlier, bound)
    return bound, Record("choose", program, note, time.perf_counter() - start)


def _with_border(
    analysed: Analysed, bound: ProgramPlan, decided: Record, way: Way, measured: Measurements
) -> tuple[Analysed, ProgramPlan, tuple[Record, ...]]:
    """Moves operations to the owners of rows, where the plan has rows travel, and chooses by what travels then."""
    start = time.perf_counter()
    program, placed = way.bordered(analysed.program, bound)
    records = (decided,)
    if program is not analysed.program:
        note = "; ".join(f"{', '.join(each.tables)}: {each}" for each in placed)
        record = _record("place_border", program, analysed.program.block, note, start)
        analysed = Analysed(program, analysed.records)
        bound, again = decide(analysed, way, measured)
        records = (decided, record, again)
    for each in placed:
        bound = replace(bound, plan=bound.plan.with_reason(each.tables, str(each)))
    return analysed, bound, records


def run_passes(
    passes: Sequence[Pass], program: Program, bound: ProgramPlan
) -> tuple[Program, ProgramPlan, list[Record]]:
    """Runs passes in order, and verifies the program after each."""
    records: list[Record] = []
    for name, run in passes:
        start, before = time.perf_counter(), program.block
        program, bound, note = run(program, bound)
        records.append(_record(name, program, before, note, start))
    return program, bound, records


def _record(name: str, program: Program, before: Block | None, note: str, start: float) -> Record:
    verify_program(program, before, name)
    return Record(name, program, note, time.perf_counter() - start)


def follow(analysed: Program, bound: ProgramPlan, way: Way) -> Program:
    """Returns the program of another plan than the chosen one."""
    program = analysed
    for _, run in way.passes(bound):
        program, _, _ = run(program, bound)
    verify_program(program)
    return program
