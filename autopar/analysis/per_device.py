"""Analyses of a step that is written for one device: inputs that hold PRNG keys, and sums that are a device's own."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal as Named

import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import follow_batch
from autopar.analysis.interpreter import Interpreter, union
from autopar.analysis.primitives import ELEMENTWISE, MOVES, Linear, those_that
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES

# --- inputs that hold the words of single PRNG keys: `jax.random.PRNGKey` is an ordinary uint32[2] ---
#
# The axis of such an array isn't one of examples. Its use tells: its words are made a key (`random_wrap`), which is the
# first thing that every function of `jax.random` does. Before that they may be selected, added to, split and stacked.
# So each value carries, for each position of its last axis, the words that it depends on there. A key must be made of
# values that hold each word at a position of its own; otherwise it is unclear whether the words are one key's or the
# data of as many examples, and the user must say.

#: Possible numbers of words of a key: threefry's two, rbg's four.
_WORDS = (2, 4)
#: Operation that makes a key -> number of its operands that hold words.
_SINKS = {"random_wrap": 1, "rng_bit_generator": 1, "threefry2x32": 2}
#: Operation with index operands -> slice of its operands that are data.
_DATA = {"gather": (0, 1), "dynamic_slice": (0, 1), "dynamic_update_slice": (0, 2), "select_n": (1, None)}
#: Up to this size a reshape is followed element by element.
_SMALL = 4096

#: For each position of a value's last axis (one if it has no axis) the words that it depends on, as bits.
Words = tuple[int, ...]


def may_be_words(type_: ArrayType, axis: int | None) -> bool:
    """Returns whether an axis of an array could be that of a key's words."""
    if axis is None or type_.dtype != np.dtype(np.uint32):
        return False
    return axis == len(type_.shape) - 1 and type_.shape[axis] in _WORDS


def use_as_key(block: Block, var: Var) -> Named["never", "key", "unclear"]:
    """Returns whether the last axis of an input is that of a key's words.

    "unclear": it becomes part of a key in another way than each word in a position of its own.
    """
    if not var.shape or var.shape[-1] not in _WORDS:
        return "never"
    walk = _Keys(var.shape[-1])
    walk.values[var] = tuple(1 << k for k in range(var.shape[-1]))
    walk.run(block.equations)
    return "key" if True in walk.uses else "unclear" if walk.uses else "never"


