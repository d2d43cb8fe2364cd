"""Examples that meet those of other devices and are examples again: looked up, in another order, as microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar import jax_compat
from autopar.analysis.local import PARTIAL, Spread
from autopar.ir.program import Equation, Var
from autopar.passes.localizing.local_forms import Forms


@dataclass(eq=False)
class RegroupedForms(Forms):
    """One block being rewritten, as far as examples are looked up or regrouped."""

    def looks_up_rows(self, equation: Equation, spread: Mapping[int, int]) -> bool:
        """Returns whether it is a lookup of single rows that lie on several devices, which adds up, and of so few that
        their sums are less than all rows."""
        if equation.op != "gather" or 0 not in spread or not self.may_repeat:
            return False
        operand = equation.inputs[0]
        state, is_known = self.state(operand), (self.read(operand), None) in self.converted
        is_others = isinstance(state, Spread) and not state.owner and self.regroups
        if is_others and (is_known or 2 * equation.outputs[0].type.size >= operand.type.size):
            return False
        numbers, axis = equation.params["dimension_numbers"], spread[0]
        is_row = axis in numbers.start_index_map and equation.params["slice_sizes"][axis] == 1
        dtype = equation.outputs[0].type.dtype
        return is_row and not jax_compat.is_key(dtype) and dtype != np.bool_

    def lookup_part(self, equation: Equation) -> None:
        """Look up the rows of all examples that a device has; zeros stand for the others."""
        operand, index = equation.inputs
        state = self.state(operand)
        assert isinstance(state, Spread), "its rows are spread"
        inputs = (self.read(operand), self.whole(index, equation))
        params = {**equation.params, "axis": state.axis, "size": operand.shape[state.axis]}
        outputs = tuple(self.define(v, PARTIAL) for v in equation.outputs)
        self.append(
            dataclasses.replace(
                equation, op=self.shared.op("lookup_part"), inputs=inputs, outputs=outputs, params=params, original=None
            )
        )

    def take_part(self, var: Var, state: Spread) -> None:
        """Make a device's part, from here on, of an old value that it is given whole."""
        whole = self.read(var)
        part = self.as_state(var, state)
        self.env[var] = part, state
        self.converted[part, None] = whole

    def divide_again(self, equation: Equation, spread: Mapping[int, int]) -> None:
        """Give each device its part of examples that were put together or in another order.

        Args:
          equation: What all devices have done with all examples.
          spread: Operand -> the axis of the examples.
        """
        states = [self.state(equation.inputs[k]) for k in spread]
        if not self.regroups or any(isinstance(s, Spread) and s.owner for s in states):
            return
        for out in equation.outputs:
            axis = _regrouped(equation, out, spread) if self.state(out) is None else None
            if axis is None or (jax_compat.is_float(out.dtype) and out.type.size == out.shape[axis]):
                continue  # a number for each example is no work
            state = self.shared.of_examples(axis, out.shape[axis])
            if out.shape[axis] % (state.examples or self.shared.devices) == 0:
                self.take_part(out, state)


#: Operations after which examples lie along the same axis.
_SAME_AXIS = frozenset({"concatenate", "dynamic_slice", "pad", "rev", "slice", "split"})


def _regrouped(equation: Equation, out: Var, spread: Mapping[int, int]) -> int | None:
    """Returns the axis of a result along which examples lie; None if that isn't known."""
    if equation.op in _SAME_AXIS:
        return next(iter(spread.values()))
    if 0 not in spread:
        return None
    (old, axis), new = (equation.inputs[0].shape, spread[0]), out.shape
    if equation.op == "gather":
        numbers = equation.params["dimension_numbers"]
        looked_up = (k for k in range(len(new)) if k not in numbers.offset_dims)
        return next(looked_up, None) if axis in numbers.start_index_map else None
    if equation.op == "reshape":  # (B, ...) to (M, B / M, ...)
        fits = (k for k in range(1, len(new)) if new[: k - 1] == old[:axis] and new[k - 1] * new[k] == old[axis])
        return next(fits, None)
    return None
