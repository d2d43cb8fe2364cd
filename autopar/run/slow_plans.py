"""Warnings at the first call about costs that a small change of the step or its batch would avoid."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import jax
import jaxlib.version
import numpy as np

from autopar.cost.model import touched_bytes
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.figures import format_bytes
from autopar.ir.strategy import ROW_METHODS, choice_for
from autopar.launch.group import everyone
from autopar.passes.analyze_batch import MANY, batch_of, common_size
from autopar.run.planned_step import PlannedStep

#: Memory traffic of a step that is worth a warning, as a multiple of what is needed.
_TIMES = 4
#: Bytes worth a warning of values of examples that every device gathers in each step.
_GATHERED_BYTES = 16 << 20

#: The option of LLVM with which XLA adds by the GPU's own instruction, which takes subnormal numbers for zeros.
_ATOMICS = "-nvptx-allow-ftz-atomics"
_SLOW_SCATTERS = (
    "jaxlib {} adds updates to rows of float32 up to 2,000 times slower on NVIDIA GPUs where ids repeat (jax issue "
    "38806), as at {}. Take jaxlib 0.11.1 or newer (Python 3.12), or start Python with "
    f"XLA_FLAGS=--xla_backend_extra_options={_ATOMICS}, which takes subnormal numbers in such sums for zeros"
)


def warn_of_slow_plan(name: str, planned: PlannedStep) -> None:
    """Warns of a plan's avoidable costs, at the first call by it."""
    found = (
        _dense_tables(planned),
        _whole_tables(planned),
        _undivided_batch(planned),
        _large_results(planned),
        _gathered(planned),
    )
    for message in itertools.chain(*found):
        warn(f"{name}: {message}", SlowPlanWarning)
    if planned.options.accelerators and has_slow_scatters(jax.devices()[0].device_kind):
        for message in slow_scatters(planned):
            warn(f"{name}: {message}", SlowPlanWarning)


def slow_scatters(planned: PlannedStep) -> Iterator[str]:
    """Yields a warning on float32 updates of rows, which some versions of jaxlib add slowly."""
    scatters = (e for e in planned.compiled.analysed.block.walk() if e.op == "scatter-add")
    first = next((e for e in scatters if e.outputs[0].dtype == np.float32), None)
    if first is not None:
        yield _SLOW_SCATTERS.format(jaxlib.version.__version__, first.where)


def has_slow_scatters(device_kind: str, version: Sequence[int] = jaxlib.version.__version_info__) -> bool:
    """Says whether this jaxlib adds float32 updates by compare-and-swap loops in a device's memory (jax#38806).
    `device_kind`: JAX's name, such as "NVIDIA H100 80GB HBM3"."""
    is_slow = (0, 10, 2) <= tuple(version[:3]) < (0, 11, 1)
    flags = os.environ.get("XLA_FLAGS", "")
    return is_slow and "NVIDIA" in device_kind and _ATOMICS not in flags and "--xla_gpu_ftz=true" not in flags


def undivided(planned: PlannedStep) -> int:
    """Returns the number of examples in a batch that several devices don't divide; 0 if they do, or if it is
    unknown."""
    program, devices = planned.compiled.analysed, planned.compiled.plan.devices
    batch = {v: v.shape[axis] for v, axis in batch_of(program, planned.options.batch_axis).items()}
    spread = {batch.get(v, 0) for v in program.block.inputs if v in program.batch}
    size = common_size(batch.values(), devices) if spread else next(iter(batch.values()), 0)
    return size if devices > 1 and size not in spread else 0


def gathered_bytes(planned: PlannedStep) -> int:
    """Returns the bytes of per-example results that a call brings to every process; 0 for one process."""
    program, plan = planned.compiled.analysed, planned.compiled.plan
    processes = planned.devices.processes if planned.devices is not None else everyone() if plan.on_hosts else None
    if processes is None or not processes.several or not planned.are_results_whole:
        return 0
    pairs = zip(program.block.outputs, program.outputs, strict=True)
    return sum(getattr(a.type, "nbytes", 0) for a, out in pairs if out.state is None and a in program.batch)


