"""Means of clients are dispatched by a thread of their own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import _dispatched


@jax_compat.enable_x64()
def test_it_has_the_types_of_the_thread_that_asked() -> None:
    (made,) = _dispatched(lambda x: [jnp.cumsum(x) / 3], [np.arange(4.0)])
    assert made.dtype == np.float64
