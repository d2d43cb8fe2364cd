"""Cuts a step with separate microbatches into the programs of its stages.

`split_update` has made the gradient program of one microbatch. Here its equations go to the forward or backward program
of a stage (`staging.parts`), and those of the update to the stages of their leaves. The update adds up gradients that
are sums over stages (of tied embeddings).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from autopar import jax_compat
from autopar.analysis.tensor import Division
from autopar.cost.rates import Measurements
from autopar.cost.stage_time import choose_slack, pipeline_memory, stage_times, steps_ahead
from autopar.errors import StrategyError
from autopar.ir.figures import format_bytes
from autopar.ir.pipeline import PHASES, Calls, Phase, Pipeline, StagedStep, StageProgram
from autopar.ir.plan import PipelinePlan, StagePlan
from autopar.ir.program import Atom, Block, Equation, Literal, Program, Var
from autopar.ir.schedule import AsynchronousRule
from autopar.ir.slicing import free_values
from autopar.passes.staging.asynchronous import with_prediction, without_flush
from autopar.passes.staging.loads import DividedLeaves, StageLoad, held_bytes, stage_loads
from autopar.passes.staging.parts import (
    NOWHERE,
    SMALL,
    Label,
    Parts,
    find_parts,
    homes_before,
    label_parts,
    other_homes,
    read_by,
    untied,
    update_homes,
    with_remat,
)
from autopar.passes.staging.stages import choose_stages


def split_pipeline(
    program: Program, pipeline: Pipeline, measured: Measurements, divided: DividedLeaves
) -> tuple[StagedStep, PipelinePlan]:
    """Returns the programs of each stage, and the plan of the stages, of a program that `split_update` has cut.

    `measured`: rates and memory of the stages' devices. `divided`: leaves that are divided over the devices of a stage.
    Raises StrategyError for more stages than there are weights to cut at, patterns that don't cover the weights,
    effects, or a stage that exceeds its device's memory.
    """
    effect = next((e for e in program.block.walk() if e.effects), None)
    if effect is not None:
        raise StrategyError(
            f"pipeline: {program.name} has an effect, {effect.op} ({effect.where}), and stages may run it several "
            "times. Leave it out, or run the step without pipeline="
        )
    chosen = choose_stages(program, pipeline, measured, divided)
    program, weights = chosen.cut.program, tuple(chosen.homes)
    parts = find_parts(program)
    homes = chosen.homes | other_homes(program, parts, chosen.homes)
    parts = untied(parts, homes, pipeline.count)
    splits = pipeline.scheduled(pipeline.microbatch_count).splits_backward
    labels = label_parts(parts, homes, pipeline.count, splits_backward=splits)
    if pipeline.remat:
        parts, labels = with_remat(parts, labels, pipeline.count)
    division = divided.within(chosen.cut).follow(parts)
    loads = stage_loads(parts, labels, homes, pipeline.stage_devices, division)
    plan = _plan(program, pipeline, weights, homes, loads, division, measured)
    statistics = parts.step.params.get("statistics", ())
    plan = replace(plan, statistics=statistics, tensor=divided.devices)
    staged = StageCutter(program, parts, labels, homes, weights, pipeline, division.axes).run()
    if isinstance(pipeline.rule, AsynchronousRule):
        staged, plan = _without_flush(staged, program, plan, pipeline, measured)
    _check_memory(plan, measured)
    return replace(staged, inputs=chosen.cut.inputs, outputs=chosen.cut.outputs), plan


def _without_flush(
    staged: StagedStep, program: Program, plan: PipelinePlan, pipeline: Pipeline, measured: Measurements
) -> tuple[StagedStep, PipelinePlan]:
    """Returns the step and its plan for minibatches that follow one another without a flush."""
    rule = pipeline.rule
    assert isinstance(rule, AsynchronousRule), "it has no flush"
    plan = replace(plan, statistics=())
    slack = pipeline.slack
    if slack is None:
        slack = fitting_slack(plan, choose_slack(plan.stage_devices, stage_times(_later(plan, 0))), measured.memory)
    staged = without_flush(staged, program, plan.stage_devices, stashes=rule.stashes, slack=slack)
    assert staged.asynchronous is not None, "it has just been made"
    calls = staged.asynchronous.calls
    plan = replace(plan, updates=calls.updates, last=calls.last, slack=slack)
    if not rule.predicts:
        return staged, plan
    ahead = pipeline.ahead or steps_ahead(calls, stage_times(plan))
    return with_prediction(staged, ahead), replace(plan, ahead=tuple(ahead))


def fitting_slack(plan: PipelinePlan, asked: int, memory: int | None) -> int:
    """Returns `asked` minibatches of slack, or as many as fit devices of `memory` bytes."""
    if memory is None:
        return asked
    fits = (slack for slack in range(asked, 0, -1) if max(pipeline_memory(_later(plan, slack))) <= memory)
    return next(fits, 0)


def _later(plan: PipelinePlan, slack: int) -> PipelinePlan:
    calls = Calls.soonest(plan.stage_devices, slack=slack)
    return replace(plan, updates=calls.updates, last=calls.last, slack=slack)


def _plan(
    program: Program,
    pipeline: Pipeline,
    weights: Sequence[Var],
    homes: Mapping[Var, int],
    loads: Sequence[StageLoad],
    division: Division,
    measured: Measurements,
) -> PipelinePlan:
    paths = {v: leaf.path for v, leaf in program.named_inputs}
    rates, stages = measured.stages, []
    for k, load in enumerate(loads):
        stages.append(
            StagePlan(
                devices=pipeline.stage_devices[k],
                weights=tuple(paths[v] for v in weights if homes[v] == k),
                seconds={} if rates is None else load.seconds(rates),
                update_s=0.0 if rates is None else rates.seconds(0.0, 2 * load.state + load.gradient),
                flops=sum(load.flops.values()),
                ahead_bytes=load.ahead,
                back_bytes=load.back,
                state_bytes=load.state + sum(load.copies.values()),
                gradient_bytes=load.gradient,
                weight_bytes=sum(held_bytes(v, division) for v in weights if homes[v] == k),
                activation_bytes=load.activation,
                exchanged_bytes=round(sum(load.exchanged.values())),
                exchanges=sum(load.calls.values()),
            )
        )
    return PipelinePlan(
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatch_count,
        stages=tuple(stages),
        stages_per_device=pipeline.chunks,
        remat=bool(pipeline.remat),
        tied_bytes=sum(load.tied for load in loads),
        send_byte_s=0.0 if rates is None else rates.send_byte_s,
    )


def _check_memory(plan: PipelinePlan, measured: Measurements) -> None:
    """Raises StrategyError for a device that can't hold its stages."""
    for device, size in enumerate(pipeline_memory(plan)):
        if measured.memory is not None and size > measured.memory:
            stage = next(k for k, stage in enumerate(plan.stages) if device in stage.devices)
            own = plan.stages[stage]
            raise StrategyError(
                f"pipeline: stage {stage} needs {format_bytes(size)}, and its device has "
                f"{format_bytes(measured.memory)}: its state takes {format_bytes(own.state_bytes)}, gradients "
                f"{format_bytes(own.gradient_bytes)}, a microbatch's activations {format_bytes(own.activation_bytes)}. "
                "Give more stages or microbatches, schedule='1f1b', or remat=True"
            )


