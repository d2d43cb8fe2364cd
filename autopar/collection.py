"""Python's collector of cyclic garbage, while a program is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: Whether it was `paused_collection` that turned it off.
_is_paused = False


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Nothing is collected in between, for passes keep what they allocate.

    Each collection would walk all of JAX's and the user's objects: a third of the time of planning thousands of
    equations.
    """
    global _is_paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _is_paused = True
    try:
        yield
    finally:
        _is_paused = False
        gc.enable()


@contextlib.contextmanager
def resumed_collection() -> Iterator[None]:
    """As ever, inside of a pause, for what runs programs and takes seconds: measuring."""
    if not _is_paused:
        yield
        return
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
