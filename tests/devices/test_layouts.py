"""Rows in and out of their layouts: what they are, and that no device holds the whole table on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import autopar
from autopar.backends import layouts
from autopar.backends.devices import Devices
from autopar.ir.layout import RowLayout
from tests.support.meshes import mesh_of

FOUR = Devices(mesh_of(4), "data")


def two_axes() -> Devices:
    """Three devices for data, twice."""
    kinds = (AxisType.Auto, AxisType.Auto)
    return Devices(jax.make_mesh((2, 3), ("model", "data"), axis_types=kinds, devices=jax.devices()[:6]), "data")


def table_of(extent: int, width: int, axis: int, dtype: Any = np.float32) -> np.ndarray:
    return np.moveaxis(np.arange(extent * width).reshape(extent, width) % 251, 0, axis).astype(dtype)


@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("extent", [1, 3, 8, 12, 13])
@pytest.mark.parametrize("devices", [1, 2, 4, 5])
def test_a_layout_places_each_row_once(extent: int, devices: int, cyclic: bool) -> None:
    layout = RowLayout(extent, devices, cyclic)
    rows = np.arange(extent)
    indices = layout.storage_index(rows)
    assert len(set(indices)) == extent and indices.max() < layout.stored
    np.testing.assert_array_equal(layout.row(indices), rows)
    assert [int(np.sum(indices // layout.shard_rows == k)) for k in range(devices)] == list(
        layout.rows_on(np.arange(devices))
    )


CASES: list[tuple[Any, ...]] = [
    (FOUR, 41, 5, 0, np.float32),  # neither rows nor columns can be spread equally
    (FOUR, 41, 8, 0, jnp.bfloat16),
    (FOUR, 41, 8, 1, bool),
    (FOUR, 40, 3, 0, np.int32),
    (FOUR, 3, 4, 0, np.uint8),  # fewer rows than devices
    (FOUR, 1, 3, 1, np.float32),
    (two_axes(), 41, 6, 0, np.float32),
    (two_axes(), 40, 5, 1, bool),
]


@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].count}-{c[1]}x{c[2]}-axis{c[3]}-{np.dtype(c[4])}")
def test_rows_go_there_and_back(case: tuple[Any, ...], cyclic: bool) -> None:
    devices, extent, width, axis, dtype = case
    layout = RowLayout(extent, devices.count, cyclic)
    table = table_of(extent, width, axis, dtype)
    expected = np.take(table, np.minimum(layout.row(np.arange(layout.stored)), extent - 1), axis)

    def sources() -> Iterator[Any]:
        yield table
        yield jax.device_put(table, jax.devices()[7])
        for along in (0, 1, None):
            if along is None or table.shape[along] % devices.count == 0:
                yield jax.device_put(table, devices.sharding(along))

    for source in sources():
        stored = layouts.placed(source, layout, axis, devices)
        assert stored.sharding == devices.sharding(axis) and stored.dtype == dtype
        np.testing.assert_array_equal(stored, expected)
    np.testing.assert_array_equal(jax.jit(lambda x: layouts.store(x, layout, axis, devices))(table), expected)
    np.testing.assert_array_equal(jax.jit(lambda x: layouts.whole(x, layout, axis, devices))(stored), table)
    found = autopar.Table(stored, layout, axis)
    np.testing.assert_array_equal(np.asarray(found), table)
    ordinary = found.materialize()
    np.testing.assert_array_equal(ordinary, table)
    to = layouts.even_axis(table.shape, axis, devices.count)
    assert ordinary.sharding.is_equivalent_to(devices.sharding(to), 2)


def test_an_ordinary_table_is_spread_along_what_can_be() -> None:
    assert layouts.even_axis((40, 8), 0, 4) == 0
    assert layouts.even_axis((41, 8), 0, 4) == 1
    assert layouts.even_axis((8, 41), 1, 4) == 0
    assert layouts.even_axis((41, 3), 0, 4) is None
    assert layouts.even_axis((41, 0), 0, 4) is None


INDICES: list[Any] = [
    0,
    -1,
    np.int64(40),
    (3, 2),
    (3, ..., 2),
    (3, slice(1, 3)),
    (3, [0, 2]),
    np.array([[0, -1], [40, 7]]),
    (np.array([1, 40]), [0, 2]),
    (np.array([1, 40]), slice(1, 3)),
    jnp.array([5, -41]),
    slice(30, 36),
    (slice(39, None, -3), 1),
    (slice(0, 2), [1]),
    slice(None),
    (..., 1),
    (None, 1),
    np.arange(41) % 2 == 0,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing(index: Any) -> None:
    table = table_of(41, 3, 0)
    found = autopar.Table(layouts.placed(table, RowLayout(41, 4, True), 0, FOUR), RowLayout(41, 4, True), 0)
    np.testing.assert_array_equal(found[index], table[index])


def test_a_row_that_is_none() -> None:
    layout = RowLayout(41, 4, True)
    found = autopar.Table(layouts.placed(table_of(41, 3, 0), layout, 0, FOUR), layout, 0)
    for row in (41, -42):
        with pytest.raises(IndexError, match=f"row {row} of a table with 41 rows"):
            found[row]
    assert len(list(iter(found))) == 41  # type: ignore[call-overload]


def test_what_reads_the_whole_table_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RowLayout(41, 4, True)
    found = autopar.Table(layouts.placed(table_of(41, 3, 0), layout, 0, FOUR), layout, 0)

    def refuse(*_: Any) -> Any:
        raise AssertionError("read whole")

    monkeypatch.setattr(autopar.Table, "materialize", refuse)
    np.asarray(found)
    for index in (3, np.array([3, 4]), slice(0, 5), (3, slice(None))):
        found[index]
    for index in (slice(0, 20), (slice(None), 1)):
        with pytest.raises(AssertionError, match="read whole"):
            found[index]


# --- memory ---

ROWS, WIDTH = 40_001, 16


def test_reading_and_placing_take_shares_of_memory() -> None:
    """With many devices, so that a few shards are far from the whole table."""
    devices = Devices(mesh_of(8), "data")
    layout = RowLayout(ROWS, 8, True)

    def shards(run: Any, rows: int, along: int | None) -> float:
        compiled = run.lower(spread(rows, along)).compile().memory_analysis()
        return (compiled.temp_size_in_bytes + compiled.output_size_in_bytes) / (layout.shard_rows * WIDTH * 4)

    def spread(rows: int, along: int | None) -> Any:
        return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=devices.sharding(along))

    even = RowLayout(40_000, 8, True)
    found = {
        "read": shards(layouts._to_ordinary(layout, 0, devices, (ROWS, WIDTH)), layout.stored, 0),
        "read, even": shards(layouts._to_ordinary(even, 0, devices, (40_000, WIDTH)), even.stored, 0),
        "place columns": shards(layouts._from_ordinary(layout, 0, devices, 1), ROWS, 1),
        "place copies": shards(layouts._from_ordinary(layout, 0, devices, None), ROWS, None),
        "arrange": shards(layouts.arranger(layout, 0, devices), layout.stored, 0),
        "place, even": shards(layouts._from_ordinary(even, 0, devices, 0), 40_000, 0),
        "sum in a step": shards(
            jax.jit(lambda x: jnp.sum(layouts.whole(x, layout, 0, devices) ** 2)), layout.stored, 0
        ),
        "some rows": shards(jax.jit(lambda x: x[np.arange(9) * 7]), layout.stored, 0),
    }
    assert all(n < 4.1 for n in found.values()), found
    reading = layouts._to_ordinary(layout, 0, devices, (ROWS, WIDTH)).lower(spread(layout.stored, 0))
    assert reading.compile().as_text().count(" all-to-all(") == 1


def test_a_norm_of_a_cyclic_table_in_a_step_takes_shares_of_memory() -> None:
    def step(state: Any, ids: Any) -> Any:
        g = jax.grad(lambda t: jnp.sum(t[ids] ** 2))(state["emb"])
        return {"emb": state["emb"] - 0.1 * g}, jnp.sum(state["emb"] ** 2)

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(8))
    shapes = {"emb": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}, jax.ShapeDtypeStruct((8, 4), jnp.int32)
    memory = planned.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.4 * ROWS * WIDTH * 4
