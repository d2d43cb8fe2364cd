"""An evaluation reads tables where the train step keeps them, behind other tables (`passes.stack_tables`).

    a[i], b[j]                      ->  s[i], s[V_a + j]

What it is given and doesn't read, as an optimizer's slots, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar.analysis.bags import is_plain_access
from autopar.ir.program import Block, Equation, Input, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.stacked import StackedProgram, StackedTable, StackIndex
from autopar.ir.writer import expand
from autopar.jax_types import Array
from autopar.passes.stack_tables import fill_of, is_row, plan_stacked


def read_stacks(program: Program, plan: ProgramPlan, analyze: Callable[[Program], Program]) -> StackedProgram | None:
    """Returns an evaluation of stacks in place of one of tables that lie in them; None if there are none.

    Args:
      program: An analysed evaluation.
      plan: Its plan.
      analyze: Analyses a program without facts.
    """
    block = program.block
    read = {*block.outputs, *(a for e in block.equations for a in e.inputs)}
    others = {
        *block.outputs,
        *(a for e in block.equations for a in e.inputs[1 if e.op == "gather" and is_plain_access(e) else 0 :]),
    }
    groups: dict[tuple[object, ...], list[int]] = {}
    unread, seen = set[int](), dict[StackIndex, int]()
    for k, (leaf, input_) in enumerate(zip(block.inputs, program.inputs, strict=True)):
        index = input_.stack_index
        if leaf not in read and (index is not None or input_.layout is not None):
            unread.add(k)
        elif index is not None and leaf not in others:
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
    tables = {block.inputs[k]: (leaf, program.inputs[k].stack_index) for k, leaf in stacks.items()}
    equations = tuple(new for e in block.equations for new in _in_stacks(e, tables))
    before = program.facts
    program = dataclasses.replace(
        program,
        block=Block(tuple(leaf for _, leaf, _ in inputs), equations, block.outputs),
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
    input_ = dataclasses.replace(first, path=path, layout=layout, stack_index=None)
    return StackedTable(tuple(group), indices), leaf, input_


def _in_stacks(equation: Equation, tables: Mapping[Var, tuple[Var, StackIndex | None]]) -> Iterator[Equation]:
    """Yields what makes an equation's results of stacks."""
    table = equation.inputs[0] if equation.inputs else None
    if not (isinstance(table, Var) and table in tables):
        yield equation
        return
    stack, index = tables[table]
    assert index is not None, "it lies in a stack"
    start, high, fill = index.shape.starts[index.table], table.shape[0] - 1, fill_of(equation)
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]

    def placed(ids: Array) -> Array:
        return jnp.clip(ids, 0, min(high, int(jnp.iinfo(ids.dtype).max))).astype(jnp.int32) + start

    def rows(stack: Array, indices: Array) -> Array:
        return jax.lax.gather(stack, indices, numbers, sizes, mode="clip")

    ids = equation.inputs[1]
    made = expand(placed, equation, (ids,))
    yield from made
    read = (stack, made[-1].outputs[0])
    if fill is None:
        yield from expand(rows, equation, read, equation.outputs[0])
        return
    made = expand(rows, equation, read)
    yield from made

    def kept(found: Array, ids: Array) -> Array:
        return jnp.where(is_row(ids, high, found.ndim), found, fill)

    yield from expand(kept, equation, (made[-1].outputs[0], ids), equation.outputs[0])
