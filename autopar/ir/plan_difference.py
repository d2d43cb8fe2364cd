"""What is other in a plan made later, in words: one line for each change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Path of a parameter -> what is said of it -> in words.
Facts = Mapping[str, Mapping[str, str]]
#: Of what is in one of two plans only.
_GONE: Mapping[str, str] = {"kind": "none"}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is other in a later plan: of which parameter (or "the step"), what, and both values, in words."""

    path: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what} {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """What `Plan.diff` returns; `str()` has one line for each change, and it is false where there is none."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "no difference"


def difference(old: Facts, new: Facts) -> PlanDifference:
    """What both say, and say otherwise; of what one of them doesn't have, that it has none."""
    changes = []
    for path in {**old, **new}:
        before, after = old.get(path, _GONE), new.get(path, _GONE)
        changes += [Change(path, k, before[k], after[k]) for k in before if k in after and before[k] != after[k]]
    return PlanDifference(tuple(changes))
