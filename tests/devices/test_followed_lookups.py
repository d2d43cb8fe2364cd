"""Tables whose ids depend on their own rows, or that are looked up behind reshapes, on several devices."""

from __future__ import annotations

import jax
import pytest

from tests.support.followed_lookups import STEPS, trained
from tests.support.meshes import mesh_of


@pytest.mark.parametrize("name", STEPS)
def test_they_are_followed(name: str) -> None:
    with jax.enable_x64(True):
        table = trained(name, rtol=1e-10, strategy="ps", mesh=mesh_of(4))
    assert table.lifted, table.reason


@pytest.mark.parametrize("name", ["halves", "a column of groups", "reshaped zeros"])
def test_devices_that_do_not_divide_the_rows(name: str) -> None:
    """Gradients are added to reshaped zeros, which are made of the rows that a device has."""
    with jax.enable_x64(True):
        table = trained(name, rtol=1e-10, strategy="ps", mesh=mesh_of(3))
    assert table.lifted, table.reason
