"""What every rank does in `test_exchange.py`: each case against NumPy, from seeds that all ranks know.

`python -m tests.mpi.exchange_cases` under mpiexec, or alone.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable
from functools import reduce as fold

import ml_dtypes
import numpy as np

from autopar.errors import ArgumentsError, HostMemoryError
from autopar.mpi import room
from autopar.mpi.buffers import Buffers, aligned
from autopar.mpi.exchange import FIRST_IDS, Asked, Exchange

CASES: dict[str, Callable[[Exchange], None]] = {}

DTYPES = [np.dtype(t) for t in (bool, "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", ml_dtypes.bfloat16)]


def case(function: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
    CASES[function.__name__] = function
    return function


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


def truth_of_sums(total: int, places: list[np.ndarray], sums: list[np.ndarray]) -> np.ndarray:
    """All rows' sums, added in the order of the ranks, row by row."""
    dtype = sums[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind in "fV" else dtype
    found = np.zeros((total, *sums[0].shape[1:]), wide)
    for at, values in zip(places, sums, strict=True):
        for k, place in enumerate(at.tolist()):
            found[place : place + 1] += values[k : k + 1].astype(wide)
    return found.astype(dtype)


def check_asked(exchange: Exchange, asked: Asked, places: list[np.ndarray], share: int) -> None:
    low = exchange.rank * share
    owned = [p[(p >= low) & (p < low + share)] - low for p in places]
    assert np.array_equal(asked.rows, np.unique(np.concatenate(owned))), (asked.rows, owned)
    assert len(asked.sources) == exchange.size
    for rows, back in zip(owned, asked.sources, strict=True):
        assert np.array_equal(asked.rows[back], rows)
    mine = places[exchange.rank]
    assert asked.size == mine.size
    assert np.array_equal(asked.counts, np.bincount(mine // share, minlength=exchange.size))
    assert asked.bounds == (0, *np.cumsum(asked.counts).tolist())


def check_step(
    exchange: Exchange, places: list[np.ndarray], share: int, dtype: np.dtype, inner: tuple[int, ...], seed: int = 0
) -> None:
    """One ask, fetch and deliver, with and without memory of the caller's."""
    rank, total = exchange.rank, exchange.size * share
    mine = places[rank]
    asked = exchange.ask(mine, share)
    check_asked(exchange, asked, places, share)
    table = random(seed, (total, *inner), dtype)
    owned = table[rank * share : (rank + 1) * share][asked.rows]
    kept = owned.copy()
    fetched = exchange.fetch(asked, owned)
    assert fetched.dtype == dtype and np.array_equal(fetched, table[mine])
    memory = aligned((mine.size + 3, *inner), dtype)
    memory.fill(1)
    again = exchange.fetch(asked, owned, memory)
    assert np.shares_memory(again, memory) or not again.size
    assert np.array_equal(again, table[mine]) and (memory[mine.size :] == memory.dtype.type(1)).all()
    assert np.array_equal(owned, kept)

    sums = [random(100 + seed + r, (p.size, *inner), dtype) for r, p in enumerate(places)]
    expected = truth_of_sums(total, places, sums)[rank * share : (rank + 1) * share][asked.rows]
    got = exchange.deliver(asked, sums[rank].copy())
    assert got.dtype == dtype and np.array_equal(got, expected), (got, expected)
    memory = aligned((asked.rows.size + 3, *inner), dtype)
    memory.fill(1)
    again = exchange.deliver(asked, sums[rank], memory)
    assert np.array_equal(again, expected) and (memory[asked.rows.size :] == memory.dtype.type(1)).all()
    assert np.shares_memory(again, memory) or not again.size


def refuses(call: Callable[[], object], words: str) -> None:
    try:
        call()
    except ArgumentsError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was said about {words!r}")


@case
def random_rows_of_every_dtype(exchange: Exchange) -> None:
    for k, dtype in enumerate(DTYPES):
        for inner in ((), (3,), (2, 5)):
            places = [wanted(k, r, 211, 150) for r in range(exchange.size)]
            check_step(exchange, places, -(-211 // exchange.size), dtype, inner, k)


@case
def ranks_that_want_nothing(exchange: Exchange) -> None:
    nothing, f4 = np.zeros(0, np.int32), np.dtype(np.float32)
    for idle in range(exchange.size):
        places = [nothing if r == idle else wanted(7, r, 60, 30) for r in range(exchange.size)]
        check_step(exchange, places, 20 + 60 // exchange.size, f4, (4,))
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
    """Large values that cancel: any other order gives another sum."""
    values = np.float32([1e8, -1e8, 1.0, 3.0])[: exchange.size]
    asked = exchange.ask(np.arange(exchange.size, dtype=np.int32), 1)
    got = exchange.deliver(asked, np.full((exchange.size, 2), values[exchange.rank]))
    expected = fold(operator.add, values, np.float32(0))
    assert (got == expected).all(), (got, expected)
    if exchange.size >= 3:
        assert fold(operator.add, values[::-1], np.float32(0)) != expected


@case
def more_ids_than_a_first_message_holds(exchange: Exchange) -> None:
    share = 2 * FIRST_IDS + 99
    for longest in (FIRST_IDS - 1, FIRST_IDS, FIRST_IDS + 1, 2 * FIRST_IDS + 50):
        # Rank r asks owner r + 1 for the most, and everyone else for a few.
        places = []
        for r in range(exchange.size):
            counts = [longest if o == (r + 1) % exchange.size else 3 + r for o in range(exchange.size)]
            picks = [np.sort(np.random.default_rng([r, o]).permutation(share)[:n]) for o, n in enumerate(counts)]
            places.append(np.concatenate([o * share + p for o, p in enumerate(picks)]).astype(np.int32))
        check_step(exchange, places, share, np.dtype(np.int32), ())


@case
def shares_beyond_int32(exchange: Exchange) -> None:
    share = (1 << 31) - 5
    mine = np.sort(np.concatenate([o * share + np.array([0, 7 + exchange.rank]) for o in range(exchange.size)]))
    asked = exchange.ask(mine, share)
    assert asked.rows.tolist() == [0, *range(7, 7 + exchange.size)] and asked.rows.dtype == np.int32
    # Places that fit into int32, where the ends of the shares don't.
    asked = exchange.ask(np.array([5, (1 << 30) * min(exchange.size - 1, 1) + 6], np.int32), 1 << 30)
    expected = {0: [5, 6] if exchange.size == 1 else [5], 1: [6]}.get(exchange.rank, [])
    assert asked.rows.tolist() == expected and len(asked.sources) == exchange.size
    asked = exchange.ask(np.array([exchange.rank]) + 2 * share * exchange.rank, 2 * share)
    assert asked.rows.tolist() == [exchange.rank] and asked.rows.dtype == np.int64


@case
def messages_in_pieces(exchange: Exchange) -> None:
    usual = exchange.limit
    for limit in (5, 64, 1000):
        exchange.limit = limit
        places = [wanted(limit, r, 40, 30) for r in range(exchange.size)]
        check_step(exchange, places, -(-40 // exchange.size), np.dtype(np.float32), (3,))
        [found] = exchange.reduce([np.arange(33.0)])
        assert np.array_equal(found, exchange.size * np.arange(33.0))
        found = exchange.gather(np.full((exchange.rank + 1, 3), exchange.rank))
        assert [x.tolist() for x in found] == [[[r] * 3] * (r + 1) for r in range(exchange.size)]
    exchange.limit = 1001
    share = FIRST_IDS + 1500
    places = [np.arange(share * exchange.size, dtype=np.int32)] * exchange.size
    check_step(exchange, places, share, np.dtype(np.int8), ())
    exchange.limit = usual


@case
def reductions(exchange: Exchange) -> None:
    shapes = [(), (5,), (3, 4), (0,), (2, 1, 9), (100,)]
    ufuncs = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
    ufuncs |= {"and": np.bitwise_and, "or": np.bitwise_or}
    for op, ufunc in ufuncs.items():
        dtypes = [d for d in DTYPES if _reduces(d, op)]
        kinds = [(s, d) for s in shapes for d in dtypes]
        by_rank = [[random(11 * k + r, s, d) for k, (s, d) in enumerate(kinds)] for r in range(exchange.size)]
        if op == "prod":  # of floats from 0.5 to 2: none is lost in a float16
            by_rank = [[a if a.dtype.kind in "biu" else np.exp2(np.cos(a)) for a in arrays] for arrays in by_rank]
            by_rank = [[a.astype(d) for a, (_, d) in zip(arrays, kinds, strict=True)] for arrays in by_rank]
        mine = [a.copy() for a in by_rank[exchange.rank]]
        found = exchange.reduce(mine, op)
        memory = aligned(exchange.packed_bytes(mine, op), np.uint8)
        again = exchange.reduce(mine, op, memory)
        for k, (shape, dtype) in enumerate(kinds):
            assert np.array_equal(mine[k], by_rank[exchange.rank][k]), "an argument was changed"
            wide = np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind in "fV" else dtype
            expected = fold(ufunc, [arrays[k].astype(wide) for arrays in by_rank])
            assert found[k].shape == shape and found[k].dtype == dtype
            if op in ("sum", "prod") and dtype.kind in "fcV":
                scale = fold(ufunc, [np.abs(arrays[k].astype(wide)) for arrays in by_rank]).astype(np.float64)
                info = ml_dtypes.finfo(np.float32 if dtype.kind == "c" else dtype)
                bound = 4 * exchange.size * float(info.eps) * scale + float(info.smallest_subnormal)
                error = np.abs(found[k].astype(np.complex128) - expected)
                assert (error <= bound).all(), (op, dtype, error.max())
            else:
                assert found[k].tobytes() == expected.astype(dtype).tobytes(), (op, dtype)
            assert found[k].tobytes() == again[k].tobytes()
            if exchange.size > 1 and dtype == wide and dtype.kind != "b" and found[k].size:
                assert found[k].ctypes.data % 64 == 0 and np.shares_memory(again[k], memory)
        bits = b"".join(x.tobytes() for x in found)
        for other in exchange.gather(np.frombuffer(bits, np.uint8)):
            assert other.tobytes() == bits, f"{op}: not the same bits on every rank"


def _reduces(dtype: np.dtype, op: str) -> bool:
    if op in ("and", "or"):
        return dtype.kind in "biu"
    return dtype.kind != "c" or op in ("sum", "prod")


@case
def not_a_number(exchange: Exchange) -> None:
    """NaN on any one rank, of either sign, is what max and min are; infinities and zeros keep their order."""
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        for sick in range(exchange.size):
            for nan in (np.nan, -np.nan):
                mine = np.array([exchange.rank, -np.inf, np.inf, -1.5 - exchange.rank, exchange.rank]).astype(dtype)
                if exchange.rank == sick:
                    mine[0] = nan
                top, low = exchange.reduce([mine], "max")[0], exchange.reduce([mine], "min")[0]
                last = exchange.size - 1
                assert np.isnan(top[0]) and top[1:].tolist() == [-np.inf, np.inf, -1.5, last]
                assert np.isnan(low[0]) and low[1:].tolist() == [-np.inf, np.inf, -1.5 - last, 0]
                assert np.isnan(exchange.reduce([mine])[0][0])


@case
def sums_that_overflow(exchange: Exchange) -> None:
    """They are infinite, as in JAX, and NumPy has nothing to say about it (warnings are errors here)."""
    asked = exchange.ask(np.arange(exchange.size, dtype=np.int32), 1)
    for dtype, value in ((np.float16, 6e4), (np.float32, 3e38)):
        got = exchange.deliver(asked, np.full((exchange.size, 2), value, dtype))
        [reduced] = exchange.reduce([np.full(3, value, dtype)])
        infinite = exchange.size > 1
        assert np.isinf(got).all() == infinite and np.isinf(reduced).all() == infinite
    opposite = np.full((exchange.size, 2), np.inf if exchange.rank else -np.inf, np.float32)
    assert np.isnan(exchange.deliver(asked, opposite)).all() == (exchange.size > 1)


@case
def bytes_sent(exchange: Exchange) -> None:
    rank, size, share = exchange.rank, exchange.size, FIRST_IDS + 100
    # Owner o is asked by rank r for 10 + r + 2 * o rows, and owner 0 for all of its rows.
    counts = [[share if o == 0 else 10 + r + 2 * o for o in range(size)] for r in range(size)]
    places = np.concatenate([o * share + np.arange(n) for o, n in enumerate(counts[rank])]).astype(np.int32)
    before, own = dict(exchange.sent_bytes), dict(exchange.own_bytes)
    asked = exchange.ask(places, share)
    rows = np.ones((asked.rows.size, 6), np.float32)
    exchange.fetch(asked, rows)
    exchange.deliver(asked, np.ones((places.size, 6), np.float32))
    values = [np.ones(100, np.float32), np.ones(3), np.ones(16, np.float32), np.ones(4, np.float32)]
    exchange.reduce(values)
    exchange.gather(np.ones((rank + 1, 2)))
    others = [o for o in range(size) if o != rank]
    expected = {
        "ids": sum(4 * (1 + counts[rank][o]) for o in others),
        "rows": sum(24 * counts[r][rank] for r in others),
        "gradients": sum(24 * counts[rank][o] for o in others),
        "reduce": 4 * (112 + 16 + 4) + 8 * 3 if size > 1 else 0,
        "gather": (size - 1) * (16 * (rank + 1) + 8),
    }
    assert {k: v - before[k] for k, v in exchange.sent_bytes.items()} == expected
    if size > 1:
        mine = counts[rank][rank]
        assert {k: v - own[k] for k, v in exchange.own_bytes.items()} == {
            "ids": 4 * mine,
            "rows": 24 * mine,
            "gradients": 24 * mine,
        }


@case
def results_stay(exchange: Exchange) -> None:
    """What a call returned isn't written again by later calls, and what was given to one may be."""
    share, results = 40, []
    for k in range(6):
        places = [wanted(k, r, share * exchange.size, 50 + 20 * k) for r in range(exchange.size)]
        mine = places[exchange.rank]
        asked = exchange.ask(mine, share)
        rows = random(k, (share, 4), np.dtype(np.float32))[asked.rows]
        sums = random(k + exchange.rank, (mine.size, 4), np.dtype(np.float32))
        found = [exchange.fetch(asked, rows), exchange.deliver(asked, sums), *exchange.reduce([sums[:1], sums[:1] > 0])]
        results.append([(x, x.copy()) for x in (*found, asked.rows, *asked.sources)])
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
        places = [wanted(k, r, share * exchange.size, 20 + 30 * k) for r in range(exchange.size)]
        mine = places[exchange.rank]
        table = random(k, (share * exchange.size, 8), np.dtype(np.float32))
        asked = exchange.ask(mine, share)
        out = buffers.take("rows", (mine.size, 8), np.float32)
        assert out.ctypes.data % 64 == 0
        found = exchange.fetch(asked, table[exchange.rank * share :][asked.rows], out)
        assert np.shares_memory(found, out) and np.array_equal(found, table[mine])
        if previous is not None:
            assert np.array_equal(*previous), "the buffer before this one was written"
            assert not np.shares_memory(previous[0], found)
        previous = found, found.copy()


@case
def many_steps_that_grow(exchange: Exchange) -> None:
    for k in range(25):
        extent = 20 + 25 * k * k
        places = [wanted(k, r, extent, 1 + 13 * k * (r + 1) % (17 * k + 1)) for r in range(exchange.size)]
        check_step(exchange, places, -(-extent // exchange.size), np.dtype(np.float32), (1 + k % 5,), k)


@case
def arrays_that_lie_otherwise(exchange: Exchange) -> None:
    """Read-only, strided and in Fortran's order."""
    share = 30
    places = [wanted(3, r, share * exchange.size, 60) for r in range(exchange.size)]
    mine = places[exchange.rank]
    mine.setflags(write=False)
    asked = exchange.ask(np.repeat(mine, 2)[::2], share)
    check_asked(exchange, asked, places, share)
    table = random(3, (share * exchange.size, 4), np.dtype(np.float32))
    rows = np.asfortranarray(table[exchange.rank * share :][asked.rows])
    sums = random(4 + exchange.rank, (mine.size, 8), np.dtype(np.float32))[:, ::2]
    usual = exchange.fetch(asked, rows.copy(order="C")), exchange.deliver(asked, sums.copy(order="C"))
    for array in (rows, sums):
        array.setflags(write=False)
    assert np.array_equal(exchange.fetch(asked, rows), usual[0]) and np.array_equal(usual[0], table[mine])
    assert np.array_equal(exchange.deliver(asked, sums), usual[1])
    [reduced] = exchange.reduce([rows[:1].T * 0 + 1])
    assert np.array_equal(reduced, np.full(reduced.shape, exchange.size))


@case
def what_is_refused(exchange: Exchange) -> None:
    asked = exchange.ask(np.arange(exchange.size, dtype=np.int32), 1)
    refuses(lambda: exchange.fetch(asked, np.ones((2, 3))), "there must be 1 rows")
    refuses(lambda: exchange.deliver(asked, np.ones((exchange.size + 1, 3))), f"there must be {exchange.size} rows")
    sums = np.ones((exchange.size, 3), np.float32)
    for out in (np.ones((1, 3)), np.ones((1, 2), np.float32), np.ones((0, 3), np.float32), np.ones((6, 3), "f4")[::2]):
        refuses(lambda out=out: exchange.deliver(asked, sums, out), "out is")
    refuses(lambda: exchange.reduce([np.ones(3)], "median"), "no reduction 'median'")
    refuses(lambda: exchange.reduce([np.ones(3)], "and"), "no and over ranks of float64")
    refuses(lambda: exchange.reduce([np.ones(3, complex)], "max"), "no max over ranks of complex128")
    refuses(lambda: exchange.reduce([np.array(["a"])]), "no sum over ranks of <U1")
    if exchange.size > 1:
        for memory in (np.empty(23, np.uint8), np.empty(3), np.empty((24, 1), np.uint8)):
            refuses(lambda memory=memory: exchange.reduce([np.ones(3)], memory=memory), "with at least 24 elements")
    refuses(lambda: Exchange(0, exchange.size + 1, None), "needs a communicator")


@case
def gathering(exchange: Exchange) -> None:
    for dtype in DTYPES:
        whole = [random(r, ((3 * r) % 4, 2), dtype) for r in range(exchange.size)]
        found = exchange.gather(whole[exchange.rank])
        assert len(found) == exchange.size
        for got, expected in zip(found, whole, strict=True):
            assert got.dtype == dtype and got.shape == expected.shape and np.array_equal(got, expected)


@case
def room_for_the_tables_of_all(exchange: Exchange) -> None:
    """What each rank has room for by itself, and all together haven't: refused by all, before memory is taken."""
    room.require_room(exchange, {"params/emb": ((1000, 8), np.float32), "opt/emb": ((1000, 8), np.float32)})
    usual, rank, size = room.memory_levels, exchange.rank, exchange.size
    levels = {"machine": room.RESERVE + 10**9, f"machine/{rank}": room.RESERVE + 2 * 10**9}
    room.memory_levels = lambda: levels
    try:
        tables = {"params/emb": ((10**8 // size,), np.float64), "opt/emb": ((10**8 // size,), np.int8)}
        room.require_room(exchange, tables)
        share = (10**8 // size, 3)
        try:
            room.require_room(exchange, {"params/emb": (share, np.float32), "opt/emb": ((4,), np.int8)})
        except HostMemoryError as error:
            ranks = f"for rank{'s' * (size > 1)} {', '.join(map(str, range(size)))} "
            assert "params/emb: with 1 more (it alone 1.20 GB) takes 1.20 GB" in str(error), error
            assert "1.00 GB are available on " in str(error) and ranks in str(error), error
        else:
            raise AssertionError("there was room")
        levels[f"machine/{rank}"] = room.RESERVE + (5 if rank == 0 else 100)
        try:
            room.require_room(exchange, {"params/emb": ((10,), np.int8)})
        except HostMemoryError as error:
            assert "for rank 0 " in str(error), error
        else:
            raise AssertionError("there was room in the cgroup")
    finally:
        room.memory_levels = usual


def main() -> None:
    """Runs all cases, blocking and polling; the first that fails ends the job."""
    alone = sys.argv[1:] == ["alone"]
    if alone:
        exchanges = [Exchange(0, 1, None)]
        assert "mpi4py" not in sys.modules
    else:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        world = comm if comm.size > 1 else None
        exchanges = [Exchange(comm.rank, comm.size, world and comm.Dup(), polling=p) for p in (False, True)]
        assert [e.polling for e in exchanges] == [False, comm.size > 1]
    for exchange in exchanges:
        for name, function in CASES.items():
            try:
                function(exchange)
            except BaseException:
                print(f"rank {exchange.rank} of {exchange.size}, {name}:\n{traceback.format_exc()}", flush=True)
                raise
    if exchanges[0].rank == 0:
        print(f"{len(CASES)} cases passed", flush=True)
    assert not alone or "mpi4py" not in sys.modules


if __name__ == "__main__":
    main()
