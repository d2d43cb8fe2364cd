"""Decides for several families together: which tables are alike, and which one rank has whole.

Tables that are alike can be one (`passes.stack_tables`). They are if their slots have the same dtypes and the same axes
but for the rows, and if the equations in row space are the same, in the same order, of the same dense values. What
isn't followed here (a lookup inside a loop, ids that depend on rows, a norm of one table alone) leaves its table as it
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.bags import is_plain_access
from autopar.analysis.primitives import ELEMENTWISE
from autopar.analysis.values import atom_key
from autopar.cost.exchange import sent_bytes, step_seconds
from autopar.ir.figures import Sizes, format_bytes
from autopar.ir.plan import TablePlan
from autopar.ir.program import Atom, Equation, Program, Var, known
from autopar.ir.rowspace import Const, Free, Row, RowFacts, RowSpace
from autopar.ir.strategy import HOSTED
from autopar.passes.choosing.families import Choices, Decision, decide_family, in_whole

#: Fewer tables aren't stacked: an exchange less is worth less than what is computed once for each distinct row, of
#: whichever table.
FEWEST = 4
#: Operations on rows that aren't elementwise -> the parameter that has the sizes of the result's axes, if there is one.
ROWWISE = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "squeeze": None,
    "transpose": None,
    "pad": None,
    "concatenate": None,
    "reduce_sum": None,
    "reduce_max": None,
    "reduce_min": None,
}


class _Unlike(Exception):
    """Says why a table can't be stacked."""


def alike_tables(
    program: Program, kinds: Mapping[int, Hashable]
) -> tuple[dict[tuple[Hashable, Hashable], list[Member]], list[tuple[int, str]]]:
    """Returns tables in groups of those that are alike, by their kind and what they have in common; and the families
    that are in none, each with the reason.

    `program`: an analysed program. `kinds`: families -> what must be the same of those in a group besides.
    """
    finder = _Finder(program)
    groups: dict[tuple[Hashable, Hashable], list[Member]] = {}
    apart: list[tuple[int, str]] = []
    for family, kind in kinds.items():
        try:
            member = finder.member(family)
            groups.setdefault((kind, member.key), []).append(member)
        except _Unlike as error:
            apart.append((family, str(error)))
        except TypeError:
            apart.append((family, "its equations have parameters that can't be compared"))
    return groups, apart


def kind_of(table: TablePlan) -> Hashable:
    """Returns what must be the same in the plans of all tables of a stack."""
    return table.method, bool(table.log_steps), table.pooled


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A table's family, as what is to be the same of all tables in a stack says it."""

    space: RowSpace  #: The family.
    key: Hashable  #: Equal for families that are alike.
    nodes: Sequence[Equation]  #: The equations in row space, lookups apart, in the order in which `key` has them.
    #: Values in row space, and those that are made anew for any rows, by the key's names.
    names: Mapping[Atom, Hashable]
    #: The lookups, each with what is to be the same of those that are made together.
    lookups: Sequence[tuple[Equation, Hashable]]
    leaves: Hashable  #: The part of `key` that says what the table and its slots are.

    @property
    def sums(self) -> list[Equation]:
        """The reductions over all rows, among `nodes`."""
        return [e for e in self.nodes if e.op == "reduce_sum" and e.outputs[0] not in self.names]


class _Finder:
    """Describes families of a program."""

    def __init__(self, program: Program) -> None:
        self._program, self._facts = program, program.facts
        self._makers = program.block.makers()
        self._equations: dict[int, list[Equation]] = {}
        for equation in program.block.equations:
            for family in {_family(self._facts, a) for a in (*equation.inputs, *equation.outputs)}:
                if family is not None:
                    self._equations.setdefault(family, []).append(equation)

    def member(self, family: int) -> Member:
        """Describes a family. Raises _Unlike if it can't be stacked."""
        program = self._program
        space = next(s for s in program.facts.spaces if s.family == family)
        accesses = space.accesses
        _require(not space.depends_on and not any(a.known for a in accesses), "its ids depend on rows")
        _require(not any(space.axes) and not any(a.axis for a in accesses), "its rows aren't along the first axis")
        _require(not any(a.path for a in accesses), "it is looked up in a loop or branch")
        are_own = (program.inputs[k].role == "state" and program.inputs[k].layout is None for k in space.leaves)
        _require(all(are_own), "it is only read")
        walk = _Walk(self._facts, self._makers, space, program)
        for equation in self._equations.get(family, ()):
            walk.take(equation)
        new = {k: out for k, out in program.new_states.items() if k in space.leaves}
        outputs = [program.block.outputs[new[k]] for k in space.leaves]
        others = (a for out, a in enumerate(program.block.outputs) if out not in new.values())
        _require(not any(a in walk.names for a in others), "the step returns its rows besides")
        leaves = tuple((program.block.inputs[k].shape[1:], str(program.block.inputs[k].dtype)) for k in space.leaves)
        key = (leaves, len(space.tables), tuple(walk.key), tuple(walk.names.get(a) for a in outputs))
        return Member(space, key, walk.nodes, walk.names, walk.lookups, leaves)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _Unlike(why)


