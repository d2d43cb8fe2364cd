"""Tables that a step treats alike become one table, which has the rows of all, one table behind the other.

    a[i], b[j]                      ->  s[concatenate(i, V_a + j)], cut in two
    zeros.at[i].add(g), ...         ->  zeros.at[concatenate(i, V_a + j)].add(concatenate(g, h))
    a - lr * g, b - lr * h          ->  s - lr * k
    sum(g * g) + sum(h * h)         ->  sum(k * k)

A recommender has dozens of tables that differ in their rows only. Stacked, they have one route, one exchange of ids, of
rows and of gradients, one update and one update log, and the compiled program is as large as that of one table
(TorchRec and FBGEMM do the same by hand: table-batched embeddings).

Tables are alike if their slots have the same dtypes and the same axes but for the rows, and if the equations in row
space are the same, in the same order, of the same dense values. What isn't followed here (a lookup inside a loop, ids
that depend on rows, a norm of one table alone) leaves its table as it is.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.primitives import ELEMENTWISE
from autopar.analysis.values import atom_key
from autopar.ir.plan import TablePlan
from autopar.ir.program import Atom, Block, Equation, Input, Output, Program, Var, known
from autopar.ir.program_plan import FamilyPlan, ProgramPlan
from autopar.ir.rowspace import Const, Free, Row, RowFacts, RowSpace
from autopar.ir.slicing import eliminate_dead
from autopar.ir.stacked import StackedProgram, StackedTable
from autopar.ir.writer import expand
from autopar.jax_types import Array
from autopar.passes.choose import input_placements
from autopar.passes.choosing.capacity import host_bounds

#: Fewer tables aren't stacked: an exchange less is worth less than what is computed once for each distinct row, of
#: whichever table.
FEWEST = 4
#: Operations on rows that aren't elementwise -> the parameter that has the sizes of the result's axes, if there is one.
_ROWWISE = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "squeeze": None,
    "reduce_sum": None,
    "reduce_max": None,
    "reduce_min": None,
}


class _Unlike(Exception):
    """Says why a table can't be stacked."""


def stack_tables(program: Program, plan: ProgramPlan, analyze: Callable[[Program], Program]) -> StackedProgram | None:
    """Returns the program with tables on hosts stacked that are alike; None if there are none.

    Args:
      program: An analysed program.
      plan: Its plan. Each table's rows are rounded up to a multiple of the ranks, so that a rank's shard of the stack
        has its shards of the tables.
      analyze: Analyses a program without facts.
    """
    stacks, _ = _stacks(program, plan)
    written = _written(program, stacks) if stacks else None
    if written is None or plan.shards or plan.tensors:
        return None
    before = program.facts
    program, inputs, outputs = written
    program = analyze(program)
    followed = _plan(before, plan, stacks, program, inputs)
    return None if followed is None else StackedProgram(program, followed, inputs, outputs)


def tables_apart(program: Program, plan: ProgramPlan, *, has_stacks: bool) -> Mapping[str, Sequence[int]]:
    """Maps reasons to tables on hosts that have exchanges of their own; none if there are too few to stack any.

    Args:
      program, plan: As of `stack_tables`.
      has_stacks: It found some.
    """
    if sum(map(_may_stack, plan.families)) < FEWEST:
        return {}
    stacks, apart = _stacks(program, plan)
    for stack in () if has_stacks else stacks:
        apart += [(m.space.family, "the step reads some of them before others can be updated") for m in stack.members]
    tables = {space.family: space.tables for space in program.facts.spaces}
    found: dict[str, list[int]] = {}
    for family, why in apart:
        found.setdefault(why, []).extend(tables[family])
    return found


def _stacks(program: Program, plan: ProgramPlan) -> tuple[list[_Stack], list[tuple[int, str]]]:
    """Returns the stacks; and the families that are in none, each with the reason."""
    finder = _Finder(program)
    alike: dict[tuple[Hashable, Hashable], list[_Member]] = {}
    kinds = collections.Counter[Hashable]()
    apart: list[tuple[int, str]] = []
    for planned in filter(_may_stack, plan.families):
        try:
            member = finder.member(planned.family)
        except _Unlike as error:
            apart.append((planned.family, str(error)))
        except TypeError:
            apart.append((planned.family, "its equations have parameters that can't be compared"))
        else:
            method = _method(planned.table)
            alike.setdefault((method, member.key), []).append(member)
            kinds[method, member.leaves] += 1
    stacks: list[_Stack] = []
    for (method, _), members in alike.items():
        stack = _Stack(program, members, plan.devices) if len(members) >= FEWEST else None
        sums, why = members[0].sums, ""
        if kinds[method, members[0].leaves] < FEWEST:
            why = f"no {FEWEST} of these have the same width, dtype and slots"
        elif sums and (stack is None or stack.sums is None):
            why = f"the step uses a sum over the rows of each alone ({sums[0].where})"
        elif stack is None:
            why = f"no {FEWEST} of these are updated by the same equations"
        elif stack.total >= np.iinfo(np.int32).max:
            why = f"{stack.total} rows together are too many for numbers of int32"
        else:
            stacks.append(stack)
        apart += [(m.space.family, why) for m in members if why]
    return stacks, apart


