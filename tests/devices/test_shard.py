"""`shard`: batches from any source over the devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.meshes import mesh_of
from tests.support.row_steps import make_state, same, step


def source(sizes: list[int], requested: list[int] | None = None) -> Iterator[dict[str, Any]]:
    for k, size in enumerate(sizes):
        if requested is not None:
            requested.append(k)
        yield {"ids": np.full((size, 2), k, np.int32), "rate": np.float32(k)}


def test_batches_are_spread_over_the_devices() -> None:
    found = list(autopar.shard(source([8, 8, 8]), mesh=mesh_of(4)))
    assert [int(b["ids"][0, 0]) for b in found] == [0, 1, 2]
    assert [s.data.shape for s in found[0]["ids"].addressable_shards] == [(2, 2)] * 4
    assert found[0]["rate"].sharding.is_fully_replicated


def test_one_batch_is_placed_ahead() -> None:
    requested: list[int] = []
    batches = autopar.shard(source([8] * 5, requested), mesh=mesh_of(4))
    next(batches)
    assert requested == [0, 1]
    next(batches)
    assert requested == [0, 1, 2]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_source_that_fills_one_buffer_again_and_again(devices: int, ahead: int) -> None:
    def given() -> Iterator[Any]:
        for k in range(4):
            buffer[:] = k
            yield {"x": buffer}

    memory = np.zeros(4 * (1 << 16) + 64, np.uint8)
    buffer = memory[-memory.ctypes.data % 64 :][: 4 << 16].view(np.float32).reshape(8, -1)  # which JAX could share
    found = [float(batch["x"][3, 5]) for batch in autopar.shard(given(), mesh=mesh_of(devices), ahead=ahead)]
    assert found == [0, 1, 2, 3]


def test_what_was_read_before_a_source_failed_is_given_out() -> None:
    def given() -> Iterator[Any]:
        yield from source([8, 8])
        raise OSError("no connection")

    batches = autopar.shard(given(), mesh=mesh_of(4), ahead=2)
    assert [int(next(batches)["ids"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="no connection"):
        next(batches)
    assert batches.state()["batch"] == 2


def test_a_smaller_batch_is_an_error_or_dropped_or_padded() -> None:
    with pytest.raises(autopar.ArgumentsError, match="batch 1 has 5 examples, the first one had 8.*last='pad'"):
        list(autopar.shard(source([8, 5]), mesh=mesh_of(4)))
    assert len(list(autopar.shard(source([8, 5]), mesh=mesh_of(4), last="drop"))) == 1
    first, padded = autopar.shard(source([8, 5]), mesh=mesh_of(4), last="pad", mask="weight")
    assert padded["ids"].shape == (8, 2)
    np.testing.assert_array_equal(first["weight"], np.ones(8))
    np.testing.assert_array_equal(padded["weight"], [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(padded["ids"], np.ones((8, 2)))


def test_what_can_not_be_padded() -> None:
    with pytest.raises(autopar.ArgumentsError, match="must be a dict, not a tuple"):
        list(autopar.shard([(np.ones(8),)], mesh=mesh_of(4), last="pad"))
    with pytest.raises(autopar.ArgumentsError, match="has a 'ids' of its own"):
        list(autopar.shard(source([8]), mesh=mesh_of(4), last="pad", mask="ids"))
    with pytest.raises(autopar.ArgumentsError, match="no array with an axis for its examples"):
        list(autopar.shard([3.0], mesh=mesh_of(4)))
    with pytest.raises(autopar.ArgumentsError, match="last='keep'"):
        list(autopar.shard([], last="keep"))  # type: ignore[arg-type]


def test_sizes_that_the_devices_do_not_divide() -> None:
    (batch,) = autopar.shard([(np.arange(3), np.ones((3, 2)))], mesh=mesh_of(4))
    assert batch[0].sharding.is_fully_replicated and batch[1].shape == (3, 2)


def test_the_batch_axis() -> None:
    """Time-major batches: spread, and padded, along their second axis."""
    source = [{"ids": np.arange(3 * n).reshape(3, n), "length": np.int32(n)} for n in (8, 5)]
    first, padded = autopar.shard(source, mesh=mesh_of(4), last="pad", batch_axis=1)
    assert [s.data.shape for s in first["ids"].addressable_shards] == [(3, 2)] * 4
    assert first["length"].sharding.is_fully_replicated
    np.testing.assert_array_equal(padded["ids"][:, :5], source[1]["ids"])
    np.testing.assert_array_equal(padded["ids"][:, 5:], np.repeat(source[1]["ids"][:, -1:], 3, 1))
    np.testing.assert_array_equal(padded["mask"], [1, 1, 1, 1, 1, 0, 0, 0])
    named = {"batch/ids": -1, "batch/mask": 0, "batch/length": None}
    (*_, padded) = autopar.shard(source, mesh=mesh_of(4), last="pad", batch_axis=named)
    assert [s.data.shape for s in padded["mask"].addressable_shards] == [(2,)] * 4
    with pytest.raises(autopar.ArgumentsError, match="'ids' matches nothing in the batch. There are: batch/ids"):
        list(autopar.shard(source, mesh=mesh_of(4), batch_axis={"ids": 1}))
    with pytest.raises(autopar.ArgumentsError, match="give an int, or a mapping"):
        list(autopar.shard([], batch_axis="ids"))  # type: ignore[arg-type]


def test_a_step_takes_what_shard_yields() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    batches = [{"ids": np.arange(16, dtype=np.int32).reshape(8, 2) + k} for k in range(3)]
    mine, theirs = make_state(41), make_state(41)
    for given, batch in zip(autopar.shard(batches, mesh=mesh_of(4)), batches, strict=True):
        (mine, a), (theirs, b) = planned(mine, given), jax.jit(step)(theirs, batch)
        same((mine, a), (theirs, b))
    assert jnp.isfinite(a["loss"])


def batches_of(shards: Any) -> list[Any]:
    return [jax.tree.map(np.asarray, b) for b in shards]


def test_examples_in_arrays_come_in_another_order_each_epoch() -> None:
    data = {"ids": np.arange(24), "rows": np.arange(48).reshape(24, 2), "rate": 0.5}
    found = batches_of(autopar.shard(data, batch_size=8, epochs=2, shuffle=1, mesh=mesh_of(4)))
    assert len(found) == 6
    orders = [np.concatenate([b["ids"] for b in found[k : k + 3]]) for k in (0, 3)]
    assert all(np.array_equal(np.sort(order), np.arange(24)) for order in orders)
    assert not np.array_equal(*orders)
    for batch in found:
        np.testing.assert_array_equal(batch["rows"][:, 0], 2 * batch["ids"])
        assert batch["rate"] == 0.5
    again = batches_of(autopar.shard(data, batch_size=8, epochs=2, shuffle=1, mesh=mesh_of(2)))
    jax.tree.map(np.testing.assert_array_equal, found, again)


def test_examples_one_by_one() -> None:
    """Stacked along the batch axis of each leaf."""
    items = [{"x": np.full(3, k), "y": k} for k in range(8)]
    first, second = autopar.shard(items, batch_size=4, mesh=mesh_of(4), batch_axis={"batch/x": 1})
    assert first["x"].shape == (3, 4) and [s.data.shape for s in first["x"].addressable_shards] == [(3, 1)] * 4
    np.testing.assert_array_equal(second["x"][0], [4, 5, 6, 7])
    np.testing.assert_array_equal(second["y"], [4, 5, 6, 7])
    with pytest.raises(autopar.ArgumentsError, match=r"no leaf that all of a batch share"):
        next(autopar.shard(items, batch_size=4, mesh=mesh_of(4), batch_axis={"batch/y": None}))


def test_examples_that_batches_do_not_use_up() -> None:
    options: Any = {"batch_size": 4, "mesh": mesh_of(4)}
    with pytest.raises(autopar.ArgumentsError, match="the source has 10 examples, which batches of 4 don't use up"):
        autopar.shard(np.arange(10), **options)
    assert len(list(autopar.shard(np.arange(10), last="drop", **options))) == 2
    *_, padded = autopar.shard({"ids": np.arange(10)}, last="pad", **options)
    np.testing.assert_array_equal(padded["ids"], [8, 9, 9, 9])
    np.testing.assert_array_equal(padded["mask"], [1, 1, 0, 0])


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("given", [0, 1, 3, 5, 6])
def test_a_position_is_that_of_the_next_batch(given: int, ahead: int) -> None:
    makers = (
        lambda: autopar.shard(np.arange(24), batch_size=8, epochs=2, shuffle=1, mesh=mesh_of(4), ahead=ahead),
        lambda: autopar.shard([np.arange(8) + k for k in range(3)], epochs=2, mesh=mesh_of(4), ahead=ahead),
    )
    for make in makers:
        reference, first, second = batches_of(make()), make(), make()
        for _ in range(given):
            next(first)
        next(second)
        second.restore(first.state())
        jax.tree.map(np.testing.assert_array_equal, batches_of(second), reference[given:])
        assert second.state()["epoch"] == 1


def test_a_position_behind_the_full_batches() -> None:
    """What a full batch is, the ones that are left out tell."""
    rest = autopar.shard(source([8, 8, 5]), mesh=mesh_of(4), last="pad")
    rest.restore({"epoch": 0, "batch": 2, "seed": -1, "sources": 1})
    (padded,) = rest
    np.testing.assert_array_equal(padded["mask"], [1, 1, 1, 1, 1, 0, 0, 0])


class Seekable:
    """Batches whose iterator keeps its own position, as Grain's do: a dict, or bytes as those of its DataLoader."""

    def __init__(self, kind: type = dict) -> None:
        self.kind, self.read = kind, 0

    def __iter__(self) -> SeekableIterator:
        return SeekableIterator(self)


