"""Python's collector of cyclic garbage, while a program is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Stops garbage collection within a block, for passes keep what they allocate.

    Each collection would walk all of JAX's and the user's objects: a third of the time of planning thousands of
    equations.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
