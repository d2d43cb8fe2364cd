"""What ranks reduce and gather in `test_exchange.py`, and the bytes that they send in all."""

from __future__ import annotations

from functools import reduce as fold

import ml_dtypes
import numpy as np

from autopar.errors import AutoparError, HostMemoryError
from autopar.mpi import machines
from autopar.mpi.buffers import aligned
from autopar.mpi.exchange import FIRST_IDS, Exchange
from tests.support.mpi.exchange_truth import DTYPES, Case, random

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


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


@case
def sums_of_integers(exchange: Exchange) -> None:
    """Exactly, of any length: those that ranks and rings don't divide, and in messages of a few bytes."""
    usual = exchange.limit
    for limit in (usual, 100):
        exchange.limit = limit
        for length in (0, 1, 7, 16, 17, 1000, 4099):
            mine = (exchange.rank + 1) * np.arange(length)
            (found,) = exchange.reduce([mine])
            assert np.array_equal(found, exchange.size * (exchange.size + 1) // 2 * np.arange(length)), length
    exchange.limit = usual


@case
def sums_of_several_steps(exchange: Exchange) -> None:
    """Those of one step are added up; what several steps add up at the same moment is an error on each rank."""
    mine = np.arange(1000, dtype=np.float32)
    for beside in (False, True):
        with exchange.purpose("a step"):
            (found,) = exchange.reduce([mine], beside=beside)
        assert np.array_equal(found, exchange.size * mine)
        with exchange.purpose(f"step {exchange.rank == 0}"):
            try:
                exchange.reduce([mine], beside=beside)
            except AutoparError as error:
                assert exchange.size > 1 and "another step" in str(error)
            else:
                assert exchange.size == 1, "sums of two steps were mixed"
    (found,) = exchange.reduce([mine])
    assert np.array_equal(found, exchange.size * mine)


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
def bytes_sent(exchange: Exchange) -> None:
    rank, size, share = exchange.rank, exchange.size, FIRST_IDS + 100
    # Owner o is asked by rank r for 10 + r + 2 * o rows, and owner 0 for all of its rows.
    counts = [[share if o == 0 else 10 + r + 2 * o for o in range(size)] for r in range(size)]
    indices = np.concatenate([o * share + np.arange(n) for o, n in enumerate(counts[rank])]).astype(np.int32)
    before, own = dict(exchange.sent_bytes), dict(exchange.own_bytes)
    requested = exchange.ask(indices, share)
    rows = np.ones((requested.rows.size, 6), np.float32)
    exchange.fetch(requested, rows)
    exchange.deliver(requested, np.ones((indices.size, 6), np.float32))
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
    machines.require_memory(exchange, {"params/emb": ((1000, 8), np.float32), "opt/emb": ((1000, 8), np.float32)})
    usual, rank, size = machines.memory_levels, exchange.rank, exchange.size
    levels = {"machine": machines.RESERVE + 10**9, f"machine/{rank}": machines.RESERVE + 2 * 10**9}
    machines.memory_levels = lambda: levels
    try:
        tables = {"params/emb": ((10**8 // size,), np.float64), "opt/emb": ((10**8 // size,), np.int8)}
        machines.require_memory(exchange, tables)
        share = (10**8 // size, 3)
        try:
            machines.require_memory(exchange, {"params/emb": (share, np.float32), "opt/emb": ((4,), np.int8)})
        except HostMemoryError as error:
            ranks = f"for rank{'s' * (size > 1)} {', '.join(map(str, range(size)))} "
            assert "params/emb: with 1 more (it alone 1.20 GB, opt/emb 0.00 GB) takes 1.20 GB" in str(error), error
            assert "1.00 GB are available on " in str(error) and ranks in str(error), error
        else:
            raise AssertionError("there was room")
        levels[f"machine/{rank}"] = machines.RESERVE + (5 if rank == 0 else 100)
        try:
            machines.require_memory(exchange, {"params/emb": ((10,), np.int8)})
        except HostMemoryError as error:
            assert "for rank 0 " in str(error), error
        else:
            raise AssertionError("there was room in the cgroup")
    finally:
        machines.memory_levels = usual
