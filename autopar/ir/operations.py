"""The names of the operations that passes add to a program: row space, shards, partial sums (docs/design.md).

JAX names its primitives as it likes ("reduce", "copy", ...), and so does a user who defines one. All of ours begin with
`PREFIX`, so that none can be taken for another. Invariant, checked by `ir.verifier`: an equation's operation is one of
these, or has JAX's primitive.
"""

from __future__ import annotations

PREFIX = "ap."

OPERATIONS = frozenset(
    PREFIX + name
    for name in (
        "row_ids row_range row_iota route pull fetch padding lookup lookup_ids push push_ids aggregate deliver plus "
        "replicate spread reduce_rows reduce_part reduce_others reduce_table numbered only_rows densify commit sweep "
        "fill changes catch_up record next flush store whole exceeded any select reduce share once full isolated"
    ).split()
)


def plain_name(op: str) -> str:
    """The name without the prefix, for people."""
    return op.removeprefix(PREFIX)
