"""`Folder`: where a checkpoint is, and how one takes the place of another in a single step.

    path/CURRENT            the name of the version that counts, one line
    path/version-000007/    a whole checkpoint: manifest.json, dense/, rows/

A directory can't be renamed over another one that isn't empty. So a new version is written beside the old one, and
becomes the checkpoint when the file CURRENT, which names it, is renamed over the old CURRENT: that one rename is the
commit. Whatever CURRENT doesn't name was left behind by a save that was interrupted (or is being written): nobody
reads it, and the next save removes it.

Files and directories are flushed to the disk (fsync) before the commit, and the commit after it: power may fail, too.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import CheckpointError, MissingCheckpointError

POINTER = "CURRENT"
_NEW_POINTER = "CURRENT.new"
_VERSION = re.compile(r"version-(\d{6,})")

#: Seconds until a directory that another machine made must be seen on this one: NFS remembers what wasn't there.
_VISIBLE_S = 30.0


@dataclass(frozen=True)
class Folder:
    """A checkpoint's place.

    Attributes:
      path: Absolute. It needn't exist.
    """

    path: Path

    @staticmethod
    def of(path: str | os.PathLike[str]) -> Folder:
        """The place that a user names.

        Raises:
          CheckpointError: it is no local path.
        """
        if "://" in str(path):
            raise CheckpointError(f"{path}: checkpoints are saved to file systems; mount it, and give its path here")
        return Folder(Path(path).expanduser().absolute())

    # --- reading ---

    def current(self) -> Path:
        """The version that counts.

        Raises:
          MissingCheckpointError: there is none.
        """
        try:
            name = (self.path / POINTER).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingCheckpointError(self._why_missing()) from None
        if not _VERSION.fullmatch(name) or not (self.path / name).is_dir():
            raise CheckpointError(
                f"{self.path / POINTER} names {name!r}, which isn't there: the checkpoint was copied in part, or "
                "somebody removed files of it"
            )
        return self.path / name

    def _why_missing(self) -> str:
        if not self.path.exists():
            return f"there is no checkpoint: {self.path} doesn't exist"
        if self.path.is_dir() and any(_VERSION.fullmatch(p.name) for p in self.path.iterdir()):
            return f"there is no complete checkpoint in {self.path}: the first save there was interrupted"
        return f"{self.path} is no checkpoint of autopar.save: it has no file {POINTER}"

    # --- writing: one process does it ---

    def begin(self) -> Path:
        """An empty directory for a new version, after what interrupted saves left was removed.

        Raises:
          CheckpointError: there is something else at this path.
          OSError: it can't be made.
        """
        if self.path.exists():
            self._require_ours()
        else:
            self.path.mkdir(parents=True)
            flush(self.path.parent)
        self.clean()
        numbers = [int(found[1]) for p in self.path.iterdir() if (found := _VERSION.fullmatch(p.name))]
        version = self.path / f"version-{max(numbers, default=0) + 1:06d}"
        version.mkdir()
        flush(self.path)
        return version

    def commit(self, version: Path) -> None:
        """Make a version, whose files are all flushed, the one that counts."""
        for folder, _, _ in os.walk(version):
            flush(Path(folder))
        pointer = self.path / _NEW_POINTER
        write_text(pointer, version.name + "\n")
        os.replace(pointer, self.path / POINTER)
        flush(self.path)

    def clean(self) -> None:
        """Remove all versions but the one that counts, as far as that can be done."""
        kept = self._pointed()
        for found in self.path.iterdir():
            if _VERSION.fullmatch(found.name) and found.name != kept:
                shutil.rmtree(found, ignore_errors=True)
        (self.path / _NEW_POINTER).unlink(missing_ok=True)

    def _pointed(self) -> str | None:
        try:
            return (self.path / POINTER).read_text().strip()
        except FileNotFoundError:
            return None

    def _require_ours(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: a checkpoint is a directory of its own")
        others = (p.name for p in self.path.iterdir() if not _VERSION.fullmatch(p.name) and p.name != _NEW_POINTER)
        if self._pointed() is None and (other := next(others, None)) is not None:
            raise CheckpointError(
                f"{self.path} has other files ({other}): give the checkpoint a directory of its own, such as "
                f"{self.path / 'checkpoint'}"
            )


def await_visible(path: Path, seconds: float = _VISIBLE_S) -> None:
    """Wait until this machine sees a directory that another one made.

    Raises:
      CheckpointError: it doesn't.
    """
    end = time.monotonic() + seconds
    while not path.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path}, which rank 0 made, isn't there: checkpoints go to one file system that all ranks see"
            )
        time.sleep(0.05)


def write_text(path: Path, text: str) -> None:
    """Write a file, down to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """What was written to a file, or which files are in a directory, down to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
