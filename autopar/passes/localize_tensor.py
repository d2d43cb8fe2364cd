"""Writes the program of one device of a tensor axis: `localize` again, over the devices that divide products.

Weights are in shards along the decided axis (`analysis.tensor`). From there on a value is whole, an equal shard or a
partial sum, as among the devices of a batch; sums are reduced where a nonlinear equation reads them: one AllReduce for
a pair of products. Each device runs operations over the batch's devices by itself: on shards and partial sums if the
result is the same, else on the whole. Rows of tables are whole here.

Source: Megatron-LM (Shoeybi et al., 2019), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.local import LocalFacts, Reduction, Spread, State
from autopar.ir.operations import PREFIX
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import Block, Equation, Program, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.slicing import eliminate_dead, nearest_line
from autopar.passes.local_forms import Localization
from autopar.passes.localize import Localizer

#: Operations on each element, or on each part along another axis than the shards'.
_APART = frozenset(
    f"{PREFIX}{name}"
    for name in ("once", "microbatch_once", "reduce", "replicate", "shard", "microbatch_shard", "only_examples")
)


def localize_tensor(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the program of one device of the tensor axis, and a note.

    `program`: localized over the batch's devices. `bound`: says along which axes leaves are divided. Raises NotLocal if
    an equation can't run on a part of its operands.
    """
    if bound.plan.tensor is None or not bound.tensors:
        return program, "no products are divided"
    walk = _TensorPart(_shared(bound, bound.plan.tensor.devices))
    axes = [bound.tensors.get(k) for k in range(len(program.block.inputs))]
    states: list[State] = [None if axis is None else Spread(axis) for axis in axes]
    inputs = [walk.define(v, s) for v, s in zip(program.block.inputs, states, strict=True)]
    outputs, returned = walk.program(program, states)
    block, _ = eliminate_dead(Block(tuple(inputs), tuple(walk.equations), tuple(outputs)))
    shared = walk.shared
    facts = LocalFacts(tuple(returned), frozenset(), tuple(shared.reductions), tuple(shared.gathered))
    local = replace(known(program.local), reductions=tuple(_reductions(block)), tensor=facts)
    return replace(program, block=block, local=local), f"{len(shared.reductions)} sums of divided products"


def localize_stages(staged: StagedStep, bound: ProgramPlan, devices: int) -> tuple[StagedStep, str]:
    """Writes the programs of a pipeline's stages as those of one device of the tensor axis (`StageProgram.local`).

    `staged`: the programs, and which values are divided; none may be. `bound`: the plan. `devices`: T. Raises NotLocal
    if an equation can't run on a part of its operands.
    """
    shared, programs = _shared(bound, devices), []
    states = {v: Spread(axis) for v, axis in staged.divided.items()}
    for program in staged.programs:
        walk, block = _TensorPart(shared), program.block
        inputs = tuple(walk.define(v, states.get(v)) for v in block.inputs)
        walk.rewrite(block)
        outputs = tuple(walk.as_state(v, states.get(v), nearest_line(block, v)) for v in program.outputs)
        local, _ = eliminate_dead(Block(inputs, tuple(walk.equations), outputs))
        programs.append(replace(program, local=local))
    note = f"{len(shared.reductions)} sums of divided products"
    return replace(staged, programs=tuple(programs)), note


def _shared(bound: ProgramPlan, devices: int) -> Localization:
    alone = replace(bound.plan, devices=devices)
    over = replace(bound, plan=alone, families=(), shards={}, undivided=0)
    return Localization(over, True, "tensor_")


def _reductions(block: Block, *, nested: bool = False) -> Iterator[Reduction]:
    for equation in block.equations:
        if equation.op == "ap.reduce":
            yield Reduction(equation.inputs[0].type, equation.params["op"], nested, equation.source)
        for body in equation.bodies:
            yield from _reductions(body, nested=True)


@dataclass(eq=False)
class _TensorPart(Localizer):
    """One block being rewritten."""

    def nested_walk(self) -> Localizer:
        return _TensorPart(self.shared, True)

    def result_state(self, state: State) -> State:
        return None

    @property
    def delays_sums(self) -> bool:
        return False

    def part_state(self, state: State, axis: int, size: int) -> State:
        """Keeps shards, unless they are along the axis of the examples."""
        return state if isinstance(state, Spread) and state.axis != axis else None

    def add(self, equation: Equation) -> None:
        if equation.op in _APART:
            self._apart(equation)
        elif equation.op.startswith(PREFIX) and equation.op != "ap.microbatches":
            self.copy(self.with_whole_operands(equation, range(len(equation.inputs))))
        else:
            super().add(equation)

    def _partial(self, equation: Equation, partial: Sequence[bool]) -> bool:
        size = sum(a.type.size for a, is_sum in zip(equation.inputs, partial, strict=True) if is_sum)
        if equation.op == "dot_general" and size < equation.outputs[0].type.size:
            return False
        return super()._partial(equation, partial)

    def _apart(self, equation: Equation) -> None:
        """Writes an operation over the batch's devices, on a device's part of the value."""
        (atom,), params = equation.inputs, equation.params
        state = self.state(atom)
        if isinstance(state, Spread):
            state = self.part_state(state, params.get("axis", -1), 0)
        elif params.get("op", "sum") != "sum" or "axis" in params:
            state = None
        self.copy(self.with_whole_operands(equation, (0,)) if state is None else equation, [state])
