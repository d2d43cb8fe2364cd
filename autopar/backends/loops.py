"""JAX's while loop, of one example or of many side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def while_loop(condition: Callable[[Any], Array], turn: Callable[[Any], Any], start: Any) -> Any:
    """`lax.while_loop`, whose condition may have axes, as `vmap` makes it.

    They are the first axes of all that the loop carries, and each element says whether that example's loop goes on.
    """

    def kept(state: Any) -> Any:
        going, new = jnp.asarray(condition(state)), turn(state)
        if not going.shape:
            return new

        def chosen(old: Array, new: Array) -> Array:
            which = jax.lax.broadcast_in_dim(going, jnp.shape(new), range(going.ndim))
            return jax.lax.select_n(which, old, new)

        return jax.tree.map(chosen, state, new)

    return jax.lax.while_loop(lambda state: jnp.any(condition(state)), kept, start)
