"""Helpers for tests and benchmarks of training by several workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autopar.errors import ArgumentsError
from autopar.launch.group import everyone
from autopar.launch.slowness import SLOWNESS


@contextlib.contextmanager
def slow(rank: int, factor: float, *, least_s: float = 0.0) -> Iterator[None]:
    """Makes one rank's steps with `sync=` seem slower than they are: a straggler, emulated by sleeping.

    A client's or worker's own computation takes longer; exchanges and servers don't.

    Args:
      rank: The rank to slow down.
      factor: Factor of its computation's time.
      least_s: Least seconds of a step on all ranks, and `factor` times as many on this one. They are mostly slept, so
        that ranks which share cores differ by `factor` alone.

    Raises:
      ArgumentsError: there is no such rank, or a number below 1 (`factor`) or 0 (`least_s`).

    Example:
      >>> with slow(rank=0, factor=10):
      ...     pass  # train
    """
    group = everyone()
    if not 0 <= rank < group.size:
        raise ArgumentsError(f"slow(rank={rank}): there are {group.size} ranks, from 0")
    if factor < 1 or least_s < 0:
        raise ArgumentsError(f"slow(factor={factor}, least_s={least_s}): give a factor from 1, and seconds from 0")
    before = (SLOWNESS.factor, SLOWNESS.least_s)
    SLOWNESS.factor, SLOWNESS.least_s = (factor if rank == group.rank else 1.0), least_s
    try:
        yield
    finally:
        SLOWNESS.factor, SLOWNESS.least_s = before
