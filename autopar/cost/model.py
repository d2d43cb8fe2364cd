"""When lifting pays on one device.

The dense step walks every row of a table and its slots; the lifted one sorts the ids and walks the touched rows, with
a higher price per row (gather and scatter in place of a contiguous loop), which weighs more where rows are short. The
crossover is a number of rows per id, measured by `python -m benchmarks crossover`.
"""

from __future__ import annotations

import math

#: The lifted step is faster from this many rows per looked-up id on, times 1 / sqrt(bytes of a row and its slots').
#: Measured on 2 CPU cores with Adagrad: 24 rows per id at 64 bytes, 9 at 512, 4 at 2048.
ROWS_PER_ID = 192.0
#: Steps that deferred rows wait for at most. A flush walks all rows once; the longer the journal, the rarer it is.
JOURNAL_STEPS = 256
#: Below this many bytes in a table and its slots both steps cost about as much as dispatching them.
SMALL_FAMILY_BYTES = 1 << 16


def lifting_pays(*, extent: int, ids: int, row_bytes: int) -> bool:
    """Whether a step on the touched rows is expected to be faster than the dense one.

    Args:
      extent: V, rows of the table.
      ids: Ids looked up in a step, duplicates included.
      row_bytes: Bytes of one row, the slots' rows included.
    """
    return extent * row_bytes >= SMALL_FAMILY_BYTES and extent >= ids * ROWS_PER_ID / math.sqrt(row_bytes)


def touched_bytes(*, table_bytes: int, family_bytes: int) -> int:
    """Bytes of memory traffic of one dense update of a table and its slots.

    The gradient is written and read once (the table's size each), and every leaf of the family is read and written.
    A lifted update does the same on the touched rows: alpha times this.
    """
    return 2 * (table_bytes + family_bytes)