class SeekableIterator(Iterator[dict[str, np.ndarray]]):
    def __init__(self, source: Seekable) -> None:
        self._source, self._next = source, 0

    def __next__(self) -> dict[str, np.ndarray]:
        if self._next == 4:
            raise StopIteration
        self._source.read += 1
        self._next += 1
        return {"x": np.arange(2 if self._next == 4 else 4) + 10 * self._next}

    def get_state(self) -> Any:
        return {"next": self._next} if self._source.kind is dict else str(self._next).encode()

    def set_state(self, state: Any) -> None:
        self._next = state["next"] if self._source.kind is dict else int(state)


@pytest.mark.parametrize("kind", [dict, bytes])
@pytest.mark.parametrize("given", [0, 2, 3, 4, 6])
def test_a_source_that_keeps_its_own_position_goes_on_from_it(kind: type, given: int) -> None:
    """No batch before it is read again; an epoch's last one isn't full, also where it is the first that is read."""
    options: Any = {"epochs": 2, "last": "pad", "ahead": 2}
    batches = autopar.shard(Seekable(kind), **options)
    for _ in range(given):
        next(batches)
    position = json.loads(json.dumps(batches.state()))
    again = Seekable(kind)
    restored = autopar.shard(again, **options)
    restored.restore(position)
    found, wanted = list(restored), list(batches)
    assert len(found) == 8 - given == again.read
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["mask"], b["mask"])
    if given:
        with pytest.raises(autopar.ArgumentsError, match="is no position of a source"):
            restored.restore({**position, "source": "?"})
            next(restored)


