"""Rows of a table in files: one for each share of its layout, `[rows, ...]`, row axis first, without spare rows.

The files are NumPy's (.npy), so that anything reads them; dtypes that NumPy doesn't know (bfloat16) are stored as
unsigned integers of their width. They are written from where the rows are, block by block, and read through a memory
map: no table is in memory twice. Not written through one: on a full disk that would be a SIGBUS.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import DamagedCheckpointError
from autopar.launch.group import go_on
from autopar.state.files.folder import named
from autopar.state.files.manifest import FileRecord, LeafRecord

ROWS_FOLDER = "rows"

#: Bytes that are written at a time.
BLOCK = 1 << 24


def file_name(leaf: str, shard: int, shards: int) -> str:
    """Where a shard of a leaf is stored, under the checkpoint's directory."""
    return f"{ROWS_FOLDER}/{leaf}.{shard:05d}-of-{shards:05d}.npy"


def block_rows(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """How many rows of these make a block; `shape` is [rows, ...]."""
    return max(1, BLOCK // max(1, math.prod(shape[1:]) * dtype.itemsize))


def write_rows(version: Path, name: str, rows: np.ndarray) -> FileRecord:
    """Write a shard, [n, ...] in any order in memory, to a file of this name in a checkpoint, down to the disk."""
    path, head = version / name, io.BytesIO()
    stored = rows.dtype if rows.dtype.kind in "biufc" else np.dtype(f"u{rows.dtype.itemsize}")
    descr = np.lib.format.dtype_to_descr(stored)
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": rows.shape})
    crc, step = zlib.crc32(head.getvalue()), block_rows(rows.shape, rows.dtype)
    with named(path, "written"):
        path.parent.mkdir(exist_ok=True)
    with named(path, "written"), path.open("wb") as file:
        file.write(head.getvalue())
        for start in range(0, rows.shape[0], step):
            block = np.ascontiguousarray(rows[start : start + step]).reshape(-1).view(np.uint8)
            file.write(block.data)
            crc = zlib.crc32(block.data, crc)
            go_on("saving a checkpoint")
        file.flush()
        os.fsync(file.fileno())
        nbytes = file.tell()
    return FileRecord(name, nbytes, crc)


class RowFiles:
    """The rows of a leaf, read by their numbers, from files that were checked (`checksums.check_files`)."""

    def __init__(self, version: Path, record: LeafRecord) -> None:
        assert record.layout is not None, "rows have a layout"
        self.record = record
        self.layout = record.layout
        self.dtype = record.numpy_dtype
        self._others = (*record.shape[: record.axis], *record.shape[record.axis + 1 :])
        self._shards = [self._open(version, shard) for shard in range(self.layout.devices)]

    def _open(self, version: Path, shard: int) -> np.ndarray:
        count = int(self.layout.rows_on(np.asarray(shard)))
        shape = (count, *self._others)
        if not math.prod(shape):
            return np.empty(shape, self.dtype)
        path = version / self.record.files[shard].name
        try:
            array = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise DamagedCheckpointError(f"{path} is no file of rows ({error}): it is of another checkpoint") from error
        if array.shape != shape or array.dtype.itemsize != self.dtype.itemsize:
            raise DamagedCheckpointError(
                f"{path} holds {array.dtype}{list(array.shape)} instead of {self.dtype}{list(shape)}: "
                "it is of another checkpoint"
            )
        return array.view(self.dtype)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """[n, ...]: a copy of rows by their numbers, row axis first."""
        go_on("restoring a checkpoint")
        picked = np.empty((numbers.size, *self._others), self.dtype)
        places = self.layout.place(numbers.astype(np.int64))
        owners, places = places // self.layout.shard_rows, places % self.layout.shard_rows
        for shard, rows in enumerate(self._shards):
            (wanted,) = np.nonzero(owners == shard)
            if wanted.size:
                picked[_run(wanted)] = rows[_run(places[wanted])]
        return picked

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        """[n, ...]: a copy of what has these numbers along an axis, that axis first."""
        if axis == self.record.axis:
            return self.read(numbers)
        return np.moveaxis(np.take(self.whole(), numbers, axis), axis, 0)

    def whole(self) -> np.ndarray:
        """The table, [..., V, ...]."""
        extent = self.layout.extent
        table = np.empty((extent, *self._others), self.dtype)
        step = block_rows(table.shape, self.dtype)
        for start in range(0, extent, step):
            numbers = np.arange(start, min(start + step, extent))
            table[start : start + step] = self.read(numbers)
        return np.moveaxis(table, 0, self.record.axis)

    def part(self, index: Any) -> np.ndarray:
        """What `table[index]` is."""
        axis = self.record.axis
        rows = np.moveaxis(self.read(np.arange(self.layout.extent)[index[axis]]), 0, axis)
        return rows[(*index[:axis], slice(None), *index[axis + 1 :])]


def _run(numbers: np.ndarray) -> Any:
    """The same numbers as a slice, where they are equally far apart: that is read without looking each one up."""
    if numbers.size == 1:
        return slice(int(numbers[0]), int(numbers[0]) + 1)
    step = int(numbers[1]) - int(numbers[0])
    if step > 0 and np.all(np.diff(numbers) == step):
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers
