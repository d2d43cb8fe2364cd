"""Shape buckets of programs (`backends/host/shape_buckets.py`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.backends.host.shape_buckets import _LOOKS, _WATCHED, ShapeBuckets
from autopar.passes import once_per_row

LIMITS = {0: (10_000, 640), 1: (100, 50)}


def buckets() -> ShapeBuckets:
    return ShapeBuckets({0: (2, 1), 1: (100, 50)}, LIMITS)


def needs(requested: int, owned: int = 300) -> dict[int, tuple[int, int]]:
    return {0: (owned, requested)}


def test_what_does_not_fit_gets_a_larger_bucket() -> None:
    made = buckets()
    assert made.best({}) is made.least and made.least.fits(needs(1, 2)) and not made.least.fits(needs(1, 3))
    assert made.best(needs(190)) is None
    grown = made.grow(needs(190))
    assert grown.fits(needs(190)) and grown.rows[1] == (100, 50)
    assert 190 * 17 // 16 <= grown.rows[0][1] <= 190 * 5 // 4
    assert made.best(needs(190)) is grown and made.best(needs(1, 2)) is made.least
    assert made.grow(needs(639, 9_990)).rows == LIMITS, "never more than the limit"


@pytest.mark.parametrize("ids", [80, 160, 320])
def test_random_batches_seldom_outgrow_the_bucket_of_the_first_one(ids: int) -> None:
    """Of few ids, a sixteenth more than the first batch needed would be outgrown by most trainings."""
    outgrown = 0
    for seed in range(20):
        drawn = np.random.default_rng(seed).zipf(1.3, (50, ids)).clip(max=20_000)
        rows = [np.unique(batch).size for batch in drawn]
        made = ShapeBuckets({0: (2, 1)}, {0: (20_000, ids)})
        first = made.grow({0: (rows[0], rows[0])})
        outgrown += not all(first.fits({0: (n, n)}) for n in rows)
    assert outgrown <= 2


def test_a_larger_bucket_is_made_ahead_and_ranks_have_the_same() -> None:
    """Ranks whose rows grow alike come near their size at different steps."""
    found = []
    for seed in range(4):
        made, rng = ShapeBuckets({0: (2, 1)}, {0: (50_000, 20_000)}), np.random.default_rng(seed)
        rows, ahead = [made.grow({0: (5_000, 4_000)}).rows], 0  # as they agreed on
        for k in range(2_000):
            step = {0: (5_000 + k + int(rng.normal(scale=30)), 4_000 + k + int(rng.normal(scale=20)))}
            assert made.best(step) is not None, "no step waits"
            if made.is_near(step):
                rows.append(made.grow(step).rows)
                assert not made.is_near(step)
                ahead += 1
        found.append(rows)
        assert 1 <= ahead <= 4
    assert all(rows == found[0] for rows in found)


def test_rows_that_do_not_grow_keep_their_size() -> None:
    """Where others grow; and what has its limit is never near it."""
    made = ShapeBuckets({0: (2, 1), 1: (2, 1), 2: (2, 1)}, {0: (9_999, 9_999), 1: (9_999, 9_999), 2: (50, 40)})
    first = made.grow({0: (500, 400), 1: (2_000, 1_000), 2: (49, 39)})
    assert not made.is_near({0: (500, 400), 1: (2_000, 1_000), 2: (50, 40)}) and first.rows[2] == (50, 40)
    grown = made.grow({0: (500, 900), 1: (2_010, 990), 2: (50, 40)})
    assert grown.rows[0][1] > 900 and grown.rows[1] == first.rows[1]


def test_bucket_that_was_outgrown_is_kept() -> None:
    made = buckets()
    small = made.grow(needs(100))
    large = made.grow(needs(300, 200))
    assert large.fits(needs(300, 300)), "no size becomes smaller"
    assert made.best(needs(90)) is small and made.best(needs(250)) is large and made.best(needs(90, 450)) is None


def test_smaller_buckets_are_made_where_most_steps_need_far_fewer_rows() -> None:
    made = buckets()
    largest = made.grow(needs(400))
    rng = np.random.default_rng(0)
    requested = rng.integers(150, 200, 10 * _WATCHED)
    for k, n in enumerate(requested):
        bucket = made.best(needs(int(n)))
        assert bucket is not None and (bucket is largest) == (k < 2 * _WATCHED or n > max(requested[:_WATCHED])), k
        made.ran(needs(int(n)))
    smaller = {made.best(needs(int(n))) for n in range(150, 200)}
    assert 1 < len(smaller) <= 1 + _LOOKS
    assert made.best(needs(400)) is largest


def test_what_is_not_known_ahead_has_its_limit_in_every_bucket() -> None:
    """A step that is under way can't change buckets any more."""
    made = ShapeBuckets({0: (2, 1), 1: (100, 50), 2: (2, 1)}, {**LIMITS, 2: (500, 300)})
    made.grow({0: (50, 40), 2: (50, 40)})
    for _ in range(_WATCHED):
        smaller = made.ran({0: (40, 20), 1: (9, 5), 2: (40, 30)})
    assert smaller is not None and made.best({0: (40, 20), 2: (40, 30)}) is not smaller, "it is compiled first"
    for _ in range(_WATCHED):
        made.ran({0: (40, 20), 1: (9, 5), 2: (40, 30)})
    assert made.best({0: (40, 20), 2: (40, 30)}) is smaller
    assert smaller.rows[1] == (100, 50) and smaller.rows[0][1] < 40 and smaller.fits({1: (100, 50)})


