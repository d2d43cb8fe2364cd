"""Which state leaves belong to which table, where their sizes don't tell.

`classify` takes every leaf with as many rows as a table for a slot that it may have. A hidden width, a batch or another
table's width may be of that size by chance. Such a leaf makes rows of a family that holds no table, and those meet the
tables' own rows and slots along other axes: who is to blame can't be read off the equation where they meet. Here the
analysis runs with the tables alone and grows from there: a leaf is *tied* to a table if its new value is rows of the
table's family, and it has its rows along the axis that this value has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.analysis.row_flow import RowFlow
from autopar.ir.program import Equation, Program
from autopar.ir.rowspace import Row


@dataclass(frozen=True, slots=True, eq=False)
class Ties:
    """What belongs to tables: leaves (the tables among them) with their row axes, and equations that make rows of
    their families (gradients)."""

    axes: Mapping[int, int]
    entries: frozenset[Equation]


def find_ties(program: Program, tables: Mapping[int, int], reading_whole: Iterable[Equation] = ()) -> Ties:
    """What belongs to the tables (input -> row axis). `reading_whole`: lookups that read all rows."""
    axes = dict(tables)
    barred: set[Equation] = set()
    while True:
        flow = RowFlow(program, axes, barred=barred, reading_whole=set(reading_whole))
        flow.start()
        own = {flow.family_of(k) for k in tables}
        chance = flow.troubled() - own
        false = {f: e for f, e in flow.entries.items() if flow.find(f) in chance}
        if false:
            smallest = min(false.values(), key=lambda e: e.outputs[0].type.nbytes)
            barred.update(_unlike_tables(flow, false, tables) or [smallest])
            continue
        new = {k: axis for k, axis in _updated(flow, own).items() if k not in axes}
        if not new:
            return Ties(axes, frozenset(e for f, e in flow.entries.items() if flow.find(f) in own))
        axes |= new


def _unlike_tables(flow: RowFlow, entries: Mapping[int, Equation], tables: Mapping[int, int]) -> set[Equation]:
    """Those of the equations whose results don't have a table's shape and row axis, as its gradient has."""
    like = {(flow.program.block.inputs[k].shape, axis) for k, axis in tables.items()}
    made = ((e, flow.value(e.outputs[0])) for e in entries.values())
    return {e for e, row in made if not isinstance(row, Row) or (e.outputs[0].shape, row.axis) not in like}


def _updated(flow: RowFlow, families: set[int]) -> dict[int, int]:
    """State leaves whose new values are rows of one of the families, with their row axes."""
    program, updated = flow.program, {}
    for leaf, output in program.new_states.items():
        value, layout = flow.value(program.block.outputs[output]), program.inputs[leaf].layout
        if isinstance(value, Row) and flow.find(value.family) in families:
            if layout is None or layout[1] == value.axis:
                updated[leaf] = value.axis
    return updated
