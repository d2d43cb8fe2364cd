"""Compiles programs in a thread beside the steps, so that a step that needs one later finds it compiled.

JAX keeps what `jax.jit(f).lower(shapes).compile()` made for later calls of that `jax.jit(f)` in any thread, if contexts
are the same (64-bit types, precision, a mesh: `jax_compat.contexts`).

Invariants: one thread compiles everything in the order given. A program that is needed earlier is compiled by the step
that needs it (`finish`), so that no step waits for others' programs. A failure in the thread is logged; the step that
needs the program compiles it, and raises. A program that nobody holds any more isn't compiled. A process that ends
drops waiting programs, but finishes the one being compiled, since XLA aborts a process that leaves it.

The thread has normal priority: XLA compiles in threads of its own, which don't inherit another one, and a slow thread
that holds Python's lock would delay the steps. While it works, Python's threads take shorter turns, since tracing holds
the lock for a tenth of a second, and a step takes it back some 20 times.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from autopar import jax_compat
from autopar.garbage import returned_memory

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
THREAD = "autopar-compiles"
#: Seconds after which it yields Python's lock to a waiting thread.
_TURN_S = 5e-4


class Compilation(Generic[_T]):
    """A compilation beside the steps, and its result."""

    def __init__(self, what: str, compile_all: Callable[[], _T], otherwise: _T | None) -> None:
        self._what, self._compile_all, self._otherwise = what, compile_all, otherwise
        self._enter_contexts = jax_compat.contexts()
        self._future: Future[_T | None] = Future()
        self._turn = threading.Lock()

    def run(self) -> None:
        """Compiles in the thread, unless it was done elsewhere."""
        if self._turn.acquire(blocking=False):
            self._run(self._in_thread())

    @contextlib.contextmanager
    def _in_thread(self) -> Iterator[None]:
        self._enter_contexts()
        with _short_turns():
            yield

    def _run(self, context: contextlib.AbstractContextManager[None]) -> None:
        result = self._otherwise
        try:
            with context, returned_memory():
                result = self._compile_all()
        except Exception as error:
            text = "%s couldn't be compiled beside the steps, so that a step will do it: %s: %s"
            _logger.warning(text, self._what, type(error).__name__, error)
        finally:
            self._future.set_result(result)

    def drop(self) -> None:
        """Leaves the compilation to the step that needs it."""
        if self._turn.acquire(blocking=False):
            self._future.set_result(self._otherwise)

    @property
    def has_begun(self) -> bool:
        """The compilation runs, has ended, or was dropped."""
        return self._turn.locked()

    def is_done(self) -> bool:
        return self._future.done()

    def finish(self) -> _T | None:
        """Compiles here and now if the thread hasn't begun; returns the result."""
        if self._turn.acquire(blocking=False):
            self._run(contextlib.nullcontext())
        return self.wait()

    def wait(self) -> _T | None:
        """Returns the function's result once it is done; `otherwise` if it failed or was dropped."""
        return self._future.result()


def beside(what: str, compile_all: Callable[[], _T], otherwise: _T | None = None) -> Compilation[_T]:
    """Compiles programs in the thread, after those that it was given before.

    The caller keeps the returned object; once nobody does, the programs aren't compiled.

    `what`: names the programs, for a message. `compile_all`: lowers and compiles them. It runs nothing on several
    devices, where a step's collectives could meet it in another order. `otherwise`: the result if it failed, or was
    dropped.
    """
    compilation = Compilation(what, compile_all, otherwise)
    _compiler().add(compilation)
    return compilation


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Gives a thread that waits for Python's lock its turn after 0.5 ms, in place of 5."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    mine = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == mine:  # else other code has set another one
            sys.setswitchinterval(before)


class _Compiler:
    """The thread and its queue."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[weakref.ref[Compilation[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            self._thread.start()
            atexit.register(self._end)

    def add(self, compilation: Compilation[Any]) -> None:
        if self._thread.is_alive():
            self._waiting.put(weakref.ref(compilation))
        else:  # the process ends, or is a fork of the one that has the thread
            compilation.drop()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            if (compilation := waiting()) is not None:
                compilation.run()
            del compilation  # or it would stay until there is another one

    def _end(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (waiting := self._waiting.get_nowait()) is not None:
                if (compilation := waiting()) is not None:
                    compilation.drop()
        self._waiting.put(None)
        self._thread.join()


@functools.cache
def _compiler() -> _Compiler:
    return _Compiler()
