"""`LateFallback`: a step whose fallback is compiled once it is called often.

A step with measured capacities and its fallback (`backends.fallback`) are twice the program to compile, and the
fallback rarely runs. So at first the step is called alone: the caller waits for its flag, and where a batch exceeded a
capacity, calls both as one. These are compiled beside the steps once there were some; from then on nobody waits for a
flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.backends.across import local
from autopar.backends.background import Compilation, beside

#: Calls until what has the fallback is compiled: many steps are called for a few batches only. And calls after which
#: processes, which have to go over to it together, wait for that.
CALLS, WAITING_CALLS = 32, 64


class LateFallback:
    """Calls a step.

    Args:
      alone: The step; its last output is whether a capacity was exceeded, so that states are what they were.
      whole: The step and its fallback, with the other outputs.
      states: Operand -> output that is its new value.
      lower: Lowers `whole` at the shapes of its calls.
      across: Whether several processes call it.
    """

    def __init__(
        self, alone: Any, whole: Any, states: Mapping[int, int], lower: Callable[[], Any], across: bool
    ) -> None:
        self._alone, self._whole, self._states = alone, whole, states
        self._lower, self._across = lower, across
        self._calls = 0
        self._compilation: Compilation[Any] | None = None
        self._is_whole = False

    def __call__(self, *operands: Any) -> Sequence[Any]:
        """The step's results."""
        if not self._is_whole:
            self._calls += 1
            if self._calls > CALLS:
                self.prepare()
            self._is_whole = self._is_compiled()
        if self._is_whole:
            return self._whole(*operands)
        *results, exceeded = self._alone(*operands)
        if not local(exceeded):
            return results
        if self._compilation is not None:
            self._compilation.finish()
        self._is_whole = True
        states = self._states
        return self._whole(*(results[states[k]] if k in states else x for k, x in enumerate(operands)))

    def _is_compiled(self) -> bool:
        """Whether the step and its fallback are; of several processes, whether all know that they are."""
        if self._compilation is None or (self._across and self._calls <= WAITING_CALLS):
            return False
        if self._across:
            self._compilation.finish()
        return self._compilation.is_done()

    def prepare(self) -> None:
        """Compile the step and its fallback beside the steps."""
        if self._compilation is None and not self._is_whole:
            what = "a step for batches that exceed its capacities"
            self._compilation = beside(what, lambda: self._lower().compile())
