"""The programs of each stage: its forward and backward, what comes before the microbatches, and its update.

What is made of scalars alone, such as learning rates and the factor of a clip, is computed wherever it is read, so that
only sums cross stages. What all microbatches share and no weight is part of, such as the random bits of a dropout mask,
is computed once by each stage that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from autopar import jax_compat
from autopar.analysis.stages import NOWHERE, Label
from autopar.ir.pipeline import PHASES, Phase, Pipeline, StagedStep, StageProgram
from autopar.ir.program import Atom, Block, Equation, Literal, Program, Var
from autopar.passes.staging.parts import SMALL, Parts, homes_before, read_by, update_homes

#: Phase, stage, level.
_Key = tuple[Phase, int, int]


@dataclass(eq=False)
class StageCutter:
    """Hands out equations to programs.

    Attributes:
      program, parts, pipeline: What is cut, and how.
      labels: Of the gradient program's equations.
      homes: The stage of each leaf of the state.
      weights: In order.
      axes: Of values that are divided over the devices of a stage the axis.
    """

    program: Program
    parts: Parts
    labels: Mapping[Equation, Label]
    homes: Mapping[Var, int]
    weights: tuple[Var, ...]
    pipeline: Pipeline
    axes: Mapping[Var, int]
    #: The equations of each program.
    equations: dict[_Key, list[Equation]] = field(default_factory=dict)
    #: Values that every program computes by itself -> what makes them.
    anywhere: dict[Var, Equation] = field(default_factory=dict)
    #: Values that every stage computes once, ahead of the microbatches -> what makes them.
    shared: dict[Var, Equation] = field(default_factory=dict)

    def run(self) -> StagedStep:
        """Returns the programs."""
        parts = self.parts
        outer = read_by(parts)
        inside = dict(zip(parts.body.inputs, parts.step.params["axes"], strict=True))
        pieces = {v: (outer[v], axis) for v, axis in inside.items() if axis is not None}
        renamed = {v: outer[v] for v, axis in inside.items() if axis is None}
        self._before()
        for equation in parts.body.equations:
            label = self.labels[equation]
            inputs = tuple(renamed.get(a, a) if isinstance(a, Var) else a for a in equation.inputs)
            equation = dataclasses.replace(equation, inputs=inputs)
            if label.stage == NOWHERE:
                self.anywhere.update(dict.fromkeys(equation.outputs, equation))
            else:
                self.equations.setdefault((label.direction, label.stage, 0), []).append(equation)
        self._update()
        joins = dict(self._joins(renamed))
        return StagedStep(
            stages=self.pipeline.count,
            microbatches=self.pipeline.microbatch_count,
            inputs=self.program.block.inputs,
            parts=pieces,
            programs=self._programs(joins),
            joins=joins,
            homes=self.homes,
            weights=self.weights,
            outputs=self.program.block.outputs,
            new_leaves=dict(self._new_leaves()),
            divided=self._divided(),
        )

    def _new_leaves(self) -> Iterator[tuple[Var, int]]:
        block = self.program.block
        for leaf, out in self.program.new_states.items():
            atom, old = block.outputs[out], block.inputs[leaf]
            if isinstance(atom, Var) and atom.shape and old in self.homes and not jax_compat.is_key(old.dtype):
                yield atom, self.homes[old]

    def _divided(self) -> dict[Var, int]:
        """Returns the values that are divided; a leaf's new value as the leaf is."""
        block, axes = self.program.block, dict(self.axes)
        for leaf, out in self.program.new_states.items():
            atom, axis = block.outputs[out], axes.get(block.inputs[leaf])
            if isinstance(atom, Var) and axis is not None:
                axes[atom] = axis
            elif isinstance(atom, Var):
                axes.pop(atom, None)
        return axes

    def _joins(self, renamed: Mapping[Var, Var]) -> Iterator[tuple[Var, tuple[Var, str | int]]]:
        """Yields what is joined over the microbatches. Each copies what none of them makes, or what is joined twice."""
        labels = {v: self.labels[e] for e in self.parts.body.equations for v in e.outputs}
        step, joined = self.parts.step, set[Var]()
        for inner, outer, join in zip(self.parts.body.outputs, step.outputs, step.params["joins"], strict=True):
            label = labels.get(inner) if isinstance(inner, Var) else None
            if isinstance(inner, Var) and label is not None and inner not in joined:
                joined.add(inner)
                yield inner, (outer, join)
                continue
            source = renamed.get(inner, inner) if isinstance(inner, Var) else inner
            stage = self.homes.get(source, self.pipeline.count - 1) if isinstance(source, Var) else 0
            key: _Key = ("F", stage, 0)
            if label is not None and label.stage != NOWHERE:
                key = (label.direction, label.stage, 0)
            copy = Var(inner.type)
            equation = Equation("copy", (source,), (copy,), primitive=jax.lax.copy_p)
            self.equations.setdefault(key, []).append(equation)
            yield copy, (outer, join)

    def _before(self) -> None:
        """Places what all microbatches have: with the deepest weight that it depends on, or at each stage that reads
        it.

        Without a flush a backward reads other versions of the weights than its forward did, so each makes its own.
        """
        homes = homes_before(self.parts, self.homes)
        for equation in self.parts.before:
            if equation.outputs[0] in homes and self.pipeline.is_asynchronous:
                self.anywhere.update(dict.fromkeys(equation.outputs, equation))
            elif equation.outputs[0] in homes:
                self.equations.setdefault(("before", homes[equation.outputs[0]], 0), []).append(equation)
            else:
                self.shared.update(dict.fromkeys(equation.outputs, equation))

    def _update(self) -> None:
        """Places each equation of the update where its leaf is, else its largest operand; levels count the
        crossings."""
        homes: dict[Var, int] = dict(self.homes)
        made = {v: self.labels[e].stage for e in self.parts.body.equations for v in e.outputs}
        pairs = zip(self.parts.body.outputs, self.parts.step.outputs, strict=True)
        homes.update({outer: max(made.get(inner, 0), 0) if isinstance(inner, Var) else 0 for inner, outer in pairs})
        levels: dict[Var, int] = {}
        of_leaves = update_homes(self.parts, self.homes)
        for equation in self.parts.after:
            atoms = [a for a in equation.inputs if isinstance(a, Var)]
            apart = [a for a in atoms if a not in self.anywhere and a not in self.shared]
            large = [a for a in apart if getattr(a.type, "size", SMALL + 1) > SMALL]
            if not large:
                self.anywhere.update(dict.fromkeys(equation.outputs, equation))
                continue
            known = [a for a in atoms if a in homes]
            stage = homes[max(known, key=lambda a: getattr(a.type, "size", 0))] if known else 0
            stage = of_leaves.get(equation.outputs[0], stage)
            level = max((self._level(a, stage, homes, levels) for a in atoms), default=0)
            self.equations.setdefault(("update", stage, level), []).append(equation)
            homes.update(dict.fromkeys(equation.outputs, stage))
            levels.update(dict.fromkeys(equation.outputs, level))

    def _level(self, atom: Atom, stage: int, homes: Mapping[Var, int], levels: Mapping[Var, int]) -> int:
        if isinstance(atom, Literal):
            return 0
        if atom in self.anywhere:
            return max((self._level(a, stage, homes, levels) for a in self.anywhere[atom].inputs), default=0)
        return levels[atom] + (homes[atom] != stage) if atom in levels else 0

    def _programs(self, joins: Mapping[Var, tuple[Var, str | int]]) -> tuple[StageProgram, ...]:
        """Returns the programs of the equations that were found, with what every program or stage computes by
        itself."""
        whole = {key: self._whole(equations) for key, equations in self.equations.items()}
        outputs = [a for a in self.program.block.outputs if isinstance(a, Var)]
        made = {v for equations in whole.values() for e in equations for v in e.outputs}
        last = self.pipeline.count - 1
        update: _Key = ("update", last, max((level for phase, _, level in whole if phase == "update"), default=0) + 1)
        for atom in (*joins, *outputs):
            if atom in self.anywhere and atom not in made:
                key: _Key = ("F", last, 0) if atom in joins else update
                whole[key] = self._whole([*whole.get(key, []), self.anywhere[atom]])
        self._add_shared(whole, outputs)
        kept = {a for equations in whole.values() for a in _inputs(equations)} | {*joins, *outputs}
        known = {*joins, *outputs}
        programs, told = [], set[tuple[int, Var]]()
        for (phase, stage, level), equations in sorted(whole.items(), key=lambda item: _position(*item[0])):
            values = [v for e in equations for v in e.outputs if v in kept]
            values = [v for v in values if v not in self.anywhere or (v in known and (stage, v) not in told)]
            told.update((stage, v) for v in values)
            block = Block(tuple(_inputs(equations)), tuple(equations), tuple(values))
            programs.append(StageProgram(phase, stage, level, block))
        return tuple(programs)

    def _add_shared(self, whole: dict[_Key, list[Equation]], outputs: Iterable[Var]) -> None:
        """Adds what stages read of shared values, computed by a program of their own ahead of the microbatches."""
        wanted: dict[int, dict[Var, None]] = {}
        for (_, stage, _), equations in whole.items():
            wanted.setdefault(stage, {}).update(dict.fromkeys(a for a in _inputs(equations) if a in self.shared))
        wanted.setdefault(self.pipeline.count - 1, {}).update(dict.fromkeys(a for a in outputs if a in self.shared))
        for stage, values in wanted.items():
            own = _with_sources([self.shared[v] for v in values], self.shared)
            if own:
                whole["before", stage, 0] = [*own, *whole.get(("before", stage, 0), [])]

    def _whole(self, equations: Sequence[Equation]) -> list[Equation]:
        return _with_sources(equations, self.anywhere)


def _with_sources(equations: Sequence[Equation], made_by: Mapping[Var, Equation]) -> list[Equation]:
    """Orders equations, each behind those that make what it reads, as far as these are known."""
    ordered: dict[int, Equation] = {}

    def add(equation: Equation) -> None:
        if id(equation) in ordered:
            return
        for atom in equation.inputs:
            if isinstance(atom, Var) and atom in made_by:
                add(made_by[atom])
        ordered[id(equation)] = equation

    for equation in equations:
        add(equation)
    return list(ordered.values())


def _position(phase: Phase, stage: int, level: int) -> tuple[int, int, int]:
    return PHASES.index(phase), level, stage


def _inputs(equations: Sequence[Equation]) -> list[Var]:
    made = {v for e in equations for v in e.outputs}
    return list(dict.fromkeys(a for e in equations for a in e.inputs if isinstance(a, Var) and a not in made))
