"""Leaves of which a process has a part: what is done by it alone is an error, and waits for nobody."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import flax.serialization
import jax
import numpy as np
import pytest

import autopar


def assert_no_part_is_pickled(leaf: Any, process: int) -> None:
    """Collective; `process`: this one's number."""
    if process == 0:  # the others don't take part
        for act in (pickle.dumps, flax.serialization.to_bytes):
            with pytest.raises(autopar.CheckpointError, match=r"autopar\.save\(.*autopar\.materialize\("):
                act({"leaf": leaf})
    copied = copy.deepcopy(leaf)
    assert copied is not leaf
    whole = autopar.materialize(leaf)
    np.testing.assert_array_equal(np.asarray(autopar.materialize(copied)), np.asarray(whole))
    doubled = autopar.materialize(leaf * 2)
    np.testing.assert_array_equal(np.asarray(doubled), 2 * np.asarray(whole))
    again = pickle.loads(pickle.dumps(whole))
    assert isinstance(again, jax.Array)
    np.testing.assert_array_equal(again, np.asarray(whole))
