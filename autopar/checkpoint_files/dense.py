"""Ordinary arrays in a checkpoint, by Orbax.

One process writes all of them (they are equal on all ranks), and each process reads by itself. Orbax, left to itself,
would wait for all of `jax.distributed`'s processes in barriers of its own, where one that failed is waited for in
vain: it is told that this process is the only one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.checkpoint_files.folder import flush
from autopar.checkpoint_files.manifest import FileRecord
from autopar.checkpoint_files.rows import check_size
from autopar.errors import CheckpointError

FOLDER = "dense"


def require_orbax() -> Any:
    """The module `orbax.checkpoint`.

    Raises:
      CheckpointError: it isn't installed.
    """
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints of ordinary arrays need Orbax, which can't be imported ({error}): "
            "pip install 'autopar[checkpoint]'"
        ) from error
    return orbax


def _checkpointer(orbax: Any) -> Any:
    me = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"autopar{me}"
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


def write_dense(version: Path, arrays: Mapping[str, Any]) -> tuple[FileRecord, ...]:
    """Write arrays, down to the disk.

    Args:
      version: The checkpoint's directory.
      arrays: By name: NumPy arrays, or, where JAX has one process, its arrays; with at least one element each.

    Raises:
      CheckpointError: there is no Orbax.
    """
    if not arrays:
        return ()
    orbax = require_orbax()
    with _checkpointer(orbax) as checkpointer:
        checkpointer.save(version / FOLDER, args=orbax.args.PyTreeSave(dict(arrays)))
    found = []
    for folder, _, files in os.walk(version / FOLDER):
        for name in sorted(files):
            path = Path(folder) / name
            flush(path)
            found.append(FileRecord(path.relative_to(version).as_posix(), path.stat().st_size))
    return tuple(sorted(found, key=lambda record: record.name))


def read_dense(
    version: Path, files: tuple[FileRecord, ...], wanted: Mapping[str, tuple[tuple[int, ...], Any, Any]]
) -> dict[str, Any]:
    """Arrays by name.

    Args:
      version: The checkpoint's directory.
      files: What must be there.
      wanted: By name, for all arrays: shape, dtype, and the `jax.sharding.Sharding` of those that are to be read onto
        the devices of this process, part by part; None: as NumPy arrays.

    Raises:
      CheckpointError: a file is missing or cut short, or there is no Orbax.
    """
    if not wanted:
        return {}
    for file in files:
        check_size(version, file)
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
            return checkpointer.restore(version / FOLDER, args=orbax.args.PyTreeRestore(item=shapes, restore_args=how))
        except (ValueError, OSError, KeyError) as error:  # what TensorStore says of damaged files
            raise CheckpointError(f"{version / FOLDER} can't be read by Orbax: {error}") from error
