"""`PendingSave`: a save from its beginning to its commit; any thread may write the files in between.

A `SavedLeaf` is a leaf's record and the values that this rank writes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.errors import CheckpointError, DonatedStateError
from autopar.ir.layout import RowLayout
from autopar.ir.paths import path_name
from autopar.ir.typed_json import from_json, to_json
from autopar.jax_types import Json, Leaf, Pytree
from autopar.launch.group import Group
from autopar.state.files.arrays import array_name, require_orbax, write_dense, write_rows
from autopar.state.files.folder import Folder, await_visible
from autopar.state.files.locations import Location, mapped, require_tensorstore
from autopar.state.files.manifest import NUMBERS, FileRecord, LeafRecord, Manifest, Node, describe_tree
from autopar.tables.kinds import current, is_table, materialize
from autopar.tables.leaf import PlacedLeaf, Shards
from autopar.tables.replica import Replica, average, merged, replicas_of
from autopar.tables.served import session_of
from autopar.tables.sharded import TablePart, shards_of


@dataclass(frozen=True)
class SavedLeaf:
    """A leaf on its way into a checkpoint: its entry of the manifest without files; the leaf (for PRNG keys their
    data); and the shards if it is saved by rows."""

    record: LeafRecord
    value: Leaf
    shards: Shards | None = None

    def array(self) -> Leaf:
        """Returns a dense leaf as an array that this process has whole; a NumPy array if JAX has several processes."""
        value = self.value
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            value = value.addressable_data(0)
        return value if isinstance(value, jax.Array) and jax.process_count() == 1 else np.asarray(value)

    def parts(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields name, number and rows of the shards that this process writes, row axis first. A dense leaf is one
        shard."""
        if self.shards is None:
            yield array_name(self.record.name, 0, 1), 0, np.atleast_1d(self.array())
            return
        for shard, rows in self.shards.own():
            count = int(self.shards.layout.rows_on(np.asarray(shard)))
            yield array_name(self.record.name, shard, self.shards.layout.devices), shard, rows[:count]

    def copied(self, *, writes_dense: bool) -> SavedLeaf:
        """Returns the leaf with a copy, in host memory, of what this process will write, so that steps may go on."""
        if self.shards is None:
            value = np.array(self.array()) if writes_dense and self.record.kind == "dense" else None
            return replace(self, value=value)
        parts = [(shard, rows.copy()) for shard, rows in self.shards.own()]
        return replace(self, shards=replace(self.shards, own=lambda: iter(parts)), value=None)


def saved_leaves(state: Pytree) -> list[SavedLeaf]:
    """Returns the leaves of a state; raises CheckpointError or DonatedStateError if one can't be saved, or was given to
    a step."""
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
        name = f"{number:04d}_{re.sub(r'[^A-Za-z0-9]+', '_', known).strip('_')[-80:]}"
        if isinstance(leaf, Replica):
            own = _jax_leaf(known, name, jnp.asarray(materialize(merged(leaf))))
            leaves.append(_of_each(leaf.pending.clients, own))
        else:
            leaves.append(_leaf(known, name, leaf if isinstance(leaf, TablePart) else current(leaf)))
    return leaves


def on_one_process(state: Pytree) -> Pytree:
    """Returns the state with replicas of clients on several processes whole on each, so that saving exchanges nothing.
    Collective over each client's processes; if servers keep the state, over all."""
    leaves = jax.tree.leaves(state)
    if session_of(leaves) is not None:
        return average(state)
    replicas = replicas_of(leaves)
    if replicas is not None and (replicas.center is not None or replicas.ring is not None):
        centers = {} if replicas.center is None else replicas.center.collect()
        own = {} if replicas.ring is None else replicas.ring.collect()
        shared = replace(replicas, anchors=centers)

        def now(leaf: Leaf) -> Leaf:
            return Replica(own.get(leaf.index, leaf.own), shared, leaf.index) if isinstance(leaf, Replica) else leaf

        return jax.tree.map(now, state)
    if replicas is None or replicas.clients.count == replicas.clients.processes.size:
        return state
    anchors = {k: local(x) for k, x in replicas.anchors.items()}
    outer = {n: jax.tree.map(local, slots) for n, slots in replicas.outer.items()}
    shared = replace(replicas, anchors=anchors, outer=outer, on_way={})

    def whole(leaf: Leaf) -> Pytree:
        return Replica(local(materialize(merged(leaf))), shared, leaf.index) if isinstance(leaf, Replica) else leaf

    return jax.tree.map(whole, state)


