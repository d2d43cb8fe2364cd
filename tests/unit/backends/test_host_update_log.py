"""Which rows in host memory are brought up to date between steps."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.backends.host.update_log import rows_of_call


@pytest.mark.parametrize("extent", [0, 1, 37, 7 * 16, 7 * 16 * 3 - 1, 7 * 16 * 3 + 40])
def test_calls_together_find_each_row_that_lags_once(extent: int) -> None:
    stamps = np.random.default_rng(extent).integers(0, 3, extent).astype(np.int32)
    found = [rows_of_call(stamps, which, 7, lambda some: some == 1) for which in range(7)]
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.flatnonzero(stamps == 1))
    assert max(map(len, found)) <= -(-extent // 7) + 16
