"""`watched`: a program that all ranks run together, with marks by which the watchdog knows who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.launch.progress import PROGRESS


def watched(program: Any) -> Callable[..., Sequence[Any]]:
    """A jitted function of arrays as a function that marks what it does.

    It is compiled by itself first, which waits for nobody and may take its time. A call is a wait for the other ranks:
    some programs run within it, others go on after it, until their results are ready.
    """
    compiled = False

    def run(*operands: Any) -> Sequence[Any]:
        nonlocal compiled
        if not compiled:
            with PROGRESS.during("compiling", "compiles"):
                program.lower(*operands).compile()
            compiled = True
        with PROGRESS.during("on the devices", "waits"):
            results = program(*operands)
        if results:
            PROGRESS.dispatched(results[-1])
        return results

    return run
