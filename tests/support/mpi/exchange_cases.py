"""What ranks ask for, get and give back in `test_exchange.py`, directly and by way of node leaders."""

from __future__ import annotations

import operator
from functools import reduce as fold
from unittest import mock

import numpy as np

from autopar.mpi.buffers import Buffers
from autopar.mpi.exchange import FIRST_IDS, Exchange
from autopar.mpi.waiting import Waiting
from tests.support.mpi.exchange_truth import (
    DTYPES,
    Case,
    check_asked,
    check_step,
    machines_of,
    random,
    refuses,
    set_limit,
    wanted,
)

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def random_rows_of_every_dtype(exchange: Exchange) -> None:
    for k, dtype in enumerate(DTYPES):
        for inner in ((), (3,), (2, 5)):
            indices = [wanted(k, r, 211, 150) for r in range(exchange.size)]
            check_step(exchange, indices, -(-211 // exchange.size), dtype, inner, k)


@case
def several_families_at_once(exchange: Exchange) -> None:
    """The same bits as one after the other, with more ids than fit into one message among them, in fewer waits."""
    size, given = exchange.size, list[tuple[np.ndarray, int, np.dtype]]()
    for k, (dtype, rows) in enumerate(((np.float32, 40), (np.float64, 9 * FIRST_IDS), (np.int8, 40), (np.float32, 0))):
        indices = wanted(k, exchange.rank, rows * size, 3 * rows).astype(np.int32) if rows else np.zeros(0, np.int32)
        given.append((indices, max(rows, 1), np.dtype(dtype)))
    with mock.patch.object(Waiting, "finish", autospec=True, side_effect=Waiting.finish) as waits:
        asked = exchange.together([exchange.asking(indices, share) for indices, share, _ in given])
        rows = [
            random(k, (len(one.rows), 3), dtype) for k, (one, (*_, dtype)) in enumerate(zip(asked, given, strict=True))
        ]
        fetched = exchange.together(map(exchange.fetching, asked, rows))
        sums = [x.copy() for x in fetched]
        delivered = exchange.together(map(exchange.delivering, asked, sums))
    apart = [exchange.ask(indices, share) for indices, share, _ in given]
    for one, other in zip(asked, apart, strict=True):
        assert np.array_equal(one.rows, other.rows) and one.bounds == other.bounds
    for one, own, got in zip(apart, rows, fetched, strict=True):
        assert np.array_equal(exchange.fetch(one, own), got)
    for one, own, got in zip(apart, sums, delivered, strict=True):
        assert np.array_equal(exchange.deliver(one, own), got)
    assert waits.call_count <= (4 if exchange.near is exchange else 8)


@case
def ranks_that_want_nothing(exchange: Exchange) -> None:
    nothing, f4 = np.zeros(0, np.int32), np.dtype(np.float32)
    for idle in range(exchange.size):
        indices = [nothing if r == idle else wanted(7, r, 60, 30) for r in range(exchange.size)]
        check_step(exchange, indices, 20 + 60 // exchange.size, f4, (4,))
    check_step(exchange, [nothing] * exchange.size, 10, f4, (4,))
    check_step(exchange, [wanted(1, r, 60, 30) for r in range(exchange.size)], 60, f4, (0,))


@case
def one_owner_that_all_ask(exchange: Exchange) -> None:
    for owner in range(exchange.size):
        share = 50
        same = np.arange(owner * share, (owner + 1) * share, dtype=np.int32)
        check_step(exchange, [same] * exchange.size, share, np.dtype(np.float32), (3,), owner)


@case
def all_rows_of_all(exchange: Exchange) -> None:
    whole = np.arange(31 * exchange.size)
    assert whole.dtype == np.int64
    check_step(exchange, [whole] * exchange.size, 31, np.dtype(np.float64), (2,))


@case
def sums_in_the_order_of_the_ranks(exchange: Exchange) -> None:
    """In each machine, and then of the machines. Large values that cancel: any other order gives another sum."""
    for values in ([1e8, -1e8, 1.0, 3.0], [1.0, 1e8, -1e8, 3.0]):
        floats = np.float32(values)[: exchange.size]
        requested = exchange.ask(np.arange(exchange.size, dtype=np.int32), 1)
        got = exchange.deliver(requested, np.full((exchange.size, 2), floats[exchange.rank]))
        parts = [fold(operator.add, floats[list(ranks)], np.float32(0)) for ranks in machines_of(exchange)]
        expected = fold(operator.add, parts, np.float32(0))
        assert (got == expected).all(), (got, expected)
    if exchange.size >= 3:
        assert fold(operator.add, floats[::-1], np.float32(0)) != fold(operator.add, floats, np.float32(0))
    if [len(ranks) for ranks in machines_of(exchange)] == [2, 2]:
        assert expected != fold(operator.add, floats, np.float32(0))


@case
def more_ids_than_a_first_message_holds(exchange: Exchange) -> None:
    share = 2 * FIRST_IDS + 99
    for longest in (FIRST_IDS - 1, FIRST_IDS, FIRST_IDS + 1, 2 * FIRST_IDS + 50):
        # Rank r asks owner r + 1 for the most, and everyone else for a few.
        indices = []
        for r in range(exchange.size):
            counts = [longest if o == (r + 1) % exchange.size else 3 + r for o in range(exchange.size)]
            picks = [np.sort(np.random.default_rng([r, o]).permutation(share)[:n]) for o, n in enumerate(counts)]
            indices.append(np.concatenate([o * share + p for o, p in enumerate(picks)]).astype(np.int32))
        check_step(exchange, indices, share, np.dtype(np.int32), ())


@case
def shares_beyond_int32(exchange: Exchange) -> None:
    share = (1 << 31) - 5
    mine = np.sort(np.concatenate([o * share + np.array([0, 7 + exchange.rank]) for o in range(exchange.size)]))
    requested = exchange.ask(mine, share)
    assert requested.rows.tolist() == [0, *range(7, 7 + exchange.size)] and requested.rows.dtype == np.int32
    # Places that fit into int32, where the ends of the shards don't.
    requested = exchange.ask(np.array([5, (1 << 30) * min(exchange.size - 1, 1) + 6], np.int32), 1 << 30)
    expected = {0: [5, 6] if exchange.size == 1 else [5], 1: [6]}.get(exchange.rank, [])
    assert requested.rows.tolist() == expected and len(requested.sources) == exchange.size
    requested = exchange.ask(np.array([exchange.rank]) + 2 * share * exchange.rank, 2 * share)
    assert requested.rows.tolist() == [exchange.rank] and requested.rows.dtype == np.int64


@case
def messages_in_pieces(exchange: Exchange) -> None:
    usual = exchange.limit
    for limit in (5, 64, 1000):
        set_limit(exchange, limit)
        indices = [wanted(limit, r, 40, 30) for r in range(exchange.size)]
        check_step(exchange, indices, -(-40 // exchange.size), np.dtype(np.float32), (3,))
        [found] = exchange.reduce([np.arange(33.0)])
        assert np.array_equal(found, exchange.size * np.arange(33.0))
        found = exchange.gather(np.full((exchange.rank + 1, 3), exchange.rank))
        assert [x.tolist() for x in found] == [[[r] * 3] * (r + 1) for r in range(exchange.size)]
    set_limit(exchange, 1001)
    share = FIRST_IDS + 1500
    indices = [np.arange(share * exchange.size, dtype=np.int32)] * exchange.size
    check_step(exchange, indices, share, np.dtype(np.int8), ())
    set_limit(exchange, usual)


@case
def sums_that_overflow(exchange: Exchange) -> None:
    """They are infinite, as in JAX, and NumPy has nothing to say about it (warnings are errors here)."""
    requested = exchange.ask(np.arange(exchange.size, dtype=np.int32), 1)
    for dtype, value in ((np.float16, 6e4), (np.float32, 3e38)):
        got = exchange.deliver(requested, np.full((exchange.size, 2), value, dtype))
        [reduced] = exchange.reduce([np.full(3, value, dtype)])
        infinite = exchange.size > 1
        assert np.isinf(got).all() == infinite and np.isinf(reduced).all() == infinite
    opposite = np.full((exchange.size, 2), np.inf if exchange.rank else -np.inf, np.float32)
    assert np.isnan(exchange.deliver(requested, opposite)).all() == (exchange.size > 1)


@case
def results_stay(exchange: Exchange) -> None:
    """What a call returned isn't written again by later calls, and what was given to one may be."""
    share, results = 40, []
    for k in range(6):
        indices = [wanted(k, r, share * exchange.size, 50 + 20 * k) for r in range(exchange.size)]
        mine = indices[exchange.rank]
        requested = exchange.ask(mine, share)
        rows = random(k, (share, 4), np.dtype(np.float32))[requested.rows]
        sums = random(k + exchange.rank, (mine.size, 4), np.dtype(np.float32))
        found = [
            exchange.fetch(requested, rows),
            exchange.deliver(requested, sums),
            *exchange.reduce([sums[:1], sums[:1] > 0]),
        ]
        results.append([(x, x.copy()) for x in (*found, requested.rows, *requested.sources)])
        if exchange.size > 1:
            rows.fill(0)
            sums.fill(0)
            mine.fill(0)
    assert all(np.array_equal(x, kept) for found in results for x, kept in found)


@case
def buffers_that_take_turns(exchange: Exchange) -> None:
    buffers, share = Buffers(), 64
    previous: tuple[np.ndarray, np.ndarray] | None = None
    for k in range(12):
        indices = [wanted(k, r, share * exchange.size, 20 + 30 * k) for r in range(exchange.size)]
        mine = indices[exchange.rank]
        table = random(k, (share * exchange.size, 8), np.dtype(np.float32))
        requested = exchange.ask(mine, share)
        out = buffers.take("rows", (mine.size, 8), np.float32)
        assert out.ctypes.data % 64 == 0
        found = exchange.fetch(requested, table[exchange.rank * share :][requested.rows], out)
        assert np.shares_memory(found, out) and np.array_equal(found, table[mine])
        if previous is not None:
            assert np.array_equal(*previous), "the buffer before this one was written"
            assert not np.shares_memory(previous[0], found)
        previous = found, found.copy()


@case
def many_steps_that_grow(exchange: Exchange) -> None:
    for k in range(25):
        extent = 20 + 25 * k * k
        indices = [wanted(k, r, extent, 1 + 13 * k * (r + 1) % (17 * k + 1)) for r in range(exchange.size)]
        check_step(exchange, indices, -(-extent // exchange.size), np.dtype(np.float32), (1 + k % 5,), k)


@case
def arrays_that_lie_otherwise(exchange: Exchange) -> None:
    """Read-only, strided and in Fortran's order."""
    share = 30
    indices = [wanted(3, r, share * exchange.size, 60) for r in range(exchange.size)]
    mine = indices[exchange.rank]
    mine.setflags(write=False)
    requested = exchange.ask(np.repeat(mine, 2)[::2], share)
    check_asked(exchange, requested, indices, share)
    table = random(3, (share * exchange.size, 4), np.dtype(np.float32))
    rows = np.asfortranarray(table[exchange.rank * share :][requested.rows])
    sums = random(4 + exchange.rank, (mine.size, 8), np.dtype(np.float32))[:, ::2]
    usual = exchange.fetch(requested, rows.copy(order="C")), exchange.deliver(requested, sums.copy(order="C"))
    for array in (rows, sums):
        array.setflags(write=False)
    assert np.array_equal(exchange.fetch(requested, rows), usual[0]) and np.array_equal(usual[0], table[mine])
    assert np.array_equal(exchange.deliver(requested, sums), usual[1])
    [reduced] = exchange.reduce([rows[:1].T * 0 + 1])
    assert np.array_equal(reduced, np.full(reduced.shape, exchange.size))


@case
def what_is_refused(exchange: Exchange) -> None:
    requested = exchange.ask(np.arange(exchange.size, dtype=np.int32), 1)
    refuses(lambda: exchange.fetch(requested, np.ones((2, 3))), "there must be 1 rows")
    refuses(lambda: exchange.deliver(requested, np.ones((exchange.size + 1, 3))), f"there must be {exchange.size} rows")
    sums = np.ones((exchange.size, 3), np.float32)
    for out in (np.ones((1, 3)), np.ones((1, 2), np.float32), np.ones((0, 3), np.float32), np.ones((6, 3), "f4")[::2]):
        refuses(lambda out=out: exchange.deliver(requested, sums, out), "out is")
    refuses(lambda: exchange.reduce([np.ones(3)], "median"), "no reduction 'median'")
    refuses(lambda: exchange.reduce([np.ones(3)], "and"), "no and over ranks of float64")
    refuses(lambda: exchange.reduce([np.ones(3, complex)], "max"), "no max over ranks of complex128")
    refuses(lambda: exchange.reduce([np.array(["a"])]), "no sum over ranks of <U1")
    if exchange.size > 1:
        for memory in (np.empty(23, np.uint8), np.empty(3), np.empty((24, 1), np.uint8)):
            refuses(lambda memory=memory: exchange.reduce([np.ones(3)], memory=memory), "with at least 72 elements")
    refuses(lambda: Exchange(0, exchange.size + 1, None), "needs a communicator")
