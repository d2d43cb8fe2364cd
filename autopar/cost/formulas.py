"""Bytes that a method transfers: the paper's table, and what each device really sends.

Parallax's table 3 counts what one worker transfers for a parameter of b bytes. It mixes units (AllReduce counts one
direction, the others both; the co-located server's own bytes are left out), so that AllGather never wins for N > 2. It
is shown; decisions use `sent_bytes`, the bytes sent per device, server and padding included.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Bytes of a row's number.
_ID_BYTES = 4


def transfer_bytes(method: str, kind: str, *, b: float, n: int, alpha: float = 1.0) -> float:
    """Bytes that one worker transfers in a step for one parameter (Parallax, section 5.3.1, table 3, verbatim).

    Args:
      method: "ps", "allreduce" (dense parameters) or "allgather" (sparse ones).
      kind: "dense" or "sparse".
      b: Bytes of the parameter.
      n: Number of workers N.
      alpha: Share of the rows that a step touches.

    Raises:
      ValueError: a pair that the table doesn't define, or numbers out of range.
    """
    if b < 0 or n < 1 or not 0 <= alpha <= 1:
        raise ValueError(f"b={b}, n={n}, alpha={alpha}: bytes are not negative, n is at least 1, alpha is in [0, 1]")
    table = {
        ("ps", "dense"): 2 * b,
        ("allreduce", "dense"): 2 * (n - 1) * b / n,
        ("ps", "sparse"): 2 * alpha * b,
        ("allgather", "sparse"): 2 * (n - 1) * alpha * b,
    }
    if (method, kind) not in table:
        known = ", ".join(f"{m} for {k}" for m, k in table)
        raise ValueError(f"the table has no {method!r} for {kind!r} parameters; it has {known}")
    return table[method, kind]


def sent_bytes(
    *, n: int, row_bytes: int, extent: int, ids: int, asked: int, routed: int, capacity: int
) -> Mapping[str, int]:
    """Bytes that each device sends in a step for the rows of one table, by method (DESIGN 6).

    Args:
      n: Devices N.
      row_bytes: Bytes of a row.
      extent: V.
      ids: Ids that each device looks up, duplicates included.
      asked: Distinct rows of them at most.
      routed: Bound on the rows that all devices together touch.
      capacity: Rows that one device may ask another one for.
    """
    return {
        "ps": (n - 1) * capacity * (_ID_BYTES + 2 * row_bytes),
        "allgather": (n - 1) * asked * (_ID_BYTES + row_bytes),
        "allreduce_rows": (n - 1) * ids * _ID_BYTES + 2 * (n - 1) * routed * row_bytes // n,
        "allreduce": 2 * (n - 1) * extent * row_bytes // n,
    }
