"""What `explain` says of the memory that CPU devices of one process take in each step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from tests.support.meshes import mesh_of


def train_step(table: Any, ids: Any) -> Any:
    return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table)


@pytest.mark.parametrize(
    ("ids", "tunables", "is_told"), [(8_192, None, False), (65_536, None, True), (65_536, "x", False)]
)
def test_small_pages_are_told(monkeypatch: pytest.MonkeyPatch, ids: int, tunables: str | None, is_told: bool) -> None:
    """Of 4 MiB of rows on each of four devices; not of 0.5 MiB, nor where the user configures glibc."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if tunables is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    shapes = jax.ShapeDtypeStruct((1_000_000, 64), np.float32), jax.ShapeDtypeStruct((ids,), np.int32)
    step = autopar.parallelize(train_step, strategy="ps", mesh=mesh_of(4))
    text = " ".join(str(autopar.explain(step, *shapes)).split())
    assert ("(4.0 MiB on each): start Python with GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in text) == is_told
