"""Chooses the tables on hosts that one rank has whole, and which one.

The owners of a table whose rows are spread each send a sum of each bag, up to N of them. One that has the whole table
sends one, and gets one cotangent. TorchRec calls it table-wise sharding. It pays where owners add up bags, of tables
that are no larger than a rank's share of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.figures import format_bytes
from autopar.ir.plan import TablePlan
from autopar.ir.program import Program, known
from autopar.ir.rowspace import RowSpace
from autopar.ir.strategy import HOSTED
from autopar.passes.choosing import alike
from autopar.passes.choosing.families import Choices, Decision, decide_family

#: Most work of a rank's whole tables, over the average one: no rank is to wait for another that adds up all bags.
_MOST_WORK = 1.5


def with_owners(program: Program, decided: Sequence[Decision], choices: Choices) -> list[Decision]:
    """Returns the decisions in which some tables are whole on one rank.

    Those are the ones that the strategy names, and of those left to "auto" the ones by which fewer bytes are sent, if
    the ranks' work can be balanced. Rows of these that come in a layout keep it, and so do those of an earlier plan.
    Tables of bags that stay spread say why.
    """
    spaces = program.facts.spaces
    plans = {k: t for k, (_, (t, *_)) in enumerate(decided) if t.where == "hosts" and not t.pulled and t.sizes}
    named = {k for k in plans if choices.whole.intersection(spaces[k].tables)}
    fixed = {k: owner for k in plans if (owner := _earlier_owner(program, spaces[k], choices)) is not None}
    share = sum(_nbytes(t) for t in plans.values()) / choices.devices
    free = [k for k in plans if k not in named and k not in fixed]
    open_ = [k for k in free if _may_move(program, spaces[k], choices)]
    considered = open_ or free  # a plan that is made once more, with rows in their layouts, says the same of them
    saved = {k: _saved(program, k, decided, choices) for k in considered if _nbytes(plans[k]) <= share}
    for members in alike.exchanges(program, decided):
        new = [k for k in members if k in saved and not plans[k].pooled]
        if sum(saved[k] for k in new) < alike.LEAST_SAVED:  # bags take messages of their own
            saved |= dict.fromkeys(new, 0)
    saved = {k: saving for k, saving in saved.items() if saving}
    owners = _balanced({k: plans[k] for k in {*named, *saved, *fixed}}, fixed, choices.devices)
    work = [sum(owner_work(plans[k]) for k, owner in owners.items() if owner == r) for r in range(choices.devices)]
    busiest = max(work) * choices.devices / (sum(work) or 1)
    whys = {
        k: f"{format_bytes(_nbytes(plans[k]))} are more than its share of all tables, {format_bytes(share)}"
        for k in considered
        if plans[k].pooled and _nbytes(plans[k]) > share
    }
    if busiest > _MOST_WORK:
        whys |= dict.fromkeys(
            saved, f"with such tables the busiest one would have {busiest:.3g} times the average work"
        )
    if busiest > _MOST_WORK or not open_:
        owners = _balanced({k: plans[k] for k in {*named, *fixed}}, fixed, choices.devices)
    made = list(decided)
    for k, owner in owners.items():
        made[k] = decide_family(program, spaces[k], choices, pools=plans[k].pooled or k in saved, owner=owner)
    for k, why in whys.items():
        bounds, tables = made[k]
        made[k] = bounds, [replace(t, reason=f"{t.reason}; no rank has it whole: {why}") for t in tables]
    return made


def _earlier_owner(program: Program, space: RowSpace, choices: Choices) -> int | None:
    """Returns the rank that has a family's rows already, or by an earlier plan."""
    earlier = choices.earlier_plan(space)
    if earlier is not None:
        return earlier.owner
    layouts = (program.inputs[k].layout for k in space.leaves)
    return next((layout[0].owner for layout in layouts if layout is not None), None)


def _may_move(program: Program, space: RowSpace, choices: Choices) -> bool:
    """Returns whether rows are in no layout yet."""
    return choices.earlier_plan(space) is None and all(program.inputs[k].layout is None for k in space.leaves)


def _saved(program: Program, k: int, decided: Sequence[Decision], choices: Choices) -> int:
    """Returns the bytes that a rank sends less in a step if one rank has the k-th family, and adds up its bags."""
    (_, (table, *_)), (_, (whole, *_)) = decided[k], decide_family(program, program.facts.spaces[k], choices, owner=0)
    return max(0, table.sent[HOSTED] - whole.sent[HOSTED]) if whole.pooled else 0


def _nbytes(table: TablePlan) -> int:
    sizes = known(table.sizes)
    return sizes.extent * sizes.family_bytes


def owner_work(table: TablePlan) -> int:
    """Returns the bytes of rows and gradients that owners read and add up for a rank in a step."""
    sizes = known(table.sizes)
    return (sizes.bag_ids or sizes.requested) * (sizes.row_bytes + sizes.sent_gradient)


def _balanced(tables: dict[int, TablePlan], fixed: dict[int, int], ranks: int) -> dict[int, int]:
    """Returns the rank of each table: the one with the least work, the largest tables first (Graham, 1969)."""
    owners = dict(fixed)
    work = [sum(owner_work(tables[k]) for k, owner in fixed.items() if owner == r) for r in range(ranks)]
    for k in sorted(tables.keys() - fixed.keys(), key=lambda k: (-owner_work(tables[k]), k)):
        owners[k] = min(range(ranks), key=work.__getitem__)
        work[owners[k]] += owner_work(tables[k])
    return owners
