"""Positions of a step's arguments, as the options of `parallelize` give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from autopar.errors import ArgumentsError


def positions_of(
    step: Callable[..., Any], option: str, positions: int | Sequence[int] | None
) -> tuple[int, ...] | None:
    """Positions of arguments; negative ones count from the last parameter."""
    if positions is None:
        return None
    several = isinstance(positions, Iterable) and not isinstance(positions, (str, bytes))
    numbers: tuple[Any, ...] = tuple(cast(Any, positions)) if several else (positions,)
    if not all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) for k in numbers):
        raise ArgumentsError(f"{option}={positions!r}: give positions of the step's arguments, whole numbers from 0")
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # of some builtins nobody knows
        return numbers
    count = len(parameters)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for k in numbers:
        if k < -count or (k >= count and not open_ended):
            name = getattr(step, "__name__", type(step).__name__)
            raise ArgumentsError(f"{option} names argument {k}; {name} takes {count}, numbered from 0")
    return tuple(int(k) + count if k < 0 else int(k) for k in numbers)
