"""What a device (or a rank) has of a value when it runs its own part of a step.

Three things can be had of a global value: all of it (`None`), an equal shard along one axis (`Spread`), or a partial
sum of it (`Partial`: the value is the sum over all). `place_spread` and `keeps_partial` say what an equation makes of
such operands. Both are sound: what they have no rule for is refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.batch_rules import SUMMED, partners, place_axes
from autopar.analysis.primitives import PRIMITIVES, Linear, those_that
from autopar.analysis.rules import ALIGNED, RESIZE
from autopar.ir import reductions
from autopar.ir.program import Equation, Source, Var


@dataclass(frozen=True, slots=True)
class Spread:
    """A shard along an axis, of the same size on each device.

    Attributes:
      axis: The axis.
      owner: Whether of the rows that a device owns, not of the examples that it has.
      examples: Number B of examples, if the devices don't divide it: each has ceil(B / N), the last ones padded by
        copies. The axis has a multiple of B elements, those of an example next to each other. 0: equal shards.
      rank: Whether of the rows that a rank asked for, of which all of its devices have the same.
      sums: Whether of these each of them has a partial sum.
    """

    axis: int
    owner: bool = False
    examples: int = 0
    rank: bool = False
    sums: bool = False

    def moved(self, axis: int) -> Spread:
        """Returns the same shard along another axis."""
        return replace(self, axis=axis)

    def size(self, whole: int, devices: int) -> int:
        """Returns how many of `whole` elements along the axis a device has.

        Raises:
          NotLocal: the devices (or the examples) don't divide them.
        """
        parts = self.examples or devices
        if whole % parts:
            raise NotLocal(f"{parts} {'examples' if self.examples else 'devices'} don't divide {whole}")
        each = whole // parts
        return each * -(-self.examples // devices) if self.examples else each


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial sum of the value."""


PARTIAL = Partial()
#: None: all of the value.
State = Spread | Partial | None


