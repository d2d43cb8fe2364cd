"""Pairwise cover: the full product's pairs in as few rows as a greedy search finds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


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
