"""What processes that `jax.distributed` connects read of its store: data, whatever was written there."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import jax_compat
from autopar.launch import group
from autopar.launch.group import StoreGroup


class _Store:
    """A store in which another process's next message lies already."""

    def __init__(self, theirs: bytes) -> None:
        self.theirs, self.mine = theirs, b""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self.mine = value

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        return self.mine if key.endswith("/0") else self.mine.partition(b"\0")[0] + b"\0" + self.theirs

    def key_value_delete(self, key: str) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`told(message, rank=0)`: the group of two processes in which the other one sent this message."""

    def made(message: bytes) -> StoreGroup:
        monkeypatch.setattr(jax_compat, "key_value_store", lambda: _Store(message))
        monkeypatch.setattr(group, "_exchanges", group.Counter())
        return StoreGroup((0, 1))

    return made


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"null",
        b'{"result": 3}',
        b"[null]",
        b"[3, 4]",
        b'[["OSError", "text", "machine"], null]',
        b'[["__builtins__", "text", "machine"], null]',
        b'[["StateError", 3, "machine"], null]',
        b"[null, 5]",
    ],
)
def test_what_is_no_message(told: Any, message: bytes) -> None:
    read = {"version-000001": 1}.__getitem__
    with pytest.raises(autopar.LaunchError, match="'files': what came in the name of process 1 is no message of auto"):
        told(message).together(autopar.CheckpointError, lambda: "version-000001", "files", read)


def test_a_pickle_is_not_read(told: Any, tmp_path: Path) -> None:
    message = pickle.dumps(_Evil(tmp_path / "ran"))
    for exchange in (
        lambda it: it.together(autopar.CheckpointError, lambda: None, "files"),
        lambda it: it.values({"a": 1}, "files"),
        lambda it: it.arrays([np.ones(3)], "files"),
        lambda it: it.share(np.ones(3), 1),
    ):
        with pytest.raises(autopar.LaunchError, match="process 1 is no message"):
            exchange(told(message))
    assert not (tmp_path / "ran").exists()


def test_errors_keep_their_class(told: Any) -> None:
    """Of autopar's, by name; one that is derived from these is told as the nearest."""
    sent = json.dumps([["HostMemoryError", "too large", "far"], None]).encode()
    with pytest.raises(autopar.HostMemoryError, match=r"^process 1 \(on machine far\): too large$"):
        told(sent).together(autopar.CheckpointError, lambda: None, "files")

    class OwnError(autopar.StateError):
        pass

    def fail() -> None:
        raise OwnError("wrong")

    with pytest.raises(autopar.StateError, match="^process 0: wrong$"):
        told(b"[null, null]").together(autopar.CheckpointError, fail, "files")


def test_arrays(told: Any) -> None:
    own = [np.arange(3, dtype=np.int8), np.float32(2.5), np.zeros((0, 2)), np.ones(2, jnp.bfloat16.dtype)]
    own = [np.asarray(x) for x in own]
    (_, theirs) = told(b"".join((x + x).tobytes() for x in own)).arrays(own, "files")
    for x, y in zip(own, theirs, strict=True):
        np.testing.assert_array_equal(y, x + x, strict=True)
