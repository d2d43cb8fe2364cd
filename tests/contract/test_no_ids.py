"""Batches without ids or examples: each kind of lookup, on one device and on hosts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.no_ids import SHAPES, difference


@pytest.mark.parametrize("options", [{}, {"strategy": ("ps", "hosts")}], ids=["one device", "hosts"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_ids(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    assert difference(shape, **options) < 1e-6
