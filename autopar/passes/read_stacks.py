"""An evaluation reads tables where the train step keeps them, behind other tables (`passes.stack_tables`).

    a[i], b[j]                      ->  s[concatenate(i, V_a + j)], cut in two

What it is given and doesn't read, as an optimizer's slots, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from autopar.analysis.bags import is_plain_access
from autopar.ir.program import Atom, Block, Equation, Input, Program, Var, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.slicing import in_order
from autopar.ir.stacked import StackedProgram, StackedTable, StackIndex
from autopar.passes.stack_tables import StackIds, plan_stacked

#: Equations into whose bodies a table is followed, if each turn reads it as it is.
_ENTERED = frozenset({"scan", "cond", "remat"})


def read_stacks(program: Program, plan: ProgramPlan, analyze: Callable[[Program], Program]) -> StackedProgram | None:
    """Returns an evaluation of stacks in place of one of tables that lie in them; None if there are none.

    Args:
      program: An analysed evaluation.
      plan: Its plan.
      analyze: Analyses a program without facts.
    """
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
    program = dataclasses.replace(
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
    input_ = dataclasses.replace(first, path=path, layout=layout, stack_index=None)
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
    """Returns a block that reads stacks in place of tables, those that it can at once.

    Args:
      inputs: What it is given in place of its inputs.
      tables: Input -> its stack, and its index there.
      batch: Value -> its axis of examples.
    """
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
    return dataclasses.replace(equation, inputs=operands, bodies=tuple(bodies), original=None)
