"""Cuts a step into its gradient program, run once for each microbatch, and its update, run once.

The gradient program G works on examples, up to the sums over them; the update U follows from the sums, so that U(state,
G(state, batch)) is the step. Microbatches are `localize` over time in place of devices: G is the program of one of M
parts of the batch, with its part of every value that runs over the examples (dropout masks and positions among them),
and partial sums add up over the microbatches. A sum over all examples that G itself reads comes before G if it doesn't
depend on the weights, such as the number of tokens that a mean divides by. Batch norm's statistics do depend on them:
the step is refused with its line. Sources: GPipe (Huang et al., 2018), section 2.2; docs/pipelines.md.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.flow import dependent
from autopar.analysis.work import PRODUCTS
from autopar.errors import StrategyError
from autopar.ir.local import NotLocal, Spread, State
from autopar.ir.operations import PREFIX
from autopar.ir.program import Atom, Block, Equation, Literal, Program, Source, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.slicing import clone, copied, eliminate_dead, halves, nearest_line, needed_equations, reduce_equation
from autopar.passes.local_forms import Localization, push_partial
from autopar.passes.localize import Localizer

#: Operations whose result depends on the microbatch's number.
_BY_NUMBER = ("ap.microbatch_shard", "ap.microbatch_once")
#: A sum (or maximum) over all microbatches.
_REDUCE = "ap.microbatch_reduce"
#: Operations on placement over devices, which don't concern microbatches.
_PLACING = ("ap.replicate", "ap.spread", "ap.store", "ap.whole")
#: Operations that don't change a sum's size.
_SCALES = ("mul", "div", "neg")
#: Operations on the ids of all microbatches.
_OF_IDS = ("ap.row_ids", "ap.route")


def split_update(program: Program, bound: ProgramPlan, *, own_statistics: bool, option: str) -> tuple[Program, str]:
    """Returns a lifted program with an `ap.microbatches` equation in place of the equations on examples.

    `own_statistics`: a sum over the batch that examples read is replaced by each microbatch's sum, times M, which
    changes the function (batch norm in GPipe, section 2.2). `option`: the option of `parallelize` that cuts the step if
    there is one microbatch. Raises StrategyError if a microbatch depends on the examples of the others.
    """
    count = bound.plan.microbatches
    try:
        return _split(program, bound, count, own_statistics)
    except NotLocal as error:
        what, wrong, out = f"microbatches={count}", "isn't the same function of a batch in parts", "microbatches="
        other = " (Pipeline(statistics='microbatch') takes sums over each microbatch, which is another function)"
        if count == 1:
            what, wrong, out, other = option[:-1], "can't be cut into forwards, backwards and updates", option, ""
        remedy = error.remedy or (
            f"Say with batch_axis= which leaves of the batch have no examples, or leave {out} out.{other}"
        )
        raise StrategyError(f"{what}: {program.name} {wrong}: {error}. {remedy}") from error


def _split(program: Program, bound: ProgramPlan, count: int, own_statistics: bool) -> tuple[Program, str]:
    walk = _Microbatch(_shared(program, bound, count), program)
    axes = _axes(program, bound)
    inputs: list[State] = [None if axis is None else Spread(axis) for axis in axes]
    parts: dict[Var, Var] = {}
    for var, state in zip(program.block.inputs, inputs, strict=True):
        if state is None:
            walk.env[var] = var, None
        else:
            parts[walk.define(var, state)] = var
    outputs, states = walk.program(program, inputs)
    batch_axes = {v: axis for v, axis in zip(program.block.inputs, axes, strict=True) if axis is not None}
    local, _ = eliminate_dead(Block(tuple(parts), tuple(walk.equations), tuple(outputs)))
    local = _with_same_apart(local)
    statistics: tuple[Source | None, ...] = ()
    if own_statistics:
        local, statistics = _with_own_statistics(local, count)
    before, body, after = _divide(local)
    _check_divided(program, walk, before, body)
    joined = [e for e in local.equations if e.op == _REDUCE]
    stacked = {a: s.axis for a, s in zip(outputs, states, strict=True) if isinstance(s, Spread)}
    values = [e.inputs[0] for e in joined] + list(stacked)
    results = [e.outputs[0] for e in joined]
    results += [Var(a.type.resized(axis, a.shape[axis] * count)) for a, axis in stacked.items()]
    joins = [e.params["op"] for e in joined] + list(stacked.values())
    late = {v for e in after for v in e.outputs}.intersection(values)
    if late:
        raise NotLocal("a result for each example depends on a sum over all", _line(local, late.pop()))
    made = {v for e in body for v in e.outputs} | set(parts)
    needed = dict.fromkeys(
        a for e in (*body, Equation("ap.any", tuple(values), ())) for a in e.inputs if isinstance(a, Var)
    )
    whole = [v for v in needed if v not in made]
    used = [v for v in parts if v in needed]
    microbatch, _ = clone(Block((*used, *whole), tuple(body), tuple(values)))
    params = {
        "count": count,
        "axes": (*(batch_axes[parts[v]] for v in used), *[None] * len(whole)),
        "joins": tuple(joins),
    }
    if statistics:
        params["statistics"] = tuple(map(str, statistics))
    step = Equation("ap.microbatches", (*(parts[v] for v in used), *whole), tuple(results), params, (microbatch,))
    ends = dict(zip(stacked, results[len(joined) :], strict=True))
    first = [
        e.with_bodies([clone(body)[0] for body in e.bodies])
        for e in needed_equations(program.block.equations, walk.whole_values)
    ]
    equations = (*first, *before, step, *after)
    block = Block(program.block.inputs, equations, tuple(ends.get(a, a) for a in outputs))
    return replace(program, block=eliminate_dead(block)[0]), (
        f"{count} microbatches: {len(joined)} reductions over them, then the update"
    )


def _with_same_apart(local: Block) -> Block:
    """Splits loops and branches of which some results vary with the microbatch and others don't."""
    varying, equations = set(local.inputs), list[Equation]()
    read = {a for e in local.equations if e.op != _REDUCE for a in e.inputs} | {*local.outputs}
    for equation in local.equations:
        is_varying = not varying.isdisjoint(equation.inputs) or _by_number(equation)
        if is_varying and equation.op != _REDUCE:
            same = _same_outputs(equation, varying, read) if equation.bodies else []
            if any(same) and not all(same):
                first, equation = halves(equation, same)
                equations.append(first)
            varying.update(equation.outputs)
        equations.append(equation)
    return local.with_equations(equations)


