"""`balanced`: things of some bytes, in parts of about as many."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers of the things in each part: the largest come first, each to the part that has least."""
    made: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for n in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        k = min(range(parts), key=lambda k: (filled[k], len(made[k]), k))
        made[k].append(n)
        filled[k] += sizes[n]
    return [sorted(part) for part in made]
