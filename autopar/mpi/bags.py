"""Bags of rows: their weighted sums are taken by the owners of the rows, and bags' cotangents become gradients there.

A rank that looks up a row only to add it to others needs the sum alone. It tells each owner which of its rows are in
which bag (`ask_bags`, after `Exchange.ask`), gets a partial sum of each bag (`add_up`), and sends each bag's cotangent
once, which the owner multiplies by the weights and adds to the rows (`spread`). A bag that has no row of an owner costs
nothing there. Partial sums are added in the order of the owners, gradients in the order of the ranks, so that each run
has the same bits. Long bags are added up in a tree, as XLA does, since rounding errors of a sequential sum grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from autopar.ir.program import known
from autopar.mpi.exchange import Exchange, Requested

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: Most rows that are added one after the other. The errors of 20,000 are 1.4 to 1.8 of those of XLA's sums then, which
#: are trees as well, and were 50 to 70 of them.
_SEQUENCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class RequestedBags:
    """Bags whose sums ranks want of each other.

    Attributes:
      count: Number of this rank's bags.
      order: `[n]`: this rank's ids (in the order of the bags) by their owners.
      ends: Those of owner r are `order[ends[r]:ends[r + 1]]`.
      numbers: By owner the bags that have rows of it, sorted.
      matrix: `[bags, u]`: the weights of this rank's rows in the bags of each rank, those without such rows left out.
      tree: Matrices whose product, the last one's left, is `matrix`: what is added up one after the other.
      bounds: The bags of rank r are `matrix[bounds[r]:bounds[r + 1]]`.
    """

    count: int
    order: np.ndarray
    ends: tuple[int, ...]
    numbers: tuple[np.ndarray, ...]
    matrix: csr_array
    tree: Sequence[csr_array]
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BagIds:
    """A rank's ids in bags.

    Attributes:
      wanted: `[n]`: which of the storage indices that the rank asked for each id is.
      bags: `[n]`, sorted: its bag, below `count`.
      longest: The most ids of a bag, on any rank.
      weights: `[n]`: what its row is multiplied by, or None on all ranks.
      dtype: Of rows and weights.
    """

    wanted: np.ndarray
    bags: np.ndarray
    count: int
    longest: int
    weights: np.ndarray | None
    dtype: np.dtype


def ask_bags(
    exchange: Exchange, requested: Requested, indices: np.ndarray, shard_rows: int, ids: BagIds
) -> RequestedBags:
    """Tells owners which rows are in this rank's bags, and learns of the others'. Collective.

    `indices`, `shard_rows`: what was asked for (`Exchange.ask`). The number of bags is the same on all ranks.
    """
    size, asked, knows = exchange.size, np.array(requested.bounds), exchange.knows_lists
    owners = asked[1:].searchsorted(ids.wanted, side="right").astype(np.uint16)
    order = np.argsort(owners, kind="stable")  # of 16 bits: by radix
    mine = np.bincount(owners * np.intp(ids.count) + ids.bags, minlength=size * ids.count).reshape(size, ids.count)
    ends = (0, *np.cumsum(mine.sum(1)).tolist())
    counts = np.ascontiguousarray(mine, np.min_scalar_type(ids.longest))
    theirs = np.empty_like(counts)
    exchange.swap("ids", [*counts], [*theirs])
    # Rows are named by their position in what the owner was asked for, if it knows that, else in its shard.
    wanted, of = ids.wanted[order], owners[order].astype(np.intp)
    numbers = wanted - asked[of] if knows else indices[wanted] - of * shard_rows
    limits, own_limits = (
        (np.diff(asked), [part.size for part in requested.sources]) if knows else ([shard_rows] * size,) * 2
    )
    weights = [] if ids.weights is None else [ids.weights[order]]
    sends = [
        np.concatenate([x[a:b].view(np.uint8) for x in (*weights, numbers.astype(_unsigned(most)))])
        for (a, b), most in zip(pairwise(ends), limits, strict=True)
    ]
    totals, width = theirs.sum(1, dtype=np.int64).tolist(), len(weights) * ids.dtype.itemsize
    received = [
        np.empty(n * (width + _unsigned(m).itemsize), np.uint8) for n, m in zip(totals, own_limits, strict=True)
    ]
    exchange.swap("ids", sends, received)
    columns, data = [], []
    for source, n, most, message in zip(requested.sources, totals, own_limits, received, strict=True):
        rows = message[n * width :].view(_unsigned(most))
        columns.append(source[rows] if knows else requested.rows.searchsorted(rows))
        data.append(message[: n * width].view(ids.dtype) if weights else np.ones(n, ids.dtype))
    kept = [np.flatnonzero(row) for row in theirs]
    lengths = np.concatenate([row[k] for row, k in zip(theirs, kept, strict=True)])
    matrix = _matrix(np.concatenate(data), np.concatenate(columns), lengths, len(requested.rows))
    bounds = (0, *np.cumsum([k.size for k in kept]).tolist())
    own, tree = tuple(np.flatnonzero(row) for row in mine), _tree(matrix, lengths.astype(np.intp))
    return RequestedBags(ids.count, order, ends, own, matrix, tree, bounds)


def add_up(exchange: Exchange, bags: RequestedBags, rows: np.ndarray) -> np.ndarray:
    """Returns the sums of this rank's bags, `[count, ...]`. Collective. `rows`: `[u, ...]`, those of this owner."""
    width = math.prod(rows.shape[1:])
    sums: np.ndarray = rows.reshape(len(rows), width)
    for matrix in bags.tree:
        sums = matrix @ sums
    sends = [sums[a:b] for a, b in pairwise(bags.bounds)]
    parts = [np.empty((numbers.size, width), rows.dtype) for numbers in bags.numbers]
    exchange.swap("rows", sends, parts)
    total = np.zeros((bags.count, width), rows.dtype)
    with np.errstate(all="ignore"):  # sums that overflow are infinite, as in JAX
        for numbers, part in zip(bags.numbers, parts, strict=True):
            if numbers.size == bags.count:
                total += part
            else:
                total[numbers] += part
    return total.reshape(-1, *rows.shape[1:])


