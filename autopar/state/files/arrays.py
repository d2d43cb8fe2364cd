"""Rows of a table in zarr arrays, by TensorStore: one array for each shard of its layout, row axis first, without
padding.

Chunks of rows are written straight from where they are, one after the other, and read when one of their rows is wanted:
no table is in memory twice. Each chunk ends with its CRC-32C, by zarr's codec of that name, which TensorStore checks
whenever it reads the chunk. The manifest has it, too, so that a chunk of another checkpoint isn't taken for this one's.
dtypes that zarr doesn't know are stored as unsigned integers of their width.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError, DamagedCheckpointError
from autopar.jax_types import Dtype, Index, Leaf, Request
from autopar.launch.group import go_on
from autopar.state.files.locations import Location, disk_space, kvstore_of, require_tensorstore, shared_context
from autopar.state.files.manifest import FileRecord, LeafRecord, flushed

ROWS_FOLDER = "rows"

#: Bytes of a chunk, and of the cache of chunks while a leaf is read.
CHUNK, _CACHE = 1 << 24, 1 << 27
#: Bytes of a checksum at the end of a chunk.
_DIGEST = 4


def array_name(leaf: str, shard: int, shards: int) -> str:
    """Returns the path of a shard's array in the checkpoint's directory."""
    return f"{ROWS_FOLDER}/{leaf}.{shard:05d}-of-{shards:05d}"


def _chunk_rows(shape: Sequence[int], dtype: np.dtype[Dtype]) -> int:
    """Returns the number of rows in a chunk; `shape` is [rows, ...]. Chunks are as equal as can be, as the last one is
    stored whole."""
    most = max(1, CHUNK // max(1, math.prod(shape[1:]) * dtype.itemsize))
    return max(1, math.ceil(shape[0] / max(1, math.ceil(shape[0] / most))))


def _stored_dtype(dtype: np.dtype[Dtype]) -> np.dtype[Dtype]:
    return dtype if dtype.kind in "biufc" or dtype.name == "bfloat16" else np.dtype(f"u{dtype.itemsize}")


def _open(path: Location, shape: Sequence[int], dtype: np.dtype[Dtype], **how: Any) -> Any:
    store = require_tensorstore()
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore_of(path),
        "metadata": {
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [_chunk_rows(shape, dtype), *shape[1:]]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},  # all in one directory
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
    }
    context = store.Context({"cache_pool": {"total_bytes_limit": _CACHE}}, shared_context())
    return store.open(spec, dtype=_stored_dtype(dtype), shape=shape, context=context, **how).result()


def write_rows(version: Location, name: str, rows: np.ndarray) -> tuple[FileRecord, ...]:
    """Writes a shard, [n, ...] in any memory order, to an array of this name in a checkpoint, and flushes it."""
    if not rows.size:
        return ()
    with _told(version / name, "written"):
        array = _open(version / name, rows.shape, rows.dtype, create=True)
        step = _chunk_rows(rows.shape, rows.dtype)
        starts = range(0, rows.shape[0], step)
        under_way: deque[Request] = deque()
        for start in starts:
            block = np.ascontiguousarray(rows[start : start + step]).view(array.dtype.numpy_dtype)
            under_way.append(array[start : start + len(block)].write(block))
            if len(under_way) > 1:  # one is flushed while the next one is prepared
                under_way.popleft().result()
            go_on("saving a checkpoint")
        under_way.pop().result()
        read = array.kvstore.read
        about = read("zarr.json").result().value
        records = [FileRecord(f"{name}/zarr.json", len(about), crc32=zlib.crc32(about))]
        for number in range(len(starts)):
            key = ".".join(["c", str(number), *"0" * (rows.ndim - 1)])
            digest = read(key, byte_range=slice(-_DIGEST, None)).result().value
            nbytes = step * rows[:1].nbytes + _DIGEST
            records.append(FileRecord(f"{name}/{key}", nbytes, crc32c=int.from_bytes(digest, "little")))
    return tuple(records)


@contextlib.contextmanager
def _told(path: Location, done: str) -> Iterator[None]:
    """Raises a CheckpointError, with the array's path, in place of TensorStore's errors of any class."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        message = str(error).partition(" [tensorstore_spec=")[0]
        if "DATA_LOSS" in message:
            raise DamagedCheckpointError(f"{path} isn't what was written: it is damaged: {message}") from error
        space = disk_space(path.parent, error) if done == "written" else ""
        raise CheckpointError(f"{path} can't be {done} by TensorStore: {message}{space}") from error


class RowFiles:
    """Reads rows of a leaf by number, from files that were checked (`manifest.check_files`)."""

    def __init__(self, version: Location, record: LeafRecord) -> None:
        assert record.layout is not None, "rows have a layout"
        self.record = record
        self.layout = record.layout
        self.dtype = record.numpy_dtype
        self._others = (*record.shape[: record.axis], *record.shape[record.axis + 1 :])
        self._shards = [self._reader(version, shard) for shard in range(self.layout.devices)]

    def _reader(self, version: Location, shard: int) -> Callable[[Any], np.ndarray]:
        """Returns a function that reads rows of a shard by an index: a slice or indices."""
        count = int(self.layout.rows_on(np.asarray(shard)))
        shape = (count, *self._others)
        if not math.prod(shape):
            return np.empty(shape, self.dtype).__getitem__
        path = version / array_name(self.record.name, shard, self.layout.devices)
        with _told(path, "read"):
            array = _open(path, shape, self.dtype, open=True)

        def read(index: Index) -> np.ndarray:
            with _told(path, "read"):
                return np.asarray(array[index].read().result()).view(self.dtype)

        return read

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns rows by number, [n, ...], row axis first."""
        go_on("restoring a checkpoint")
        picked = np.empty((numbers.size, *self._others), self.dtype)
        indices = self.layout.storage_index(numbers.astype(np.int64))
        owners, indices = indices // self.layout.shard_rows, indices % self.layout.shard_rows
        for shard, read in enumerate(self._shards):
            (wanted,) = np.nonzero(owners == shard)
            if wanted.size:
                picked[_run(wanted)] = read(_run(indices[wanted]))
        return picked

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        """Returns slices by number along an axis, [n, ...], that axis first."""
        if axis == self.record.axis:
            return self.read(numbers)
        return np.moveaxis(np.take(self.whole(), numbers, axis), axis, 0)

    def whole(self) -> np.ndarray:
        """Returns the table, [..., V, ...]."""
        extent = self.layout.extent
        table = np.empty((extent, *self._others), self.dtype)
        step = _chunk_rows(table.shape, self.dtype)
        for start in range(0, extent, step):
            numbers = np.arange(start, min(start + step, extent))
            table[start : start + step] = self.read(numbers)
        return np.moveaxis(table, 0, self.record.axis)

    def part(self, index: Index) -> np.ndarray:
        axis = self.record.axis
        rows = np.moveaxis(self.read(np.arange(self.layout.extent)[index[axis]]), 0, axis)
        return rows[(*index[:axis], slice(None), *index[axis + 1 :])]


def _run(numbers: np.ndarray) -> Index:
    if numbers.size == 1:
        return slice(int(numbers[0]), int(numbers[0]) + 1)
    step = int(numbers[1]) - int(numbers[0])
    if step > 0 and np.all(np.diff(numbers) == step):
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers


# --- ordinary arrays in a checkpoint, by Orbax ---
#
# One process writes all of them (they are equal on all ranks), and each process reads by itself. Orbax is told that
# this process is the only one: it would otherwise wait for all of `jax.distributed`'s processes in barriers of its own,
# and in vain for one that failed.


DENSE_FOLDER = "dense"


def require_orbax() -> Any:
    """Returns the module `orbax.checkpoint`; raises CheckpointError if it isn't installed."""
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints of ordinary arrays need Orbax, which can't be imported ({error}): "
            "pip install 'autopar[checkpoint]'"
        ) from error
    return orbax


