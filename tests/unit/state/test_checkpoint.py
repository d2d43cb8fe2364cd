"""Saving and restoring in one process: every kind of leaf, every place, every interruption, every error."""

from __future__ import annotations

import doctest
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest

import autopar
from autopar import jax_compat
from autopar.backends.host.storage import HostRows
from autopar.ir.layout import RowLayout
from autopar.launch.progress import PROGRESS
from autopar.state import checkpoint
from autopar.state.files import arrays
from autopar.state.files.arrays import RowFiles, array_name, write_rows
from autopar.state.files.manifest import LeafRecord
from autopar.tables.host import HostTable
from tests.support.checkpoints import (
    ROWS,
    WIDTH,
    batch_of,
    everything,
    hosted,
    limited_files,
    make_state,
    same,
    saved_value,
    train,
)
from tests.support.pairs import named, paired


def test_every_kind_of_leaf_comes_back(tmp_path: Path) -> None:
    state = everything()
    autopar.save(tmp_path, state, position={"epoch": np.int64(1), "batch": 2})
    state["numpy"][3] = state["numpy"][3].astype(np.int32)  # in this machine's order of bytes
    found = autopar.restore(tmp_path)
    same(found.state, state)
    assert found.position == {"epoch": 1, "batch": 2}
    same(autopar.restore(tmp_path, like=state).state, state)
    shapes = jax.eval_shape(lambda: {"x": jnp.zeros(2), "y": jax.random.key(0)})
    autopar.save(tmp_path, {"x": np.ones(2, np.float32), "y": jax.random.key(5)})
    found = autopar.restore(tmp_path, shapes)
    same(found.state, {"x": jnp.ones(2), "y": jax.random.key(5)})
    assert found.position is None


@pytest.mark.parametrize("saved_on_hosts", [True, False])
@pytest.mark.parametrize("restored_on_hosts", [True, False])
def test_a_training_goes_on_where_its_tables_are_or_elsewhere(
    saved_on_hosts: bool, restored_on_hosts: bool, tmp_path: Path
) -> None:
    def planned(on_hosts: bool) -> Any:
        return autopar.parallelize(train, strategy=("ps", "hosts") if on_hosts else "auto")

    step = planned(saved_on_hosts)
    state = autopar.init(make_state, jax.random.key(0), step=step, batch=batch_of(0))
    state, _ = step(state, batch_of(0))
    assert isinstance(state["params"]["emb"], HostTable) == saved_on_hosts
    autopar.save(tmp_path / "it", state)
    expected, _ = step(state, batch_of(5))
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    step = planned(restored_on_hosts)
    found, _ = autopar.restore(tmp_path / "it", shapes, step=step, batch=batch_of(0))
    assert isinstance(found["params"]["emb"], HostTable) == restored_on_hosts
    found, _ = step(found, batch_of(5))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if saved_on_hosts == restored_on_hosts:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def test_a_template_says_where_leaves_go(tmp_path: Path) -> None:
    values = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(WIDTH, ROWS)
    layout = RowLayout(ROWS, 1, cyclic=True)
    table = HostTable(HostRows.of(values, 1, layout, 0, "t"))
    for saved in ({"t": table}, {"t": jnp.asarray(values)}):
        autopar.save(tmp_path, saved)
        for like in (table, np.zeros_like(values), jnp.zeros_like(values), jax.ShapeDtypeStruct(values.shape, "f4")):
            found = autopar.restore(tmp_path, {"t": like}).state["t"]
            kind = jax.Array if isinstance(like, jax.ShapeDtypeStruct) else type(like)
            assert isinstance(found, kind)
            np.testing.assert_array_equal(np.asarray(found), values)
    other_axis = HostTable(HostRows.of(values, 0, RowLayout(WIDTH, 1, cyclic=True), 0, "t"))
    autopar.save(tmp_path, {"t": table})
    found = autopar.restore(tmp_path, {"t": other_axis}).state["t"]
    np.testing.assert_array_equal(np.asarray(found), values)
    assert found.axis == 0


def test_a_manifest_names_its_layout_as_it_always_did(tmp_path: Path) -> None:
    """A checkpoint of any version: names in files outlive those in the code."""
    autopar.save(
        tmp_path, {"t": HostTable(HostRows.of(np.zeros((ROWS, 2)), 0, RowLayout(ROWS, 1, cyclic=True), 0, "t"))}
    )
    (leaf,) = json.loads((tmp_path / "version-000001" / "manifest.json").read_text())["leaves"]
    assert leaf["layout"] == {"extent": ROWS, "devices": 1, "dealt": True}