def _same_outputs(equation: Equation, varying: Set[Var], read: Set[Atom]) -> list[bool]:

    def is_same(out: Var) -> bool:
        alone = reduce_equation(equation, [v is out for v in equation.outputs])
        return not alone.effects and varying.isdisjoint(alone.inputs) and not _by_number(alone)

    return [out in read and is_same(out) for out in equation.outputs]


def _check_divided(program: Program, walk: _Microbatch, before: Sequence[Equation], body: Sequence[Equation]) -> None:
    """Checks that the work on examples is in the microbatches. Raises NotLocal if nothing is, or products of weights
    with the whole batch aren't."""
    plain = [e for e in before if not e.op.startswith(PREFIX)]
    of_batch = dependent(plain, walk.whole_values)
    of_weights = dependent(before, _weights(program))
    for equation in plain:
        is_work = equation.op in PRODUCTS or equation.bodies
        if is_work and all(not some.isdisjoint(equation.inputs) for some in (of_batch, of_weights)):
            raise NotLocal("examples meet those of other microbatches", equation.source)
    if not body:
        raise NotLocal("nothing in it works on single examples")


def _shared(program: Program, bound: ProgramPlan, count: int) -> Localization:
    families = tuple(replace(f, bounds=replace(f.bounds, layout=None, requested=None)) for f in bound.families)
    plan = replace(bound.plan, devices=count)
    return Localization(replace(bound, plan=plan, families=families, shards={}), True, "microbatch_")


def _axes(program: Program, bound: ProgramPlan) -> list[int | None]:
    rows = {k for space in program.facts.spaces for k in space.leaves if bound.family(space.family) is not None}
    axes = [None if k in rows or k in bound.shards else axis for k, axis in enumerate(bound.placements)]
    axes += [None] * (len(program.block.inputs) - len(axes))
    pairs = zip(axes, program.inputs, strict=True)
    return [axis if input_.role in ("batch", "state") else None for axis, input_ in pairs]


def _with_own_statistics(local: Block, count: int) -> tuple[Block, tuple[Source | None, ...]]:
    """Replaces sums over the batch that microbatches read by their own sums, times M; also returns their lines.

    The update still reads the sums over the batch, for moving averages, say.
    """
    reduces = [e for e in local.equations if e.op == _REDUCE]
    after = dependent(local.equations, [v for e in reduces for v in e.outputs])
    varying = _varying(local)
    own = [e for e in local.equations if e.op == _REDUCE or not varying.isdisjoint(e.outputs)]
    read = {a for e in own for a in e.inputs if isinstance(a, Var) and a in after}
    made = {v for e in own if e.op != _REDUCE for v in e.outputs}
    twice = {id(e) for e in needed_equations(local.equations, read - made)}
    new: dict[Atom, Atom] = {}
    equations: list[Equation] = []
    lines: dict[Source | None, None] = {}
    for equation in local.equations:
        is_own = equation.op != _REDUCE and not varying.isdisjoint(equation.outputs)
        inputs = tuple(new.get(a, a) for a in equation.inputs)
        if is_own or equation.op == _REDUCE:
            equations.append(replace(equation, inputs=inputs))
        else:
            equations.append(equation)
        if id(equation) not in twice or is_own or after.isdisjoint(equation.outputs):
            continue
        # A copy for the microbatch itself, beside the one over the batch that the update reads.
        copy = copied(equation, inputs)
        new.update(zip(equation.outputs, copy.outputs, strict=True))
        if equation.op == _REDUCE:
            lines[_line(local, equation.outputs[0])] = None
            equations.append(_times(inputs[0], count if equation.params["op"] == "sum" else 1, copy.outputs[0]))
        else:
            equations.append(copy)
    return Block(local.inputs, tuple(equations), tuple(local.outputs)), tuple(lines)


