"""Specifies the operations that passes add to a program: row space, shards, partial sums (docs/design.md).

All of ours begin with `PREFIX`, so that no primitive of JAX ("reduce", "copy", ...) or of a user can be taken for one.
The spec of each says which pass writes it first, and names its operands, some of them in groups. Invariant, checked by
`ir.verifier` after every pass: an equation has JAX's primitive, or its operation is one of these, written by this pass
or by an earlier one, with these operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.jax_types import Params

PREFIX = "ap."

#: Passes that write operations, in their order; before them a program has JAX's alone.
PASSES = (
    "lift_rows",
    "share_logs",
    "merge_pushes",
    "place",
    "reduce_tables",
    "split_update",
    "split_servers",
    "split_pipeline",
    "localize",
    "pool_bags",
    "once_per_row",
    "localize_tensor",
    "split_segments",
)

#: Counts the operands of a group from an equation's parameters.
Count = Callable[[Params], int]
#: All operands after the other groups'.
REST = -1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """The specification of an operation."""

    since: str  #: The pass that writes it first.
    #: Name of a group of operands -> their number; `REST` for the last one. "route" is a route.
    groups: Mapping[str, int | Count]
    #: It takes the padding row for all untouched rows. Its parameter `of` has the values that its rows are made of,
    #: before lifting: one that is constant on untouched rows, or the factors of a product, one of which is zero there.
    takes_padding: bool = False

    def split(self, params: Params, operands: Sequence[T]) -> dict[str, tuple[T, ...]]:
        """Groups operands (of any kind: atoms, arrays)."""
        parts, start = {}, 0
        for name, count in self.groups.items():
            size = count(params) if callable(count) else len(operands) - start if count == REST else count
            parts[name] = tuple(operands[start : start + size])
            assert len(parts[name]) == size, f"{size} operands are {name}, and there are {len(parts[name])}"
            start += size
        assert start == len(operands), f"{len(operands) - start} operands too many"
        return parts


def _length(name: str, each: int = 1) -> Count:
    return lambda params: each * len(params[name])


def _number(name: str) -> Count:
    return lambda params: params[name]


def _guard(params: Params) -> int:
    return int(bool(params.get("guarded")))


def _replayed(name: str) -> Count:
    return lambda params: len(params.get("families", (0,))) * len(getattr(params["replay"], name))


def _kept(params: Params) -> int:
    return sum(one.is_kept for one in params["sets"])


def _named(names: str) -> Mapping[str, int | Count]:
    return {name.removesuffix("*"): REST if name.endswith("*") else 1 for name in names.split()}


_SPECS: Mapping[str, Mapping[str, Mapping[str, int | Count]]] = {
    "lift_rows": {
        "row_ids": _named("index"),
        "row_range": {},
        "row_iota": _named("route"),
        "route": _named("ids*"),
        "pull": _named("leaf route"),
        "fetch": _named("rows route"),
        "padding": _named("rows route"),
        "lookup": _named("fetched route index"),
        "lookup_ids": _named("fetched route ids"),
        "push": _named("base route index updates"),
        "push_ids": _named("base route ids updates"),
        "reduce_rows": _named("rows route others*"),
        "densify": _named("rows route first*"),
        "commit": {**_named("leaf rows route"), "guard": _guard, "first": REST},
        "sweep": {"needed": 1, "leaves": _length("axes"), "read": _length("read_axes"), "frontier": REST},
        "fill": _named("leaf rows route unless*"),
        "changes": {
            "old": _length("axes"),
            "new": _length("axes"),
            "constant": _length("constants"),
            "frontier": _number("frontier"),
            "finite": _number("finite"),
            "nonzero": _number("nonzero"),
            "guard": _guard,
            "first": REST,
        },
        "catch_up": {"leaves": _replayed("leaves"), "stamps": lambda params: len(params["families"]), "entries": REST},
        "record": {"now": 1, "records": _replayed("records"), "values": _replayed("values"), "guard": REST},
        "flush": {"leaves": _replayed("leaves"), "stamps": 1, "entries": REST},
        "next": _named("now"),
        "store": _named("whole"),
        "whole": _named("stored"),
        "load": _named("route"),
        "exceeded": _named("load"),
        "any": _named("flags*"),
        "select": _named("exceeded new old"),
        "full": _named("value"),
    },
    "merge_pushes": {
        "aggregate": _named("base route index updates"),
        "deliver": _named("sums route base*"),
        "plus": _named("values*"),
    },
    "place": {"replicate": _named("shard"), "spread": _named("value")},
    "reduce_tables": {
        "reduce_table": {
            "stored": _length("stored"),
            "touched": _length("touched", 2),
            "dense": _length("dense"),
            "values": REST,
        },
        "numbered": _named("numbers"),
        "only_rows": _named("value numbers"),
    },
    "split_update": {
        "microbatches": _named("operands*"),
        "microbatch_shard": _named("value"),
        "microbatch_once": _named("value"),
        "scaled": _named("operands*"),
    },
    "localize": {
        "reduce": _named("value"),
        "reduce_shards": _named("value"),
        "reduce_rank": _named("value"),
        "once_rank": _named("value"),
        "shard": _named("value"),
        "once": _named("value"),
        "only_examples": _named("value"),
        "first": _named("operands*"),
        "lookup_part": _named("rows index"),
        "reduce_part": _named("rows route others*"),
        "reduce_others": {"part": 1, "route": 1, "needed": 1, "read": _length("read_axes"), "frontier": REST},
    },
    "pool_bags": {
        "ask_bags": {"route": 1, "kept": _kept, "bags": REST},
        "pool": {"rows": 1, "route": 1, "bags": REST},
        "push_pool": {"route": 1, "cotangents": _length("sets"), "kept": _kept, "bags": REST},
    },
    "localize_tensor": {
        "tensor_reduce": _named("value"),
        "tensor_replicate": _named("value"),
        "tensor_shard": _named("value"),
        "tensor_once": _named("value"),
        "tensor_lookup_part": _named("rows index"),
        "tensor_first": _named("operands*"),
    },
}

_TAKE_PADDING = frozenset({"densify", "fill", "reduce_rows", "reduce_part"})

OPERATIONS: Mapping[str, Operation] = {
    PREFIX + name: Operation(since, groups, name in _TAKE_PADDING)
    for since, specs in _SPECS.items()
    for name, groups in specs.items()
}


def split(op: str, params: Params, operands: Sequence[T]) -> dict[str, tuple[T, ...]]:
    """Groups the operands of one of our operations."""
    return OPERATIONS[op].split(params, operands)


def plain_name(op: str) -> str:
    return op.removeprefix(PREFIX)
