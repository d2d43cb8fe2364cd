"""Checkpoints of which a file is damaged, gone, of another one, or of another version of autopar."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.checkpoints import (
    deferred,
    everything,
    hosted,
    in_one_process,
    limited_files,
    make_state,
    saved_value,
)

#: Where `hosted` has its table.
ROWS = "rows/0000_t.00000-of-00001"


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        (f"{ROWS}/c.0.0", lambda x: x[:100], "has 100 bytes instead of"),
        (f"{ROWS}/c.0.0", lambda x: x[:-1] + b"\1", "checksum differs"),
        (f"{ROWS}/c.0.0", lambda x: b"\1" + x[1:], "Digest mismatch"),
        (f"{ROWS}/c.0.0", None, "is missing"),
        (f"{ROWS}/zarr.json", lambda x: x[:-1] + b" ", "checksum differs"),
        ("dense/manifest.ocdbt", lambda x: x[:-1], r"has \d+ bytes"),
        ("dense/_METADATA", None, "is missing"),
        ("manifest.json", lambda x: x[:100], "checksum differs from the one in .*CURRENT"),
        ("manifest.json", None, "can't be read"),
        ("../CURRENT", lambda x: x[:-9], r"holds 'version-000001 crc32=' instead of"),
        ("../CURRENT", lambda x: x[:14], r"holds 'version-000001' instead of.*of format 1.*autopar at commit \w{7}"),
        ("../CURRENT", None, "was removed"),
    ],
)
def test_damaged_files_are_named(file: str, damage: Any, told: str, tmp_path: Path) -> None:
    autopar.save(tmp_path, hosted(1.0))
    path = tmp_path / "version-000001" / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(autopar.CheckpointError, match=f"{Path(file).name}.*{told}" if file[0] != "." else told):
        autopar.restore(tmp_path)


@pytest.mark.parametrize("make", [in_one_process, everything, lambda: hosted(1.0), deferred])
def test_every_damaged_byte_of_every_file_is_found(make: Any, tmp_path: Path) -> None:
    """Flipped bits, files that are cut, lengthened, gone, or those of another checkpoint: an error names the file."""
    folder, other = tmp_path / "it", tmp_path / "other"
    state = make()
    like = jax.eval_shape(make_state, jax.random.key(0)) if make is in_one_process else None
    autopar.save(folder, state, position={"batch": 1})
    autopar.save(other, jax.tree.map(lambda x: x, state), position={"batch": 2})
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {path.name for path in files} > {"CURRENT", "manifest.json"} and len(files) >= 3
    random = np.random.default_rng(0)

    def refused(path: Path) -> None:
        with pytest.raises(
            autopar.DamagedCheckpointError if path.name != "CURRENT" else autopar.CheckpointError
        ) as raised:
            autopar.restore(folder, like)
        name = "CURRENT" if path.name == "CURRENT" else str(path.relative_to(folder))
        assert name in str(raised.value)

    for path in files:
        data = path.read_bytes()
        for place in {0, len(data) - 1, *random.integers(0, len(data), 5).tolist()} if data else ():
            flipped = bytearray(data)
            flipped[place] ^= 1 << int(random.integers(0, 8))
            path.write_bytes(flipped)
            refused(path)
        theirs = (other / path.relative_to(folder)).read_bytes() if (other / path.relative_to(folder)).exists() else b""
        for damaged in (data[:-1], data + b"\n", data + b"\0", theirs):
            if damaged != data:
                path.write_bytes(damaged)
                refused(path)
        path.unlink()
        refused(path)
        path.write_bytes(data)
    assert autopar.restore(folder, like).position == {"batch": 1}


def test_a_save_over_a_damaged_pointer_removes_nothing_before_its_own_counts(
    tmp_path: Path,
) -> None:
    autopar.save(tmp_path, hosted(1.0), position={"value": 1.0})
    pointer = (tmp_path / "CURRENT").read_bytes()
    (tmp_path / "CURRENT").write_bytes(b"\xff" + pointer[1:])
    with limited_files(100), pytest.raises(autopar.CheckpointError, match="File too large"):
        autopar.save(tmp_path, hosted(2.0), position={"value": 2.0})
    (tmp_path / "CURRENT").write_bytes(pointer)
    assert saved_value(tmp_path) == 1.0


def test_a_version_that_is_gone(tmp_path: Path) -> None:
    autopar.save(tmp_path, hosted(1.0))
    shutil.rmtree(tmp_path / "version-000001")
    with pytest.raises(autopar.CheckpointError, match="names 'version-000001', which isn't there"):
        autopar.restore(tmp_path)


def _forge(folder: Path, change: Any) -> None:
    """Change what a manifest says, with a checksum that fits."""
    file = folder / "version-000001/manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    (folder / "CURRENT").write_text(f"version-000001 crc32={zlib.crc32(file.read_bytes()):08x}\n")


@pytest.mark.parametrize(
    ("format_", "message"),
    [
        (5, "saved by autopar 9.0 in format 5; this autopar reads format 4, which is newer: pip install --upgrade"),
        (3, "saved by autopar 9.0 in format 3; .* older. Restore it with autopar at commit 377bc93, .* save it again"),
    ],
)
def test_another_format_is_refused(format_: int, message: str, tmp_path: Path) -> None:
    autopar.save(tmp_path, {"w": jnp.ones(3)})
    _forge(tmp_path, lambda manifest: manifest.update(format=format_, autopar="9.0", new=1))
    with pytest.raises(autopar.CheckpointError, match=message):
        autopar.restore(tmp_path)
    autopar.save(tmp_path, {"w": jnp.zeros(3)})  # in its place
    assert autopar.restore(tmp_path).state["w"].sum() == 0


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("leaves", 0, "replicas"), True),
        (("leaves", 0, "replicas"), -1),
        (("leaves", 0, "replicas"), 3),
        (("leaves", 0, "weak"), 1),
        (("leaves", 0, "weak"), "no"),
        (("leaves", 0, "axis"), 7),
        (("leaves", 0, "layout"), None),
        (("leaves", 0, "layout", "dealt"), 0),
        (("leaves", 0, "layout", "devices"), 0),
        (("leaves", 0, "layout", "extent"), 10**9),
        (("leaves", 0, "shape"), [-1, 3]),
        (("leaves", 0, "dtype"), "float31"),
        (("leaves", 0, "kind"), "code"),
        (("leaves", 0, "name"), "../../elsewhere"),
        (("leaves", 0, "files", 0, "name"), "../../elsewhere"),
        (("leaves", 0, "files", 0, "name"), "/etc/hostname"),
        (("leaves", 0, "files", 0, "name"), ""),
        (("leaves", 0, "files", 0, "nbytes"), -1),
        (("leaves", 0, "files", 0, "crc32"), None),
        (("dense", 0, "name"), "rows/../../elsewhere"),
        (("leaves", 2, "value"), "maybe"),
        (("leaves", 2, "type"), "jax"),
        (("structure",), []),
        (("structure",), {"dict": [["a", {"leaf": 0}]]}),
        (("structure",), {"list": [{"leaf": -1}, {"leaf": 1}, {"leaf": 2}]}),
        (("structure",), {"tuple": {"leaf": 0}}),
        (("structure",), {"dict": [[{}, {"leaf": 0}]]}),
        (("structure",), {"leaf": True}),
        (("position",), 3),
        (("ranks",), "two"),
        (("beside",), {}),
        (("else",), 1),
    ],
)
def test_forged_manifests(place: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    """What a manifest says is checked, whatever its checksum."""
    folder = tmp_path / "it"
    autopar.save(folder, {"a": hosted(1.0), "b": True, "c": jnp.ones(3)})

    def change(manifest: Any) -> None:
        for key in place[:-1]:
            manifest = manifest[key]
        manifest[place[-1]] = value

    assert autopar.restore(folder).state["b"] is True
    _forge(folder, lambda manifest: None)
    assert autopar.restore(folder).state["b"] is True
    _forge(folder, change)
    with pytest.raises(autopar.DamagedCheckpointError, match=r"manifest.json is damaged: "):
        autopar.restore(folder)


def test_a_file_in_place_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("notes")
    with pytest.raises(autopar.CheckpointError, match="run is a file: checkpoints are kept in a directory of their"):
        autopar.Checkpointer(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "notes"
