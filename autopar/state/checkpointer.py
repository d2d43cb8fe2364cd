"""`Checkpointer`: saves a training's checkpoints beside it, and resumes the training from them.

Ctrl-C and SIGTERM wait until the state can be saved (`Leaving`): handlers only note a signal. The training asks after
each step, where the state is whole, and all processes learn which signals any of them got. If JAX's preemption service
listens to SIGTERM, it is asked instead.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import jax

from autopar import jax_compat
from autopar.batches.iterator import telling
from autopar.batches.on_demand import BatchesOnDemand
from autopar.errors import (
    ArgumentsError,
    CheckpointError,
    DamagedCheckpointError,
    DonatedStateError,
    PlanError,
    StateWarning,
    check_whole,
    warn,
)
from autopar.interrupts import SAY_S, SECOND_S, Handler, Note
from autopar.ir.plan import Plan
from autopar.ir.typed_json import MalformedError, from_json, plan_text, to_json
from autopar.jax_types import Json, Leaf, Pytree
from autopar.launch.faults import Hooks
from autopar.launch.group import Group, everyone, go_on
from autopar.launch.notices import LOG
from autopar.launch.progress import PROGRESS
from autopar.run.step import MethodStep, ParallelStep
from autopar.state.checkpoint import PendingSave, Written, restore, template_of
from autopar.state.files.arrays import require_location
from autopar.state.files.locations import POINTER, Folder, Location, location_of, named, put, remove_all
from autopar.state.init import init

#: Signals, and the handlers that they have where nobody set one.
_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
#: Numbers questions to JAX's preemption service from 1, in a resumed training, too: a SIGTERM before the first question
#: is answered at number 1.
_ASKED = itertools.count(1)


class Leaving:
    """Holds signals back while it is entered, if Python's own handlers would answer them. `seldom`: as for
    `telling`."""

    def __init__(self, group: Group, *, seldom: bool = False) -> None:
        self._tell = telling(group, seldom=seldom)
        self._before: dict[int, Leaf] = {}
        #: Signals, and when the first one came, by `time.monotonic()`.
        self._noted: dict[int, float] = {}

    def enter(self) -> None:
        """Replaces Python's own handlers, in the main thread: signals go to no other."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, default in _DEFAULTS.items():
            handler = signal.getsignal(number)
            found = handler.previous if isinstance(handler, Handler) else handler
            if number == signal.SIGTERM and jax_compat.listens_for_preemption():
                continue
            if found is default or Hooks.have_set(found):
                self._before[number] = handler
                signal.signal(number, Note(self._note))

    def exit(self, *, answers: bool) -> None:
        """Restores the handlers before. `answers`: leave by a signal that came after the last step."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        noted = next(iter(self._noted), None)
        self._noted.clear()
        if answers and noted is not None:
            self._leave(noted)

    def answer(self, save: Callable[[], None]) -> None:
        """Saves and leaves, if any process got a signal. Collective: all are at the same step."""
        signals = self._tell(tuple(self._noted))
        if not signals and not jax_compat.reached_preemption(next(_ASKED)):
            return
        save()
        self._leave(signals[0] if signals else signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._noted:
            self._noted[number] = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(self._say, (number,))  # `threading` has locks, which this thread may hold
        elif time.monotonic() - self._noted[number] >= SECOND_S:  # whatever is lost
            self._leave(number)

    def _say(self, number: int) -> None:
        """Tells the user, from a thread, that a signal waits."""
        time.sleep(SAY_S)
        if number in self._noted:
            name = signal.Signals(number).name
            sys.stderr.write(f"autopar: {name} waits for checkpoints.step(state). A second one goes through at once\n")

    def _leave(self, number: int) -> NoReturn:
        """Ends as by a signal: by a KeyboardInterrupt, or with the exit code that shells use."""
        self._noted.clear()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)


@dataclass(frozen=True)
class Maker:
    """Makes and restores states. `step`, `batch`, `call`: as for `Checkpointer`."""

    step: ParallelStep | MethodStep | None
    batch: Pytree
    call: Callable[[Pytree], Sequence[Pytree]] | None

    def made(self, make_state: Callable[..., Pytree], args: Sequence[Pytree]) -> Pytree:
        if self.step is None:
            return make_state(*args)
        return init(make_state, *args, step=self.step, batch=self.batch, call=self.call)

    def restored(
        self, path: Location, plan: Plan | None, make_state: Callable[..., Pytree], args: Sequence[Pytree], resize: bool
    ) -> tuple[Pytree, Pytree]:
        """Restores a state and its position. `plan`: the step's plan when it was saved; `resize`: as for `resume`."""
        if self.step is None:
            like = make_state(*args) if resize else template_of(make_state, *args)
            return restore(path, like, resize=resize)
        pure = self.step.step if isinstance(self.step, MethodStep) else self.step
        own = pure.planner
        if plan is not None and pure.latest is None and own.may_follow(plan):
            pure.planner = own.following(plan)
        try:
            return self._restored(path, make_state, args, resize)
        except PlanError:  # the step has changed
            pure.planner = own
            return self._restored(path, make_state, args, resize)

    def _restored(
        self, path: Location, make_state: Callable[..., Pytree], args: Sequence[Pytree], resize: bool
    ) -> tuple[Pytree, Pytree]:
        if resize:
            return restore(path, self.made(make_state, args), resize=True)
        shapes = jax.eval_shape(make_state, *args)  # `init` makes arrays of all
        return restore(path, shapes, step=self.step, batch=self.batch, call=self.call)


