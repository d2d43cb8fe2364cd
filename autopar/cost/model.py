"""When lifting pays on one device.

The dense step walks every row of a table and its slots; the lifted one sorts the ids and walks the touched rows,
with a higher price per row (gather and scatter in place of a contiguous loop). The crossover is a ratio of rows to
ids, measured by `benchmarks/crossover.py`.
"""

from __future__ import annotations

#: Rows per looked-up id above which the lifted step is faster (CPU; `python -m benchmarks crossover`).
ROWS_PER_ID = 2.0
#: Below this many bytes in a table and its slots both steps cost about as much as dispatching them.
SMALL_FAMILY_BYTES = 1 << 18


def lifting_pays(*, extent: int, ids: int, row_bytes: int) -> bool:
    """Whether a step on the touched rows is expected to be faster than the dense one.

    Args:
      extent: V, rows of the table.
      ids: Ids looked up in a step, duplicates included.
      row_bytes: Bytes of one row, the slots' rows included.
    """
    return extent * row_bytes >= SMALL_FAMILY_BYTES and extent >= ROWS_PER_ID * ids


def touched_bytes(*, table_bytes: int, family_bytes: int) -> int:
    """Bytes of memory traffic of one dense update of a table and its slots.

    The gradient is written and read once (the table's size each), and every leaf of the family is read and written.
    A lifted update does the same on the touched rows: alpha times this.
    """
    return 2 * (table_bytes + family_bytes)
