"""Defines the methods that a user may ask for, and which parameters they apply to.

A mapping's keys are patterns over parameter paths: one that matches a node covers its leaves; `*` stays within a
segment, `**` crosses segments; the first match wins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from autopar.errors import ArgumentsError, StrategyError
from autopar.ir.paths import matches

#: Methods that run a table's step on its touched rows.
ROW_METHODS = ("ps", "allgather", "allreduce_rows")
#: Methods by which every device has all rows of a table.
REPLICATED = ("allgather", "allreduce_rows", "allreduce")
#: Divides products of dense parameters over the devices of a tensor axis.
TENSOR = "tensor"
#: Methods by which a table may be trained; "auto" chooses one.
METHODS = ("allreduce", *ROW_METHODS)
#: All methods that a strategy may name.
STRATEGIES = ("auto", *METHODS, TENSOR)
Sparse = Literal["exact", "lazy", "off"]
#: Keeps each table whole: on hosts in the memory of one rank, on devices on one, in a stack with others.
WHOLE_TABLES = "ps:table"
#: Names of placements that there are elsewhere: TorchRec's "table_wise" and the like.
_PLACEMENT = re.compile(r"^ps:|^(table|column|row|grid)([_-]?wise)?$")
#: The name of a table on hosts among methods.
HOSTED = "ps on hosts"
#: Where a table's rows are.
Where = Literal["devices", "hosts"]
#: A method, or a method and where.
Method = str | tuple[str, Where]
Strategy = Method | Mapping[str, Method]
#: Results by example: "whole", all on every process; "spread", each with its example.
Results = Literal["whole", "spread"]
#: What "auto" compares methods by: predicted times, or the formulas of the Parallax paper's table 3.
Choose = Literal["times", "formulas"]


def split_method(asked: Method) -> tuple[str, Where]:
    """Splits a method, `"ps"` or `("ps", "hosts")`, into its name and where the rows are; `"ps:table"` is "ps", too.
    Raises StrategyError if there is no such method, or not there."""
    method, where = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, "devices")
    method = "ps" if method == WHOLE_TABLES else method
    if not isinstance(method, str) or method not in STRATEGIES:
        raise StrategyError(f"strategy: {_no_method(method)}")
    if where not in ("devices", "hosts"):
        raise StrategyError(f"strategy: {asked!r} is neither on 'devices' nor on 'hosts'")
    if where == "hosts" and method != "ps":
        raise StrategyError(f"strategy: {asked!r}: tables on hosts are trained by 'ps' only")
    return method, "hosts" if where == "hosts" else "devices"


def _no_method(method: object) -> str:
    """Says which methods there are; and of placements that other libraries have what is done in their place."""
    text = f"there is no method {method!r}; the methods are {', '.join(STRATEGIES)}"
    if _PLACEMENT.search(str(method)) is None:
        return text
    return (
        "tables are placed by rows, 'ps', which divides the rows of each table among all owners, balanced, and "
        "exchanges tables that are alike as one; or whole, each on one device or rank, 'ps:table' and ('ps:table', "
        "'hosts') (docs/planning.md); columns on each owner would send ids to all of them, and no fewer rows; "
        f"'allreduce' keeps a small table whole everywhere. So {text}"
    )


class MethodChoice(NamedTuple):
    """A strategy's choice for one parameter; `pattern` is the one that matched first, if any."""

    method: str
    where: Where
    pattern: str | None


def choice_for(strategy: Strategy, path: str) -> MethodChoice:
    """Returns a strategy's choice for a parameter; "auto" if no pattern covers it."""
    if not isinstance(strategy, Mapping):
        return MethodChoice(*split_method(strategy), None)
    pattern = next((p for p in strategy if matches(p, path)), None)
    return MethodChoice(*("auto", "devices") if pattern is None else split_method(strategy[pattern]), pattern)


