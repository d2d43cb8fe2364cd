"""`explain`: the plan of a step, and why: `print(autopar.explain(step, state, batch))`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.cost.formulas import table_3
from autopar.cost.model import touched_bytes
from autopar.cost.units import format_bytes
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import DensePlan, Plan
from autopar.ir.rowspace import RowSpace
from autopar.measure.alpha import batch_alpha
from autopar.planning.elsewhere import elsewhere
from autopar.planning.explain_notes import (
    emission_notes,
    hosted_text,
    memory_notes,
    predicted_note,
    replica_notes,
    server_notes,
    tensor_notes,
)
from autopar.planning.explanation import ExplainedLeaf, Explanation
from autopar.planning.plan import plan_of
from autopar.run.entry import Entry
from autopar.run.slow_plans import gathered_bytes, undivided
from autopar.run.wrapped_step import AnyStep, require_step, unwrapped


def explain(
    step: AnyStep, *args: Any, cluster: ClusterSpec | None = None, verbose: bool = False, **kwargs: Any
) -> Explanation:
    """The plan of a step, per parameter, with the reasons.

    Its text is as wide as the terminal, or as the environment variable COLUMNS says; 80 columns where neither is known.
    Where there are many, dense leaves that are treated alike share a line, and so do tables that differ in their sizes
    alone; `Explanation.rows` has each of them, and `autopar.why` tells of one.

    Args:
      step: What `parallelize` returned.
      *args, **kwargs: Arguments of a call: arrays or `jax.ShapeDtypeStruct`s. Nothing of the step is run but the
        equations that ids depend on, to measure alpha. Without arguments: the plan in use.
      cluster: Plan for these machines in place of the devices here; a batch is that of all of them.
      verbose: List the passes as well, each with its time, and all that is kept from XLA's partitioner.

    An argument of the step that is called `cluster` or `verbose` must be given by its position.

    Raises:
      ArgumentsError: no arguments, and the step hasn't been called yet.

    Across processes, all of them ask with arguments together; without arguments each may ask for itself.
    """
    require_step(step, "explain")
    if args or kwargs:
        pure, arrays, named = unwrapped(step, args, kwargs, "explain")
        entry = (pure if cluster is None else elsewhere(pure, cluster)).entry(*arrays, **named)
        leaves: Sequence[Any] | None = pure.leaves(arrays, named)
    else:
        latest = step.latest
        if latest is None:
            raise ArgumentsError(f"{step.name} hasn't been called yet: explain(step, state, batch)")
        if cluster is not None:
            raise ArgumentsError("a cluster takes a step's arguments as well: explain(step, state, batch, cluster=...)")
        entry, leaves = latest, latest.example
    return _explain(entry, leaves, step.name, cluster, verbose)


def _explain(
    entry: Entry, leaves: Sequence[Any] | None, name: str, cluster: ClusterSpec | None, verbose: bool
) -> Explanation:
    program, plan = entry.compiled.analysed, entry.compiled.plan
    rows = [_table_row(entry, space, k, leaves) for space in program.rows.spaces for k in space.tables]
    rows += [_dense_row(leaf, plan) for leaf in plan.dense]
    passes = tuple((r.name, r.note, r.seconds) for r in entry.compiled.records)
    there = () if cluster is None or plan.devices == 1 else (predicted_note(plan_of(entry, name, leaves, cluster)),)
    there += emission_notes(entry, verbose)
    bound = entry.compiled.bound
    if bound.uneven:
        k, axis = next(iter(bound.uneven.items()))
        size = program.block.inputs[k].shape[axis]
        each = f"each has {-(-size // plan.devices)} or fewer, padded and masked"
        there += (f"{plan.devices} devices don't divide the batch ({size}): {each}.",)
    if examples := undivided(entry):
        there += (f"All devices do the same: {plan.devices} devices don't divide the batch ({examples}).",)
    if gathered := gathered_bytes(entry):
        each = f"each of {plan.devices} sends {format_bytes(gathered * (plan.devices - 1) // plan.devices)}"
        there += (f"Results by example, {format_bytes(gathered)}, come whole to every process: {each} (results=).",)
    return Explanation(
        name,
        tuple(rows),
        passes,
        entry.trace_s,
        plan.sparse,
        devices=plan.devices,
        updates=any(input_.role == "state" for input_ in program.inputs),
        processes=1 if entry.devices is None else len(entry.devices.processes.members),
        hosted=hosted_text(entry, leaves) if plan.on_hosts else "",
        notes=(
            *replica_notes(plan),
            *server_notes(plan),
            *memory_notes(entry, cluster),
            *tensor_notes(plan),
            *there,
            *entry.notes,
        ),
        pipeline=plan.pipeline,
        tensor=entry.options.tensor,
        microbatches=plan.microbatches,
        verbose=verbose,
    )


def _dense_row(leaf: DensePlan, plan: Plan) -> ExplainedLeaf:
    """A dense leaf's row: one in shards is updated on its owner, one that is divided where its products are."""
    size = leaf.nbytes
    action, kept = ("dense, in shards, ps", size // plan.devices) if leaf.sharded else ("dense", size)
    action, kept = _divided(plan, leaf.path, action, kept)
    return ExplainedLeaf(leaf, size, 0, None, action, 2 * size, 2 * kept, sent=leaf.sent)


def _divided(plan: Plan, path: str, action: str, touched: int) -> tuple[str, int]:
    """How a leaf is updated, and the bytes of that, if it is divided over the devices of a tensor axis."""
    if plan.tensor is None or path not in plan.tensor.axes:
        return action, touched
    return "tensor", touched // plan.tensor.devices


def _table_row(entry: Entry, space: RowSpace, k: int, leaves: Sequence[Any] | None) -> ExplainedLeaf:
    """A table's row; the family's slots, and what is exchanged, are counted with its first table."""
    program, bound, plan = entry.compiled.analysed, entry.compiled.bound, entry.compiled.plan
    devices = plan.devices
    table, first = bound.plan.table(program.inputs[k].path), k == space.tables[0]
    nbytes = program.block.inputs[k].type.nbytes
    slots = [leaf for leaf in space.leaves if leaf not in space.tables] if first else []
    size = nbytes + sum(program.block.inputs[leaf].type.nbytes for leaf in slots)
    is_read = program.inputs[k].role == "table"
    dense = size if is_read else touched_bytes(table_bytes=nbytes, family_bytes=size)
    alpha = batch_alpha(program, space, leaves, devices) if space.accesses else None
    action, planned, deferred = "dense", dense, ""
    if table.lifted:
        action = "sparse, lazy" if bound.plan.sparse == "lazy" else "sparse"
        planned = int(dense * alpha.share) if alpha else dense
    if k in bound.shards:
        action, planned = "dense, in shards", dense // devices
    action, planned = _divided(plan, table.path, action, planned)
    if table.log_steps:
        action += ", others deferred"
        deferred = f"{format_bytes(_log_bytes(entry, space.family))} for what they missed"
    if table.pulled:
        action = "pulled whole, ps on hosts"
    elif table.where == "hosts":
        action += ", ps on hosts"
    elif (table.sent or is_read) and table.lifted:
        action += f", {table.method}"
    row = ExplainedLeaf(table, size, len(slots), alpha, action, dense, planned, deferred)
    if not first:
        return row
    paper = table_3(b=nbytes, n=devices, alpha=alpha.local_share) if table.sent and alpha and not table.pulled else {}
    return dataclasses.replace(row, sent=table.sent, seconds=table.seconds, table_3=paper)


def _log_bytes(entry: Entry, family: int) -> int:
    """Bytes of a family's update log: stamps, records, segments."""
    program = entry.compiled.program
    lead = f"update log {family}/"
    pairs = zip(program.inputs, program.block.inputs, strict=True)
    return sum(v.type.nbytes for input_, v in pairs if input_.path.startswith(lead))
