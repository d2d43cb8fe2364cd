"""Rules for equations on shards and partial sums (`ir.local`): `follow_spread` and `whole_operands_once`.

Both are sound: an equation without a rule is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import SUMMED, partners, result_axis
from autopar.analysis.primitives import PRIMITIVES, Linear, those_that
from autopar.analysis.rules import ALIGNED, RESIZE
from autopar.ir import reductions
from autopar.ir.local import NotLocal
from autopar.ir.program import Equation
from autopar.jax_types import Params


@dataclass(frozen=True, slots=True)
class Followed:
    """The axis along which an equation's results are spread, for spread operands."""

    axis: int  #: The axis of the shards in the results; SUMMED if they are reduced or contracted.
    #: Operand -> the axis along which it must be spread as well.
    needed: Mapping[int, int] = field(default_factory=dict)


def follow_spread(equation: Equation, spread: Mapping[int, int], devices: int, *, examples: int = 0) -> Followed:
    """Returns where equal shards of some operands end up, in an equation without bodies.

    `spread`: operand -> the axis along which it is spread. `examples`: B, if the devices don't divide it (`Spread`).
    Raises NotLocal if there is no rule, or the operands don't go together.
    """
    op = equation.op
    parts = examples or devices
    if op == "conv_general_dilated":
        contracted = _contracting_convolution(equation)
        if contracted is not None and any(contracted[k] == axis for k, axis in spread.items()):
            return _agreed(equation, spread, {0: contracted[0], 1: contracted[1]}, SUMMED)
        if _takes_groups_apart(equation, spread, parts):
            raise NotLocal(f"{op} in groups of examples of several devices", equation.source)
    needed: dict[int, int] = {}
    axes: set[int] = set()
    for k, axis in spread.items():
        at = result_axis(equation, k, axis, 1 if examples else devices)
        if at is None:
            raise NotLocal(f"{op} works along the examples", equation.source)
        axes.add(at)
        for j, along in partners(equation, k, axis):
            is_same = equation.inputs[j].shape[along] == equation.inputs[k].shape[axis]
            if is_same or op == "conv_general_dilated":  # groups have any number of features
                needed[j] = along
            elif equation.inputs[j].shape[along] != 1 or op not in ALIGNED:  # one for all examples
                raise NotLocal(f"{op} works along the examples", equation.source)
    if len(axes) > 1:
        raise NotLocal(f"{op} of examples with other examples", equation.source)
    (at,) = axes
    out = equation.outputs[0]
    if at == SUMMED:
        return _agreed(equation, spread, needed, at)
    if out.shape[at] % parts or (op == "reshape" and not _equal_shards(equation, spread[0], at)):
        raise NotLocal(f"{op} takes the examples apart", equation.source)
    return _agreed(equation, spread, needed, at)


def resized_params(equation: Equation, spread: Mapping[int, int], axis: int, size: int) -> Params:
    """Returns the parameters of an equation run on parts of operands (operand -> axis), `axis` of whose results has
    `size`."""
    if equation.op not in RESIZE:
        return equation.params
    if equation.op == "gather":
        batching = equation.params["dimension_numbers"].operand_batching_dims
        if 0 not in spread or spread[0] in batching:
            return equation.params
    return RESIZE[equation.op](equation, axis, size)


def _agreed(equation: Equation, spread: Mapping[int, int], needed: Mapping[int, int], axis: int) -> Followed:
    if any(needed.get(k, along) != along for k, along in spread.items()):
        raise NotLocal(f"{equation.op} of examples with other examples", equation.source)
    return Followed(axis, {k: along for k, along in needed.items() if k not in spread})


def _equal_shards(equation: Equation, axis: int, to: int) -> bool:
    old, new = equation.inputs[0].shape, equation.outputs[0].shape
    return math.prod(old[:axis]) == math.prod(new[:to])


def _contracting_convolution(equation: Equation) -> tuple[int, int] | None:
    p = equation.params
    if p["feature_group_count"] != 1:
        return None
    numbers = p["dimension_numbers"]
    return numbers.lhs_spec[1], numbers.rhs_spec[1]


def _takes_groups_apart(equation: Equation, spread: Mapping[int, int], parts: int) -> bool:
    p, out = equation.params, equation.params["dimension_numbers"].out_spec[1]
    groups = max(p["feature_group_count"], p["batch_group_count"])
    return groups % parts != 0 and any(result_axis(equation, k, axis) == out for k, axis in spread.items())


# --- partial sums ---

#: Index operands of operations that are linear in all others together.
_INDICES = {"scatter-add": (1,), "dynamic_update_slice": tuple(range(2, 16))}
_TOGETHER = those_that(lambda p: p.linear is Linear.TOGETHER) | {"ap.plus"}


def whole_operands_once(equation: Equation, partial: Sequence[bool]) -> Sequence[int] | None:
    """Returns the operands that are no partial sums, which only one device may contribute; None if the results of
    partial sums don't add up to the result."""
    op = equation.op
    if op == "gather" and not _fills_with_zeros(equation):
        return None
    linear = PRIMITIVES[op].linear if op in PRIMITIVES else Linear.NO
    if op == "convert_element_type":
        return () if _widens(equation) else None
    if linear is Linear.FIRST:
        return () if partial[0] and not any(partial[1:]) else None
    if linear is Linear.EACH:
        return () if sum(partial) == 1 and np.dtype(equation.outputs[0].dtype) != np.bool_ else None
    if op == "div":
        return () if partial[0] and not partial[1] and _is_float(equation) else None
    if op == "pad":
        return (1,) if partial[0] else None
    if op == "select_n":
        return None if partial[0] else [k for k in range(1, len(partial)) if not partial[k]]
    if op in _TOGETHER:
        where = _INDICES.get(op, ())
        if any(partial[k] for k in where if k < len(partial)):
            return None
        return [k for k in range(len(partial)) if not partial[k] and k not in where]
    return None


def _is_float(equation: Equation) -> bool:
    return all(jax_compat.is_float(a.dtype) for a in equation.inputs)


def _fills_with_zeros(equation: Equation) -> bool:
    p = equation.params
    if p["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = p["fill_value"]
    return jax_compat.is_float(equation.outputs[0].dtype) if fill is None else not np.any(np.asarray(fill))


def _widens(equation: Equation) -> bool:
    old, new = np.dtype(equation.inputs[0].dtype), np.dtype(equation.outputs[0].dtype)
    if jax_compat.is_float(old) and jax_compat.is_float(new):
        return jax_compat.holds_floats(new, old)
    return old.kind in "iu" and new.itemsize == old.itemsize


#: Equation that reduces over a spread axis -> the reduction of the devices' results.
REDUCES: Mapping[str, str] = {**reductions.REDUCTION_PRIMITIVES} | {
    "dot_general": "sum",
    "conv_general_dilated": "sum",
    "scatter-add": "sum",
}
