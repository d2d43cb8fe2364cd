"""Follows which axis of a value runs over the examples of the batch.

This says how values are best spread over devices: a device with an equal shard of each input along its batch axis has
the same shard of these values along theirs. It is advice only: XLA moves values that are laid out otherwise, at a cost.

Guesses may be followed along with known axes: each is the bit of an integer, and a value's axis rests on those without
which it would have none. An equation that makes no sense with a guess refutes it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from autopar.analysis.interpreter import Interpreter, union
from autopar.analysis.primitives import CUMULATIVE, ELEMENTWISE, PRIMITIVES, Primitive
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES

#: Variable with a batch axis -> the axis.
BatchAxes = MutableMapping[Var, int]
#: A batch axis, or None, and the guesses that it rests on.
_Found = tuple[int | None, int]
_NOTHING: _Found = (None, 0)


@dataclass(eq=False)
class Guesses:
    """Guesses about the batch axes of inputs, and their fate."""

    uniform: Mapping[Var, int]  #: Axes along which values are constant, which fit every guess (`uniform_axes`).
    bases: MutableMapping[Atom, int]  #: Variable -> the guesses that its axis rests on, if any.
    #: For each contradiction the guesses of which at least one is wrong.
    refuted: list[int] = field(default_factory=list)

    def is_uniform(self, atom: Atom, axis: int) -> bool:
        return is_uniform(self.uniform, atom, axis)

    def refute(self, guesses: int) -> None:
        if guesses:
            self.refuted.append(guesses)


def follow_batch(
    equations: Sequence[Equation], axes: BatchAxes, guesses: Guesses | None = None, *, devices: int
) -> None:
    """Adds to `axes` the variables of the equations, those of their bodies included.

    `devices`: number of devices over which examples are to be spread.
    """
    guesses = guesses or Guesses({}, {})
    walk = _Batch(guesses, devices)
    walk.values.update((var, (axis, guesses.bases.get(var, 0))) for var, axis in axes.items())
    walk.run(equations)
    for var, (axis, base) in walk.values.items():
        if axis is None:
            axes.pop(var, None)
        else:
            axes[var] = axis
        if base:
            guesses.bases[var] = base
        else:
            guesses.bases.pop(var, None)


class _Batch(Interpreter[_Found]):
    """Follows axes, and the guesses that they rest on."""

    def __init__(self, guesses: Guesses, devices: int) -> None:
        super().__init__()
        self.guesses, self.devices = guesses, devices
        #: (loop, carry) whose axis a turn doesn't return -> the guesses for it.
        self.lost: dict[tuple[Equation, int], int] = {}

    def unknown(self, atom: Atom) -> _Found:
        return _NOTHING

    # --- equations without bodies ---

    def plain(self, equation: Equation, operands: Sequence[_Found]) -> Sequence[_Found]:
        if equation.op == "optimization_barrier":
            return operands
        return [self._follow(equation, operands)] * len(equation.outputs)

    def _follow(self, equation: Equation, operands: Sequence[_Found]) -> _Found:
        axes_of_operands = {k: axis for k, (axis, _) in enumerate(operands) if axis is not None}
        if not axes_of_operands or not equation.outputs:  # a print or the like says nothing
            return _NOTHING
        result_axes = {k: result_axis(equation, k, axis, self.devices) for k, axis in axes_of_operands.items()}
        bases = {k: operands[k][1] for k in axes_of_operands}
        kept = [(p, bases.get(k, 0)) for k, p in result_axes.items() if p is not None and p != SUMMED]
        if any(bases.values()) and not self._make_sense(equation, axes_of_operands, result_axes, bases):
            kept = [(p, base) for p, base in kept if not base]  # known axes stay known
        if not kept:
            return _NOTHING
        if equation.op == "gather":  # ids say more than what they select from
            kept.reverse()
        axis = next((p for p, base in kept if not base), kept[0][0])
        along = [base for p, base in kept if p == axis]
        return axis, union(along) if all(along) else 0

    def _make_sense(
        self,
        equation: Equation,
        axes_of_operands: Mapping[int, int],
        result_axes: Mapping[int, int | None],
        bases: Mapping[int, int],
    ) -> bool:
        """Returns whether operands with guessed axes fit the others; refutes the guesses if not."""
        before = len(self.guesses.refuted)
        for k, axis in axes_of_operands.items():
            if bases[k] and result_axes[k] is None:
                self.guesses.refute(bases[k])
            for j, along in partners(equation, k, axis) if bases[k] else ():
                constant = j not in axes_of_operands and self.guesses.is_uniform(equation.inputs[j], along)
                if axes_of_operands.get(j) != along and not constant:
                    self.guesses.refute(bases[k] | bases.get(j, 0))
        return len(self.guesses.refuted) == before

    # --- loops and branches ---

    def while_loop(self, equation: Equation, operands: Sequence[_Found]) -> Sequence[_Found]:
        # A sweep over a table also has a body, of rows rather than examples.
        return self.followed(equation, operands) if equation.op == "while" else self.unconverged(equation)

    def join(self, values: Sequence[_Found], atoms: Sequence[Atom]) -> _Found:
        """Joins branches, which must agree on an axis; one that is uniform along it agrees with any."""
        axis, base = next((a for a, _ in values if a is not None), None), union(b for _, b in values)
        pairs = zip(values, atoms, strict=True)
        if axis is None or all(a == axis or (a is None and self.guesses.is_uniform(x, axis)) for (a, _), x in pairs):
            return axis, base
        self.guesses.refute(base)
        return _NOTHING

    def inside(self, value: _Found) -> _Found:
        axis, base = value
        return (axis - 1, base) if axis else _NOTHING

    def outside(self, value: _Found) -> _Found:
        axis, base = value
        return None if axis is None else axis + 1, base

    def widen(self, equation: Equation, k: int, carry: _Found, result: _Found) -> _Found:
        """Keeps a carry's axis if each turn returns it there."""
        (axis, base), (returned, other) = carry, result
        if axis == returned:
            return axis, base | other
        if axis is not None:
            self.lost[equation, k] = base | other
        return _NOTHING

    def end(self, carry: _Found, result: _Found) -> _Found:
        return _NOTHING if carry[0] is None else result

    def mark(self) -> int:
        return len(self.guesses.refuted)

    def restore(self, mark: int) -> None:
        del self.guesses.refuted[mark:]  # what was found with carries that aren't kept

    def loop_ended(self, equation: Equation, operands: Sequence[_Found]) -> None:
        taken_apart = equation.inputs[equation.border.fixed :] if equation.op == "scan" else ()
        for axis, base in map(self.value, taken_apart):
            if axis == 0:
                self.guesses.refute(base)
        for key in [key for key in self.lost if key[0] is equation]:
            self.guesses.refute(self.lost.pop(key))


