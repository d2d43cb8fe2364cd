"""Python's collector of cyclic garbage, while a program is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection(*, lasting: bool = False) -> Iterator[None]:
    """Stops garbage collection within a block, for passes keep what they allocate.

    Each collection would walk all of JAX's and the user's objects: a third of the time of planning thousands of
    equations.

    Args:
      lasting: What is made stays, as modules do: full collections alone look at it, from the first one on.
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
