"""Checks that the decisions of an earlier plan fit a step: before they are followed, and after.

What they say about a table holds for its shape, its slots and the number of devices. A step that isn't the one that the
plan was made for is refused with all that differs, rather than run by half of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.plan import Plan, TablePlan
from autopar.ir.program import Program
from autopar.ir.rowspace import RowSpace

_REMEDY = "Plan the step as it is now: autopar.plan(step, state, batch).save(...); or leave plan= away"


def check_facts(program: Program, earlier: Plan, devices: int, tensor: int) -> None:
    """Checks that the plan is of an analysed program's tables, on so many devices, of which so many divide products.

    Raises:
      PlanError: it isn't; all that differs is named.
    """
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
    """Returns what is other about a table than what was planned for."""
    type_ = program.block.inputs[table].type
    slots = tuple(program.inputs[k].path for k in space.leaves if k != table)
    pairs = [
        ("shape", list(plan.shape), list(type_.shape)),
        ("dtype", plan.dtype, str(type_.dtype)),
        ("axis of rows", plan.axis, space.row_axes[table]),
        ("slots", ", ".join(sorted(plan.slots)) or "none", ", ".join(sorted(slots)) or "none"),
    ]
    return [f"{plan.path}: {what} {now} in the step, {then} in the plan" for what, then, now in pairs if then != now]


def check_followed(program: Program, earlier: Plan, made: BoundPlan) -> None:
    """Checks that what was decided now is what the earlier plan says.

    Raises:
      PlanError: a table can't be had as the plan has it, or its rows wait now and didn't then.
    """
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
