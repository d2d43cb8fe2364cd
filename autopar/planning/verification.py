"""`Verification`: what `verify` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class LeafCheck:
    """One output leaf: the largest change (of a state) or value, and the errors of both runs against the oracle."""

    path: str
    size: float
    planned_error: float
    plain_error: float
    ok: bool

    def __str__(self) -> str:
        mark = "ok    " if self.ok else "WRONG "
        return (
            f"{mark}{self.path}: changed by {self.size:.3g}, planned errs by {self.planned_error:.3g}, "
            f"plain by {self.plain_error:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`, leaf by leaf; printing it shows all."""

    leaves: tuple[LeafCheck, ...]
    steps: int
    against: str = "the plain one"

    @property
    def ok(self) -> bool:
        return all(leaf.ok for leaf in self.leaves)

    def __str__(self) -> str:
        worst = [leaf for leaf in self.leaves if not leaf.ok]
        other = "" if self.against == "the plain one" else f" with {self.against}"
        head = f"{len(self.leaves)} leaves compared over {self.steps} steps{other}: "
        return head + (f"{len(worst)} differ" if worst else "all agree") + "\n" + "\n".join(map(str, self.leaves))

    __repr__ = __str__


def as_floats(value: Any) -> np.ndarray:
    """Returns float64[...]; of complex numbers [2, ...], their real and imaginary parts, which are compared alike."""
    array = np.asarray(value)
    return (np.stack([np.real(array), np.imag(array)]) if np.iscomplexobj(array) else array).astype(np.float64)
