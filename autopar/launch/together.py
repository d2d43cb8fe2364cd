"""`together`: work that succeeds on all ranks, or is an error on all of them.

A rank that fails alone leaves the others waiting for it, in the next exchange or for ever. So each says how it went,
and what went wrong anywhere is raised everywhere, with the rank's number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from autopar.errors import AutoparError
from autopar.launch.progress import PROGRESS
from autopar.mpi.limits import machine_name
from autopar.mpi.world import World

T = TypeVar("T")

#: Seconds between two looks at whether the others are done: files take long, and whoever writes wants the core.
_PAUSE_S = 5e-4


def together(ranks: World, kind: type[AutoparError], work: Callable[[], T]) -> list[T]:
    """What `work()` returns on each rank, in their order. Collective, but `work` itself must not be.

    Args:
      kind: What an error that isn't autopar's own is raised as.
      work: What this rank does. What it returns is sent to all ranks.

    Raises:
      AutoparError: on every rank, if any failed: of the class of the first failing rank's error where that is one of
        autopar's, else of `kind`.
    """
    own: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        own = error
    if ranks.comm is None:
        if own is None:
            return [result]
        raise own if isinstance(own, AutoparError) else kind(_text(own)) from own
    failure = None
    if own is not None:
        failure = (type(own) if isinstance(own, AutoparError) else kind, _text(own), machine_name())
    with PROGRESS.during("waiting for the others' files", "waits"):
        all_done = ranks.comm.Ibarrier()  # that leaves the core to ranks that still work
        while not all_done.Test():
            time.sleep(_PAUSE_S)
        outcomes = ranks.comm.allgather((failure, result))
    failed = [(rank, *failure) for rank, (failure, _) in enumerate(outcomes) if failure is not None]
    if not failed:
        return [value for _, value in outcomes]
    first, raised, text, machine = failed[0]
    if len(failed) == ranks.size and len({text for _, _, text, _ in failed}) == 1:
        raise raised(text) from own
    where = "" if machine == machine_name() else f" (on machine {machine})"
    others = f" Ranks {', '.join(str(rank) for rank, *_ in failed)} failed." if len(failed) > 1 else ""
    raise raised(f"rank {first}{where}: {text}{others}") from own


def led(ranks: World, kind: type[AutoparError], work: Callable[[], T]) -> T:
    """What `work()` returns on rank 0, on all ranks; only rank 0 does it. Collective.

    Errors as of `together`, but one of autopar's own as rank 0 raised it.
    """
    failure: AutoparError | None = None

    def lead() -> T | None:
        nonlocal failure
        try:
            return work() if ranks.rank == 0 else None
        except AutoparError as error:
            failure = error
            return None

    outcome = together(ranks, kind, lambda: (lead(), failure and (type(failure), str(failure))))[0]
    if outcome[1] is not None:
        raised, text = outcome[1]
        raise raised(text) from failure
    return cast(T, outcome[0])


def go_on(what: str) -> None:
    """Tell the watchdog that long work makes progress."""
    PROGRESS.mark(PROGRESS.last.step, what)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"
