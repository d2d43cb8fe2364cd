"""Predicts whether lifting pays on one device.

The dense step walks every row of a table and its slots; the lifted one sorts the ids and walks the touched rows, at a
higher price per row (gather and scatter in place of a contiguous loop), which weighs more where rows are short. The
crossover is a number of rows per id, measured by `python -m benchmarks one_device.crossover`.
"""

from __future__ import annotations

import math

#: The lifted step is faster if the table has at least this number, divided by the square root of a row's bytes (slots'
#: rows included), of rows per looked-up id. Measured on 2 CPU cores with Adagrad: 24 rows per id at 64 bytes, 9 at 512,
#: 4 at 2048.
ROWS_PER_ID = 192.0
#: Deferred rows pay from this many bytes of a table and its slots on, at DEFERRED_ROWS times as many rows per id (at
#: most MOST_DEFERRED_ROWS). Measured on 2 CPU cores with AdamW: five tables of 24,000 x 16 among 26 took as long as
#: dense ones or a bit longer; both steps take equally long at 20 to 35 rows per id of 192 bytes, 28 of 768; at 20 of
#: 3072 bytes the lifted step takes a third of the dense one's time.
SMALL_DEFERRED_BYTES, DEFERRED_ROWS, MOST_DEFERRED_ROWS = 1 << 23, 4.0, 32.0
#: Seconds that deferred rows cost in a step of several CPU devices beside their exchange, for a table and for each
#: looked-up element. Measured on 2 cores, 4 devices, with AdamW: 3.4 ms for 512 rows of 192 numbers, 0.6 ms for 128 of
#: 16; on one device 23 to 66 ns for an element.
DEFERRED_S, DEFERRED_ELEMENT_S = 5e-4, 30e-9
#: The exchange of deferred rows must save this many times their cost, since both predictions are rough: a GPT with
#: AdamW whose rows were predicted to save 1.70 ms and to cost 1.48 took 2.7 ms longer than plain data parallelism (2
#: cores, 4 devices).
DEFERRED_MARGIN = 2.0
#: On several CPU devices all exchanges of rows in a step must together save the time of this many smallest AllReduces.
#: Dense gradients share one AllReduce; for an exchange of rows the devices wait for each other one to three times more,
#: which takes longer in a step that keeps all cores busy than the exchange takes alone. A GPT with Adagrad: rows by
#: `allreduce_rows` were predicted to save 1.1 ms and cost 0.9, by `ps` to save 1.0 and cost 3.1 (2 cores, 4 devices; an
#: AllReduce of one number: 0.05 ms). Of a DLRM's 26 tables even those that were predicted to save 0.1 to 0.4 ms each
#: did, beside the others.
EXCHANGES_MARGIN = 40.0
#: Upper limit of that time in seconds: between processes the smallest AllReduce alone takes milliseconds.
MOST_EXCHANGES_S = 5e-3
#: Seconds that a flush takes for each row; seconds that a longer update log adds to a step, for each step that it
#: holds. Measured on 2 CPU cores, which other programs used as well.
FLUSH_ROW_S, ENTRY_S = 36e-9, 20e-9
#: Least and most steps in an update log.
LOG_STEPS = 64, 1024
#: From this many bytes in a table and its slots on the lifted step is faster on an accelerator.
#: Measured on an NVIDIA H200 with Adagrad, 640 and 6400 ids: 0.64 to 0.89 of the dense step's speed from 24 to 39 MiB,
#: 1.2 to 1.6 at 122, 2.3 to 2.9 at 390.
SMALL_ACCELERATOR_BYTES = 96 << 20
#: From this many bytes in a table and its slots on rows are replayed faster than a dense update goes through memory.
LEAST_REPLAYED_BYTES = 128 << 20
#: Below this many bytes in a table and its slots both steps cost about as much as dispatching them.
SMALL_FAMILY_BYTES = 1 << 16


def log_steps(extent: int) -> int:
    """Returns the length of an update log, a power of two, that minimizes the time of flushes and steps of V rows.

    Flushes cost as the inverse of the length, steps as the length: the best one is the root of the ratio.
    """
    low, high = LOG_STEPS
    best = math.sqrt(extent * FLUSH_ROW_S / ENTRY_S)
    return int(min(high, max(low, 2 ** round(math.log2(max(best, 1))))))


def lifting_pays(*, extent: int, ids: int, row_bytes: int, deferred: bool = False, steps: int = 1) -> bool:
    """Returns whether a step on the touched rows is expected to be faster than the dense one.

    `ids`: looked up in a call, duplicates included. `row_bytes`: of the slots' rows, too. `deferred`: rows have to be
    brought up to date before they are read. `steps`: train steps in a call, of which each dense one walks every row.
    """
    small, rows_per_id = SMALL_FAMILY_BYTES, ROWS_PER_ID / math.sqrt(row_bytes)
    if deferred:
        small, rows_per_id = SMALL_DEFERRED_BYTES, min(rows_per_id * DEFERRED_ROWS, MOST_DEFERRED_ROWS)
    return extent * row_bytes >= small and extent * steps >= ids * rows_per_id


def deferred_s(*, rows: int, row_elements: int) -> float:
    """Returns the seconds that several CPU devices take to bring looked-up rows of `row_elements` numbers up to
    date. `rows`: of all devices; each looks a row up once, however many ids name it."""
    return DEFERRED_S + rows * row_elements * DEFERRED_ELEMENT_S


def lifting_pays_on_accelerators(*, family_bytes: int, deferred: bool = False) -> bool:
    """Returns whether lifting pays on an accelerator: only the bytes count, since touched rows cost next to nothing.

    Deferred rows don't pay: missed steps are replayed one by one, each with kernels of its own. With AdamW and 800,000
    x 256 floats that takes 26 ms a step, the dense update 2 ms.
    """
    return not deferred and family_bytes >= SMALL_ACCELERATOR_BYTES


def replay_pays(*, family_bytes: int) -> bool:
    """Returns whether deferring pays on one device where every row must be replayed step by step in the end.

    It saves only memory traffic, and runs a loop in place of one pass: with AdamW and a moving average it took 2.1
    times the dense step's time at 41 MB, 0.8 at 205 MB (2 CPU cores).
    """
    return family_bytes >= LEAST_REPLAYED_BYTES


def touched_bytes(*, table_bytes: int, family_bytes: int) -> int:
    """Returns the bytes of memory traffic of one dense update of a table and its slots.

    The gradient is written and read once (the table's size each); every leaf of the family is read and written. A
    lifted update moves alpha times as much.
    """
    return 2 * (table_bytes + family_bytes)
