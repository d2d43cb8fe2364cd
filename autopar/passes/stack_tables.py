"""Tables that a step treats alike become one table, which has the rows of all, one table behind the other.

    a[i], b[j]                      ->  s[concatenate(i, V_a + j)], cut in two
    zeros.at[i].add(g), ...         ->  zeros.at[concatenate(i, V_a + j)].add(concatenate(g, h))
    a - lr * g, b - lr * h          ->  s - lr * k
    sum(g * g) + sum(h * h)         ->  sum(k * k)

A recommender has dozens of tables that differ in their rows only. Stacked, they have one route, one exchange of ids, of
rows and of gradients, one update and one update log, and the compiled program is as large as that of one table
(TorchRec and FBGEMM do the same by hand: table-batched embeddings).

`choosing.together` says which tables are alike.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.bags import is_plain_access
from autopar.analysis.row_ids import fill_of
from autopar.cost.exchange import with_sizes
from autopar.errors import StrategyError
from autopar.ir.figures import Room
from autopar.ir.options import Options
from autopar.ir.plan import TablePlan
from autopar.ir.program import Atom, Block, Equation, Input, Output, Program, Var, known
from autopar.ir.program_plan import FamilyPlan, ProgramPlan
from autopar.ir.rowspace import RowFacts
from autopar.ir.slicing import eliminate_dead, in_order
from autopar.ir.stacked import StackedProgram, StackedTable, StackIndex, StackShape
from autopar.ir.strategy import asks_for_whole
from autopar.ir.writer import expand
from autopar.jax_types import Array, Dtype
from autopar.passes.choose import input_placements
from autopar.passes.choosing.capacity import host_bounds, joined
from autopar.passes.choosing.together import FEWEST, ROWWISE, Member, alike_tables, kind_of

A = TypeVar("A", bound=Atom)


def stack_tables(program: Program, plan: ProgramPlan, analyze: Callable[[Program], Program]) -> StackedProgram | None:
    """Returns the program with tables stacked that are alike; None if there are none.

    `program`: an analysed program. `plan`: its plan. Each table's rows are rounded up to a multiple of the devices (of
    hosts: ranks), so that a shard of the stack has shards of the tables. `analyze`: analyses a program without facts.
    """
    stacks, _ = _stacks(program, plan)
    written = _written(program, stacks) if stacks else None
    if written is None:
        return None
    before = program.facts
    program, inputs, outputs = written
    program = analyze(program)
    together = [[member.space.family for member in stack.members] for stack in stacks]
    followed = plan_stacked(before, plan, together, program, inputs)
    return None if followed is None else StackedProgram(program, followed, inputs, outputs)


def _noting_stacks(plan: ProgramPlan, together: Sequence[Sequence[int]]) -> ProgramPlan:
    """Returns the plan, whose sizes say with how many tables each is exchanged. If bags of one have weights, those of
    all have. `together`: the families of each stack."""
    noted = {table.path: table.sizes and replace(table.sizes, together=1) for table in plan.plan.tables}
    for families in together:
        members = [known(plan.family(family)) for family in families]
        paths = {path for member in members for _, own in member.tables() for path in own} & {*noted}
        weight = max((sizes.bag_weight for path in paths if (sizes := noted[path])), default=0)
        for path in paths:
            if sizes := noted[path]:
                noted[path] = replace(sizes, together=len(families), bag_weight=weight)
    tables = (t if (sizes := noted[t.path]) is None else with_sizes(t, sizes) for t in plan.plan.tables)
    return plan.noting(tables=tuple(tables))


def _noting_owners(plan: ProgramPlan, families: Sequence[FamilyPlan]) -> ProgramPlan:
    """Returns the plan, which says of tables on devices which one has them whole, and shares the room for rows of such
    a stack's messages among its tables."""
    for planned in families:
        if planned.on_hosts or all(table.owner is None for table, _ in planned.tables()):
            continue
        each = [(table.owner, table.sizes, paths) for table, paths in planned.tables()]
        weights = [s.capacity * (plan.devices if owner is None else 1) for owner, s, _ in each if s is not None]
        rooms: list[Room | None] = [None] * len(each)  # tables that are only read may have no sizes
        if len(weights) == len(each):
            rooms = [Room(rows) for rows in shares_of(plan.devices * known(planned.bounds.capacity), weights)]
        found = {path: (owner, room) for (owner, _, paths), room in zip(each, rooms, strict=True) for path in paths}

        def noted(table: TablePlan, found: Mapping[str, tuple[int | None, Room | None]] = found) -> TablePlan:
            owner, room = found.get(table.path, (None, None))
            where = "" if owner is None else f"; all rows on device {owner}"
            table = replace(table, owner=owner, reason=table.reason + where)
            if room is None:
                return table
            return with_sizes(table, replace(known(table.sizes), room=room, whole=owner is not None))

        plan = plan.noting(tables=tuple(noted(t) if t.path in found else t for t in plan.plan.tables))
    return plan


