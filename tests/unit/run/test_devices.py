"""`LateFallback`: a batch that exceeds a capacity waits for the fallback alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from autopar.backends.background import beside
from autopar.run.devices import LateFallback


class _Lowered:
    def __init__(self) -> None:
        self.compiled_by: list[str] = []

    def compile(self) -> None:
        self.compiled_by.append(threading.current_thread().name)


def test_it_does_not_wait_for_other_programs() -> None:
    def alone(state: int, batch: int) -> tuple[Any, ...]:
        return state if batch > 3 else state + batch, -batch, np.bool_(batch > 3)

    def whole(state: int, batch: int) -> tuple[int, int]:
        return state + batch, -batch

    gate, lowered = threading.Event(), _Lowered()
    other = beside("what takes its time", gate.wait)
    step = LateFallback(alone, whole, {0: 0}, lambda: lowered, across=False)
    step.prepare()
    assert step(10, 2) == [12, -2] and lowered.compiled_by == []
    late = threading.Timer(20, gate.set)  # or a fault would be a hang
    late.start()
    assert step(10, 5) == (15, -5)
    assert lowered.compiled_by == [threading.current_thread().name] and not other.is_done()
    late.cancel()
    gate.set()
    assert other.wait()
