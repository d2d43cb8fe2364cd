"""Whether the untouched update only scales a row's leaves, some of them being zero; and by how much: see `ir.deferred`.

An abstract interpretation of the untouched update's body. A value is zero; a leaf times a number, which is held as
`unit + rest` so that 1 - 1e-9 keeps its digits; a number of the step, the same for all rows; positive, or at least not
negative; or anything. The rules compute with the step's numbers, so that the same walk, on arrays, gives the step's
factors. What they take for granted of the numbers (`0 * x` needs a finite x) is collected, to be checked in each step.

It is no `Interpreter`: the untouched update has no loops, its values are numbers of the step where it is run on arrays,
and what a branch takes for granted must hold only where that branch is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar import jax_compat
from autopar.analysis.scale_only_rules import (
    SCALE_RULES,
    Granted,
    Number,
    ScaledLeaf,
    ScaleValue,
    Zero,
    is_scalar,
    one_of,
    scalar_of,
)
from autopar.ir.deferred import ScaleOnly
from autopar.ir.program import Atom, Block, Equation, Literal


@dataclass(eq=False)
class ScaleOnlyWalk(Granted):
    """One interpretation. Subclasses know more of each value, and have all methods but `run` of their own."""

    def run(self, body: Block, inputs: Sequence[Any]) -> list[Any]:
        env: dict[Atom, Any] = dict(zip(body.inputs, inputs, strict=True))

        def read(atom: Atom) -> Any:
            if isinstance(atom, Literal):
                key = jax_compat.is_key(atom.dtype)
                return self.of(None if key else Number(np.asarray(atom.value), literal=True))
            return env[atom]

        for equation in body.equations:
            values = [read(a) for a in equation.inputs]
            if equation.op == "cond":
                env.update(zip(equation.outputs, self._cond(equation, values), strict=True))
            else:
                env.update(dict.fromkeys(equation.outputs, self.apply(equation, values)))
        return [read(a) for a in body.outputs]

    def of(self, value: ScaleValue) -> Any:
        """What is kept of a value that no leaf entered."""
        return value

    def unknown(self) -> Any:
        """What is kept of a value that may be anything."""
        return None

    def known(self, kept: Any) -> ScaleValue:
        """The value in what is kept."""
        return kept

    def apply(self, equation: Equation, values: Sequence[Any]) -> Any:
        """The result of an equation."""
        rule = SCALE_RULES.get(equation.op)
        if rule is None or len(equation.outputs) != 1 or equation.bodies:
            return None
        return rule(self, equation, values)

    def choose(self, index: Any, cases: Sequence[Any]) -> Any:
        """One of several, which a number of the step chooses."""
        return one_of(self, index, cases)

    def _cond(self, equation: Equation, values: Sequence[Any]) -> list[Any]:
        """Each branch by itself; what they take for granted must hold of the one that is taken."""
        which, operands = self.known(values[0]), values[1:]
        if not isinstance(which, Number) or not is_scalar(which):
            return [self.unknown()] * len(equation.outputs)
        index = scalar_of(self, which)
        branches: list[list[Any]] = []
        for k, body in enumerate(equation.bodies):
            walk = dataclasses.replace(self, assumed=[], not_negative=set())
            branches.append(walk.run(body, operands))
            self.assumed += [(index != k) | condition for condition in walk.assumed]
            self.not_negative |= walk.not_negative
        return [self.choose(index, cases) for cases in zip(*branches, strict=True)]


def find_scale_only(body: Block, changed: int, read: int) -> ScaleOnly | None:
    """The fewest leaves that must be zero for the others to be scaled only; None if there are no such."""
    dtypes = [v.dtype for v in body.inputs[:changed]]
    if not all(jax_compat.is_float(d) and np.dtype(d).itemsize >= 4 for d in dtypes):
        return None  # a product of the factors would miss what short floats round away in each step
    for size in range(changed + 1):
        for zero in itertools.combinations(range(changed), size):
            scaled = _scale_only(body, changed, read, zero)
            if scaled is not None:
                return scaled
    return None


def _scale_only(body: Block, changed: int, read: int, zero: tuple[int, ...]) -> ScaleOnly | None:
    walk = ScaleOnlyWalk(np)
    numbers: list[ScaleValue] = [Number(np.zeros(v.shape, v.dtype)) for v in body.inputs[changed + read :]]
    with np.errstate(all="ignore"):
        outputs = walk.run(body, [*leaves_of(body, changed, read, zero), *numbers])
    scaled = tuple(k for k in range(changed) if k not in zero)
    if not all(isinstance(outputs[k], Zero) for k in zero):
        return None
    if not all(isinstance(v := outputs[k], ScaledLeaf) and v.leaf == k and v.unit in (0, 1) for k in scaled):
        return None
    near_one = tuple(isinstance(v := outputs[k], ScaledLeaf) and v.unit == 1 for k in scaled)
    dtypes = tuple(body.inputs[k].dtype for k in scaled)
    return ScaleOnly(zero, scaled, dtypes, near_one, tuple(sorted(walk.not_negative)))


def factors(body: Block, changed: int, read: int, scale_only: ScaleOnly, values: Sequence[Any], xp: Any) -> list[Any]:
    """A step's factors (less one where they are near it), in the order of `ScaleOnly.scaled`, and whether they hold."""
    walk = ScaleOnlyWalk(xp)
    numbers: list[ScaleValue] = [Number(v) for v in values]
    outputs = walk.run(body, [*leaves_of(body, changed, read, scale_only.zero), *numbers])
    factors_ = []
    for k, dtype, near_one in zip(scale_only.scaled, scale_only.dtypes, scale_only.near_one, strict=True):
        value = outputs[k]
        assert isinstance(value, ScaledLeaf) and value.leaf == k and value.unit == near_one, (
            "as it was when it was planned"
        )
        rest = xp.asarray(value.rest, dtype).reshape(())
        walk.assume(xp.isfinite(rest) & (rest > -1 if near_one else True))
        factors_.append(rest)
    return [*factors_, walk.holds()]


def leaves_of(body: Block, changed: int, read: int, zero: Sequence[int]) -> list[ScaleValue]:
    """Leaves that are only read may hold anything: nobody looks whether they are finite."""
    types = [v.dtype for v in body.inputs[:changed]]
    mine = [Zero() if k in zero else ScaledLeaf(k, 1, np.zeros((), dtype)) for k, dtype in enumerate(types)]
    return [*mine, *[None] * read]