def shares_of(total: int, weights: Sequence[int]) -> list[int]:
    """Divides a number in proportion to weights, by rounding down sums of shares."""
    ends = [total * end // max(1, sum(weights)) for end in itertools.accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def tables_apart(program: Program, plan: ProgramPlan, *, has_stacks: bool) -> Mapping[str, Sequence[int]]:
    """Maps reasons to tables that have exchanges of their own; none if there are too few to stack any. `program`,
    `plan`: as of `stack_tables`. `has_stacks`: it found some."""
    if len(_kinds(plan)) < FEWEST:
        return {}
    stacks, apart = _stacks(program, plan)
    for stack in () if has_stacks else stacks:
        apart += [(m.space.family, "the step reads some of them before others can be updated") for m in stack.members]
    tables = {space.family: space.tables for space in program.facts.spaces}
    found: dict[str, list[int]] = {}
    for family, why in apart:
        found.setdefault(why, []).extend(tables[family])
    return found


def require_whole(program: Program, plan: ProgramPlan, stacked: StackedProgram | None, options: Options) -> None:
    """Raises StrategyError if the strategy keeps a table whole on one device, and it is in no stack. `program`, `plan`:
    as of `stack_tables`. `stacked`: its result."""
    if plan.devices == 1 or plan.on_hosts or not program.new_states:
        return
    tables = plan.plan.tables if stacked is None else stacked.plan.plan.tables
    alone = [t.path for t in tables if t.lifted and t.owner is None and asks_for_whole(options.strategy, t.path)]
    if alone:
        apart = tables_apart(program, plan, has_stacks=stacked is not None).items()
        whys = [why for why, those in apart if alone[0] in {program.inputs[k].path for k in those}]
        raise StrategyError(
            f"strategy: {alone[0]} can't be whole on one device, 'ps:table': shards of an array are of one size, so "
            f"each device would need room for all of it. {FEWEST} or more tables that the step treats alike share "
            f"shards, and it is none of those{''.join(f' ({why})' for why in whys)}. Leave it to 'auto' or 'ps'; "
            "on hosts ('ps:table', 'hosts') keeps each table whole on one rank"
        )


def _stacks(program: Program, plan: ProgramPlan) -> tuple[list[_Stack], list[tuple[int, str]]]:
    """Returns the stacks; and the families that are in none, each with the reason."""
    kinds = _kinds(plan)
    groups, apart = alike_tables(program, kinds) if len(kinds) >= FEWEST else ({}, [])
    counts = collections.Counter[Hashable]()
    for (kind, _), members in groups.items():
        counts[kind, members[0].leaves] += len(members)
    stacks: list[_Stack] = []
    for (kind, _), members in groups.items():
        stack = _Stack(program, members, plan) if len(members) >= FEWEST else None
        sums, why = members[0].sums, ""
        if counts[kind, members[0].leaves] < FEWEST:
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


def _kinds(plan: ProgramPlan) -> Mapping[int, Hashable]:
    """Maps the families that may be in a stack to what must be the same in the plans of all."""
    if plan.on_hosts:
        own = [f for f in plan.families if f.on_hosts and not f.table.pulled]
    elif plan.devices > 1:
        own = [f for f in plan.families if f.table.sizes is not None and f.table.sizes.together > 1]
    else:  # of others the leaves are ordinary arrays
        own = [f for f in plan.families if f.table.log_steps]
    return {f.family: kind_of(f.table) for f in own}


def plan_stacked(
    before: RowFacts,
    plan: ProgramPlan,
    together: Sequence[Sequence[int]],
    program: Program,
    inputs: Sequence[int | StackedTable],
) -> ProgramPlan | None:
    """Returns the plan for a stacked, analysed program; None if a stack can't be what its tables were. `before`,
    `plan`: facts and plan of the program before. `together`: the families of each stack. `inputs`: as those of the
    program before."""
    plan = _noting_stacks(plan, together)
    numbers = {n: k for k, was in enumerate(inputs) for n in ((was,) if isinstance(was, int) else was.inputs)}
    kept = {space.family: space for space in before.spaces}
    stacks = [was for was in inputs if isinstance(was, StackedTable)]
    owner_of = {k: at.shape.owner(at.table) for was in stacks for k, at in zip(was.inputs, was.indices, strict=True)}
    members = {families[0]: families for families in together}
    others = {family for families in members.values() for family in families[1:]}

    def followed(families: Sequence[FamilyPlan]) -> list[FamilyPlan] | None:
        made, plans = list[FamilyPlan](), {f.family: f for f in families}
        for planned in families:
            if planned.family in others:
                continue
            old = kept[planned.family]
            space = program.facts.space_of(numbers[old.leaves[0]])
            if space is None or space.refusal or space.deferred != old.deferred or len(space.leaves) != len(old.leaves):
                return None
            table, bounds, own = planned.table, planned.bounds, list[FamilyPlan]()
            if planned.family in members:
                own, ids = [plans[family] for family in members[planned.family]], program.ids[space.family]
                table = replace(table, log_steps=max(f.table.log_steps for f in own))
                if planned.on_hosts:
                    bounds = host_bounds(space, ids, plan.devices)
                else:
                    owners = [owner_of[kept[f.family].leaves[0]] for f in own]
                    own = [replace(f, table=replace(f.table, owner=o)) for f, o in zip(own, owners, strict=True)]
                    bounds = joined([f.bounds for f in own], owners, space, ids, plan.devices)
            made.append(FamilyPlan(space.family, table, bounds, tuple(f.table for f in own)))
        return made

    families, fallback = followed(plan.families), followed(plan.fallback)
    if families is None or fallback is None:
        return None
    plan = _noting_owners(plan, families)
    placements, layouts = input_placements(program, families)
    shards, tensors, uneven = (
        {numbers[k]: a for k, a in of.items() if k in numbers} for of in (plan.shards, plan.tensors, plan.uneven)
    )
    placements = tuple(None if k in uneven else shards.get(k, axis) for k, axis in enumerate(placements))
    return replace(
        plan,
        families=tuple(families),
        fallback=tuple(fallback),
        placements=placements,
        layouts=layouts,
        shards=shards,
        tensors=tensors,
        uneven=uneven,
    )


# --- the stacked program ---


class _Stack:
    """Tables that are alike, and what stands for their values."""

    def __init__(self, program: Program, members: Sequence[Member], plan: ProgramPlan) -> None:
        self.members = members
        bounds = [known(plan.family(m.space.family)).bounds for m in members]
        owners = tuple(b.owner if b.layout is None or b.layout.owner is None else b.layout.owner for b in bounds)
        shape = StackShape(tuple(m.space.extent for m in members), plan.devices, owners)
        self.total, self._ids = shape.rows, StackIds(shape)
        self.leaves = [
            StackedTable(inputs, tuple(StackIndex(shape, k, slot) for k in range(len(inputs))))
            for slot, inputs in enumerate(zip(*(m.space.leaves for m in self.members), strict=True))
        ]
        first = self.members[0]
        self._vars: dict[Hashable, Var] = {first.names[v]: Var(v.type.resized(0, self.total)) for v in first.names}
        self.inputs = [self._vars["leaf", n] for n in range(len(self.leaves))]
        #: Additions of the tables' reductions, which the stack's make superfluous -> the value that stays; None if some
        #: reductions aren't added up.
        self.sums = self._sums(program)

    def new(self, atom: A) -> A | Var:
        """Returns what stands for an operand of the first table's equations."""
        name = self.members[0].names.get(atom)
        return atom if name is None else self._vars[name]

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
            first, outputs = nodes[0], tuple(self.new(v) for v in nodes[0].outputs)
            if first.op == "scatter-add":
                yield from self._push(nodes, outputs[0])
                continue
            params = dict(first.params)
            sizes = ROWWISE.get(first.op)
            if sizes is not None:
                params[sizes] = (self.total, *params[sizes][1:])
            yield replace(
                first, inputs=tuple(map(self.new, first.inputs)), outputs=outputs, params=params, original=None
            )
        for lookups in self._lookups():
            k, like = lookups[0]
            yield from self._ids.look_up(self.new(self._of_first(like.inputs[0], k)), lookups)

    def _lookups(self) -> Iterator[list[tuple[int, Equation]]]:
        """Yields lookups that are made together: the n-th of each table, of one leaf and by ids that go together."""
        together: dict[Hashable, list[tuple[int, Equation]]] = {}
        for k, member in enumerate(self.members):
            counts: dict[Hashable, int] = {}
            for e, kind in member.lookups:
                counts[kind] = counts.get(kind, -1) + 1
                together.setdefault((kind, counts[kind]), []).append((k, e))
        yield from together.values()

    def _push(self, nodes: Sequence[Equation], output: Var) -> Iterator[Equation]:
        like = nodes[0]
        ids, equations = self._ids.joined([*enumerate(nodes)])
        yield from equations
        updates: list[Var] = []
        for k, e in enumerate(nodes):
            high, drops = self.members[k].space.extent - 1, "CLIP" not in str(e.params["mode"])

            def own(ids: Array, update: Array, high=high, drops=drops) -> Array:
                if drops:
                    update = jnp.where(is_row(ids, high, update.ndim), update, jnp.zeros((), update.dtype))
                first = ids.shape[:1] if ids.ndim > 1 else (1,)
                return _anew(update.reshape(*first, -1, *update.shape[ids.ndim - 1 :]), update)

            made = expand(own, e, (e.inputs[1], e.inputs[2]))
            yield from made
            updates.append(made[-1].outputs[0])
        yield from expand(_scatter, like, (self.new(like.inputs[0]), ids, *updates), output)

    def _of_first(self, atom: Atom, k: int) -> Atom:
        name = self.members[k].names[atom]
        return next(v for v, n in self.members[0].names.items() if n == name)


@dataclass(eq=False)
class StackIds:
    """Writes ids of tables as those of their stack, `[n, count, 1]`, where all tables have n examples."""

    shape: StackShape
    #: Ids -> their axis of examples, if that isn't the first.
    axes: Mapping[Var, int] = field(default_factory=dict)
    side_by_side: dict[tuple[tuple[int, Atom], ...], Var] = field(default_factory=dict)

    def joined(self, of: Sequence[tuple[int, Equation]]) -> tuple[Var, list[Equation]]:
        """Returns the ids of accesses, each with its table's number, and the equations that make them: the same few for
        any number of tables."""
        key = tuple((k, like.inputs[1]) for k, like in of)
        if key in self.side_by_side:
            return self.side_by_side[key], []
        axes = [self._axis(like) for _, like in of]
        counts = [_count(ids, axis) for (_, ids), axis in zip(key, axes, strict=True)]
        rows = [self.shape.rows_of(k) for k, _ in key]
        highs = [self.shape.extents[k] - 1 for k, _ in key]
        is_alike = len({ids.dtype for _, ids in key}) == 1

        def by_table(values: Sequence[int], dtype: Dtype = np.int32) -> int | np.ndarray:
            return values[0] if len({*values}) == 1 else np.repeat(np.array(values, dtype), counts)[None, :, None]

        def places(*ids: Array) -> Array:
            most = [min(high, int(jnp.iinfo(x.dtype).max)) for high, x in zip(highs, ids, strict=True)]
            if not is_alike:  # the stack's rows have numbers of 32 bits
                ids = tuple(jnp.clip(x, 0, high).astype(jnp.int32) for x, high in zip(ids, most, strict=True))
            flat = [_moved(x, axis, 0) for x, axis in zip(ids, axes, strict=True)]
            flat = [x.reshape(*(x.shape[:1] if x.ndim > 1 else (1,)), -1, 1) for x in flat]
            numbers = flat[0] if len(flat) == 1 else jax.lax.concatenate(flat, 1)
            numbers = jnp.clip(numbers, 0, by_table(most, numbers.dtype)).astype(jnp.int32)
            numbers = numbers if all(x.step == 1 for x in rows) else numbers * by_table([x.step for x in rows])
            return numbers + by_table([x.start for x in rows])

        equations = expand(places, of[0][1], [ids for _, ids in key])
        self.side_by_side[key] = equations[-1].outputs[0]
        return self.side_by_side[key], equations

    def _axis(self, access: Equation) -> int:
        ids = access.inputs[1]
        return self.axes.get(ids, 0) if isinstance(ids, Var) else 0

    def look_up(self, stack: Atom, lookups: Sequence[tuple[int, Equation]]) -> Iterator[Equation]:
        """Yields one lookup in a stack in place of some, each with its table's number."""
        ids, equations = self.joined(lookups)
        yield from equations
        read = expand(_gather, lookups[0][1], (stack, ids))
        if any(owner is not None for owner in self.shape.owners):
            owners = [self.shape.owner(k) for k, e in lookups for _ in range(_count(e.inputs[1], self._axis(e)))]
            read[-1] = replace(read[-1], params={**read[-1].params, "owners": tuple(owners)})
        yield from read
        (rows,), start = read[-1].outputs, 0
        for k, e in lookups:
            axis, shape = self._axis(e), [*e.outputs[0].shape]
            if axis:
                shape.insert(0, shape.pop(axis))
            count, high, fill = _count(e.inputs[1], axis), self.shape.extents[k] - 1, fill_of(e)

            def own(rows, ids, start=start, count=count, shape=tuple(shape), axis=axis, high=high, fill=fill) -> Array:
                found = _moved(rows[:, start : start + count].reshape(shape), 0, axis)
                return _anew(found if fill is None else jnp.where(is_row(ids, high, found.ndim), found, fill), rows)

            yield from expand(own, e, (rows, e.inputs[1]), e.outputs[0])
            start += count


def _count(ids: Atom, axis: int = 0) -> int:
    return int(np.prod([*ids.shape[:axis], *ids.shape[axis + 1 : -1]])) if len(ids.shape) > 1 else 1


def _moved(value: Array, axis: int, to: int) -> Array:
    return value if axis == to else jnp.moveaxis(value, axis, to)


def is_row(ids: Array, high: int, rank: int) -> Array:
    """Returns which ids are of the table, in the shape of `rank` axes of what they look up."""
    valid = (ids >= 0) & (ids <= min(high, int(jnp.iinfo(ids.dtype).max)))
    return valid[..., 0].reshape(ids.shape[:-1] + (1,) * (rank - ids.ndim + 1))


def _anew(value: Array, given: Array) -> Array:
    """Returns a value that an equation makes, even if it is what was given."""
    return jnp.copy(value) if value is given else value


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
    equations = [replace(e, inputs=tuple(map(now, e.inputs))) for e in equations]
    inputs: list[tuple[int | StackedTable, Var, Input]] = []
    for k, (leaf, input_) in enumerate(zip(block.inputs, program.inputs, strict=True)):
        if k not in of_leaf:
            inputs.append((k, leaf, input_))
            continue
        stack, n = of_leaf[k]
        table = stack.leaves[n]
        if table.inputs[0] == k:
            path = f"{input_.path} (and {len(table.inputs) - 1} more)"
            inputs.append((table, stack.inputs[n], replace(input_, path=path)))
    numbers = {was if isinstance(was, int) else was.inputs[0]: k for k, (was, _, _) in enumerate(inputs)}
    outputs: list[tuple[tuple[int, ...], Atom, Output]] = []
    new_states = program.new_states
    for k, (atom, output) in enumerate(zip(block.outputs, program.outputs, strict=True)):
        if output.state not in of_leaf:
            state = None if output.state is None else numbers[output.state]
            outputs.append(((k,), now(atom), replace(output, state=state)))
            continue
        stack, n = of_leaf[output.state]
        table = stack.leaves[n]
        if table.inputs[0] == output.state:
            of = tuple(new_states[leaf] for leaf in table.inputs)
            outputs.append((of, stack.new(atom), replace(output, state=numbers[output.state])))
    variables = tuple(v for _, v, _ in inputs)
    ordered = in_order(equations, variables)
    if ordered is None:
        return None
    made, _ = eliminate_dead(Block(variables, tuple(ordered), tuple(a for _, a, _ in outputs)))
    program = replace(
        program,
        block=made,
        inputs=tuple(i for _, _, i in inputs),
        outputs=tuple(o for _, _, o in outputs),
        rows=None,
        batch={},
        ids={},
    )
    return program, tuple(was for was, _, _ in inputs), tuple(of for of, _, _ in outputs)


# --- an evaluation reads tables where the train step keeps them, behind other tables ---

#: Equations into whose bodies a table is followed, if each turn reads it as it is.
_ENTERED = frozenset({"scan", "cond", "remat"})


def read_stacks(program: Program, plan: ProgramPlan, analyze: Callable[[Program], Program]) -> StackedProgram | None:
    """Returns an evaluation of stacks in place of one of tables that lie in them; None if there are none. `program`: an
    analysed evaluation. `plan`: its plan. `analyze`: analyses a program without facts."""
    block = program.block
    read = {*block.outputs, *(a for e in block.equations for a in e.inputs)}
    groups: dict[tuple[object, ...], list[int]] = {}
    unread, seen = set[int](), dict[StackIndex, int]()
    for k, (leaf, input_) in enumerate(zip(block.inputs, program.inputs, strict=True)):
        index = input_.stack_index
        if leaf not in read and (index is not None or input_.layout is not None):
            unread.add(k)
        elif index is not None and _is_looked_up(block, leaf):
            seen[index] = seen.get(index, -1) + 1  # another state's table may have the same index in its stack
            groups.setdefault((index.shape, index.slot, seen[index], leaf.type.resized(0, 0)), []).append(k)
    if not groups and not unread:
        return None
    stack_of = {k: group for group in groups.values() for k in group}
    inputs: list[tuple[int | StackedTable, Var, Input]] = []
    for k, (leaf, input_) in enumerate(zip(block.inputs, program.inputs, strict=True)):
        group = stack_of.get(k)
        if group is None:
            inputs += [(k, leaf, input_)] if k not in unread else []
        elif group[0] == k:
            inputs.append(_stack(program, group))
    stacks = {j: leaf for of, leaf, _ in inputs if isinstance(of, StackedTable) for j in of.inputs}
    tables: dict[Atom, tuple[Var, StackIndex]]
    tables = {block.inputs[k]: (leaf, known(program.inputs[k].stack_index)) for k, leaf in stacks.items()}
    before = program.facts
    program = replace(
        program,
        block=_in_stacks(block, tuple(leaf for _, leaf, _ in inputs), tables, program.batch),
        inputs=tuple(input_ for _, _, input_ in inputs),
        rows=None,
        batch={},
        ids={},
    )
    program = analyze(program)
    given = tuple(of for of, _, _ in inputs)
    families = {k: space.family for space in before.spaces for k in space.leaves}
    together = [[families[k] for k in group if k in families] for group in groups.values()]
    followed = plan_stacked(before, plan, [each for each in together if each], program, given)
    outputs = tuple((out,) for out in range(len(block.outputs)))
    return None if followed is None else StackedProgram(program, followed, given, outputs)


def _stack(program: Program, group: Sequence[int]) -> tuple[StackedTable, Var, Input]:
    """Returns the input that stands for tables of one stack."""
    indices = tuple(index for k in group if (index := program.inputs[k].stack_index) is not None)
    shape, first = indices[0].shape, program.inputs[group[0]]
    path = f"{first.path} (and {len(group) - 1} more)" if len(group) > 1 else first.path
    layout = None if first.layout is None else (shape.layout, 0)
    leaf = Var(program.block.inputs[group[0]].type.resized(0, shape.rows))
    input_ = replace(first, path=path, layout=layout, stack_index=None)
    return StackedTable(tuple(group), indices), leaf, input_


def _is_looked_up(block: Block, table: Var) -> bool:
    """Returns whether a block, with its loops and branches, reads nothing of a table but whole rows by their ids."""
    if table in block.outputs:
        return False
    for equation in block.equations:
        for k, atom in enumerate(equation.inputs):
            if atom is not table or (k == 0 and equation.op == "gather" and is_plain_access(equation)):
                continue
            n = k - equation.border.head if equation.op in _ENTERED else -1
            if not 0 <= n < equation.border.consts or not all(_is_looked_up(b, b.inputs[n]) for b in equation.bodies):
                return False
    return True


def _in_stacks(
    block: Block, inputs: tuple[Var, ...], tables: Mapping[Atom, tuple[Var, StackIndex]], batch: Mapping[Var, int]
) -> Block:
    """Returns a block that reads stacks in place of tables, those that it can at once. `inputs`: what it is given in
    place of its inputs. `tables`: input -> its stack, and its index there. `batch`: value -> its axis of examples."""
    equations, together = list[Equation](), dict[tuple[Var, int, bool, int | None], list[tuple[int, Equation]]]()
    turns, observed = dict[Atom, int](), 0  #: Value -> number of lookups, one after the other, that it depends on.
    for equation in block.equations:
        turn = max([0, *(turns.get(a, 0) for a in equation.inputs)])
        if equation.effects:
            turn = observed = max(turn, observed)
        table = tables.get(equation.inputs[0]) if equation.op == "gather" else None
        if table is None:
            equations.append(_entered(equation, tables, batch))
        else:
            (stack, index), ids = table, equation.inputs[1]
            axis = batch.get(ids) if isinstance(ids, Var) else None
            key = stack, turn, axis is None, ids.shape[axis or 0] if len(ids.shape) > 1 else None
            together.setdefault(key, []).append((index.table, equation))
            turn += 1
        turns.update(dict.fromkeys(equation.outputs, turn))
    stacks = {stack: StackIds(index.shape, batch) for stack, index in tables.values()}
    for (stack, *_), lookups in together.items():
        equations += stacks[stack].look_up(stack, lookups)
    ordered = in_order(equations, inputs)
    assert ordered is not None, "lookups of one turn don't depend on each other"
    return Block(inputs, tuple(ordered), block.outputs)


def _entered(equation: Equation, tables: Mapping[Atom, tuple[Var, StackIndex]], batch: Mapping[Var, int]) -> Equation:
    """Returns a loop, branch or checkpoint that is given stacks in place of tables."""
    if not equation.bodies or tables.keys().isdisjoint(equation.inputs):
        return equation
    head, bodies = equation.border.head, list[Block]()
    given = {k: tables[a] for k, a in enumerate(equation.inputs[head:]) if a in tables}
    for body in equation.bodies:
        stacks = {stack: Var(stack.type) for stack, _ in given.values()}
        own: dict[Atom, tuple[Var, StackIndex]]
        own = {body.inputs[k]: (stacks[stack], index) for k, (stack, index) in given.items()}
        first = {stack: k for k, (stack, _) in reversed(given.items())}
        inputs = list(body.inputs)
        for k, (stack, _) in given.items():
            inputs[k] = stacks[stack] if first[stack] == k else Var(stack.type)
        bodies.append(_in_stacks(body, tuple(inputs), own, batch))
    operands = tuple(tables[a][0] if a in tables else a for a in equation.inputs)
    return replace(equation, inputs=operands, bodies=tuple(bodies), original=None)
