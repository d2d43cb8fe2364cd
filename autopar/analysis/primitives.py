"""Describes each primitive, for all analyses.

A primitive that isn't here has none of these properties. What one analysis alone knows of a primitive is a rule in its
own dict, such as `analysis.rules` and `analysis.batch`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.program import Atom, Equation
from autopar.jax_types import Array


class Linear(enum.Enum):
    """The operands in which a primitive is linear."""

    NO = enum.auto()
    #: In all of them together, except indices.
    TOGETHER = enum.auto()
    #: In the first, whatever the others are.
    FIRST = enum.auto()
    #: In each of two by itself.
    EACH = enum.auto()


@dataclass(frozen=True, slots=True)
class Primitive:
    """The description of a primitive."""

    elementwise: bool = False  #: Each element of the result depends on the operands' elements at the same index.
    moves: bool = False  #: Its results have the operands' elements unchanged, in any order.
    #: If it works on each array of a stack, the rank of one (of the first operand's): all axes ahead of it are the
    #: stack's, in all operands and results.
    core: int | None = None
    linear: Linear = Linear.NO
    keeps_zero: bool = False  #: Zeros give zeros.
    #: A NaN in any operand gives NaN in the elements that depend on it, and finite floats give finite ones except at
    #: a pole.
    keeps_nan: bool = False
    compares: bool = False  #: A NaN gives the same answer whatever it is compared with.
    sizes: str = ""  #: The parameter with the sizes of the result's axes; "" if none has.
    along: str = ""  #: The parameter with the operand's axes along which it works, or that it drops; "" if none has.
    fold: Callable[..., Array] | None = None  #: NumPy's function, to fold constants.


_ELEMENTWISE = Primitive(elementwise=True)
_SMOOTH = replace(_ELEMENTWISE, keeps_nan=True)
_ODD = replace(_SMOOTH, keeps_zero=True)
_SAME = replace(_ODD, moves=True, linear=Linear.FIRST)
_COMPARES = replace(_ELEMENTWISE, compares=True)
_SHAPED = Primitive(moves=True, linear=Linear.FIRST, keeps_zero=True, keeps_nan=True)
_PLACED = Primitive(moves=True, linear=Linear.FIRST)
_JOINED = Primitive(moves=True, linear=Linear.TOGETHER)
_REDUCES = Primitive(keeps_nan=True)
_MATRICES = Primitive(core=2)

_FOLDED: Mapping[str, tuple[Primitive, Callable[..., Array]]] = {
    "add": (replace(_SMOOTH, linear=Linear.TOGETHER), np.add),
    "add_any": (replace(_SMOOTH, linear=Linear.TOGETHER), np.add),
    "sub": (replace(_SMOOTH, linear=Linear.TOGETHER), np.subtract),
    "mul": (replace(_ODD, linear=Linear.EACH), np.multiply),
    "div": (_SMOOTH, np.divide),
    "rem": (_ELEMENTWISE, np.fmod),
    "max": (_SMOOTH, np.maximum),
    "min": (_SMOOTH, np.minimum),
    "neg": (replace(_ODD, linear=Linear.FIRST), np.negative),
    "sign": (_ODD, np.sign),
    "abs": (_ODD, np.abs),
    "square": (_ODD, np.square),
    "sqrt": (_ODD, np.sqrt),
    "rsqrt": (_SMOOTH, lambda x: 1 / np.sqrt(x)),
    "cbrt": (_ODD, np.cbrt),
    "exp": (_SMOOTH, np.exp),
    "exp2": (_SMOOTH, np.exp2),
    "expm1": (_ODD, np.expm1),
    "log": (_SMOOTH, np.log),
    "log1p": (_ODD, np.log1p),
    "tanh": (_ODD, np.tanh),
    "sin": (_ODD, np.sin),
    "cos": (_SMOOTH, np.cos),
    "logistic": (_SMOOTH, lambda x: 1 / (1 + np.exp(-x))),
    "floor": (_ODD, np.floor),
    "ceil": (_ODD, np.ceil),
    "pow": (_ELEMENTWISE, np.power),
    "is_finite": (_COMPARES, np.isfinite),
    "eq": (_COMPARES, np.equal),
    "ne": (_COMPARES, np.not_equal),
    "lt": (_COMPARES, np.less),
    "le": (_COMPARES, np.less_equal),
    "gt": (_COMPARES, np.greater),
    "ge": (_COMPARES, np.greater_equal),
    "and": (_ELEMENTWISE, np.bitwise_and),
    "or": (_ELEMENTWISE, np.bitwise_or),
    "xor": (_ELEMENTWISE, np.bitwise_xor),
    "not": (_ELEMENTWISE, np.invert),
    "real": (replace(_ELEMENTWISE, linear=Linear.FIRST, keeps_zero=True), np.real),
    "imag": (replace(_ELEMENTWISE, linear=Linear.FIRST, keeps_zero=True), np.imag),
    "conj": (replace(_ELEMENTWISE, keeps_zero=True), np.conj),
    "complex": (replace(_ELEMENTWISE, keeps_zero=True), lambda x, y: x + 1j * y),
    "one_minus_square": (_SMOOTH, lambda x: 1 - x * x),
}
_OTHERS: Mapping[str, Primitive] = {
    "copy copy_p stop_gradient name device_put convert_element_type": _SAME,
    "sharding_constraint layout_constraint pvary": replace(_ODD, moves=True),
    "integer_pow asin atan round": _ODD,
    "clamp reduce_precision": _SMOOTH,
    "select_n acos acosh asinh atanh atan2 sinh cosh tan erf erfc erf_inv lgamma digamma igamma igammac": _ELEMENTWISE,
    "igamma_grad_a polygamma zeta bessel_i0e bessel_i1e eq_to lt_to le_to": _ELEMENTWISE,
    "nextafter population_count clz shift_left shift_right_logical shift_right_arithmetic": _ELEMENTWISE,
    "bitcast_convert_type mul_add mulhi random_bits_like": _ELEMENTWISE,
    "cholesky eig eigh hessenberg householder_product lu geqrf qr schur svd triangular_solve tridiagonal": _MATRICES,
    "tridiagonal_solve lu_pivots_to_permutation": Primitive(core=1),
    "broadcast_in_dim": replace(_SHAPED, sizes="shape"),
    "reshape": replace(_SHAPED, sizes="new_sizes"),
    "transpose": _SHAPED,
    "squeeze": replace(_SHAPED, along="dimensions"),
    "slice": replace(_PLACED, sizes="limit_indices"),
    "dynamic_slice": replace(_PLACED, sizes="slice_sizes"),
    "split unstack": replace(_PLACED, along="axis"),
    "rev": replace(_PLACED, along="dimensions"),
    "tile gather": _PLACED,
    "concatenate": replace(_JOINED, along="dimension"),
    "stack pad": _JOINED,
    "iota": Primitive(sizes="shape"),
    "sort": Primitive(along="dimension"),
    "top_k": Primitive(along="axis"),
    "scatter-add dynamic_update_slice": Primitive(linear=Linear.TOGETHER),
    "dot_general": replace(_REDUCES, linear=Linear.EACH),
    "conv_general_dilated": Primitive(linear=Linear.EACH),
    "reduce_sum": replace(_REDUCES, linear=Linear.FIRST, along="axes"),
    "reduce_max reduce_min reduce_prod": replace(_REDUCES, along="axes"),
    "reduce_and reduce_or argmax argmin": Primitive(along="axes"),
    "cumsum": replace(_REDUCES, linear=Linear.FIRST, along="axis"),
    "cumprod cummax cummin cumlogsumexp": Primitive(along="axis"),
}


def described_once(entries: Iterable[tuple[str, Primitive]]) -> Mapping[str, Primitive]:
    """Returns the table of (name, primitive). Raises ValueError if a name comes twice."""
    table: dict[str, Primitive] = {}
    for op, primitive in entries:
        if op in table:
            raise ValueError(
                f"the primitive {op!r} is described twice: leave one entry of autopar/analysis/primitives.py"
            )
        table[op] = primitive
    return table


PRIMITIVES = described_once(
    [
        *((op, replace(primitive, fold=fold)) for op, (primitive, fold) in _FOLDED.items()),
        *((op, primitive) for ops, primitive in _OTHERS.items() for op in ops.split()),
    ]
)


def those_that(says: Callable[[Primitive], bool]) -> frozenset[str]:
    """Returns the names of the primitives for which something holds."""
    return frozenset(op for op, primitive in PRIMITIVES.items() if says(primitive))


ELEMENTWISE = those_that(lambda p: p.elementwise)
#: Elementwise primitives that can run on any part of their operands with the same results.
PLACED_ELEMENTWISE = ELEMENTWISE - {"sharding_constraint", "random_bits_like"}
#: Primitives that return their operand unchanged, in the same shape and dtype.
IDENTITIES = those_that(lambda p: p.elementwise and p.moves) - {"convert_element_type"}
#: Primitives that return all elements of one operand unchanged, in any shape.
MOVES = those_that(lambda p: p.moves and p.keeps_nan)
#: Those of MOVES that change the shape.
SHAPED = MOVES - ELEMENTWISE
CUMULATIVE = frozenset(op for op in PRIMITIVES if op.startswith("cum"))


# --- axes along which values are constant ---


def constant_axes(equation: Equation, known: Mapping[Atom, int]) -> int:
    """Returns the axes along which the result of an equation is constant, as bits. `known`: of its operands.

    Unlike `analysis.batch`, which finds what fits a guess, this holds: random bits and closed-over arrays are constant
    along no axis.
    """
    if len(equation.outputs) != 1:
        return 0
    out, op = equation.outputs[0], equation.op
    every = (1 << len(out.shape)) - 1
    if op == "ap.full":
        return every
    if op == "iota":
        return every & ~(1 << equation.params["dimension"])
    if op == "broadcast_in_dim":
        operand, dims = equation.inputs[0], equation.params["broadcast_dimensions"]
        sizes = enumerate(zip(dims, operand.shape, strict=True))
        varying = (to for k, (to, size) in sizes if size > 1 and not known.get(operand, 0) >> k & 1)
        return functools.reduce(lambda bits, to: bits & ~(1 << to), varying, every)
    if op in PLACED_ELEMENTWISE and all(fits(a.shape, out.shape) for a in equation.inputs):
        bits = (constant_along(a, known) for a in equation.inputs if a.shape)
        return functools.reduce(lambda a, b: a & b, bits, every) if out.shape else 0
    return 0


def constant_along(atom: Atom, known: Mapping[Atom, int]) -> int:
    """Returns the axes along which a value is constant, those of size 1 among them."""
    return functools.reduce(
        lambda bits, d: bits | (atom.shape[d] == 1) << d, range(len(atom.shape)), known.get(atom, 0)
    )


def fits(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Returns whether an operand of an elementwise equation is a scalar, or has the result's axes (some may be 1)."""
    same = len(shape) == len(result)
    return not shape or (same and all(a in (1, b) for a, b in zip(shape, result, strict=True)))
