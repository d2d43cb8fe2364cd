"""Cuts the program of one rank into segments at every value that crosses owners or ranks.

The level of a value is the longest path to it, counted in exchanges. An equation is the owner's if it reads an owner's
rows, else the devices'; constants are computed where they are read. Values that aren't needed earlier are computed at
the latest possible level, so that the first one holds only the equations of ids. There is one exchange of each kind a
level. If many gradients are added up, the backward pass is cut, and the earlier ones (a gradient bucket: Li et al.,
PyTorch Distributed, 2020, section 3.2.3) are added up beside the rest of it.

With one rank only tables are outside of compiled programs: fetching, delivering and reducing do nothing then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.analysis.work import equation_work
from autopar.ir.local import ExchangeSegment, NotLocal, ProgramSegment, Segments, Side
from autopar.ir.program import Atom, Block, Equation, Program, Var, family_of
from autopar.ir.slicing import behind, clone, eliminate_dead

#: Operations between compiled programs, in their order within one level.
EXCHANGES = (
    "ap.route",
    "ap.pull",
    "ap.fetch",
    "ap.pool",
    "ap.deliver",
    "ap.push_pool",
    "ap.reduce_others",
    "ap.reduce",
    "ap.reduce_table",
    "ap.sweep",
    "ap.fill",
    "ap.densify",
    "ap.commit",
    "ap.flush",
)
#: Those that a single rank has.
_ALONE = tuple(op for op in EXCHANGES if op not in ("ap.fetch", "ap.pool", "ap.deliver", "ap.push_pool", "ap.reduce"))
#: Exchanges whose results are the owner's.
_TO_OWNER = frozenset(EXCHANGES) - {"ap.route", "ap.fetch", "ap.pool", "ap.reduce", "ap.reduce_table"}
#: Operations on the rows that a rank asked for, which its devices have, or between devices.
_OF_DEVICES = frozenset(
    "ap." + name
    for name in ("lookup", "lookup_ids", "aggregate", "reduce", "reduce_rank", "replicate", "lookup_part", "first")
)


#: Most gradient buckets of a level.
_BUCKETS = 8
#: Smallest fraction of a level's operations that is worth a program of its own, beside which a bucket is reduced.
_LEAST_SHARE = 1 / 32


def split_segments(program: Program, hosted: Collection[int], *, owners: bool, bucket_bytes: int | None) -> Segments:
    """Returns the segments of one rank's localized program.

    `hosted`: families on hosts; the rows of others are the programs' own. `owners`: owners have programs of their own:
    there are several ranks, or dense leaves, whose slots must not be on devices. `bucket_bytes`: least bytes of a
    gradient bucket; None: all are reduced at once. Raises NotLocal if an exchange is within a loop or branch, which
    can't be left for it.
    """
    assert program.local is not None, "a rank's own program is split"
    if not owners:
        return _Split(program.block, None, hosted).run(None)
    owned = program.local.owned
    equations = [part for equation in program.block.equations for part in _by_owner(equation, owned)]
    split = _Split(program.block.with_equations(equations), owned, hosted, between=program.local.reduces_by_mpi)
    return split.run(bucket_bytes)


def _by_owner(equation: Equation, owned: Collection[Var]) -> list[Equation]:
    """Splits a branch in two, for its owner's results and for those that every rank has."""
    count = sum(v in owned for v in equation.outputs)
    if equation.op != "cond" or equation.effects or count in (0, len(equation.outputs)):
        return [equation]
    parts = []
    for is_owned in (True, False):
        live = [(v in owned) == is_owned for v in equation.outputs]
        bodies, reads = zip(*(eliminate_dead(clone(body)[0], live) for body in equation.bodies), strict=True)
        used = [k for k, read in enumerate(zip(*reads, strict=True)) if any(read)]
        part = replace(
            equation,
            inputs=(equation.inputs[0], *(equation.inputs[k + 1] for k in used)),
            outputs=tuple(v for v, is_live in zip(equation.outputs, live, strict=True) if is_live),
            bodies=tuple(Block(tuple(b.inputs[k] for k in used), b.equations, b.outputs) for b in bodies),
            original=None,
        )
        parts.append(part)
    return parts