class NotLocal(Exception):
    """An equation that can't be run on a part of its operands: the reason, where, and what can be done about it.

    Attributes:
      tables: The paths of the tables that it is about, if it is about some.
    """

    def __init__(
        self, reason: str, source: Source | None = None, remedy: str = "", tables: tuple[str, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = source
        self.remedy = remedy
        self.tables = tables

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A place where something is reduced over all devices.

    Attributes:
      type: Of what is reduced.
      op: "sum", "max", "min", "and", "or" or "prod".
      nested: Whether it stands in a loop or branch.
      source: The user's line.
    """

    type: Any
    op: str
    nested: bool
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A value of the examples that every device has whole, for an equation without a rule for its parts.

    Attributes:
      nbytes: Bytes of all shards together, padding of examples included.
      nested: Whether it stands in a loop or branch.
      op: The equation's primitive; "" for a result of the step.
      source: The user's line.
    """

    nbytes: int
    nested: bool
    op: str
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class LocalFacts:
    """The findings of `localize`.

    Attributes:
      outputs: What each device has of the block's outputs.
      owned: Variables that are shards of an owner's rows.
      reductions: All reductions.
      gathered: What every device has whole of the examples.
      inside: What a device computes on its own examples from a reduced value (as batch norm does), None if nothing.
      tensor: The same over the devices that divide products, if any do.
      between: Whether what is reduced over ranks is reduced between programs, owners' rows apart.
    """

    outputs: tuple[State, ...]
    owned: frozenset[Var]
    reductions: tuple[Reduction, ...]
    gathered: tuple[Gathered, ...] = ()
    inside: NotLocal | None = None
    tensor: LocalFacts | None = None
    between: bool = False


@dataclass(frozen=True, slots=True)
class OncePerRow:
    """The work of `once_per_row`.

    Attributes:
      counts: (rows, lookups) of the ids by which something is computed for distinct rows.
      share: Operations of the program's products that are left, of those before.
    """

    counts: tuple[tuple[int, int], ...]
    share: float

    def __str__(self) -> str:
        counts = ", ".join(f"{rows} rows for {lookups} lookups" for rows, lookups in self.counts)
        return f"{counts}; {self.share:.0%} of the products' operations are left"


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of an equation's results, of spread operands.

    Attributes:
      axis: Where the shards are in the results; SUMMED if they are reduced or contracted.
      needed: Operand -> the axis along which it must be spread as well.
    """

    axis: int
    needed: Mapping[int, int] = field(default_factory=dict)


def place_spread(
    equation: Equation, spread: Mapping[int, int], devices: int, *, padded: bool = False, examples: int = 0
) -> Placed:
    """Returns where equal shards of some operands end up, in an equation without bodies.

    Args:
      equation: The equation.
      spread: Operand -> the axis along which it is spread.
      devices: Over how many.
      padded: Whether they needn't divide an axis, because what is put behind it is cut off from the results.
      examples: B, if the devices don't divide it (`Spread`).

    Raises:
      NotLocal: there is no rule, or the operands don't go together.
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
    places: set[int] = set()
    for k, axis in spread.items():
        at = place_axes(equation, k, axis, 1 if examples else devices)
        if at is None:
            raise NotLocal(f"{op} works along the examples", equation.source)
        places.add(at)
        for j, along in partners(equation, k, axis):
            is_same = equation.inputs[j].shape[along] == equation.inputs[k].shape[axis]
            if is_same or op == "conv_general_dilated":  # groups, of any number of features each
                needed[j] = along
            elif equation.inputs[j].shape[along] != 1 or op not in ALIGNED:  # one for all examples
                raise NotLocal(f"{op} works along the examples", equation.source)
    if len(places) > 1:
        raise NotLocal(f"{op} of examples with other examples", equation.source)
    (at,) = places
    out = equation.outputs[0]
    if at == SUMMED:
        return _agreed(equation, spread, needed, at)
    kept = padded and all(equation.inputs[k].shape[axis] == out.shape[at] for k, axis in spread.items())
    if (out.shape[at] % parts and not kept) or (op == "reshape" and not _equal_shards(equation, spread[0], at)):
        raise NotLocal(f"{op} takes the examples apart", equation.source)
    return _agreed(equation, spread, needed, at)


def resized_params(equation: Equation, spread: Mapping[int, int], axis: int, size: int) -> Mapping[str, Any]:
    """Returns the parameters of an equation that is run on a part of its operands (operand -> the axis of which it is
    one), where `axis` of its results has `size`."""
    if equation.op not in RESIZE:
        return equation.params
    if equation.op == "gather":
        batching = equation.params["dimension_numbers"].operand_batching_dims
        if 0 not in spread or spread[0] in batching:
            return equation.params
    return RESIZE[equation.op](equation, axis, size)


def _agreed(equation: Equation, spread: Mapping[int, int], needed: Mapping[int, int], axis: int) -> Placed:
    if any(needed.get(k, along) != along for k, along in spread.items()):
        raise NotLocal(f"{equation.op} of examples with other examples", equation.source)
    return Placed(axis, {k: along for k, along in needed.items() if k not in spread})


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
    return groups % parts != 0 and any(place_axes(equation, k, axis) == out for k, axis in spread.items())


# --- partial sums ---

#: Operands of what is linear in all together that aren't values but say where.
_INDICES = {"scatter-add": (1,), "dynamic_update_slice": tuple(range(2, 16))}
_TOGETHER = those_that(lambda p: p.linear is Linear.TOGETHER) | {"ap.plus"}


def keeps_partial(equation: Equation, partial: Sequence[bool]) -> Sequence[int] | None:
    """Returns whether the results of partial sums add up to the result, every other operand being whole.

    Returns:
      None if they don't; else the operands that are no partial sums, and of which one device only may take part.
    """
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


#: How shards of a value are reduced by an equation over the axis along which they are spread -> how the devices' are.
REDUCES: Mapping[str, str] = {**reductions.REDUCTION_PRIMITIVES} | {
    "dot_general": "sum",
    "conv_general_dilated": "sum",
    "scatter-add": "sum",
}
