"""Names the optimisations that `optimize=` switches: those of the Parallax paper's section 5.3, and ours."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from autopar.errors import ArgumentsError

#: With tables on hosts, by the names of the paper's table 4: "hybrid" (HYB): dense parameters are on every rank, and
#: their gradients reduced; "local" (LA): what ranks of a machine want alike crosses machines once; "owner" (OPAU): what
#: follows sums of gradients runs at the rows' owners. On devices as well, "border" (OPSW): what a step computes behind
#: a lookup runs at the owners where less is sent then. Ours, "prefetch": rows of the next batch are fetched beside the
#: step; "once": what depends on a row alone is computed once for each distinct row.
OPTIMIZATIONS = ("hybrid", "local", "owner", "border", "prefetch", "once")
#: What a user gives.
Optimize = Literal["all", "none"] | Collection[str]


def optimize_text(optimize: Optimize) -> str:
    """Returns the optimisations that are on as text: "all", "none", or names in the order of `OPTIMIZATIONS`.

    Raises:
      ArgumentsError: there is no such optimisation.
    """
    if isinstance(optimize, str) and optimize in ("all", "none"):
        return optimize
    known = ", ".join(map(repr, OPTIMIZATIONS))
    if isinstance(optimize, str) or not isinstance(optimize, Collection):
        raise ArgumentsError(f"optimize={optimize!r}: give 'all', 'none', or a list of names among {known}")
    for name in optimize:
        if name == "hot":
            raise ArgumentsError(
                "optimize=: 'hot': rows that all ranks ask for stay with their owners, as copies on every rank "
                f"would send as many bytes (docs/optimisations.md, Hot rows); there are {known}"
            )
        if name not in OPTIMIZATIONS:
            raise ArgumentsError(f"optimize=: there is no {name!r}; there are {known}")
    return named(optimize)


def named(names: Collection[str]) -> str:
    """Returns names of optimisations as text; "all" for all of them."""
    on = [name for name in OPTIMIZATIONS if name in names]
    return "all" if len(on) == len(OPTIMIZATIONS) else ", ".join(on) or "none"


def is_on(text: str, name: str) -> bool:
    """Says whether an optimisation is on; `text`: of `optimize_text`."""
    return text == "all" or name in text.split(", ")


def is_optimize_text(text: str) -> bool:
    """Says whether `optimize_text` returns such a text."""
    return text in ("all", "none") or set(text.split(", ")) <= set(OPTIMIZATIONS)
