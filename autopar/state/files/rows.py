"""Rows of a table in zarr arrays, by TensorStore: one array for each shard of its layout, row axis first, without
padding.

Chunks of rows are written straight from where they are, one after the other, and read when one of their rows is wanted:
no table is in memory twice. Each chunk ends with its CRC-32C, by zarr's codec of that name, which TensorStore checks
whenever it reads the chunk. The manifest has it, too, so that a chunk of another checkpoint isn't taken for this one's.
dtypes that zarr doesn't know are stored as unsigned integers of their width.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from autopar.errors import CheckpointError, DamagedCheckpointError
from autopar.jax_types import Dtype, Index, Request
from autopar.launch.group import go_on
from autopar.state.files.manifest import FileRecord, LeafRecord
from autopar.state.files.places import Place, disk_space, kvstore_of, require_tensorstore, shared_context

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


def _open(path: Place, shape: Sequence[int], dtype: np.dtype[Dtype], **how: Any) -> Any:
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


def write_rows(version: Place, name: str, rows: np.ndarray) -> tuple[FileRecord, ...]:
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
def _told(path: Place, done: str) -> Iterator[None]:
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

    def __init__(self, version: Place, record: LeafRecord) -> None:
        assert record.layout is not None, "rows have a layout"
        self.record = record
        self.layout = record.layout
        self.dtype = record.numpy_dtype
        self._others = (*record.shape[: record.axis], *record.shape[record.axis + 1 :])
        self._shards = [self._reader(version, shard) for shard in range(self.layout.devices)]

    def _reader(self, version: Place, shard: int) -> Callable[[Any], np.ndarray]:
        """Returns a function that reads rows of a shard by an index: a slice or places."""
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
        places = self.layout.place(numbers.astype(np.int64))
        owners, places = places // self.layout.shard_rows, places % self.layout.shard_rows
        for shard, read in enumerate(self._shards):
            (wanted,) = np.nonzero(owners == shard)
            if wanted.size:
                picked[_run(wanted)] = read(_run(places[wanted]))
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
    """Returns equally spaced numbers as a slice, which is read without looking each one up."""
    if numbers.size == 1:
        return slice(int(numbers[0]), int(numbers[0]) + 1)
    step = int(numbers[1]) - int(numbers[0])
    if step > 0 and np.all(np.diff(numbers) == step):
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers
