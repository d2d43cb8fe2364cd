"""Writes one device's program of a step with tables on hosts, and decides whether MPI or XLA reduces its dense sums.

MPI reduces between the compiled programs of the ranks, each on its own examples. It can't reduce a sum inside a loop,
nor one that later work on the examples needs. Then, and in a lone process, sums are `psum`s within the programs, which
all ranks' devices run together.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import StrategyError
from autopar.ir.local import NotLocal, Spread
from autopar.ir.program import Block, Program, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.served import LocalWorker
from autopar.ir.slicing import eliminate_dead
from autopar.passes.local_forms import Localization
from autopar.passes.localize import Localizer, localize


def localize_rank(program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
    """Returns the program of each device, the plan with the reduction backend and its reason, and a note."""
    if bound.devices == 1:
        reason = "one process"
        try:
            local, note = localize(program, bound, examples=bound.rank_devices > 1)
        except NotLocal as error:
            if bound.rank_devices == 1:
                raise
            bound, reason = replace(bound, rank_devices=1), f"one process, on one device: {error}"
            local, note = localize(program, bound, examples=False)
        return local, bound.noting(reduction_backend="", reduction_reason=reason), note
    try:
        local, note = localize(program, bound, reduces_by_mpi=True)
        obstacle = _unreachable_sum(local)
        if obstacle is None:
            return local, bound.noting(reduction_backend="mpi", reduction_reason=_reductions(local)), note
    except NotLocal as error:
        obstacle = str(error)
    local, note = localize(program, bound)
    return local, bound.noting(reduction_backend="psum", reduction_reason=obstacle), note


def _reductions(program: Program) -> str:
    ops = sorted({r.op for r in known(program.local).reductions})
    kinds = "all of sums" if ops in ([], ["sum"]) else f"by {', '.join(ops)}"
    return f"{len(known(program.local).reductions)} reductions, {kinds}"


def _unreachable_sum(program: Program) -> str | None:
    local = known(program.local)
    if local.examples_meet is not None:
        return str(local.examples_meet)
    nested = next((r for r in local.reductions if r.nested), None)
    return None if nested is None else f"a sum over all examples in a loop ({nested.source})"


def not_on_hosts(program: Program, error: NotLocal) -> StrategyError:
    """Returns the user's error for a step that can't run with tables on hosts."""
    if any(input_.role == "state" for input_ in program.inputs):
        what, elsewhere = "trained", "leave them on the devices"
        if error.tables:
            there = ", ".join(f"{path!r}: 'auto'" for path in error.tables)
            names = " and ".join(error.tables)
            elsewhere = f"leave {names} on the devices, with all slots: strategy={{{there}, '**': ('ps', 'hosts')}}"
    else:
        what, elsewhere = "run", "give it ordinary arrays (autopar.materialize)"
    remedy = f"{error.remedy}, or {elsewhere}" if error.remedy else f"{elsewhere[:1].upper()}{elsewhere[1:]}"
    return StrategyError(f"strategy: {program.name} can't be {what} with tables on hosts: {error}. {remedy}")


# --- the program of each of a worker's devices, which divide its minibatch (`passes.split_servers`) ---


def localize_worker(program: Program, bound: ProgramPlan, devices: int) -> LocalWorker:
    """Returns the program of each device of a worker, all results whole; what they don't divide all compute.

    `program`: a program that `split_servers` has cut. `bound`: its plan. `devices`: the number of devices that divide
    the minibatch. Raises NotLocal if an equation can't run on a part of its operands.
    """
    worker = known(program.served).worker
    pairs = zip(program.block.inputs, bound.placements, strict=False)
    axes = {v: axis for v, axis in pairs if axis is not None and v.shape[axis] % devices == 0}
    over = replace(bound, plan=replace(bound.plan, devices=devices))
    walk = Localizer(Localization(over, True))
    inputs = tuple(walk.define(v, Spread(axes[v]) if v in axes else None) for v in worker.inputs)
    walk.rewrite(worker)
    outputs = tuple(walk.as_state(atom, None) for atom in worker.outputs)
    block, _ = eliminate_dead(Block(inputs, tuple(walk.equations), outputs))
    return LocalWorker(block, tuple(axes.get(v) for v in worker.inputs))
