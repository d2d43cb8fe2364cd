"""`Folder`: where a checkpoint is, and how one takes the place of another in a single step.

    path/CURRENT            the name of the version that counts, and its manifest's checksum, one line
    path/version-000007/    a whole checkpoint: manifest.json, dense/, rows/

A directory can't be renamed over another one that isn't empty. So a new version is written beside the old one, and
becomes the checkpoint when the file CURRENT, which names it, is renamed over the old CURRENT: that one rename is the
commit. Whatever CURRENT doesn't name was left behind by a save that was interrupted (or is being written): nobody
reads it, and the next save removes it.

Files and directories are flushed to the disk (fsync) before the commit, and the commit after it: power may fail, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError

POINTER = "CURRENT"
_NEW_POINTER = "CURRENT.new"
_VERSION = re.compile(r"version-(\d{6,})", re.ASCII)
_LINE = re.compile(r"(version-\d{6,})(?: crc32=([0-9a-f]{8})\n|\n?)", re.ASCII)

#: Seconds until a directory that another machine made must be seen on this one: NFS remembers what wasn't there.
_VISIBLE_S = 30.0


@dataclass(frozen=True)
class Folder:
    """A checkpoint's place: an absolute path, which needn't exist."""

    path: Path

    @staticmethod
    def of(path: str | os.PathLike[str]) -> Folder:
        """The place that a user names; a CheckpointError if it is no local path."""
        if not isinstance(path, (str, os.PathLike)):
            raise CheckpointError(f"{path!r} is no path of a checkpoint: give a string or a pathlib.Path")
        if isinstance(path, str):
            path = path.removeprefix("file://")
        if "://" in str(path):
            raise CheckpointError(f"{path}: checkpoints are saved to file systems; mount it, and give its path here")
        return Folder(Path(path).expanduser().absolute())

    # --- reading ---

    def current(self) -> tuple[Path, int | None]:
        """The directory of the version that counts, and its manifest's checksum; None in format 1, which has none.

        Raises:
          MissingCheckpointError: there is none.
          CheckpointError: there is one, which can't be found.
        """
        line = self._line()
        if line is None:
            raise MissingCheckpointError(self._why_missing())
        read = _LINE.fullmatch(line)
        if read is None:
            raise DamagedCheckpointError(
                f"{self.path / POINTER} holds {line[:80]!r} instead of a version's name and a checksum: it is damaged. "
                "Take a copy of the checkpoint, or another checkpoint"
            )
        name, crc32 = read.groups()
        if not (self.path / name).is_dir():
            raise DamagedCheckpointError(
                f"{self.path / POINTER} names {name!r}, which isn't there: the checkpoint was copied in part, or "
                "somebody removed files of it"
            )
        return self.path / name, None if crc32 is None else int(crc32, 16)

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

    def begin(self) -> Path:
        """An empty directory for a new version, after what interrupted saves left was removed."""
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

    def commit(self, version: Path, crc32: int) -> None:
        """Make a version, whose files are all flushed, the one that counts; `crc32` is its manifest's."""
        pointer = self.path / _NEW_POINTER
        for folder, _, _ in os.walk(version):
            with named(Path(folder), "written"):
                flush(Path(folder))
        with named(self.path, "written"):
            write_file(pointer, f"{version.name} crc32={crc32:08x}\n".encode())
            os.replace(pointer, self.path / POINTER)
            flush(self.path)

    def clean(self) -> None:
        """Remove all versions but the one that counts, as far as that can be done; none if that is unknown."""
        line = self._line()
        read = _LINE.fullmatch(line or "")
        if line is not None and read is None:
            return
        kept = read and read[1]
        for child in self.path.iterdir():
            if _VERSION.fullmatch(child.name) and child.name != kept:
                shutil.rmtree(child, ignore_errors=True)
        (self.path / _NEW_POINTER).unlink(missing_ok=True)

    def _line(self) -> str | None:
        """What the pointer holds; None if there is none."""
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


def await_visible(path: Path) -> None:
    """Wait until this machine sees a directory that another one made; a CheckpointError if it doesn't."""
    end = time.monotonic() + _VISIBLE_S
    while not path.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path}, which rank 0 made, isn't there: checkpoints go to one file system that all ranks see"
            )
        time.sleep(0.05)


@contextlib.contextmanager
def named(path: Path, done: str) -> Iterator[None]:
    """Give the system's errors the path that they are about: a CheckpointError in place of an OSError.

    `done`: what is done to the file or directory, "written" or "read".
    """
    try:
        yield
    except CheckpointError:  # some are OSErrors, too
        raise
    except OSError as error:
        message = f"{type(error).__name__}: [Errno {error.errno}] {error.strerror}" if error.errno else str(error)
        raise CheckpointError(f"{path} can't be {done}: {message}{disk_space(path.parent, error)}") from error


def disk_space(folder: Path, error: Exception) -> str:
    """How much space is free, and what to do, after an error that may come of too little; else nothing."""
    if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.0f} MB are free at {folder}"
    except OSError:
        free = f"how much is free at {folder} is unknown"
    return (
        f" ({free}; a save needs space for the new checkpoint beside the one before, which is kept). If the disk is "
        "full, free some space or save to another path"
    )


def write_file(path: Path, data: bytes) -> None:
    """Write a file, down to the disk."""
    with named(path, "written"), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """What was written to a file, or which files are in a directory, down to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
