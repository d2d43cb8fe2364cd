"""`check_same`: compares ranks before they begin.

Ranks with another plan, other code or another batch size don't fail: they compute something else, or wait for each
other for ever. Their fingerprints are compared before the first step, and the odd rank is named.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from autopar.errors import LaunchError
from autopar.mpi.world import World

#: Characters of a value in messages.
SHOWN = 200


def check_same(world: World, facts: Mapping[str, str]) -> None:
    """Compares ranks' facts, such as {"JAX version": "0.10.2", "batch size": "64"}. Collective.

    They should be short (fingerprints, no programs), as each rank receives all of them.

    Raises:
      LaunchError: on every rank, naming those that differ from the majority (from rank 0, in a tie), and in what.
    """
    if world.size == 1:
        return
    facts_of_ranks: Sequence[dict[str, str]] = world.comm.allgather(dict(facts))
    names = list(dict.fromkeys(name for rank in facts_of_ranks for name in rank))
    different = [line for name in names for line in _differences(name, [rank.get(name) for rank in facts_of_ranks])]
    if different:
        raise LaunchError(
            f"rank {world.rank}: the ranks of this job don't do the same:\n  "
            + "\n  ".join(different)
            + "\nStart all ranks with the same script, arguments and environment"
        )


def _differences(name: str, values: Sequence[str | None]) -> list[str]:
    """Returns a line for each value other than the most frequent one."""
    counts = collections.Counter(values)
    reference = max(counts, key=lambda value: (counts[value], value == values[0], -values.index(value)))
    lines = []
    for value in (v for v in counts if v != reference):
        odd = [str(rank) for rank, v in enumerate(values) if v == value]
        same = [str(rank) for rank, v in enumerate(values) if v == reference]
        here, there = shown(value, reference), shown(reference, value)
        lines.append(f"{name}: {here} on {_ranks(odd)}, {there} on {_ranks(same)}")
    return lines


def _ranks(ranks: Sequence[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def shown(value: str | None, other: str | None) -> str:
    """Returns a value; a long one from shortly before its first difference."""
    if value is None:
        return "(missing)"
    if len(value) <= SHOWN:
        return value
    same = next((i for i, (a, b) in enumerate(zip(value, other or "", strict=False)) if a != b), 0)
    start = max(same - SHOWN // 4, 0)
    return ("..." if start else "") + value[start : start + SHOWN] + ("..." if start + SHOWN < len(value) else "")
