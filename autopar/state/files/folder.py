"""`Folder`: a checkpoint's directory, and how one version of it replaces another in a single step.

    path/CURRENT            one line: the name of the current version, and its manifest's checksum
    path/version-000007/    a whole checkpoint: manifest.json, dense/, rows/

A directory can't be renamed over another that isn't empty. A new version is therefore written beside the old one, and
becomes the checkpoint when a new file CURRENT, which names it, is renamed over the old one: that rename is the commit.
All other versions are remains of interrupted saves, or are being written: nobody reads them, and the next save removes
them.

Files and directories are flushed to the disk (fsync) before the commit, and the commit after it, as power may fail. An
object store has no renames: there the commit is that the object CURRENT is overwritten.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError
from autopar.state.files.locations import Location, flush, flush_all, location_of, named, put, remove_all

POINTER = "CURRENT"
#: Advice about a checkpoint of an older format.
OLDER = "Restore it with autopar at commit 377bc93, which reads formats 1 to 4, and save it again there"
_NEW_POINTER = f"{POINTER}.new"
_VERSION = re.compile(r"version-(\d{6,})", re.ASCII)
_LINE = re.compile(r"(version-\d{6,}) crc32=([0-9a-f]{8})\n", re.ASCII)

#: Seconds until this machine must see a directory that another one made: NFS caches that it wasn't there.
_VISIBLE_S = 30.0


@dataclass(frozen=True)
class Folder:
    """The absolute path of a checkpoint, which needn't exist."""

    path: Location

    @staticmethod
    def of(path: str | os.PathLike[str]) -> Folder:
        """Returns the folder that a user names; raises CheckpointError if there is no such kind of location."""
        return Folder(location_of(path))

    def version(self, name: str) -> Location:
        """Returns the directory of a version; raises ValueError if it is no version's name."""
        if _VERSION.fullmatch(name) is None:
            raise ValueError(f"{name[:80]!r} is no version's name")
        return self.path / name

    # --- reading ---

    def current(self) -> tuple[Location, int]:
        """Returns the directory of the current version, and its manifest's checksum. Raises MissingCheckpointError if
        there is none. Raises CheckpointError if it is damaged."""
        line = self._line()
        if line is None:
            raise MissingCheckpointError(self._why_missing())
        read = _LINE.fullmatch(line)
        if read is None:
            raise DamagedCheckpointError(
                f"{self.path / POINTER} holds {line[:80]!r} instead of a version's name and a checksum: it is damaged "
                "(take a copy of the checkpoint, or another checkpoint) or of format 1, which has no checksum. " + OLDER
            )
        name, crc32 = read.groups()
        if not (self.path / name).is_dir():
            raise DamagedCheckpointError(
                f"{self.path / POINTER} names {name!r}, which isn't there: the checkpoint was copied in part, or "
                "somebody removed files of it"
            )
        return self.path / name, int(crc32, 16)

    def _why_missing(self) -> str:
        if not self.path.exists():
            return f"there is no checkpoint: {self.path} doesn't exist"
        if self.path.is_dir() and any(_VERSION.fullmatch(p.name) for p in self.path.iterdir()):
            return (
                f"there is no complete checkpoint in {self.path}: the first save there was interrupted, or {POINTER} "
                "was removed"
            )
        return f"{self.path} is no checkpoint of autopar.save: it has no file {POINTER}"

    # --- writing: one process does it ---

    def begin(self) -> Location:
        """Removes the remains of interrupted saves, and makes an empty directory for a new version."""
        with named(self.path, "made or written to"):
            if self.path.exists():
                self._require_ours()
            else:
                self.path.mkdir(parents=True)
                flush(self.path.parent)
            self.clean()
            numbers = [int(match[1]) for p in self.path.iterdir() if (match := _VERSION.fullmatch(p.name))]
            version = self.path / f"version-{max(numbers, default=0) + 1:06d}"
            version.mkdir()
            flush(self.path)
        return version

    def commit(self, version: Location, crc32: int) -> None:
        """Makes a version, whose files are flushed, the current one; `crc32` is its manifest's."""
        flush_all(version)
        put(self.path / POINTER, f"{version.name} crc32={crc32:08x}\n".encode())

    def clean(self) -> None:
        """Removes all versions but the current one, as far as possible; none if it isn't known."""
        line = self._line()
        read = _LINE.fullmatch(line or "")
        if line is not None and read is None:
            return
        kept = read and read[1]
        for child in self.path.iterdir():
            if _VERSION.fullmatch(child.name) and child.name != kept:
                remove_all(child)
        (self.path / _NEW_POINTER).unlink(missing_ok=True)

    def _line(self) -> str | None:
        path = self.path / POINTER
        with named(path, "read"):
            try:
                return path.read_bytes().decode(errors="replace")
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _require_ours(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: a checkpoint is a directory of its own")
        others = (p.name for p in self.path.iterdir() if not _VERSION.fullmatch(p.name) and p.name != _NEW_POINTER)
        if self._line() is None and (other := next(others, None)) is not None:
            raise CheckpointError(
                f"{self.path} has other files ({other}): give the checkpoint a directory of its own, such as "
                f"{self.path / 'checkpoint'}"
            )


def await_visible(path: Location) -> None:
    """Waits until this machine sees a directory that another one made; raises CheckpointError if it doesn't."""
    end = time.monotonic() + _VISIBLE_S
    while isinstance(path, Path) and not path.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path}, which rank 0 made, isn't there: checkpoints go to one folder, which all ranks name alike, of "
                "a file system that all of them see"
            )
        time.sleep(0.05)
