"""`beside`: compiles programs in a thread beside the steps, so that a step that needs one later finds it compiled.

JAX keeps what `jax.jit(f).lower(shapes).compile()` made for later calls of that `jax.jit(f)`, whichever thread it was,
if contexts are the same (64-bit types, precision, a mesh: `jax_compat.contexts`).

Invariants: one thread does all of it, in the order in which it was given. What is needed before its turn comes is
compiled by the step that needs it (`finish`), so that no step waits for programs that others need. What fails in the
thread is logged, and is compiled by the step that needs it, which raises what is to be raised. What nobody has any more
isn't compiled. A process that ends drops what waits, but finishes the one program that is being compiled: XLA aborts a
process that leaves it.

The thread has the priority of all others. XLA compiles in threads of its own, which don't take over another one, and a
slow thread that holds Python's lock would delay the steps. While it works, Python's threads take shorter turns: tracing
holds the lock for a tenth of a second, and a step takes it back some 20 times.
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

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
#: The thread's name.
THREAD = "autopar-compiles"
#: Seconds after which it leaves Python's lock to a thread that waits for it.
_TURN_S = 5e-4


class Compilation(Generic[_T]):
    """Holds what is compiled beside the steps, and its result."""

    def __init__(self, what: str, compile_all: Callable[[], _T], otherwise: _T | None) -> None:
        self._what, self._compile_all, self._otherwise = what, compile_all, otherwise
        self._enter_contexts = jax_compat.contexts()
        self._future: Future[_T | None] = Future()
        self._turn = threading.Lock()

    def run(self) -> None:
        """Compiles, in the thread, unless that was done elsewhere."""
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
            with context:
                result = self._compile_all()
        except Exception as error:
            text = "%s couldn't be compiled beside the steps, so that a step will do it: %s: %s"
            _logger.warning(text, self._what, type(error).__name__, error)
        finally:
            self._future.set_result(result)

    def drop(self) -> None:
        """Leaves it to the step that needs it."""
        if self._turn.acquire(blocking=False):
            self._future.set_result(self._otherwise)

    @property
    def has_begun(self) -> bool:
        """Returns whether it is being compiled, or nobody is to compile it any more."""
        return self._turn.locked()

    def is_done(self) -> bool:
        """Returns whether the compilation has ended."""
        return self._future.done()

    def finish(self) -> _T | None:
        """Returns the same as `wait`. What still waits for other programs is compiled here and now."""
        if self._turn.acquire(blocking=False):
            self._run(contextlib.nullcontext())
        return self.wait()

    def wait(self) -> _T | None:
        """Returns what the function returned, once it is done; `otherwise` if it failed or was dropped."""
        return self._future.result()


def beside(what: str, compile_all: Callable[[], _T], otherwise: _T | None = None) -> Compilation[_T]:
    """Compiles programs in the thread, when it has done what it was given before.

    Whoever needs them keeps what this returns. Once nobody does, they aren't compiled.

    Args:
      what: Which they are, for a message.
      compile_all: Lowers and compiles them. It runs nothing on several devices, where a step's collectives could meet
        it in another order.
      otherwise: What waiting for it returns where it failed, or was dropped.
    """
    compilation = Compilation(what, compile_all, otherwise)
    _compiler().add(compilation)
    return compilation


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Lets a thread that waits for Python's lock have it after 0.5 ms, in place of 5."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    mine = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == mine:  # else somebody has set another one
            sys.setswitchinterval(before)


class _Compiler:
    """The thread, and what waits for it."""

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
