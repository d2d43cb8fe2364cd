"""`shard`: batches from any source over the devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

from .meshes import mesh_of
from .test_rows import make_state, same, step


def source(sizes: list[int], asked: list[int] | None = None) -> Iterator[dict[str, Any]]:
    for k, size in enumerate(sizes):
        if asked is not None:
            asked.append(k)
        yield {"ids": np.full((size, 2), k, np.int32), "rate": np.float32(k)}


def test_batches_are_spread_over_the_devices() -> None:
    found = list(autopar.shard(source([8, 8, 8]), mesh=mesh_of(4)))
    assert [int(b["ids"][0, 0]) for b in found] == [0, 1, 2]
    assert [s.data.shape for s in found[0]["ids"].addressable_shards] == [(2, 2)] * 4
    assert found[0]["rate"].sharding.is_fully_replicated


def test_one_batch_is_placed_ahead() -> None:
    asked: list[int] = []
    batches = autopar.shard(source([8] * 5, asked), mesh=mesh_of(4))
    next(batches)
    assert asked == [0, 1]
    next(batches)
    assert asked == [0, 1, 2]


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
