"""Notes of `explain` on what the owners of rows compute between the sum of a gradient and the update."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.analysis.after_sums import after_the_sum
from autopar.ir.figures import format_bytes
from autopar.ir.program import Equation
from autopar.planning.text import fold_paths
from autopar.run.planned_step import PlannedStep

#: Operations and names that are listed.
_SHOWN = 8


def owner_notes(planned: PlannedStep) -> Iterator[str]:
    """Yields lines on what owners of rows compute, and what crosses between them, for tables whose rows are spread."""
    program, bound = planned.compiled.analysed, planned.compiled.bound
    told: dict[str, list[str]] = {}
    for family in bound.families:
        if bound.devices > 1 and family.method == "ps":
            space = next(s for s in program.facts.spaces if s.family == family.family)
            paths = [program.inputs[k].path for k in space.tables]
            told.setdefault(_described(*after_the_sum(program, family.family)), []).extend(paths)
    for text, paths in told.items():
        names = ", ".join(fold_paths(dict.fromkeys(paths, 0), _SHOWN))
        yield f"From the sum of gradients to the update the owners of {names} compute {text}."


def _described(by_row: list[Equation], sums: list[Equation]) -> str:
    ops = list(dict.fromkeys(e.op for e in by_row))
    more = f" and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else ""
    text = f"{', '.join(ops[:_SHOWN]) or 'nothing'}{more}, each of its own rows"
    if not sums:
        return f"{text}; nothing crosses between them"
    lines = ", ".join(dict.fromkeys(f"{e.op} ({e.where})" for e in sums))
    nbytes = format_bytes(sum(v.type.nbytes for e in sums for v in e.outputs))
    return f"{text}; of {lines} each one's partial sums cross, {nbytes}"
