"""Random programs on 4 devices whose seeds are always the same, a few; `make fuzz` runs fresh ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fuzzed import check_sample


def test_random_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sample("devices", tmp_path, monkeypatch)
