"""SpecTrain: forwards and backwards read the weights that their minibatch's last backward is predicted to meet.

W + s u: u is the change by the last update, whatever the optimizer (-eta v of momentum SGD), 0 before the first one; s
counts the updates of the stage from the task's start to that of stage 0's backward (`cost.stage_time`). Of a table that
is trained on touched rows, u is the change of those that the last update touched, 0 for all others: it is kept with
their numbers, and added to what a minibatch reads of them.

Source: SpecTrain (Chen et al., 2018), section 3.2, equation 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import ArrayType, Atom, Block, Equation, Var
from autopar.ir.writer import expand
from autopar.passes.staging.asynchronous import substituted

Array = Any


def with_prediction(staged: StagedStep, ahead: Sequence[tuple[int, int]]) -> StagedStep:
    """Returns the step whose tasks predict their weights.

    Args:
      staged: A step without a flush.
      ahead: Of each stage s, of its forwards and of its backwards.
    """
    assert staged.asynchronous is not None, "versions differ without a flush"
    news, homes, divided = dict(staged.asynchronous.news), dict(staged.homes), dict(staged.divided)
    changes = {x: change for x, change in _changes(staged).items() if any(ahead[homes[x]])}
    programs = []
    for program in staged.programs:
        steps = ahead[program.stage][program.phase == "B"]
        if program.phase in ("F", "B") and steps:
            program = _predicting(program, changes, steps)
        elif program.phase == "update":
            program, made = _telling_changes(program, {news[x]: (x, change) for x, change in changes.items()})
            news |= made
        programs.append(program)
    for x, change in changes.items():
        homes |= dict.fromkeys(change.leaves, homes[x])
        if x in staged.divided:
            divided |= dict.fromkeys((change.values, news[change.values]), staged.divided[x])
    asynchronous = dataclasses.replace(
        staged.asynchronous,
        news=news,
        differences={x: change.leaves for x, change in changes.items()},
        ahead=tuple(map(tuple, ahead)),
    )
    return dataclasses.replace(
        staged, programs=tuple(programs), homes=homes, divided=divided, asynchronous=asynchronous
    )


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of a weight by its last update, kept in leaves of the pipeline's own.

    Attributes:
      values: Of the whole weight, or of some of its rows.
      rows: int32[U], the numbers of those, sorted; from the extent on for padding. None of a whole weight.
      commit: What writes them.
    """

    values: Var
    rows: Var | None = None
    commit: Equation | None = None

    @property
    def leaves(self) -> tuple[Var, ...]:
        return (self.values,) if self.rows is None else (self.values, self.rows)


def _changes(staged: StagedStep) -> dict[Var, _Change]:
    """Returns the weights that move, with what their changes are kept in."""
    assert staged.asynchronous is not None, "versions differ without a flush"
    equations = {v: e for p in staged.programs if p.phase == "update" for e in p.block.equations for v in e.outputs}
    news, found = staged.asynchronous.news, dict[Var, _Change]()
    for x in staged.weights:
        if x not in news or not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        commit = equations[news[x]]
        if commit.op != "ap.commit":
            found[x] = _Change(Var(x.type))
            continue
        assert x not in staged.divided and not commit.params["guarded"], "a stage's table is whole, and has all rows"
        rows, route = commit.inputs[1:3]
        numbers = ArrayType((route.type.rows,), np.dtype(np.int32))
        found[x] = _Change(Var(rows.type), Var(numbers), commit)
    return found


def _predicting(program: StageProgram, changes: Mapping[Var, _Change], steps: int) -> StageProgram:
    """Returns a program that reads its weights so many updates ahead."""
    block = program.block
    read = {x: changes[x] for x in block.inputs if x in changes}
    ahead: list[Equation] = []
    names: dict[Var, Var] = {}
    for x, change in read.items():
        if change.rows is None:
            ahead += expand(lambda w, u: w + steps * u, block.equations[0], (x, change.values))
            names[x] = ahead[-1].outputs[0]
    body = substituted(block, names)
    for equation in body.equations:
        x = equation.inputs[0] if equation.op == "ap.pull" else None
        ahead += _pulling_ahead(equation, read[x], steps) if x in read else [equation]
    inputs = (*block.inputs, *(leaf for change in read.values() for leaf in change.leaves))
    return dataclasses.replace(program, block=Block(inputs, tuple(ahead), body.outputs))


def _pulling_ahead(pull: Equation, change: _Change, steps: int) -> Iterator[Equation]:
    """Yields a pull of rows, of which those that the last update touched are predicted."""
    (leaf, route), axis, pulled = pull.inputs, pull.params["axis"], Var(pull.outputs[0].type)
    yield dataclasses.replace(pull, outputs=(pulled,))
    numbers = _numbers(pull, leaf.shape[axis], route)
    yield numbers

    def predicted(rows: Array, numbers: Array, values: Array, touched: Array) -> Array:
        place = jnp.minimum(jnp.searchsorted(touched, numbers), touched.shape[0] - 1)
        is_touched = jnp.expand_dims(touched[place] == numbers, [k for k in range(rows.ndim) if k != axis])
        return rows + steps * jnp.where(is_touched, jnp.take(values, place, axis), jnp.zeros_like(rows))

    yield from expand(predicted, pull, (pulled, numbers.outputs[0], *change.leaves), pull.outputs[0])


def _telling_changes(
    program: StageProgram, olds: Mapping[Var, tuple[Var, _Change]]
) -> tuple[StageProgram, dict[Var, Var]]:
    """Returns an update that tells the changes of its weights, too, and what is the new value of each of their leaves.

    Args:
      program: The update.
      olds: New value of a weight -> the weight, its change.
    """
    block = program.block
    made: dict[Var, Var] = {}
    equations, inputs = list(block.equations), list(block.inputs)
    for new, (x, change) in ((v, olds[v]) for v in program.outputs if v in olds):
        inputs.append(x)
        values = made[change.values] = Var(change.values.type)
        if change.commit is None:
            equations += expand(lambda new, old: new - old, equations[0], (new, x), values)
            continue
        (rows, route), axis = change.commit.inputs[1:3], change.commit.params["axis"]
        extent, old = x.shape[axis], Var(rows.type)
        equations.append(_like(change.commit, "ap.pull", (x, route), old, {"axis": axis, "state": True}))
        equations += expand(lambda new, old: new - old, change.commit, (rows, old), values)
        equations.append(_numbers(change.commit, extent, route))

        def in_order(numbers: Array, extent: int = extent) -> Array:
            return jnp.where(numbers < jax.lax.cummax(numbers), extent, numbers)

        touched = made[change.leaves[1]] = Var(change.leaves[1].type)
        equations += expand(in_order, change.commit, equations[-1].outputs, touched)
    outputs = (*block.outputs, *made.values())
    return dataclasses.replace(program, block=Block(tuple(dict.fromkeys(inputs)), tuple(equations), outputs)), made


def _numbers(like: Equation, extent: int, route: Atom) -> Equation:
    type_ = ArrayType((route.type.rows,), np.dtype(np.int32))
    params = {"axis": 0, "shape": type_.shape, "dtype": type_.dtype, "extent": extent}
    return _like(like, "ap.row_iota", (route,), Var(type_), params)


def _like(like: Equation, op: str, inputs: tuple[Atom, ...], output: Var, params: Mapping[str, Any]) -> Equation:
    return dataclasses.replace(like, op=op, inputs=inputs, outputs=(output,), params=params)