def leaves_beside(state: Pytree) -> list[SavedLeaf]:
    """Returns what the replicas of a state share, if it has any."""
    replicas = replicas_of(jax.tree.leaves(state))
    if replicas is None:
        return []
    shared = {f"replicas/{name}": value for name, value in replicas.shared.items()}
    saved = [_leaf(path, f"beside_{n:04d}", value) for n, (path, value) in enumerate(shared.items())]
    for k, touched in replicas.touched.items():
        known = _leaf(f"replicas/touched/{k}", f"touched_{k:04d}", touched.bits)
        saved.append(_of_each(replicas.clients, known))
    if replicas.center is not None or replicas.ring is not None:
        saved.append(_of_each(replicas.clients, _leaf("replicas/own_steps", "own_steps", np.asarray([replicas.steps]))))
    return saved


def _leaf(path: str, name: str, leaf: Leaf) -> SavedLeaf:
    if isinstance(leaf, PlacedLeaf | TablePart):
        return _in_shards(path, name, leaf, leaf.shards)
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


def _of_each(clients: Clients, known: SavedLeaf) -> SavedLeaf:
    """Returns the record of a leaf that each client has its own of, saved as one of C rows."""
    layout, value = RowLayout(clients.count, clients.count, cyclic=False), known.value
    record = replace(known.record, layout=layout, replicas=clients.count)
    if record.kind == "dense":
        record = replace(record, kind="rows")
    own = [(clients.own, np.asarray(value)[None])] if clients.leads else []
    return SavedLeaf(record, value, Shards(layout, 0, lambda: iter(own)))


