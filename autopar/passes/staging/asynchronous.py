"""Lets minibatches of a step in stages follow one another without a flush.

It finds the call of each program of the update, leaves that no gradient reaches, and weights that several stages read.
A forward or backward reads its stage's weights as they are in its call. A weight of an earlier stage comes with the
minibatch, like an activation, as the forward there saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.errors import StrategyError
from autopar.ir.pipeline import Asynchronous, Calls, StagedStep, StageProgram
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var
from autopar.ir.schedule import StageDevices
from autopar.ir.slicing import eliminate_dead, needed_equations
from autopar.ir.writer import expand
from autopar.jax_types import Array, Params


def without_flush(
    staged: StagedStep, program: Program, stage_devices: StageDevices, *, stashes: bool, slack: int
) -> StagedStep:
    """Returns the step with the additions of an asynchronous pipeline.

    `staged`: the programs, of one microbatch, with the inputs and outputs of `program`, that they were cut from.
    `stashes`: backwards see the versions of their forwards. `slack`: extra minibatches for each border. Raises
    StrategyError if the update of a stage needs leaves of another, or of a version that is gone.
    """
    return _Cutter(staged, program, Calls.soonest(stage_devices, stashes=stashes, slack=slack)).run()


class _Cutter:
    def __init__(self, staged: StagedStep, program: Program, soonest: Calls) -> None:
        self._staged, self._program, self._soonest = staged, program, soonest
        block = program.block
        self._paths = {v: leaf.path for v, leaf in program.named_inputs}
        self._states = {block.inputs[leaf]: block.outputs[out] for leaf, out in program.new_states.items()}
        self._constants = frozenset(old for old, new in self._states.items() if new is old)
        self._clocks = dict(self._without_gradients())
        moving = self._states.keys() - self._clocks.keys() - self._constants
        self._homes = {v: stage for v, stage in staged.homes.items() if v in moving}
        others = {k for k in range(len(block.outputs))} - set(program.new_states.values())
        self._results = dict.fromkeys(a for k, a in enumerate(block.outputs) if k in others and isinstance(a, Var))
        self._programs = [p for p in map(self._without_clocks, staged.programs) if p is not None]

    def run(self) -> StagedStep:
        news = dict(self._news())
        results = dict(self._apart(news))
        self._tie()
        self._programs = [part for p in self._programs for part in self._sums_first(p, news)]
        calls = self._calls(news)
        needed = needed_equations(self._program.block.equations, self._clocks.values())
        inputs = self._program.block.inputs
        clock = Block(tuple(v for v in inputs if v in self._read(needed)), tuple(needed), tuple(self._clocks.values()))
        asynchronous = Asynchronous(
            calls=replace(self._soonest, updates=calls, last=max(p.call for p in self._programs)),
            news=news,
            clock=clock,
            clocks=self._clocks,
            constants=self._constants,
            results={v: results.get(v, v) for v in self._results},
            differences={},
        )
        return replace(
            self._staged,
            programs=tuple(self._programs),
            homes=self._homes,
            new_leaves={v: k for v, k in self._homes.items() if v.shape and not jax_compat.is_key(v.dtype)},
            asynchronous=asynchronous,
        )

    def _read(self, equations: Iterable[Equation]) -> set[Var]:
        read = {a for e in equations for a in e.inputs} | {*self._clocks.values()}
        return {v for v in self._program.block.inputs if v in read}

    def _without_gradients(self) -> Iterator[tuple[Var, Atom]]:
        """Yields leaves whose new value depends on such leaves and on inputs of every stage."""
        found = {old: new for old, new in self._states.items() if old not in self._constants}
        examples, block = {whole for whole, _ in self._staged.parts.values()}, self._program.block
        while True:
            wrong = []
            for old, new in found.items():
                equations = needed_equations(block.equations, [new])
                read = {a for e in equations for a in e.inputs} | {new}
                leaves = self._states.keys() & read
                if (
                    any(e.op == "ap.microbatches" for e in equations)
                    or not examples.isdisjoint(read)
                    or not leaves <= found.keys() | self._constants
                ):
                    wrong.append(old)
            if not wrong:
                return iter(found.items())
            for old in wrong:
                del found[old]

    def _without_clocks(self, program: StageProgram) -> StageProgram | None:
        clocks = {new for new in self._clocks.values() if new not in self._results}
        outputs = tuple(v for v in program.outputs if v not in clocks)
        if not outputs:
            return None
        return self._with_block(program, Block(program.block.inputs, program.block.equations, outputs))

    def _with_block(self, program: StageProgram, block: Block) -> StageProgram:
        block, used = eliminate_dead(block)
        inputs = tuple(v for v, is_used in zip(block.inputs, used, strict=True) if is_used)
        return replace(program, block=Block(inputs, block.equations, block.outputs))

    def _news(self) -> Iterator[tuple[Var, Var]]:
        """Yields each leaf that moves with its new value, which the update of its stage makes for it alone."""
        makers = {v: p for p in self._programs if p.phase == "update" for v in p.outputs}
        taken: set[Atom] = set()
        for old in list(self._homes):
            new = self._states[old]
            maker = makers.get(new) if isinstance(new, Var) else None
            if maker is not None and maker.stage != self._homes[old] and not self._readers(old, maker.stage):
                self._homes[old] = maker.stage
            if maker is None or maker.stage != self._homes[old] or new in taken:
                copy = Var(old.type)
                equation = Equation("copy", (new,), (copy,), primitive=jax.lax.copy_p)
                level = max((p.level for p in self._programs if p.phase == "update"), default=0) + 1
                inputs = () if isinstance(new, Literal) else (new,)
                block = Block(inputs, (equation,), (copy,))
                self._programs.append(StageProgram("update", self._homes[old], level, block))
                new = copy
            taken.add(new)
            assert isinstance(new, Var), "a program makes it"
            yield old, new

    def _apart(self, news: Mapping[Var, Var]) -> Iterator[tuple[Var, Var]]:
        """Yields results that are leaves, old or new, with copies that outlive the leaves' next version."""
        made = {new: leaf for leaf, new in news.items()}
        for atom in self._results:
            if atom in self._homes or atom in made:
                copy = Var(atom.type)
                equation = Equation("copy", (atom,), (copy,), primitive=jax.lax.copy_p)
                program = StageProgram(
                    "update", self._homes[made.get(atom, atom)], 0, Block((atom,), (equation,), (copy,))
                )
                self._programs.insert(len(self._programs) if atom in made else 0, program)
                yield atom, copy

    def _readers(self, leaf: Var, stage: int) -> list[StageProgram]:
        return [p for p in self._programs if p.stage != stage and leaf in p.block.inputs]

    def _tie(self) -> None:
        """Sends a leaf to later stages that read it with the minibatch."""
        for leaf, home in self._homes.items():
            readers = self._readers(leaf, home)
            early = next((p for p in readers if p.phase in ("before", "update") or p.stage < home), None)
            if early is not None:
                raise StrategyError(
                    f"pipeline: stage {early.stage} reads {self._paths.get(leaf, 'a leaf')}, which stage {home} has "
                    f"({_line(early, leaf)}): without a flush it can't know which version. Take a synchronous schedule"
                )
            if not readers:
                continue
            copy = Var(leaf.type)
            equation = Equation("copy", (leaf,), (copy,), primitive=jax.lax.copy_p)
            self._append(home, leaf, equation)
            self._programs = [
                replace(p, block=substituted(p.block, {leaf: copy})) if p in readers else p for p in self._programs
            ]

    def _append(self, stage: int, leaf: Var, equation: Equation) -> None:
        """Adds an equation to the forward of a stage."""
        for k, program in enumerate(self._programs):
            if (program.phase, program.stage) == ("F", stage):
                block = program.block
                inputs = tuple(dict.fromkeys((*block.inputs, leaf)))
                block = Block(inputs, (*block.equations, equation), (*block.outputs, *equation.outputs))
                self._programs[k] = replace(program, block=block)
                return
        block = Block((leaf,), (equation,), equation.outputs)
        self._programs.insert(0, StageProgram("F", stage, 0, block))

    def _sums_first(self, program: StageProgram, news: Mapping[Var, Var]) -> Iterator[StageProgram]:
        """Splits an update's sums for other stages, such as its part of a global norm, from its leaves, which wait
        for theirs."""
        read = {v for p in self._programs if p.phase == "update" and p.stage != program.stage for v in p.block.inputs}
        sums = [v for v in program.outputs if v in read]
        if program.phase != "update" or not sums or len(sums) == len(program.outputs):
            yield program
            return
        block = program.block
        first = self._with_block(program, Block(block.inputs, block.equations, tuple(sums)))
        if not {*self._homes, *news.values()}.isdisjoint(first.block.inputs):
            yield program
            return
        yield first
        rest = tuple(v for v in program.outputs if v not in sums)
        yield self._with_block(program, Block(block.inputs, block.equations, rest))

    def _calls(self, news: Mapping[Var, Var]) -> tuple[int, ...]:
        """Sets the call of each program, and returns that of each stage's update."""
        first = self._soonest.updates
        forward, backward = (
            [of(k) for k in range(len(first))] for of in (self._soonest.forward, self._soonest.backward)
        )
        sums = {self._staged.joins[v][0]: p.stage for p in self._programs for v in p.outputs if v in self._staged.joins}
        leaves = {*self._homes, *news.values()}
        updates, calls = list(first), dict[StageProgram, int]()
        # A fixed point: an update waits for its operands, and others for it; without one there is a cycle.
        for _ in range(len(self._programs) + 1):
            before = dict(calls), list(updates)
            makers = {v: p for p in self._programs if p.phase == "update" for v in p.outputs}
            for program in (p for p in self._programs if p.phase == "update"):
                k = program.stage
                needed = [first[k]]
                for v in program.block.inputs:
                    if v in sums:
                        needed.append(first[sums[v]] + (sums[v] != k))
                    elif v in makers:
                        needed.append(calls.get(makers[v], 0) + (makers[v].stage != k))
                calls[program] = max(needed)
                if not leaves.isdisjoint((*program.block.inputs, *program.outputs)):
                    calls[program] = updates[k] = max(updates[k], calls[program])
            if before == (calls, updates):
                break
        else:
            raise StrategyError(
                f"pipeline: the update of {self._program.name} needs sums over the weights of several stages, which "
                "without a flush are of several versions. Take a synchronous schedule"
            )
        of_phase = {"before": forward, "F": forward, "B": backward}
        self._programs = [
            replace(p, call=calls[p] if p.phase == "update" else of_phase[p.phase][p.stage]) for p in self._programs
        ]
        return tuple(updates)


