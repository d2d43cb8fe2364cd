"""Parallax's table 3: bytes that a method transfers.

It counts what one worker transfers for a parameter of b bytes. It mixes units (AllReduce counts one
direction, the others both; the co-located server's own bytes are left out), so that AllGather never wins for N > 2. It
is shown; what each device really sends is `cost.exchange.sent_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping


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


def table_3(*, b: float, n: int, alpha: float) -> Mapping[str, float]:
    """Method -> the table's bytes of one parameter: as a sparse one, and as a dense one by "allreduce"."""
    return {
        "ps": transfer_bytes("ps", "sparse", b=b, n=n, alpha=alpha),
        "allgather": transfer_bytes("allgather", "sparse", b=b, n=n, alpha=alpha),
        "allreduce": transfer_bytes("allreduce", "dense", b=b, n=n),
    }