class _Keys(Interpreter[Words]):
    """Follows words. `uses`: for each key made of them, whether the use is clear."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.uses: set[bool] = set()

    def unknown(self, atom: Atom) -> Words:
        return (0,) * _positions(atom.shape)

    def equation(self, equation: Equation, operands: Sequence[Words]) -> Sequence[Words]:
        if not any(map(any, operands)):
            return [self.unknown(v) for v in equation.outputs]
        results = super().equation(equation, operands)
        return [_fitted(words, v.shape) for v, words in zip(equation.outputs, results, strict=True)]

    def plain(self, equation: Equation, operands: Sequence[Words]) -> Sequence[Words]:
        made = operands[: _SINKS.get(equation.op, 0)]
        if any(map(any, made)):
            # `threefry2x32` takes a key's two words as two operands: elements at one index make one key.
            held = made[0] if len(made) == 1 else tuple(union(m) for m in made)
            self.uses.add(sorted(held) == [1 << k for k in range(self.count)])
        return [
            self.unknown(v) if jax_compat.is_key(v.dtype) else _through(equation, k, operands)
            for k, v in enumerate(equation.outputs)
        ]

    def join(self, values: Sequence[Words], atoms: Sequence[Atom]) -> Words:
        return _joined(values)

    def body(self, equation: Equation, block: Block, operands: Sequence[Words]) -> list[Words]:
        fitted = [_fitted(words, v.shape) for v, words in zip(block.inputs, operands, strict=True)]
        return super().body(equation, block, fitted)

    def widen(self, equation: Equation, k: int, carry: Words, result: Words) -> Words:
        """Joins, since carries may take in words of others."""
        return _joined([carry, _fitted(result, (len(carry),))])

    def while_loop(self, equation: Equation, operands: Sequence[Words]) -> Sequence[Words]:
        return self.followed(equation, operands)

    def unconverged(self, equation: Equation) -> Sequence[Words]:
        everything = union([union(self.value(a)) for a in equation.inputs])
        return [(everything,) * _positions(v.shape) for v in equation.outputs]


def _through(equation: Equation, output: int, operands: Sequence[Words]) -> Words:
    op, shape = equation.op, equation.outputs[output].shape
    start, stop = (output, output + 1) if op == "optimization_barrier" else _DATA.get(op, (0, None))
    operands = [*operands[:1], *operands[2:]] if op.startswith("scatter") else operands[start:stop]
    rule = _RULES.get(op)
    words = rule(equation, output, operands) if rule is not None else None
    if words is not None:
        return words
    if op in ELEMENTWISE or op.startswith("scatter") or op in ("optimization_barrier", "dynamic_update_slice"):
        return _joined([_fitted(g, shape) for g in operands])
    return (union(_joined(operands)),) * _positions(shape)


# --- operations that move words ---


def _reshaped(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    old, new = operands[0], equation.outputs[output]
    size = math.prod(new.shape)
    positions = _positions(new.shape)
    if positions == len(old):
        return old
    if size > _SMALL:
        return None
    words = [0] * positions
    for k in range(size):
        words[k % positions] |= old[k % len(old)]
    return tuple(words)


def _broadcast(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    shape, dims = equation.outputs[output].shape, equation.params["broadcast_dimensions"]
    last = bool(dims) and dims[-1] == len(shape) - 1
    return _fitted(operands[0], shape) if last else None


def _sliced(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    start, limit = equation.params["start_indices"][-1], equation.params["limit_indices"][-1]
    return operands[0][start : limit : (equation.params["strides"] or (1,))[-1]]


def _sliced_at(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    size, start = equation.params["slice_sizes"][-1], equation.inputs[-1]
    if size == len(operands[0]):
        return operands[0]
    if not isinstance(start, Literal):
        return None
    first = min(max(int(start.value), 0), len(operands[0]) - size)
    return operands[0][first : first + size]


def _gathered(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    numbers, shape = equation.params["dimension_numbers"], equation.outputs[output].shape
    whole = equation.params["slice_sizes"][-1] == len(operands[0]) == _positions(shape)
    return operands[0] if whole and len(shape) - 1 in numbers.offset_dims else None


def _split(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    sizes = [int(s) for s in equation.params["sizes"]]
    if equation.params["axis"] != len(equation.inputs[0].shape) - 1:
        return operands[0]
    return operands[0][sum(sizes[:output]) : sum(sizes[: output + 1])]


def _concatenated(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    if equation.params["dimension"] == len(equation.outputs[output].shape) - 1:
        return tuple(bits for g in operands for bits in g)
    return _joined(operands)


def _stacked(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    if equation.params["axis"] == len(equation.outputs[output].shape) - 1:
        return tuple(map(union, operands))
    return _joined(operands) if equation.inputs[0].shape else None


def _unstacked(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    is_last = equation.params["axis"] == len(equation.inputs[0].shape) - 1
    return _fitted((operands[0][output],), equation.outputs[output].shape) if is_last else operands[0]


def _reversed(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    return (
        operands[0][::-1] if len(equation.outputs[output].shape) - 1 in equation.params["dimensions"] else operands[0]
    )


def _transposed(equation: Equation, output: int, operands: Sequence[Words]) -> Words | None:
    axes = equation.params["permutation"]
    return operands[0] if not axes or axes[-1] == len(axes) - 1 else None


_RULES: Mapping[str, Callable[[Equation, int, Sequence[Words]], Words | None]] = {
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "broadcast_in_dim": _broadcast,
    "slice": _sliced,
    "dynamic_slice": _sliced_at,
    "gather": _gathered,
    "split": _split,
    "concatenate": _concatenated,
    "stack": _stacked,
    "unstack": _unstacked,
    "rev": _reversed,
    "transpose": _transposed,
}


def _positions(shape: Sequence[int]) -> int:
    return shape[-1] if shape else 1


def _joined(words: Sequence[Words]) -> Words:
    size = max(map(len, words), default=0)
    fitted = [g if len(g) == size else (union(g),) * size for g in words]
    return tuple(union(bits) for bits in zip(*fitted, strict=True))


def _fitted(words: Words, shape: Sequence[int]) -> Words:
    size = _positions(shape)
    return words if len(words) == size else (union(words),) * size


# --- where a step written for one device computes something else when it runs on all devices ---
#
# It does where a device uses a reduction over its own examples before it is reduced over the devices: to normalize them
# examples (batch norm), to clip its own gradient; and where sums over devices aren't means. Values that go through
# linear equations to a `pmean` are the same in both. Only `explain` uses this. Values that can't be followed aren't
# mentioned.


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
