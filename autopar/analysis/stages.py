"""Assigns each equation of a gradient program to a stage, forward or backward; no markers are needed.

Weights are ordered by their first use, and cut into stages in that order. For each equation there is the deepest stage
whose weights it depends on, and the deepest whose gradients it feeds. An equation that doesn't depend on the last stage
belongs to the forward of the former. Others belong to the backward of the latter, raised to the stage of any weight or
forward value that they read: `dy @ W.T` feeds what is ahead of W, and belongs to W's stage. Equations that depend on no
weight (masks, positions) have no stage: each stage computes those that it reads. Source: docs/pipelines.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.analysis.primitives import MOVES
from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.schedule import Kind

#: The stage of equations that depend on no weight.
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Label:
    """The stage of an equation (`NOWHERE`: each stage computes it), and its direction."""

    direction: Kind
    stage: int


def label_equations(
    block: Block, weights: Mapping[Var, int], gradients: Mapping[Atom, int], stages: int
) -> dict[Equation, Label]:
    """Returns the label of each equation of a gradient program.

    Args:
      block: The program of one microbatch.
      weights: Input that depends on weights -> the deepest stage of these.
      gradients: Output that is a gradient -> the stage of its weight.
      stages: S.
    """
    last = stages - 1
    depends = _depends(block, weights)
    feeds, measured = _feeds(block, gradients, last)
    labels: dict[Equation, Label] = {}
    homes: dict[Var, int] = dict(weights)
    for equation in block.equations:
        deepest = max((depends.get(v, NOWHERE) for v in equation.outputs), default=NOWHERE)
        if deepest == NOWHERE:
            labels[equation] = Label("F", NOWHERE)
        elif deepest < last or any(v in measured for v in equation.outputs):
            labels[equation] = Label("F", deepest)
            homes.update(dict.fromkeys(equation.outputs, deepest))
    reached: dict[Var, int] = {}
    for equation in reversed(block.equations):
        if equation in labels:
            continue
        stage = max(feeds.get(v, NOWHERE) for v in equation.outputs)
        stage = max([stage, *(reached[v] for v in equation.outputs if v in reached)])
        stage = max([stage, *(homes[a] for a in equation.inputs if isinstance(a, Var) and a in homes)])
        labels[equation] = Label("B", stage)
        for atom in equation.inputs:
            if isinstance(atom, Var):
                reached[atom] = max(reached.get(atom, NOWHERE), stage)
    return _with_moves(block, labels)


def _with_moves(block: Block, labels: dict[Equation, Label]) -> dict[Equation, Label]:
    """Moves equations that only move a backward value to the stage that makes it: a transposed gradient is that
    stage's."""
    made: dict[Var, Label] = {}
    for equation in block.equations:
        label, sources = labels[equation], [a for a in equation.inputs if isinstance(a, Var)]
        source = made.get(sources[0]) if len(sources) == 1 else None
        if label.direction == "B" and equation.op in MOVES and source is not None and source.direction == "B":
            size = sum(getattr(v.type, "nbytes", 0) for v in equation.outputs)
            if size <= getattr(sources[0].type, "nbytes", 0):
                label = labels[equation] = source
        made.update(dict.fromkeys(equation.outputs, label))
    return labels


def split_backward(block: Block, labels: Mapping[Equation, Label]) -> dict[Equation, Label]:
    """Relabels "B" as "W" where no other stage waits for the result: gradients of a stage's own weights."""
    split: dict[Equation, Label] = {}
    read: dict[Var, set[Label]] = {}
    for equation in reversed(block.equations):
        label = labels[equation]
        if label.direction == "B":
            readers = {r for v in equation.outputs for r in read.get(v, ())}
            if all(r.direction == "W" and r.stage == label.stage for r in readers):
                label = Label("W", label.stage)
        split[equation] = label
        for atom in equation.inputs:
            if isinstance(atom, Var):
                read.setdefault(atom, set()).add(label)
    return split


def _depends(block: Block, weights: Mapping[Var, int]) -> dict[Var, int]:
    depths = dict(weights)
    for equation in block.equations:
        deepest = max((depths.get(a, NOWHERE) for a in equation.inputs if isinstance(a, Var)), default=NOWHERE)
        if deepest != NOWHERE:
            depths.update(dict.fromkeys(equation.outputs, deepest))
    return depths


def _feeds(block: Block, gradients: Mapping[Atom, int], last: int) -> tuple[dict[Var, int], set[Var]]:
    """Maps values to the deepest stage whose gradients they feed; also returns those that feed other results."""
    deepest_fed: dict[Var, int] = {}
    measured = {a for a in block.outputs if isinstance(a, Var) and a not in gradients}
    for atom in block.outputs:
        if isinstance(atom, Var):
            deepest_fed[atom] = max(deepest_fed.get(atom, NOWHERE), gradients.get(atom, last))
    for equation in reversed(block.equations):
        deepest = max((deepest_fed.get(v, NOWHERE) for v in equation.outputs), default=NOWHERE)
        is_measured = any(v in measured for v in equation.outputs)
        for atom in equation.inputs:
            if isinstance(atom, Var):
                deepest_fed[atom] = max(deepest_fed.get(atom, NOWHERE), deepest)
                if is_measured:
                    measured.add(atom)
    return deepest_fed, measured
