"""Keep from XLA's partitioner what it gets wrong (`analysis.mispartitioned`).

Some equations are written otherwise, so that XLA gets them right: a start is brought into its range first, a pad that
cuts becomes a pad and a slice, a maximum is NaN if any element is, a cumulative reduction and a pad have an operand of
their own, a scatter has as many updates as the devices divide.
Any other one is run by each device by itself. It becomes the body of an `ap.isolated` equation, on each device's shard
of the operands: those along the examples, where the batch is known to lie so that shards stay shards (or partial sums,
which are then added up); else each device has all of every operand, and all do the same. Either is right wherever XLA
has the values, which it brings there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar import jax_compat
from autopar.analysis.batch import BatchAxes, follow_batch
from autopar.analysis.batch_rules import SUMMED
from autopar.analysis.local import REDUCES, NotLocal, Placed, place_spread
from autopar.analysis.mispartitioned import (
    ALONG_SPREAD,
    CONVOLUTION,
    CUMULATIVE,
    SCATTER,
    SINGLE,
    UNDIVIDED,
    UNSIGNED,
    mispartitioned,
    scatter_with_nan,
    uneven,
)
from autopar.analysis.rules import RESIZE
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.expand import expand
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var


def shield(program: Program, bound: BoundPlan, devices: int) -> tuple[Program, tuple[str, ...]]:
    """The program with `isolated` equations in place of what XLA gets wrong.

    Args:
      program: A program that XLA partitions.
      bound: What says where its inputs are.
      devices: Over how many devices examples are spread.

    Returns:
      The program, and what was isolated, in words; none if it is as it was.
    """
    walk = _Shield(_batch_axes(program, bound, devices), devices, divides=bool(bound.tensors))
    block = walk.block(program.block)
    if not walk.told:
        return program, ()
    return dataclasses.replace(program, block=block), tuple(dict.fromkeys(walk.told))


def _batch_axes(program: Program, bound: BoundPlan, devices: int) -> Mapping[Var, int]:
    """Where the batch lies, followed once more: passes have made variables since it was."""
    if program.local is None:
        axes: BatchAxes = {v: program.batch[v] for v in program.block.inputs if v in program.batch}
    else:
        inputs = zip(program.block.inputs, bound.placements, strict=False)
        pairs = [(v, axis) for v, axis in inputs if axis is not None and v not in program.local.owned]
        axes = {v: axis for v, axis in pairs if v.shape[axis] % devices == 0}
    follow_batch(program.block.equations, axes, devices=devices)
    return axes


class _Shield:
    """Of one program.

    Args:
      axes: Where the examples lie.
      devices: Over how many devices.
      divides: Whether values are spread along other axes than that of the examples as well.

    Attributes:
      told: What was isolated, in words.
    """

    def __init__(self, axes: Mapping[Var, int], devices: int, *, divides: bool) -> None:
        self._axes, self._devices, self._divides = axes, devices, divides
        self.told: list[str] = []

    def block(self, block: Block) -> Block:
        return block.with_equations([new for e in block.equations for new in self._equation(e)])

    def _equation(self, equation: Equation) -> Sequence[Equation]:
        name = uneven(equation, self._devices) or (CONVOLUTION if self._may_be_uneven(equation) else None)
        if name is not None and not self._is_along_examples(equation):
            changed = _UNEVEN.get(name)
            if changed is None or (equation.op == "scatter" and equation.params.get("update_jaxpr") is not None):
                return (self._isolated(equation, name),)
            self.told.append(f"{name} ({equation.where}) is written otherwise")
            new = changed(equation, self._devices)
            return *new[:-1], *self._equation(new[-1])
        if equation.op in UNDIVIDED and self._axes and self._is_apart(equation):
            return (self._isolated(equation, UNDIVIDED[equation.op]),)
        name = mispartitioned(equation)
        if name in ALONG_SPREAD and self._is_apart(equation):
            return (equation,)
        # XLA accumulates along the examples in a time that is quadratic in their number.
        is_slow = name == CUMULATIVE and equation.inputs[0] in self._axes
        if name is not None and equation.op in _REWRITES and not is_slow:
            self.told.append(f"{name} ({equation.where}) is written otherwise")
            return _REWRITES[equation.op](equation)
        if name is not None:
            return (self._isolated(equation, name),)
        return (equation.with_bodies([self.block(body) for body in equation.bodies]),)

    def _may_be_uneven(self, equation: Equation) -> bool:
        """Whether a convolution may be along examples that the devices don't divide, of which XLA may make groups."""
        if equation.op != "conv_general_dilated" or any(a in self._axes for a in equation.inputs if isinstance(a, Var)):
            return False
        return any(v.shape[axis] % self._devices for v, axis in self._axes.items())

    def _is_along_examples(self, equation: Equation) -> bool:
        """Whether an operand is known to lie along the examples, evenly: XLA leaves it there."""
        pairs = [(a, self._axes[a]) for a in equation.inputs[-2:] if isinstance(a, Var) and a in self._axes]
        sizes = [a.shape[axis] for a, axis in pairs]
        if equation.params.get("batch") is not None:  # of a push
            sizes.append(equation.inputs[-2].shape[equation.params["batch"]])
        return any(size % self._devices == 0 for size in sizes)

    def _is_apart(self, equation: Equation) -> bool:
        """Whether each device's results are known to be of its own examples alone."""
        if self._divides:
            return False
        if not any(isinstance(a, Var) for a in equation.inputs):
            return True
        _, placed = self._placed(equation)
        return placed is not None and placed.axis != SUMMED

    def _isolated(self, equation: Equation, name: str) -> Equation:
        places, placed = self._placed(equation)
        inputs = tuple(_part(a, axis, self._devices) for a, axis in zip(equation.inputs, places, strict=True))
        returned, reduction, params = None, None, equation.params
        if placed is not None and placed.axis == SUMMED:
            reduction = REDUCES[equation.op]
        elif placed is not None:
            returned = placed.axis
        outputs = tuple(_part(v, returned, self._devices) for v in equation.outputs)
        if returned is not None and equation.op in RESIZE:
            params = RESIZE[equation.op](equation, returned, outputs[0].shape[returned])
        body = dataclasses.replace(equation, inputs=inputs, outputs=outputs, params=params)
        operands = tuple(v for v in inputs if isinstance(v, Var))
        by_whom = "by each device on its examples" if placed is not None else "by every device, all of it"
        self.told.append(f"{name} ({equation.where}) is run {by_whom}")
        return dataclasses.replace(
            equation,
            op="ap.isolated",
            inputs=tuple(a for a in equation.inputs if isinstance(a, Var)),
            params={
                "given": tuple(axis for a, axis in zip(equation.inputs, places, strict=True) if isinstance(a, Var)),
                "returned": returned,
                "reduction": reduction,
            },
            bodies=(Block(operands, (body,), outputs),),
            primitive=None,
        )

    def _placed(self, equation: Equation) -> tuple[Sequence[int | None], Placed | None]:
        """Along which axis each operand is spread, and what becomes of the results; None: all have all of them."""
        spread = {k: self._axes[a] for k, a in enumerate(equation.inputs) if isinstance(a, Var) and a in self._axes}
        for some in (spread, *({k: axis} for k, axis in spread.items())):  # all together, or with one operand's
            try:
                placed = place_spread(equation, some, self._devices, padded=True) if some else None
            except NotLocal:
                continue
            is_even = all(equation.inputs[k].shape[axis] % self._devices == 0 for k, axis in some.items())
            adds_zeros = is_even or equation.op == "conv_general_dilated"  # products of padding
            if placed is None or (placed.axis == SUMMED and not (adds_zeros and equation.op in REDUCES)):
                continue
            axes = {**some, **placed.needed}
            if all(isinstance(equation.inputs[k], Var) for k in axes):
                return [axes.get(k) for k in range(len(equation.inputs))], placed
        return [None] * len(equation.inputs), None


