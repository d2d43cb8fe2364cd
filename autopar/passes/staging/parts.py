"""A step cut by `split_update`, and which stage each equation and leaf of it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.flow import dependent
from autopar.analysis.stages import NOWHERE, Label, label_equations, split_backward
from autopar.ir.program import Block, Equation, Program, Var
from autopar.ir.slicing import eliminate_dead, halves, needed_equations

#: Rows of a table and all of it.
_ROWS = ("ap.pull", "ap.commit")
#: Elements of what every stage computes by itself, at most: scalars.
SMALL = 1


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A program around its one `ap.microbatches` equation."""

    before: Sequence[Equation]
    step: Equation
    after: Sequence[Equation]

    @property
    def body(self) -> Block:
        return self.step.bodies[0]


def find_parts(program: Program) -> Parts:
    """Finds the parts of a program that `split_update` has cut."""
    equations = program.block.equations
    k = next(k for k, e in enumerate(equations) if e.op == "ap.microbatches")
    first = Block(program.block.inputs, equations[:k], equations[k].inputs)
    before = needed_equations(first, [a for a in first.outputs if isinstance(a, Var)])
    known = {v for e in before for v in e.outputs}
    rest = []  # what the update alone reads
    for equation in equations[:k]:
        is_known = [v in known for v in equation.outputs]
        if not all(is_known) or not is_known:
            rest.append(halves(equation, is_known)[1] if any(is_known) else equation)
    return Parts(before, equations[k], (*rest, *equations[k + 1 :]))


def read_by(parts: Parts) -> dict[Var, Var]:
    """Maps inputs of the microbatch's program to what they are given."""
    pairs = zip(parts.body.inputs, parts.step.inputs, strict=True)
    return {inner: outer for inner, outer in pairs if isinstance(outer, Var)}


def used_weights(program: Program, parts: Parts) -> list[Var]:
    """Returns leaves of the state that the gradient program reads and the update changes, in the order of their first
    use."""
    whole = {v for v, axis in zip(parts.body.inputs, parts.step.params["axes"], strict=True) if axis is None}
    outer = read_by(parts)
    states = [v for k, v in enumerate(program.block.inputs) if program.inputs[k].role == "state" and v.shape]
    reached = {v: dependent(parts.before, [v]) for v in states}
    order: dict[Var, None] = {}
    for equation in parts.body.equations:
        read = {outer[a] for a in equation.inputs if isinstance(a, Var) and a in whole}
        order.update(dict.fromkeys(v for v in states if v not in order and not read.isdisjoint(reached[v])))
    return list(order)


def homes_before(parts: Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """Returns the stage of leaves, and of what is made of them ahead of the microbatches: that of the deepest leaf."""
    stages = dict(homes)
    for equation in parts.before:
        deepest = max((stages.get(a, NOWHERE) for a in equation.inputs if isinstance(a, Var)), default=NOWHERE)
        if deepest != NOWHERE:
            stages.update(dict.fromkeys(equation.outputs, deepest))
    return stages


def label_parts(
    parts: Parts, homes: Mapping[Var, int], stages: int, *, splits_backward: bool = False
) -> dict[Equation, Label]:
    """Returns the label of each equation of the gradient program.

    Args:
      parts, stages: A step, and S.
      homes: The stage of each weight.
      splits_backward: Whether gradients of weights are apart from those of inputs, as "W".
    """
    body, outer, depths = parts.body, read_by(parts), homes_before(parts, homes)
    weights = {inner: depths[leaf] for inner, leaf in outer.items() if leaf in depths}
    trained = _reached_weights(parts, homes)
    pairs = zip(body.outputs, parts.step.outputs, strict=True)
    gradients = {inner: homes[trained[outer]] for inner, outer in pairs if outer in trained}
    labels = label_equations(body, weights, gradients, stages)
    return split_backward(body, labels) if splits_backward else labels


def _reached_weights(parts: Parts, homes: Mapping[Var, int]) -> dict[Var, Var]:
    groups = _elementwise((*parts.before, *parts.after), [*homes, *parts.step.outputs])
    weights = {groups[v]: v for v in reversed(list(homes)) if v in groups}
    return {v: weights[groups[v]] for v in parts.step.outputs if groups.get(v) in weights}


def _elementwise(equations: Iterable[Equation], starts: Iterable[Var]) -> dict[Var, int]:
    """Returns values by number: those that meet in equations of one shape have the same, and rows that of their
    table."""
    groups = {v: k for k, v in enumerate(starts) if v.shape and v.type.size > SMALL}
    members: dict[int, set[Var]] = {k: {v} for v, k in groups.items()}
    for equation in equations:
        for out in equation.outputs:
            read = [a for a in equation.inputs if a in groups and isinstance(a, Var)]
            same = [a for a in read if a.shape == out.shape or equation.op in _ROWS]
            numbers = sorted({groups[a] for a in same})
            if not numbers:
                continue
            first = numbers[0]
            for other in numbers[1:]:
                for var in members.pop(other):
                    groups[var] = first
                    members[first].add(var)
            groups[out] = first
            members[first].add(out)
    return groups


def update_homes(parts: Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """Returns the stage of what the update computes elementwise of a leaf's values: the leaf's."""
    groups = _elementwise((*parts.before, *parts.after), [*homes, *parts.step.outputs])
    stages = {groups[v]: stage for v, stage in reversed(list(homes.items())) if v in groups}
    return {v: stages[group] for v, group in groups.items() if group in stages}


def other_homes(program: Program, parts: Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """Returns the stage of the state's other leaves: that of the weight whose update they are read for."""
    states = [v for k, v in enumerate(program.block.inputs) if program.inputs[k].role == "state"]
    groups = _elementwise((*parts.before, *parts.after), [*homes, *states, *parts.step.outputs])
    stages = {groups[v]: homes[v] for v in homes if v in groups}
    return {v: stages.get(groups.get(v, -1), 0) for v in states if v not in homes}


def untied(parts: Parts, homes: Mapping[Var, int], stages: int) -> Parts:
    """Makes one result a stage of gradients that are sums over stages; the update adds them."""
    while True:
        labels = label_parts(parts, homes, stages)
        body, made = parts.body, {v: e for e in parts.body.equations for v in e.outputs}
        for k, atom in enumerate(body.outputs):
            equation = made.get(atom) if isinstance(atom, Var) else None
            if equation is None or equation.op not in ("add_any", "add") or parts.step.params["joins"][k] != "sum":
                continue
            addends = [a for a in equation.inputs if a.shape == atom.shape]
            where = {labels[made[a]] for a in addends if isinstance(a, Var) and a in made}
            if len(addends) == 2 and len(where) == 2:
                parts = _added_later(parts, k, equation)
                break
        else:
            return parts


def _added_later(parts: Parts, k: int, equation: Equation) -> Parts:
    step, body = parts.step, parts.body
    sums = tuple(Var(step.outputs[k].type) for _ in equation.inputs)
    later = dataclasses.replace(equation, inputs=sums, outputs=(step.outputs[k],))
    outputs = (*body.outputs[:k], *equation.inputs, *body.outputs[k + 1 :])
    joins = step.params["joins"]
    new = dataclasses.replace(
        step,
        outputs=(*step.outputs[:k], *sums, *step.outputs[k + 1 :]),
        params={**step.params, "joins": (*joins[:k], "sum", "sum", *joins[k + 1 :])},
        bodies=(eliminate_dead(Block(body.inputs, body.equations, outputs))[0],),
    )
    return Parts(parts.before, new, (later, *parts.after))
