"""Many arrays in few messages: how arrays lie in one buffer, and in which form they are reduced.

What MPI can't reduce as it is travels as something that it can, and comes back:

- float16, bfloat16 and the 8-bit floats as float32, rounded once, after the reduction;
- bool as a byte, combined by its bits;
- max and min of floats as integers of the same order, NaN beyond all others: a NaN of any rank is then
  the result, as in JAX, where MPI's own max keeps or loses it by the order of the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from autopar.errors import ArgumentsError
from autopar.mpi.buffers import ALIGNMENT

#: Name of a reduction -> the name of MPI's.
OPS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN", "and": "BAND", "or": "BOR"}

#: What sums and the like of bools are, as in NumPy.
_OF_BOOLS = {"sum": "BOR", "max": "BOR", "or": "BOR", "prod": "BAND", "min": "BAND", "and": "BAND"}

Spec = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True, slots=True)
class Segment:
    """Arrays that are reduced in one call.

    Attributes:
      dtype: Of the elements that MPI sees.
      op: MPI's name of the reduction.
      ordered: Whether the elements are floats that travel as integers of the same order: these floats' dtype, or None.
      members: Which arrays.
      starts: Where each begins, in elements from the segment's own start.
      size: Elements, the gaps between arrays included.
      offset: Where the segment begins in the buffer, in bytes.
    """

    dtype: np.dtype
    op: str
    ordered: np.dtype | None
    members: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    offset: int

    def flat(self, memory: np.ndarray) -> np.ndarray:
        """The segment in a buffer of bytes, `[size]`, as MPI sees it."""
        return memory[self.offset : self.offset + self.size * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where arrays lie in one buffer.

    Attributes:
      segments: By dtype, in the order of their first arrays.
      nbytes: Of the whole buffer.
      sent: Bytes that MPI is given; less than `nbytes` by the gaps between segments.
    """

    segments: tuple[Segment, ...]
    nbytes: int
    sent: int


@functools.lru_cache(maxsize=64)
def packing(specs: tuple[Spec, ...], op: str) -> Packing:
    """The packing of arrays of these shapes and dtypes, each at a multiple of 64 bytes; an ArgumentsError if there is
    no such reduction, or not of such elements."""
    groups: dict[tuple[np.dtype, str, np.dtype | None], list[int]] = {}
    for k, (_, dtype) in enumerate(specs):
        groups.setdefault(_wire(dtype, op), []).append(k)
    segments: list[Segment] = []
    offset = sent = 0
    for (dtype, name, ordered), members in groups.items():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        starts: list[int] = []
        size, unit = 0, max(ALIGNMENT // dtype.itemsize, 1)
        for k in members:
            size = -(-size // unit) * unit
            starts.append(size)
            size += math.prod(specs[k][0])
        segments.append(Segment(dtype, name, ordered, tuple(members), tuple(starts), size, offset))
        offset += size * dtype.itemsize
        sent += size * dtype.itemsize
    return Packing(tuple(segments), offset, sent)


def pack(segment: Segment, arrays: Sequence[np.ndarray], flat: np.ndarray) -> None:
    """Writes a segment's arrays to where it wants them; `flat` is its part of the buffer."""
    floats = flat if segment.ordered is None else flat.view(segment.ordered)
    for k, start in zip(segment.members, segment.starts, strict=True):
        array = arrays[k]
        np.copyto(floats[start : start + array.size].reshape(array.shape), array, casting="unsafe")
    if segment.ordered is not None:
        _order(floats, -1.0 if segment.op == "MIN" else 1.0)


def unpack(segment: Segment, specs: Sequence[Spec], flat: np.ndarray, results: list[np.ndarray]) -> None:
    """Puts a segment's arrays into `results`: views of `flat`, new arrays where another dtype travelled."""
    if segment.ordered is not None:
        _swap_order(flat)
        flat = flat.view(segment.ordered)
    with np.errstate(all="ignore"):  # what overflows in a narrower float is infinite, as in JAX
        for k, start in zip(segment.members, segment.starts, strict=True):
            shape, dtype = specs[k]
            part = flat[start : start + math.prod(shape)].reshape(shape)
            if dtype.kind == "b":
                part = part.view(bool)
            results[k] = part if part.dtype == dtype else part.astype(dtype)


def _wire(dtype: np.dtype, op: str) -> tuple[np.dtype, str, np.dtype | None]:
    """Dtype that travels, MPI's reduction of it, and the floats' dtype where they travel as ordered integers."""
    if op not in OPS:
        raise ArgumentsError(f"no reduction {op!r}; there are {', '.join(OPS)}")
    if dtype.kind == "b":
        return np.dtype(np.uint8), _OF_BOOLS[op], None
    floating = dtype if dtype in (np.float32, np.float64) else np.dtype(np.float32) if _is_small_float(dtype) else None
    fits = dtype.kind in "iu" or (op in ("sum", "prod") and dtype.kind == "c") or (op not in ("and", "or") and floating)
    if not fits or dtype.itemsize > 16:
        remedy = "convert it to a float, an integer or a bool that has one"
        raise ArgumentsError(f"no {op} over ranks of {dtype}: {remedy}")
    if floating is None:
        return dtype, OPS[op], None
    if op in ("max", "min"):
        return np.dtype(f"i{floating.itemsize}"), OPS[op], floating
    return floating, OPS[op], None


def _is_small_float(dtype: np.dtype) -> bool:
    if dtype.itemsize > 2:
        return False
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def _order(floats: np.ndarray, nan_sign: float) -> None:
    """Replaces floats, in place, by integers of the same order; NaN beyond infinity, on the side of `nan_sign`."""
    holes = np.isnan(floats)
    if holes.any():
        floats[holes] = np.copysign(np.nan, nan_sign)
    _swap_order(floats.view(f"i{floats.itemsize}"))


def _swap_order(bits: np.ndarray) -> None:
    """Between the bits of floats and integers of the same order, in place, its own inverse.

    A float's bits are its sign and a magnitude; for negative ones the magnitude's bits are turned over.
    """
    signs = bits >> (8 * bits.itemsize - 1)
    signs &= np.iinfo(bits.dtype).max
    bits ^= signs
