"""What of a state goes into a checkpoint, and by which rank it is written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from autopar import jax_compat
from autopar.errors import CheckpointError, DonatedStateError
from autopar.ir.layout import RowLayout
from autopar.ir.paths import path_name
from autopar.launch.group import Group
from autopar.state.files.manifest import LeafRecord
from autopar.state.files.rows import file_name
from autopar.tables.deferred import DeferredTable
from autopar.tables.host import HostTable
from autopar.tables.kinds import is_table
from autopar.tables.pending import PendingArray
from autopar.tables.sharded import Table
from autopar.tables.staged import StageArray

#: Types of Python numbers that a state may hold.
NUMBERS: Mapping[Any, type] = {"bool": bool, "int": int, "float": float, "complex": complex}


@dataclass(frozen=True)
class SavedLeaf:
    """A leaf on its way into a checkpoint.

    Attributes:
      record: What the manifest says of it, but for its files.
      value: The leaf itself; of PRNG keys their data.
    """

    record: LeafRecord
    value: Any

    def array(self) -> Any:
        """Of a dense leaf: an array that this process has all of; a NumPy one where JAX has several processes."""
        value = self.value
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = value.addressable_data(0)
        return value if isinstance(value, jax.Array) and jax.process_count() == 1 else np.asarray(value)

    def parts(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Of rows: (file, share, rows first axis first) of what this process has, each share by one process only."""
        layout, axis = self.record.layout, self.record.axis
        assert layout is not None, "rows have a layout"
        for shard, rows in _shards(self.value, layout, axis):
            count = int(layout.rows_on(np.asarray(shard)))
            yield file_name(self.record.name, shard, layout.devices), shard, rows[:count]


def _shards(value: Any, layout: RowLayout, axis: int) -> Iterator[tuple[int, np.ndarray]]:
    if isinstance(value, HostTable):
        yield value.storage.rank, value.storage.rows
        return
    if isinstance(value, StageArray):
        for place, part in zip(value.places, value.values, strict=True):
            for start in range(place.start, place.stop, layout.shard_rows) if place.writes else ():
                first = start - place.start
                yield start // layout.shard_rows, np.asarray(part)[first : first + layout.shard_rows]
        return
    stored = value.stored if isinstance(value, Table) else value
    for shard in stored.addressable_shards:
        if shard.replica_id == 0:
            first = shard.index[axis].start or 0
            rows = np.moveaxis(np.asarray(shard.data), axis, 0)
            for start in range(0, rows.shape[0], layout.shard_rows):  # a device may hold several shards
                yield (first + start) // layout.shard_rows, rows[start : start + layout.shard_rows]


def saved_leaves(state: Any) -> list[SavedLeaf]:
    """The leaves of a state; an error if one can't be saved, or was given to a step."""
    pairs = jax.tree_util.tree_flatten_with_path(state)[0]
    leaves = []
    for number, (path, leaf) in enumerate(pairs):
        known = path_name(path)
        if isinstance(leaf, jax_compat.Tracer):
            raise CheckpointError(
                f"{known or 'the state'} is being traced and has no value yet: save what the jitted function returned, "
                "outside of jax.jit"
            )
        if (isinstance(leaf, jax.Array) or is_table(leaf)) and leaf.is_deleted():
            raise DonatedStateError(
                f"{known or 'the state'} was given to a step, which updated it in place: save the state that the step "
                "returned"
            )
        leaf = leaf.current() if isinstance(leaf, (DeferredTable, PendingArray)) else leaf
        name = f"{number:04d}_{re.sub(r'[^A-Za-z0-9]+', '_', known).strip('_')[-80:]}"
        leaves.append(_leaf(known, name, leaf))
    return leaves


def _leaf(path: str, name: str, leaf: Any) -> SavedLeaf:
    if isinstance(leaf, (HostTable, Table)):
        record = LeafRecord(path, name, "rows", "jax", leaf.shape, str(leaf.dtype), axis=leaf.axis, layout=leaf.layout)
        return SavedLeaf(record, leaf)
    if isinstance(leaf, StageArray):  # shards that one stage has each, which writes them
        rows = math.gcd(*(place.stop for place in leaf.places))
        layout = RowLayout(leaf.shape[0], leaf.shape[0] // rows if rows else 1, cyclic=False)
        return SavedLeaf(LeafRecord(path, name, "rows", "jax", leaf.shape, str(leaf.dtype), layout=layout), leaf)
    if isinstance(leaf, jax.Array):
        return _jax_leaf(path, name, leaf)
    if type(leaf) in NUMBERS.values():
        kind = cast(Any, type(leaf).__name__)
        return SavedLeaf(LeafRecord(path, name, "value", kind, (), "", value=repr(leaf)), leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and (leaf.dtype.kind in "biufc" or leaf.dtype.isbuiltin == 2):
        value = np.asarray(leaf, leaf.dtype.newbyteorder("=") if leaf.dtype.kind in "iufc" else None)
        kind = "dense" if value.size else "empty"
        return SavedLeaf(LeafRecord(path, name, kind, "numpy", value.shape, str(value.dtype)), value)
    shown = f"array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
    raise CheckpointError(
        f"{path or 'the state'} is of type {shown}, which can't be saved: a state holds arrays and numbers. Save the "
        "rest by itself, or say what is static where the state's class is registered"
    )


def _jax_leaf(path: str, name: str, leaf: jax.Array) -> SavedLeaf:
    key, shape = None, leaf.shape
    if jax_compat.is_key(leaf.dtype):
        key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    kind = "dense" if leaf.size else "empty"
    record = LeafRecord(path, name, kind, "jax", shape, str(leaf.dtype), jax_compat.is_weak(leaf), key)
    if leaf.is_fully_addressable or leaf.is_fully_replicated or not leaf.size:
        return SavedLeaf(record, leaf)
    # Spread over processes: each writes what it has.
    part = leaf.sharding.shard_shape(leaf.shape)
    spread = [axis for axis, (n, whole) in enumerate(zip(part, leaf.shape, strict=True)) if n != whole]
    if len(spread) > 1 or key is not None:
        raise CheckpointError(
            f"{path or 'the state'} is spread over processes along axes {spread}: arrays that are spread along one are "
            "saved, and those that every process has whole (jax.device_put with a replicated sharding)"
        )
    (axis,) = spread
    layout = RowLayout(leaf.shape[axis], leaf.shape[axis] // part[axis], False)
    record = LeafRecord(path, name, "rows", "jax", shape, str(leaf.dtype), axis=axis, layout=layout)
    return SavedLeaf(record, leaf)


def check_same_state(group: Group, lines: Sequence[str]) -> None:
    """That all processes save the same; each says in text what it saves, and the CheckpointError names the first that
    differs."""
    for member, text in zip(group.members, lines, strict=True):
        if text != lines[0]:
            mine, theirs = lines[0].splitlines(), text.splitlines()
            pairs = ((a, b) for a, b in zip(mine, theirs, strict=False) if a != b)
            a, b = next(pairs, (f"{len(mine)} leaves", f"{len(theirs)} leaves"))
            raise CheckpointError(
                f"{group.noun} {member} saves another state than {group.noun} {group.members[0]}: {b} instead of {a}. "
                f"All {group.nouns} save the same state, at the same step, with the same position"
            )