def _family(facts: RowFacts, atom: Atom) -> int | None:
    value = facts.value(atom)
    return facts.find(value.family) if isinstance(value, Row) else None


@dataclass(eq=False)
class _Walk:
    """Names a family's values by what makes them."""

    facts: RowFacts
    makers: Mapping[Atom, Equation]
    space: RowSpace
    program: Program
    key: list[Hashable] = field(default_factory=list)
    nodes: list[Equation] = field(default_factory=list)
    names: dict[Atom, Hashable] = field(default_factory=dict)
    lookups: list[tuple[Equation, Hashable]] = field(default_factory=list)
    equation: Equation | None = None  #: The one that is looked at.

    def __post_init__(self) -> None:
        self.names |= {self.program.block.inputs[k]: ("leaf", n) for n, k in enumerate(self.space.leaves)}

    def take(self, equation: Equation) -> None:
        """Goes on with the next equation."""
        self.equation = equation
        self._require(not equation.bodies and not equation.effects)
        role, first = self.facts.roles.get(equation), equation.inputs[0]
        if role == "lookup":
            self._require(is_plain_access(equation) and first in self.names)
            self.lookups.append((equation, (self.names[first], self._batch(equation.inputs[1]))))
        elif role == "push":
            self._require(is_plain_access(equation))
            self._append(equation, ("push", self._name(first), self._batch(equation.inputs[1])))
        elif role == "reduce":
            self._require(equation.op == "reduce_sum" and self._is_zero_untouched(first))
            self._append(equation, (equation.op, equation.params["axes"], self._name(first)), is_row=False)
        else:
            self._require(role == "rows")
            self._append(equation, self._operation(equation))

    def _require(self, holds: bool) -> None:
        if not holds:
            equation = known(self.equation)
            raise _Unlike(f"{equation.op} ({equation.where}) can't be done for several tables at once")

    def _append(self, equation: Equation, key: Hashable, *, is_row: bool = True) -> None:
        values = [self.facts.value(v) for v in equation.outputs]
        self._require(not is_row or all(isinstance(v, Row | Free) for v in values))
        if is_row:
            self.names.update((v, (len(self.nodes), n)) for n, v in enumerate(equation.outputs))
        self.nodes.append(equation)
        self.key.append(key)

    def _operation(self, equation: Equation) -> Hashable:
        """Describes an equation that does the same with each row."""
        op, params = equation.op, dict(equation.params)
        self._require(op in ELEMENTWISE or op in ROWWISE)
        sizes = ROWWISE.get(op)
        if sizes is not None:
            self._require(params[sizes][0] == self.space.extent)
            params[sizes] = params[sizes][1:]
        outputs = tuple((v.shape[1:], str(v.dtype)) for v in equation.outputs)
        self._require(all(v.shape[:1] == (self.space.extent,) for v in equation.outputs))
        items = tuple(sorted(params.items(), key=lambda item: item[0]))
        hash(items)
        return op, items, outputs, tuple(map(self._name, equation.inputs))

    def _name(self, atom: Atom) -> Hashable:
        """Names an operand; one that is made anew for any rows is taken along with what makes it."""
        if atom in self.names:
            return self.names[atom]
        value = self.facts.value(atom)
        self._require(not isinstance(value, Row))
        if isinstance(value, Free) and 0 in value.axes and atom.shape[:1] == (self.space.extent,):
            self._require(value.index_axis is None and isinstance(atom, Var) and atom in self.makers)
            maker = self.makers[atom]
            self._require(not maker.bodies and not maker.effects)
            self._append(maker, self._operation(maker))
            return self.names[atom]
        self._require((isinstance(atom, Var) or atom.type.size == 1) and atom.shape[:1] != (self.space.extent,))
        return "dense", atom_key(atom)

    def _batch(self, ids: Atom) -> Hashable:
        """Describes where the examples are in ids: only what they begin with may be the same for all tables."""
        axis = self.program.batch.get(ids) if isinstance(ids, Var) else None
        self._require(axis in (None, 0))
        return ids.shape[:1] if len(ids.shape) > 1 else (), axis

    def _is_zero_untouched(self, atom: Atom) -> bool:
        """Returns whether rows that the step doesn't touch, and spare ones, add nothing to a sum."""
        value = self.facts.value(atom)
        return isinstance(value, Row) and isinstance(value.untouched, Const) and value.untouched.is_zero


