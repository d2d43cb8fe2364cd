"""Finds values that count along an axis: iotas in any shape, also after JAX's test for negative indices.

Each component of index vectors is known by itself: `h[jnp.arange(n), i]` has one that counts. `Constants`
computes indices that follow from constants alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import result_axis
from autopar.analysis.interpreter import Interpreter
from autopar.analysis.primitives import IDENTITIES, PRIMITIVES, SHAPED
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal
from autopar.jax_types import Params


@dataclass(frozen=True, slots=True)
class Counted:
    """Knowledge of a value."""

    axis: int | None = None  #: Each element is its own index along this axis; None: unknown.
    #: For each index of the last axis, the axis along which the elements there count; (): unknown.
    columns: tuple[int | None, ...] = ()
    is_false: bool = False  #: All elements are False.

    def moved(self, to: dict[int, int]) -> Counted:
        """Returns the value after axes have moved; those missing in `to` are lost."""
        axis = None if self.axis is None else to.get(self.axis)
        columns = tuple(None if c is None else to.get(c) for c in self.columns)
        return Counted(axis, columns if any(c is not None for c in columns) else ())


_NOTHING = Counted()


class Counting(Interpreter[Counted]):
    """Finds counting values in a block, and in those nested in it."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.run(block.equations)

    def axis(self, atom: Atom) -> int | None:
        """Returns the axis along which a value counts from 0, equal along all others."""
        return self.value(atom).axis

    def columns(self, atom: Atom) -> tuple[int | None, ...]:
        """Returns the axis along which each component of index vectors counts."""
        known, last = self.value(atom), len(atom.shape) - 1
        if known.columns or known.axis in (None, last):
            return known.columns
        return (known.axis,) * atom.shape[last]

    # --- the lattice ---

    def unknown(self, atom: Atom) -> Counted:
        if not isinstance(atom, Literal) or jax_compat.is_key(atom.dtype) or atom.shape == ():
            return _NOTHING
        if np.dtype(atom.dtype) == np.bool_:
            return Counted(is_false=not np.any(np.asarray(atom.value)))
        long = [d for d, size in enumerate(atom.shape) if size > 1]
        if len(long) != 1 or not np.array_equal(np.asarray(atom.value).reshape(-1), np.arange(atom.shape[long[0]])):
            return _NOTHING
        return Counted(long[0])

    def join(self, values: Sequence[Counted], atoms: Sequence[Atom]) -> Counted:
        return values[0] if all(v == values[0] for v in values) else _NOTHING

    def inside(self, value: Counted) -> Counted:
        axes = {*value.columns, value.axis} - {None, 0}
        return value.moved({d: d - 1 for d in axes if d is not None})

    def outside(self, value: Counted) -> Counted:
        return value.moved({d: d + 1 for d in {*value.columns, value.axis} if d is not None})

    def plain(self, equation: Equation, operands: Sequence[Counted]) -> Sequence[Counted]:
        return [self._result(equation, operands)] * len(equation.outputs)

    def _result(self, equation: Equation, operands: Sequence[Counted]) -> Counted:
        op, (out, *more) = equation.op, equation.outputs or (None,)
        if out is None or more:
            return _NOTHING
        if op == "iota":
            return _held(Counted(equation.params["dimension"]), out)
        if op == "lt" and operands[0].axis is not None:
            return Counted(is_false=_is_negative(equation.inputs[1]))
        if op == "select_n" and operands[0].is_false:
            return operands[1]
        if op in IDENTITIES:
            return operands[0]
        if op == "convert_element_type":
            return _held(operands[0], out)
        if op in SHAPED and operands[0] != _NOTHING:
            return _shaped(equation, operands[0])
        if op == "concatenate" and equation.params["dimension"] == len(out.shape) - 1:
            return Counted(columns=tuple(c for a in equation.inputs for c in self.columns(a) or (None,) * a.shape[-1]))
        if op == "stack" and equation.params["axis"] == len(out.shape) - 1:
            return Counted(columns=tuple(v.axis for v in operands))
        return _NOTHING