# --- axes along which a value is constant: broadcasts, literals, and elementwise functions of such ---
#
# Random bits count as constant along all axes, which have no meaning before they meet another value.
#: Operations whose results are constant along the operand's constant axes.
_SHAPED = frozenset({"transpose", "squeeze", "reshape", "slice", "dynamic_slice", "split", "unstack"})


def is_uniform(uniform: Mapping[Var, int], atom: Atom, axis: int) -> bool:
    """Returns whether a value is constant along an axis.

    A closed-over array counts as uniform, since it says nothing of its axes.
    """
    return isinstance(atom, Literal) or atom.shape[axis] == 1 or bool(uniform.get(atom, 0) >> axis & 1)


def uniform_axes(block: Block) -> dict[Var, int]:
    """Maps each variable to the axes along which it is constant, as bits; inputs of the block are missing."""
    walk = _Uniform()
    walk.run(block.equations)
    return walk.values


class _Uniform(Interpreter[int]):
    """Values are axes, as bits."""

    def unknown(self, atom: Atom) -> int:
        return _all(atom) if isinstance(atom, Literal) else 0

    def join(self, values: Sequence[int], atoms: Sequence[Atom]) -> int:
        return functools.reduce(operator.and_, values)

    def inside(self, value: int) -> int:
        return value >> 1

    def outside(self, value: int) -> int:
        return value << 1

    def plain(self, equation: Equation, operands: Sequence[int]) -> Sequence[int]:
        return [_axes(equation, operands)] * len(equation.outputs)


def _all(atom: Atom) -> int:
    return (1 << len(atom.shape)) - 1


