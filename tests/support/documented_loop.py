"""The training scripts of docs/checkpoints.md, run as they stand there, interrupted and run again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import autopar
from tests.support.interrupting import ROWS, Step, interrupter, same

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BATCH_SIZE = 512  # the page's


class Script:
    """A script, with names for what it leaves open.

    Args:
      step: Planned.
      make: Makes its state.
      mesh: Of the batches.
      call: What is called in it, by which it is found: the page has one with `Checkpointer`, and one with `save`.
      **names: In place of autopar's own functions.
    """

    def __init__(
        self, step: Step, make: Callable[[], Any], mesh: Mesh | None = None, call: str = "save", **names: Any
    ) -> None:
        blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        code = next(block for block in blocks if "autopar.shard" in block and f"autopar.{call}(" in block)
        self._code = compile(code, str(PAGE), "exec")
        self._step, self._make = step, make
        # Endless: an interrupt always comes before its end.
        self._shard = lambda *data, **options: autopar.shard(*data, **options | {"mesh": mesh, "epochs": None})
        ids = np.random.default_rng(0).integers(0, ROWS, 5 * BATCH_SIZE)
        given = {"shard": self._shard, "MissingCheckpointError": autopar.MissingCheckpointError, **names}
        shapes = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
        self._names = {
            "autopar": SimpleNamespace(**given),
            "jax": jax,
            "data": ids.astype(np.int32),
            "key": jax.random.key(0),
            "make_state": lambda key: make(),
            "train_step": step,
            "batch_shapes": shapes,
        }

    def run(self) -> None:
        """Run it, until something is raised in it."""
        exec(self._code, dict(self._names))

    def undisturbed(self, steps: int) -> Any:
        """The state of a training that nobody interrupts."""
        state = self._make()
        batches = self._shard(self._names["data"], batch_size=BATCH_SIZE, shuffle=0)
        for _ in range(steps):
            state, _ = self._step(state, next(batches))
        return state


class Memory:
    """A checkpoint in memory, for hundreds of them in a second. `begin` is called when there is a state to train."""

    def __init__(self, make: Callable[[], Any], begin: Callable[[], None]) -> None:
        self._make, self._begin = make, begin
        self.saved: Any = None
        self.saves = 0

    def save(self, path: str, state: Any, *, position: Any) -> None:
        whole = jax.tree.map(np.array, autopar.materialize(state))
        self.saved = whole, dict(position)
        self.saves += 1

    def restore(self, path: str, like: Any, *, step: Any, batch: Any) -> Any:
        if self.saved is None:
            raise autopar.MissingCheckpointError("nothing was saved")
        state = jax.tree.map(jnp.array, self.saved[0])
        self._begin()
        return state, self.saved[1]

    def init(self, make_state: Any, key: Any, *, step: Any, batch: Any) -> Any:
        self._begin()
        return self._make()

    @property
    def names(self) -> dict[str, Any]:
        return {"save": self.save, "restore": self.restore, "init": self.init}


def check_interrupted_script(step: Step, make: Callable[[], Any], mesh: Mesh | None = None, count: int = 200) -> None:
    """A training that goes on from what it saved at each of `count` interrupts has the numbers of one without any."""
    Script(step, make, mesh).undisturbed(2)  # compiled
    with interrupter(4e-3) as found:
        memory = Memory(make, found.ask)
        script = Script(step, make, mesh, **memory.names)
        while memory.saves < count:
            with contextlib.suppress(KeyboardInterrupt):  # before its loop; within it is the script's own matter
                script.run()
    steps = int(memory.saved[0]["step"])
    assert steps > count // 2, f"only {steps} steps between {count} interrupts"
    same(memory.saved[0], script.undisturbed(steps))


def check_interrupted_checkpointer(
    folder: Path, step: Step, make: Callable[[], Any], mesh: Mesh | None = None, count: int = 20
) -> None:
    """The same of the script with `Checkpointer`, from the disk."""
    Script(step, make, mesh).undisturbed(2)
    with interrupter(10e-3) as found:

        class Asking(autopar.Checkpointer):
            def resume(self, *args: Any, **options: Any) -> Any:
                resumed = super().resume(*args, **options)
                found.ask()
                return resumed

        script = Script(step, make, mesh, "Checkpointer", Checkpointer=lambda _, **options: Asking(folder, **options))
        for _ in range(count):
            with contextlib.suppress(KeyboardInterrupt):
                script.run()
    with autopar.Checkpointer(folder) as checkpoints:
        steps = checkpoints.latest_step()
    assert steps is not None and steps >= count
    restored = autopar.restore(checkpoints.path(steps), jax.eval_shape(make)).state
    assert int(restored["step"]) == steps
    same(restored, script.undisturbed(steps))