def _held(value: Counted, out: Atom) -> Counted:
    if jax_compat.is_key(out.dtype) or not jnp.issubdtype(out.dtype, jnp.integer):
        return replace(_NOTHING, is_false=value.is_false)
    axes = [d for d in (value.axis, *value.columns) if d is not None]
    return value if all(out.shape[d] - 1 <= jnp.iinfo(out.dtype).max for d in axes) else _NOTHING


def _is_negative(limit: Atom) -> bool:
    return isinstance(limit, Literal) and bool(np.all(np.asarray(limit.value) <= 0))


def _shaped(equation: Equation, value: Counted) -> Counted:
    old, new = equation.inputs[0].shape, equation.outputs[0].shape
    result_axes = {d: result_axis(equation, 0, d) for d, size in enumerate(old) if size > 1}
    to = {d: at for d, at in result_axes.items() if at is not None and new[at] == old[d]}
    last = len(old) - 1
    kept = value if to.get(last) == len(new) - 1 else replace(value, columns=())
    return replace(kept.moved(to), is_false=value.is_false)


# --- constants ---


def _broadcast(x: np.ndarray, params: Params) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for size, at in zip(x.shape, params["broadcast_dimensions"], strict=True):
        shape[at] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


#: Of one operand, and parameters.
_SHAPES: Mapping[str, Callable[[np.ndarray, Params], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, params: x.reshape(params["new_sizes"]),
    "squeeze": lambda x, params: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda x, params: np.transpose(x, params["permutation"]),
}
#: NumPy rounds quotients of integers in another way.
_FOLDED = {op: p.fold for op, p in PRIMITIVES.items() if p.fold is not None and op not in ("div", "rem", "pow")}
_KNOWN = {*_SHAPES, *_FOLDED, *IDENTITIES, "concatenate", "convert_element_type", "select_n"}


class Constants:
    """Computes integers that follow from constants alone, of so many elements at most, through so many equations."""

    def __init__(self, block: Block, size: int = 1 << 22, depth: int = 24) -> None:
        self._made = {v: e for e in block.walk() for v in e.outputs}
        self._size, self._depth = size, depth
        self._found: dict[Atom, np.ndarray | None] = {}

    def value(self, atom: Atom, depth: int = 0) -> np.ndarray | None:
        """Returns what a value is; None if that isn't known."""
        if atom not in self._found:
            self._found[atom] = self._computed(atom, depth)
        return self._found[atom]

    def _computed(self, atom: Atom, depth: int) -> np.ndarray | None:
        is_key = not isinstance(atom.type, ArrayType) or jax_compat.is_key(atom.dtype)
        if is_key or np.dtype(atom.dtype).kind not in "biu" or atom.type.size > self._size or depth > self._depth:
            return None
        if isinstance(atom, Literal):
            return np.asarray(atom.value)
        equation = self._made.get(atom)
        if equation is None or equation.bodies or len(equation.outputs) > 1:
            return None
        op, params, shape = equation.op, equation.params, atom.shape
        if op == "iota":
            return _broadcast(np.arange(shape[params["dimension"]], dtype=atom.dtype), _along(shape, params))
        if op not in _KNOWN:
            return None
        operands = []
        for operand in equation.inputs:
            value = self.value(operand, depth + 1)
            if value is None:
                return None
            operands.append(value)
        if op in _SHAPES:
            return _SHAPES[op](operands[0], params)
        if op == "concatenate":
            return np.concatenate(operands, params["dimension"])
        if op == "select_n":
            return np.choose(operands[0].astype(int), operands[1:])
        with np.errstate(all="ignore"):
            folded = _FOLDED[op](*operands) if op in _FOLDED else operands[0]
        return np.broadcast_to(folded, shape).astype(atom.dtype)


def _along(shape: Sequence[int], params: Params) -> Params:
    return {"shape": shape, "broadcast_dimensions": (params["dimension"],)}