def substituted(block: Block, names: Mapping[Var, Var]) -> Block:
    """Returns a block that reads other values."""

    def of(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        return tuple(names.get(a, a) if isinstance(a, Var) else a for a in atoms)

    equations = tuple(replace(e, inputs=of(e.inputs)) for e in block.equations)
    inputs = tuple(dict.fromkeys(names.get(v, v) for v in block.inputs))
    return Block(inputs, equations, of(block.outputs))


def _line(program: StageProgram, leaf: Var) -> str:
    return next((e.where for e in program.block.equations if leaf in e.inputs), "an unknown line")


# --- SpecTrain: forwards and backwards read the weights that are predicted for their minibatch's last backward ---
#
# W + s u: u is the change by the last update, whatever the optimizer (-eta v of momentum SGD), 0 before the first one;
# s counts the updates of the stage from the task's start to that of stage 0's backward (`cost.stage_time`). For a table
# that is trained on touched rows, u is the change of those that the last update touched, and 0 for all others: it is
# kept with their numbers, and added to the rows that a minibatch reads.
#
# Source: SpecTrain (Chen et al., 2018), section 3.2, equation 4.


def with_prediction(staged: StagedStep, ahead: Sequence[tuple[int, int]]) -> StagedStep:
    """Returns the step whose tasks predict their weights. `ahead`: s of each stage's forwards and backwards."""
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
    asynchronous = replace(
        staged.asynchronous,
        news=news,
        differences={x: change.leaves for x, change in changes.items()},
        ahead=tuple(map(tuple, ahead)),
    )
    return replace(staged, programs=tuple(programs), homes=homes, divided=divided, asynchronous=asynchronous)


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of a weight by its last update, kept in leaves of the pipeline's own."""

    values: Var  #: The change of the whole weight, or of some of its rows.
    #: int32[U], the rows' numbers, sorted; from the extent on for padding. None for a whole weight.
    rows: Var | None = None
    commit: Equation | None = None  #: The equation that writes the rows.

    @property
    def leaves(self) -> tuple[Var, ...]:
        return (self.values,) if self.rows is None else (self.values, self.rows)


def _changes(staged: StagedStep) -> dict[Var, _Change]:
    """Returns the weights that move, with the leaves of their changes."""
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
    """Returns a program that reads its weights `steps` updates ahead."""
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
    return replace(program, block=Block(inputs, tuple(ahead), body.outputs))


def _pulling_ahead(pull: Equation, change: _Change, steps: int) -> Iterator[Equation]:
    """Yields a pull of rows, of which those that the last update touched are predicted."""
    (leaf, route), axis, pulled = pull.inputs, pull.params["axis"], Var(pull.outputs[0].type)
    yield replace(pull, outputs=(pulled,))
    numbers = _numbers(pull, leaf.shape[axis], route)
    yield numbers

    def predicted(rows: Array, numbers: Array, values: Array, touched: Array) -> Array:
        index = jnp.minimum(jnp.searchsorted(touched, numbers), touched.shape[0] - 1)
        is_touched = jnp.expand_dims(touched[index] == numbers, [k for k in range(rows.ndim) if k != axis])
        return rows + steps * jnp.where(is_touched, jnp.take(values, index, axis), jnp.zeros_like(rows))

    yield from expand(predicted, pull, (pulled, numbers.outputs[0], *change.leaves), pull.outputs[0])


def _telling_changes(
    program: StageProgram, olds: Mapping[Var, tuple[Var, _Change]]
) -> tuple[StageProgram, dict[Var, Var]]:
    """Returns an update that also returns the changes of its weights, and the new values of their leaves.

    `olds`: new value of a weight -> the weight, its change.
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

        # Padding after the sorted rows, with the number of some row, becomes no row.
        def in_order(numbers: Array, extent: int = extent) -> Array:
            return jnp.where(numbers < jax.lax.cummax(numbers), extent, numbers)

        touched = made[change.leaves[1]] = Var(change.leaves[1].type)
        equations += expand(in_order, change.commit, equations[-1].outputs, touched)
    outputs = (*block.outputs, *made.values())
    return replace(program, block=Block(tuple(dict.fromkeys(inputs)), tuple(equations), outputs)), made


def _numbers(like: Equation, extent: int, route: Atom) -> Equation:
    type_ = ArrayType((route.type.rows,), np.dtype(np.int32))
    params = {"axis": 0, "shape": type_.shape, "dtype": type_.dtype, "extent": extent}
    return _like(like, "ap.row_iota", (route,), Var(type_), params)


def _like(like: Equation, op: str, inputs: tuple[Atom, ...], output: Var, params: Params) -> Equation:
    return replace(like, op=op, inputs=inputs, outputs=(output,), params=params)
