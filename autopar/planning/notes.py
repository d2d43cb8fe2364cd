"""Notes of `explain` on a step as a whole: memory, predictions, stages, clients, servers, values that are gathered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from rich.console import RenderableType

from autopar.cost.exchange import ID_BYTES, step_seconds
from autopar.cost.memory import Shortage, find_shortage, hosted_bytes, state_budget
from autopar.cost.stage_time import by_the_equations, pipeline_memory, pipeline_seconds, simulate_pipeline, stage_times
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import format_bytes
from autopar.ir.plan import PipelinePlan, Plan, ServedPlan, SyncPlan, TensorGroupPlan
from autopar.ir.program import Equation
from autopar.ir.schedule import Task
from autopar.ir.topology import Everyone
from autopar.jax_types import Leaf
from autopar.launch.launcher import HUGE_PAGES, TUNABLES
from autopar.measure.alpha import ids_by_family
from autopar.passes.choosing.capacity import bounds_layout, device_ids, owner_loads
from autopar.passes.choosing.families import after_the_sum
from autopar.passes.choosing.together import owner_work
from autopar.passes.stack_tables import tables_apart
from autopar.planning.plan import once_per_row_of
from autopar.planning.predictions import Prediction
from autopar.planning.switch_notes import prefetch_note
from autopar.planning.text import LIST, Column, Columns, fold_paths
from autopar.run.planned_step import PlannedStep
from autopar.sync import stable_alpha, stable_slope

#: Most lines, operations or tables that are listed.
_SHOWN = 8
#: Most names in a list of weights.
_NAMES = 4
#: Bytes of rows that a device looks up in a step from which on the pages of temporaries are worth a line.
_LOOKED_UP_BYTES = 2 << 20


def emission_notes(planned: PlannedStep, verbose: bool) -> tuple[str, ...]:
    """Returns lines on values of all examples that each device has whole; without `verbose`, on the largest ones."""
    local = planned.compiled.program.local
    if local is None or planned.compiled.plan.on_hosts:
        return ()
    found = [g for g in local.gathered if g.op]
    if not found:
        return ()
    shown = [
        f"  {format_bytes(g.nbytes)}{' a turn' * g.nested} for {g.op} ({g.source or 'no line'})"
        for g in sorted(found, key=lambda g: -g.nbytes)[: None if verbose else _SHOWN]
    ]
    more = [f"  {len(found) - len(shown)} more (verbose=True lists them)"] if len(found) > len(shown) else []
    return "Values of all examples that every device has whole:", *shown, *more


def small_pages_note(planned: PlannedStep) -> tuple[str, ...]:
    """Returns a line where CPU devices of one process look up many rows, and glibc doesn't ask for huge pages."""
    plan, here = planned.compiled.plan, jax.local_devices()
    looked_up = sum(t.sizes.ids * t.sizes.row_bytes for t in plan.families if t.lifted and t.sizes is not None)
    if here[0].platform != "cpu" or len(here) == 1 or plan.devices == 1 or looked_up < _LOOKED_UP_BYTES:
        return ()
    if not sys.platform.startswith("linux") or TUNABLES in os.environ:
        return ()
    return (
        f"XLA takes new memory in each step, in small pages, for what {len(here)} CPU devices look up "
        f"({format_bytes(looked_up)} on each): start Python with {TUNABLES}={HUGE_PAGES}, as python -m autopar launch "
        "--devices does. Of a DLRM's step it saved two fifths.",
    )


def owner_balance_notes(plan: Plan) -> tuple[str, ...]:
    """Returns a line for each rank, or device, with whole tables: their names and bytes, and its share of the work on
    all."""
    whole = [(t.owner, t) for t in plan.tables if t.owner is not None and t.sizes is not None]
    total, one = sum(owner_work(t) for _, t in whole) or 1, "rank" if plan.on_hosts else "device"
    lines = []
    for rank in sorted({owner for owner, _ in whole}):
        own = [t for owner, t in whole if owner == rank]
        size = format_bytes(sum(t.sizes.extent * t.sizes.family_bytes for t in own if t.sizes is not None))
        names = ", ".join(t.path for t in own[:_NAMES]) + (f" and {len(own) - _NAMES} more" if own[_NAMES:] else "")
        lines.append(f"  {one} {rank}: {names}; {size}, {sum(map(owner_work, own)) / total:.0%} of their rows a step")
    return (f"Tables that one {one} has whole:", *lines) if lines else ()