def _axes(equation: Equation, operands: Sequence[int]) -> int:
    """Maps the constant axes of the operands to those of the results."""
    if not equation.outputs:
        return 0
    out, op = equation.outputs[0], equation.op
    if op == "random_bits":
        return _all(out)
    if op == "iota":
        return _all(out) & ~(1 << equation.params["dimension"])
    if op in ("broadcast_in_dim", "tile"):
        operand = equation.inputs[0]
        constant = operands[0] | union(1 << axis for axis, size in enumerate(operand.shape) if size == 1)
        if op == "tile":
            return constant
        dims = enumerate(equation.params["broadcast_dimensions"])
        return _all(out) & ~union(1 << to for axis, to in dims if not constant >> axis & 1)
    if op in ELEMENTWISE:
        bits = (bits for atom, bits in zip(equation.inputs, operands, strict=True) if atom.shape == out.shape)
        return functools.reduce(operator.and_, bits, _all(out))
    if op == "dot_general":
        return _placed(equation, operands, 0) | _placed(equation, operands, 1)
    if op == "reshape" and operands[0] == _all(equation.inputs[0]):
        return _all(out)
    return _placed(equation, operands, 0) if op in _SHAPED or op in REDUCTION_PRIMITIVES else 0


def _placed(equation: Equation, operands: Sequence[int], k: int) -> int:
    operand, out = equation.inputs[k], equation.outputs[0]
    axes = [axis for axis in range(len(operand.shape)) if operands[k] >> axis & 1]
    result_axes = [(result_axis(equation, k, axis), operand.shape[axis]) for axis in axes]
    return union(1 << at for at, size in result_axes if at is not None and at != SUMMED and out.shape[at] == size)


# --- an axis of an operand (of examples, of rows) is followed into an equation's results, primitive by primitive ---
#
# `result_axis` says where it goes; `partners` says which axes of the other operands run along with it.


#: Stands for an axis that is reduced or contracted away.
SUMMED = -1
_WORKS_ALONG = frozenset({"concatenate", "sort"})
#: Functions of each key of an array; its axes lead those of the result, and words come last.
_OF_KEYS = frozenset("random_seed random_wrap random_unwrap random_clone random_split random_bits".split())
#: Elementwise operations on keys and numbers, and one that iterates until all elements converge (rounding may differ).
_BY_ELEMENT = ELEMENTWISE | {"random_fold_in", "regularized_incomplete_beta"}
#: Operations whose operands of equal rank lie along each other.
_ALONGSIDE = _BY_ELEMENT | _WORKS_ALONG | {"dynamic_update_slice", "select_and_gather_add", "select_and_scatter_add"}


def result_axis(equation: Equation, k: int, axis: int, devices: int = 1) -> int | None:
    """Returns where an axis of operand k is in the results: an axis, SUMMED, or None if it can't be followed.

    `devices`: number of devices over which it is to be spread.
    """
    if equation.op == "reshape":
        return _reshape(equation, axis, devices)
    if equation.op in _BY_ELEMENT:
        same = len(equation.inputs[k].shape) == len(equation.outputs[0].shape)
        return axis if same and equation.inputs[k].shape[axis] == equation.outputs[0].shape[axis] else None
    rule = _RESULT_AXES.get(equation.op, _stacked)
    return rule(equation, k, axis)


def partners(equation: Equation, k: int, axis: int) -> Sequence[tuple[int, int]]:
    """Lists the other operands' axes that run along with an axis of operand k, as (operand, axis)."""
    if equation.op in _ALONGSIDE:
        rank = len(equation.inputs[k].shape)
        return [(j, axis) for j, a in enumerate(equation.inputs) if j != k and len(a.shape) == rank]
    if equation.op == "stack" or _is_stack(equation, axis):
        return [(j, axis) for j in range(len(equation.inputs)) if j != k]
    if equation.op.startswith("scatter"):
        pair = _scattered(equation, k, axis)
        return [] if pair is None else [(j, along) for j, along in pair[1].items() if j != k]
    pairs = _PAIRED.get(equation.op)
    return [] if pairs is None else [(1 - k, dims[1 - k]) for dims in pairs(equation) if k < 2 and dims[k] == axis]