_CHOICES: Mapping[Any, Callable[[float, float], float]] = {max: max, min: min, "max": max, "min": min}


class Positioned(Protocol):
    """Batches that know their position, as those of `autopar.shard`."""

    def state(self) -> Mapping[str, Json]:
        """Returns the position, as JSON holds it."""
        ...

    def restore(self, state: Pytree) -> None:
        """Goes on from a position."""
        ...


B = TypeVar("B", bound="Positioned | None")


@dataclass(frozen=True)
class _Saving:
    """A save that is under way; a thread writes `files`."""

    step: int
    save: PendingSave
    files: Future[Written]


class Checkpointer:
    """Saves a training's state beside it, keeps the last checkpoints and the best one, and resumes from the latest.

    A context manager. All ranks, or processes of `jax.distributed`, make the same calls, and the folder is on a file
    system that all of them see, or in an object store.

    Args:
      folder: For the checkpoints of one training: a path, made if it doesn't exist, "s3://bucket/run" or
        "gs://bucket/run". None keeps none.
      step: The step that `parallelize` returned: a restored state goes where its plan has it, and the plan is kept,
        too. Without it `resume` makes and restores ordinary arrays.
      batch, call: With `step`, as for `init`.
      keep: Number of last checkpoints that are kept; None: all.
      every: Steps from one save to the next. None: only the best state is saved, and the last.
      best: The name of a metric and `max` or `min`: the checkpoint with the best value is kept as well. See
        `evaluated`.
      async_save: Whether training goes on while files are written. It needs memory for a copy of what this process
        writes; otherwise a save needs none.

    Attributes:
      steps: Number of steps trained, including those before the training was resumed.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, numpy as np, autopar
      >>> @autopar.parallelize
      ... def train_step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> def make_state(key):
      ...     return jax.random.normal(key, (1000, 8))
      >>> folder, shapes = tempfile.mkdtemp(), jax.ShapeDtypeStruct((4,), jnp.int32)
      >>> for epochs in (1, 2):  # the second one goes on behind the first
      ...     batches = autopar.shard(np.arange(20, dtype=np.int32), batch_size=4, epochs=epochs)
      ...     with autopar.Checkpointer(folder, step=train_step, batch=shapes, every=2) as checkpoints:
      ...         state, batches = checkpoints.resume(make_state, jax.random.key(0), batches=batches)
      ...         for batch in batches:
      ...             state, _ = train_step(state, batch)
      ...             checkpoints.step(state)
      >>> checkpoints.all_steps()
      [6, 8, 10]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        step: ParallelStep | MethodStep | None = None,
        batch: Pytree = None,
        call: Callable[[Pytree], Sequence[Pytree]] | None = None,
        keep: int | None = 3,
        every: int | None = None,
        best: tuple[str, Any] | None = None,
        async_save: bool = True,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None:
                check_whole(f"{name}=%r", value, otherwise=", or None")
        if best is not None and (not isinstance(best, tuple) or len(best) != 2 or best[1] not in _CHOICES):
            raise ArgumentsError(f'best={best!r}: give the name of a metric and max or min, such as ("auc", max)')
        if best is not None and (not isinstance(best[0], str) or best[0] == "step"):  # the file has a "step" already
            raise ArgumentsError(f"best={best!r}: a metric's name is a text other than 'step'")
        self.steps = 0
        self._kept = None if folder is None else History(location_of(folder))
        self._planned, self._maker = step, Maker(step, batch, call)
        self._keep, self._every, self._async_save = keep, every, async_save
        self._metric, self._choose = (None, max) if best is None else (best[0], _CHOICES[best[1]])
        self._group = everyone()
        if self._kept is not None:  # before hours of training
            self._group.together(CheckpointError, functools.partial(require_location, self._kept.path), "a folder")
        self._thread = ThreadPoolExecutor(1, "autopar-checkpoint")
        if step is not None and not isinstance(step, (ParallelStep, MethodStep)):
            raise ArgumentsError(
                f"Checkpointer takes a step that parallelize returned, not a {type(step).__name__}; of nnx objects "
                "keep nnx.state(...), without step="
            )
        clients = None if step is None else step.clients
        self._leaving = Leaving(self._group, seldom=clients is not None)
        self._batches: Positioned | None = None
        self._latest: tuple[Any, Any] | None = None
        self._saving: _Saving | None = None
        self._saved: int | None = None
        noted = None if folder is None else self._noted_best()
        self._best = noted if noted is not None and self._metric in (None, noted.name) else None
        self._is_new = not self.all_steps()

    # --- what there is ---

    def all_steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order. Collective."""
        return [] if self._kept is None else list(self._led(self._history.steps, tuple[int, ...]))

    def latest_step(self) -> int | None:
        """Returns the step of the latest complete checkpoint, or None. Collective."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint, or None."""
        return None if self._best is None else self._best.step

    def path(self, step: int) -> Location:
        """Returns the path of a step's checkpoint, for `autopar.restore`."""
        return self._history.folder(step).path

    # --- training ---

    def resume(
        self, make_state: Callable[..., Pytree], *args: Pytree, batches: B = None, resize: bool = False
    ) -> tuple[Pytree, B]:
        """Restores the latest whole checkpoint and its position in the data, or makes the first state. Collective.

        Damaged checkpoints are passed over, with a warning. The step follows the plan that was saved with it, if it has
        as many devices and no `plan=` of its own.

        Args:
          make_state: Makes the state from `args`, as for `init`.
          *args: Arrays, random keys, numbers.
          batches: The result of `autopar.shard`, or anything else with its `state()` and `restore(position)`.
          resize: Whether saved tables are resized to the numbers of rows that `make_state` makes, as by
            `autopar.resize`. It needs memory for a second state.

        Returns:
          (state, batches).

        Raises:
          CheckpointError: no checkpoint can be restored.
        """
        if isinstance(batches, BatchesOnDemand):
            raise ArgumentsError(
                "resume: workers of sync=Async() and Elastic() do steps of their own, and a Checkpointer saves where "
                "all have done as many: call autopar.save behind a loop that has ended, and autopar.restore"
            )
        if batches is not None and not (hasattr(batches, "state") and hasattr(batches, "restore")):
            raise ArgumentsError(
                f"resume: batches is a {type(batches).__name__}, which doesn't know where it is: give what "
                "autopar.shard(...) returns"
            )
        self._batches, self._is_new = batches, True
        first: DamagedCheckpointError | None = None
        left_out: set[int] = set()
        for step in reversed(self.all_steps()):
            try:
                state, position = self._maker.restored(self.path(step), self._known_plan(), make_state, args, resize)
            except DamagedCheckpointError as error:
                warn(f"the checkpoint of step {step} is left out: {error}", StateWarning)
                first, left_out = first or error, {*left_out, step}
                continue
            if self._best is not None and self._best.step in left_out:  # it is removed, and may be made again
                self._best = None
                self._led(self._history.forget_best)
            if batches is not None and position is not None:
                batches.restore(position)
            self.steps = self._saved = step
            return state, batches
        if first is not None:
            raise first
        return self._maker.made(make_state, args), batches

    def step(self, state: Pytree) -> None:
        """Counts a step, and saves when it is time to. Call it after each step. Collective.

        It answers Ctrl-C and SIGTERM: it saves the state, and leaves the training by a KeyboardInterrupt, or with exit
        code 143.

        Args:
          state: The state that the step returned.

        Raises:
          CheckpointError: this save failed, or the one that was under way.
        """
        self._require_resumed()
        self.steps += 1
        self._latest = state, None if self._batches is None else dict(self._batches.state())
        self._look()
        self._leaving.answer(self._finish_and_say)
        if self._every is not None and self.steps % self._every == 0:
            self._save()

    def evaluated(self, state: Pytree, metrics: Mapping[str, Pytree]) -> None:
        """Saves the state if it is the best so far. Call it after an evaluation, after `step`. Collective.

        Args:
          state: The state that was evaluated.
          metrics: Name -> value, among them the one of `best`. The first process's counts.
        """
        if self._metric is None:
            raise ArgumentsError('evaluated needs to know what is best: Checkpointer(..., best=("auc", max))')
        if self._metric not in metrics:
            raise ArgumentsError(f"metrics has no {self._metric!r}, by which checkpoints are kept: {sorted(metrics)}")
        self._require_resumed()
        value = self._group.first(float(metrics[self._metric]), "a metric")
        best = self._best
        if math.isnan(value) or (best is not None and self._choose(value, best.value) == best.value):
            return
        self._best = Best(self.steps, self._metric, value)
        self._latest = state, self._latest[1] if self._latest is not None else None
        if self._saved == self.steps:
            self._tidy()
        elif self._saving is None or self._saving.step != self.steps:
            self._save()

    def save(self) -> None:
        """Saves the state of the latest step now. Collective."""
        if self._saved != self.steps and (self._saving is None or self._saving.step != self.steps):
            self._save()

    def wait(self) -> None:
        """Waits until the save that is under way is on the disk. Collective."""
        if self._saving is not None:
            self._commit(self._saving)

    def __enter__(self) -> Checkpointer:
        self._leaving.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                self._finish()
            elif not self._group.several:
                self.wait()
        finally:
            self._thread.shutdown()
            self._leaving.exit(answers=kind is None)

    # --- saving ---

    @property
    def _history(self) -> History:
        if self._kept is None:
            raise CheckpointError("there are no checkpoints: Checkpointer(None) keeps none")
        return self._kept

    def _finish(self) -> None:
        """Saves the latest state if necessary and waits, even if an earlier save failed: there may be space by now."""
        failed: CheckpointError | None = None
        try:
            self.wait()
        except CheckpointError as error:
            failed = error
        try:
            if self._latest is not None:
                self.save()
        except DonatedStateError:
            warn(
                f"the state of step {self.steps} was given to another step, and can't be saved: the latest checkpoint "
                "is an earlier one. Call checkpoints.step(state) right after each step",
                StateWarning,
            )
        self.wait()
        if failed is not None and self._saved != self.steps:
            raise failed
        if failed is not None:
            warn(f"an earlier save failed, the one of step {self.steps} didn't: {failed}", StateWarning)

    def _finish_and_say(self) -> None:
        self._finish()
        if self._kept is not None and self._group.rank == 0:
            LOG.info("step %d is saved in %s; the training is left", self.steps, self._history.path)

    def _save(self) -> None:
        if self._kept is None:
            return
        if self._latest is None:
            raise CheckpointError("there is no state to save yet: call checkpoints.step(state) behind a step")
        self.wait()
        state, position = self._latest
        folder = self._history.folder(self.steps)
        with PROGRESS.during("saving a checkpoint"):
            save = PendingSave.begin(folder, state, position, self._group, copied=self._async_save, step=self.steps)
            self._saving = _Saving(self.steps, save, self._thread.submit(save.write))
        if not self._async_save:
            self.wait()

    def _look(self) -> None:
        """Commits a save once all processes have written their files. They ask each other 1, 2, 4, ... steps after it
        began."""
        saving = self._saving
        if saving is None:
            return
        passed = self.steps - saving.step
        if passed & (passed - 1) == 0 or not self._group.several:
            if all(self._group.values(saving.files.done(), "files of a checkpoint")):
                self._commit(saving)

    def _commit(self, saving: _Saving) -> None:
        with PROGRESS.during("saving a checkpoint"):
            while not saving.files.done():  # the watchdog must not take a slow disk for a process that hangs
                wait([saving.files], timeout=1.0)
                go_on("saving a checkpoint")
            self._saving = None  # an interrupted commit isn't tried again
            try:
                saving.save.commit(saving.files.result)
            except CheckpointError:
                if self._best is not None and self._best.step == saving.step:
                    self._best = self._noted_best()
                raise
        self._saved = saving.step
        self._tidy()

    def _tidy(self) -> None:
        """Writes the files that belong to the checkpoints, and removes checkpoints that aren't kept."""

        def tidy() -> None:
            history, best = self._history, self._best
            known = [step for step in history.steps() if step <= self.steps]
            if best is not None and best.step in known and best != history.best():
                history.note_best(best)
            plan = None if self._planned is None else self._planned.plan
            if plan is not None and plan.pipeline is None and plan.clients_plan is None:
                history.note_plan(plan)
            noted = history.best()  # until the new one is saved, too
            kept = known if self._keep is None else known[-self._keep :]
            history.clean([*kept, *([] if noted is None else [noted.step])])

        self._led(tidy)

    def _known_plan(self) -> Plan | None:
        plan = None if self._planned is None else self._led(self._history.known_plan, Plan | None)
        return None if plan is None else replace(plan, source=str(self._history.plan_file))

    def _require_resumed(self) -> None:
        if not self._is_new:
            raise CheckpointError(
                f"{self._history.path} has checkpoints: go on from them, checkpoints.resume(make_state, ...), or give "
                "another folder"
            )

    def _noted_best(self) -> Best | None:
        return self._led(self._history.best, Best | None)

    def _led(self, work: Callable[[], object], kind: object = Json) -> Json:
        """Returns to all what the first process's `work` returned. `kind`: its type."""
        read = functools.partial(from_json, kind, where="what was found")
        return self._group.led(CheckpointError, lambda: to_json(work()), "checkpoints", read)


