"""Everything that autopar raises or warns with.

Every message says what is wrong, where (the user's file and line, where there is one) and what to do.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

import jax


class AutoparError(Exception):
    """Base class of all errors that autopar raises on purpose."""


class ArgumentsError(AutoparError):
    """The step's arguments, or autopar's own options, don't fit."""


class StateError(ArgumentsError):
    """The state can't be told from the other arguments, or the step doesn't return it as it was given."""


class DonatedStateError(AutoparError, RuntimeError):
    """A state was used again after it had been given to the step, which updates it in place.

    JAX raises a RuntimeError for arrays that were donated: this is one, too.
    """


def donated(what: str) -> DonatedStateError:
    """Returns the error for reading a state that was given to a step."""
    return DonatedStateError(
        f"{what} was given to a step, which updates its state in place: go on with the state that the step returned, "
        "or keep old states with parallelize(step, donate=False)"
    )


class StrategyError(ArgumentsError):
    """A strategy names a method or a parameter that doesn't exist, or that can't be had."""


class PlanError(ArgumentsError):
    """A plan can't be read from its file, or doesn't fit the step that is to be run by it."""


class StepError(AutoparError):
    """The step isn't a function of its arguments, so no plan of it can be right."""


class TimelineError(AutoparError):
    """A timeline of servers is impossible: a push comes twice, is of weights that aren't there yet, or exceeds the
    bound."""


class VerificationError(AutoparError):
    """The planned step doesn't return what the plain step returns."""


class HostMemoryError(AutoparError, MemoryError):
    """A table, or a rank's share of one, doesn't fit into the memory of its host."""


class LaunchError(AutoparError):
    """The processes of a job can't be started, or can't work together."""


class CheckpointError(AutoparError):
    """A state can't be saved, or a checkpoint can't be restored."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint: none was saved there, or the first save was interrupted."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint isn't what was saved: a file of it is damaged, cut short, missing or of another checkpoint."""


class StabilityWarning(UserWarning):
    """Training may diverge, by the numbers that were given."""


class LoneClientWarning(UserWarning):
    """A step with `sync=` has no other client to exchange with: it trains as the plain step does."""


class StateWarning(UserWarning):
    """Something looks like state and isn't treated so: the step runs plain, or drops a part's new value."""


def is_number(value: object) -> bool:
    """Says whether a user's value is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(what: str, value: object, least: int = 1, otherwise: str = "", of: str = "") -> None:
    """Raises ArgumentsError if a user's value is no whole number from `least` on. `what`: its name, with %r for it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentsError(f"{what % (value,)}: give a whole number{of}, {least} or more{otherwise}")


def note_lost_rows(error: BaseException) -> None:
    """Adds a note to an error raised while deferred rows were brought up to date in place."""
    error.add_note(
        "autopar: deferred rows were being brought up to date in place: some are lost, and the state with them. Go on "
        "from a checkpoint (autopar.restore)"
    )


class RecompileWarning(UserWarning):
    """A call had other shapes than the calls before, so the step is planned and compiled again."""


class CapacityWarning(UserWarning):
    """A batch exceeded a measured capacity: its step took longer, and the plan grows."""


class SlowPlanWarning(UserWarning):
    """A small change of the step, or of its batch, would make it many times faster."""


class AlphaDriftWarning(UserWarning):
    """Batches touch many more or many fewer rows of a table than the one that the plan was made by."""


#: Where no frame is the user's: autopar itself, and JAX, which calls it back.
_OURS = tuple(str(Path(file).parent) + os.sep for file in (__file__, jax.__file__))
_LIBRARIES = tuple(os.path.realpath(path) + os.sep for path in (Path(__file__).parent, sysconfig.get_paths()["stdlib"]))


@functools.cache
def is_library(file: str) -> bool:
    """Says whether a file is no code of the user's: an installed package, the standard library, autopar."""
    real = os.path.realpath(file)
    parts = real.replace("\\", "/")
    return (
        "/site-packages/" in parts
        or "/dist-packages/" in parts
        or real.startswith(_LIBRARIES)
        or file.startswith("<frozen")
    )


def users_line(frame: FrameType) -> str:
    """Returns file:line of the user's code that led to a frame, or else of the frame."""
    found: FrameType | None = frame
    while found is not None and is_library(found.f_code.co_filename):
        found = found.f_back
    found = found or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"


def warn(message: str, kind: type[Warning]) -> None:
    """Warns at the user's line that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)