def require_location(path: Location) -> None:
    """Checks that checkpoints can be kept at a path: their packages are installed, and it is no file, or raises
    CheckpointError."""
    require_tensorstore()
    if not isinstance(path, Path):  # nothing there is written by Orbax, which would need more packages
        return
    require_orbax()
    if path.is_file():
        raise CheckpointError(f"{path} is a file: checkpoints are kept in a directory of their own")


def _checkpointer(orbax: Any) -> Any:
    me = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"autopar{me}"
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


@contextlib.contextmanager
def _without_its_errors() -> Iterator[None]:
    """Keeps Orbax's threads from logging errors that are raised as well."""

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or f"{os.sep}orbax{os.sep}" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def write_dense(version: Location, arrays: Mapping[str, Leaf]) -> tuple[FileRecord, ...]:
    """Writes arrays by name (JAX's if JAX has one process, else NumPy's; none empty), and flushes them to the disk."""
    if not arrays:
        return ()
    assert isinstance(version, Path), "Orbax writes to disks"
    orbax = require_orbax()
    try:
        with _without_its_errors(), _checkpointer(orbax) as checkpointer:
            checkpointer.save(version / DENSE_FOLDER, args=orbax.args.PyTreeSave(dict(arrays)))
    except Exception as error:  # Orbax and TensorStore raise any class: a ValueError for a full disk
        message = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{version / DENSE_FOLDER} can't be written by Orbax: {message}{disk_space(version, error)}"
        ) from error
    records = [
        flushed(version, Path(folder) / name) for folder, _, files in os.walk(version / DENSE_FOLDER) for name in files
    ]
    return tuple(sorted(records, key=lambda record: record.name))


def read_dense(version: Location, wanted: Mapping[str, tuple[tuple[int, ...], Any, Any]]) -> dict[str, Leaf]:
    """Reads arrays from files that were checked (`manifest.check_files`). `wanted`: name -> shape, dtype, and the
    `jax.sharding.Sharding` for arrays to be read onto this process's devices part by part; None: as NumPy arrays."""
    if not wanted:
        return {}
    if not isinstance(version, Path):
        return {name: _copied(version, name) for name in wanted}
    orbax = require_orbax()
    shapes, how = {}, {}
    for name, (shape, dtype, sharding) in wanted.items():
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype)
        how[name] = (
            orbax.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else orbax.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)
        )
    with _checkpointer(orbax) as checkpointer:
        try:
            return checkpointer.restore(
                version / DENSE_FOLDER, args=orbax.args.PyTreeRestore(item=shapes, restore_args=how)
            )
        except Exception as error:  # Orbax and TensorStore raise any class
            message = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{version / DENSE_FOLDER} can't be read by Orbax: {message}") from error


def _copied(version: Location, name: str) -> np.ndarray:
    """Reads an array that Orbax wrote to a disk and that was copied to a store, where Orbax needs more packages."""
    files = {"driver": "ocdbt", "base": kvstore_of(version / DENSE_FOLDER), "path": f"{name}/"}
    store, spec = require_tensorstore(), {"driver": "zarr", "kvstore": files}
    return np.asarray(store.open(spec, read=True, context=shared_context()).result().read().result())
