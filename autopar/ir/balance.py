"""Divides things with sizes in bytes into parts of about equal size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
#: Things of at least LEAST_CUT_BYTES are cut where a part would have UNEVEN times the mean of all, or more.
LEAST_CUT_BYTES, UNEVEN = 1 << 16, 1.1


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divides things into parts of about equal size: the largest come first, each to the emptiest part."""
    made: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for n in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        k = min(range(parts), key=lambda k: (filled[k], len(made[k]), k))
        made[k].append(n)
        filled[k] += sizes[n]
    return [sorted(part) for part in made]


def balanced_pieces(
    things: Sequence[T], parts: int, size: Callable[[T], int], cut: Callable[[T], Sequence[T]]
) -> list[list[T]]:
    """Returns the things of each nonempty part. While one part has much more than others, large things are cut.

    Its own large things are cut first, then those of other parts, whose pieces could fill the gaps.

    `size`: returns a thing's bytes. `cut`: cuts a thing into pieces, which aren't cut again; none if it can't be cut.
    """
    made, may_cut = list(things), [True] * len(things)
    while True:
        sizes = [size(thing) for thing in made]
        shares = balanced(sizes, parts)
        fullest = max(shares, key=lambda share: sum(sizes[n] for n in share))
        large = [n for n, size_ in enumerate(sizes) if may_cut[n] and size_ >= LEAST_CUT_BYTES]
        if len(fullest) == 1 or not set(large).isdisjoint(fullest):
            large = [n for n in large if n in fullest]
        if not large or sum(sizes[n] for n in fullest) * parts <= UNEVEN * sum(sizes):
            return [[made[n] for n in share] for share in shares if share]
        n = max(large, key=lambda n: sizes[n])
        pieces = cut(made[n]) or [made[n]]
        made[n : n + 1] = pieces
        may_cut[n : n + 1] = [False] * len(pieces)


# --- the shares of servers that keep a centre (`autopar.sync.Elastic`) ---

#: Pieces begin at multiples of this many bytes, a multiple of any element's size.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes from `start` to `stop` of a weight (by number), whose elements lie contiguously."""

    weight: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def center_shares(sizes: Sequence[int], servers: int) -> list[list[Span]]:
    """Returns the spans that each server keeps, balanced by bytes; servers without any are left out.

    An exchange goes element by element, so any large weight can be cut (MXNET-MPI, section 2: large keys are cut over
    all servers). `sizes`: bytes of each weight.
    """

    def cut(whole: Span) -> list[Span]:
        units = whole.nbytes // _ALIGNMENT
        ends = [*(_ALIGNMENT * (units * n // servers) for n in range(servers)), whole.nbytes]
        return [Span(whole.weight, start, stop) for start, stop in pairwise(ends) if stop > start]

    wholes = [Span(k, 0, size) for k, size in enumerate(sizes)]
    return balanced_pieces(wholes, servers, lambda span: span.nbytes, cut)
