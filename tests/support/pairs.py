"""Some cases of a product: pairs of values in as few rows as a greedy search finds, or every value once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def pairwise(axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Rows such that every pair of values of two axes occurs in one."""
    names = list(axes)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(axes[a], axes[b])
    }
    rows: list[dict[str, str]] = []
    while missing:
        best = max(
            (dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())),
            key=lambda row: len(_pairs(row) & missing),
        )
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Mapping[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(row.items(), 2))


def paired(axes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Parametrizes a test by a product of values, by name; rows of it that no pair of values needs are `long`."""
    some = pairwise({axis: list(values) for axis, values in axes.items()})
    rows = [dict(zip(axes, names, strict=True)) for names in itertools.product(*axes.values())]
    cases = [
        pytest.param(
            *(axes[axis][name] for axis, name in row.items()),
            id="-".join(row.values()),
            marks=() if row in some else pytest.mark.long,
        )
        for row in rows
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def named(values: Iterable[Any]) -> dict[str, Any]:
    """Returns values by the text that they are shown by."""
    return {str(value): value for value in values}


def diagonal(first: Mapping[str, Any] | Sequence[Any], second: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Parameters for all pairs of two values, by name; only as many as have each value once aren't `long`."""
    axes = [
        axis if isinstance(axis, Mapping) else {getattr(value, "__name__", str(value)): value for value in axis}
        for axis in (first, second)
    ]
    some = {(i % len(axes[0]), i % len(axes[1])) for i in range(max(map(len, axes)))}
    return [
        pytest.param(a, b, id=f"{x}-{y}", marks=() if (i, j) in some else pytest.mark.long)
        for i, (x, a) in enumerate(axes[0].items())
        for j, (y, b) in enumerate(axes[1].items())
    ]


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters (a tuple: of several arguments) of which only each `step`-th one isn't `long`."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.long if k % step else ()) for k, row in enumerate(rows)]


def long(*values: Any) -> Any:
    """Parameters that take long beside others: `make test-all` has them, too."""
    return pytest.param(*values, marks=pytest.mark.long)