def test_buckets_follow_from_the_batches() -> None:
    taken = []
    for _ in range(2):
        made, rng = buckets(), np.random.default_rng(1)
        found = []
        for n in rng.zipf(1.3, (500, 200)):
            step = needs(np.unique(n).size)
            bucket = made.best(step) or made.grow(step)
            found.append(bucket.rows)
            made.ran(step)
        taken.append(found)
    assert taken[0] == taken[1]
    assert len({str(rows) for rows in taken[0]}) <= 8


@pytest.mark.parametrize("spread", [1, 8])
def test_no_smaller_buckets_where_little_is_saved(spread: int) -> None:
    made = buckets()
    largest = made.grow(needs(400))
    for k in range(5 * _WATCHED):
        made.ran(needs(largest.rows[0][1] - k % spread))
        assert made.best(needs(1, 2)) is made.least and made.best(needs(100)) is largest


def test_a_step_changes_buckets_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once_per_row, "_MOVED", 0.0)

    def step(state: dict[str, jax.Array], ids: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(jnp.tanh(p["emb"][ids] @ p["w"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, state, grads), value

    rng = np.random.default_rng(2)
    state: dict[str, Any] = {"emb": rng.normal(size=(500, 8)), "w": rng.normal(size=(8, 8)) / 3}
    with jax.enable_x64(True):
        state = jax.tree.map(jnp.asarray, state)
        planned = autopar.parallelize(step, strategy={"emb": ("ps", "hosts")})
        mine, wanted = jax.tree.map(jnp.copy, state), state
        plain = jax.jit(step)
        used = []
        for k in range(4 * _WATCHED):
            ids = rng.permutation(256) % (250 if k == 0 else 60 + 30 * (k % 2))
            mine, told = planned(mine, ids)
            wanted, value = plain(wanted, ids)
            np.testing.assert_allclose(told, value, rtol=1e-11)
            assert planned.latest is not None
            made = planned.latest.runner.once_per_row
            used.append(made.counts[0][0] if made else None)
        np.testing.assert_allclose(np.asarray(mine["emb"]), wanted["emb"], rtol=1e-9, atol=1e-12)
        assert used[0] is None and used[-2:] == [64, 96], used
        assert planned.latest.runner.compilations == 4
