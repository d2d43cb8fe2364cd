"""Checksums: CURRENT holds the manifest's, the manifest those of all other files: no byte is read unchecked.

Files are read again for theirs, a CRC-32 (zlib's), but for chunks of rows, which TensorStore writes with a CRC-32C at
their end, and checks when it reads them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from autopar.errors import DamagedCheckpointError
from autopar.launch.group import go_on
from autopar.state.files.folder import flush, named
from autopar.state.files.manifest import FileRecord

#: Bytes that are read at a time.
_BLOCK = 1 << 24


def flushed(version: Path, path: Path) -> FileRecord:
    """The record of a file that somebody wrote under a version's directory, once it is down on the disk."""
    with named(path, "written"):
        flush(path)
        return FileRecord(path.relative_to(version).as_posix(), path.stat().st_size, _crc32(path, "saving"))


def check_files(version: Path, files: Iterable[FileRecord]) -> None:
    """Check that files hold what was written; of chunks of rows, which are checked when they are read, that they are
    those of the checkpoint, and of files without a checksum (of format 1) that they are as long.

    Raises:
      DamagedCheckpointError: a file doesn't, or isn't there; it is named.
    """
    for record in files:
        path = version / record.name
        with named(path, "read"):
            try:
                nbytes = path.stat().st_size
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{path} is missing: the checkpoint isn't whole. {_REMEDY}") from None
            if nbytes != record.nbytes:
                raise DamagedCheckpointError(
                    f"{path} has {nbytes} bytes instead of {record.nbytes}: it was cut short, or written to. {_REMEDY}"
                )
            differs = record.crc32 is not None and _crc32(path, "restoring") != record.crc32
            if differs or (record.crc32c is not None and _last_word(path) != record.crc32c):
                raise DamagedCheckpointError(
                    f"{path} isn't what was written (its checksum differs): it is damaged. {_REMEDY}"
                )


#: What to do about a damaged checkpoint.
_REMEDY = "The checkpoint can't be restored: take a copy of it, or another checkpoint"


def _crc32(path: Path, doing: str) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            go_on(f"{doing} a checkpoint")
    return crc


def _last_word(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(-4, os.SEEK_END)
        return int.from_bytes(file.read(), "little")