def _signed(equation: Equation, devices: int = 1) -> Sequence[Equation]:
    """A gather or scatter by indices of 32 bits with a sign; those that are too large stay so."""
    operand, index, *updates = equation.inputs

    def signed(index: Any) -> Any:
        most = np.asarray(min(np.iinfo(np.int32).max, np.iinfo(index.dtype).max), index.dtype)
        return lax.convert_element_type(lax.min(index, most), np.int32)

    made = expand(signed, equation, (index,))
    return *made, dataclasses.replace(equation, inputs=(operand, made[-1].outputs[0], *updates))


def _evened(equation: Equation, devices: int, along: Sequence[int] | None = None) -> Sequence[Equation]:
    """A scatter with more updates, which change nothing: of the first row, or the last entry's once more. `along`: axes
    of its indices; None: those with several entries."""
    numbers, (*before, index, updates) = equation.params["dimension_numbers"], equation.inputs
    op = equation.params["op"] if equation.op == "ap.push" else equation.op
    entries = [axis for axis in range(len(updates.shape)) if axis not in numbers.update_window_dims]
    along = [axis for axis, n in enumerate(index.shape[:-1]) if n > 1] if along is None else along
    more = {axis: -index.shape[axis] % devices for axis in along}
    more = {axis: n for axis, n in more.items() if n and axis not in numbers.scatter_indices_batching_dims}

    def widened(widths: Mapping[int, int], **how: Any) -> Callable[[Any], Any]:
        # Of an array of its own, as any pad (`_padded_and_cut`).
        return lambda x: jnp.pad(
            lax.optimization_barrier(x), [(0, widths.get(axis, 0)) for axis in range(x.ndim)], **how
        )

    by_entry = {entries[axis]: n for axis, n in more.items()}
    idle = {"scatter-add": -0.0, "scatter-sub": 0.0, "scatter-mul": 1.0}.get(op)  # x + 0.0 is no -0.0
    fill = {"mode": "edge"} if idle is None else {"constant_values": np.asarray(idle).astype(updates.dtype)}
    wider = expand(widened(more, **({"mode": "edge"} if idle is None else {})), equation, (index,))
    widest = expand(widened(by_entry, **fill), equation, (updates,))
    params = {**equation.params, **({"unique_indices": False} if "unique_indices" in equation.params else {})}
    inputs = (*before, wider[-1].outputs[0], widest[-1].outputs[0])
    return *wider, *widest, dataclasses.replace(equation, inputs=inputs, params=params)


