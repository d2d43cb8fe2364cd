"""Ordinary arrays in a checkpoint, by Orbax.

One process writes all of them (they are equal on all ranks), and each process reads by itself. Orbax is told that this
process is the only one: it would otherwise wait for all of `jax.distributed`'s processes in barriers of its own, and in
vain for one that failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError
from autopar.jax_types import Leaf
from autopar.state.files.manifest import FileRecord, flushed
from autopar.state.files.places import Place, disk_space, kvstore_of, require_tensorstore, shared_context

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


def require_place(place: Place) -> None:
    """Checks that checkpoints can be kept in a place: their packages are installed, and it is no file, or raises
    CheckpointError."""
    require_tensorstore()
    if not isinstance(place, Path):  # nothing there is written by Orbax, which would need more packages
        return
    require_orbax()
    if place.is_file():
        raise CheckpointError(f"{place} is a file: checkpoints are kept in a directory of their own")


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


def write_dense(version: Place, arrays: Mapping[str, Leaf]) -> tuple[FileRecord, ...]:
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


def read_dense(version: Place, wanted: Mapping[str, tuple[tuple[int, ...], Any, Any]]) -> dict[str, Leaf]:
    """Reads arrays from files that were checked (`manifest.check_files`).

    Args:
      wanted: Name -> shape, dtype, and the `jax.sharding.Sharding` for arrays to be read onto this process's devices
        part by part; None: as NumPy arrays.
    """
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


def _copied(version: Place, name: str) -> np.ndarray:
    """Reads an array that Orbax wrote to a disk and that was copied to a store, where Orbax needs more packages."""
    files = {"driver": "ocdbt", "base": kvstore_of(version / DENSE_FOLDER), "path": f"{name}/"}
    store, spec = require_tensorstore(), {"driver": "zarr", "kvstore": files}
    return np.asarray(store.open(spec, read=True, context=shared_context()).result().read().result())
