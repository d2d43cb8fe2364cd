"""Rows in arrays, as exchanges have them: the distinct ones of several lists, their bytes, what callers may give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.errors import ArgumentsError

_INT32_MAX = np.iinfo(np.int32).max


def number_dtype(count: int) -> np.dtype:
    """Of numbers below `count`, and of `count`: int32 where they fit, else int64."""
    return np.dtype(np.int32 if count <= _INT32_MAX else np.int64)


def distinct_rows(values: np.ndarray) -> np.ndarray:
    """Sorted, each once; sorts `values` in place."""
    values.sort()
    new = np.empty(values.size, bool)
    new[:1] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return values[new]


def union_rows(wanted: Sequence[np.ndarray]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Sorted distinct rows of all, and where each source's are among them. Each source's are sorted."""
    rows = distinct_rows(np.concatenate(wanted))
    return rows, tuple(rows.searchsorted(part) for part in wanted)


def as_lines(rows: np.ndarray) -> np.ndarray:
    """Rows as `[rows, bytes of a row]`, without a copy where they are contiguous."""
    rows = np.ascontiguousarray(rows)
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), -1 if rows.size else 0)


def take_lines(lines: np.ndarray, back: np.ndarray, out: np.ndarray) -> None:
    if out.size:
        np.take(lines, back, axis=0, out=out, mode="clip")


def first_of(out: np.ndarray, count: int, like: np.ndarray) -> np.ndarray:
    """The first rows of `out`, which must be such as `like`."""
    if out.dtype != like.dtype or out.shape[1:] != like.shape[1:] or len(out) < count or not out.flags.c_contiguous:
        raise ArgumentsError(
            f"out is {out.dtype}{list(out.shape)}: it must be C-contiguous, {like.dtype}, with at least {count} rows "
            f"of shape {like.shape[1:]}"
        )
    return out[:count]


def copied_rows(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    result = first_of(out, len(rows), rows)
    result[...] = rows
    return result


def require_rows(array: np.ndarray, count: int, name: str) -> None:
    if array.ndim < 1 or len(array) != count:
        raise ArgumentsError(
            f"{name} has shape {array.shape}: there must be {count} rows, one for each that was asked for"
        )