class _Split:
    def __init__(
        self, block: Block, owned: frozenset[Var] | None, hosted: Collection[int], *, between: bool = True
    ) -> None:
        self.block = block
        self.owned = owned or frozenset()
        self.sides: tuple[Side, ...] = ("device",) if owned is None else ("device", "owner")
        self.exchanges = _ALONE if owned is None else EXCHANGES
        about = {None, *hosted}  # rows on hosts, or no table's
        self.exchanged = {
            e
            for e in block.walk()
            if e.op in self.exchanges and family_of(e) in about
            if e.op != "ap.reduce" or between or e.params.get("ranks")
        }
        self.free = _free(block, self.exchanged)
        self.level: dict[Atom, int] = dict.fromkeys(block.inputs, 0)
        self.side: dict[Atom, Side] = {}
        self.runs_at: dict[Equation, int] = {}  # the level of each equation

    def run(self, bucket_bytes: int | None) -> Segments:
        for equation in self.block.equations:
            self._assign(equation)
        last = max([0, *self.runs_at.values()])
        self._sink(max([0, *(level for e, level in self.runs_at.items() if e not in self.exchanged)]))
        items: list[ProgramSegment | ExchangeSegment] = []
        # Within a level programs come before the exchanges of their results, gradient buckets in between.
        for level in range(last + 1):
            here = [e for e in self.block.equations if self.runs_at.get(e) == level]
            exchanged = [e for e in here if e in self.exchanged]
            for side in self.sides:
                mine = [e for e in here if e not in self.exchanged and self._side(e) == side]
                if side == "device" and bucket_bytes is not None:
                    for bucket, (part, sums) in enumerate(_buckets(mine, exchanged, bucket_bytes)):
                        items += [self._segment(level, side, part), ExchangeSegment("ap.reduce", level, sums, bucket)]
                        mine = [e for e in mine if e not in part]
                        exchanged = [e for e in exchanged if e not in sums]
                if mine:
                    items.append(self._segment(level, side, mine))
            for op in self.exchanges:
                equations = tuple(e for e in exchanged if e.op == op)
                if equations:
                    items.append(ExchangeSegment(op, level, equations))
        return Segments(_with_last_uses(items, set(self.block.outputs)))

    def _assign(self, equation: Equation) -> None:
        """Finds the earliest level of an equation, and its side."""
        if equation in self.free:
            return
        level = max((self.level.get(a, 0) for a in equation.inputs if a not in self.free), default=0)
        if equation.op == "ap.reduce" and self.side.get(equation.inputs[0]) == "owner":
            self.exchanged.add(equation)  # the devices' programs alone run over several ranks
        exchanged = equation in self.exchanged
        if not exchanged and any(e in self.exchanged for body in equation.bodies for e in body.walk()):
            raise NotLocal("rows are exchanged within a loop or branch", equation.source)
        owner = any(self.side.get(a) == "owner" or a in self.owned for a in (*equation.inputs, *equation.outputs))
        if exchanged:
            owner = equation.op in _TO_OWNER
        elif (
            owner and len(self.sides) > 1 and any(e.op in _OF_DEVICES for body in equation.bodies for e in body.walk())
        ):
            raise NotLocal("rows are looked up and added to their owners' rows in one loop or branch", equation.source)
        self.runs_at[equation] = level
        for var in equation.outputs:
            self.level[var] = level + exchanged
            if owner and len(self.sides) > 1:
                self.side[var] = "owner"

    def _side(self, equation: Equation) -> Side:
        return self.side.get(equation.outputs[0], "device") if equation.outputs else "device"

    def _sink(self, last: int) -> None:
        """Moves equations to the level of their first reader, reductions to the one before it.

        Late reductions are joined: gradients with the norm of rows' gradients, which comes later. Their operands are
        computed where they could have been reduced, so that operands of these aren't kept for a later program.
        """
        first: dict[Atom, int] = dict.fromkeys(self.block.outputs, last)
        for equation in reversed(self.block.equations):
            if equation in self.free:
                continue
            level = self.runs_at[equation]
            reader = min((first.get(v, last) for v in equation.outputs), default=last)
            if equation.op == "ap.reduce" and equation in self.exchanged:
                self.runs_at[equation] = max(level, reader - 1)
            elif equation not in self.exchanged and not equation.effects:
                self.runs_at[equation] = level = reader
            for atom in equation.inputs:
                first[atom] = min(first.get(atom, level), level)

    def _segment(self, level: int, side: Side, mine: Collection[Equation]) -> ProgramSegment:
        inside = set(mine)
        constants = behind(self.free, (a for e in mine for a in e.inputs))
        made = {v for e in (*constants, *mine) for v in e.outputs}
        read = dict.fromkeys(a for e in mine for a in e.inputs if isinstance(a, Var) and a not in made)
        elsewhere: set[Atom] = set(self.block.outputs)
        for equation in self.block.equations:
            if equation not in inside and equation not in self.free:
                elsewhere.update(equation.inputs)
        kept = tuple(v for e in mine for v in e.outputs if v in elsewhere)
        return ProgramSegment(side, level, Block(tuple(read), (*constants, *mine), kept))


