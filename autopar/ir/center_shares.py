"""`center_shares`: what each server keeps of a centre, weights and pieces of large ones (`autopar.sync.Elastic`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.ir.balance import balanced_pieces

#: Pieces begin at multiples of this many bytes, which the size of any element divides.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Some of a weight's bytes, as its elements lie one behind the other.

    Attributes:
      weight: Its number.
      start, stop: Which bytes.
    """

    weight: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Returns how many bytes they are."""
        return self.stop - self.start


def center_shares(sizes: Sequence[int], servers: int) -> list[list[Span]]:
    """Returns what each server keeps that has anything, balanced by bytes: an exchange goes element by element, so that
    any large weight can be cut (MXNET-MPI, section 2: large keys are cut over all servers).

    Args:
      sizes: Each weight's bytes.
      servers: How many there are at most. With as many as have anything the shares are the same.
    """

    def cut(whole: Span) -> list[Span]:
        units = whole.nbytes // _ALIGNMENT
        ends = [*(_ALIGNMENT * (units * n // servers) for n in range(servers)), whole.nbytes]
        return [Span(whole.weight, start, stop) for start, stop in pairwise(ends) if stop > start]

    wholes = [Span(k, 0, size) for k, size in enumerate(sizes)]
    return balanced_pieces(wholes, servers, lambda span: span.nbytes, cut)
