"""`plan`: a step's plan with predicted times of its parts, and the work of each device.

A plan with tables on hosts has shape buckets that no batch exceeds. The runtime makes smaller ones for what batches
need, and compiles again when a batch needs more; `once_per_row_of` says what these will compute for distinct rows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.analysis.work import Work, count_work
from autopar.compile import follow
from autopar.cost.exchange import DenseLoad, count_exchanges, method_terms, step_parts, with_bounds
from autopar.cost.rates import (
    NO_HOST_TIME,
    NO_TIME,
    HostRates,
    Rates,
    bound_rates,
    planned_host_rates,
    planned_rates,
    planned_stage_rates,
)
from autopar.cost.simulate import StepTime, TableLoad, Workload, crossing, simulate_step
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import RowGrowth, Sizes, Term, bucket_size
from autopar.ir.local import OncePerRow
from autopar.ir.plan import Plan, TablePlan
from autopar.ir.program import Program
from autopar.ir.rowspace import RowSpace
from autopar.ir.strategy import HOSTED, METHODS, Method, Strategy, asks_for_hosts, is_on, without_hosts
from autopar.jax_types import Leaf, Pytree
from autopar.measure.alpha import Alpha, alpha_of, example_ids, growth_of, most
from autopar.measure.cluster import require_cluster
from autopar.measure.figures import NOWHERE, Machine
from autopar.passes.analyze_batch import analyze_batch
from autopar.passes.choosing.capacity import device_ids
from autopar.passes.place_border import Moved
from autopar.run.object_step import AnyStep, unwrapped
from autopar.run.planned_step import PlannedStep
from autopar.run.step import ParallelStep

if TYPE_CHECKING:  # whose own steps are planned here
    from autopar.planning.alpha import Alphas


def plan(
    step: AnyStep,
    *args: Pytree,
    cluster: ClusterSpec | None = None,
    alphas: Alphas | None = None,
    **kwargs: Pytree,
) -> Plan:
    """Returns the plan of a step, as plain data.

    Args:
      step, *args, cluster, **kwargs: As for `explain`.
      alphas: The result of `measure_alpha`. It gives each table's growth, and its alpha if the batch is given as
        shapes. Without it growth is measured between the devices' parts of the one batch.

    Raises:
      ArgumentsError: no arguments, `step` is no step of `parallelize`, or `alphas` doesn't have a table.
    """
    pure, arrays, named = unwrapped(step, args, kwargs, "plan")
    planned = (pure if cluster is None else elsewhere(pure, cluster)).planned_for(*arrays, **named)
    return plan_of(planned, step.name, pure.leaves(arrays, named), cluster, alphas)


def elsewhere(step: ParallelStep, cluster: ClusterSpec) -> ParallelStep:
    """Returns a copy of the step for the cluster's devices, by its rates. It can be planned, but not run. Tables that
    the strategy puts on hosts are there, with a rank for each device."""
    require_cluster(cluster)
    if step.clients is not None:
        raise ArgumentsError(
            f"{step.name} trains replicas by sync=, which are planned for the processes here alone: leave cluster= out"
        )
    memory = int(cluster.device.memory_bytes)
    rates, stages = functools.partial(planned_rates, cluster), functools.partial(planned_stage_rates, cluster)
    strategy, tensor = step.options.strategy, step.options.tensor
    if cluster.count % tensor:
        raise ArgumentsError(
            f"{step.name} divides products over {tensor} devices, and {cluster} has {cluster.count}: give a multiple"
        )
    count, machine = cluster.count // tensor, Machine(rates, rates, lambda: memory, stages)
    there = on_devices(step, count, machine, strategy, hosts=asks_for_hosts(strategy)).planner
    # `Options.accelerators` is of the devices here, and rules for CPUs aren't those for a GPU.
    options = replace(there.options, accelerators=not cluster.devices_are_hosts)
    there = replace(there, options=options)
    planner, in_stages = step.planner.way.on(there, count), step.planner.in_stages
    if in_stages is not None:
        planner = replace(planner, in_stages=lambda: in_stages().way.on(there, count))
    return ParallelStep(planner)


def on_devices(
    step: ParallelStep,
    count: int,
    machine: Machine = NOWHERE,
    strategy: Strategy | None = None,
    *,
    hosts: bool = False,
) -> ParallelStep:
    """Returns a copy of the step for `count` devices, by default without figures of them, and with the step's own
    strategy except for hosts."""
    strategy = without_hosts(step.options.strategy) if strategy is None else strategy
    options = replace(step.options, devices=count, hosts=hosts, strategy=strategy, may_leave=False)
    options = replace(options, rank_devices=1)
    old = step.planner
    written = old.per_device and replace(old.per_device, count=count)
    planner = replace(old, options=options, machine=machine, devices=None, per_device=written, in_stages=None)
    return ParallelStep(planner)


def plan_of(
    planned: PlannedStep,
    name: str,
    leaves: Sequence[Leaf] | None,
    cluster: ClusterSpec | None = None,
    alphas: Alphas | None = None,
) -> Plan:
    """Returns the plan of a planned step; `leaves` are flat arguments to measure alpha by."""
    program, made = planned.compiled.analysed, planned.compiled.plan
    decided = {t.path: t for t in made.tables}
    # Only clusters have figures of hosts, and measuring the devices here doesn't give them.
    measure = planned.machine.step_rates if made.devices > 1 and not (made.on_hosts and cluster is None) else None
    rates = None if measure is None else measure()
    least = NO_TIME if rates is None else rates.bound if cluster is None else bound_rates(cluster)
    hosts = NO_HOST_TIME if cluster is None else planned_host_rates(cluster)
    counts, tables = count_exchanges(_exchanged(made)), list[TablePlan]()
    unmoved = () if planned.options.optimizes("border") else movable(planned)
    for space in program.facts.spaces:
        for table in space.tables:
            path = program.inputs[table].path
            seen = None if alphas is None or not space.accesses else alphas.table(path).growth
            alpha, growth = _touched(program, space, leaves, made.devices, seen)
            would_move = tuple(str(each) for each in unmoved if path in each.tables)
            changed = replace(decided[path], alpha=alpha, growth=growth, unmoved=would_move)
            if cluster is not None and cluster.machines > 1:
                changed = _by_leaders(planned, changed, cluster.devices)
            terms = _earlier_terms(planned, changed)
            if rates is not None:
                terms = with_bounds(*(_terms(changed, r, h, counts) for r, h in ((rates, hosts), (least, hosts.bound))))
            tables.append(replace(changed, terms=terms))
    alone = cluster if made.devices == 1 and made.pipeline is None else None
    work = _work(planned, leaves, follows_batch=alone is not None)
    changed = replace(made, step=name, cluster=cluster, tables=tuple(tables), work=work)
    if rates is None:
        return changed if alone is None else replace(changed, parts=alone_time(changed, alone).parts)
    parts = with_bounds(_parts(changed, rates, hosts), _parts(changed, least, hosts.bound))
    if changed.tensor is not None:
        taken = changed.tensor.taken
        sums = tuple(Term(f"sums of {g.weights[0]} and its pair", g.sent_s, g.sent) for g in taken)
        parts = {**parts, "divided products": sums}
    return replace(changed, parts=parts)


def movable(planned: PlannedStep) -> Sequence[Moved]:
    """Lists what "border" moves to the owners of rows, or would move where `optimize=` leaves it out."""
    way = planned.way.by(replace(planned.options, optimize="all"))
    moved = way.bordered(planned.compiled.analysed, planned.compiled.bound)[1]
    return [each for each in moved if isinstance(each, Moved)]


def _by_leaders(planned: PlannedStep, table: TablePlan, ranks: int) -> TablePlan:
    """Returns a table on hosts with the share of rows that cross machines of `ranks` ranks, if they ask together."""
    if table.where != "hosts" or table.sizes is None or table.growth is None or not planned.options.optimizes("local"):
        return table
    share = crossing(table.growth.rows, ranks)
    return replace(table, sizes=replace(table.sizes, crossing=share))


def _work(planned: PlannedStep, leaves: Sequence[Leaf] | None, *, follows_batch: bool) -> Work:
    """Counts what a step computes. For devices' own programs that includes their sums, but not those of tables that are
    trained whole (`dense_load`). `follows_batch`: on one device, too."""
    program, facts = planned.compiled.analysed, planned.compiled.program.local
    if follows_batch and not program.batch:
        program, _ = analyze_batch(program, devices=1, batch_axis=planned.options.batch_axis, always=True)
    work = count_work(program)
    once = once_per_row_of(planned, leaves)
    if once is not None:
        work = replace(work, examples=work.examples * once.share, moved_bytes=work.moved_bytes * once.share)
    if facts is None:
        return work
    sums, tables = Counter[int](), Counter(size for size, _ in _trained_whole(planned.compiled.plan))
    for each in facts.reductions:
        size = int(getattr(each.type, "nbytes", 0))
        if tables[size]:
            tables[size] -= 1
        else:
            sums[each.nbytes] += 1
    return replace(work, sums=tuple(sorted(sums.items())))


def _trained_whole(decided: Plan) -> list[tuple[int, TablePlan]]:
    return [(t.nbytes, t) for t in decided.families if t.sizes is None and t.where == "devices"]


def _parts(decided: Plan, rates: Rates, hosts: HostRates) -> Mapping[str, tuple[Term, ...]]:
    return step_parts(rates, dense_load(decided), _exchanged(decided), decided.devices, hosts)


def _exchanged(decided: Plan) -> list[tuple[str, Sizes]]:
    return [(t.taken, t.sizes) for t in decided.families if t.sizes is not None]


def dense_load(decided: Plan) -> DenseLoad:
    """Returns each device's work on all leaves whose rows aren't exchanged by themselves."""
    sizes = _trained_whole(decided)
    divided = {} if decided.tensor is None else dict.fromkeys(decided.tensor.axes, decided.tensor.devices)
    leaves = [leaf.nbytes // (decided.devices if leaf.sharded else divided.get(leaf.path, 1)) for leaf in decided.dense]
    leaves += [size for size, table in sizes for _ in range(1 + len(table.slots))]
    sums, work = (*decided.work.sums, *((size, 1) for size, _ in sizes)), decided.work
    moved = work.moved_bytes / decided.devices
    flops = work.on(decided.devices)
    if decided.tensor is not None:
        flops -= decided.tensor.saved_flops / decided.devices
    return DenseLoad(flops, sums, tuple(leaves), moved, by_mpi=decided.reduction_backend == "mpi")


def _touched(
    program: Program, space: RowSpace, leaves: Sequence[Leaf] | None, devices: int, seen: RowGrowth | None
) -> tuple[Alpha | None, RowGrowth | None]:
    """Returns the rows of a family that a step looks up: the batch's if it is known, else those expected from `seen`,
    else an upper bound."""
    if not space.accesses:
        return None, None
    ids, extent = program.ids[space.family], space.extent
    each, flat = ids.count_on(devices), example_ids(program, ids, leaves)
    seen = None if seen is None else seen.with_ids(each)
    if flat is not None:
        requested = device_ids(flat, ids.batched, devices, extent)
        growth = seen or (growth_of(requested, extent, each) if any(ids.batched) else None)
        return alpha_of(requested, extent, ids.count), growth
    if seen is not None:
        return Alpha(round(seen.rows(devices)), extent, ids.count, True, seen.rows(1)), seen
    return most(ids, extent, devices), None


def _terms(table: TablePlan, rates: Rates, hosts: HostRates, counts: Counter[str]) -> Mapping[str, tuple[Term, ...]]:
    """Returns a table's terms by method. `counts`: exchanges of the plan by method, its own among them."""
    others = counts - Counter([table.taken])
    return {} if table.sizes is None else method_terms(table.sizes, table.where, rates, hosts, others)


