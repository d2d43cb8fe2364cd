"""SpecTrain: forwards and backwards read the weights that their minibatch's last backward is predicted to meet.

W + s u: u is the change by the last update, whatever the optimizer (-eta v of momentum SGD), 0 before the first one; s
counts the updates of the stage from the task's start to that of stage 0's backward (`cost.versions`). Source: SpecTrain
(Chen et al., 2018), section 3.2, equation 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from autopar.ir.expand import expand
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Block, Equation, Var
from autopar.passes.staging.asynchronous import substituted


def with_prediction(staged: StagedStep, ahead: Sequence[tuple[int, int]]) -> StagedStep:
    """The step whose tasks predict their weights. Tables that are trained on touched rows are read as they are.

    Args:
      staged: A step without a flush.
      ahead: Of each stage s, of its forwards and of its backwards.
    """
    assert staged.asynchronous is not None, "versions differ without a flush"
    news, homes = dict(staged.asynchronous.news), dict(staged.homes)
    weights = [x for x in predicted_weights(staged) if any(ahead[homes[x]])]
    differences = {x: Var(x.type) for x in weights}
    programs = []
    for program in staged.programs:
        steps = ahead[program.stage][program.phase == "B"]
        if program.phase in ("F", "B") and steps:
            program = _predicting(program, differences, steps)
        elif program.phase == "update":
            program, changes = _telling_changes(program, {news[x]: x for x in weights})
            news |= {differences[x]: change for x, change in changes.items()}
        programs.append(program)
    homes |= {u: homes[x] for x, u in differences.items()}
    divided = dict(staged.divided) | {u: staged.divided[x] for x, u in differences.items() if x in staged.divided}
    asynchronous = dataclasses.replace(
        staged.asynchronous, news=news, differences=differences, ahead=tuple(map(tuple, ahead))
    )
    return dataclasses.replace(
        staged, programs=tuple(programs), homes=homes, divided=divided, asynchronous=asynchronous
    )


def predicted_weights(staged: StagedStep) -> list[Var]:
    """The weights that move as a whole."""
    assert staged.asynchronous is not None, "versions differ without a flush"
    equations = {v: e for p in staged.programs if p.phase == "update" for e in p.block.equations for v in e.outputs}
    news = staged.asynchronous.news
    moving = [x for x in staged.weights if x in news and jnp.issubdtype(x.dtype, jnp.inexact)]
    return [x for x in moving if equations[news[x]].op != "ap.commit"]


def _predicting(program: StageProgram, differences: Mapping[Var, Var], steps: int) -> StageProgram:
    """A program that reads its weights so many updates ahead."""
    block = program.block
    read = [x for x in block.inputs if x in differences]
    ahead: list[Equation] = []
    names: dict[Var, Var] = {}
    for x in read:
        ahead += expand(lambda w, u: w + steps * u, block.equations[0], (x, differences[x]))
        names[x] = ahead[-1].outputs[0]
    body = substituted(block, names)
    inputs = (*block.inputs, *(differences[x] for x in read))
    return dataclasses.replace(program, block=Block(inputs, (*ahead, *body.equations), body.outputs))


def _telling_changes(program: StageProgram, olds: Mapping[Var, Var]) -> tuple[StageProgram, dict[Var, Var]]:
    """An update that returns the changes of its weights, too; `olds`: new value -> weight."""
    block = program.block
    changes: dict[Var, Var] = {}
    equations = list(block.equations)
    for new in program.outputs:
        if new in olds:
            equations += expand(lambda new, old: new - old, block.equations[0], (new, olds[new]))
            changes[olds[new]] = equations[-1].outputs[0]
    inputs = tuple(dict.fromkeys((*block.inputs, *changes)))
    outputs = (*block.outputs, *changes.values())
    return dataclasses.replace(program, block=Block(inputs, tuple(equations), outputs)), changes
