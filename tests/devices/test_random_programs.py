"""Random train steps in which something isn't finite, on 4 devices: what plain JAX returns."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from tests.support import bad_recipes
from tests.support.meshes import mesh_of

AXES = {"batch/ids": 1, "batch/y": 1, "batch/numbers": None}


def check(seeds: range, method: str) -> None:
    def plan(step: Any) -> Any:
        options: dict[str, Any] = {"mesh": mesh_of(4), "batch_axis": AXES, "donate": False}
        return autopar.parallelize(step, strategy=method, **options)

    bad_recipes.check(seeds, "devices", plan)


@pytest.mark.parametrize("method", ["ps", "allreduce_rows"])
def test_random_steps_in_which_something_is_not_finite(method: str) -> None:
    check(range(2), method)


@pytest.mark.long
@pytest.mark.parametrize("first", range(10, 50, 10))
@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows"])
def test_many_random_steps_in_which_something_is_not_finite(method: str, first: int) -> None:
    check(range(first, first + 10), method)
