"""Counts what is compiled, and by which thread: a program that is compiled beside the steps no step compiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.monitoring

from autopar.backends.background import THREAD, beside

_threads: list[str] = []


def _listen(event: str, seconds: float, **_: Any) -> None:
    if event.endswith("/backend_compile_duration"):
        _threads.append(threading.current_thread().name)


jax.monitoring.register_event_duration_secs_listener(_listen)


class Compilations:
    """The threads that have compiled a program, one name for each."""

    def __init__(self, threads: list[str]) -> None:
        self._threads = threads

    @property
    def here(self) -> int:
        """Programs that this thread has compiled."""
        return self._threads.count(threading.current_thread().name)

    @property
    def beside(self) -> int:
        """Programs that were compiled beside the steps."""
        return self._threads.count(THREAD)


def finish() -> None:
    """Wait until nothing is being compiled beside the steps."""
    beside("nothing", lambda: None).wait()


@contextmanager
def compilations() -> Iterator[Compilations]:
    """What is compiled in a block, and beside the steps in it."""
    finish()
    before = len(_threads)
    threads: list[str] = []
    yield Compilations(threads)
    finish()
    threads += _threads[before:]
