"""`History`: the checkpoints of one training, by step, in a folder.

run/step-00002000/    a checkpoint, as `autopar.save` writes it
run/best.json         {"step": 1000, "auc": 0.79}
run/plan.json         the plan of the step, as `Plan.save` writes it
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import CheckpointError, PlanError, StateWarning, warn
from autopar.ir.plan import Plan
from autopar.ir.plan_file import plan_text
from autopar.ir.typed_json import MalformedError, from_json
from autopar.state.files.folder import POINTER, Folder
from autopar.state.files.places import Place, named, place_of, put, remove_all

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_BEST, _PLAN = "best.json", "plan.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far. `name`: of the metric."""

    step: int
    name: str
    value: float

    def __post_init__(self) -> None:
        if self.step < 0 or math.isnan(self.value):
            raise ValueError(f"step {self.step} can't be the best with {self.name} {self.value}")


@dataclass(frozen=True)
class History:
    """A folder of checkpoints. One process writes to it."""

    path: Place

    @staticmethod
    def of(path: str | os.PathLike[str]) -> History:
        """Returns the folder that a user names; a CheckpointError if there is no such kind of place."""
        return History(place_of(path))

    def folder(self, step: int) -> Folder:
        """Returns the folder of a step's checkpoint."""
        return Folder(self.path / f"step-{step:08d}")

    def steps(self) -> list[int]:
        """Lists the steps of all checkpoints that are complete, in order."""
        return sorted(step for step, path in self._folders() if (path / POINTER).is_file())

    def best(self) -> Best | None:
        """Returns which was the best; None if none was evaluated.

        Raises:
          CheckpointError: the file is none that `note_best` wrote. Which checkpoint is the best isn't guessed: the next
            save would remove it.
        """
        path = self.path / _BEST
        with named(path, "read"):
            try:
                text = path.read_text()
            except FileNotFoundError:
                return None
        try:
            read = from_json(Mapping[str, float], json.loads(text), _BEST)
            names = [name for name in read if name != "step"]
            if len(names) != 1:
                raise MalformedError(f"{_BEST} has a step and one metric, not {sorted(read)}")
            return from_json(Best, {"step": read.get("step"), "name": names[0], "value": read[names[0]]}, _BEST)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: remove it, and the next evaluation is the best (copy the best checkpoint first, "
                f"the next save may remove it). {error}"
            ) from error

    def note_best(self, best: Best) -> None:
        """Writes down which is the best, down to the disk."""
        put(self.path / _BEST, (json.dumps({"step": best.step, best.name: best.value}) + "\n").encode())

    def forget_best(self) -> None:
        """Writes down that none is the best."""
        with named(self.path / _BEST, "removed"):
            (self.path / _BEST).unlink(missing_ok=True)

    @property
    def plan_file(self) -> Place:
        """Names the file of the step's plan."""
        return self.path / _PLAN

    def known_plan(self) -> Plan | None:
        """Returns the plan of the step; None if there is none that this version of autopar reads."""
        try:
            return Plan.load(self.plan_file) if self.plan_file.is_file() else None
        except PlanError as error:
            warn(f"the step is planned anew: {error}", StateWarning)
            return None

    def note_plan(self, plan: Plan) -> None:
        """Writes down the step's plan, as `Plan.save` does, down to the disk."""
        put(self.plan_file, plan_text(plan).encode())

    def clean(self, kept: Sequence[int]) -> None:
        """Removes all checkpoints but some, and what killed saves left, as far as that can be done."""
        for step, path in self._folders():
            if step not in kept:
                with contextlib.suppress(OSError):  # the next time
                    (path / POINTER).unlink(missing_ok=True)  # first: what is removed in part is none
                    remove_all(path)

    def _folders(self) -> list[tuple[int, Place]]:
        if not self.path.is_dir():
            return []
        return [(int(match[1]), path) for path in self.path.iterdir() if (match := _STEP.fullmatch(path.name))]
