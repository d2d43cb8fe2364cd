"""Asks of tables on hosts that are exchanged as one whether owners save enough bytes together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autopar.cost.exchange import sent_bytes
from autopar.ir.plan import TablePlan
from autopar.ir.program import Program, known
from autopar.ir.rowspace import RowSpace
from autopar.ir.strategy import HOSTED
from autopar.passes.choosing.alike import FEWEST, alike_tables, kind_of
from autopar.passes.choosing.families import Choices, Decision, decide_family

#: Owners add up bags, or serve tables that aren't named for it, only if a rank sends this many bytes less by it: each
#: exchange takes two or three more messages to each rank.
LEAST_SAVED = 1 << 16


def without_small(program: Program, decided: Sequence[Decision], choices: Choices) -> list[Decision]:
    """Returns the decisions without exchanges that save less than `LEAST_SAVED`.

    Args:
      decided: Of each family; those of hosts save bytes, however few.
    """
    made, spaces = list(decided), program.facts.spaces
    left: list[set[str]] = [set() for _ in spaces]
    savings: dict[str, Callable[[RowSpace, TablePlan, Choices], float]] = {"pools": _by_bags, "joins": _beside}
    for what, saving in savings.items():
        saved = [saving(space, table, choices) for space, (_, (table, *_)) in zip(spaces, made, strict=True)]
        for members in _exchanges(program, made) if min(saved, default=math.inf) < LEAST_SAVED else ():
            if sum(saved[k] for k in members) < LEAST_SAVED:
                for k in members:
                    left[k].add(what)
                    joins, pools = "joins" not in left[k], "pools" not in left[k]
                    made[k] = decide_family(program, spaces[k], choices, joins=joins, pools=pools)
    return made


def _by_bags(space: RowSpace, table: TablePlan, choices: Choices) -> float:
    """Returns the bytes that a rank saves because owners add up bags; infinity if that isn't to be decided."""
    if not table.pooled or choices.told(space) is not None:
        return math.inf
    return sent_bytes(known(table.sizes).by_rows(), "hosts")[HOSTED] - table.sent[HOSTED]


def _beside(space: RowSpace, table: TablePlan, choices: Choices) -> float:
    """Returns the bytes that a rank saves by a table beside those on hosts; infinity if that isn't to be decided."""
    if table.where != "hosts" or any(k in choices.hosts for k in space.tables):
        return math.inf
    return table.sent["allreduce"] - table.sent[HOSTED]


def _exchanges(program: Program, decided: Sequence[Decision]) -> Iterator[Sequence[int]]:
    """Yields the numbers of families on hosts, those together that are exchanged as one (`passes.stack_tables`)."""
    spaces, plans = program.facts.spaces, [table for _, (table, *_) in decided]
    alone = {space.family: k for k, space in enumerate(spaces) if plans[k].where == "hosts"}
    kinds = {family: kind_of(plans[k]) for family, k in alone.items() if not plans[k].pulled}
    for group in alike_tables(program, kinds)[0].values() if len(kinds) >= FEWEST else ():
        if len(group) >= FEWEST:
            yield [alone.pop(member.space.family) for member in group]
    for k in alone.values():
        yield [k]