def hot_rows_notes(plan: Plan, *, accelerators: bool) -> tuple[str, ...]:
    """Says what copies of frequent rows could save: on every rank the ids of these rows, on one accelerator the way of
    some rows from the host and back."""
    hosted = [t for t in plan.tables if t.where == "hosts" and not (t.pooled or t.pulled)]
    if hosted and plan.devices == 1 and accelerators:
        moved = sum(2 * min(t.ids, t.shape[t.axis]) * (t.nbytes // t.shape[t.axis]) for t in hosted)
        return (
            f"All rows of a batch travel to the accelerator and back, at most {format_bytes(moved)} a step and as much "
            "for each slot: to keep frequent ones there would save microseconds (docs/optimisations.md, Hot rows).",
        )
    sizes = [t.sizes for t in hosted if t.sizes is not None]
    if not sizes or plan.devices == 1:
        return ()
    share = max(ID_BYTES / (ID_BYTES + s.row_bytes + s.sent_gradient) for s in sizes)
    return (
        "Rows that all ranks ask for stay with their owners: copies on every rank would take as many bytes to be kept "
        f"alike, and save their ids, less than {share:.1%} of what is sent.",
    )


def formula_notes(planned: PlannedStep) -> tuple[str, ...]:
    """Names tables for which the paper's formulas chose a method and this machine's rates another one.

    The rates are measured for it, so nothing is said for several processes, which would have to measure together.
    """
    machine, devices = planned.machine, planned.devices
    if planned.options.choose != "formulas" or machine.rates is None or devices is None or devices.processes.several:
        return ()
    lines = []
    for table in planned.compiled.plan.tables:
        if table.sizes is not None and table.where == "devices":
            seconds = step_seconds(machine.rates(), table.sizes)
            best = min(seconds, key=lambda method: seconds[method])
            if seconds[best] < seconds[table.method]:
                times = f"{1e3 * seconds[best]:.2f} ms for {1e3 * seconds[table.method]:.2f}"
                lines.append(f"  {table.path}: {best} in place of {table.method}, {times}")
    return ("By this machine's rates other methods than table 3's are faster:", *lines) if lines else ()


def stack_notes(planned: PlannedStep) -> tuple[str, ...]:
    """Returns lines on tables that are exchanged and updated as one, and why others aren't."""
    stacked, program = planned.compiled.stacked, planned.compiled.analysed

    def named(tables: Sequence[int]) -> str:
        names = list(fold_paths(dict.fromkeys((program.inputs[k].path for k in tables), 0), lines=1))
        return ", ".join([*names[:_SHOWN], *[f"{len(names) - _SHOWN} more"] * (len(names) > _SHOWN)])

    tables = () if stacked is None else {k for k, _ in stacked.program.tables}
    stacks = () if stacked is None else (of for k, of in enumerate(stacked.inputs) if k in tables)
    members = [of.inputs for of in stacks if not isinstance(of, int)]
    apart = tables_apart(program, planned.compiled.bound, has_stacks=stacked is not None)
    return (
        *(f"{len(of)} tables are exchanged and updated as one: {named(of)}" for of in members),
        *(
            f"{len(of)} table{'s have' if len(of) > 1 else ' has'} exchanges of {'their' if len(of) > 1 else 'its'} "
            f"own: {named(of)} ({why})"
            for why, of in apart.items()
        ),
    )


def predicted_note(step: Prediction) -> str:
    """Returns a step's predicted time and its lower bound, by part."""

    def by_part(seconds: Mapping[str, float | None]) -> str:
        return ", ".join(f"{name} {1e3 * each:.2f}" for name, each in seconds.items() if each)

    predicted = by_part({part.name: part.seconds for part in step.parts})
    text = f"A step is predicted to take {1e3 * (step.seconds or 0.0):.2f} ms: {predicted}."
    if step.bound_s is None:
        return text
    least = by_part({part.name: part.bound_s for part in step.parts})
    return f"{text} At the full rate of devices, memory and links it takes {1e3 * step.bound_s:.2f} ms: {least}."


def tensor_notes(plan: Plan) -> tuple[str, ...]:
    """Returns lines on products that are, or could be, divided over a tensor axis, with costs and reasons."""
    if plan.tensor is None:
        return ()
    alike: dict[str, list[TensorGroupPlan]] = {}
    for group in plan.tensor.groups:
        counted = ((group.reduces, "AllReduce"), (group.gathers, "AllGather"))
        counts = " and ".join(f"{n} {what}{'s' * (n > 1)}" for n, what in counted if n) or "nothing"
        sent = f"{counts}, {format_bytes(group.sent)} from each device in a step"
        alike.setdefault(f"{'divided' if group.taken else 'whole'}; {sent}; {group.reason}", []).append(group)
    lines = []
    for text, groups in alike.items():
        axes = {path: group.axes[path] for group in groups for path in group.weights}
        weights = ", ".join(f"{name} (axis {axes[paths[0]]})" for name, paths in fold_paths(axes, lines=1).items())
        lines.append(f"  {weights}: {f'{len(groups)} groups, each ' * (len(groups) > 1)}{text}")
    if not lines:
        return ("No product can be divided over the devices of the tensor axis.",)
    return f"Products that {plan.tensor.devices} devices can divide:", *lines


def memory_notes(planned: PlannedStep, cluster: ClusterSpec | None) -> tuple[str, ...]:
    """Returns lines on the machines that a plan is made for, and on how the state fits their memory."""
    program, plan, options = planned.compiled.analysed, planned.compiled.bound, planned.options
    memory = planned.machine.memory_bytes
    if plan.plan.pipeline is not None:  # its own notes say what each device holds
        return () if cluster is None else (f"Planned for {cluster}; times are predicted from its figures.",)
    shortage = None if memory is None else find_shortage(program, plan, options.strategy, memory)
    if memory is None or (cluster is None and shortage is None):
        return ()
    state = f"The state takes {format_bytes(plan.plan.state_bytes)} of {format_bytes(memory)} on each device"
    if shortage is not None:
        state += f": {format_bytes(shortage.missing)} more than fit beside the model; {_remedy(shortage, cluster)}"
    if cluster is None:
        return (f"{state}.",)
    lines = [f"Planned for {cluster}; times are predicted from its figures. {state}."]
    if plan.on_hosts:
        needed, available = hosted_bytes(program, plan) // cluster.machines, state_budget(cluster.host_bytes)
        lines.append(f"Tables on hosts take {format_bytes(needed)} of {format_bytes(cluster.host_bytes)} on each host")
        lines[-1] += f": {format_bytes(needed - available)} more than fit." if needed > available else "."
    return tuple(lines)


def _remedy(shortage: Shortage, cluster: ClusterSpec | None) -> str:
    if shortage.devices is None:
        return (
            "more devices don't help, for too much of it is on each of them: give parts of it to the devices, by "
            "pipeline=autopar.Pipeline('auto'), or by strategy='tensor'"
        )
    if cluster is None:
        return f"{shortage.devices} devices are enough"
    return f"{shortage.machines(cluster.devices)} machines of {cluster.devices} are enough"


def hosted_text(planned: PlannedStep, leaves: Sequence[Leaf] | None) -> str:
    """Returns lines on what ranks reduce, and compute once for each distinct row."""
    plan = planned.compiled.plan
    why = plan.reduction_reason
    text = {
        "mpi": f"Dense gradients are reduced by MPI, between programs: {why}",
        "psum": f"Dense gradients are reduced by psum, within the programs of all ranks' devices: {why}",
        "": f"Nothing is reduced: {why}",
    }[plan.reduction_backend]
    once = once_per_row_of(planned, leaves)
    if once is not None:
        text += f".\nWhat depends on a row alone is computed once for each distinct row of a rank: {once}"
    return f"{text}.{_owners(planned, leaves)}{prefetch_note(planned)}\nStages: {', '.join(plan.stages)}."


def _owners(planned: PlannedStep, leaves: Sequence[Leaf] | None) -> str:
    """Returns a line on the numbers of rows that ranks own, and are asked for in the example batch."""
    program, bound = planned.compiled.analysed, planned.compiled.bound
    hosted = {f.family: bounds_layout(f.bounds) for f in bound.families if f.on_hosts and not f.table.pulled}
    if bound.devices == 1 or not hosted:
        return ""
    spaces = [space for space in program.facts.spaces if space.family in hosted]
    rows = np.sum([hosted[space.family].rows_on(np.arange(bound.devices)) for space in spaces], 0)
    text = f"\nOwners: each of {bound.devices} ranks has {_between(rows)} rows of tables"
    ids = {space.family: program.ids[space.family] for space in spaces}
    known = ids_by_family(program, ids, leaves)
    if len(known) < len(ids):
        return f"{text}."
    requested = {s.family: device_ids(known[s.family], ids[s.family].batched, bound.devices, s.extent) for s in spaces}
    loads = np.sum([owner_loads(requested[family], layout) for family, layout in hosted.items()], 0)
    busiest = f"the busiest one {loads.max() / max(1.0, loads.mean()):.2f} times as many as the average"
    return f"{text}, and is asked for {_between(loads)} in this batch: {busiest}."


def _between(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


def replica_notes(plan: Plan) -> Iterator[str]:
    """Yields lines on clients with replicas of their own."""
    sync = plan.sync
    if sync is None:
        return
    is_another = sync.clients > 1 or sync.outer or sync.servers
    own = "another function than the step on one device" if is_another else "with one client, the step itself"
    minibatches = " x ".join(str(n) for n in (sync.clients, sync.every) if n > 1) or "1"
    examples = f" of {sync.examples} examples each" if sync.examples else ""
    of_what = f"; one update of what all have is made of {minibatches} minibatches{examples}" * (sync.partners == "all")
    yield (
        f"Replicas: {sync.clients} client{'s' * (sync.clients > 1)}, each with weights of its own: {sync.name}, {own}. "
        f"A call takes a client's own minibatch{of_what}."
    )
    weights = f"{sum(map(len, sync.fragments))} weights, {format_bytes(sum(sync.fragment_bytes))}"
    if sync.servers:
        yield (
            f"{weights}: every {sync.every} steps of a worker they and a centre on {sync.servers} "
            f"server{'s' * (sync.servers > 1)} are pulled towards each other, which nobody else waits for. A worker "
            f"sends {format_bytes(sync.sent_bytes)} a step, and receives as much."
        )
        sizes = ", ".join(map(format_bytes, sync.server_bytes))
        yield f"Servers keep {sizes} of the centre{_ranks(sync.server_ranks)}."
        yield from _table_notes(plan, sync)
        known = "it isn't known above which one weights may diverge: give Elastic(curvature=)"
        if sync.slope is not None:
            known = f"at eta h = {sync.slope:.3g} weights may diverge above {stable_alpha(1.0, sync.slope):.3g}"
        yield f"alpha is {sync.alpha:.3g}; {known}."
    elif not isinstance(topology := sync.topology(sync.clients), Everyone):
        beside = "beside each step, with the weights that it begins with," if sync.delay else "behind each step"
        averages, waits = topology.averages
        waits = "nobody waits for another one's step" if sync.delay else waits
        which = "either has changed since their last exchange" if sync.delay else "were ever touched"
        rows = f" Of {', '.join(sync.by_rows)} only rows are sent that {which}." * bool(sync.by_rows)
        yield (
            f"{weights}: {beside} they and {averages}; {waits}. A client sends at most "
            f"{format_bytes(sync.sent_bytes)} a step, and receives as much.{rows}"
        )
        yield from _table_notes(plan, sync)
        yield _stability(sync)
    else:
        yield from _mean_notes(sync, weights)
    yield from _first_three(sync.own, "Each client keeps {} of its own.")


def _mean_notes(sync: SyncPlan, weights: str) -> Iterator[str]:
    """Yields lines on means over all clients; `weights` describes what is averaged."""
    parts, largest = len(sync.fragments), format_bytes(max(sync.fragment_bytes))
    move = "an outer optimizer moves them by the mean of what changed" if sync.outer else "their mean is taken"
    when = "in every step" if sync.every == 1 else f"every {sync.every} steps"
    how = f", in {parts} parts of at most {largest}, one every {sync.every // parts} steps" * (parts > 1)
    late = f", merged {sync.delay} step{'s' * (sync.delay > 1)} later" * (sync.delay > 0)
    rows = f" Of {', '.join(sync.by_rows)} only rows are sent that were touched since." * bool(sync.by_rows)
    most = "at most " * bool(sync.by_rows)
    ring = f": a ring AllReduce of {sync.clients} clients, over {sync.every} steps" * (sync.every > 1)
    yield (
        f"{weights}: {when} {move}{how}{late}. A client sends {most}{format_bytes(sync.sent_bytes)} a step{ring}.{rows}"
    )
    if sync.averages_gradients:
        yield "The update is linear in gradients and slots: this is what averaging gradients is, data parallelism."
    elif sync.nonlinear:
        yield (
            f"This isn't what averaging gradients is: {sync.nonlinear} of the update isn't linear in them. Data "
            "parallelism averages ahead of it (leave sync= out)."
        )
    if sync.delay >= sync.every:
        yield _stability(sync)


def _table_notes(plan: Plan, sync: SyncPlan) -> Iterator[str]:
    whole = {p for fragment in sync.fragments for p in fragment} - {*sync.by_rows}
    tables = {table.path: table.nbytes for table in plan.tables if table.path in whole}
    if tables:
        yield f"Tables are exchanged whole, {format_bytes(sum(tables.values()))}: {', '.join(tables)}."


def _stability(sync: SyncPlan) -> str:
    way = sync.way.partition("(")[0]
    known = f"it isn't known here: give {way}(curvature=)" if sync.slope is None else f"it is {sync.slope:.3g} here"
    most = stable_slope(sync.delay)
    return f"Clients come together where eta h, learning rate times curvature, is below {most:.3g}; {known}."


def _first_three(paths: Sequence[str], text: str) -> Iterator[str]:
    if paths:
        yield text.format(", ".join(paths[:3]) + f" and {len(paths) - 3} others" * (len(paths) > 3))


def server_notes(plan: Plan) -> Iterator[str]:
    """Yields lines on a state that servers keep."""
    served = plan.served
    if served is None:
        return
    others, count = served.clients - 1, len(served.servers)
    examples = f" of {served.examples} examples" if served.examples else ""
    own = "another function than the step on one device" if others else "with one worker, the step itself"
    late = ""
    if served.staleness is not None:
        late = (
            f" A worker begins its step c once all workers' pushes of steps up to c-{served.staleness + 1} are applied."
        )
    yield (
        f"Servers: {served.clients} worker{'s train' if others else ' trains'} one state, which {count} "
        f"server{'s' * (count > 1)} keep{'s' * (count == 1)}: {served.name}, {own}. A call takes a worker's own "
        f"minibatch{examples}, and its push is applied as it comes: to weights that have had the pushes of {others} "
        f"others since it pulled them, where all are equally fast.{late}"
    )
    sizes = ", ".join(format_bytes(server.leaf_bytes) for server in served.servers)
    rows = f" Of {', '.join(served.by_rows)} only the rows of a minibatch travel." * bool(served.by_rows)
    yield (
        f"Servers keep {sizes}{_ranks(served.ranks)}. A worker exchanges {format_bytes(served.sent_bytes)} a step with "
        f"them.{rows}"
    )
    if count > 1 and served.by_rows:
        yield f"Tables: {'; '.join(_homes(served, path) for path in served.by_rows)}."
    yield from _first_three(served.clocks, "{}: counted by each server, of all pushes, and by each worker, of its own.")


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"; {'they are ranks' if len(ranks) > 1 else 'it is rank'} {', '.join(map(str, ranks))}, which only serve"


def _homes(served: ServedPlan, path: str) -> str:
    homes = [n for n, server in enumerate(served.servers) if server.part_of(path)]
    if len(homes) == 1:
        return f"{path} is on server {homes[0]}, whole"
    which = "all servers" if len(homes) == len(served.servers) else f"servers {', '.join(map(str, homes))}"
    return f"{path} is on {which}, each of which keeps some of its columns"


def stage_lines(plan: PipelinePlan) -> Iterator[RenderableType]:
    """Yields a table with a row for each stage, the stages' weights, and notes on the schedule."""
    stages = plan.stages
    kinds = [k for k in ("F", "B", "W") if any(k in stage.seconds for stage in stages)]
    times = {f"{kind} ms": [stage.seconds.get(kind, 0.0) for stage in stages] for kind in kinds}
    times |= {"update ms": [stage.update_s for stage in stages]} if kinds else {}
    sizes = {
        "sent ahead": [stage.ahead_bytes for stage in stages],
        "sent back": [stage.back_bytes for stage in stages],
        "state": [stage.state_bytes for stage in stages],
        "activations": [stage.activation_bytes for stage in stages],
    }
    sizes |= {"exchanged": [stage.exchanged_bytes for stage in stages]} if plan.tensor > 1 else {}
    yield from (
        "",
        Columns(
            [
                Column("stage", [str(k) for k in range(len(stages))], "right"),
                Column("device", [", ".join(map(str, stage.devices)) for stage in stages], "right", breaks=LIST),
                *(Column(title, [f"{1e3 * s:.2f}" for s in seconds], "right") for title, seconds in times.items()),
                *(Column(title, [format_bytes(size) for size in of], "right") for title, of in sizes.items()),
            ]
        ),
        "",
    )
    for k, weights in enumerate(_weights(plan)):
        yield f"  stage {k}: {', '.join(weights) or 'no weights'}"
    if plan.updates:
        yield from ("", _versions(plan), "")
    yield from stage_notes(plan)


def _versions(plan: PipelinePlan) -> Columns:
    """Returns a table of the updates that each stage's tasks miss without a flush."""
    numbers, calls = range(len(plan.stages)), plan.calls
    columns = {f"{kind} misses": [calls.missed(k)[i] for k in numbers] for i, kind in enumerate("FB")}
    if plan.ahead:
        equations = [by_the_equations(k, len(plan.stages)) for k in numbers]
        for i, kind in enumerate(("F", "B")):
            columns[f"{kind} predicts"] = [s[i] for s in plan.ahead]
            columns[f"by eq. {5 + i}"] = [s[i] for s in equations]
    columns["stashed"] = [calls.stashed(k) for k in numbers]
    shown = {title: of for title, of in columns.items() if title != "stashed" or any(of)}
    return Columns(
        [
            Column("stage", [str(k) for k in numbers], "right"),
            *(Column(title, [str(n) for n in of], "right") for title, of in shown.items()),
        ]
    )


def _weights(plan: PipelinePlan) -> Sequence[Sequence[str]]:
    """Returns the names of each stage's weights, folded; layers of a stack fold by their rows ("[0:3]")."""
    names: list[list[str]] = [[] for _ in plan.stages]
    owners: dict[str, dict[str, int]] = {}
    for k, stage in enumerate(plan.stages):
        for weight in stage.weights:
            path, bracket, rows = weight.partition("[")
            owners.setdefault(bracket + rows, {})[path] = k
    for rows, owner in owners.items():
        for name, paths in fold_paths(owner, _NAMES * len(set(owner.values()))).items():
            names[owner[paths[0]]].append(name + rows)
    return names


def stage_notes(plan: PipelinePlan) -> Sequence[str]:
    """Returns notes on a pipeline's schedule."""
    held = ", ".join(format_bytes(size) for size in pipeline_memory(plan))
    notes = [
        *(_asynchronous_notes(plan) if plan.updates else [_synchronous_note(plan)]),
        f"Memory of each device for state, gradients and activations: {held}.",
    ]
    if len({tuple(stage.devices) for stage in plan.stages}) > 1:
        notes.append(
            "The state lies on several devices; for other functions under jax.jit: autopar.materialize(state)."
        )
    if plan.tensor > 1:
        notes.append(
            f"Each of them is {plan.tensor} devices that divide products; times and bytes are those of each, and "
            "'exchanged' is what it sends to the others."
        )
    if plan.tied_bytes:
        notes.append(f"Weights of several stages: {format_bytes(plan.tied_bytes)} are sent in a step, gradients back.")
    if plan.candidates:
        notes.append(
            "Chosen of these, as predicted for a step (one stage is data parallelism; more are taken where they are "
            "faster by more than 10%):"
        )
        own = f"{plan.pipeline}, {plan.schedule}, M = {plan.microbatches}{', remat' * plan.remat}"
        times = ((what, pipeline_seconds(plan) if what == own else seconds) for what, seconds in plan.candidates)
        notes += [f"  {1e3 * seconds:.2f} ms: {what}" for what, seconds in times]
    if plan.statistics:
        notes.append(
            "statistics='microbatch': these sums over the batch, which examples depend on, are those of a microbatch, "
            f"which is not what the plain step computes: {', '.join(plan.statistics)}."
        )
    return notes


def _late_notes(plan: PipelinePlan) -> Sequence[str]:
    """Returns a note on updates that wait for a value of all stages, and so come later than their own backward."""
    calls = plan.calls
    late = {k: calls.late(k) for k in range(len(plan.stages)) if calls.late(k)}
    if not late:
        return []
    least, most = min(late.values()), max(late.values())
    calls_later = f"{least} to {most} calls" if least < most else f"{most} call{'s' * (most > 1)}"
    uncounted = ", which s, counted up to stage 0's backward, leaves out: they are staler than it says"
    return [
        f"Updates of stage{'s' * (len(late) > 1)} {', '.join(map(str, late))} need a value of all stages (the factor "
        f"of a clip by the global norm, say), and come {calls_later} later than without it. Their tasks miss as many "
        f"updates more{uncounted * bool(plan.ahead)}. Gradients that are clipped by value, or leaf by leaf, wait "
        "for no other stage."
    ]


def _synchronous_note(plan: PipelinePlan) -> str:
    simulated, seconds, count = simulate_pipeline(plan), pipeline_seconds(plan), plan.microbatches
    time = f"{seconds * 1e3:.2f} ms, " if seconds else ""
    return (
        f"{plan.schedule}, {count} microbatch{'es' * (count > 1)}{', remat' * plan.remat}: {time}of which the "
        f"{plan.devices} devices wait {simulated.bubble:.0%} (bubble). Times and bytes of the table are those of a "
        "microbatch, but for the update."
    )


def _asynchronous_notes(plan: PipelinePlan) -> Sequence[str]:
    """Returns notes on a pipeline without a flush, which is another function by design."""
    seconds, last = pipeline_seconds(plan), plan.calls.last
    time = f" {seconds * 1e3:.2f} ms each once it is full;" if seconds else ""
    times, period = stage_times(plan), plan.devices * simulate_pipeline(plan).period
    tasks = [Task(kind, k, 0) for kind in ("F", "B") for k in range(len(plan.stages))]
    waits = max(0.0, 1 - sum(times.of(task, splits_backward=False) for task in tasks) / period) if period else 0.0
    sees = {
        "async": "A task sees the weights as its stage has them: it misses the updates of so many minibatches ahead.",
        "stash": "A backward sees the weights that its forward saw; both miss the updates of so many minibatches.",
        "spectrain": "Tasks predict the weights that their minibatch will meet behind stage 0's backward: W + s u, of "
        "which u is the last change (SpecTrain, section 3.2); s is counted in the simulated schedule.",
    }[plan.schedule]
    slack = (
        f"{plan.slack} minibatch{'es' * (plan.slack > 1)} more for each border between stages are in flight, to hide "
        "links: as many updates more are missed (slack=0 has one minibatch in flight for each device)."
    )
    return [
        f"{plan.schedule}{', remat' * plan.remat}: minibatches follow one another without a flush,{time} the devices "
        f"wait {waits:.0%}. Times and bytes of the table are those of a minibatch.",
        f"This is another function than the step on one device, by design. {sees}",
        *[slack] * bool(plan.slack),
        *_late_notes(plan),
        f"A call returns the results of the minibatch that came {last} call{'s' * (last != 1)} before, None as long as "
        "there is none: autopar.train_batches(step, state, batches). autopar.drain(state) finishes those on their way.",
    ]


# --- the work of owners between the sum of a gradient and the update ---


def owner_notes(planned: PlannedStep) -> Iterator[str]:
    """Yields lines on the equations that owners of sharded rows compute, and the sums that they exchange."""
    program, bound = planned.compiled.analysed, planned.compiled.bound
    computed: dict[str, list[str]] = {}
    for family in bound.families:
        if bound.devices > 1 and family.method == "ps":
            space = next(s for s in program.facts.spaces if s.family == family.family)
            paths = [program.inputs[k].path for k in space.tables]
            computed.setdefault(_described(*after_the_sum(program, family.family)), []).extend(paths)
    for text, paths in computed.items():
        names = ", ".join(fold_paths(dict.fromkeys(paths, 0), _SHOWN))
        yield f"From the sum of gradients to the update the owners of {names} compute {text}."


def _described(by_row: list[Equation], sums: list[Equation]) -> str:
    ops = list(dict.fromkeys(e.op for e in by_row))
    more = f" and {len(ops) - _SHOWN} more" if len(ops) > _SHOWN else ""
    text = f"{', '.join(ops[:_SHOWN]) or 'nothing'}{more}, each of its own rows"
    if not sums:
        return f"{text}; nothing crosses between them"
    lines = ", ".join(dict.fromkeys(f"{e.op} ({e.where})" for e in sums))
    nbytes = format_bytes(sum(v.type.nbytes for e in sums for v in e.outputs))
    return f"{text}; of {lines} each one's partial sums cross, {nbytes}"
