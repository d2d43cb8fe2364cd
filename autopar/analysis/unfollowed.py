"""Why a leaf of which parts are read or written by ids is no table: what its rows are lost in, in words.

A remedy is what a user may write instead; tests/contract/test_dense_tables.py tries each.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.program import Equation
from autopar.ir.rowspace import Refusal

#: What would change anything that needs all rows.
APART = "compute it apart from the step (a metric), or of looked-up rows alone, or accept that the table stays dense"
#: What would change an update that isn't made row by row.
OF_ROWS = "make it for the rows that are looked up, and write these: t.at[ids].add(...), t.at[ids].set(...)"
LAZY = "sparse='lazy' moves only the touched rows, which is another function"
OWN_IDS = "compute the ids first, from what is no row of this table, or from a copy of it that the step doesn't update"
_ROWS_FIRST = "look up rows first (t[ids]), and compute the rest of these alone, where that is the same"
_OWN_NUMBERS = "look up rows by their own numbers in the table as it is stored, t[ids]"

#: Operation -> what it does to a table's rows, and what to write instead.
LOST: Mapping[str, tuple[str, str]] = {
    "reshape": ("reshapes the table so that its rows run into each other", _OWN_NUMBERS),
    "pad": (
        "pads the table by rows",
        "look up rows of the table itself, and select where it is padded: jnp.where(is_padding, fill, t[ids])",
    ),
    "rev": ("reverses the table's rows", "look up rows by their numbers from the other end: t[len(t) - 1 - ids]"),
    "broadcast_in_dim": (
        "repeats the whole table",
        "look up rows first (t[ids]), and repeat these; to train copies of the table in a loop, train copies of the "
        "rows that it looks up (jnp.unique(ids, size=...)), and add their changes to the table",
    ),
    "scan": ("a scan over the rows of the table", _ROWS_FIRST),
    **dict.fromkeys(
        ("bcoo_dot_general", "bcsr_dot_general"),
        (
            "a product with a sparse matrix isn't followed",
            "look up rows, weigh them and add them up: jax.ops.segment_sum(weights[:, None] * t[columns], rows, n)",
        ),
    ),
}


def why_unfollowed(lost: Equation, access: Equation) -> Refusal:
    """Returns why a leaf's lookup isn't followed.

    Args:
      lost: Where its rows are lost.
      access: What reads parts of what becomes of it; `lost` itself where that is no lookup.
    """
    if lost.op in LOST:
        reason, remedy = LOST[lost.op]
    elif lost is access:
        reason, remedy = f"{lost.op} is given ids, and isn't followed", _ROWS_FIRST
    else:
        reason, remedy = f"{lost.op} of all of its rows, ahead of a lookup", _ROWS_FIRST
    return Refusal(reason, lost.source or access.source, remedy)


def why_only_written(write: Equation, path: str) -> Refusal:
    """Returns why a leaf into which a step writes rows, and reads none, is no table."""
    return Refusal("the step only writes rows of it, in place", write.source, shards_remedy(path))


def shards_remedy(path: str) -> str:
    """Returns how a leaf is kept in shards although there is no update to save."""
    return f"strategy={{{path!r}: 'ps', '**': 'auto'}} keeps a shard of it on each of several devices"
