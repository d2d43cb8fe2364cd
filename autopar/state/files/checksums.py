"""Checksums: CURRENT holds the manifest's, the manifest those of all other files: no byte is read unchecked.

Files are read again for theirs, a CRC-32 (zlib's), but for chunks of rows, which TensorStore writes with a CRC-32C at
their end, and checks when it reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from autopar.errors import DamagedCheckpointError
from autopar.launch.group import go_on
from autopar.state.files.manifest import FileRecord
from autopar.state.files.places import Place, blocks, flush, last_bytes, mapped, named


def flushed(version: Path, path: Path) -> FileRecord:
    """Returns the record of a file that somebody wrote under a version's directory, once it is down on the disk."""
    with named(path, "written"):
        flush(path)
        return FileRecord(path.relative_to(version).as_posix(), *_length_and_crc32(path, "saving"))


def check_files(version: Place, files: Iterable[FileRecord]) -> None:
    """Checks that files hold what was written; of chunks of rows, which are checked when they are read, that they are
    those of the checkpoint.

    Raises:
      DamagedCheckpointError: a file doesn't, or isn't there; it is named.
    """

    def check(record: FileRecord) -> None:
        path = version / record.name
        with named(path, "read"):
            try:
                nbytes, differs = _compared(path, record)
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{path} is missing: the checkpoint isn't whole. {_REMEDY}") from None
            if nbytes != record.nbytes:
                raise DamagedCheckpointError(
                    f"{path} has {nbytes} bytes instead of {record.nbytes}: it was cut short, or written to. {_REMEDY}"
                )
            if differs:
                raise DamagedCheckpointError(
                    f"{path} isn't what was written (its checksum differs): it is damaged. {_REMEDY}"
                )

    mapped(version, check, files, "restoring a checkpoint")


#: What to do about a damaged checkpoint.
_REMEDY = "The checkpoint can't be restored: take a copy of it, or another checkpoint"


def _compared(path: Place, record: FileRecord) -> tuple[int, bool]:
    if record.crc32c is None:
        nbytes, crc32 = _length_and_crc32(path, "restoring")
        return nbytes, crc32 != record.crc32
    # A store is asked for a chunk's end alone: that of another length is another one.
    nbytes = path.stat().st_size if isinstance(path, Path) else record.nbytes
    return nbytes, nbytes == record.nbytes and int.from_bytes(last_bytes(path, 4), "little") != record.crc32c


def _length_and_crc32(path: Place, doing: str) -> tuple[int, int]:
    nbytes = crc = 0
    for block in blocks(path):
        nbytes, crc = nbytes + len(block), zlib.crc32(block, crc)
        go_on(f"{doing} a checkpoint")
    return nbytes, crc
