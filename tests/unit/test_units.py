"""Pure functions, by hand; and the examples in the documentation."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.backends.indices import pull_rows, set_at
from autopar.cost.model import (
    ROWS_PER_ID,
    SMALL_ACCELERATOR_BYTES,
    SMALL_DEFERRED_BYTES,
    SMALL_FAMILY_BYTES,
    deferred_s,
    lifting_pays,
    lifting_pays_on_accelerators,
    touched_bytes,
)
from autopar.garbage import paused_collection
from autopar.ir.figures import format_bytes
from autopar.ir.paths import matches
from tests.support.pairs import pairwise


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("params/emb", "params/emb", True),
        ("params/emb", "params/emb/embedding", True),  # a node covers its leaves
        ("params/emb", "params/embedding", False),
        ("params/item*", "params/item_emb/embedding", True),
        ("**/emb", "emb", True),
        ("**/emb", "params/emb/embedding", True),
        ("**/emb", "params/item_emb", False),
        ("params/*/embedding", "params/a/embedding", True),
        ("params/*/embedding", "params/a/b/embedding", False),  # * stays within a segment
        ("params/**/embedding", "params/a/b/embedding", True),
        ("params/**/embedding", "params/embedding", True),
        ("**", "anything/at/all", True),
        ("**/embedding", "params/a/embedding", True),
        ("*", "params/emb", True),
        ("a.b", "axb", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@pytest.mark.parametrize("numbers", [[2], [9], [2, 9]])
def test_rows_out_of_range_are_dropped(numbers: list[int]) -> None:
    """Beside a slice, where XLA reads another element for a single index out of range."""

    def run(rows: jax.Array, start: jax.Array, numbers: jax.Array) -> jax.Array:
        updates = jnp.full(numbers.shape, 100.0)
        return jax.lax.dynamic_slice_in_dim(rows, start, 9) + set_at(jnp.zeros(9), 0, numbers, updates)

    got = jax.jit(run)(jnp.arange(36.0), jnp.int32(18), jnp.asarray(numbers, jnp.int32))
    np.testing.assert_array_equal(got, np.arange(18.0, 27.0) + 100.0 * (np.arange(9) == 2) * (2 in numbers))


def test_rows_that_are_pulled_are_read_once() -> None:
    """On GPUs XLA would read them again when they are written, from a copy of the table. CPUs show no difference."""
    rows = jax.make_jaxpr(pull_rows, static_argnums=(3, 4))(jnp.ones((9, 2)), jnp.arange(3), 8, 0, True)
    gather = next(e for e in rows.eqns if e.primitive.name == "gather")
    readers = [e.primitive.name for e in rows.eqns if gather.outvars[0] in e.invars]
    assert readers == ["optimization_barrier"]


def test_lifting_pays_by_hand() -> None:
    # 256 bytes a row: 192 / 16 = 12 rows per id.
    assert ROWS_PER_ID == 192
    assert lifting_pays(extent=12_000, ids=1000, row_bytes=256)
    assert not lifting_pays(extent=11_999, ids=1000, row_bytes=256)
    assert not lifting_pays(extent=1000, ids=1, row_bytes=SMALL_FAMILY_BYTES // 1000 - 1)


def test_lifting_of_deferred_rows_pays_later() -> None:
    # 256 bytes a row: 4 x 12 rows per id would be more than 32; 9216 bytes: 4 x 192 / 96 = 8.
    assert lifting_pays(extent=64_000, ids=2000, row_bytes=256, deferred=True)
    assert not lifting_pays(extent=63_999, ids=2000, row_bytes=256, deferred=True)
    assert lifting_pays(extent=16_000, ids=2000, row_bytes=9216, deferred=True)
    assert not lifting_pays(extent=15_999, ids=2000, row_bytes=9216, deferred=True)
    assert not lifting_pays(extent=1000, ids=1, row_bytes=SMALL_DEFERRED_BYTES // 1000, deferred=True)


def test_seconds_of_deferred_rows_by_hand() -> None:
    assert deferred_s(rows=1000, row_elements=100) == pytest.approx(0.5e-3 + 3e-3)


def test_lifting_pays_on_accelerators_for_large_tables() -> None:
    assert lifting_pays_on_accelerators(family_bytes=SMALL_ACCELERATOR_BYTES)
    assert not lifting_pays_on_accelerators(family_bytes=SMALL_ACCELERATOR_BYTES - 1)
    assert not lifting_pays_on_accelerators(family_bytes=1 << 34, deferred=True)


def test_touched_bytes_by_hand() -> None:
    # A table of 100 bytes with one slot: gradient written and read (200), table and slot read and written (400).
    assert touched_bytes(table_bytes=100, family_bytes=200) == 600


def test_format_bytes() -> None:
    assert [format_bytes(x) for x in (0, 1023, 1536, 5 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]


def test_pairwise_covers_every_pair() -> None:
    axes = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r")}
    rows = pairwise(axes)
    for first, second in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(r[first], r[second]) for r in rows} == {(x, y) for x in axes[first] for y in axes[second]}
    assert len(rows) < 3 * 2 * 3


def test_the_collector_is_paused() -> None:
    """By whom it was paused, it is resumed; who has turned it off himself has it off."""
    seen = []
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            with paused_collection():
                seen.append(gc.isenabled())
                with paused_collection():
                    seen.append(gc.isenabled())
                seen.append(gc.isenabled())
            with pytest.raises(ValueError, match="passes"), paused_collection():
                raise ValueError("passes on what is raised")
            seen.append(gc.isenabled())
        finally:
            gc.enable()
    assert seen == [False, False, False, True, False, False, False, False]