# --- whether owners of tables that are exchanged as one save enough bytes together ---


def without_small(program: Program, decided: Sequence[Decision], choices: Choices) -> list[Decision]:
    """Returns the decisions without exchanges that save less than the options' `least_saved`. `decided`: of each
    family; those of hosts save bytes, however few."""
    made, spaces, least = list(decided), program.facts.spaces, choices.options.least_saved
    left: list[set[str]] = [set() for _ in spaces]
    savings: dict[str, Callable[[RowSpace, TablePlan, Choices], float]] = {"pools": _by_bags, "joins": _beside}
    for what, saving in savings.items():
        saved = [saving(space, table, choices) for space, (_, (table, *_)) in zip(spaces, made, strict=True)]
        for members in exchanges(program, made) if min(saved, default=math.inf) < least else ():
            if sum(saved[k] for k in members) < least:
                for k in members:
                    left[k].add(what)
                    joins, pools = "joins" not in left[k], "pools" not in left[k]
                    made[k] = decide_family(program, spaces[k], choices, may_join_hosts=joins, may_pool=pools)
    return made


def _by_bags(space: RowSpace, table: TablePlan, choices: Choices) -> float:
    """Returns the bytes that a rank saves because owners add up bags; infinity if that isn't to be decided."""
    if not table.pooled or choices.earlier_plan(space) is not None:
        return math.inf
    return sent_bytes(known(table.sizes).by_rows(), "hosts")[HOSTED] - table.sent[HOSTED]


def _beside(space: RowSpace, table: TablePlan, choices: Choices) -> float:
    """Returns the bytes that a rank saves by a table beside those on hosts; infinity if that isn't to be decided."""
    if table.where != "hosts" or any(k in choices.hosts for k in space.tables):
        return math.inf
    return table.sent["allreduce"] - table.sent[HOSTED]


def exchanges(program: Program, decided: Sequence[Decision]) -> Iterator[Sequence[int]]:
    """Yields the numbers of families on hosts, those together that are exchanged as one (`passes.stack_tables`)."""
    spaces, plans = program.facts.spaces, [table for _, (table, *_) in decided]
    alone = {space.family: k for k, space in enumerate(spaces) if plans[k].where == "hosts"}
    kinds = {family: kind_of(plans[k]) for family, k in alone.items() if not plans[k].pulled}
    for group in alike_tables(program, kinds)[0].values() if len(kinds) >= FEWEST else ():
        if len(group) >= FEWEST:
            yield [alone.pop(member.space.family) for member in group]
    for k in alone.values():
        yield [k]


# --- tables on hosts that one rank has whole, and which one ---
#
# The owners of a table whose rows are spread each send a sum of each bag, up to N of them. One that has the whole
# table sends one, and gets one cotangent. TorchRec calls it table-wise sharding. It pays where owners add up bags, of
# tables that are no larger than a rank's share of all.


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
    for members in exchanges(program, decided):
        new = [k for k in members if k in saved and not plans[k].pooled]
        if sum(saved[k] for k in new) < choices.options.least_saved:  # bags take messages of their own
            saved |= dict.fromkeys(new, 0)
    saved = {k: saving for k, saving in saved.items() if saving}
    weights = {k: owner_work(table) for k, table in plans.items()}
    owners = _balanced({k: weights[k] for k in {*named, *saved, *fixed}}, fixed, choices.devices)
    work = [sum(weights[k] for k, owner in owners.items() if owner == r) for r in range(choices.devices)]
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
        owners = _balanced({k: weights[k] for k in {*named, *fixed}}, fixed, choices.devices)
    made = list(decided)
    for k, owner in owners.items():
        made[k] = decide_family(program, spaces[k], choices, may_pool=plans[k].pooled or k in saved, owner=owner)
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