def test_a_generator_is_gone_through_once() -> None:
    with pytest.raises(autopar.ArgumentsError, match="epochs=2: a generator can be read once only"):
        autopar.shard(source([8]), epochs=2, mesh=mesh_of(4))
    batches = autopar.shard(source([8, 8]), mesh=mesh_of(4))
    next(batches)
    batches.restore({"epoch": 0, "batch": 1, "seed": -1, "sources": 1})
    with pytest.raises(autopar.ArgumentsError, match="restore a position before the first batch is asked for"):
        next(batches)
    endless = autopar.shard([np.arange(8)], epochs=None, mesh=mesh_of(4))
    assert [next(endless).shape for _ in range(5)] == [(8,)] * 5
    assert list(autopar.shard([], epochs=None, mesh=mesh_of(4))) == []


def test_what_does_not_fit_the_source() -> None:
    with pytest.raises(autopar.ArgumentsError, match="shuffle= needs examples that can be indexed"):
        autopar.shard(source([8]), shuffle=0)
    with pytest.raises(autopar.ArgumentsError, match="A generator can't; without batch_size= it gives batches"):
        autopar.shard(source([8]), batch_size=8)
    with pytest.raises(autopar.ArgumentsError, match="a list, has no examples"):
        autopar.shard([], batch_size=8)
    with pytest.raises(autopar.ArgumentsError, match="a seed is not negative"):
        autopar.shard(np.arange(8), batch_size=8, shuffle=-1)
    with pytest.raises(autopar.ArgumentsError, match="batch_size=0"):
        autopar.shard(np.arange(8), batch_size=0)
    one, other = (autopar.shard(np.arange(8), batch_size=8, shuffle=seed, mesh=mesh_of(4)) for seed in (1, 2))
    with pytest.raises(autopar.ArgumentsError, match="the position is one with seed=1, and here it is 2"):
        other.restore(one.state())
    small, large = (autopar.shard(np.arange(32), batch_size=size, mesh=mesh_of(4)) for size in (8, 16))
    with pytest.raises(autopar.ArgumentsError, match="one with batch_size=8, and here it is 16.*the same batch_size="):
        large.restore(small.state())
    with pytest.raises(autopar.ArgumentsError, match="in front of batch 5 of an epoch, and the source has 4"):
        small.restore({**small.state(), "batch": 5})
    small.restore({"epoch": 0, "batch": 3, "seed": -1, "sources": 1})  # of an earlier version
    assert len(list(small)) == 1
