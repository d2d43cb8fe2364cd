"""Data of a step cut into segments: compiled programs, and the exchanges of ranks between them.

A `ProgramSegment` is a straight-line program of one side: the devices' (examples, dense parameters) or the owner's (its
rows of tables in host memory). An `ExchangeSegment` is the runtime's work between them: a route, rows pulled, fetched
and delivered, reductions over the ranks, new rows written back. Source: Parallax, section 4.3; docs/hosts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.ir.operations import plain_name
from autopar.ir.program import Block, Equation, Var

Side = Literal["device", "owner"]


@dataclass(frozen=True, slots=True, eq=False)
class ProgramSegment:
    """A program that is compiled by itself."""

    side: Side
    level: int  #: The most exchanges that any of its inputs depends on.
    block: Block
    last: frozenset[Var] = frozenset()  #: Inputs that no later segment reads.

    def __str__(self) -> str:
        return f"{self.side} program of {len(self.block.equations)} equations"


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeSegment:
    """Equations of one kind that are carried out together, between compiled programs."""

    op: str
    level: int
    equations: tuple[Equation, ...]
    #: The gradient bucket: reductions that run beside the programs that follow them. None: these are awaited at once,
    #: as are the buckets before them.
    gradient_bucket: int | None = None

    def __str__(self) -> str:
        beside = "" if self.gradient_bucket is None else ", beside what follows"
        return f"{plain_name(self.op)} ({len(self.equations)}{beside})"


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """A whole step in the order in which it runs."""

    items: tuple[ProgramSegment | ExchangeSegment, ...]

    @property
    def programs(self) -> int:
        return sum(isinstance(item, ProgramSegment) for item in self.items)