def _earlier_terms(planned: PlannedStep, table: TablePlan) -> Mapping[str, tuple[Term, ...]]:
    """Returns the terms of the plan that the user gave, if its table has the same sizes and is on devices."""
    if table.sizes is None or table.where == "hosts" or planned.options.plan is None:
        return {}
    earlier = planned.options.plan.table(table.path)
    return earlier.terms if earlier.sizes == table.sizes else {}


def once_per_row_of(planned: PlannedStep, leaves: Sequence[Leaf] | None) -> OncePerRow | None:
    """Returns what a rank will compute once per distinct row; None for nothing, or if `leaves` don't have what ids
    depend on."""
    run, stacked = planned.compiled.as_run, planned.compiled.stacked
    program, bound = run.analysed, run.bound
    if stacked is not None:
        leaves = leaves and [leaves[of] if isinstance(of, int) else None for of in stacked.inputs]
    sizes: dict[int, tuple[int, int]] = {}
    for space in program.facts.spaces:
        family = bound.family(space.family)
        if family is None or not family.on_hosts or family.bounds.requested is None or not space.accesses:
            continue
        ids = program.ids[space.family]
        flat = example_ids(program, ids, leaves)
        if flat is None:
            return None
        need = max(rows.size for rows in device_ids(flat, ids.batched, bound.devices, space.extent))
        sizes[space.family] = (
            family.bounds.rows // bound.devices,
            bucket_size(need, family.bounds.requested // bound.devices),
        )
    if not sizes:
        return None
    return follow(program, bound.with_sizes(sizes), planned.way).once_per_row


def named_methods(methods: Mapping[str, Method | str] | Method | str, work: Workload) -> Mapping[str, str] | str:
    """Returns methods by their names in simulations, where the strategy ("ps", "hosts") is one name."""

    def name(method: Method | str) -> str:
        method_ = HOSTED if method == ("ps", "hosts") else method
        if method_ not in ("auto", *METHODS, HOSTED):
            known = ", ".join(map(repr, ("auto", *METHODS, HOSTED)))
            raise ArgumentsError(f"methods: there is no {method!r}; there are {known}")
        return method_

    if not isinstance(methods, Mapping):
        return name(methods)
    paths = [t.path for t in work.tables]
    for path in methods:
        if path not in paths:
            raise ArgumentsError(f"methods: no table {path!r} goes by its rows; there are {', '.join(paths) or 'none'}")
    return {path: name(method) for path, method in methods.items()}


def alone_time(plan: Plan, cluster: ClusterSpec) -> StepTime:
    """Predicts a step of a plan for one device, on one device of a cluster."""
    methods = {t.path: t.taken for t in plan.families if t.lifted}
    return simulate_step(client_workload(plan), cluster.of(1, 1), methods=methods)


def workload(plan: Plan) -> Workload:
    """Returns each device's work in a step of a plan; raises ArgumentsError if the plan is for one device."""
    if plan.devices == 1:
        raise ArgumentsError(
            f"the plan of {plan.step} is of one device, which says nothing of what several share: "
            "plan(step, state, batch, cluster=...) for two devices at least. A step of one device alone (devices=1) is "
            "predicted of a plan for one: plan(..., cluster=cluster.of(1, 1))"
        )
    tables = tuple(table_load(table) for table in plan.families if table.sizes is not None)
    return Workload(dense_load(plan), tables, by_leaders=is_on(plan.optimize, "local"))


def table_load(table: TablePlan, ids: int | None = None) -> TableLoad:
    """Returns each device's requests to a table of a plan for several devices. `ids`: number that a device looks up,
    distributed as the plan's; by default as many as there."""
    sizes = table.sizes
    assert sizes is not None, "a plan of several devices has the sizes of its tables"
    scaled = sizes if ids is None else sizes.with_ids(ids)
    growth = table.growth if table.growth is None or ids is None else table.growth.with_ids(ids)

    def rows(n: int) -> float:
        return growth.rows(n) if growth is not None else min(scaled.extent, n * scaled.ids)

    return TableLoad(table.path, scaled, rows, hosted=table.where == "hosts")


def client_workload(plan: Plan) -> Workload:
    """Returns the work of each device of a client in its own step. On one device all ids of a table count as distinct
    if it isn't known how many are."""
    if plan.devices > 1:
        return workload(plan)
    lifted = [t for t in plan.families if t.lifted]
    rest = tuple(t for t in plan.tables if not t.lifted)
    return Workload(dense_load(replace(plan, tables=rest)), tuple(map(_alone, lifted)))


def _alone(table: TablePlan) -> TableLoad:
    extent, ids = table.shape[table.axis], table.ids
    row = table.nbytes // extent
    rows = ids if table.alpha is None else table.alpha.rows
    sizes = Sizes.alone(extent, row, table.family_bytes or row * (1 + len(table.slots)), ids)
    return TableLoad(table.path, sizes, lambda n: min(extent, n * rows), hosted=table.where == "hosts")


def untouched_bytes(table: TablePlan, minibatches: int) -> float:
    """Returns the bytes of rows that `minibatches` minibatches leave alone if all ids differ."""
    return max(0.0, 1 - minibatches * table.ids / table.shape[table.axis]) * table.nbytes


def goes_by_rows(table: TablePlan) -> bool:
    """Says whether steps only move rows of a table that they look up."""
    return table.lifted and not table.log_steps
