"""`SLOWNESS`: how much slower this process pretends to be (`autopar.testing.slow`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Slowness:
    """The pretended speed of this process: `factor` times the time that its computation takes, or `least_s` seconds (0:
    not set)."""

    def __init__(self) -> None:
        self.factor, self.least_s = 1.0, 0.0

    @property
    def is_on(self) -> bool:
        return self.factor > 1 or self.least_s > 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Sleeps after a block, which waits for what it computes, to make it seem slower."""
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        more = (self.least_s or took) * self.factor - took
        if more > 0:
            time.sleep(more)


SLOWNESS = Slowness()
