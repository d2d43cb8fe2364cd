"""`SLOWNESS`: how much slower than it is this process pretends to be (`autopar.testing.slow`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Slowness:
    """Holds how long a worker's own computation takes at least. One a process: it is a property of the machine.

    Attributes:
      factor: How many times as long as it takes.
      least_s: Seconds to count with instead of what it takes; 0: there are none.
    """

    def __init__(self) -> None:
        self.factor, self.least_s = 1.0, 0.0

    @property
    def is_on(self) -> bool:
        """Says whether it pretends anything."""
        return self.factor > 1 or self.least_s > 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Sleeps behind a block, which waits for what it computes, for as long as it is to seem slower."""
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        more = (self.least_s or took) * self.factor - took
        if more > 0:
            time.sleep(more)


SLOWNESS = Slowness()
