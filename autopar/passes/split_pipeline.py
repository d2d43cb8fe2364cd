"""Cut a step whose microbatches are apart into the programs of its stages.

`split_update` has the gradient program of one microbatch; here its equations go to the forward or backward program of
a stage (`analysis.stages`), and those of the update to where their leaves are. What is made of scalars alone, such as
learning rates and the factor of a clip, is computed wherever it is read, so that only sums cross stages. A gradient
that is a sum over stages (of tied embeddings) is summed by the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.analysis.flow import dependent
from autopar.analysis.stages import NOWHERE, Label, label_equations
from autopar.analysis.work import products
from autopar.errors import StrategyError
from autopar.ir.paths import matches
from autopar.ir.pipeline import PHASES, Phase, Pipeline, StagedStep, StageProgram
from autopar.ir.program import Atom, Block, Equation, Literal, Program, Var
from autopar.ir.slicing import eliminate_dead, needed_equations

#: Elements of what every stage computes by itself, at most: scalars.
_SMALL = 1
#: Elements that are moved in the time of a floating-point operation, for cutting only.
_MOVED = 8.0


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A program around its one `ap.microbatches` equation."""

    before: Sequence[Equation]
    step: Equation
    after: Sequence[Equation]

    @property
    def body(self) -> Block:
        return self.step.bodies[0]


def split_pipeline(program: Program, pipeline: Pipeline) -> StagedStep:
    """The programs of each stage.

    Args:
      program: A program that `split_update` has cut.
      pipeline: Stages and microbatches.

    Raises:
      StrategyError: more stages than there are weights to cut at, patterns that don't cover the weights, or effects.
    """
    effect = next((e for e in program.block.walk() if e.effects), None)
    if effect is not None:
        raise StrategyError(
            f"pipeline: {program.name} has an effect, {effect.op} ({effect.where}), and stages may run it several "
            "times. Leave it out, or run the step without pipeline="
        )
    parts = _parts(program)
    weights = _weights(program, parts)
    homes = _cut(program, parts, weights, pipeline)
    homes |= _slots(program, parts, homes)
    parts = _untied(parts, homes, pipeline.count)
    return _Cutter(program, parts, homes, tuple(weights), pipeline).run()


def _parts(program: Program) -> _Parts:
    equations = program.block.equations
    k = next(k for k, e in enumerate(equations) if e.op == "ap.microbatches")
    first = Block(program.block.inputs, equations[:k], equations[k].inputs)
    before = needed_equations(first, [a for a in first.outputs if isinstance(a, Var)])
    known = {v for e in before for v in e.outputs}
    rest = [e for e in equations[:k] if known.isdisjoint(e.outputs)]  # what the update alone reads
    return _Parts(before, equations[k], (*rest, *equations[k + 1 :]))


def _read_by(parts: _Parts) -> dict[Var, Var]:
    """Input of the microbatch's program -> what it is given."""
    pairs = zip(parts.body.inputs, parts.step.inputs, strict=True)
    return {inner: outer for inner, outer in pairs if isinstance(outer, Var)}


def _weights(program: Program, parts: _Parts) -> list[Var]:
    """Leaves of the state that the gradient program reads and the update changes, in the order of their first use."""
    whole = {v for v, axis in zip(parts.body.inputs, parts.step.params["axes"], strict=True) if axis is None}
    given = _read_by(parts)
    states = [v for k, v in enumerate(program.block.inputs) if program.inputs[k].role == "state" and v.shape]
    reached = {v: dependent(parts.before, [v]) for v in states}
    order: dict[Var, None] = {}
    for equation in parts.body.equations:
        read = {given[a] for a in equation.inputs if isinstance(a, Var) and a in whole}
        order.update(dict.fromkeys(v for v in states if v not in order and not read.isdisjoint(reached[v])))
    return list(order)


# --- where the cuts are ---


