"""`save` and `restore`: a state on a disk or in an object store, and back onto any number of ranks or devices.

The first process writes ordinary arrays, which are the same on all; each process writes its own rows of tables, at the
same time. The checkpoint appears once all is written (`files.locations`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import Clients, mean_of
from autopar.backends.global_arrays import local
from autopar.errors import (
    ArgumentsError,
    CheckpointError,
    DamagedCheckpointError,
    DonatedStateError,
    StateWarning,
    warn,
)
from autopar.ir.layout import RowLayout
from autopar.ir.paths import path_name
from autopar.ir.typed_json import from_json, to_json
from autopar.jax_types import Dtype, Json, Leaf, Pytree
from autopar.launch.group import Group, everyone
from autopar.launch.progress import PROGRESS
from autopar.run.replicas import ReplicaRunner
from autopar.run.step import MethodStep, ParallelStep
from autopar.state.files import manifest as manifests
from autopar.state.files.arrays import RowFiles, array_name, read_dense, require_orbax, write_dense, write_rows
from autopar.state.files.locations import (
    Folder,
    Location,
    await_visible,
    location_of,
    mapped,
    named,
    require_tensorstore,
)
from autopar.state.files.manifest import (
    NUMBERS,
    FileRecord,
    LeafRecord,
    Manifest,
    Node,
    check_files,
    describe_tree,
    rebuild,
)
from autopar.state.init import planned_step_of, unbound
from autopar.state.resize import home_before, resized_axis
from autopar.state.resize import resize as with_rows_of
from autopar.tables.kinds import current, is_table, materialize
from autopar.tables.leaf import ArrayHome, Home, NumpyHome, PlacedLeaf, Shards, Source, Whole
from autopar.tables.replica import Replica, average, merged, replicas_of
from autopar.tables.served import session_of
from autopar.tables.sharded import TablePart, shards_of


class Restored(NamedTuple):
    """A restored state.

    Attributes:
      state: The state.
      position: The position in the data that was saved with it, if any was.
    """

    state: Pytree
    position: dict[str, Json] | None


def save(path: str | os.PathLike[str], state: Pytree, *, position: Mapping[str, Json] | None = None) -> None:
    """Saves a state, in place of the checkpoint that was at this path.

    All or nothing: after an error, a kill or a power cut either the old checkpoint or this one can be restored, whole.
    It returns once this one is on the disk. All ranks, or processes of `jax.distributed`, call it together, with a path
    that all of them see.

    Args:
      path: A directory for this checkpoint alone, made if it doesn't exist; several checkpoints have several, such as
        f"checkpoints/{step}". Or a location in an object store: "s3://bucket/run", "gs://bucket/run".
      state: A pytree of arrays (JAX's, PRNG keys, NumPy's), `autopar.Table`s, tables on hosts and numbers. Ordinary
        arrays are the same on all ranks, or one array over all of JAX's processes.
      position: Where the training is in its data: `autopar.shard(...).state()`, or any dict that JSON holds. `restore`
        returns it.

    Raises:
      CheckpointError: on every rank, naming the one where it failed: a leaf that can't be saved, ranks with different
        states, a full disk, a path with other files, no Orbax.
      DonatedStateError: the state was given to a step.

    Example:
      >>> import tempfile, jax.numpy as jnp, autopar
      >>> folder = tempfile.mkdtemp() + "/checkpoint"
      >>> autopar.save(folder, {"w": jnp.arange(3.0)}, position={"epoch": 0, "batch": 10})
      >>> state, position = autopar.restore(folder)
      >>> state["w"], position
      (Array([0., 1., 2.], dtype=float32), {'epoch': 0, 'batch': 10})
    """
    group = everyone()
    with PROGRESS.during("saving a checkpoint"):
        saving = PendingSave.begin(Folder(location_of(path)), state, position, group)
        saving.commit(saving.write)


def restore(
    path: str | os.PathLike[str],
    like: Pytree = None,
    *,
    step: ParallelStep | MethodStep | None = None,
    batch: Pytree = None,
    call: Callable[[Pytree], Sequence[Pytree]] | None = None,
    resize: bool = False,
) -> Restored:
    """Restores a checkpoint onto the ranks and devices that there are now.

    The checkpoint may come from another number of ranks or devices: each rank reads the rows that it needs. All ranks,
    or processes of `jax.distributed`, call it together.

    Args:
      path: As for `save`.
      like: A state of the same structure, of arrays, tables or shapes (`jax.eval_shape(make_state, key)`): needed for
        states with other nodes than dicts, lists, tuples and None. Without `step` each leaf goes where the one in
        `like` is: an array with its sharding, an `autopar.Table`, a table on hosts, a NumPy array. Nothing is written
        to it. A Python number matches an array of no axes and its kind, and the other way round (a counter that begins
        with 0, and that a step returns as an array): the saved one is restored.
      step: The step that `parallelize` returned: leaves go where its plan has them, tables share by share.
      batch, call: With `step`, as for `init`.
      resize: Whether tables with another number of rows in `like` are resized to it, as by `autopar.resize`: further
        rows come from `like`, a state that `autopar.init` made. `like` is given up then, and says where leaves go, so
        that `step` isn't needed.

    Returns:
      (state, position). Without `like` and `step` ordinary arrays, whole on each rank.

    Raises:
      MissingCheckpointError: there is none. (Also a FileNotFoundError.)
      CheckpointError: on every rank, naming the one where it failed: another structure, shape or dtype than `like`,
        files that are missing or damaged, another format.
      HostMemoryError: a table doesn't fit into a host's memory.

    Example:
      >>> import jax, jax.numpy as jnp, tempfile, autopar
      >>> @autopar.parallelize(strategy=("ps", "hosts"))
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> folder, ids = tempfile.mkdtemp() + "/checkpoint", jnp.array([3, 5])
      >>> table, _ = step(jnp.ones((1000, 8)), ids)
      >>> autopar.save(folder, table)
      >>> table, position = autopar.restore(folder, step=step, batch=ids)
      >>> table, _ = step(table, ids)
    """
    if step is None and (batch is not None or call is not None):
        raise ArgumentsError("restore takes batch= and call= together with step=, to know the step's plan")
    if step is not None:
        step, batch, call = unbound("restore", "state", step, batch, call)
    if resize and (like is None or step is not None):
        raise ArgumentsError("restore(resize=True) takes like=, a state of the new size, and no step=")
    group = everyone()
    with PROGRESS.during("restoring a checkpoint"):
        state, position = _restore(Folder(location_of(path)), like, step, batch, call, resize, group)
    return Restored(with_rows_of(state, like) if resize else state, position)


def _restore(
    folder: Folder, like: Pytree, step: ParallelStep | None, batch: Pytree, call: Pytree, resize: bool, group: Group
) -> Restored:
    version, manifest = _manifest_of(folder, group)
    template: Pytree = like
    numbers = list(range(len(manifest.leaves)))

    def look() -> None:
        nonlocal template, numbers
        if like is None:
            template = rebuild(manifest.structure, shapes_of(manifest))
        else:
            numbers = matched(manifest, like, resize)

    group.together(CheckpointError, look, "what is restored")
    records = [manifest.leaves[k] for k in numbers]
    if like is None:  # ordinary arrays, of the kind that they were
        homes: list[Home] = [home_as_saved(record) for record in records]
    else:
        pairs = zip(jax.tree.leaves(template), records, strict=True)
        homes = [
            home_before(leaf, record.shape) if hasattr(leaf, "shape") else home_as_saved(record)
            for leaf, record in pairs
        ]
    keeper: Keeper | None = None
    if step is not None:
        shapes = shapes_of(manifest)
        saved = jax.tree.unflatten(jax.tree.structure(template), [shapes[k] for k in numbers])
        homes, keeper = homes_of_step(step, saved, homes, batch, call, manifest)
    if keeper is None:
        warn_of_means(manifest)
    # Every file is checked, by one process each, before any process reads one.
    mine = manifest.files[group.rank :: group.size]
    group.together(CheckpointError, lambda: check_files(version, mine), "checksums")
    leaves: list[Leaf] = []

    def read() -> None:
        own = None if keeper is None else keeper.client
        beside = [NumpyHome()] * len(manifest.beside)
        leaves.extend(read_leaves(version, [*records, *manifest.beside], [*homes, *beside], own))
        shared = leaves[len(records) :]
        del leaves[len(records) :]
        if keeper is not None:
            leaves[:] = keeper.kept(leaves, dict(zip((r.path for r in manifest.beside), shared, strict=True)))

    group.together(CheckpointError, read, "reading files")
    state = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Restored(state, None if manifest.position is None else dict(manifest.position))


def _manifest_of(folder: Folder, group: Group) -> tuple[Location, Manifest]:
    """Returns the directory of the current version, and its manifest."""

    def read() -> tuple[str, int, str]:
        version, crc32 = folder.current()
        path = version / manifests.NAME
        with named(path, "read"):
            try:
                return version.name, crc32, path.read_bytes().decode("latin-1")  # JSON holds any bytes so
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{path} can't be read: it is missing") from None

    def parse(found: Json) -> tuple[Location, int, bytes]:
        name, crc32, text = from_json(tuple[str, int, str], list(found), "the manifest")
        return folder.version(name), crc32, text.encode("latin-1")

    version, crc32, data = group.led(CheckpointError, read, "the manifest", parse)
    return version, Manifest.parse(data, version, crc32)


# --- where the leaves of a checkpoint go: as a template's are, as a step's plan has them, or as they were ---

#: Kind of a Python number -> dtypes of that kind.
_KINDS = {"bool": jnp.bool_, "int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating}


@dataclass(frozen=True)
class Keeper:
    """Makes replicas of what clients read, if as many clients saved them. `inputs`: for each leaf the step's input,
    None for leaves that are no state."""

    runner: ReplicaRunner
    inputs: Sequence[int | None]

    @property
    def client(self) -> int:
        return self.runner.clients.own

    def kept(self, leaves: Sequence[Leaf], beside: Mapping[str, Leaf]) -> list[Leaf]:
        """Returns the leaves as replicas. `beside`: path -> what replicas share."""
        replicas = self.runner.resumed({path.removeprefix("replicas/"): value for path, value in beside.items()})
        return [x if k is None else Replica(x, replicas, k) for k, x in zip(self.inputs, leaves, strict=True)]


def homes_of_step(
    step: ParallelStep, state: Pytree, homes: Sequence[Home], batch: Pytree, call: Pytree, manifest: Manifest
) -> tuple[list[Home], Keeper | None]:
    """Returns leaves' homes by a step's plan, or else those of `homes`; and a `Keeper`, if as many clients as the step
    has saved replicas. `state`: shapes; `batch`, `call`: as for `init`."""
    no_state = f"nothing in the checkpoint is state of {step.name}: it is of another step"
    planned, inputs = planned_step_of(step, "the checkpoint", state, batch, call, no_state)
    of_way = planned.way.homes(planned)
    found = [home if k is None else of_way.get(k, home) for k, home in zip(inputs, homes, strict=True)]
    runner, states = planned.runner, planned.compiled.analysed.new_states
    if not isinstance(runner, ReplicaRunner) or clients_of(manifest) != runner.clients.count:
        return found, None
    return found, Keeper(runner, [k if k in states else None for k in inputs])


def clients_of(manifest: Manifest) -> int:
    """Returns the number of clients that had a replica each, or 0."""
    return max((record.replicas for record in manifest.leaves), default=0)


def warn_of_means(manifest: Manifest) -> None:
    """Warns that the mean of saved replicas is restored, if there are any."""
    count = clients_of(manifest)
    if count:
        warn(
            f"the checkpoint has the replicas of {count} clients, which are kept by a step with sync= and as many: "
            "their mean is restored, of whole numbers and random keys the first client's",
            StateWarning,
        )


def matched(manifest: Manifest, like: Pytree, resize: bool) -> list[int]:
    """Returns for each leaf of a template the number of the saved leaf with its path; raises CheckpointError if
    structures, shapes or dtypes differ. `resize`: shapes may differ along one axis."""
    pairs = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]]
    saved = {record.path: number for number, record in enumerate(manifest.leaves)}
    paths = [path for path, _ in pairs]
    in_order = paths == [record.path for record in manifest.leaves]
    missing = [path for path in paths if path not in saved]
    extra = [path for path in saved if path not in set(paths)]
    if not in_order and (missing or extra or len(saved) != len(manifest.leaves) or len(paths) != len(saved)):
        reasons = [f"the template has {missing[0] or 'a leaf alone'}, which wasn't saved"] if missing else []
        reasons += [f"{extra[0] or 'a leaf alone'} was saved, which the template hasn't"] if extra else []
        raise CheckpointError(
            f"the state has another structure than the checkpoint: {'; '.join(reasons) or 'leaves have equal paths'} "
            f"({len(paths)} leaves in the template, {len(manifest.leaves)} saved)"
        )
    numbers = list(range(len(paths))) if in_order else [saved[path] for path in paths]
    for number, (path, leaf) in zip(numbers, pairs, strict=True):
        _check_type(manifest.leaves[number], path, leaf, resize)
    return numbers


def _check_type(record: LeafRecord, path: str, leaf: Leaf, resize: bool) -> None:
    if type(leaf) in NUMBERS.values():
        number = type(leaf).__name__
        if record.type != number and (record.kind == "value" or not _is_number(number, _shape_of(record))):
            raise CheckpointError(f"{path} is a Python {number} in the template; saved was {_told(record)}")
        return
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise CheckpointError(f"{path} of the template is a {type(leaf).__name__}: neither an array nor a shape")
    if record.kind == "value":
        if not _is_number(record.type, leaf):
            shape = f"{leaf.dtype}{list(leaf.shape)}"
            raise CheckpointError(f"{path} was saved as a Python {record.type}, and is {shape} in the template")
        return
    key = str(leaf.dtype) if jax_compat.is_key(leaf.dtype) else None
    if (key is None) != (record.key is None) or (key and key != str(_key_dtype(record))):
        raise CheckpointError(f"{path} was saved as {_told(record)}, and is {leaf.dtype} in the template")
    axis = resized_axis(record.shape, leaf.shape)
    if tuple(leaf.shape) != record.shape and (axis is None or not resize):
        remedy = "" if axis is None else ". Where it is to get another number of rows: restore(..., resize=True)"
        raise CheckpointError(
            f"{path} was saved with shape {list(record.shape)}, and has {list(leaf.shape)} in the template{remedy}"
        )
    if key is None and np.dtype(leaf.dtype) != record.numpy_dtype:
        raise CheckpointError(
            f"{path} was saved as {record.dtype}, and is {leaf.dtype} in the template. Restore it as it was, and "
            "convert it then"
        )


def _is_number(kind: str, array: Leaf) -> bool:
    return array.shape == () and jnp.issubdtype(array.dtype, _KINDS[kind])


def _key_dtype(record: LeafRecord) -> Dtype:
    return jax.eval_shape(lambda: jax.random.key(0, impl=record.key)).dtype


def _told(record: LeafRecord) -> str:
    if record.kind == "value":
        return f"a Python {record.type}"
    return f"keys of {record.key}" if record.key else f"{record.dtype}{list(record.shape)}"


def shapes_of(manifest: Manifest) -> list[Leaf]:
    return [NUMBERS[r.type](0) if r.kind == "value" else _shape_of(r) for r in manifest.leaves]


def _shape_of(record: LeafRecord) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        record.shape, _key_dtype(record) if record.key else record.numpy_dtype, weak_type=record.weak
    )


def home_as_saved(record: LeafRecord) -> Home:
    """Returns the home of a leaf that was saved, as an array of its own kind."""
    return ArrayHome() if record.type == "jax" else NumpyHome()


def read_leaves(
    version: Location, records: Sequence[LeafRecord], homes: Sequence[Home], client: int | None
) -> list[Leaf]:
    """Reads all leaves to their homes, from checked files: this rank's rows of tables on hosts, and this client's
    replicas, or their mean if `client` is None. Exchanges nothing."""
    dense = {}
    for record, home in zip(records, homes, strict=True):
        if record.kind == "dense" and not record.files:
            shape = record.shape if record.key is None else _key_data(record).shape
            own = jax.process_count() == 1 and record.key is None
            dense[record.name] = (shape, record.numpy_dtype, home.reads_itself if own else None)
    arrays = read_dense(version, dense)

    def read(leaf: tuple[LeafRecord, Home]) -> Leaf:
        return _read(version, *leaf, arrays.get(leaf[0].name), client)

    return mapped(version, read, zip(records, homes, strict=True), "restoring a checkpoint")


def _key_data(record: LeafRecord) -> Leaf:
    return jax.eval_shape(lambda: jax.random.key_data(jnp.zeros(record.shape, _key_dtype(record))))


def _read(version: Location, record: LeafRecord, home: Home, array: Leaf, client: int | None) -> Leaf:
    if record.kind == "value":
        return record.value == "True" if record.type == "bool" else NUMBERS[record.type](record.value)
    if record.kind == "rows" and record.replicas:
        return home.made(Whole(_replica(version, record, client)), record)
    if record.kind == "rows":
        return home.made(RowFiles(version, record), record)
    if record.kind == "dense" and record.files:
        return home.made(_array(version, record), record)
    if record.kind == "empty":
        array = np.empty(record.shape if record.key is None else _key_data(record).shape, record.numpy_dtype)
    if isinstance(array, jax.Array):
        return jax_compat.weak(array) if record.weak else array
    return home.made(Whole(np.asarray(array)), record)


def _array(version: Location, record: LeafRecord) -> Source:
    shape = record.shape if record.key is None else _key_data(record).shape
    rows = shape or (1,)
    layout = RowLayout(rows[0], 1, cyclic=False)
    files = RowFiles(version, replace(record, shape=rows, layout=layout))
    return files if rows == record.shape else Whole(files.whole().reshape(shape))


def _replica(version: Location, record: LeafRecord, client: int | None) -> np.ndarray:
    """Reads a client's replica; for None the mean of all, or the first one of leaves that have no mean."""
    shape = record.shape if record.key is None else _key_data(record).shape
    files = RowFiles(version, replace(record, shape=(record.replicas, *shape)))
    if client is None and record.key is None and jnp.issubdtype(record.numpy_dtype, jnp.floating):
        return np.asarray(mean_of([files.read(np.array([c]))[0] for c in range(record.replicas)]))
    return files.read(np.array([client or 0]))[0]


def template_of(make_state: Callable[..., Pytree], *args: Pytree) -> Pytree:
    """Returns shapes for what JAX computes in `make_state`, and its numbers and NumPy arrays as they are."""
    made: list[Pytree] = []

    def noted(*args: Pytree) -> Pytree:
        made.append(make_state(*args))
        return made[0]

    shapes = jax.eval_shape(noted, *args)
    return jax.tree.map(lambda leaf, shape: shape if isinstance(leaf, jax.Array) else leaf, made[0], shapes)


# --- writing a checkpoint ---


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
    if position is None:
        return None
    try:
        return json.loads(json.dumps(dict(position), default=lambda value: value.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"position={position!r} can't be saved: give what autopar.shard(...).state() returns, or another dict of "
            "numbers and texts"
        ) from error
