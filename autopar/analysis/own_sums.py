"""Finds where a step written for one device computes something else when it runs on all devices.

That is where a device uses a reduction over its own examples before it is reduced over the devices: to normalize those
examples (batch norm), to clip its own gradient; and where sums over devices aren't means. Values that go through linear
equations to a `pmean` are the same in both.

Only `explain` uses this. Values that can't be followed aren't mentioned.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from autopar.analysis.batch import follow_batch
from autopar.analysis.interpreter import Interpreter
from autopar.analysis.primitives import MOVES, Linear, those_that
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES


class SumKind(enum.IntEnum):
    """Differences of a value from device to device."""

    SAME = 0
    #: A reduction over the device's examples, or a linear function of it.
    OWN = 1
    #: A function of the device's examples; also of OWN, once that was noted.
    EXAMPLES = 2


_REDUCES = frozenset(REDUCTION_PRIMITIVES) | {"dot_general", "scatter-add", "argmax"}
_LINEAR = those_that(lambda p: p.linear in (Linear.TOGETHER, Linear.FIRST)) | {"optimization_barrier"}
_BILINEAR = those_that(lambda p: p.linear is Linear.EACH)
_REDUCES_DEVICES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter")


class _Kinds(Interpreter[SumKind]):
    """Follows kinds; notes lines that use a device's own sums, and those that add up over devices."""

    def __init__(self, axes: Mapping[Var, int], count: int) -> None:
        super().__init__()
        self.axes, self.count = axes, count
        self.used: list[str] = []
        self.added: list[str] = []
        self.means: set[Equation] = set()

    def unknown(self, atom: Atom) -> SumKind:
        return SumKind.SAME

    def join(self, values: Sequence[SumKind], atoms: Sequence[Atom]) -> SumKind:
        return max(values)

    def unconverged(self, equation: Equation) -> Sequence[SumKind]:
        return [max(map(self.value, equation.inputs))] * len(equation.outputs)

    def run(self, equations: Sequence[Equation]) -> None:
        self.means |= self._means(equations)
        super().run(equations)

    def plain(self, equation: Equation, operands: Sequence[SumKind]) -> Sequence[SumKind]:
        if equation.op not in _REDUCES_DEVICES:
            return [self._kind(equation, operands)] * len(equation.outputs)
        if equation.op.startswith("psum") and equation not in self.means and SumKind.OWN in operands:
            self.added.append(equation.where)
        return [SumKind.SAME] * len(equation.outputs)

    def _means(self, equations: Sequence[Equation]) -> set[Equation]:
        """Returns sums over devices that are divided by their number, before or after (as derivatives of means are)."""
        users: dict[Atom, list[Equation]] = {}
        for equation in equations:
            for atom in equation.inputs:
                users.setdefault(atom, []).append(equation)
        producers: dict[Atom, Equation] = {v: e for e in equations for v in e.outputs}

        def divides(e: Equation) -> bool:
            by = e.inputs[1] if e.op == "div" else None
            return isinstance(by, Literal) and by.shape == () and float(by.value) == self.count

        def is_divided(atom: Atom) -> bool:
            made = producers.get(atom)
            if made is None:
                return False
            return divides(made) or (made.op in MOVES | {"neg"} and is_divided(made.inputs[0]))

        def is_mean(e: Equation) -> bool:
            after = all(users.get(v) and all(map(divides, users[v])) for v in e.outputs)
            return after or all(map(is_divided, e.inputs))

        return {e for e in equations if e.op.startswith("psum") and is_mean(e)}

    def _kind(self, equation: Equation, kinds: Sequence[SumKind]) -> SumKind:
        if all(k is SumKind.SAME for k in kinds):
            return SumKind.SAME
        if SumKind.OWN not in kinds:
            along = any(v in self.axes for v in equation.outputs)
            return SumKind.OWN if equation.op in _REDUCES and not along else SumKind.EXAMPLES
        others = [k for k in kinds if k is not SumKind.OWN]
        linear = SumKind.EXAMPLES not in others and (
            equation.op in _LINEAR
            or (equation.op in _BILINEAR and len(others) == 1)
            or (equation.op == "div" and kinds[1] is SumKind.SAME)
            or (equation.op == "select_n" and kinds[0] is SumKind.SAME)
        )
        if linear:
            return SumKind.OWN
        self.used.append(equation.where)
        return SumKind.EXAMPLES


def own_sums(block: Block, axes: Sequence[int | None], axis: str, count: int) -> list[str]:
    """Describes how a step differs from one for one device, with the user's lines.

    `axes`: the axis of examples of each input; `axis`: the name by which the step reduces over `count` devices.
    """
    known = {var: along for var, along in zip(block.inputs, axes, strict=True) if along is not None}
    followed = dict(known)
    follow_batch(block.equations, followed, devices=1)
    flow = _Kinds(followed, count)
    flow.values.update(dict.fromkeys(known, SumKind.EXAMPLES))
    flow.run(block.equations)
    sums = []
    if flow.used:
        sums.append(
            f"each device uses what it reduced over its own examples ({_lines(flow.used)}): on one device that is what "
            f"all examples give (batch norm, clipping by a norm: reduce over {axis!r} first for the same)"
        )
    if flow.added:
        sums.append(
            f"values of {count} devices are added up ({_lines(flow.added)}): where they are means over a device's "
            f"examples that is {count} times what one device computes (jax.lax.pmean is the same)"
        )
    return sums


def _lines(where: Sequence[str], most: int = 3) -> str:
    lines = list(dict.fromkeys(where))
    return ", ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
