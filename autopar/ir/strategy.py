"""Methods that a user may ask for, and the parameters they are for.

Patterns over parameter paths: a pattern that matches a node covers its leaves; `*` stays within a segment, `**`
crosses segments; the first match wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal as Choice
from typing import NamedTuple

from autopar.errors import ArgumentsError, StrategyError
from autopar.ir.paths import matches

#: Methods that run a table's step on its touched rows.
ROW_METHODS = ("ps", "allgather", "allreduce_rows")
#: Methods by which every device has all rows of a table.
REPLICATED = ("allgather", "allreduce_rows", "allreduce")
#: Divides products of dense parameters over the devices of a tensor axis.
TENSOR = "tensor"
METHODS = ("auto", "allreduce", *ROW_METHODS)
#: All that a strategy may say.
STRATEGIES = (*METHODS, TENSOR)
Sparse = Choice["exact", "lazy", "off"]
#: How a table on hosts is called among methods.
HOSTED = "ps on hosts"
#: Where a table's rows are.
Where = Choice["devices", "hosts"]
#: A method, or a method and where.
Method = str | tuple[str, Where]
Strategy = Method | Mapping[str, Method]
#: "whole": all of them on every process. "spread": each with its example.
Results = Choice["whole", "spread"]


def split_method(asked: Method) -> tuple[str, Where]:
    """Splits what a user gives into method and place: `"ps"`, or `("ps", "hosts")`.

    Raises:
      StrategyError: there is no such method, or not there.
    """
    method, where = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, "devices")
    if not isinstance(method, str) or method not in STRATEGIES:
        raise StrategyError(f"strategy: there is no method {method!r}; the methods are {', '.join(STRATEGIES)}")
    if where not in ("devices", "hosts"):
        raise StrategyError(f"strategy: {asked!r} is neither on 'devices' nor on 'hosts'")
    if where == "hosts" and method != "ps":
        raise StrategyError(f"strategy: {asked!r}: tables on hosts are trained by 'ps' only")
    return method, "hosts" if where == "hosts" else "devices"


class Asked(NamedTuple):
    """A strategy's choice for one parameter; `pattern` is the one that matched first, None if there is none."""

    method: str
    where: Where
    pattern: str | None


def asked_of(strategy: Strategy, path: str) -> Asked:
    """Returns the method that a strategy gives to a parameter; "auto" if no pattern covers it."""
    if not isinstance(strategy, Mapping):
        return Asked(*split_method(strategy), None)
    pattern = next((p for p in strategy if matches(p, path)), None)
    return Asked(*("auto", "devices") if pattern is None else split_method(strategy[pattern]), pattern)


def asks_for_hosts(strategy: Strategy) -> bool:
    """Returns whether a strategy puts any table in the memory of the hosts."""
    methods = strategy.values() if isinstance(strategy, Mapping) else [strategy]
    return any(split_method(method)[1] == "hosts" for method in methods)


def with_hosts(strategy: Strategy, paths: Iterable[str]) -> Strategy:
    """Returns the same with some tables in the memory of the hosts."""
    rest = strategy if isinstance(strategy, Mapping) else {"**": strategy}
    hosted: dict[str, Method] = dict.fromkeys(paths, ("ps", "hosts"))
    return {**hosted, **rest}


def without_hosts(strategy: Strategy) -> Strategy:
    """Returns the same for a step whose tables can't be on hosts: they are trained where they are."""

    def of(method: Method) -> Method:
        return "auto" if split_method(method)[1] == "hosts" else method

    return {k: of(v) for k, v in strategy.items()} if isinstance(strategy, Mapping) else of(strategy)


def check_choices(strategy: object, sparse: object, donate: object, results: object = None) -> None:
    """Checks what a user chose.

    Raises:
      ArgumentsError: there is no such thing.
    """
    if sparse not in ("exact", "lazy", "off"):
        raise ArgumentsError(f"sparse={sparse!r}: there are 'exact', 'lazy' and 'off'")
    if not isinstance(strategy, (Mapping, tuple)) and strategy not in STRATEGIES:
        raise ArgumentsError(f"strategy={strategy!r}: there are {', '.join(STRATEGIES)}, or a mapping from patterns")
    if isinstance(strategy, Mapping) and not all(isinstance(pattern, str) for pattern in strategy):
        raise ArgumentsError(f"strategy={strategy!r}: patterns over parameter paths are strings, 'params/item*'")
    if not isinstance(donate, bool):
        raise ArgumentsError(f"donate={donate!r}: give True or False")
    if results not in (None, "whole", "spread"):
        raise ArgumentsError(f"results={results!r}: there are 'whole' and 'spread'")