def _cut(program: Program, parts: _Parts, weights: Sequence[Var], pipeline: Pipeline) -> dict[Var, int]:
    """The stage of each weight."""
    if not isinstance(pipeline.stages, int):
        return _by_patterns(program, weights, pipeline.stages)
    if len(weights) < pipeline.stages:
        raise StrategyError(
            f"pipeline: {program.name} has {len(weights)} weights to cut between, which is too few for "
            f"{pipeline.stages} stages. Give fewer stages"
        )
    each = {v: k for k, v in enumerate(weights)}
    labels = _labels(parts, each, len(weights))
    costs = [0.0] * len(weights)
    for equation, label in labels.items():
        if label.stage != NOWHERE:
            costs[label.stage] += _cost(equation)
    ends = balanced(costs, pipeline.stages)
    return {v: sum(k >= end for end in ends) for k, v in enumerate(weights)}


def _cost(equation: Equation) -> float:
    moved = sum(a.type.size for a in equation.outputs if hasattr(a.type, "size"))
    return products(Block((), (equation,), ())) + _MOVED * moved


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Where to cut a chain of costs, so that the dearest of so many stages is as cheap as can be: ends of all but the
    last."""
    best: dict[tuple[int, int], tuple[float, int]] = {}
    totals = [0.0]
    for cost in costs:
        totals.append(totals[-1] + cost)
    for end in range(1, len(costs) + 1):
        best[1, end] = totals[end], 0
    for count in range(2, stages + 1):
        for end in range(count, len(costs) + 1):
            cuts = range(count - 1, end)
            best[count, end] = min((max(best[count - 1, c][0], totals[end] - totals[c]), c) for c in cuts)
    ends, end = [], len(costs)
    for count in range(stages, 1, -1):
        end = best[count, end][1]
        ends.append(end)
    return ends[::-1]


def _by_patterns(program: Program, weights: Sequence[Var], stages: Sequence[Sequence[str]]) -> dict[Var, int]:
    paths = {v: given.path for v, given in zip(program.block.inputs, program.inputs, strict=True)}
    found = {}
    for var in weights:
        where = [k for k, patterns in enumerate(stages) if any(matches(p, paths[var]) for p in patterns)]
        if len(where) != 1:
            which = "no stage" if not where else f"stages {', '.join(map(str, where))}"
            raise StrategyError(f"pipeline: {paths[var]} belongs to {which}; patterns must give it to one")
        found[var] = where[0]
    for k, patterns in enumerate(stages):
        unused = [p for p in patterns if not any(matches(p, paths[v]) for v in weights)]
        if unused:
            raise StrategyError(f"pipeline: {unused[0]!r} of stage {k} matches no weight of {program.name}")
    return found


def _labels(parts: _Parts, homes: Mapping[Var, int], stages: int) -> dict[Equation, Label]:
    """The label of each equation of the gradient program."""
    body, given = parts.body, _read_by(parts)
    depths: dict[Var, int] = dict(homes)
    for equation in parts.before:
        deepest = max((depths.get(a, NOWHERE) for a in equation.inputs if isinstance(a, Var)), default=NOWHERE)
        if deepest != NOWHERE:
            depths.update(dict.fromkeys(equation.outputs, deepest))
    weights = {inner: depths[outer] for inner, outer in given.items() if outer in depths}
    trained = _reached_weights(parts, homes)
    pairs = zip(body.outputs, parts.step.outputs, strict=True)
    gradients = {inner: homes[trained[outer]] for inner, outer in pairs if outer in trained}
    return label_equations(body, weights, gradients, stages)


def _reached_weights(parts: _Parts, homes: Mapping[Var, int]) -> dict[Var, Var]:
    """Result of the microbatches -> the weight that it is a gradient of: their update is elementwise in both."""
    groups = _elementwise(parts.after, [*homes, *parts.step.outputs])
    weights = {groups[v]: v for v in reversed(list(homes)) if v in groups}
    return {v: weights[groups[v]] for v in parts.step.outputs if groups.get(v) in weights}


def _elementwise(equations: Iterable[Equation], starts: Iterable[Var]) -> dict[Var, int]:
    """Values by number: those that meet in equations of one shape have the same."""
    found = {v: k for k, v in enumerate(starts) if v.shape and v.type.size > _SMALL}
    members: dict[int, set[Var]] = {k: {v} for v, k in found.items()}
    for equation in equations:
        for out in equation.outputs:
            same = [a for a in equation.inputs if a in found and isinstance(a, Var) and a.shape == out.shape]
            numbers = sorted({found[a] for a in same})
            if not numbers:
                continue
            first = numbers[0]
            for other in numbers[1:]:
                for var in members.pop(other):
                    found[var] = first
                    members[first].add(var)
            found[out] = first
            members[first].add(out)
    return found


def _slots(program: Program, parts: _Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """The stage of the state's other leaves: that of the weight whose update they are read for."""
    states = [v for k, v in enumerate(program.block.inputs) if program.inputs[k].role == "state"]
    groups = _elementwise(parts.after, [*homes, *states, *parts.step.outputs])
    stages = {groups[v]: homes[v] for v in homes if v in groups}
    return {v: stages.get(groups.get(v, -1), 0) for v in states if v not in homes}


