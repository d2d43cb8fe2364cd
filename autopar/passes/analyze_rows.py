"""Finds the families whose step can run on the touched rows only, and why others can't.

An abstract interpretation over `ir.rowspace` values with the rules of `analysis.rules`. Each candidate leaf starts as a
family of its own; families unite where their rows meet in one equation. `row_families` decides which are kept. On a
refusal only its cause is dropped and the rest is analysed again: leaves that have as many rows as a table by chance
(`find_ties`), leaves that move on every row, and, of tables that prevent each other, those that can't be lifted alone
either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.row_families import Families, RowFlow, find_ties
from autopar.analysis.rules import shards_remedy
from autopar.ir.program import Equation, Program
from autopar.ir.rowspace import Refusal, Row, RowFacts, RowSpace


def analyze_rows(
    program: Program, *, lazy: bool = False, defer: bool = False, undeferred: Mapping[int, Refusal] = {}
) -> tuple[Program, str]:
    """Fills the `rows` of a classified program.

    `lazy`: accepts leaves that change on untouched rows (they will not), as `sparse="lazy"` does. `defer`: accepts them
    if the moves of untouched rows can be replayed later. `undeferred`: leaves of families for which that failed, and
    why.
    """
    search = _Search(program, lazy, defer, undeferred)
    families, spaces = search.run()
    flow, refused = families.flow, search.refused
    taken = {k for space in refused for k in space.tables}
    for k, axis in program.tables:
        if k not in taken and not any(k in s.leaves for s in spaces):
            reason = search.dropped[k].refusal if k in search.dropped else _read_whole(flow, program, k)
            read = 0 if reason is None else program.rows_read.get(k, 0)
            reason = reason or program.unfollowed.get(k) or _only_read(flow, program, k)
            extent = program.block.inputs[k].shape[axis]
            refused.append(RowSpace(-1, extent, (k,), (axis,), (k,), (), reason, rows_read=read))
    taken = {k for space in (*spaces, *refused) for k in space.leaves}
    # No tables, but `explain` gives a reason: lookups that aren't followed, rows that are only written.
    for k, reason in program.unfollowed.items():
        if k not in taken:
            extent, read = program.block.inputs[k].shape[0], program.rows_read.get(k, 0)
            refused.append(RowSpace(-1, extent, (k,), (0,), (k,), (), reason, rows_read=read))
    refused = [replace(space, family=-1 - n) for n, space in enumerate(refused)]
    spaces = [replace(s, deferred=not lazy and families.moves(s), is_pulled=flow.is_pulled(s.family)) for s in spaces]
    facts = RowFacts(flow.values, flow.roles, tuple([*spaces, *refused]), tuple(flow.parents), flow.whole)
    note = f"{len(spaces)} families lift, {len(refused)} don't"
    return replace(program, rows=facts), note


@dataclass(frozen=True, slots=True)
class _Dropped:
    """The reason why a leaf belongs to no family, and the tables of the family that it was in."""

    refusal: Refusal
    tables: tuple[int, ...]


@dataclass(eq=False)
class _Search:
    """The search for the largest set of leaves that can be lifted together."""

    program: Program
    lazy: bool
    defer: bool
    undeferred: Mapping[int, Refusal]
    axes: dict[int, int] = field(default_factory=dict)  #: Leaves that may still be rows, with their row axes.
    #: As in `RowFlow`.
    barred: set[Equation] = field(default_factory=set)
    reading_whole: set[Equation] = field(default_factory=set)
    dropped: dict[int, _Dropped] = field(default_factory=dict)  #: Leaves that keep their family from being lifted.
    refused: list[RowSpace] = field(default_factory=list)  #: Families of tables that were dropped.

    def run(self) -> tuple[Families, list[RowSpace]]:
        """Returns the families, and those that can be lifted."""
        self.axes = dict(self.program.candidates)
        # Each finding (a barred equation, one that reads all rows, a dropped leaf) restarts the interpretation.
        while True:
            flow = RowFlow(self.program, self.axes, barred=self.barred, reading_whole=self.reading_whole)
            flow.start()
            families = Families(self.program, flow, self.lazy, self.defer, self.undeferred)
            leaves, entries = families.unrelated()
            if leaves or entries:
                self._part(leaves, entries)
                continue
            spaces = families.spaces()
            whole = {e for space in spaces for e in families.own_lookups(space)} - self.reading_whole
            if whole:
                self.reading_whole |= whole
                continue
            causes = {space: cause for space in spaces if (cause := families.causes(space))}
            if not causes:
                return families, spaces
            loops = {e for space in causes for e in families.loops_to_read_whole(space)} - self.reading_whole
            if loops:
                self.reading_whole |= loops
                continue
            self._drop(causes, families)

    def _part(self, leaves: set[int], entries: set[Equation]) -> None:
        """Leaves out leaves and equations that have a table's rows by chance: first those not tied to any, then
        those that are."""
        tables = {k: axis for k, axis in self.program.tables if k in self.axes}
        ties = find_ties(self.program, tables, self.reading_whole)
        elsewhere = {k: axis for k, axis in ties.axes.items() if k in leaves and axis != self.axes[k]}
        self.axes |= elsewhere
        untied, unlike = leaves - set(ties.axes), entries - ties.entries
        if not (elsewhere or untied or unlike):
            untied, unlike = leaves, entries
        for leaf in untied:
            del self.axes[leaf]
        self.barred |= unlike

    def _drop(self, causes: Mapping[RowSpace, Mapping[int, Refusal]], families: Families) -> None:
        """Drops leaves that keep their families from being lifted."""
        failed = [space for space, tables_of in causes.items() if set(tables_of) & set(space.tables)]
        spared = self._spared(failed, families)
        for space, tables_of in causes.items():
            if space in spared:
                continue
            if space in failed:
                tables = tuple(k for k in space.tables if k in tables_of)
                reason = self._first_reason(space, tables_of)
                self.refused.append(replace(space, family=-1, tables=tables, refusal=reason))
                tables_of = {k: tables_of[k] for k in tables}  # their other leaves may belong to another table
            self.dropped |= {k: _Dropped(reason, space.tables) for k, reason in tables_of.items()}
        if failed:  # leaves that these prevented from lifting are tried anew
            self.axes, self.barred, self.reading_whole = dict(self.program.candidates), set(), set()
        self.axes = {k: axis for k, axis in self.axes.items() if k not in self.dropped}

    def _spared(self, failed: Sequence[RowSpace], families: Families) -> list[RowSpace]:
        """Returns families that may fail because of others, and wait until those are gone.

        If all can be lifted alone, but not together, the largest one waits.
        """
        needed_whole = families.needed_whole(failed)
        if not needed_whole or len(failed) == 1:
            return []
        spared = [space for space in failed if space not in needed_whole or self._lifts_alone(space)]
        if len(spared) == len(failed):
            return [max(spared, key=lambda s: sum(self.program.block.inputs[k].type.nbytes for k in s.leaves))]
        return spared

    def _lifts_alone(self, space: RowSpace) -> bool:
        """Returns whether the family can be lifted if no other table is."""
        others = {k for k, _ in self.program.tables} - set(space.tables)
        program = replace(
            self.program,
            tables=tuple((k, axis) for k, axis in self.program.tables if k in space.tables),
            candidates=tuple((k, axis) for k, axis in self.program.candidates if k not in others),
        )
        _, spaces = _Search(program, self.lazy, self.defer, self.undeferred).run()
        return any(set(space.tables) <= set(s.tables) for s in spaces)

    def _first_reason(self, space: RowSpace, causes: Mapping[int, Refusal]) -> Refusal:
        slots = [r for k, r in causes.items() if k not in space.tables]
        earlier = [d.refusal for k, d in self.dropped.items() if set(d.tables) & set(space.tables)]
        return (slots or earlier or [causes[k] for k in space.tables if k in causes])[0]


def _only_read(flow: RowFlow, program: Program, k: int) -> Refusal:
    family = flow.family_of(k) if k in flow.candidates else None
    lookups = (a.equation.source for f, a in flow.accesses.values() if a.is_lookup and flow.find(f) == family)
    reason = "the step only reads it: there is no update to save"
    return Refusal(reason, next(filter(None, lookups), None), shards_remedy(program.inputs[k].path))


def _read_whole(flow: RowFlow, program: Program, k: int) -> Refusal | None:
    block, new = program.block, program.new_states
    value = flow.values.get(block.inputs[k])
    if k not in new or block.outputs[new[k]] is block.inputs[k] or not isinstance(value, Row):
        return None
    family = flow.find(value.family)
    return next((r for f, r in (*flow.refusals, *flow.dense_reads) if flow.find(f) == family), None)