def asks_for_whole(strategy: Strategy, path: str) -> bool:
    """Returns whether a strategy keeps a table whole on one device, or in the memory of one rank."""
    pattern = next((p for p in strategy if matches(p, path)), None) if isinstance(strategy, Mapping) else None
    asked = strategy.get(pattern) if isinstance(strategy, Mapping) and pattern is not None else strategy
    return asked == WHOLE_TABLES or (isinstance(asked, tuple) and asked[:1] == (WHOLE_TABLES,))


def asks_for_hosts(strategy: Strategy) -> bool:
    """Returns whether a strategy puts any table into host memory."""
    methods = strategy.values() if isinstance(strategy, Mapping) else [strategy]
    return any(split_method(method)[1] == "hosts" for method in methods)


def with_hosts(strategy: Strategy, paths: Iterable[str]) -> Strategy:
    """Returns the strategy with some tables in host memory."""
    rest = strategy if isinstance(strategy, Mapping) else {"**": strategy}
    hosted: dict[str, Method] = dict.fromkeys(paths, ("ps", "hosts"))
    return {**hosted, **rest}


def without_hosts(strategy: Strategy) -> Strategy:
    """Returns the strategy with "auto" in place of tables on hosts."""

    def of(method: Method) -> Method:
        return "auto" if split_method(method)[1] == "hosts" else method

    return {k: of(v) for k, v in strategy.items()} if isinstance(strategy, Mapping) else of(strategy)


def check_choices(strategy: object, sparse: object, donate: object, results: object, choose: object) -> None:
    """Checks the user's options. Raises ArgumentsError if an option has no such value."""
    if sparse not in ("exact", "lazy", "off"):
        raise ArgumentsError(f"sparse={sparse!r}: there are 'exact', 'lazy' and 'off'")
    if choose not in ("times", "formulas"):
        raise ArgumentsError(f"choose={choose!r}: there are 'times' and 'formulas'")
    if not isinstance(strategy, (Mapping, tuple)) and strategy not in (*STRATEGIES, WHOLE_TABLES):
        raise ArgumentsError(f"strategy={strategy!r}: {_no_method(strategy)}, or a mapping from patterns")
    if isinstance(strategy, Mapping) and not all(isinstance(pattern, str) for pattern in strategy):
        raise ArgumentsError(f"strategy={strategy!r}: patterns over parameter paths are strings, 'params/item*'")
    if not isinstance(donate, bool):
        raise ArgumentsError(f"donate={donate!r}: give True or False")
    if results not in (None, "whole", "spread"):
        raise ArgumentsError(f"results={results!r}: there are 'whole' and 'spread'")


# --- optimisations that `optimize=` switches: those of the Parallax paper's section 5.3, and ours ---


#: With tables on hosts, by the names of the paper's table 4: "hybrid" (HYB): dense parameters are on every rank, and
#: their gradients reduced; "local" (LA): what ranks of a machine want alike crosses machines once; "owner" (OPAU): what
#: follows sums of gradients runs at the rows' owners. On devices as well, "border" (OPSW): what a step computes behind
#: a lookup runs at the owners where less is sent then. Ours, "prefetch": rows of the next batch are fetched beside the
#: step; "once": what depends on a row alone is computed once for each distinct row.
OPTIMIZATIONS = ("hybrid", "local", "owner", "border", "prefetch", "once")
#: What a user gives.
Optimize = Literal["all", "none"] | Collection[str]


def optimize_text(optimize: Optimize) -> str:
    """Returns the optimisations that are on as text: "all", "none", or names in the order of `OPTIMIZATIONS`. Raises
    ArgumentsError if there is no such optimisation."""
    if isinstance(optimize, str) and optimize in ("all", "none"):
        return optimize
    known = ", ".join(map(repr, OPTIMIZATIONS))
    if isinstance(optimize, str) or not isinstance(optimize, Collection):
        raise ArgumentsError(f"optimize={optimize!r}: give 'all', 'none', or a list of names among {known}")
    for name in optimize:
        if name == "hot":
            raise ArgumentsError(
                "optimize=: 'hot': rows that all ranks ask for stay with their owners, as copies on every rank "
                "would send as many bytes, and one accelerator would save microseconds (docs/optimisations.md, Hot "
                f"rows); there are {known}"
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