def _dense_tables(planned: PlannedStep) -> Iterator[str]:
    """Yields warnings on tables that are updated as a whole because of another use of theirs in the step."""
    program, plan = planned.compiled.analysed, planned.compiled.plan
    looked_up = {table.path: table.ids for table in plan.tables if table.refused}
    for space in program.facts.spaces:
        table = program.inputs[space.tables[0]].path if space.tables else ""
        refusal, ids = space.refusal, looked_up.get(table, 0)
        choice = choice_for(planned.options.strategy, table)
        is_named = choice.method in ROW_METHODS and choice.pattern is not None and "*" not in choice.pattern
        if refusal is None or (refusal.kind in ("softmax", "replayed") and not is_named) or not ids:
            continue
        family = sum(program.block.inputs[k].type.nbytes for k in space.leaves)
        dense = touched_bytes(table_bytes=program.block.inputs[space.tables[0]].type.nbytes, family_bytes=family)
        touched = dense * ids // space.extent
        if dense < max(planned.options.slow_bytes, _TIMES * touched):
            continue
        yield (
            f"every step updates all {space.extent} rows of {table}, which moves {format_bytes(dense)} of memory, "
            f"{format_bytes(touched)} for the at most {ids} rows that it looks up: {refusal}. To change that: "
            f"{refusal.remedy}"
        )


def _whole_tables(planned: PlannedStep) -> Iterator[str]:
    """Yields warnings on tables that stay whole on every device, despite the strategy, because the step doesn't update
    them."""
    program, plan = planned.compiled.analysed, planned.compiled.plan
    for space in program.facts.spaces:
        if space.refusal is None or space.accesses or space.rows_read or plan.devices == 1:
            continue
        table = plan.table(program.inputs[space.tables[0]].path)
        size = program.block.inputs[space.tables[0]].type.nbytes
        choice = choice_for(planned.options.strategy, table.path).method
        if choice in ROW_METHODS and table.method != "ps" and size >= planned.options.slow_bytes:
            yield (
                f"strategy {choice!r} leaves {table.path}, {format_bytes(size)}, whole on each of {plan.devices} "
                f"devices: {space.refusal}. To change that: {space.refusal.remedy}"
            )


def _undivided_batch(planned: PlannedStep) -> Iterator[str]:
    """Yields a warning on a batch that every device computes as a whole."""
    devices, examples = planned.compiled.plan.devices, undivided(planned)
    if examples >= MANY * devices and examples % devices:
        fewer, what = examples - examples % devices, "ranks" if planned.compiled.plan.on_hosts else "devices"
        yield (
            f"{devices} {what} don't divide a batch of {examples}, so each of them computes all of it. Give batches "
            f"of {fewer} or {fewer + devices}; autopar.shard(..., last='pad') fills up those at the end of an epoch"
        )


def _gathered(planned: PlannedStep) -> Iterator[str]:
    """Yields warnings on large values that every device needs of all examples."""
    local = planned.compiled.program.local
    for value in () if local is None or planned.compiled.plan.on_hosts else local.gathered:
        if value.op and value.nbytes >= _GATHERED_BYTES:
            yield (
                f"every device needs {format_bytes(value.nbytes)} of all examples for {value.op} "
                f"({value.source or 'no line'}), which are gathered in each step. Do that for each example by itself, "
                "or, if these are no examples, say so: batch_axis={'path of the argument': None}"
            )


def _large_results(planned: PlannedStep) -> Iterator[str]:
    """Yields a warning on large per-example results that come whole to every process without the user's wish."""
    size = gathered_bytes(planned)
    if size >= planned.options.slow_bytes and planned.options.results is None:
        yield (
            f"its results with a value for each example, {format_bytes(size)}, come whole to every process in each "
            "call, so that NumPy can read them. Reduce them in the function (a mean, top_k), or leave each with its "
            "example, parallelize(..., results='spread'); results='whole' says that it is meant so"
        )