def _untied(parts: _Parts, homes: Mapping[Var, int], stages: int) -> _Parts:
    """Gradients that are sums over stages become one result a stage, which the update adds."""
    while True:
        labels = _labels(parts, homes, stages)
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


def _added_later(parts: _Parts, k: int, equation: Equation) -> _Parts:
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
    return _Parts(parts.before, new, (later, *parts.after))


# --- programs ---


@dataclass(eq=False)
class _Cutter:
    program: Program
    parts: _Parts
    homes: Mapping[Var, int]
    weights: tuple[Var, ...]
    pipeline: Pipeline
    #: (Phase, stage, level) -> the equations of a program.
    found: dict[tuple[Phase, int, int], list[Equation]] = field(default_factory=dict)
    #: Values that every stage computes by itself -> what makes them.
    anywhere: dict[Var, Equation] = field(default_factory=dict)

    def run(self) -> StagedStep:
        parts, count = self.parts, self.pipeline.count
        given = _read_by(parts)
        inside = {v: axis for v, axis in zip(parts.body.inputs, parts.step.params["axes"], strict=True)}
        pieces = {v: (given[v], axis) for v, axis in inside.items() if axis is not None}
        renamed = {v: given[v] for v, axis in inside.items() if axis is None}
        self._before()
        labels = _labels(parts, self.homes, count)
        for equation in parts.body.equations:
            label = labels[equation]
            equation = dataclasses.replace(
                equation, inputs=tuple(renamed.get(a, a) if isinstance(a, Var) else a for a in equation.inputs)
            )
            if label.stage == NOWHERE:
                self.anywhere.update(dict.fromkeys(equation.outputs, equation))
            else:
                self.found.setdefault(("F" if label.direction == "F" else "B", label.stage, 0), []).append(equation)
        self._update()
        joins = {}
        for inner, outer, join in zip(parts.body.outputs, parts.step.outputs, parts.step.params["joins"], strict=True):
            value = renamed.get(inner, inner) if isinstance(inner, Var) else inner
            assert isinstance(value, Var), "what is joined is a value"
            joins[value] = outer, join
        return StagedStep(
            count,
            self.pipeline.microbatches,
            self.program.block.inputs,
            pieces,
            self._programs(joins),
            joins,
            self.homes,
            self.weights,
            self.program.block.outputs,
        )

    def _before(self) -> None:
        """What all microbatches have: with the deepest weight that it depends on, or wherever it is read."""
        depths = dict(self.homes)
        for equation in self.parts.before:
            deepest = max((depths.get(a, NOWHERE) for a in equation.inputs if isinstance(a, Var)), default=NOWHERE)
            if deepest == NOWHERE:
                self.anywhere.update(dict.fromkeys(equation.outputs, equation))
            else:
                depths.update(dict.fromkeys(equation.outputs, deepest))
                self.found.setdefault(("before", deepest, 0), []).append(equation)

    def _update(self) -> None:
        """Each equation with its largest operand; levels count how often values have crossed."""
        homes: dict[Var, int] = dict(self.homes)
        labels = _labels(self.parts, self.homes, self.pipeline.count)
        made = {v: labels[e].stage for e in self.parts.body.equations for v in e.outputs}
        pairs = zip(self.parts.body.outputs, self.parts.step.outputs, strict=True)
        homes.update({outer: made.get(inner, 0) if isinstance(inner, Var) else 0 for inner, outer in pairs})
        levels: dict[Var, int] = {}
        for equation in self.parts.after:
            atoms = [a for a in equation.inputs if isinstance(a, Var)]
            large = [a for a in atoms if a not in self.anywhere and getattr(a.type, "size", _SMALL + 1) > _SMALL]
            if not large:
                self.anywhere.update(dict.fromkeys(equation.outputs, equation))
                continue
            known = [a for a in atoms if a in homes]
            stage = homes[max(known, key=lambda a: getattr(a.type, "size", 0))] if known else 0
            level = max((self._level(a, stage, homes, levels) for a in atoms), default=0)
            self.found.setdefault(("update", stage, level), []).append(equation)
            homes.update(dict.fromkeys(equation.outputs, stage))
            levels.update(dict.fromkeys(equation.outputs, level))

    def _level(self, atom: Atom, stage: int, homes: Mapping[Var, int], levels: Mapping[Var, int]) -> int:
        """The level at which a stage has a value."""
        if isinstance(atom, Literal):
            return 0
        if atom in self.anywhere:
            return max((self._level(a, stage, homes, levels) for a in self.anywhere[atom].inputs), default=0)
        return levels[atom] + (homes[atom] != stage) if atom in levels else 0

    def _programs(self, joins: Mapping[Var, tuple[Var, str | int]]) -> tuple[StageProgram, ...]:
        """Blocks of the equations that were found, with what every stage computes by itself where it is read."""
        whole = {k: self._whole(equations) for k, equations in self.found.items()}
        wanted = {a for equations in whole.values() for a in _inputs(equations)} | set(joins)
        outputs = [a for a in self.program.block.outputs if isinstance(a, Var)]
        wanted.update(outputs)
        alone = [a for a in (*joins, *outputs) if a in self.anywhere and not self._is_made(a, whole)]
        last, level = self.pipeline.count - 1, self._highest(whole)
        for atom in alone:
            key: tuple[Phase, int, int] = ("F", last, 0) if atom in joins else ("update", last, level)
            whole[key] = self._whole([*self.found.get(key, []), self.anywhere[atom]])
            self.found[key] = whole[key]
            wanted.update(_inputs(whole[key]))
        programs = []
        for (phase, stage, level), equations in sorted(whole.items(), key=lambda item: _position(*item[0])):
            made = [v for e in equations for v in e.outputs if v in wanted]
            kept = [v for v in made if v not in self.anywhere or v in joins or v in outputs]
            block = Block(tuple(_inputs(equations)), tuple(equations), tuple(kept))
            programs.append(StageProgram(phase, stage, level, block))
        return tuple(programs)

    def _highest(self, whole: Mapping[tuple[Phase, int, int], object]) -> int:
        return max((level for phase, _, level in whole if phase == "update"), default=0) + 1

    def _is_made(self, atom: Var, whole: Mapping[tuple[Phase, int, int], Sequence[Equation]]) -> bool:
        return any(atom in e.outputs for equations in whole.values() for e in equations)

    def _whole(self, equations: Sequence[Equation]) -> list[Equation]:
        """Equations with those that make what they read and every stage computes by itself."""
        found: dict[int, Equation] = {}

        def add(equation: Equation) -> None:
            if id(equation) in found:
                return
            for atom in equation.inputs:
                if isinstance(atom, Var) and atom in self.anywhere:
                    add(self.anywhere[atom])
            found[id(equation)] = equation

        for equation in equations:
            add(equation)
        return list(found.values())


def _position(phase: Phase, stage: int, level: int) -> tuple[int, int, int]:
    """Where a program stands among the others."""
    return PHASES.index(phase), level, stage


def _inputs(equations: Sequence[Equation]) -> list[Var]:
    """What equations read that none of them makes."""
    made = {v for e in equations for v in e.outputs}
    return list(dict.fromkeys(a for e in equations for a in e.inputs if isinstance(a, Var) and a not in made))