def _balanced(weights: Mapping[int, int], fixed: Mapping[int, int], ranks: int) -> dict[int, int]:
    """Returns the rank, or device, of each table: the one with the least, the heaviest tables first (Graham, 1969)."""
    owners = dict(fixed)
    loads = [sum(weights[k] for k, owner in fixed.items() if owner == r) for r in range(ranks)]
    for k in sorted(weights.keys() - fixed.keys(), key=lambda k: (-weights[k], k)):
        owners[k] = min(range(ranks), key=loads.__getitem__)
        loads[owners[k]] += weights[k]
    return owners


# --- tables of a stack on devices that one device has whole ---
#
# Shards of an array are of one size: each device's has as many rows as the fullest one's. So devices' rows have to be
# balanced, and a table by itself is never on one device.


#: Most rows of a device, in whole tables and in its part of the others of their stack, over the average one.
_MOST_ROWS = 1.1


def device_owners(
    program: Program, plans: Mapping[int, TablePlan], choices: Choices
) -> tuple[Mapping[int, int], Mapping[int, str]]:
    """Returns which devices have tables of a stack whole, and why others of which owners add up bags are spread.

    Those are the ones that the strategy or an earlier plan names, and of those left to "auto" the ones whose owners add
    up bags, as long as devices have like numbers of rows and like work. `plans`: the spread tables of a stack. Which
    device it is depends on the tables' sizes alone, so that steps of other batches agree.
    """
    devices, spaces = choices.devices, program.facts.spaces
    rows = {k: _nbytes(table) for k, table in plans.items()}
    work = {k: known(t.sizes).ids * (known(t.sizes).row_bytes + known(t.sizes).sent_gradient) for k, t in plans.items()}
    earlier = {k: plan for k in plans if (plan := choices.earlier_plan(spaces[k])) is not None}
    fixed = {k: plan.owner for k, plan in earlier.items() if plan.owner is not None}
    named = {k for k in plans if choices.whole.intersection(spaces[k].tables)}
    free = {k for k in plans if k not in earlier and plans[k].pooled and _pays_whole(known(plans[k].sizes), choices)}
    share = sum(rows.values()) / devices
    whys = {
        k: f"{format_bytes(rows[k])} are more than its share of them, {format_bytes(share)}"
        for k in free - named
        if rows[k] > share
    }
    free -= whys.keys()
    measures = ((rows, _MOST_ROWS, "rows"), (work, _MOST_WORK, "work"))
    while True:
        owners = _balanced({k: rows[k] for k in {*fixed, *named, *free}}, fixed, devices)
        uneven = (_busiest(weights, owners, devices, most) for weights, most, _ in measures)
        found = next(((n, each) for n, each in enumerate(uneven) if each is not None), None)
        own = set() if found is None else {k for k in free - named if owners[k] == found[1][0]}
        if found is None or not own:
            return owners, whys
        weights, _, of = measures[found[0]]
        apart = min(own, key=lambda k: (weights[k], -k))
        whys[apart] = f"with it one would have {found[1][1]:.3g} times the average {of}"
        free -= {apart}


def _busiest(
    weights: Mapping[int, int], owners: Mapping[int, int], devices: int, most: float
) -> tuple[int, float] | None:
    """Returns the device that has most of some weights, and how much over the average; None if that isn't over `most`.
    `owners`: of whole tables; devices have equal parts of the others."""
    spread = sum(weights[k] for k in weights if k not in owners) / devices
    loads = [spread + sum(weights[k] for k, owner in owners.items() if owner == d) for d in range(devices)]
    busiest, average = max(range(devices), key=loads.__getitem__), sum(loads) / devices
    return (busiest, loads[busiest] / average) if loads[busiest] > most * average else None


def _pays_whole(sizes: Sizes, choices: Choices) -> bool:
    """Returns whether one owner of a table costs less than several: bytes, and predicted time if rates are known."""
    whole, rates = in_whole(sizes), choices.measured.rates
    if sent_bytes(whole)["ps"] >= sent_bytes(sizes)["ps"]:
        return False
    return rates is None or step_seconds(rates, whole)["ps"] < step_seconds(rates, sizes)["ps"]