def _single_evened(equation: Equation, devices: int) -> Sequence[Equation]:
    """A scatter of one update with an axis for more of them, evened."""
    numbers, (operand, index, updates) = equation.params["dimension_numbers"], equation.inputs
    moved = numbers._replace(
        update_window_dims=tuple(axis + 1 for axis in numbers.update_window_dims),
        scatter_indices_batching_dims=tuple(axis + 1 for axis in numbers.scatter_indices_batching_dims),
    )
    made = [expand(lambda x: x[None], equation, (x,)) for x in (index, updates)]
    inputs = (operand, *(equations[-1].outputs[0] for equations in made))
    params = {**equation.params, "dimension_numbers": moved}
    wider = dataclasses.replace(equation, inputs=inputs, params=params)
    return *made[0], *made[1], *_evened(wider, devices, (0,))


def _clamped(equation: Equation) -> Sequence[Equation]:
    """Starts are brought into range."""
    operand = equation.inputs[0]
    skipped = 2 if equation.op == "dynamic_update_slice" else 1
    sizes = equation.inputs[1].shape if skipped == 2 else equation.params["slice_sizes"]
    made: list[Equation] = []
    starts: list[Atom] = []
    for start, n, size in zip(equation.inputs[skipped:], operand.shape, sizes, strict=True):
        dtype = np.dtype(start.dtype)
        type_ = ArrayType((), dtype)
        ends = [Literal(dtype.type(min(x, np.iinfo(dtype).max)), type_) for x in (0, n - size)]
        out = Var(type_)
        inputs, primitive = (ends[0], start, ends[1]), jax_compat.clamp_p
        made.append(
            dataclasses.replace(equation, op="clamp", inputs=inputs, outputs=(out,), params={}, primitive=primitive)
        )
        starts.append(out)
    return *made, dataclasses.replace(equation, inputs=(*equation.inputs[:skipped], *starts))


def _padded_and_cut(equation: Equation) -> Sequence[Equation]:
    """First what is added, to an array that no other equation pads, then what is cut off."""
    config, (out,) = equation.params["padding_config"], equation.outputs
    added = tuple((max(low, 0), max(high, 0), interior) for low, high, interior in config)
    starts = tuple(max(-low, 0) for low, _, _ in config)
    shape = tuple(n + start + max(-high, 0) for n, start, (_, high, _) in zip(out.shape, starts, config, strict=True))
    limits = tuple(start + n for start, n in zip(starts, out.shape, strict=True))

    def padded(x: Any, value: Any) -> Any:
        wide = lax.pad(lax.optimization_barrier(x), value, added)
        return wide if shape == out.shape else lax.slice(wide, starts, limits)

    return expand(padded, equation, equation.inputs, out)


def _accumulated_alone(equation: Equation) -> Sequence[Equation]:
    """The operand is one that no other equation has."""

    def accumulated(x: Any) -> Any:
        return jax_compat.bind(equation.primitive, (lax.optimization_barrier(x),), equation.params)[0]

    return expand(accumulated, equation, equation.inputs, equation.outputs[0])


def _reduced_with_nan(equation: Equation) -> Sequence[Equation]:
    """A maximum or minimum, and whether there is a NaN."""

    def reduced(x: Any) -> Any:
        (result,) = jax_compat.bind(equation.primitive, (x,), equation.params)
        is_nan = lax.reduce_or(lax.ne(x, x), equation.params["axes"])
        return lax.select(is_nan, lax.full_like(result, np.nan), result)

    return expand(reduced, equation, equation.inputs, equation.outputs[0])


def _scattered_with_nan(equation: Equation) -> Sequence[Equation]:
    """Each element is NaN if one of its updates is, or was."""

    def scattered(operand: Any, indices: Any, updates: Any) -> Any:
        return scatter_with_nan(equation.primitive, equation.params, operand, indices, updates)

    return expand(scattered, equation, equation.inputs, equation.outputs[0])


_UNEVEN: Mapping[str, Callable[[Equation, int], Sequence[Equation]]] = {
    SCATTER: _evened,
    SINGLE: _single_evened,
    UNSIGNED: _signed,
}
_REWRITES: Mapping[str, Callable[[Equation], Sequence[Equation]]] = {
    "dynamic_slice": _clamped,
    "dynamic_update_slice": _clamped,
    "pad": _padded_and_cut,
    "gather": _signed,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _accumulated_alone),
    **dict.fromkeys(("reduce_max", "reduce_min"), _reduced_with_nan),
    **dict.fromkeys(("scatter-max", "scatter-min"), _scattered_with_nan),
}


def _part(atom: Atom, axis: int | None, devices: int) -> Atom:
    """What a device has of a value: another variable."""
    if isinstance(atom, Literal):
        return atom
    if axis is None:
        return Var(atom.type)
    return Var(atom.type.resized(axis, -(-atom.shape[axis] // devices)))
