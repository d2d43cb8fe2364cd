"""Eight CPU devices in one process. These tests run by themselves: `pytest tests/devices` (`make test` does so)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from autopar.measure import calibrate
from tests.support.rates import RATES

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def rates(
    monkeypatch: pytest.MonkeyPatch,
    environment: Callable[..., None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Nothing is measured, except in tests marked so."""
    if request.node.get_closest_marker("measures") is None:
        for module in ("api", "calibration"):
            monkeypatch.setattr(f"autopar.{module}.rates_of", lambda *_, **__: RATES)
    calibrate._known.clear()
    environment(XDG_CACHE_HOME=str(tmp_path))