# --- the programs of each stage: its forward and backward, the part before the microbatches, and its update ---
#
# Functions of scalars alone, such as learning rates and the factor of a clip, are computed wherever they are read, so
# that only sums cross stages. Values that all microbatches share and that depend on no weight, such as the random bits
# of a dropout mask, are computed once by each stage that reads them.


#: Phase, stage, level.
_Key = tuple[Phase, int, int]


@dataclass(eq=False)
class StageCutter:
    """Distributes equations over programs."""

    program: Program
    parts: Parts
    labels: Mapping[Equation, Label]  #: Labels of the gradient program's equations.
    homes: Mapping[Var, int]  #: The stage of each leaf of the state.
    weights: tuple[Var, ...]  #: In order.
    pipeline: Pipeline
    axes: Mapping[Var, int]  #: Value that is divided over the devices of a stage -> its axis.
    #: The equations of each program.
    equations: dict[_Key, list[Equation]] = field(default_factory=dict)
    #: Value that every program computes by itself -> its equation.
    anywhere: dict[Var, Equation] = field(default_factory=dict)
    #: Value that every stage computes once, before the microbatches -> its equation.
    shared: dict[Var, Equation] = field(default_factory=dict)

    def run(self) -> StagedStep:
        parts = self.parts
        outer = read_by(parts)
        inside = dict(zip(parts.body.inputs, parts.step.params["axes"], strict=True))
        pieces = {v: (outer[v], axis) for v, axis in inside.items() if axis is not None}
        renamed = {v: outer[v] for v, axis in inside.items() if axis is None}
        self._before()
        for equation in parts.body.equations:
            label = self.labels[equation]
            inputs = tuple(renamed.get(a, a) if isinstance(a, Var) else a for a in equation.inputs)
            equation = replace(equation, inputs=inputs)
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
        """Returns the divided values; a leaf's new value is divided as the leaf."""
        block, axes = self.program.block, dict(self.axes)
        for leaf, out in self.program.new_states.items():
            atom, axis = block.outputs[out], axes.get(block.inputs[leaf])
            if isinstance(atom, Var) and axis is not None:
                axes[atom] = axis
            elif isinstance(atom, Var):
                axes.pop(atom, None)
        return axes

    def _joins(self, renamed: Mapping[Var, Var]) -> Iterator[tuple[Var, tuple[Var, str | int]]]:
        """Yields values joined over the microbatches, which copy those that none of them makes, or that are joined
        twice."""
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
        """Places values of all microbatches with the deepest weight that they depend on, or at each stage that reads
        them.

        Without a flush a backward reads other versions of the weights than its forward did, so each computes its own.
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
        """Places each equation of the update with its leaf, else its largest operand; levels count the crossings."""
        homes: dict[Var, int] = dict(self.homes)
        made = {v: self.labels[e].stage for e in self.parts.body.equations for v in e.outputs}
        pairs = zip(self.parts.body.outputs, self.parts.step.outputs, strict=True)
        homes.update({outer: max(made.get(inner, 0), 0) if isinstance(inner, Var) else 0 for inner, outer in pairs})
        levels: dict[Var, int] = {}
        of_leaves = update_homes(self.parts, self.homes)
        for equation in self.parts.after:
            atoms = [a for a in equation.inputs if isinstance(a, Var)]
            apart = [a for a in atoms if a not in self.anywhere and a not in self.shared]
            # Small values (a learning rate, a count) are computed wherever they are read.
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
        """Returns the programs of the equations, with the values that every program or stage computes by itself."""
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
        kept = {a for equations in whole.values() for a in free_values(equations)} | {*joins, *outputs}
        known = {*joins, *outputs}
        programs, returned = [], set[tuple[int, Var]]()
        for (phase, stage, level), equations in sorted(whole.items(), key=lambda item: _position(*item[0])):
            values = [v for e in equations for v in e.outputs if v in kept]
            values = [v for v in values if v not in self.anywhere or (v in known and (stage, v) not in returned)]
            returned.update((stage, v) for v in values)
            block = Block(tuple(free_values(equations)), tuple(equations), tuple(values))
            programs.append(StageProgram(phase, stage, level, block))
        return tuple(programs)

    def _add_shared(self, whole: dict[_Key, list[Equation]], outputs: Iterable[Var]) -> None:
        """Adds shared values that stages read, computed by a program of their own before the microbatches."""
        wanted: dict[int, dict[Var, None]] = {}
        for (_, stage, _), equations in whole.items():
            wanted.setdefault(stage, {}).update(dict.fromkeys(a for a in free_values(equations) if a in self.shared))
        wanted.setdefault(self.pipeline.count - 1, {}).update(dict.fromkeys(a for a in outputs if a in self.shared))
        for stage, values in wanted.items():
            own = _with_sources([self.shared[v] for v in values], self.shared)
            if own:
                whole["before", stage, 0] = [*own, *whole.get(("before", stage, 0), [])]

    def _whole(self, equations: Sequence[Equation]) -> list[Equation]:
        return _with_sources(equations, self.anywhere)


def _with_sources(equations: Sequence[Equation], made_by: Mapping[Var, Equation]) -> list[Equation]:
    """Orders equations, each after those known ones that make its operands."""
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
