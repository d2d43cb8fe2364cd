"""Rematerialization: a stage's backward computes its forward once more, from what the stage was sent.

So a stage holds of each microbatch what it was sent, and no other activations. The last stage's backward follows its
forward at once, and computes nothing twice. Source: GPipe (Huang et al., 2018), section 2.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.analysis.stages import Label
from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.slicing import clone
from autopar.passes.staging.parts import Parts


def with_remat(parts: Parts, labels: Mapping[Equation, Label], stages: int) -> tuple[Parts, dict[Equation, Label]]:
    """Returns the step whose backwards read no activations of their own stage's forward; and the labels of its
    equations.

    Args:
      parts: The step.
      labels: Its equations' (`label_parts`).
      stages: S.
    """
    copier = _Copier(parts, labels)
    for equation in parts.body.equations:
        label = labels[equation]
        if label.direction == "F" or label.stage < 0 or label.stage == stages - 1 > 0:
            copier.append(equation, label)
        else:
            inputs = tuple(copier.again(a, label) for a in equation.inputs)
            copier.append(dataclasses.replace(equation, inputs=inputs), label)
    block = Block(parts.body.inputs, tuple(copier.labels), parts.body.outputs)
    return Parts(parts.before, dataclasses.replace(parts.step, bodies=(block,)), parts.after), copier.labels


class _Copier:
    """Writes the equations, and what is computed once more ahead of its first reader.

    Attributes:
      labels: The equations written, in order, with their labels.
    """

    def __init__(self, parts: Parts, labels: Mapping[Equation, Label]) -> None:
        self.labels: dict[Equation, Label] = {}
        self._forward: dict[Var, tuple[Equation, int]] = {}
        for equation in parts.body.equations:
            label = labels[equation]
            if label.direction == "F" and label.stage >= 0:
                self._forward.update(dict.fromkeys(equation.outputs, (equation, label.stage)))
        self._for_inputs = self._read_for("B", parts, labels)
        self._new: dict[Var, Var] = {}

    def append(self, equation: Equation, label: Label) -> None:
        """Writes an equation."""
        self.labels[equation] = label

    def again(self, atom: Atom, reader: Label) -> Atom:
        """Returns a value as a backward reads it: computed once more, if the same stage's forward has made it."""
        made = self._forward.get(atom) if isinstance(atom, Var) else None
        if made is None or made[1] != reader.stage or not isinstance(atom, Var):
            return atom
        if atom not in self._new:
            equation = made[0]
            # What gradients of inputs need isn't put off to where those of weights are computed.
            label = Label("B", reader.stage) if id(equation) in self._for_inputs else reader
            inputs = tuple(self.again(a, reader) for a in equation.inputs)
            outputs = tuple(Var(v.type) for v in equation.outputs)
            bodies = tuple(clone(body)[0] for body in equation.bodies)
            self._new.update(zip(equation.outputs, outputs, strict=True))
            self.append(dataclasses.replace(equation, inputs=inputs, outputs=outputs, bodies=bodies), label)
        return self._new[atom]

    def _read_for(self, direction: str, parts: Parts, labels: Mapping[Equation, Label]) -> set[int]:
        """Returns the forward equations that equations of a direction read, directly or not."""
        found: set[int] = set()
        for equation in parts.body.equations:
            label = labels[equation]
            wanted = list(equation.inputs) if label.direction == direction else []
            while wanted:
                atom = wanted.pop()
                made = self._forward.get(atom) if isinstance(atom, Var) else None
                if made is not None and made[1] == label.stage and id(made[0]) not in found:
                    found.add(id(made[0]))
                    wanted += made[0].inputs
        return found
