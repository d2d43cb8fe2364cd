"""Locations of files: on a disk, by `pathlib`, or in an object store, by TensorStore's key-value stores.

A store has objects, each of which is written whole in a single step; it has no directories, no renames, and nothing to
flush. `ObjectPath` has the methods of `pathlib.Path` that checkpoints need. The functions here take either.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import CheckpointError, DamagedCheckpointError, MissingCheckpointError
from autopar.jax_types import Json
from autopar.launch.group import go_on

S = TypeVar("S")
T = TypeVar("T")

#: TensorStore's drivers, by URL. `pathlib.Path` makes one slash of two.
_DRIVERS = {"s3": "s3", "gs": "gcs"}
_URL = re.compile(r"(s3|gs):/{1,2}([^/]+)(?:/(.*?))?/*")
#: Retries of a request: for a minute and a half, with pauses of 1, 2, 4, ... 32 s.
_RETRIES = 7
#: Simultaneous requests to a store.
_AT_ONCE = 4

#: Bytes that are read at a time.
_BLOCK = 1 << 24


def require_tensorstore() -> Any:
    """Returns the module `tensorstore`; raises CheckpointError if it isn't installed."""
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError(
            "checkpoints of tables, and those in object stores, need TensorStore, which can't be imported "
            f"({error}): pip install 'autopar[checkpoint]'"
        ) from error
    return tensorstore


@functools.cache
def shared_context() -> Any:
    """Returns TensorStore's context of all requests, with their credentials and retries."""
    retries = {"max_retries": _RETRIES}
    spec = {"aws_credentials": {"type": "default"}, "s3_request_retries": retries, "gcs_request_retries": retries}
    return require_tensorstore().Context(spec)


@functools.cache
def _opened(spec: str) -> Any:
    """Opens a bucket once, as opening looks for credentials."""
    return require_tensorstore().KvStore.open(json.loads(spec), context=shared_context()).result()


@dataclass(frozen=True)
class ObjectPath(os.PathLike[str]):
    """An object in a store, or the "directory" of all objects whose names begin with its name and a slash.

    Its methods are those of `pathlib.Path`; the store's errors become OSErrors.
    """

    scheme: str  #: "s3" or "gs".
    bucket: str
    key: str  #: The object's name in its bucket, without slashes at its ends.

    def __fspath__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __str__(self) -> str:
        return self.__fspath__()

    def __truediv__(self, name: str) -> ObjectPath:
        return replace(self, key=f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return replace(self, key=self.key.rpartition("/")[0])

    def is_file(self) -> bool:
        nothing = slice(0, 0)
        return bool(self.key) and self._object(lambda store: store.read(self.name, byte_range=nothing)).state == "value"

    def is_dir(self) -> bool:
        return bool(self._names())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ObjectPath]:
        return iter([self / name for name in dict.fromkeys(name.partition("/")[0] for name in self._names())])

    def mkdir(self, parents: bool = False) -> None:
        """Does nothing: an object needs no directory."""

    def read_bytes(self, last: int | None = None) -> bytes:
        """Returns the object's bytes, or at most the last `last` ones."""
        end = None if last is None else slice(-last, None)
        try:
            found = self._object(lambda store: store.read(self.name, byte_range=end))
        except OSError as error:
            if last is not None and "OUT_OF_RANGE" in str(error):  # it is empty
                return b""
            raise
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(self))
        return found.value

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Overwrites the object in a single step."""
        self._object(lambda store: store.write(self.name, data))

    def unlink(self, missing_ok: bool = True) -> None:
        self._object(lambda store: store.write(self.name, None))

    def remove_below(self) -> None:
        self._below(lambda store: store.delete_range(require_tensorstore().KvStore.KeyRange()))

    def spec(self) -> dict[str, Json]:
        """Returns the spec of TensorStore's key-value store of all objects below this name.

        TensorStore reads the environment's credentials; Amazon's variables for other endpoints are read here.
        """
        spec: dict[str, Json] = {"driver": _DRIVERS[self.scheme], "bucket": self.bucket, "path": self._prefix}
        if self.scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ:  # don't look for files of credentials
            spec["aws_credentials"] = {"type": "environment"}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if self.scheme == "s3" and endpoint:  # only Amazon's own endpoint tells a bucket's region
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            spec |= {"endpoint": endpoint, "aws_region": region}
        return spec

    def _names(self) -> list[str]:
        return sorted(name.decode() for name in self._below(lambda store: store.list()))

    @property
    def _prefix(self) -> str:
        return f"{self.key}/".lstrip("/")

    def opened(self) -> Any:
        """Returns the open store of all objects below this name."""
        return _opened(json.dumps(replace(self, key="").spec())) / self._prefix

    def _object(self, ask: Callable[[Any], Any]) -> Any:
        return self._request(self.parent, ask)

    def _below(self, ask: Callable[[Any], Any]) -> Any:
        return self._request(self, ask)

    def _request(self, folder: ObjectPath, ask: Callable[[Any], Any]) -> Any:
        require_tensorstore()
        try:
            return ask(folder.opened()).result()
        except Exception as error:  # TensorStore raises any class
            raise OSError(errno.EIO, str(error).partition(" [")[0], str(self)) from error


#: A file or a directory.
Location = Path | ObjectPath


def location_of(path: str | os.PathLike[str]) -> Location:
    """Returns the absolute location of a user's path; raises CheckpointError for an unknown kind of path."""
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"{path!r} is no path of a checkpoint: give a string or a pathlib.Path")
    text = os.fsdecode(path).removeprefix("file://")
    if not text:
        raise CheckpointError(f"{path!r} is no path of a checkpoint: give a directory ('.' is the current one)")
    if url := _URL.fullmatch(text):
        return ObjectPath(url[1], url[2], url[3] or "")
    if "://" in text:
        raise CheckpointError(
            f"{path}: checkpoints are saved to file systems, s3:// and gs://; mount others, and give the path here"
        )
    return Path(text).expanduser().absolute()