def _times(value: Atom, factor: int, out: Var) -> Equation:
    factor_ = Literal.scalar(factor, value.dtype)
    return Equation("mul", (value, factor_), (out,), primitive=jax.lax.mul_p)


def _varying(local: Block) -> set[Var]:
    apart = [e for e in local.equations if e.op != _REDUCE]
    return dependent(apart, local.inputs, _by_number)


def _by_number(equation: Equation) -> bool:
    inner = (e for body in equation.bodies for e in body.walk())
    return equation.op in _BY_NUMBER or any(e.op in _BY_NUMBER for e in inner)


def _divide(local: Block) -> tuple[list[Equation], list[Equation], list[Equation]]:
    """Divides equations into those before the microbatches, those of each microbatch, and the update. Raises NotLocal
    if a microbatch depends on a sum over all."""
    for equation in local.equations:
        if any(e.op in (_REDUCE, "ap.microbatch_replicate") for body in equation.bodies for e in body.walk()):
            raise NotLocal("a sum over all examples in a loop or branch", equation.source)
    sums = {v for e in local.equations if e.op == _REDUCE for v in e.outputs}
    apart = [e for e in local.equations if e.op != _REDUCE]
    varying = _varying(local)
    after = dependent(local.equations, sums)
    for equation in local.equations:
        is_own = equation.op == _REDUCE or not varying.isdisjoint(equation.outputs)
        if is_own and not after.isdisjoint(equation.inputs):
            raise NotLocal("the examples' own values depend on a sum over all", _line(local, equation.outputs[0]))
    before, body, update = [], [], []
    for equation in apart:
        values = equation.outputs or equation.inputs  # an equation with only an effect runs where its operands are
        is_late, is_own = (not some.isdisjoint(values) for some in (after, varying))
        (update if is_late else body if is_own else before).append(equation)
    return before, body, update


def _line(block: Block, atom: Atom) -> Source | None:
    near = nearest_line(block, atom)
    return None if near is None else near.source


class _Microbatch(Localizer):
    """The program of one microbatch. Inputs and values that all microbatches share keep their names."""

    def __init__(self, shared: Localization, program: Program) -> None:
        super().__init__(shared)
        #: Values of the global program that are known before any microbatch, in order.
        self.whole_values: dict[Var, None] = {}
        self._of_weights = dependent(program.block.equations, _weights(program))

    @property
    def repeats_effects(self) -> bool:
        return False

    @property
    def rounds_once(self) -> bool:
        """`run_microbatches` adds up in float32 what each microbatch rounds."""
        return False

    def add(self, equation: Equation) -> None:
        if equation.op in _OF_IDS:
            for var in equation.outputs:
                if self.known(var) is None:
                    raise NotLocal("ids depend on the weights", equation.source)
                self.env[var] = var, None
        elif equation.op == "ap.aggregate":
            push_partial(self, equation)
        elif equation.op in _PLACING:
            for atom in equation.inputs:
                self.whole(atom, equation)
            self.copy(equation)
        else:
            super().add(equation)

    def _partial(self, equation: Equation, partial: Sequence[bool]) -> bool:
        if not self.nested and equation.op in _SCALES:
            return False
        return super()._partial(equation, partial)

    def _whole_of_spread(self, new: Atom, atom: Atom, have: Spread, source: Equation | None) -> Atom:
        known = self.known(atom)
        if known is None:
            where = "" if source is None or source.op.startswith(PREFIX) else f" in {_called(source.op)}"
            raise NotLocal(
                f"examples meet those of other microbatches{where}", None if source is None else source.source
            )
        return known

    def known(self, atom: Atom) -> Atom | None:
        if not isinstance(atom, Var) or atom in self._of_weights:
            return None
        self.whole_values[atom] = None
        return atom


def _called(op: str) -> str:
    return f"a {op} loop" if op in ("scan", "while") else f"a {op}"


def _weights(program: Program) -> list[Var]:
    apart = [v for v, input_ in program.named_inputs if input_.role != "batch"]
    return [v for v in apart if not jax_compat.is_key(v.dtype) and np.dtype(v.dtype).kind not in "iub"]
