"""Controls Python's garbage collector while programs are made."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def paused_collection(*, lasting: bool = False) -> Iterator[None]:
    """Stops garbage collection within a block: passes keep what they allocate, and each collection would walk all of
    JAX's and the user's objects, a third of the time of planning thousands of equations.

    `lasting`: the block's objects stay, as modules do, and only full collections look at them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if lasting and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation; the youngest would be walked at once
        gc.enable()


@contextlib.contextmanager
def returned_memory() -> Iterator[None]:
    """Gives the system what is free after a block that compiles.

    XLA's compiler allocates hundreds of MiB, which glibc would keep: the free parts are between those that stay.
    """
    try:
        yield
    finally:
        _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    """Returns glibc's `malloc_trim`; what does nothing with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # of musl, of macOS, of Windows
        return lambda pad: None