@paired(
    {
        "cyclic": named([True, False]),
        "dtype": named(["float32", "bfloat16", "int8"]),
        "extent": named([1, 3, 10, 37]),
    }
)
def test_rows_of_any_number_of_ranks_are_read_by_any_other(
    cyclic: bool, dtype: str, extent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK", 2 * 2 * np.dtype(dtype).itemsize)  # two rows
    table = np.arange(extent * 2).reshape(extent, 2).astype(dtype)
    for ranks in (1, 2, 3, 4):
        layout = RowLayout(extent, ranks, cyclic)
        files = []
        for rank in range(ranks):
            own = HostRows.of(table, 0, layout, rank, "t").rows[: int(layout.rows_on(np.asarray(rank)))]
            files += write_rows(tmp_path, array_name(f"t{ranks}", rank, ranks), own)
        record = LeafRecord("t", f"t{ranks}", "rows", "jax", table.shape, dtype, layout=layout, files=tuple(files))
        read = RowFiles(tmp_path, record)
        np.testing.assert_array_equal(read.whole(), table)
        for others in (1, 2, 3, 5):
            for rank in range(others):
                numbers = np.arange(rank, extent, others)
                np.testing.assert_array_equal(read.read(numbers), table[numbers])
        picked = np.random.default_rng(0).integers(0, extent, 9)
        np.testing.assert_array_equal(read.read(picked), table[picked])
        np.testing.assert_array_equal(read.part((slice(0, 1), slice(1, 2))), table[:1, 1:])


WRITERS = ((checkpoint, "write_dense"), (checkpoint, "write_rows"), (arrays, "_open"))


def test_a_save_that_is_interrupted_anywhere_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder as it is before and after whatever is done to the files, each time as a killed process leaves it."""
    folder, seen = tmp_path / "it", []

    def watch(patched: pytest.MonkeyPatch, module: Any, name: str) -> None:
        real = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            look()
            found = real(*args, **kwargs)
            look()
            return found

        def look() -> None:
            seen.append(tmp_path / f"seen{value}-{len(seen)}")
            if folder.exists():
                shutil.copytree(folder, seen[-1])

        patched.setattr(module, name, watched)

    for value in (1.0, 2.0):
        with monkeypatch.context() as patched:
            for module, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree"), *WRITERS):
                watch(patched, module, name)
            autopar.save(folder, hosted(value), position={"value": value})
        before, seen[:] = list(seen), []
        found = []
        for k, copy in enumerate(before):
            try:
                found.append(saved_value(copy))
            except autopar.MissingCheckpointError:
                found.append(None)
            if k % 5 == 0 or found[-1] != found[-2]:  # the next save clears up
                autopar.save(copy, hosted(3.0), position={"value": 3.0})
                assert saved_value(copy) == 3.0
                assert sorted(p.name.split("-")[0] for p in copy.iterdir()) == ["CURRENT", "version"]
        assert len(found) > 20
        old = None if value == 1.0 else 1.0
        change = found.index(value)
        assert found == [old] * change + [value] * (len(found) - change)
        assert 10 < change < len(found) - 1


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    autopar.save(tmp_path, hosted(1.0), position={"value": 1.0})
    real = os.fsync

    def full(file: str) -> Any:
        def fsync(descriptor: int) -> None:
            if re.search(file, os.readlink(f"/proc/self/fd/{descriptor}")):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        return fsync

    with (
        limited_files(100),
        pytest.raises(
            autopar.CheckpointError,
            match=r"rows/0000_t\.\S+ can't be written by TensorStore: .*File too large.*\(\S+ MB are free at ",
        ),
    ):
        autopar.save(tmp_path, hosted(2.0), position={"value": 2.0})
    for file in (
        r"rows/0000_t\.\S+-of-00001$",
        "version-000002/rows$",
        r"manifest\.ocdbt",
        r"manifest\.json$",
        r"CURRENT\.new$",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full(file))
            found = file.removesuffix("$")
            with pytest.raises(
                autopar.CheckpointError,
                match=rf"{found} can't be written: OSError: \[Errno 28\] No space left on device \(\S+ MB are free at ",
            ):
                autopar.save(tmp_path, hosted(2.0), position={"value": 2.0})
        assert "saving a checkpoint" in str(PROGRESS.last)
        assert saved_value(tmp_path) == 1.0
        assert len(list(tmp_path.iterdir())) == 2
    with monkeypatch.context() as patched:
        told = "RESOURCE_EXHAUSTED: No space left on device"
        patched.setattr(orbax.PyTreeCheckpointHandler, "save", Mock(side_effect=ValueError(told)))
        patched.setattr(orbax.PyTreeCheckpointHandler, "async_save", Mock(side_effect=ValueError(told)))
        with pytest.raises(autopar.CheckpointError, match=rf"dense can't be written by Orbax: ValueError: {told} \("):
            autopar.save(tmp_path, hosted(2.0), position={"value": 2.0})
    assert saved_value(tmp_path) == 1.0


def test_a_place_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(autopar.MissingCheckpointError, match="doesn't exist"):
        autopar.restore(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no checkpoint of autopar.save"):
        autopar.restore(tmp_path)
    (tmp_path / "version-000001").mkdir()
    with pytest.raises(autopar.MissingCheckpointError, match="the first save there was interrupted"):
        autopar.restore(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(autopar.CheckpointError, match=r"has other files \(notes.txt\)"):
        autopar.save(tmp_path, {})
    with pytest.raises(autopar.CheckpointError, match="notes.txt is a file"):
        autopar.save(tmp_path / "notes.txt", {})
    with pytest.raises(autopar.CheckpointError, match="ftp://host/it: checkpoints are saved to file systems"):
        autopar.save("ftp://host/it", {})
    (tmp_path / "notes.txt").unlink()
    autopar.save(tmp_path, {})
    assert autopar.restore(f"file://{tmp_path}").state == {}


@pytest.mark.parametrize(
    ("like", "told"),
    [
        ({"a": {"w": np.zeros(3, "f4"), "v": np.zeros(3)}, "n": 1}, "the template has a/v, which wasn't saved"),
        ({"a": {"w": np.zeros(3, "f4")}}, "n was saved, which the template hasn't"),
        ({"a": {"w": np.zeros((3, 1), "f4")}, "n": 1}, r"a/w was saved with shape \[3\], and has \[3, 1\]"),
        ({"a": {"w": np.zeros(3, "f2")}, "n": 1}, "a/w was saved as float32, and is float16"),
        ({"a": {"w": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))}, "n": 1}, r"is key<fry>"),
        ({"a": {"w": 1.0}, "n": 1}, r"a/w is a Python float in the template; saved was float32\[3\]"),
        ({"a": {"w": np.zeros(3, "f4")}, "n": np.zeros(())}, "n was saved as a Python int"),
        ({"a": {"w": "text"}, "n": 1}, "a/w of the template is a str"),
    ],
)
def test_a_template_that_does_not_fit(like: Any, told: str, tmp_path: Path) -> None:
    autopar.save(tmp_path, {"a": {"w": jnp.ones(3)}, "n": 1})
    with pytest.raises(autopar.CheckpointError, match=told):
        autopar.restore(tmp_path, like)


def test_a_state_that_needs_a_template(tmp_path: Path) -> None:
    state = make_state(jax.random.key(0))
    autopar.save(tmp_path, state)
    with pytest.raises(autopar.CheckpointError, match=r"holds a optax\S+State, which can't be made from a file"):
        autopar.restore(tmp_path)
    same(autopar.restore(tmp_path, jax.eval_shape(make_state, jax.random.key(0))).state, state)


def test_what_cannot_be_saved(tmp_path: Path, uninstalled: Callable[[str], None]) -> None:
    with pytest.raises(autopar.CheckpointError, match="a/0 is of type str"):
        autopar.save(tmp_path, {"a": ["text"]})
    with pytest.raises(autopar.CheckpointError, match="a is of type array of object"):
        autopar.save(tmp_path, {"a": np.array([None])})
    with pytest.raises(autopar.CheckpointError, match=r"position=\{'x': .*\} can't be saved"):
        autopar.save(tmp_path, {}, position={"x": object()})
    step = autopar.parallelize(train, strategy=("ps", "hosts"))
    old = autopar.init(make_state, jax.random.key(0), step=step, batch=batch_of(0))
    new, _ = step(old, batch_of(0))
    with pytest.raises(autopar.DonatedStateError, match="was given to a step"):
        autopar.save(tmp_path, old)
    autopar.save(tmp_path, new)
    uninstalled("orbax.checkpoint")
    with pytest.raises(autopar.CheckpointError, match=r"need Orbax.*pip install 'autopar\[checkpoint\]'"):
        autopar.save(tmp_path, new)
    tables = {"emb": new["params"]["emb"], "n": 3}
    autopar.save(tmp_path, tables)  # needs none
    uninstalled("tensorstore")
    with pytest.raises(autopar.CheckpointError, match=r"need TensorStore.*pip install 'autopar\[checkpoint\]'"):
        autopar.save(tmp_path, tables)


def test_a_step_of_another_state(tmp_path: Path) -> None:
    autopar.save(tmp_path, {"x": jnp.ones(3)})
    step = autopar.parallelize(train)
    with pytest.raises(autopar.ArgumentsError, match="can't be traced with what the checkpoint"):
        autopar.restore(tmp_path, step=step, batch=batch_of(0))
    with pytest.raises(autopar.ArgumentsError, match="together with step="):
        autopar.restore(tmp_path, batch=batch_of(0))
    with pytest.raises(autopar.ArgumentsError, match="needs to know what train is called with"):
        autopar.restore(tmp_path, step=step)


def test_wide_types_need_the_setting_that_they_were_saved_under(tmp_path: Path) -> None:
    with jax_compat.enable_x64():
        autopar.save(tmp_path, {"x": jnp.arange(3.0)})
        assert autopar.restore(tmp_path).state["x"].dtype == np.float64
    with pytest.raises(autopar.CheckpointError, match="x was saved as float64, which JAX doesn't have now"):
        autopar.restore(tmp_path)
    found = autopar.restore(tmp_path, {"x": np.zeros(3)}).state["x"]
    assert found.dtype == np.float64


def test_docstring_examples() -> None:
    found = doctest.testmod(checkpoint)
    assert found.attempted >= 11 and found.failed == 0
