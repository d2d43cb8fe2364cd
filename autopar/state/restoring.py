"""Where the leaves of a checkpoint go: as a template's are, as a step's plan has them, or as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.backends import across
from autopar.backends.host.storage import HostRows
from autopar.errors import CheckpointError
from autopar.ir.layout import RowLayout
from autopar.ir.paths import path_name
from autopar.run.step import ParallelStep
from autopar.state.files.dense import read_dense
from autopar.state.files.manifest import LeafRecord, Manifest
from autopar.state.files.rows import RowFiles, block_rows
from autopar.state.init import entry_of, hosted_inputs
from autopar.state.saving import NUMBERS
from autopar.tables.deferred import DeferredTable
from autopar.tables.host import HostTable
from autopar.tables.pending import PendingArray
from autopar.tables.sharded import Table
from autopar.tables.staged import StageArray, StagePlace, is_staged


@dataclass(frozen=True)
class LeafPlace:
    """Where a leaf goes.

    Attributes:
      kind: "hosts": a HostTable; "devices": a Table; "stage": a StageArray; "array": a jax.Array; "numpy"; or a Python
        number's type.
      layout, axis: Of tables: which row goes where.
      sharding: Of jax.Arrays and Tables; None: where JAX puts arrays by itself.
      places: Of a StageArray.
    """

    kind: str
    layout: RowLayout | None = None
    axis: int = 0
    sharding: Any = None
    places: tuple[StagePlace, ...] = ()


def place_of(leaf: Any) -> LeafPlace:
    """As a template's leaf is."""
    leaf = leaf.current() if isinstance(leaf, (DeferredTable, PendingArray)) else leaf
    if isinstance(leaf, HostTable):
        return LeafPlace("hosts", leaf.layout, leaf.axis)
    if isinstance(leaf, Table):
        return LeafPlace("devices", leaf.layout, leaf.axis, leaf.stored.sharding)
    if isinstance(leaf, StageArray):
        return LeafPlace("stage", places=leaf.places)
    if isinstance(leaf, jax.Array):
        return LeafPlace("array", sharding=leaf.sharding if leaf.committed else None)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return LeafPlace("array", sharding=leaf.sharding)
    return LeafPlace(type(leaf).__name__ if type(leaf) in NUMBERS.values() else "numpy")


def places_of_step(
    step: ParallelStep, state: Any, places: Sequence[LeafPlace], batch: Any, call: Any
) -> list[LeafPlace]:
    """As a step's plan has them, and, where that doesn't say, `places`. `state`: of shapes; `batch`, `call`: as of
    `init`."""
    no_state = f"nothing in the checkpoint is state of {step.name}: it is of another step"
    entry, inputs = entry_of(step, "the checkpoint", state, batch, call, no_state)
    bound = entry.compiled.bound
    planned = {k: LeafPlace("hosts", *hosted) for k, hosted in hosted_inputs(entry).items()}
    for k, parts in entry.stage_leaves.items():
        planned[k] = (
            LeafPlace("stage", places=parts) if is_staged(parts) else LeafPlace("array", sharding=parts[0].sharding)
        )
    if not bound.on_hosts and entry.devices is not None:
        for k in range(len(bound.placements)):
            layout, axis = bound.layouts.get(k, (None, 0))
            sharding = entry.devices.sharding(*bound.place(k))
            planned[k] = LeafPlace("array" if layout is None else "devices", layout, axis, sharding)
    return [place if k is None else planned.get(k, place) for k, place in zip(inputs, places, strict=True)]


def matched(manifest: Manifest, like: Any) -> list[int]:
    """For each leaf of a template the number of the saved leaf that has its path; a CheckpointError if the structures
    differ, or a shape or dtype does."""
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
        _check_type(manifest.leaves[number], path, leaf)
    return numbers


def _check_type(record: LeafRecord, path: str, leaf: Any) -> None:
    if type(leaf) in NUMBERS.values():
        if record.type != type(leaf).__name__:
            raise CheckpointError(
                f"{path} is a Python {type(leaf).__name__} in the template; saved was {_told(record)}"
            )
        return
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise CheckpointError(f"{path} of the template is a {type(leaf).__name__}: neither an array nor a shape")
    if record.kind == "value":
        raise CheckpointError(f"{path} was saved as a Python {record.type}, and is an array in the template")
    key = str(leaf.dtype) if jax_compat.is_key(leaf.dtype) else None
    if (key is None) != (record.key is None) or (key and key != str(_key_dtype(record))):
        raise CheckpointError(f"{path} was saved as {_told(record)}, and is {leaf.dtype} in the template")
    if tuple(leaf.shape) != record.shape:
        raise CheckpointError(
            f"{path} was saved with shape {list(record.shape)}, and has {list(leaf.shape)} in the template"
        )
    if key is None and np.dtype(leaf.dtype) != record.numpy_dtype:
        raise CheckpointError(
            f"{path} was saved as {record.dtype}, and is {leaf.dtype} in the template. Restore it as it was, and "
            "convert it then"
        )