def _jax_leaf(path: str, name: str, leaf: jax.Array) -> SavedLeaf:
    key, shape = None, leaf.shape
    if jax_compat.is_key(leaf.dtype):
        key, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    kind = "dense" if leaf.size else "empty"
    record = LeafRecord(path, name, kind, "jax", shape, str(leaf.dtype), jax_compat.is_weak(leaf), key)
    if leaf.is_fully_addressable or leaf.is_fully_replicated or not leaf.size:
        return SavedLeaf(record, leaf)
    # It is divided over processes, and each writes its part.
    part = leaf.sharding.shard_shape(leaf.shape)
    spread = [axis for axis, (n, whole) in enumerate(zip(part, leaf.shape, strict=True)) if n != whole]
    if len(spread) > 1 or key is not None:
        raise CheckpointError(
            f"{path or 'the state'} is spread over processes along axes {spread}: arrays that are spread along one are "
            "saved, and those that every process has whole (jax.device_put with a replicated sharding)"
        )
    (axis,) = spread
    return _in_shards(path, name, leaf, shards_of(leaf, RowLayout(shape[axis], shape[axis] // part[axis], False), axis))


def _in_shards(path: str, name: str, leaf: Leaf, shards: Shards) -> SavedLeaf:
    axis, layout = shards.axis, shards.layout
    return SavedLeaf(
        LeafRecord(path, name, "rows", "jax", leaf.shape, str(leaf.dtype), axis=axis, layout=layout), leaf, shards
    )


def check_same_state(group: Group, lines: Sequence[str]) -> None:
    """Checks that all processes save the same state, described in `lines`; raises CheckpointError with the first
    difference."""
    for member, text in zip(group.members, lines, strict=True):
        if text != lines[0]:
            mine, theirs = lines[0].splitlines(), text.splitlines()
            pairs = ((a, b) for a, b in zip(mine, theirs, strict=False) if a != b)
            a, b = next(pairs, (f"{len(mine)} leaves", f"{len(theirs)} leaves"))
            raise CheckpointError(
                f"{group.noun} {member} saves another state than {group.noun} {group.members[0]}: {b} instead of {a}. "
                f"All {group.nouns} save the same state, at the same step, with the same position"
            )


@dataclass(frozen=True)
class Written:
    """The files that one process wrote; `rows`: (leaf, shard, files)."""

    rows: tuple[tuple[int, int, tuple[FileRecord, ...]], ...]
    dense: tuple[FileRecord, ...]

    @staticmethod
    def of(fields: Any) -> Written:
        return from_json(Written, fields, "files")


@dataclass(frozen=True)
class PendingSave:
    """A save that has begun. It is invisible until it is committed. `leaves` are those of the state, `count` of them,
    and what its replicas share."""

    folder: Folder
    version: Location
    structure: Node
    leaves: Sequence[SavedLeaf]
    count: int
    position: dict[str, Json] | None
    group: Group

    @staticmethod
    def begin(
        folder: Folder,
        state: Pytree,
        position: Mapping[str, Json] | None,
        group: Group,
        *,
        copied: bool = False,
        step: int | None = None,
    ) -> PendingSave:
        """Begins to save a state. Collective.

        `state`, `position`: as for `save`. `step`: the number of the training's step, if it is known; the same on all
        processes. `copied`: whether to copy what this process will write to its memory, so that steps may go on.
        """
        known: list[SavedLeaf] = []
        state = on_one_process(state)

        def look() -> str:
            known.extend(saved_leaves(state))
            known.extend(leaves_beside(state))
            if any(leaf.record.kind == "rows" for leaf in known):
                require_tensorstore()
            if any(leaf.record.kind == "dense" for leaf in known) and isinstance(folder.path, Path):
                require_orbax()
            lines = [f"step {step}", f"position {json.dumps(_plain(position), sort_keys=True)}"]
            lines += [leaf.record.described for leaf in known]
            if copied:
                known[:] = [leaf.copied(writes_dense=group.rank == 0) for leaf in known]
            return "\n".join(lines)

        check_same_state(group, group.together(CheckpointError, look, "what is saved"))
        version = group.led(CheckpointError, lambda: folder.begin().name, "a new version", folder.version)
        count = len(jax.tree.leaves(state))
        return PendingSave(folder, version, describe_tree(state), known, count, _plain(position), group)

    def write(self) -> Written:
        """Writes this process's files and flushes them to the disk. Exchanges nothing."""
        version = self.version
        await_visible(version)
        in_rows = [k for k, leaf in enumerate(self.leaves) if leaf.record.kind == "rows"]
        dense = [k for k, leaf in enumerate(self.leaves) if leaf.record.kind == "dense" and self.group.rank == 0]
        if not isinstance(version, Path):  # Orbax needs more packages to write to a store
            in_rows, dense = in_rows + dense, []

        def rows_of(k: int) -> list[tuple[int, int, tuple[FileRecord, ...]]]:
            return [(k, shard, write_rows(version, name, rows)) for name, shard, rows in self.leaves[k].parts()]

        rows = mapped(version, rows_of, in_rows, "saving a checkpoint")
        arrays = {self.leaves[k].record.name: self.leaves[k].array() for k in dense}
        return Written(tuple(row for own in rows for row in own), write_dense(version, arrays))

    def commit(self, written: Callable[[], Written]) -> None:
        """Makes it the checkpoint, or removes it if a process couldn't write its files. Collective. `written` returns
        what `write` returned, or raises its error."""
        try:
            files = self.group.together(CheckpointError, lambda: to_json(written()), "files", Written.of)
            manifest = self._manifest(files)
            put = lambda: self.folder.commit(self.version, manifest.write(self.version))  # noqa: E731
            self.group.led(CheckpointError, put, "the checkpoint")
        finally:  # remove the checkpoint before, or the failed one
            if self.group.rank == 0:
                with contextlib.suppress(CheckpointError, OSError):  # the next save tries again
                    self.folder.clean()

    def _manifest(self, written: Sequence[Written]) -> Manifest:
        files: dict[int, dict[int, Sequence[FileRecord]]] = {}
        for number, shard, own in (row for each in written for row in each.rows):
            files.setdefault(number, {})[shard] = own
        records = []
        for number, leaf in enumerate(self.leaves):
            parts, layout = files.get(number, {}), leaf.record.layout
            complete = layout is None or sorted(parts) == list(range(layout.devices))
            assert complete, f"shards of {leaf.record.path}: {parts}"
            records.append(replace(leaf.record, files=tuple(file for shard in sorted(parts) for file in parts[shard])))
        return Manifest(
            self.structure,
            tuple(records[: self.count]),
            self.position,
            self.group.size,
            written[0].dense,
            importlib.metadata.version("autopar"),
            tuple(records[self.count :]),
        )


def _plain(position: Mapping[str, Json] | None) -> dict[str, Json] | None:
    """Returns a position as JSON has it."""
    if position is None:
        return None
    try:
        return json.loads(json.dumps(dict(position), default=lambda value: value.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"position={position!r} can't be saved: give what autopar.shard(...).state() returns, or another dict of "
            "numbers and texts"
        ) from error