def mapped(path: Location, work: Callable[[S], T], items: Iterable[S], doing: str) -> list[T]:
    """Returns `[work(item) for item in items]`, with several requests at once to a store. `doing`: for the watchdog."""
    if isinstance(path, Path):
        return [work(item) for item in items]
    pool = ThreadPoolExecutor(_AT_ONCE, "autopar-objects")

    def done(future: Future[T]) -> T:
        while wait([future], timeout=1).not_done:
            go_on(doing)
        return future.result()

    try:
        return [done(future) for future in [pool.submit(work, item) for item in items]]
    finally:
        pool.shutdown(cancel_futures=True)


def kvstore_of(path: Location) -> dict[str, Json]:
    """Returns the spec of TensorStore's key-value store of a directory."""
    if isinstance(path, Path):
        return {"driver": "file", "path": f"{path}/"}
    path.opened()  # it stays open
    return path.spec()


def blocks(path: Location) -> Iterator[bytes]:
    if isinstance(path, ObjectPath):
        yield path.read_bytes()
        return
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def last_bytes(path: Location, count: int) -> bytes:
    if isinstance(path, ObjectPath):
        return path.read_bytes(count)
    with path.open("rb") as file:
        file.seek(-count, os.SEEK_END)
        return file.read()


def write_file(path: Location, data: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    with named(path, "written"):
        if isinstance(path, ObjectPath):
            path.write_bytes(data)
            return
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def put(path: Location, data: bytes) -> None:
    """Overwrites a file in a single step, and flushes it to the disk."""
    if isinstance(path, ObjectPath):
        write_file(path, data)
        return
    new = path.with_name(f"{path.name}.new")
    write_file(new, data)
    with named(path, "written"):
        os.replace(new, path)
        flush(path.parent)


def flush(path: Location) -> None:
    """Flushes a file's bytes, or a directory's entries, to the disk."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(path: Location) -> None:
    """Flushes the entries of a directory, and of those below it, to the disk."""
    for folder, _, _ in os.walk(path) if isinstance(path, Path) else ():
        with named(Path(folder), "written"):
            flush(Path(folder))


def remove_all(path: Location) -> None:
    """Removes a directory and its contents, as far as possible."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.remove_below()


@contextlib.contextmanager
def named(path: Location, done: str) -> Iterator[None]:
    """Raises a CheckpointError, with the path, in place of the system's OSError. `done`: "written" or "read"."""
    try:
        yield
    except CheckpointError:  # some are OSErrors, too
        raise
    except OSError as error:
        message = f"{type(error).__name__}: [Errno {error.errno}] {error.strerror}" if error.errno else str(error)
        raise CheckpointError(f"{path} can't be {done}: {message}{disk_space(path.parent, error)}") from error


def disk_space(folder: Location, error: Exception) -> str:
    """Returns a sentence on free space, after an error that a full disk may have caused; else ""."""
    if isinstance(folder, ObjectPath):
        return ""
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


# --- a checkpoint's directory, and how one version of it replaces another in a single step ---
#
#     path/CURRENT            one line: the name of the current version, and its manifest's checksum
#     path/version-000007/    a whole checkpoint: manifest.json, dense/, rows/
#
# A directory can't be renamed over another that isn't empty. A new version is therefore written beside the old one,
# and becomes the checkpoint when a new file CURRENT, which names it, is renamed over the old one: that rename is the
# commit. All other versions are remains of interrupted saves, or are being written: nobody reads them, and the next
# save removes them.
#
# Files and directories are flushed to the disk (fsync) before the commit, and the commit after it, as power may fail.
# An object store has no renames: there the commit is that the object CURRENT is overwritten.


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