def _key_dtype(record: LeafRecord) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=record.key)).dtype


def _told(record: LeafRecord) -> str:
    if record.kind == "value":
        return f"a Python {record.type}"
    return f"keys of {record.key}" if record.key else f"{record.dtype}{list(record.shape)}"


def shapes_of(manifest: Manifest) -> list[Any]:
    """The saved leaves as shapes."""
    return [
        NUMBERS[r.type](0)
        if r.kind == "value"
        else jax.ShapeDtypeStruct(r.shape, _key_dtype(r) if r.key else r.numpy_dtype, weak_type=r.weak)
        for r in manifest.leaves
    ]


def read_leaves(version: Path, records: Sequence[LeafRecord], places: Sequence[LeafPlace], rank: int) -> list[Any]:
    """All leaves, each at its place, from files that were checked; of tables on hosts this rank's rows. Exchanges
    nothing."""
    dense = {}
    for record, place in zip(records, places, strict=True):
        if record.kind == "dense":
            shape = record.shape if record.key is None else _key_data(record).shape
            own = jax.process_count() == 1 and place.kind == "array" and record.key is None
            spread = place.sharding is not None and len(place.sharding.device_set) > 1
            dense[record.name] = (shape, record.numpy_dtype, place.sharding if own and spread else None)
    arrays = read_dense(version, dense)
    return [
        _read(version, record, place, arrays.get(record.name), rank)
        for record, place in zip(records, places, strict=True)
    ]


def _key_data(record: LeafRecord) -> Any:
    return jax.eval_shape(lambda: jax.random.key_data(jnp.zeros(record.shape, _key_dtype(record))))


def _read(version: Path, record: LeafRecord, place: LeafPlace, array: Any, rank: int) -> Any:
    if record.kind == "value":
        return record.value == "True" if record.type == "bool" else NUMBERS[record.type](record.value)
    if record.kind == "rows":
        return _placed(RowFiles(version, record), record, place, rank)
    if record.kind == "empty":
        array = np.empty(record.shape if record.key is None else _key_data(record).shape, record.numpy_dtype)
    if isinstance(array, jax.Array):
        return jax_compat.weak(array) if record.weak else array
    return _placed(_Whole(np.asarray(array)), record, place, rank)


class _Whole:
    """What a leaf is made of, as `RowFiles` are: an array that this process has all of."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def whole(self) -> np.ndarray:
        return self._array

    def part(self, index: Any) -> np.ndarray:
        return self._array[index]

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        return np.moveaxis(np.take(self._array, numbers, axis), axis, 0)


def _placed(source: _Whole | RowFiles, record: LeafRecord, place: LeafPlace, rank: int) -> Any:
    layout, axis, dtype = place.layout, place.axis, record.numpy_dtype
    if place.kind == "stage":
        own = [None if p.sharding is None else _stage_part(source, record, p) for p in place.places]
        return StageArray(record.shape, jax.dtypes.canonicalize_dtype(dtype), place.places, own)
    if layout is not None:
        if place.kind == "hosts":
            storage = HostRows.empty(record.shape, dtype, axis, layout, rank, record.path)
            storage.fill(lambda numbers: source.rows(numbers, axis), block_rows(storage.rows.shape, dtype))
            return HostTable(storage)

        def shard(index: Any) -> np.ndarray:
            places = np.arange(layout.stored)[index[axis]]
            rows = source.rows(np.minimum(layout.row(places), layout.extent - 1), axis)
            return np.moveaxis(rows, 0, axis)

        stored = jax.make_array_from_callback(resized(record.shape, axis, layout.stored), place.sharding, shard)
        return Table(stored, layout, axis)
    if place.kind == "numpy":
        return np.array(source.whole())
    return _as_jax(source, record, place)


def _stage_part(source: _Whole | RowFiles, record: LeafRecord, place: StagePlace) -> jax.Array:
    _check_dtype(record)

    def read(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(place.stop - place.start)
        return source.part((slice(place.start + start, place.start + stop), *index[1:]))

    array = jax.make_array_from_callback((place.stop - place.start, *record.shape[1:]), place.sharding, read)
    return jax_compat.weak(array) if record.weak else array


def _check_dtype(record: LeafRecord) -> None:
    if jax.dtypes.canonicalize_dtype(record.numpy_dtype) != record.numpy_dtype:
        raise CheckpointError(
            f"{record.path} was saved as {record.dtype}, which JAX doesn't have now: set jax_enable_x64 as it was"
        )


def _as_jax(source: _Whole | RowFiles, record: LeafRecord, place: LeafPlace) -> jax.Array:
    _check_dtype(record)
    if record.key is not None:
        keys = jax.random.wrap_key_data(jnp.asarray(source.whole()), impl=record.key)
        return keys if place.sharding is None else across.place_array(keys, place.sharding)
    if place.sharding is None:
        array = jnp.asarray(source.whole())
    else:
        array = jax.make_array_from_callback(record.shape, place.sharding, source.part)
    return jax_compat.weak(array) if record.weak else array
