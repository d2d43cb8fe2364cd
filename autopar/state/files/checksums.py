"""Checksums: CURRENT holds the manifest's, the manifest those of all other files: no byte is read unchecked.

A checksum is a CRC-32 (zlib's). Rows have theirs computed while they are written, other files are read again for it.
"""

from __future__ import annotations

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
    """Check that files hold what was written; those without a checksum (of format 1) only that they are as long. The
    DamagedCheckpointError names the first that doesn't, or isn't there."""
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
            if record.crc32 is not None and _crc32(path, "restoring") != record.crc32:
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
