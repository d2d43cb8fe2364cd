"""The table of primitives: what each is, by itself. All analyses read it.

A primitive that isn't here is nothing of all this: it is no elementwise one, not linear, and so on. What an analysis
has to say of one primitive alone is a rule in its own dict, such as `analysis.rules` and `analysis.batch_rules`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


class Linear(enum.Enum):
    """In which operands a primitive is linear."""

    NO = enum.auto()
    #: In all of them together, indices apart.
    TOGETHER = enum.auto()
    #: In the first, whatever the others are.
    FIRST = enum.auto()
    #: In each of two by itself.
    EACH = enum.auto()


@dataclass(frozen=True, slots=True)
class Primitive:
    """The description of a primitive.

    Attributes:
      elementwise: Whether each element of the result is made of the operands' elements in the same place.
      moves: Whether its results have the operands' elements as they are, in whatever places.
      core: Of a primitive that does the same with each array of a stack, the rank of one (of the first operand's): all
        axes ahead of it are the stack's, in all operands and results.
      linear: In which operands.
      keeps_zero: Whether zeros give zeros.
      keeps_nan: Of floats, whether a NaN in any operand gives NaN (in the places that are made of it), and finite
        numbers give finite ones but at a pole.
      compares: Whether a NaN gives the same answer whatever it is compared with.
      sizes: The parameter that has the sizes of the result's axes; "" if none has.
      along: The parameter that has the axes of the operand along which it works, or that it drops; "" if none has.
      fold: NumPy's function of the same name; None if constants aren't folded.
    """

    elementwise: bool = False
    moves: bool = False
    core: int | None = None
    linear: Linear = Linear.NO
    keeps_zero: bool = False
    keeps_nan: bool = False
    compares: bool = False
    sizes: str = ""
    along: str = ""
    fold: Callable[..., Any] | None = None


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

_FOLDED: Mapping[str, tuple[Primitive, Callable[..., Any]]] = {
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
    """Returns the table of (name, primitive).

    Raises:
      ValueError: a name comes twice.
    """
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
    """Returns the names of the primitives of which something holds."""
    return frozenset(op for op, primitive in PRIMITIVES.items() if says(primitive))


ELEMENTWISE = those_that(lambda p: p.elementwise)
#: Those that give the same value in the same place, whatever part of the operands they are run on.
PLACED_ELEMENTWISE = ELEMENTWISE - {"sharding_constraint", "random_bits_like"}
#: What hands on its operand as it is, in the same shape and dtype.
IDENTITIES = those_that(lambda p: p.elementwise and p.moves) - {"convert_element_type"}
#: What hands on one operand's elements as they are, all of them, in whatever shape.
MOVES = those_that(lambda p: p.moves and p.keeps_nan)
#: Those of them that give an array another shape.
SHAPED = MOVES - ELEMENTWISE
CUMULATIVE = frozenset(op for op in PRIMITIVES if op.startswith("cum"))
