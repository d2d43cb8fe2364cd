"""Makes the Plan: which families are lifted, by the strategy, by what analysis allows and by cost."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.analysis.bags import BagFinder
from autopar.analysis.rules import ALIGNED
from autopar.analysis.tensor import TensorGroup, divide_products
from autopar.cost.exchange import NO_OTHERS, cheapest_together, count_exchanges, step_seconds
from autopar.cost.memory import Shardable, choose_sharded, is_open, leaf_bytes, state_bytes
from autopar.cost.model import EXCHANGES_MARGIN, MOST_EXCHANGES_S
from autopar.cost.rates import UNMEASURED, Measurements, StageRates
from autopar.errors import PlanError, StrategyError
from autopar.ir.cluster import STATE_SHARE, state_budget
from autopar.ir.figures import format_bytes, wire_bytes
from autopar.ir.layout import RowLayout, even_axis
from autopar.ir.local import sent_bytes
from autopar.ir.options import Options
from autopar.ir.paths import matches
from autopar.ir.plan import DensePlan, Plan, TablePlan, TensorGroupPlan, TensorPlan
from autopar.ir.program import Atom, Program, Var, known
from autopar.ir.program_plan import FamilyPlan, ProgramPlan
from autopar.ir.rowspace import RowSpace, host_refusal
from autopar.ir.strategy import (
    REPLICATED,
    TENSOR,
    Strategy,
    asks_for_whole,
    choice_for,
    split_method,
    with_hosts,
    without_hosts,
)
from autopar.passes.choosing.families import Choices, Decision, compares, decide_family
from autopar.passes.choosing.together import FEWEST, alike_tables, device_owners, with_owners, without_small


def choose(program: Program, options: Options, measured: Measurements = UNMEASURED) -> tuple[ProgramPlan, str]:
    """Decides for every table of an analysed program.

    Args:
      options: The user's. With an earlier plan `strategy` is that of the plan.
      measured: Without rates the fewest bytes are chosen. If the state exceeds the devices' memory, tables that are
        left to "auto" are sharded.

    Raises:
      StrategyError: a method or pattern that doesn't exist, or a row method for a table that can't be lifted.
    """
    wanted = _wanted(program, options.strategy)
    has_effects = any(e.effects for e in program.block.equations)
    earlier = options.plan
    decided = {} if earlier is None else {k: earlier.table(program.inputs[k].path) for k, _ in program.tables}
    # Tables on devices share update logs; each on hosts has its own.
    waiting = 0 if wanted.hosts else sum(space.extent for space in program.facts.spaces if space.deferred)
    finder = functools.cache(lambda: BagFinder(program.block))
    whole = frozenset(k for k, _ in program.tables if asks_for_whole(options.strategy, program.inputs[k].path))
    value = functools.cache(lambda atom: measured.value(program, atom))
    basis = (wanted.methods, wanted.hosts, not has_effects, decided, finder, value, whole, waiting)
    choices = Choices(options, measured, *basis)
    made = [decide_family(program, space, choices) for space in program.facts.spaces]
    if options.devices > 1:
        made = without_small(program, made, choices) if wanted.hosts else _with_stacks(program, made, choices)
        made = with_owners(program, made, choices) if wanted.hosts else made
    others = _others(program, made, choices)

    def decide_again(k: int, *, why_dense: str = "", why_sharded: str = "") -> None:
        space, beside = program.facts.spaces[k], others.get(k, NO_OTHERS)
        made[k] = decide_family(program, space, choices, why_dense=why_dense, why_sharded=why_sharded, others=beside)

    for k in others:
        decide_again(k)
    for k in _saving_little(program, made, choices):
        decide_again(k, why_dense=_SAVES_LITTLE)
    bound = _assemble(program, options, made, wanted)
    if measured.memory is not None and options.devices > 1 and not options.hosts:
        sharded = _too_large(program, bound.plan, made, choices, measured.memory)
        for k, reason in sharded.items():
            decide_again(k, why_sharded=reason)
        bound = _assemble(program, options, made, wanted) if sharded else bound
    if options.tensor > 1:
        bound = _with_tensors(program, options, bound, wanted, measured)
    tables = sum(len(plans) for _, plans in made)
    lifted = sum(t.lifted for t in bound.plan.tables)
    return bound, f"{lifted} of {tables} tables run on their touched rows"


def compares_methods(program: Program, options: Options) -> bool:
    """Returns whether `choose` compares the cost of methods, and so needs rates of the devices."""
    wanted = _wanted(program, options.strategy)
    choices = Choices(options, UNMEASURED, wanted.methods, wanted.hosts)
    return any(compares(program, space, choices) for space in program.facts.spaces)


def _assemble(program: Program, options: Options, decided: Sequence[Decision], wanted: _Wanted) -> ProgramPlan:
    """Returns the plan of all families' decisions, and of dense leaves."""
    pairs = zip(program.facts.spaces, decided, strict=True)
    families = [
        tuple(FamilyPlan(space.family, tables[0], bounds) for bounds in space_plan)
        for space, (space_plan, tables) in pairs
        if space_plan is not None
    ]
    order = {input_.path: k for k, input_ in enumerate(program.inputs)}
    safe, tight = [f for f, _ in families], [f for _, f in families]
    placements, layouts = input_placements(program, safe)
    chosen = {f.family for f in safe}
    rows = {leaf for space in program.facts.spaces if space.family in chosen for leaf in space.leaves}
    states = frozenset(k for k, input_ in enumerate(program.inputs) if input_.role == "state")
    shards, plans = shard_dense(program, wanted.shards, states - rows, options.devices, options.spread_axes)
    tables = sorted(_with_shards([t for _, plans in decided for t in plans], plans), key=lambda t: order[t.path])
    members = {leaf for space in program.facts.spaces for leaf in space.leaves}
    named = {leaf.path: leaf for leaf in plans}
    unchanged = program.unchanged
    others = [dense_plan(program, k, sharded=k in shards, unchanged=k in unchanged) for k in sorted(states - members)]
    dense = tuple(named.get(leaf.path, leaf) for leaf in others)
    placements = tuple(shards.get(k, axis) for k, axis in enumerate(placements))
    fallback = tuple(safe) if any(f.bounds.tight for f in tight) else ()
    examples = {k: program.batch[v] for k, v in enumerate(program.block.inputs) if v in program.batch}
    sizes = {k: program.block.inputs[k].shape[axis] for k, axis in examples.items()}
    # Each device is given all of a batch that the devices don't divide, and takes its part within the program.
    undivided = min((size for size in sizes.values() if size % options.devices), default=0)
    uneven = {k: axis for k, axis in examples.items() if undivided and sizes[k] % undivided == 0}
    facts = (program.name, options.devices, None, options.sparse)
    given = {"microbatches": options.microbatches, "optimize": options.optimize}
    plan = Plan(*facts, tuple(tables), dense, state_bytes=0, **given)
    placements = tuple(None if k in uneven else axis for k, axis in enumerate(placements))
    bound = ProgramPlan(plan, tuple(tight), placements, layouts, fallback, shards, uneven=uneven, undivided=undivided)
    if bound.on_hosts:
        # A rank uses as many of its devices as divide its examples.
        each = math.gcd(options.rank_devices, *(size // options.devices for size in sizes.values())) if sizes else 1
        bound = replace(bound, rank_devices=each)
    return bound.noting(state_bytes=state_bytes(program, bound))


def _with_stacks(program: Program, decided: Sequence[Decision], choices: Choices) -> list[Decision]:
    """Returns the decisions where tables that are alike are exchanged as one, if enough of them go by "ps" then."""
    made, spaces = list(decided), program.facts.spaces
    numbers = {space.family: k for k, space in enumerate(spaces)}
    kinds = {space.family: space.deferred for space in spaces if not space.refusal}
    groups = alike_tables(program, kinds)[0] if len(kinds) >= FEWEST else {}
    for group in groups.values():
        every = [numbers[member.space.family] for member in group]
        pooled = {k: decide_family(program, spaces[k], choices, together=len(every))[1][0].pooled for k in every}
        for pools in set(pooled.values()):  # those whose bags owners add up have a stack of their own
            members, count, again = [k for k in every if pooled[k] == pools], 0, dict[int, Decision]()
            while FEWEST <= len(members) != count:  # with fewer, others may leave as well
                count = len(members)
                again = {k: decide_family(program, spaces[k], choices, together=count, may_pool=pools) for k in members}
                plans = {k: table for k, (_, (table, *_)) in again.items()}
                members = [k for k, t in plans.items() if t.lifted and t.method == "ps" and t.pooled == pools]
            if len(members) < FEWEST:
                continue
            owners, whys = device_owners(program, {k: again[k][1][0] for k in members}, choices)
            for k in members:
                if k in owners:
                    kept = {"together": len(members), "may_pool": pools, "owner": owners[k]}
                    again[k] = decide_family(program, spaces[k], choices, **kept)
                bounds, tables = again[k]
                why = f"; no device has it whole: {whys[k]}" if k in whys else ""
                made[k] = bounds, [replace(table, reason=table.reason + why) for table in tables]
    return made


def _others(program: Program, decided: Sequence[Decision], choices: Choices) -> Mapping[int, Mapping[str, int]]:
    """Maps the families left to "auto" to the numbers of other exchanges by each method, whose messages they share; but
    for tables that are exchanged as one."""
    plans = {k: (each.method, each.sizes) for k, (_, (each, *_)) in enumerate(decided) if each.sizes is not None}
    rates, spaces = choices.measured.rates, program.facts.spaces
    if rates is None or len(plans) == 1:
        return {}
    open_ = {k: s for k, (_, s) in plans.items() if s.together == 1 and compares(program, spaces[k], choices)}
    named = count_exchanges(plan for k, plan in plans.items() if k not in open_)
    methods = cheapest_together(rates, list(open_.values()), named)
    return {k: named + Counter(methods) - Counter([m]) for k, m in zip(open_, methods, strict=True)}


_SAVES_LITTLE = "exchanges of rows may cost a busy step more than they save"


def _saving_little(program: Program, decided: Sequence[Decision], choices: Choices) -> Sequence[int]:
    """Returns the families that "auto" exchanges by rows, if together they save less than the margin.

    Other exchanges of rows, which they could go along with, pay it already.
    """
    plans = [each for _, (each, *_) in decided]
    exchanged = [k for k, each in enumerate(plans) if each.lifted and each.method != "allreduce"]
    is_open = (compares(program, program.facts.spaces[k], choices) and not plans[k].log_steps for k in exchanged)
    rates = choices.measured.rates
    if rates is None or not rates.shares_cores or choices.options.accelerators or not all(is_open):
        return ()
    whole = {"allreduce": len(exchanged) - 1}
    saved = sum(
        step_seconds(rates, known(plans[k].sizes), whole)["allreduce"] - plans[k].seconds[plans[k].method]
        for k in exchanged
    )
    return exchanged if saved < min(EXCHANGES_MARGIN * rates.all_reduce(1), MOST_EXCHANGES_S) else ()


def _too_large(
    program: Program, plan: Plan, decided: Sequence[Decision], choices: Choices, memory: int
) -> Mapping[int, str]:
    """Returns the families that "auto" replicated, and that must be sharded for want of memory.

    Returns:
      Number of the family's space -> the reason.
    """
    needed, budget = plan.state_bytes, state_budget(memory)
    if needed <= budget:
        return {}
    open_: list[int] = []
    costs: list[Shardable] = []
    for k, (space, (_, (plans, *_))) in enumerate(zip(program.facts.spaces, decided, strict=True)):
        # Sizes are known where methods were compared.
        is_auto = all(choices.methods[t][0] == "auto" for t in space.tables)
        if is_auto and plans.sizes is not None and plans.method in REPLICATED:
            cost = plans.seconds or plans.sent
            open_.append(k)
            costs.append(Shardable(_saved(program, space, choices.devices), cost["ps"] - cost[plans.method]))
    sharded = sorted(choose_sharded(costs, needed - budget))
    needed -= sum(costs[n].saved for n in sharded)
    too_large = {}
    for n in sharded:
        method = decided[open_[n]][1][0].method
        with_it = f"{format_bytes(needed + costs[n].saved)} of {format_bytes(budget)} on each device"
        too_large[open_[n]] = f"{method} would take {with_it} ({STATE_SHARE:.0%} of its memory, for the whole state)"
    return too_large


def _saved(program: Program, space: RowSpace, devices: int) -> int:
    sizes = [program.block.inputs[k].type.nbytes for k in space.leaves]
    return sum(size - -(-size // devices) for size in sizes)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A strategy, leaf by leaf."""

    methods: dict[int, tuple[str, bool]]  #: Table -> (method, whether the strategy names this very table).
    shards: dict[int, str]  #: Leaf -> the pattern that gives it to "ps"; `tensors`: to "tensor".
    tensors: dict[int, str]
    hosts: frozenset[int]  #: Tables on hosts.
    kept: frozenset[int]  #: Leaves that every device must have whole.


def _with_tensors(
    program: Program, options: Options, bound: ProgramPlan, wanted: _Wanted, measured: Measurements
) -> ProgramPlan:
    """Returns the plan with products that are divided over the devices of a tensor axis."""
    lifted = {f.family for f in bound.families}
    rows = {leaf for space in program.facts.spaces if space.family in lifted for leaf in space.leaves}
    states = {k for k, input_ in enumerate(program.inputs) if input_.role == "state"}
    examples = {k for k, along in enumerate(bound.placements) if along is not None}.union(bound.uneven)
    eligible = sorted(states - rows - examples - wanted.kept)
    needed, memory = bound.plan.state_bytes, measured.memory
    axes, plan = choose_tensor(
        program,
        wanted.tensors,
        eligible,
        (options.devices, options.tensor),
        measured.stages,
        is_needed=memory is not None and needed > state_budget(memory),
    )
    bound = replace(bound, tensors=axes).noting(tensor=plan)
    return bound.noting(state_bytes=state_bytes(program, bound))


def _wanted(program: Program, strategy: Strategy) -> _Wanted:
    """Reads a strategy leaf by leaf.

    One method for the whole step means the tables that can be lifted ("tensor": all leaves that can be divided);
    patterns mean every parameter.
    """
    states = {k: input_.path for k, input_ in enumerate(program.inputs) if input_.role in ("state", "table")}
    looked_up = {*(k for k, _ in program.tables), *program.unfollowed}
    if not isinstance(strategy, Mapping):
        method, where = split_method(strategy)
        if method == TENSOR:
            auto = {k: ("auto", False) for k in looked_up}
            return _Wanted(auto, {}, dict.fromkeys(states, TENSOR), frozenset(), frozenset())
        liftable = {k for space in program.facts.spaces if host_refusal(program, space) is None for k in space.tables}
        hosts = frozenset(liftable if where == "hosts" else ())
        methods = {k: (method, False) for k in looked_up}
        kept = frozenset(states if method == "allreduce" else ())
        return _Wanted(methods, {}, {}, hosts, kept)
    tables = {k for k, _ in program.tables}
    trains = any(input_.role == "state" for input_ in program.inputs)
    #: What inputs of an evaluation by a step's function are called in its training.
    tails = {tail for input_ in program.inputs for tail in (input_.path, input_.path.partition("/")[2])}
    pulled = {k for k, leaf in enumerate(program.block.inputs) if leaf in program.pulled}
    there = {k for k in states if program.inputs[k].layout is not None}
    for pattern, input_ in strategy.items():
        method, where = split_method(input_)
        matched = [k for k, path in states.items() if matches(pattern, path)]
        if not matched and not trains and any(matches(pattern, tail) for tail in tails):  # it is for the training
            continue
        shown = ", ".join(states[k] for k in sorted(tables)) or "none"
        if pattern not in ("**", "*") and not matched:
            rest = [path for k, path in states.items() if k not in tables]
            others = f"; others: {', '.join(rest[:8])}{', ...' if len(rest) > 8 else ''}" if rest else ""
            raise StrategyError(f"strategy: {pattern!r} matches no parameter. Looked up by rows: {shown}{others}")
        if where == "hosts" and not (tables | pulled | there).intersection(matched):
            raise StrategyError(
                f"strategy: {pattern!r} matches no parameter that can be on hosts: neither a table (looked up by rows: "
                f"{shown}) nor, by its path or a pattern other than '*' and '**', a dense floating-point one that the "
                "step reads"
            )
        if method in ("allgather", "allreduce_rows") and not tables.intersection(matched):
            raise StrategyError(
                f"strategy: {pattern!r} matches no parameter that is looked up by rows ({shown}); "
                f"for dense ones there are 'allreduce', 'ps' and 'tensor', not {input_!r}"
            )
    wanted, hosts, kept = _Wanted({}, {}, {}, frozenset(), frozenset()), set[int](), set[int]()
    for k, path in states.items():
        method, where, pattern = choice_for(strategy, path)
        if pattern is not None and method == TENSOR:
            wanted.tensors[k] = pattern  # a table may still be lifted, unless it is named itself
            method, pattern = ("allreduce", pattern) if pattern == path else ("auto", None)
        if k in tables:
            is_pulled = k in pulled  # perhaps by the name of one of its slots
            wanted.methods[k] = ("ps", True) if is_pulled else (method, pattern not in ("*", "**", None))
            hosts.update([k] if where == "hosts" or is_pulled else [])
        elif k in looked_up:
            wanted.methods[k] = (method, False)
        if pattern is not None and method == "ps" and where == "devices" and not asks_for_whole(strategy, path):
            wanted.shards[k] = pattern
        if method == "allreduce" and k not in wanted.tensors:
            kept.add(k)
    return replace(wanted, hosts=frozenset(hosts), kept=frozenset(kept))


def _with_shards(tables: Sequence[TablePlan], patterns: Sequence[DensePlan]) -> list[TablePlan]:
    """Adds to tables that are kept in shards like dense leaves why they aren't lifted."""
    by_path = {t.path: t for t in tables}
    for leaf in patterns:
        old = by_path.get(leaf.path)
        if old is not None:
            reason = f"{leaf.reason}; all rows, because {old.reason}"
            by_path[leaf.path] = replace(old, method=leaf.method, reason=reason, sent=leaf.sent)
    return list(by_path.values())


def input_placements(
    program: Program, families: Sequence[FamilyPlan]
) -> tuple[tuple[int | None, ...], dict[int, tuple[RowLayout, int]]]:
    """Returns the inputs' axes over the devices (examples, rows of sharded tables), and layouts of sharded tables.

    Other inputs are on every device.
    """
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    axes = [program.batch.get(v) if input_.layout is None else _unstored(v, input_.layout) for v, input_ in pairs]
    sharded = {f.family: f.layout for f in families if f.layout is not None}
    layouts = {}
    for space in program.facts.spaces:
        layout = sharded.get(space.family)
        if layout is not None:
            for leaf, axis in space.row_axes.items():
                axes[leaf] = axis
                if not layout.is_plain:
                    layouts[leaf] = layout, axis
    return tuple(axes), layouts


def _unstored(leaf: Var, layout: tuple[RowLayout, int] | None) -> int | None:
    return None if layout is None else even_axis(leaf.shape, layout[1], layout[0].devices)


# --- dense parameters in shards: which leaves a strategy's `ps` spreads over the devices, and along which axis ---
#
# Parallax's BASE keeps dense parameters on servers: each is gathered for use, and its gradient is reduced to its owner.
# Its slots, which its update reads elementwise, go with it.


def shard_dense(
    program: Program, patterns: Mapping[int, str], dense: frozenset[int], devices: int, first: Mapping[str, int]
) -> tuple[dict[int, int], list[DensePlan]]:
    """Returns leaf -> the axis along which it is spread, slots included; and the plans of leaves that a pattern names.

    Args:
      patterns: Leaf -> the pattern that gives it to "ps".
      dense: Leaves that no lifted family has.
      devices: N.
      first: Path of a leaf -> the preferred axis, if the devices divide it; else the first one.

    Raises:
      StrategyError: a pattern names one leaf that can't be spread.
    """
    axes: dict[int, int] = {}
    plans: dict[int, DensePlan] = {}
    tables = {k for k, _ in program.tables}
    for leaf, pattern in patterns.items():
        if leaf not in dense or leaf in axes or devices == 1:
            continue
        type_, path = program.block.inputs[leaf].type, program.inputs[leaf].path
        axis = even_axis(getattr(type_, "shape", ()), first.get(path, 0), devices)
        if axis is None:
            if pattern == path:
                raise StrategyError(
                    f"strategy: {path} can't be spread over {devices} devices: they divide none of its axes ({type_}). "
                    "Leave it to 'auto'"
                )
            continue
        shards = _with_slots(program, leaf) & dense
        named = min(shards, key=lambda k: (len(program.inputs[k].path), k))  # the parameter rather than a slot
        axes.update(dict.fromkeys(shards, axis))
        slots = f", {len(shards) - 1} slot{'s' * (len(shards) > 2)} with it" if len(shards) > 1 else ""
        use = "looked up at its owners" if shards & tables else "gathered for use"
        reason = f"a shard of axis {axis} on each device{slots}; {use}, its gradient reduced to its owner"
        value, gradient = (int(wire_bytes("all-gather", devices, n)) for n in (type_.nbytes, sent_bytes(type_, "sum")))
        sent = {"ps": value + gradient, "allreduce": 2 * gradient}
        plans[named] = replace(
            dense_plan(program, named, sharded=True, unchanged=named in program.unchanged), reason=reason, sent=sent
        )
    return axes, list(plans.values())


def dense_plan(program: Program, k: int, *, sharded: bool, unchanged: bool) -> DensePlan:
    type_ = program.block.inputs[k].type
    size = getattr(type_, "nbytes", 0)
    shape = getattr(type_, "shape", ())
    return DensePlan(program.inputs[k].path, shape, _text(type_.dtype), size, sharded, unchanged)


#: NumPy names a dtype slowly, and a state has thousands of leaves of few dtypes.
_text = functools.cache(str)


def _with_slots(program: Program, leaf: int) -> frozenset[int]:
    """Returns the leaf, and the leaves of its shape that elementwise updates tie to it."""
    block, new = program.block, program.new_states
    producers = block.makers()
    numbers = {v: k for k, v in enumerate(block.inputs)}
    shape = block.inputs[leaf].shape
    together, waiting = {leaf}, [leaf]
    while waiting:
        k = waiting.pop()
        seen: set[Atom] = set()
        # Back from the new value, through elementwise equations, to the states that it reads.
        atoms = [block.outputs[new[k]]] if k in new else []
        while atoms:
            atom = atoms.pop()
            if not isinstance(atom, Var) or atom in seen or atom.shape != shape:
                continue
            seen.add(atom)
            if atom in numbers and program.inputs[numbers[atom]].role == "state" and numbers[atom] not in together:
                together.add(numbers[atom])
                waiting.append(numbers[atom])
            made = producers.get(atom)
            if made is not None and (made.op in ALIGNED or made.op == "optimization_barrier"):
                atoms += made.inputs
    return frozenset(together)


# --- products that are divided over the devices of a tensor axis, by the strategy or because it pays ---
#
# "tensor" divides all weights that can be; "auto" divides a group if that is predicted to save more than its exchanges
# take, or if the state doesn't fit the devices otherwise.


def choose_tensor(
    program: Program,
    asked: Mapping[int, str],
    eligible: Collection[int],
    devices: tuple[int, int],
    rates: StageRates | None,
    *,
    is_needed: bool,
) -> tuple[dict[int, int], TensorPlan]:
    """Returns leaf -> the axis along which it is divided, and the plan with reasons.

    Args:
      asked: Leaf -> the pattern that gives it to "tensor".
      eligible: Leaves that may be divided, those of `asked` among them.
      devices: N, over which examples are spread, and T.
      rates: Rates of products and sends; None: unknown, and only `asked` leaves are divided.
      is_needed: The state doesn't fit the devices undivided.

    Raises:
      StrategyError: a pattern names weights of which none can be divided.
    """
    count, parts = devices
    groups = divide_products(program, eligible, parts, count)
    _check_asked(program, asked, groups, parts)
    axes: dict[int, int] = {}
    plans = []
    for group in groups:
        plan = _decided(program, group, asked, devices, rates, is_needed=is_needed)
        plans.append(plan)
        if plan.taken:
            axes |= group.axes
    return axes, TensorPlan(parts, tuple(plans))


def _decided(
    program: Program,
    group: TensorGroup,
    asked: Mapping[int, str],
    devices: tuple[int, int],
    rates: StageRates | None,
    *,
    is_needed: bool,
) -> TensorGroupPlan:
    count, parts = devices
    sent = sum(e.sent(parts) for e in group.exchanges)
    times = {name: sum(e.times for e in group.exchanges if e.collective == name) for name in _COLLECTIVES}
    saved_s = sent_s = 0.0
    if rates is not None:
        saved_s = group.flops * rates.flop_s * (1 - 1 / parts) / count
        sent_s = sent * rates.send_byte_s + sum(times.values()) * rates.call_s
    pattern = next((asked[k] for k in group.weights if k in asked), None)
    predicted = f"saves {saved_s * 1e3:.2f} ms of products, and takes {sent_s * 1e3:.2f} ms"
    if pattern is not None:
        taken, reason = True, f"strategy {pattern!r}"
    elif is_needed:
        taken, reason = True, "the state doesn't fit the devices otherwise"
    elif rates is None:
        taken, reason = False, "nothing is known of the devices"
    else:
        taken, reason = saved_s > sent_s, predicted
    return TensorGroupPlan(
        axes={program.inputs[k].path: axis for k, axis in group.axes.items()},
        weights=tuple(program.inputs[k].path for k in group.weights),
        taken=taken,
        reason=reason,
        reduces=times["all-reduce"],
        gathers=times["all-gather"],
        sent=round(sent),
        flops=group.flops,
        saved_s=saved_s,
        sent_s=sent_s,
    )


_COLLECTIVES = ("all-reduce", "all-gather")


def _check_asked(program: Program, asked: Mapping[int, str], groups: Collection[TensorGroup], parts: int) -> None:
    """Raises StrategyError for a pattern none of whose leaves can be divided."""
    divided = {k for group in groups for k in group.axes}
    named = {program.inputs[k].path for k in divided}
    for pattern in dict.fromkeys(asked.values()):
        leaves = [k for k, own in asked.items() if own == pattern]
        if divided.isdisjoint(leaves):
            shown = ", ".join(sorted(named)[:8]) or "none"
            sizes = ", ".join(f"{program.inputs[k].path} {program.block.inputs[k].type}" for k in leaves[:4])
            raise StrategyError(
                f"strategy: {pattern!r} gives {sizes} to 'tensor', and no product can be divided over {parts} devices "
                f"along an axis of theirs: it must be read by a matrix product, and {parts} must divide the axis. "
                f"Leaves that can be divided: {shown}"
            )


# --- checks of an earlier plan against a step, before it is followed and after ---
#
# Decisions about a table hold for its shape, its slots and the number of devices. Another step than the plan's is
# refused with all differences, rather than run by half of a plan.


_REMEDY = "Plan the step as it is now: autopar.plan(step, state, batch).save(...); or leave plan= away"


def check_facts(program: Program, earlier: Plan, devices: int, tensor: int) -> None:
    """Checks that the plan is of an analysed program's tables, on this number of devices and tensor devices. Raises
    PlanError if it isn't; all differences are named."""
    if earlier.devices != devices:
        hosted = any(table.where == "hosts" for table in earlier.tables)
        what, remedy = ("ranks", "Start so many: mpirun -n") if hosted else ("devices", "Give a mesh of")
        raise PlanError(
            f"{earlier.name} is for {earlier.devices} {what}, and {program.name} runs on {devices}. {remedy} "
            f"{earlier.devices}, or plan the step for {devices}: autopar.plan(step, state, batch).save(...)"
        )
    known = {t.path for t in earlier.tables}
    leaves = {program.inputs[k].path: (space, k) for space in program.facts.spaces for k in space.tables}
    states = {input_.path for input_ in program.inputs}
    divided = 1 if earlier.tensor is None or not earlier.tensor.axes else earlier.tensor.devices
    if divided != tensor:
        raise PlanError(
            f"{earlier.name} divides products over {divided} devices, and {program.name} over {tensor}. Give a mesh "
            f"whose tensor axis has {divided}, or plan the step anew: autopar.plan(step, state, batch).save(...)"
        )
    wrong = [f"{t.path} is no table of the step" for t in earlier.tables if t.path not in leaves]
    wrong += [f"{path} isn't in the step's state" for path in earlier.sharded if path not in states]
    for path, (space, table) in leaves.items():
        if path in known:
            wrong += _differences(program, space, table, earlier.table(path))
        else:
            wrong.append(f"{path} is looked up by rows, and isn't in the plan")
    _raise(program, earlier, wrong)


def _differences(program: Program, space: RowSpace, table: int, plan: TablePlan) -> list[str]:
    type_ = program.block.inputs[table].type
    slots = tuple(program.inputs[k].path for k in space.leaves if k != table)
    pairs = [
        ("shape", list(plan.shape), list(type_.shape)),
        ("dtype", plan.dtype, str(type_.dtype)),
        ("axis of rows", plan.axis, space.row_axes[table]),
        ("slots", ", ".join(sorted(plan.slots)) or "none", ", ".join(sorted(slots)) or "none"),
    ]
    return [f"{plan.path}: {what} {now} in the step, {then} in the plan" for what, then, now in pairs if then != now]


def check_followed(program: Program, earlier: Plan, made: ProgramPlan) -> None:
    """Checks that the new decisions equal those of the earlier plan. Raises PlanError if a table can't follow the plan,
    or its rows wait now and didn't then."""
    tables = {t.path: t for t in made.plan.tables}
    wrong = []
    divided, now = ({} if p.tensor is None else p.tensor.axes for p in (earlier, made.plan))
    for path in sorted(divided.keys() | now.keys()):
        if divided.get(path) != now.get(path):
            axes = (f"divided along axis {x[path]}" if path in x else "whole" for x in (divided, now))
            wrong.append(f"{path}: {next(axes)} in the plan, {next(axes)} in the step")
    for space in program.facts.spaces:
        family = made.family(space.family)
        where, log_steps = ("devices", 0) if family is None else (family.table.where, family.table.log_steps)
        for k in space.tables:
            before, now = earlier.table(program.inputs[k].path), tables[program.inputs[k].path]
            then, here = _words(before.lifted, before.method, before.where), _words(now.lifted, now.method, where)
            if then != here:
                line = f", {now.line}" if now.line else ""
                wrong.append(f"{before.path}: {then} in the plan, {here} in the step ({now.reason}{line})")
            elif before.log_steps != log_steps:
                wrong.append(
                    f"{before.path}: rows wait for {before.log_steps} steps in the plan, for {log_steps} in the step"
                )
    _raise(program, earlier, wrong)


def _words(lifted: bool, method: str, where: str) -> str:
    return f"{method} on {'touched' if lifted else 'all'} rows{' on hosts' if where == 'hosts' else ''}"


def _raise(program: Program, earlier: Plan, wrong: Sequence[str]) -> None:
    if wrong:
        raise PlanError(f"{earlier.name} doesn't fit {program.name}: {'; '.join(wrong)}. {_REMEDY}")


# --- devices or hosts: a plan shows where tables can be, and by which options to plan again ---
#
# The decision changes what a step is analysed for (devices or ranks), so it needs a whole plan: one that asks for hosts
# though nothing can be there, or one whose state doesn't fit the devices.


@dataclass(frozen=True, slots=True)
class Move:
    """Options by which a step is planned again; the tables that move then, and why."""

    options: Options
    paths: Collection[str] = ()
    reason: str = ""


def move_tables(
    program: Program, bound: ProgramPlan, options: Options, memory: int | None, *, devices: int, ranks: int
) -> Move | None:
    """Returns a move of tables that can't stay as planned; None if all can.

    `bound`: a plan of an analysed program. `options`: those that it was made by. `memory`: bytes of each device, None
    if unknown. `devices`, `ranks`: numbers of those that run the step without hosts, and with tables on hosts.
    """
    if options.hosts and not bound.on_hosts:  # nothing can be there
        strategy = without_hosts(options.strategy)
        return Move(replace(options, hosts=False, devices=devices, strategy=strategy))
    if memory is None or options.hosts or not options.may_leave:
        return None
    paths = leave_devices(program, bound, options.strategy, memory)
    reason = f"the state takes too much of the {memory / 2**30:.1f} GiB of a device"
    return Move(on_hosts(options, paths, ranks), paths, reason) if paths else None


def on_hosts(options: Options, paths: Iterable[str], ranks: int) -> Options:
    """Returns the options with some tables in host memory."""
    return replace(options, hosts=True, devices=ranks, strategy=with_hosts(options.strategy, paths))


def leave_devices(program: Program, bound: ProgramPlan, strategy: Strategy, memory: int) -> tuple[str, ...]:
    """Returns the tables left to autopar that don't fit devices of `memory` bytes each.

    The largest go first, until the rest fits; tables that can't be lifted stay.
    """
    excess = state_bytes(program, bound) - state_budget(memory)
    paths: list[str] = []
    free = [s for s in program.facts.spaces if host_refusal(program, s) is None and is_open(program, s, strategy)]
    sizes = {id(s): sum(leaf_bytes(program, bound, k) for k in s.leaves) for s in free}
    for space in sorted(free, key=lambda s: (-sizes[id(s)], program.inputs[s.tables[0]].path)):
        if excess <= 0:
            break
        excess -= sizes[id(space)]
        paths += [program.inputs[k].path for k in space.tables]
    return tuple(paths)
