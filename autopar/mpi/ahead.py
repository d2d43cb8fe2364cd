"""Rows that are fetched ahead of the step that needs them, beside the one before.

An owner knows which rows the step under way writes. It tells each rank which of the rows that this has asked for are
among them (`divide`: a bit a row), sends all others at once, and these after they have been written: each row travels
once, as it would without (`Exchange.fetch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autopar.mpi.exchange import Exchange, Requested


@dataclass(frozen=True, slots=True, eq=False)
class RequestedPart:
    """Some of the rows that ranks want of each other."""

    requested: Requested  #: The request of these alone; `requested.rows` are those of the whole request.
    positions: np.ndarray  #: `[n]`, intp, sorted: where they are among the rows that this rank asked for.


def divide(exchange: Exchange, requested: Requested, written: np.ndarray) -> tuple[RequestedPart, RequestedPart]:
    """Divides a request into rows that stay as they are, and rows that are written before they are needed. Collective.

    Args:
      requested: Of ranks that ask owners themselves (`Exchange.knows_lists`).
      written: Rows of this rank that are written, distinct.
    """
    is_written = np.isin(requested.rows, written, assume_unique=True)
    theirs = [is_written[back] for back in requested.sources]
    counts = requested.counts.tolist()
    received = [np.empty(-(-count // 8), np.uint8) for count in counts]
    exchange.swap("ids", [np.packbits(flags) for flags in theirs], received)
    mine = [np.unpackbits(bits, count=n).view(bool) for bits, n in zip(received, counts, strict=True)]

    def part(wanted: bool) -> RequestedPart:
        sources = tuple(b[flags == wanted] for b, flags in zip(requested.sources, theirs, strict=True))
        bounds = (0, *accumulate(int(np.count_nonzero(flags == wanted)) for flags in mine))
        positions = np.flatnonzero(np.concatenate(mine) == wanted)
        return RequestedPart(Requested(requested.rows, bounds, sources), positions)

    return part(False), part(True)