def _is_stack(equation: Equation, axis: int) -> bool:
    core = PRIMITIVES.get(equation.op, Primitive()).core
    return core is not None and axis < len(equation.inputs[0].shape) - core


def _stacked(equation: Equation, k: int, axis: int) -> int | None:
    return axis if _is_stack(equation, axis) else None


def _solve(equation: Equation, k: int, axis: int) -> int | None:
    side = len(equation.inputs[k].shape) - (1 if equation.params["left_side"] else 2)
    return axis if (k == 1 and axis == side) else _stacked(equation, k, axis)


def _broadcast(equation: Equation, k: int, axis: int) -> int | None:
    to = equation.params["broadcast_dimensions"][axis]
    return to if equation.outputs[0].shape[to] == equation.inputs[0].shape[axis] else None


def _reshape(equation: Equation, axis: int, devices: int) -> int | None:
    """Follows an axis through a reshape; equal shards stay equal where it leads a merge or a split.

    Of a batch that is split into fewer parts than devices (microbatches) each part is spread: its examples move.
    """
    old, new = equation.inputs[0].shape, equation.outputs[0].shape
    before = math.prod(old[:axis])
    dim = next((d for d in range(len(new)) if math.prod(new[:d]) == before and new[d] > 1), None)
    if dim is None or new[dim] % devices == 0 or old[axis] % devices or dim + 1 == len(new):
        return dim
    is_split = old[axis] % (new[dim] * new[dim + 1]) == 0
    return dim + 1 if is_split and new[dim + 1] % devices == 0 else dim


def _reduce(equation: Equation, k: int, axis: int) -> int | None:
    gone = equation.params["axes"]
    return SUMMED if axis in gone else _without(gone, axis)


def _without(gone: Sequence[int], axis: int) -> int | None:
    return None if axis in gone else axis - sum(d < axis for d in gone)


def _kept(equation: Equation, k: int, axis: int) -> int | None:
    """Follows an axis through operations along other axes: slices, pads, sorts, scans."""
    p, rank = equation.params, len(equation.inputs[k].shape)
    if equation.op == "pad" and tuple(p["padding_config"][axis]) != (0, 0, 0):  # (1, -1) keeps the size, and shifts
        return None
    name = "reduction_dimension" if equation.op == "approx_top_k" else PRIMITIVES.get(equation.op, Primitive()).along
    along = p[name] if name else ()
    if axis in (d % rank for d in (along if isinstance(along, tuple) else (along,))):
        return None
    same = equation.inputs[k].shape[axis] == equation.outputs[0].shape[axis]
    return axis if same or equation.op == "concatenate" else None


def _gather(equation: Equation, k: int, axis: int) -> int | None:
    """Follows an axis of the ids into the result, or one of the operand that the windows hold whole."""
    numbers = equation.params["dimension_numbers"]
    if k == 1:
        examples = [d for d in range(len(equation.outputs[0].shape)) if d not in numbers.offset_dims]
        return examples[axis] if axis < len(examples) else None
    if axis in numbers.operand_batching_dims:
        batching = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return _gather(equation, 1, batching)
    shape = equation.inputs[0].shape
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axis in gone or equation.params["slice_sizes"][axis] != shape[axis]:
        return None
    return numbers.offset_dims[[d for d in range(len(shape)) if d not in gone].index(axis)]


def _lookup(equation: Equation, k: int, axis: int) -> int | None:
    return equation.params["spread"] if k == 2 and axis == equation.params["batch"] else None


def _scattered(equation: Equation, k: int, axis: int) -> tuple[int, Mapping[int, int]] | None:
    """Returns where an axis of a scatter's operand, indices or updates goes, and each one's axis that runs along it.

    That is a batching dimension, or one that a window of updates has whole, or examples' updates that are summed.
    """
    numbers, (operand, indices, updates) = equation.params["dimension_numbers"], equation.inputs
    examples = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    for d, index in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        batched = {0: d, 1: index, 2: examples[index]}
        if batched[k] == axis:
            return d, batched
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(operand.shape)) if d not in gone]
    for d, at in zip(window, numbers.update_window_dims, strict=True):
        if {0: d, 2: at}.get(k) == axis:
            return (d, {0: d, 2: at}) if operand.shape[d] == updates.shape[at] else None
    if k == 0 or equation.op != "scatter-add" or (k == 1 and axis == len(indices.shape) - 1):
        return None
    index = axis if k == 1 else examples.index(axis)
    return SUMMED, {1: index, 2: examples[index]}