def _may_stack(planned: FamilyPlan) -> bool:
    return planned.on_hosts and not planned.table.pulled


def _plan(
    before: RowFacts,
    plan: ProgramPlan,
    stacks: Sequence[_Stack],
    program: Program,
    inputs: Sequence[int | StackedTable],
) -> ProgramPlan | None:
    """Returns the plan for the stacked program; None if a stack can't be what its tables were."""
    numbers = {was if isinstance(was, int) else was.inputs[0]: k for k, was in enumerate(inputs)}
    kept = {space.family: space for space in before.spaces}
    firsts = {stack.members[0].space.family: stack.members for stack in stacks}
    others = {m.space.family for stack in stacks for m in stack.members[1:]}
    log_steps = {f.family: f.table.log_steps for f in plan.families}
    families: list[FamilyPlan] = []
    for planned in plan.families:
        if planned.family in others:
            continue
        old = kept[planned.family]
        space = program.facts.space_of(numbers[old.leaves[0]])
        if space is None or space.refusal or space.deferred != old.deferred or len(space.leaves) != len(old.leaves):
            return None
        table, bounds = planned.table, planned.bounds
        if planned.family in firsts:
            table = dataclasses.replace(table, log_steps=max(log_steps[m.space.family] for m in firsts[planned.family]))
            bounds = host_bounds(space, program.ids[space.family], plan.devices)
        families.append(FamilyPlan(space.family, table, bounds))
    placements, layouts = input_placements(program, families)
    uneven = {numbers[k]: axis for k, axis in plan.uneven.items()}
    placements = tuple(None if k in uneven else axis for k, axis in enumerate(placements))
    return dataclasses.replace(
        plan, families=tuple(families), placements=placements, layouts=layouts, uneven=uneven, shards={}, tensors={}
    )


def _method(table: TablePlan) -> Hashable:
    return table.method, table.where, bool(table.log_steps), table.pulled, table.cyclic


# --- which tables are alike ---


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
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
        self._makers: dict[Atom, Equation] = {v: e for e in program.block.equations for v in e.outputs}
        self._equations: dict[int, list[Equation]] = {}
        for equation in program.block.equations:
            for family in {_family(self._facts, a) for a in (*equation.inputs, *equation.outputs)}:
                if family is not None:
                    self._equations.setdefault(family, []).append(equation)

    def member(self, family: int) -> _Member:
        """Describes a family.

        Raises:
          _Unlike: it can't be stacked.
        """
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
        return _Member(space, key, walk.nodes, walk.names, walk.lookups, leaves)


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
            self._require(_is_plain_gather(equation) and first in self.names)
            self.lookups.append((equation, (self.names[first], self._batch(equation.inputs[1]))))
        elif role == "push":
            self._require(_is_plain_scatter(equation))
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
        self._require(op in ELEMENTWISE or op in _ROWWISE)
        sizes = _ROWWISE.get(op)
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


def _is_plain_gather(equation: Equation) -> bool:
    """Returns whether it looks up whole rows by their numbers."""
    numbers, params = equation.params["dimension_numbers"] if equation.op == "gather" else None, equation.params
    if numbers is None:
        return False
    rank, batch = len(equation.inputs[0].shape), len(equation.inputs[1].shape) - 1
    whole = (1, *equation.inputs[0].shape[1:])
    dims = tuple(range(batch, batch + rank - 1))
    plain = jax.lax.GatherDimensionNumbers(dims, (0,), (0,))
    return numbers == plain and params["slice_sizes"] == whole


def _is_plain_scatter(equation: Equation) -> bool:
    """Returns whether it adds whole rows by their numbers."""
    if equation.op != "scatter-add":
        return False
    rank, batch = len(equation.inputs[0].shape), len(equation.inputs[1].shape) - 1
    dims = tuple(range(batch, batch + rank - 1))
    return equation.params["dimension_numbers"] == jax.lax.ScatterDimensionNumbers(dims, (0,), (0,))


