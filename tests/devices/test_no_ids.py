"""Batches without ids or examples on four devices: each kind of lookup."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.meshes import mesh_of
from tests.support.no_ids import SHAPES, difference
from tests.support.pairs import diagonal


@pytest.mark.parametrize(("shape", "options"), diagonal(SHAPES, {"ps": {"strategy": "ps"}, "auto": {}}))
def test_no_ids(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    assert difference(shape, mesh=mesh_of(4), **options) < 1e-6
