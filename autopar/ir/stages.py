"""Data of a step cut into stages: compiled programs, and the exchanges of ranks between them.

A `ProgramStage` is a straight-line program of one side: the devices' (examples, dense parameters) or the owner's (its
rows of tables in host memory). An `ExchangeStage` is the runtime's work between them: a route, rows pulled, fetched and
delivered, reductions over the ranks, new rows written back. Source: Parallax, section 4.3; docs/hosts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.ir.operations import plain_name
from autopar.ir.program import Block, Equation, Var

Side = Literal["device", "owner"]


@dataclass(frozen=True, slots=True, eq=False)
class ProgramStage:
    """A program that is compiled by itself."""

    side: Side
    level: int  #: The most exchanges that any of its inputs depends on.
    block: Block
    last: frozenset[Var] = frozenset()  #: Inputs that no later stage reads.

    def __str__(self) -> str:
        return f"{self.side} program of {len(self.block.equations)} equations"


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeStage:
    """Equations of one kind that are carried out together, between compiled programs."""

    op: str
    level: int
    equations: tuple[Equation, ...]
    #: The part of a level's reductions that runs beside the programs that follow it; None: it is awaited at once, as
    #: are the parts before it.
    bucket: int | None = None

    def __str__(self) -> str:
        beside = "" if self.bucket is None else ", beside what follows"
        return f"{plain_name(self.op)} ({len(self.equations)}{beside})"


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A whole step in the order in which it runs."""

    items: tuple[ProgramStage | ExchangeStage, ...]

    @property
    def programs(self) -> int:
        return sum(isinstance(item, ProgramStage) for item in self.items)
