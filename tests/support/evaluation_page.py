"""Runs docs/evaluation.md as a user would, on whatever devices and processes there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import autopar


def check_page() -> None:
    """Its numbers are those of NumPy. All processes do it together."""
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "evaluation.md", "exec"), found)
    params = {k: np.asarray(x) for k, x in autopar.materialize(found["state"]["params"]).items()}
    scores = params["user"][found["seen"]] @ params["item"].T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(found["items"], best)
    np.testing.assert_array_equal(found["items_by_blocks"], best)
    np.testing.assert_allclose(found["values"], np.take_along_axis(scores, best, 1), rtol=1e-4, atol=1e-6)
    wanted = (best == found["seen"][:, None]).any(1).mean()
    assert abs(found["found"] - wanted) < 1e-6 and wanted > 0.3
    first = next(iter(found["scores"].addressable_shards)).index[0].start or 0
    np.testing.assert_allclose(found["own"], scores[first : first + len(found["own"])], rtol=1e-4, atol=1e-5)
