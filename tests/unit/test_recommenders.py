"""JAX's side of `python -m benchmarks torchrec`, at a tiny size; what it is compared with wants PyTorch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.recommenders import TASKS, Jax, Task


@pytest.mark.parametrize(("place", "way"), [("hosts", "slices"), ("hosts", "pairs"), ("devices", "pairs")])
def test_losses_are_those_of_the_plain_step(place: str, way: str) -> None:
    losses = []
    for each in ("plain", place):
        side = Jax(each)
        side.prepare("tiny", way, parts=2)
        *_, found = side.turn(4)
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(set(losses[0])) == 4, "the state is updated"


def test_initial_tables_are_the_same_in_both_libraries_and_in_parts() -> None:
    task = Task((5000,), 8, {}, 4)
    whole = task.table(np, 0)
    np.testing.assert_array_equal(task.table(jnp, 0), whole)
    np.testing.assert_array_equal(task.table(np, 0, (1200, 4), (100, 3)), whole[1200:1300, 4:7])
    assert 0.05 < whole.std() < 0.06 and abs(whole.mean()) < 1e-2 and len(np.unique(whole)) > 39_000


def test_a_batch_has_ids_of_each_table() -> None:
    task = TASKS["DLRM"]
    batch = task.batch(0, 4)
    assert {name: x.shape for name, x in batch.items()} == {
        "ids": (2048, 26),
        "numbers": (2048, 13),
        "labels": (2048,),
    }
    assert (batch["ids"] >= 0).all() and (batch["ids"] < task.rows).all()
    assert 4e6 < sum(task.rows) < 5e6
