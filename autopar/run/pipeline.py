"""`PipelineRunner`: calls a step whose stages are on devices of their own, in the order of a schedule.

The devices of a stage (replicas) take microbatches in turn, hold the same weights, and each runs the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.backends.stage_device import StageDevice
from autopar.errors import StepError
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Var
from autopar.ir.timeline import Timeline
from autopar.launch.progress import PROGRESS
from autopar.run.buffers import with_own_buffers
from autopar.run.kept_placements import KeptArguments
from autopar.run.stage_executor import StageExecutor
from autopar.run.stage_leaves import StageLeaves
from autopar.run.stage_values import Arguments, Values
from autopar.tables.staged import StageArray


class PipelineRunner:
    """Calls a planned step on flat arrays, its stages on devices of their own.

    Args:
      step: The programs.
      timeline: What all devices do.
      devices: All of them, by number; this process runs the programs of its own.
      out_tree: The structure of the results.
      donate: Whether states are updated in place.
      kept: Brings other arguments to the stages.
    """

    def __init__(
        self,
        step: StagedStep,
        timeline: Timeline,
        devices: Sequence[StageDevice],
        out_tree: Any,
        donate: bool,
        kept: KeptArguments,
    ) -> None:
        self._step, self._out_tree, self._donate, self._kept = step, out_tree, donate, kept
        self.timeline = timeline
        self.executor = StageExecutor(step, timeline, devices, _last_readers(step) if donate else {})
        self.messages = self.executor.messages
        pairs = zip(timeline.actions, timeline.drops, strict=True)
        self._actions = [pair for pair in pairs if self.executor.takes_part(pair[0])]
        self._leaves = StageLeaves(step, self.executor, timeline.given)
        first = (leaf[0] if isinstance(leaf, tuple) else leaf for leaf in step.inputs)
        self._states = {k for k, var in enumerate(first) if var in step.homes}
        self._is_new = True

    def lower(self) -> Any:
        """A pipeline is several programs."""
        raise StepError("a step in stages runs in several programs, and so can't be traced into one (lower, jax.jit)")

    def loads(self) -> None:
        """None: no capacity is measured."""

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The step's results, of flat arrays; new states are where their stages are."""
        if self._is_new and self._donate:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        self.executor.compile()  # before anything is given away
        self._kept.look(leaves)
        arguments = Arguments(self._leaves.arguments(leaves), self._step, self._kept)
        values = Values(self.executor.devices, arguments.put, self._step.divided)
        self._leaves.put(values)  # before any of their devices donates its own
        for leaf in leaves if self._donate else ():
            if isinstance(leaf, StageArray):
                leaf.hand_on()
        self.executor.run(self._actions, values)
        if self.messages is not None:
            with PROGRESS.during("waiting for the other stages", "waits"):
                self.messages.finish()
        results = self._leaves.results(self._step.outputs, values, self.timeline.results, arguments.given)
        return self._out_tree.unflatten(results)


def _last_readers(step: StagedStep) -> dict[StageProgram, tuple[int, ...]]:
    """Of each program the positions of the state's leaves that no later one reads: their buffers take the new ones."""
    readers: dict[Var, tuple[StageProgram, int]] = {}
    outputs = set(step.results)
    for program in step.programs:
        for k, var in enumerate(program.block.inputs):
            if var in step.homes and step.homes[var] == program.stage and var not in outputs:
                readers[var] = program, k
            else:
                readers.pop(var, None)  # read where it was sent to
    positions: dict[StageProgram, list[int]] = {}
    for program, k in readers.values():
        if program.phase == "update":
            positions.setdefault(program, []).append(k)
    return {program: tuple(numbers) for program, numbers in positions.items()}
