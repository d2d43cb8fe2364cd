"""A step cut into stages: what the user asks for, and the programs that the stages run. Data only.

Values are named by variables: the programs of a pipeline share them, and each reads the values that others made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as Choice

from autopar.errors import ArgumentsError
from autopar.ir.program import Atom, Block, Var
from autopar.ir.schedule import SCHEDULES

#: "before": once, ahead of the microbatches. "F", "B": for each microbatch. "update": once, behind them.
Phase = Choice["before", "F", "B", "update"]
PHASES: tuple[Phase, ...] = ("before", "F", "B", "update")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a step is to be run in stages.

    Attributes:
      stages: How many, or for each stage the patterns over paths of its parameters.
      schedule: "1f1b", or "gpipe", which takes the memory of more activations.
      microbatches: M, parts of the batch that are in the pipeline together.
    """

    stages: int | Sequence[Sequence[str]] = 2
    schedule: str = "1f1b"
    microbatches: int = 8

    def __post_init__(self) -> None:
        count = self.stages if isinstance(self.stages, int) else len(self.stages)
        if isinstance(self.stages, bool) or isinstance(self.stages, str) or count < 1:
            raise ArgumentsError(f"stages={self.stages!r}: give a number, or for each stage patterns over paths")
        if self.schedule not in SCHEDULES:
            raise ArgumentsError(f"schedule={self.schedule!r}: there are {', '.join(map(repr, SCHEDULES))}")
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ArgumentsError(f"microbatches={self.microbatches!r}: give a whole number, 1 or more")

    @property
    def count(self) -> int:
        """S."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)


@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """A program of one stage, compiled by itself.

    Attributes:
      phase, stage: When it runs, and where.
      level: Of an update's programs the order: one reads only what earlier levels and its own stage made.
      block: Its inputs and outputs are values of the pipeline.
    """

    phase: Phase
    stage: int
    level: int
    block: Block

    @property
    def outputs(self) -> tuple[Var, ...]:
        """The values that it makes for others."""
        return tuple(a for a in self.block.outputs if isinstance(a, Var))


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """A step as the programs of its stages.

    Attributes:
      stages: S.
      microbatches: M.
      inputs: The step's inputs.
      parts: A microbatch's part of an input -> (the input, the axis of its examples).
      programs: All programs by phase, level and stage; of a phase and stage one, of "update" one a level.
      joins: A value of one microbatch -> (what all microbatches' values are joined to, the name of a reduction or the
        axis of the examples).
      homes: The stage of each input of the state.
      weights: Those that the gradient program reads, in the order of their first use.
      outputs: The step's outputs.
    """

    stages: int
    microbatches: int
    inputs: tuple[Var, ...]
    parts: Mapping[Var, tuple[Var, int]]
    programs: tuple[StageProgram, ...]
    joins: Mapping[Var, tuple[Var, str | int]]
    homes: Mapping[Var, int]
    weights: tuple[Var, ...]
    outputs: tuple[Atom, ...]

    def describe(self, paths: Mapping[Var, str]) -> str:
        """The weights of each stage, in words."""
        shown = []
        for stage in range(self.stages):
            names = [paths[v] for v in self.weights if self.homes[v] == stage]
            shown.append(f"stage {stage}: {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}")
        return f"{len(self.programs)} programs; {'; '.join(shown)}"
