"""What each primitive means along the rows and off the rows.

`RULES[op]` takes an equation, the values of its operands and the running analysis, and returns the values of its
results. It raises `Mixes` when a result's row would depend on other rows. `RESIZE[op]` gives the parameters of the
same equation with the row axis at another size. An op in neither table has no rule: a table that reaches it stays
dense, and `explain` names it. To add a rule, see CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autopar.analysis.unfollowed import APART
from autopar.ir.program import Equation
from autopar.ir.rowspace import RefusalKind, Row, Value


class Mixes(Exception):
    """A rule's refusal: the reason, what would change it, and of which kind it is (`ir.rowspace.Refusal`)."""

    def __init__(self, reason: str, remedy: str = APART, kind: RefusalKind = "other") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.kind: RefusalKind = kind


class Analysis(Protocol):
    """What a rule may ask of the running analysis."""

    def unite(self, rows: Sequence[Row]) -> int: ...
    def enter(self, equation: Equation, axis: int) -> int | None: ...
    def access(self, family: int, equation: Equation, axis: int) -> None: ...
    def role(self, equation: Equation, role: str) -> None: ...


Rule = Callable[[Equation, Sequence[Value], Analysis], Sequence[Value]]
Resize = Callable[[Equation, int, int], Mapping[str, Any]]

RULES: dict[str, Rule] = {}
RESIZE: dict[str, Resize] = {}
#: Ops whose non-scalar operands all lie along the result's axes (so each is restricted to the rows).
ALIGNED: set[str] = set()


def row_operand(values: Sequence[Value]) -> tuple[int, Row]:
    """The first operand that is in row space; the caller knows there is one."""
    return next((k, v) for k, v in enumerate(values) if isinstance(v, Row))


def resized(shape: Sequence[int], axis: int, rows: int) -> tuple[int, ...]:
    """The shape with another size along one axis."""
    return (*shape[:axis], rows, *shape[axis + 1 :])
