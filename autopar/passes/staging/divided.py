"""Products that are divided within the stages of a pipeline, over the devices of a tensor axis.

Which leaves are divided is decided for the step as a whole (`passes.choose`); here they are followed
through the programs that stages are cut from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.analysis.tensor import Divider, Division
from autopar.ir.program import Var
from autopar.passes.staging.layers import CutProgram
from autopar.passes.staging.parts import Parts, read_by


@dataclass(frozen=True, slots=True, eq=False)
class DividedLeaves:
    """The leaves of a program that are divided.

    Attributes:
      devices: T.
      axes: Leaf -> the axis along which it is.
    """

    devices: int = 1
    axes: Mapping[Var, int] = field(default_factory=dict)

    def within(self, cut: CutProgram) -> DividedLeaves:
        """Returns the divided leaves of the program whose stacked leaves are in parts; layers aren't divided."""
        return DividedLeaves(self.devices, {part: axis for v, axis in self.axes.items() for part in cut.parts(v)})

    def follow(self, parts: Parts) -> Division:
        """Returns how all values of a step are divided."""
        divider = Divider(self.axes, self.devices)
        if self.axes:
            divider.run(parts.before)
            for inner, outer in read_by(parts).items():
                divider.same(inner, outer)
            divider.run(parts.body.equations)
            for inner, outer in zip(parts.body.outputs, parts.step.outputs, strict=True):
                divider.same(outer, inner)
            divider.run(parts.after)
        return divider.division