def _scatter(equation: Equation, k: int, axis: int) -> int | None:
    found = _scattered(equation, k, axis)
    return None if found is None else found[0]


def _gather_pairs(equation: Equation) -> Sequence[tuple[int, int]]:
    numbers = equation.params["dimension_numbers"]
    return list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))


def _dot(equation: Equation, k: int, axis: int) -> int | None:
    contract, batch = equation.params["dimension_numbers"]
    if axis in contract[k]:
        return SUMMED
    if axis in batch[k]:
        return batch[k].index(axis)
    free = [d for d in range(len(equation.inputs[k].shape)) if d not in contract[k] and d not in batch[k]]
    left = len(equation.inputs[0].shape) - len(contract[0]) - len(batch[0]) if k == 1 else 0
    return len(batch[k]) + left + free.index(axis)


def _dot_pairs(equation: Equation) -> Sequence[tuple[int, int]]:
    return [pair for dims in equation.params["dimension_numbers"] for pair in zip(*dims, strict=True)]


def _convolve(equation: Equation, k: int, axis: int) -> int | None:
    numbers = equation.params["dimension_numbers"]
    if any(dims[k] == axis for dims in _group_pairs(equation)):
        return numbers.out_spec[1]
    return numbers.out_spec[0] if k == 0 and axis == numbers.lhs_spec[0] else None


def _group_pairs(equation: Equation) -> Sequence[tuple[int, int]]:
    p, numbers = equation.params, equation.params["dimension_numbers"]
    by_feature, by_batch = (p[f"{kind}_group_count"] > 1 for kind in ("feature", "batch"))
    return [(numbers.lhs_spec[0 if by_batch else 1], numbers.rhs_spec[0])] if by_feature or by_batch else []


#: Operations that read an array in windows; the second operand of some has the windows' own axes.
_WINDOWED = frozenset(
    "reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add".split()
)


def _windowed(equation: Equation, k: int, axis: int) -> int | None:
    p, names = equation.params, ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = (p[name][axis] for name in names if name in p)
    return axis if all(size == 1 for size in sizes) and tuple(p["padding"][axis]) == (0, 0) else None


_RESULT_AXES: Mapping[str, Callable[[Equation, int, int], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "tile": lambda e, k, axis: axis if e.params["reps"][axis] == 1 else None,
    "transpose": lambda e, k, axis: list(e.params["permutation"]).index(axis),
    "squeeze": lambda e, k, axis: _without([d % len(e.inputs[0].shape) for d in e.params["dimensions"]], axis),
    "gather": _gather,
    **dict.fromkeys(("scatter", *(f"scatter-{f}" for f in ("add", "sub", "mul", "min", "max"))), _scatter),
    "ap.lookup": _lookup,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
    "stack": lambda e, k, axis: axis + (e.params["axis"] <= axis),
    "unstack": lambda e, k, axis: _without([e.params["axis"]], axis),
    **{op: _windowed for op in _WINDOWED},
    "fft": lambda e, k, axis: axis if axis < len(e.inputs[0].shape) - len(e.params["fft_lengths"]) else None,
    **dict.fromkeys(REDUCTION_PRIMITIVES, _reduce),
    **{op: _reduce for op in ("argmax", "argmin", "reduce_xor")},
    "reduce": lambda e, k, axis: _without(e.params["dimensions"], axis),
    "triangular_solve": _solve,
    **dict.fromkeys(_OF_KEYS, lambda e, k, axis: axis if axis < len(e.outputs[0].shape) else None),
    **{op: _kept for op in (*CUMULATIVE, "rev", "split", "top_k", "approx_top_k")},
    **{op: _kept for op in ("slice", "dynamic_slice", "dynamic_update_slice", "pad", *_WORKS_ALONG)},
}
#: Pairs of axes along which the first two operands are matched.
_PAIRED: Mapping[str, Callable[[Equation], Sequence[tuple[int, int]]]] = {
    "dot_general": _dot_pairs,
    "gather": _gather_pairs,
    "conv_general_dilated": _group_pairs,
}