def spread(exchange: Exchange, bags: RequestedBags, cotangents: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    """Returns the gradients of this owner's rows, `[u, ...]`. Collective. `cotangents`: `[count, ...]`, of this rank's
    bags. `kept`: bool[n]: which of its ids get a gradient; None: all of them do, on all ranks."""
    lines = np.ascontiguousarray(cotangents).reshape(bags.count, -1)
    width, extra = lines.shape[1] * lines.itemsize, int(kept is not None)
    masks = [] if kept is None else [kept[bags.order[a:b]] for a, b in pairwise(bags.ends)]
    sends = []
    for owner, numbers in enumerate(bags.numbers):
        part = lines if numbers.size == bags.count else lines[numbers]
        flag = [np.array([not masks[owner].all()], np.uint8)] if masks else []
        sends.append(np.concatenate([part.view(np.uint8).ravel(), *flag]))
    counts = np.diff(bags.bounds).tolist()
    received = [np.empty(n * width + extra, np.uint8) for n in counts]
    exchange.swap("gradients", sends, received)
    values = np.concatenate([part[: n * width] for part, n in zip(received, counts, strict=True)])
    values = values.view(lines.dtype).reshape(-1, lines.shape[1])
    matrix = bags.matrix
    if masks:
        matrix = _masked(exchange, bags, masks, [bool(part[-1]) for part in received])
    return (matrix.T @ values).reshape(-1, *cotangents.shape[1:])


def _masked(exchange: Exchange, bags: RequestedBags, masks: Sequence[np.ndarray], flags: Sequence[bool]) -> csr_array:
    """Returns the matrix without ids that get no gradient; `flags`: by rank whether some of its ids get none."""
    pointers = np.asarray(bags.matrix.indptr)
    starts = pointers[[*bags.bounds]]
    sends = [None if mask.all() else mask.view(np.uint8) for mask in masks]
    received = [np.empty(n, np.uint8) if flag else None for n, flag in zip(np.diff(starts), flags, strict=True)]
    exchange.swap("gradients", sends, received)
    if not any(flags):
        return bags.matrix
    kept = np.ones(bags.matrix.nnz, bool)
    for (start, end), mask in zip(pairwise(starts), received, strict=True):
        if mask is not None:
            kept[start:end] = mask
    lengths = np.add.reduceat(kept, pointers[:-1], dtype=np.int64)  # no bag here is empty
    return _matrix(bags.matrix.data[kept], bags.matrix.indices[kept], lengths, known(bags.matrix.shape)[1])


def _tree(matrix: csr_array, lengths: np.ndarray) -> Sequence[csr_array]:
    """Divides sums of more than `_SEQUENCE` rows. `lengths`: of the matrix's bags, none of them 0."""
    tree: list[csr_array] = []
    while lengths.max(initial=0) > _SEQUENCE:
        parts = -(-lengths // _SEQUENCE)
        sizes = np.full(parts.sum(), _SEQUENCE)
        sizes[np.cumsum(parts) - 1] = lengths - (parts - 1) * _SEQUENCE
        tree.append(_matrix(matrix.data, matrix.indices, sizes, known(matrix.shape)[1]))
        matrix = _matrix(np.ones(sizes.size, matrix.dtype), np.arange(sizes.size), parts, sizes.size)
        lengths = parts
    return (*tree, matrix)


def _matrix(data: np.ndarray, indices: np.ndarray, lengths: np.ndarray, columns: int) -> csr_array:
    from scipy.sparse import csr_array  # which takes a tenth of a second to import, and JAX needs it, too

    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    narrow = np.int32 if ends[-1] < np.iinfo(np.int32).max else np.int64
    return csr_array((data, indices.astype(narrow, copy=False), ends.astype(narrow)), shape=(lengths.size, columns))


def _unsigned(count: int) -> np.dtype:
    return np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)