def _buckets(
    mine: Sequence[Equation], exchanged: Sequence[Equation], least: int
) -> Sequence[tuple[Collection[Equation], tuple[Equation, ...]]]:
    """Returns parts of a device program, each with sums of `least` bytes or more that run beside the following part.
    `mine`: the equations of the program. `exchanged`: the exchanges that follow it."""
    ready: dict[Atom, int] = {}
    for k, equation in enumerate(mine):
        own = k if equation_work(equation)[0] else 0
        ready.update(dict.fromkeys(equation.outputs, max([own, *(ready.get(a, 0) for a in equation.inputs)])))
    sums = [e for e in exchanged if e.op == "ap.reduce" and e.params["op"] == "sum" and e.inputs[0] in ready]
    least = max(least, sum(e.inputs[0].type.nbytes for e in sums) // _BUCKETS)
    parts: list[tuple[Mapping[Equation, None], tuple[Equation, ...]]] = []
    rest = dict.fromkeys(mine)
    bucket: list[Equation] = []
    for equation in sorted(sums, key=lambda e: ready[e.inputs[0]]):
        bucket.append(equation)
        if sum(e.inputs[0].type.nbytes for e in bucket) >= least:
            part = dict.fromkeys(behind(rest, (a for e in bucket for a in e.inputs)))
            rest = {e: None for e in rest if e not in part}
            parts.append((part, tuple(bucket)))
            bucket = []
    total = sum(equation_work(e)[0] for e in mine)
    kept: list[tuple[Mapping[Equation, None], tuple[Equation, ...]]] = []
    for part, added in reversed(parts):  # from the last one: is the program that follows worth it?
        if sum(equation_work(e)[0] for e in rest) >= max(_LEAST_SHARE * total, 1):
            kept.append((part, added))
            rest = part
        elif kept:
            kept[-1] = {**part, **kept[-1][0]}, (*added, *kept[-1][1])
            rest = kept[-1][0]
        else:
            rest = {**part, **rest}
    return kept[::-1]


def _free(block: Block, exchanged: Collection[Equation]) -> Mapping[Equation, None]:
    """Returns equations that depend on no input, in order: constants, computed anew wherever they are read."""
    made: set[Atom] = set()
    free: dict[Equation, None] = {}
    needed: set[Atom] = set(block.outputs)
    for equation in block.equations:
        if equation in exchanged:
            needed.update(equation.inputs)
    for equation in block.equations:
        variables = [a for a in equation.inputs if isinstance(a, Var)]
        plain = not equation.effects and equation not in exchanged
        if plain and all(v in made for v in variables) and not any(v in needed for v in equation.outputs):
            free[equation] = None
            made.update(equation.outputs)
    return free


def _with_last_uses(
    items: Sequence[ProgramSegment | ExchangeSegment], outputs: set[Atom]
) -> tuple[ProgramSegment | ExchangeSegment, ...]:
    """Returns the segments with the inputs that nothing reads after them."""
    later: set[Atom] = set(outputs)
    found: list[ProgramSegment | ExchangeSegment] = []
    for item in reversed(items):
        if isinstance(item, ProgramSegment):
            last = frozenset(v for v in item.block.inputs if v not in later)
            found.append(ProgramSegment(item.side, item.level, item.block, last))
            later.update(item.block.inputs)
        else:
            found.append(item)
            later.update(a for e in item.equations for a in e.inputs)
    return tuple(found[::-1])