# --- `History`: the checkpoints of one training, by step, in a folder ---
#
# run/step-00002000/    a checkpoint, as `autopar.save` writes it
# run/best.json         {"step": 1000, "auc": 0.79}
# run/plan.json         the plan of the step, as `Plan.save` writes it


_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_BEST, _PLAN = "best.json", "plan.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far; `name` is the metric's."""

    step: int
    name: str
    value: float

    def __post_init__(self) -> None:
        if self.step < 0 or math.isnan(self.value):
            raise ValueError(f"step {self.step} can't be the best with {self.name} {self.value}")


@dataclass(frozen=True)
class History:
    """A folder of checkpoints. One process writes to it."""

    path: Location

    def folder(self, step: int) -> Folder:
        return Folder(self.path / f"step-{step:08d}")

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        return sorted(step for step, path in self._folders() if (path / POINTER).is_file())

    def best(self) -> Best | None:
        """Returns the best checkpoint, if any was evaluated; raises CheckpointError if the file is damaged. It isn't
        guessed then, as the next save would remove the true best one."""
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
        put(self.path / _BEST, (json.dumps({"step": best.step, best.name: best.value}) + "\n").encode())

    def forget_best(self) -> None:
        with named(self.path / _BEST, "removed"):
            (self.path / _BEST).unlink(missing_ok=True)

    @property
    def plan_file(self) -> Location:
        return self.path / _PLAN

    def known_plan(self) -> Plan | None:
        """Returns the step's plan, if there is one that this version of autopar reads."""
        try:
            return Plan.load(self.plan_file) if self.plan_file.is_file() else None
        except PlanError as error:
            warn(f"the step is planned anew: {error}", StateWarning)
            return None

    def note_plan(self, plan: Plan) -> None:
        put(self.plan_file, plan_text(plan).encode())

    def clean(self, kept: Sequence[int]) -> None:
        """Removes all checkpoints that aren't kept, and the remains of killed saves, as far as possible."""
        for step, path in self._folders():
            if step not in kept:
                with contextlib.suppress(OSError):  # the next save tries again
                    (path / POINTER).unlink(missing_ok=True)  # first: a part of a checkpoint must not count as one
                    remove_all(path)

    def _folders(self) -> list[tuple[int, Location]]:
        if not self.path.is_dir():
            return []
        return [(int(match[1]), path) for path in self.path.iterdir() if (match := _STEP.fullmatch(path.name))]
