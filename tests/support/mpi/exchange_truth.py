"""What exchanges must give, by NumPy: arrays from seeds that all ranks know, and checks against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from autopar.errors import ArgumentsError
from autopar.mpi.buffers import aligned
from autopar.mpi.exchange import Exchange, Requested
from autopar.mpi.machines import LeaderExchange

Case = Callable[[Exchange], None]

DTYPES = [np.dtype(t) for t in (bool, "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", ml_dtypes.bfloat16)]


def random(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values of very different sizes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.random(shape) < 0.3
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
    return (values + 1j * rng.normal(size=shape)).astype(dtype) if dtype.kind == "c" else values.astype(dtype)


def wanted(seed: int, rank: int, extent: int, count: int) -> np.ndarray:
    """Zipf: the ranks want many of the same rows."""
    ids = np.random.default_rng([seed, rank]).zipf(1.3, size=count).clip(max=extent) - 1
    return np.unique(ids).astype(np.int32)


def machines_of(exchange: Exchange) -> Sequence[Sequence[int]]:
    """The ranks of each machine; all on one, where an exchange knows of none."""
    return exchange.machines if isinstance(exchange, LeaderExchange) else [range(exchange.size)]


def truth_of_sums(
    total: int, machines: Sequence[Sequence[int]], indices: Sequence[np.ndarray], sums: Sequence[np.ndarray]
) -> np.ndarray:
    """All rows' sums: in each machine in the order of the ranks, then in that of the machines, row by row."""
    dtype, inner = sums[0].dtype, sums[0].shape[1:]
    wide = np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind in "fV" else dtype
    found = np.zeros((total, *inner), wide)
    for ranks in machines:
        part = np.zeros((total, *inner), wide)
        for rank in ranks:
            for k, place in enumerate(indices[rank].tolist()):
                part[place : place + 1] += sums[rank][k : k + 1].astype(wide)
        found += part.astype(dtype).astype(wide)
    return found.astype(dtype)


def check_asked(exchange: Exchange, requested: Requested, indices: Sequence[np.ndarray], share: int) -> None:
    low = exchange.rank * share
    owned = [p[(p >= low) & (p < low + share)] - low for p in indices]
    assert np.array_equal(requested.rows, np.unique(np.concatenate(owned))), (requested.rows, owned)
    assert len(requested.sources) == exchange.size
    if isinstance(exchange, LeaderExchange):
        for ranks in exchange.machines:  # one of them asked for all
            [found] = [requested.sources[r] for r in ranks if requested.sources[r].size] or [np.zeros(0, np.intp)]
            assert np.array_equal(requested.rows[found], np.unique(np.concatenate([owned[r] for r in ranks])))
            assert exchange.rank not in ranks or not found.size or found is requested.sources[exchange.rank]
    else:
        for rows, back in zip(owned, requested.sources, strict=True):
            assert np.array_equal(requested.rows[back], rows)
    mine = indices[exchange.rank]
    assert requested.size == mine.size
    assert np.array_equal(requested.counts, np.bincount(mine // share, minlength=exchange.size))
    assert requested.bounds == (0, *np.cumsum(requested.counts).tolist())


def check_step(
    exchange: Exchange,
    indices: Sequence[np.ndarray],
    share: int,
    dtype: np.dtype,
    inner: tuple[int, ...],
    seed: int = 0,
) -> None:
    """One ask, fetch and deliver, with and without memory of the caller's."""
    rank, total = exchange.rank, exchange.size * share
    mine = indices[rank]
    requested = exchange.ask(mine, share)
    check_asked(exchange, requested, indices, share)
    table = random(seed, (total, *inner), dtype)
    owned = table[rank * share : (rank + 1) * share][requested.rows]
    kept = owned.copy()
    fetched = exchange.fetch(requested, owned)
    assert fetched.dtype == dtype and np.array_equal(fetched, table[mine])
    memory = aligned((mine.size + 3, *inner), dtype)
    memory.fill(1)
    again = exchange.fetch(requested, owned, memory)
    assert np.shares_memory(again, memory) or not again.size
    assert np.array_equal(again, table[mine]) and (memory[mine.size :] == memory.dtype.type(1)).all()
    assert np.array_equal(owned, kept)

    sums = [random(100 + seed + r, (p.size, *inner), dtype) for r, p in enumerate(indices)]
    expected = truth_of_sums(total, machines_of(exchange), indices, sums)
    expected = expected[rank * share : (rank + 1) * share][requested.rows]
    got = exchange.deliver(requested, sums[rank].copy())
    assert got.dtype == dtype and np.array_equal(got, expected), (got, expected)
    memory = aligned((requested.rows.size + 3, *inner), dtype)
    memory.fill(1)
    again = exchange.deliver(requested, sums[rank], memory)
    assert np.array_equal(again, expected) and (memory[requested.rows.size :] == memory.dtype.type(1)).all()
    assert np.shares_memory(again, memory) or not again.size


def refuses(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except ArgumentsError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was said about {words!r}")


def set_limit(exchange: Exchange, limit: int) -> None:
    """Bytes of one message at most."""
    exchange.limit = limit
    if isinstance(exchange, LeaderExchange):
        exchange.near.limit = limit
