"""Keep from XLA's partitioner what it gets wrong (`analysis.mispartitioned`).

Some equations are written otherwise, so that XLA gets them right: a start is brought into its range first, a pad that
cuts becomes a pad and a slice. Any other one is run by each device by itself. It becomes the body of an `ap.isolated`
equation, on each device's share of the operands: those along the examples, where the batch is known to lie so that
shares stay shares (or partial sums, which are then added up); else each device has all of every operand, and all do the
same. Either is right wherever XLA has the values, which it brings there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import BatchAxes, follow_batch
from autopar.analysis.batch_rules import SUMMED
from autopar.analysis.local import REDUCES, NotLocal, Placed, place_spread
from autopar.analysis.mispartitioned import mispartitioned
from autopar.analysis.rules import RESIZE, resized
from autopar.ir.plan import Plan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var


def shield(program: Program, plan: Plan, devices: int) -> tuple[Program, tuple[str, ...]]:
    """The program with `isolated` equations in place of what XLA gets wrong.

    Args:
      program: A program that XLA partitions.
      plan: What says where its inputs are.
      devices: Over how many devices examples are spread.

    Returns:
      The program, and what was isolated, in words; none if it is as it was.
    """
    if not any(mispartitioned(e) or _loses_nan(e) for e in program.block.walk()):
        return program, ()
    walk = _Shield(_batch_axes(program, plan, devices), devices)
    block = walk.block(program.block)
    return dataclasses.replace(program, block=block), tuple(dict.fromkeys(walk.told))


def _batch_axes(program: Program, plan: Plan, devices: int) -> Mapping[Var, int]:
    """Where the batch lies; in a rank's own program, whose variables are new ones, it is followed once more."""
    if program.local is None:
        return program.batch
    inputs = zip(program.block.inputs, plan.placements, strict=False)
    pairs = [(v, k, axis) for k, (v, axis) in enumerate(inputs) if axis is not None and v not in program.local.owned]
    axes: BatchAxes = {v: axis for v, _, axis in pairs if v.shape[axis] % devices == 0}
    follow_batch(program.block.equations, axes, devices=devices)
    return axes


class _Shield:
    """`told`: what was isolated, in words."""

    def __init__(self, axes: Mapping[Var, int], devices: int) -> None:
        self._axes = axes
        self._devices = devices
        self.told: list[str] = []

    def block(self, block: Block) -> Block:
        return dataclasses.replace(block, equations=tuple(new for e in block.equations for new in self._equation(e)))

    def _equation(self, equation: Equation) -> Sequence[Equation]:
        name = mispartitioned(equation)
        if name is not None and equation.op in _REWRITES:
            self.told.append(f"{name} ({equation.where}) is written otherwise")
            return _REWRITES[equation.op](equation)
        if name is not None:
            return (self._isolated(equation, name),)
        if _loses_nan(equation) and self._is_across(equation):
            return (self._isolated(equation, "a maximum or minimum over examples, which may be NaN"),)
        bodies = tuple(map(self.block, equation.bodies))
        if all(new.equations == old.equations for new, old in zip(bodies, equation.bodies, strict=True)):
            return (equation,)
        return (dataclasses.replace(equation, bodies=bodies, original=None),)

    def _is_across(self, equation: Equation) -> bool:
        """Whether it reduces over the examples, as far as is known."""
        operand = equation.inputs[0]
        return isinstance(operand, Var) and self._axes.get(operand) in equation.params["axes"]

    def _isolated(self, equation: Equation, name: str) -> Equation:
        given, placed = self._placed(equation)
        inputs = tuple(_part(a, axis, self._devices) for a, axis in zip(equation.inputs, given, strict=True))
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
        told = "by each device on its examples" if placed is not None else "by every device, all of it"
        self.told.append(f"{name} ({equation.where}) is run {told}")
        return dataclasses.replace(
            equation,
            op="ap.isolated",
            inputs=tuple(a for a in equation.inputs if isinstance(a, Var)),
            params={
                "given": tuple(axis for a, axis in zip(equation.inputs, given, strict=True) if isinstance(a, Var)),
                "returned": returned,
                "reduction": reduction,
            },
            bodies=(Block(operands, (body,), outputs),),
            primitive=None,
        )

    def _placed(self, equation: Equation) -> tuple[Sequence[int | None], Placed | None]:
        """Along which axis each operand is spread, and what becomes of the results; None: all have all of them."""
        spread = {
            k: self._axes[a]
            for k, a in enumerate(equation.inputs)
            if isinstance(a, Var) and a in self._axes and a.shape[self._axes[a]] % self._devices == 0
        }
        for some in (spread, *({k: axis} for k, axis in spread.items())):  # all together, or with one operand's
            try:
                placed = place_spread(equation, some, self._devices) if some else None
            except NotLocal:
                continue
            if placed is None or (placed.axis == SUMMED and equation.op not in REDUCES):
                continue
            axes = {**some, **placed.needed}
            if all(isinstance(equation.inputs[k], Var) for k in axes):
                return [axes.get(k) for k in range(len(equation.inputs))], placed
        return [None] * len(equation.inputs), None


def _loses_nan(equation: Equation) -> bool:
    """Whether a NaN may be lost between devices: their maximum is the collective's, which doesn't care."""
    return equation.op in ("reduce_max", "reduce_min") and jax_compat.is_float(equation.inputs[0].dtype)


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
    """First what is added, then what is cut off."""
    config, (out,) = equation.params["padding_config"], equation.outputs
    added = tuple((max(low, 0), max(high, 0), interior) for low, high, interior in config)
    starts = tuple(max(-low, 0) for low, _, _ in config)
    shape = tuple(n + start + max(-high, 0) for n, start, (_, high, _) in zip(out.shape, starts, config, strict=True))
    wide = Var(dataclasses.replace(out.type, shape=shape))
    limits = tuple(start + n for start, n in zip(starts, out.shape, strict=True))
    params = {"start_indices": starts, "limit_indices": limits, "strides": None}
    pad = dataclasses.replace(equation, outputs=(wide,), params={**equation.params, "padding_config": added})
    return pad, dataclasses.replace(equation, op="slice", inputs=(wide,), params=params, primitive=jax_compat.slice_p)


_REWRITES: Mapping[str, Callable[[Equation], Sequence[Equation]]] = {
    "dynamic_slice": _clamped,
    "dynamic_update_slice": _clamped,
    "pad": _padded_and_cut,
}


def _part(atom: Atom, axis: int | None, devices: int) -> Atom:
    """What a device has of a value: another variable."""
    if isinstance(atom, Literal):
        return atom
    if axis is None:
        return Var(atom.type)
    shape = resized(atom.shape, axis, atom.shape[axis] // devices)
    return Var(dataclasses.replace(atom.type, shape=shape))
