"""Checkpoints in object stores: those of S3 and Google, by a server on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.state.files import arrays
from autopar.state.files.locations import ObjectPath, location_of
from tests.support.checkpoints import batch_of, everything, hosted, make_state, same, saved_value
from tests.support.object_store import ObjectStore, object_store
from tests.support.pairs import long
from tests.unit.state.test_checkpointer import KEY, batches_of, equal, planned, trained, undisturbed


@dataclass
class Bucket:
    """A bucket of a server."""

    store: ObjectStore
    url: str

    @property
    def objects(self) -> dict[str, bytes]:
        return self.store.objects

    def steps(self) -> list[str]:
        """The beginnings of the names of what is there."""
        return sorted({name.split("/")[2] for name in self.objects})


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    """One for all tests: buckets stay open."""
    with object_store() as store:
        yield store


@pytest.fixture(params=["s3", "gs"])
def bucket(request: Any, server: ObjectStore, environment: Callable[..., None]) -> Bucket:
    """An empty one."""
    server.objects = {}
    server.watch = lambda method, name: None
    environment(**server.environment)
    return Bucket(server, f"{request.param}://bucket/run")


def test_every_kind_of_leaf_comes_back(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "CHUNK", 100)  # of several rows, and several chunks
    state = everything() | {"table": hosted(2.5)["t"], "w": np.arange(300.0).reshape(100, 3)}
    state["numpy"][3] = state["numpy"][3].astype(np.int32)  # in this machine's order of bytes
    autopar.save(bucket.url, state, position={"epoch": 1, "batch": 2})
    found = autopar.restore(bucket.url)
    assert found.position == {"epoch": 1, "batch": 2}
    same(autopar.restore(bucket.url, like=state).state | {"table": None}, state | {"table": None})
    np.testing.assert_array_equal(found.state["table"], np.asarray(state["table"]))
    same(found.state | {"table": None}, state | {"table": None})
    for name, data in bucket.objects.items():  # what is copied to a disk is a checkpoint there
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    same(autopar.restore(tmp_path / "bucket" / "run").state, found.state)


def test_what_was_saved_to_a_disk_and_copied_is_read(bucket: Bucket, tmp_path: Path) -> None:
    state = everything()
    autopar.save(tmp_path, state)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            bucket.objects[f"bucket/run/{path.relative_to(tmp_path)}"] = path.read_bytes()
    found = autopar.restore(bucket.url).state
    same(found | {"numpy": None}, state | {"numpy": None})
    name = next(name for name in bucket.objects if name.endswith("_METADATA") and "dense" in name)
    bucket.objects[name] = bucket.objects[name][:-1] + b"\1"
    with pytest.raises(autopar.DamagedCheckpointError, match="isn't what was written"):
        autopar.restore(bucket.url)


def test_a_save_that_is_interrupted_anywhere_leaves_a_whole_checkpoint(bucket: Bucket) -> None:
    """What is in the store before each request is what a killed process leaves."""
    seen: list[dict[str, bytes]] = []
    for value in (1.0, 2.0):
        seen.clear()
        bucket.store.watch = lambda method, name: seen.append(dict(bucket.objects))
        autopar.save(bucket.url, hosted(value), position={"value": value})
        bucket.store.watch = lambda method, name: None
        after, found = dict(bucket.objects), []
        for objects in [a for a, b in zip(seen, [*seen[1:], after], strict=True) if a != b] + [after]:
            bucket.store.objects = dict(objects)
            try:
                found.append(saved_value(bucket.url))
            except autopar.MissingCheckpointError:
                found.append(None)
            autopar.save(bucket.url, hosted(3.0), position={"value": 3.0})  # which clears up
            assert saved_value(bucket.url) == 3.0
            assert len(bucket.steps()) == 2 and bucket.steps()[0] == "CURRENT"
        old = None if value == 1.0 else 1.0
        change = found.index(value)
        assert found == [old] * change + [value] * (len(found) - change)
        assert 5 < change < len(found)
        bucket.store.objects = after


def test_every_damaged_byte_of_every_object_is_found(bucket: Bucket) -> None:
    other = f"{bucket.url}/other"
    state = {**hosted(1.0), "key": jax.random.key(3), "x": np.float32(7)}
    for url in (bucket.url, other):
        autopar.save(url, state, position={"url": url})
    whole, random = dict(bucket.objects), np.random.default_rng(0)
    names = [name for name in whole if "/other/" not in name]
    assert len(names) == 10
    for name in names:
        data, damaged = whole[name], []
        for place in {0, len(data) - 1, *random.integers(0, len(data), 4).tolist()}:
            flipped = bytearray(data)
            flipped[place] ^= 1 << int(random.integers(0, 8))
            damaged.append(bytes(flipped))
        theirs = whole[name.replace("/run/", "/run/other/")]
        for bad in (*damaged, data[:-1], data[:3], b"", data + b"\0", theirs, None):
            if bad == data:
                continue
            if bad is None:
                del bucket.objects[name]
            else:
                bucket.objects[name] = bad
            kind = autopar.CheckpointError if name.endswith("/CURRENT") else autopar.DamagedCheckpointError
            with pytest.raises(kind, match=name.removeprefix("bucket/").rpartition("/")[0]):
                autopar.restore(bucket.url)
        bucket.objects[name] = data
    assert autopar.restore(bucket.url).position == {"url": bucket.url}


def test_what_the_store_refuses_leaves_the_checkpoint_before(bucket: Bucket) -> None:
    autopar.save(bucket.url, hosted(1.0), position={"value": 1.0})
    for file, written in (
        ("c.0.0", "rows/0000_t"),
        ("zarr.json", "rows/0000_t"),
        ("manifest.json", ""),
        ("CURRENT", ""),
    ):

        def refuse(method: str, name: str, file: str = file) -> int | None:
            return 403 if method in ("PUT", "POST") and name.endswith(f"/{file}") else None

        bucket.store.watch = refuse
        told = f"{bucket.url}/.*{written or file}.* can't be written.*PERMISSION_DENIED"
        with pytest.raises(autopar.CheckpointError, match=told):
            autopar.save(bucket.url, hosted(2.0), position={"value": 2.0})
        bucket.store.watch = lambda method, name: None
        assert saved_value(bucket.url) == 1.0
        assert bucket.steps() == ["CURRENT", "version-000001"]
    bucket.store.watch = lambda method, name: 403 if "version-000002" in bucket.steps() else None  # for good
    with pytest.raises(autopar.CheckpointError, match="can't be written by TensorStore: PERMISSION_DENIED"):
        autopar.save(bucket.url, hosted(2.0), position={"value": 2.0})
    bucket.store.watch = lambda method, name: 403
    with pytest.raises(autopar.CheckpointError, match="CURRENT can't be read: .*PERMISSION_DENIED"):
        autopar.restore(bucket.url)
    with pytest.raises(autopar.CheckpointError, match=f"{bucket.url}/best.json can't be read: .*PERMISSION_DENIED"):
        autopar.Checkpointer(bucket.url)


def test_a_place_without_a_checkpoint(bucket: Bucket) -> None:
    with pytest.raises(autopar.MissingCheckpointError, match=f"there is no checkpoint: {bucket.url} doesn't exist"):
        autopar.restore(bucket.url)
    bucket.objects["bucket/run/notes.txt"] = b""
    with pytest.raises(autopar.MissingCheckpointError, match="no checkpoint of autopar.save"):
        autopar.restore(bucket.url)
    with pytest.raises(autopar.CheckpointError, match=r"has other files \(notes.txt\)"):
        autopar.save(bucket.url, {})
    with pytest.raises(autopar.CheckpointError, match="notes.txt is a file"):
        autopar.save(f"{bucket.url}/notes.txt", {})
    del bucket.objects["bucket/run/notes.txt"]
    root = bucket.url.removesuffix("run")
    for url in (root, bucket.url):
        bucket.objects.clear()
        autopar.save(url, {"n": 1})
        assert autopar.restore(url).state == {"n": 1}
    assert set(bucket.objects) == {f"bucket/run/{name}" for name in ("CURRENT", "version-000001/manifest.json")}


@pytest.mark.parametrize("bucket", ["s3", long("gs")], indirect=True)
def test_a_training_goes_on_and_keeps_the_last_and_the_best(bucket: Bucket) -> None:
    def run(steps: int) -> tuple[Any, autopar.Checkpointer]:
        step = planned()
        with autopar.Checkpointer(
            bucket.url, step=step, batch=batch_of(0), every=2, keep=2, best=("auc", max)
        ) as checkpoints:
            state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(steps))
            for batch in batches:
                state, _ = step(state, batch)
                checkpoints.step(state)
                if checkpoints.steps == 3:
                    checkpoints.evaluated(state, {"auc": 0.5})
        assert step.options.plan is None or step.options.plan.source == f"{bucket.url}/plan.json"
        return state, checkpoints

    run(5)
    assert json.loads(bucket.objects["bucket/run/plan.json"])
    state, checkpoints = run(9)
    equal(state, undisturbed(9))
    assert checkpoints.all_steps() == [3, 8, 9] and checkpoints.best_step() == 3
    assert bucket.steps() == ["best.json", "plan.json", "step-00000003", "step-00000008", "step-00000009"]
    best = autopar.restore(checkpoints.path(3), jax.eval_shape(make_state, KEY)).state
    equal(best, undisturbed(3))
    for step, object in ((9, "c.0.0"), (8, "manifest.json")):
        name = next(n for n in bucket.objects if f"step-{step:08d}" in n and n.endswith(object))
        bucket.objects[name] = bucket.objects[name][:-1] + b"\1"
    with pytest.warns(autopar.StateWarning, match=f"step [89] is left out: {bucket.url}/.*isn't what was written"):
        state, checkpoints = run(10)
    equal(state, undisturbed(10))
    assert checkpoints.all_steps() == [3, 8, 10] or checkpoints.all_steps() == [3, 10]


@pytest.mark.parametrize("bucket", [long("s3"), "gs"], indirect=True)
def test_a_killed_process_leaves_whole_checkpoints(bucket: Bucket) -> None:
    script = """
        import sys
        from tests.unit.state.test_checkpointer import planned, trained
        trained(sys.argv[1], planned(), 9, every=2)
    """
    jobs: list[subprocess.Popen[bytes]] = []

    def kill(method: str, name: str) -> None:
        if "step-00000004" in name and name.endswith("/c.0") and method in ("PUT", "POST"):
            jobs[0].send_signal(signal.SIGKILL)

    bucket.store.watch = kill
    jobs.append(subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), bucket.url], env=os.environ))
    assert jobs[0].wait(120) == -signal.SIGKILL
    assert bucket.steps() == ["plan.json", "step-00000002", "step-00000004"]
    with autopar.Checkpointer(bucket.url) as checkpoints:
        assert checkpoints.latest_step() == 2
    equal(trained(bucket.url, planned(), 9, every=4, keep=1), undisturbed(9))
    assert bucket.steps() == ["plan.json", "step-00000009"]


def test_names_of_places(environment: Callable[..., None]) -> None:
    for url in ("s3://bucket/a/b/", Path("s3://bucket/a/b"), ObjectPath("s3", "bucket", "a/b")):
        path = location_of(url)
        assert isinstance(path, ObjectPath) and str(path) == os.fspath(path) == "s3://bucket/a/b"
        assert path.name == "b" and path.parent / "b" == path and str(path.parent.parent) == "s3://bucket"
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID")
    environment(**dict.fromkeys(names))
    asked = location_of("s3://bucket/a").spec()
    assert not {"endpoint", "aws_region", "aws_credentials"} & set(asked)  # Amazon's own, which knows the region
    environment(AWS_ENDPOINT_URL="http://other")
    assert location_of("s3://bucket/a").spec() == asked | {"endpoint": "http://other", "aws_region": "us-east-1"}
    environment(AWS_REGION="here")
    assert location_of("s3://bucket/a").spec()["aws_region"] == "here"
    assert "endpoint" not in location_of("gs://bucket/a").spec()