# --- the stacked program ---


class _Stack:
    """Tables that are alike, and what stands for their values."""

    def __init__(self, program: Program, members: Sequence[_Member], shards: int) -> None:
        self.members = members
        rows = [-(-m.space.extent // shards) * shards for m in self.members]
        self.starts = np.cumsum([0, *rows[:-1]]).tolist()
        self.total = sum(rows)  #: Rows of the stack.
        self._placed: dict[tuple[int, Atom], Var] = {}
        self._joined: dict[tuple[tuple[int, Atom], ...], Var] = {}
        self.leaves = [StackedTable(inputs) for inputs in zip(*(m.space.leaves for m in self.members), strict=True)]
        first = self.members[0]
        self._vars: dict[Hashable, Var] = {first.names[v]: Var(v.type.resized(0, self.total)) for v in first.names}
        self.inputs = [self._vars["leaf", n] for n in range(len(self.leaves))]
        #: Additions of the tables' reductions, which the stack's make superfluous -> the value that stays; None if some
        #: reductions aren't added up.
        self.sums = self._sums(program)

    def new(self, atom: Atom) -> Atom:
        """Returns what stands for an operand of the first table's equations."""
        name = self.members[0].names.get(atom)
        return atom if name is None else self._vars[name]

    def _new_var(self, var: Var) -> Var:
        name = self.members[0].names.get(var)
        return var if name is None else self._vars[name]

    def _sums(self, program: Program) -> dict[Equation, Atom] | None:
        uses: dict[Atom, list[Equation | None]] = {}
        for equation in program.block.equations:
            for a in equation.inputs:
                uses.setdefault(a, []).append(equation)
        for a in program.block.outputs:
            uses.setdefault(a, []).append(None)

        def added(value: Var) -> Equation | None:
            """Returns the addition that alone reads a value."""
            equation = uses[value][0] if len(uses.get(value, ())) == 1 else None
            return equation if equation is not None and equation.op in ("add", "add_any") else None

        gone: dict[Equation, Atom] = {}
        for nodes in zip(*(m.nodes for m in self.members), strict=True):
            sums = [e.outputs[0] for e in nodes]
            if nodes[0].op != "reduce_sum" or sums[0] in self.members[0].names:
                continue
            totals = set[Var]()
            for k, value in enumerate(sums):
                joins = added(value)
                if joins is None:
                    return None
                total = joins.outputs[0]
                while (following := added(total)) is not None:
                    total = following.outputs[0]
                totals.add(total)
                if k:
                    (other,) = (a for a in joins.inputs if a is not value)
                    if joins in gone or other.type != value.type or other in sums[1:]:
                        return None
                    gone[joins] = other
            if len(totals) > 1:
                return None
        return gone

    # --- equations ---

    def equations(self) -> Iterator[Equation]:
        """Yields the stack's equations; their order is that of the first table's."""
        for nodes in zip(*(m.nodes for m in self.members), strict=True):
            first, outputs = nodes[0], tuple(self._new_var(v) for v in nodes[0].outputs)
            if first.op == "scatter-add":
                yield from self._push(nodes, outputs[0])
                continue
            params = dict(first.params)
            sizes = _ROWWISE.get(first.op)
            if sizes is not None:
                params[sizes] = (self.total, *params[sizes][1:])
            yield dataclasses.replace(
                first, inputs=tuple(map(self.new, first.inputs)), outputs=outputs, params=params, original=None
            )
        for lookups in self._lookups():
            yield from self._lookup(lookups)

    def _lookups(self) -> Iterator[list[tuple[int, Equation]]]:
        """Yields lookups that are made together: the n-th of each table, of one leaf and by ids that go together."""
        together: dict[Hashable, list[tuple[int, Equation]]] = {}
        for k, member in enumerate(self.members):
            counts: dict[Hashable, int] = {}
            for e, kind in member.lookups:
                counts[kind] = counts.get(kind, -1) + 1
                together.setdefault((kind, counts[kind]), []).append((k, e))
        yield from together.values()

    def _lookup(self, lookups: Sequence[tuple[int, Equation]]) -> Iterator[Equation]:
        like = lookups[0][1]
        ids, equations = self._ids([(k, e.inputs[1], e) for k, e in lookups])
        yield from equations
        table = self.new(self._of_first(like.inputs[0], lookups[0][0]))
        read = expand(_gather, like, (table, ids))
        yield from read
        (rows,), start = read[-1].outputs, 0
        for k, e in lookups:
            shape, count = e.outputs[0].shape, _count(e.inputs[1])
            high, fill = self.members[k].space.extent - 1, _fill(e)

            def own(rows: Array, ids: Array, start=start, count=count, shape=shape, high=high, fill=fill) -> Array:
                found = rows[:, start : start + count].reshape(shape)
                return _anew(found if fill is None else jnp.where(_is_row(ids, high, found.ndim), found, fill), rows)

            yield from expand(own, e, (rows, e.inputs[1]), e.outputs[0])
            start += count

    def _push(self, nodes: Sequence[Equation], output: Var) -> Iterator[Equation]:
        like = nodes[0]
        ids, equations = self._ids([(k, e.inputs[1], e) for k, e in enumerate(nodes)])
        yield from equations
        updates: list[Var] = []
        for k, e in enumerate(nodes):
            high, drops = self.members[k].space.extent - 1, "CLIP" not in str(e.params["mode"])

            def own(ids: Array, update: Array, high=high, drops=drops) -> Array:
                if drops:
                    update = jnp.where(_is_row(ids, high, update.ndim), update, jnp.zeros((), update.dtype))
                first = ids.shape[:1] if ids.ndim > 1 else (1,)
                return _anew(update.reshape(*first, -1, *update.shape[ids.ndim - 1 :]), update)

            made = expand(own, e, (e.inputs[1], e.inputs[2]))
            yield from made
            updates.append(made[-1].outputs[0])
        yield from expand(_scatter, like, (self.new(like.inputs[0]), ids, *updates), output)

    def _ids(self, of: Sequence[tuple[int, Atom, Equation]]) -> tuple[Var, list[Equation]]:
        """Returns ids of several tables as those of the stack, [n, count, 1], and the equations that make them."""
        equations: list[Equation] = []
        for k, ids, like in of:
            if (k, ids) not in self._placed:
                start, high = self.starts[k], self.members[k].space.extent - 1

                def placed(ids: Array, start=start, high=high) -> Array:
                    first = ids.shape[:1] if ids.ndim > 1 else (1,)
                    low, most = 0, min(high, int(jnp.iinfo(ids.dtype).max))
                    return (jnp.clip(ids, low, most).astype(jnp.int32) + start).reshape(*first, -1, 1)

                equations += expand(placed, like, (ids,))
                self._placed[k, ids] = equations[-1].outputs[0]
        key = tuple((k, ids) for k, ids, _ in of)
        if len(key) == 1:
            return self._placed[key[0]], equations
        if key not in self._joined:
            equations += expand(_side_by_side, of[0][2], [self._placed[each] for each in key])
            self._joined[key] = equations[-1].outputs[0]
        return self._joined[key], equations

    def _of_first(self, atom: Atom, k: int) -> Atom:
        """Returns the first table's value that corresponds to another one's."""
        name = self.members[k].names[atom]
        return next(v for v, n in self.members[0].names.items() if n == name)


def _count(ids: Atom) -> int:
    """Returns the number of ids of each example."""
    return int(np.prod(ids.shape[1:-1])) if len(ids.shape) > 1 else 1


def _fill(equation: Equation) -> np.ndarray | None:
    """Returns what a lookup of no row gives, if not the nearest one."""
    if "FILL" not in str(equation.params["mode"]):
        return None
    value, dtype = equation.params.get("fill_value"), equation.inputs[0].dtype
    if value is not None:
        return np.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(np.nan, dtype)
    if np.issubdtype(dtype, np.bool_):
        return np.asarray(True)
    info = jnp.iinfo(dtype)
    return np.asarray(info.min if info.min < 0 else info.max, dtype)


def _is_row(ids: Array, high: int, rank: int) -> Array:
    """Returns which ids are of the table, in the shape of `rank` axes of what they look up."""
    valid = (ids >= 0) & (ids <= min(high, int(jnp.iinfo(ids.dtype).max)))
    return valid[..., 0].reshape(ids.shape[:-1] + (1,) * (rank - ids.ndim + 1))


def _anew(value: Array, given: Array) -> Array:
    """Returns a value that an equation makes, even if it is what was given."""
    return jnp.copy(value) if value is given else value


def _side_by_side(*ids: Array) -> Array:
    return jax.lax.concatenate(ids, 1)


def _gather(table: Array, ids: Array) -> Array:
    dims = jax.lax.GatherDimensionNumbers(tuple(range(2, table.ndim + 1)), (0,), (0,))
    return jax.lax.gather(table, ids, dims, (1, *table.shape[1:]), mode="clip")


def _scatter(base: Array, ids: Array, *updates: Array) -> Array:
    dims = jax.lax.ScatterDimensionNumbers(tuple(range(2, base.ndim + 1)), (0,), (0,))
    return jax.lax.scatter_add(base, ids, jax.lax.concatenate(updates, 1), dims, mode="clip")


def _written(
    program: Program, stacks: Sequence[_Stack]
) -> tuple[Program, tuple[int | StackedTable, ...], tuple[tuple[int, ...], ...]] | None:
    """Returns the program with the stacks' equations in place of their tables', and what its inputs and outputs were;
    None if that can't be put in order."""
    block = program.block
    of_leaf = {k: (stack, n) for stack in stacks for n, leaf in enumerate(stack.leaves) for k in leaf.inputs}
    own = (e for stack in stacks for m in stack.members for e in (*m.nodes, *(e for e, _ in m.lookups)))
    gone = {e for e in own if e in program.facts.roles}  # and not what others may read as well: a broadcast
    replaced: dict[Atom, Atom] = {}
    for stack in stacks:
        assert stack.sums is not None, "those without are left out"
        replaced |= {e.outputs[0]: kept for e, kept in stack.sums.items()}
        gone |= set(stack.sums)

    def now(atom: Atom) -> Atom:
        while atom in replaced:
            atom = replaced[atom]
        return atom

    equations = [e for e in block.equations if e not in gone] + [e for stack in stacks for e in stack.equations()]
    equations = [dataclasses.replace(e, inputs=tuple(map(now, e.inputs))) for e in equations]
    inputs: list[tuple[int | StackedTable, Var, Input]] = []
    for k, (leaf, input_) in enumerate(zip(block.inputs, program.inputs, strict=True)):
        if k not in of_leaf:
            inputs.append((k, leaf, input_))
            continue
        stack, n = of_leaf[k]
        table = stack.leaves[n]
        if table.inputs[0] == k:
            path = f"{input_.path} (and {len(table.inputs) - 1} more)"
            inputs.append((table, stack.inputs[n], dataclasses.replace(input_, path=path)))
    numbers = {was if isinstance(was, int) else was.inputs[0]: k for k, (was, _, _) in enumerate(inputs)}
    outputs: list[tuple[tuple[int, ...], Atom, Output]] = []
    new_states = program.new_states
    for k, (atom, output) in enumerate(zip(block.outputs, program.outputs, strict=True)):
        if output.state not in of_leaf:
            state = None if output.state is None else numbers[output.state]
            outputs.append(((k,), now(atom), dataclasses.replace(output, state=state)))
            continue
        stack, n = of_leaf[output.state]
        table = stack.leaves[n]
        if table.inputs[0] == output.state:
            of = tuple(new_states[leaf] for leaf in table.inputs)
            outputs.append((of, stack.new(atom), dataclasses.replace(output, state=numbers[output.state])))
    variables = tuple(v for _, v, _ in inputs)
    ordered = _ordered(equations, variables)
    if ordered is None:
        return None
    made, _ = eliminate_dead(Block(variables, tuple(ordered), tuple(a for _, a, _ in outputs)))
    program = dataclasses.replace(
        program,
        block=made,
        inputs=tuple(i for _, _, i in inputs),
        outputs=tuple(o for _, _, o in outputs),
        rows=None,
        batch={},
        ids={},
    )
    return program, tuple(was for was, _, _ in inputs), tuple(of for of, _, _ in outputs)


def _ordered(equations: Sequence[Equation], given: Iterable[Var]) -> list[Equation] | None:
    """Returns equations in an order in which they can be run, as near to theirs as can be; those that can be observed
    stay in order. None: there is no such order."""
    waiting, known = dict[Var, list[int]](), set(given)
    missing = [0] * len(equations)
    made = {v for e in equations for v in e.outputs}
    if any(isinstance(a, Var) and a not in made and a not in known for e in equations for a in e.inputs):
        return None  # something else reads a table's own value
    observed = [k for k, e in enumerate(equations) if e.effects]
    after = dict(itertools.pairwise(observed))
    for k, e in enumerate(equations):
        for v in {a for a in e.inputs if isinstance(a, Var) and a in made}:
            waiting.setdefault(v, []).append(k)
            missing[k] += 1
    for k in after.values():
        missing[k] += 1
    ready = [k for k, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    ordered: list[Equation] = []
    while ready:
        k = heapq.heappop(ready)
        ordered.append(equations[k])
        for j in [*(j for v in equations[k].outputs for j in waiting.get(v, ())), *([after[k]] if k in after else ())]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, j)
    return ordered if len(ordered) == len(equations) else None
