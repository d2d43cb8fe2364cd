"""`top_k`: the best items for each query, without all scores at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.errors import ArgumentsError
from autopar.jax_types import Array, Leaf


def top_k(queries: Array, items: Array, k: int, *, block: int = 16_384) -> tuple[Array, Array]:
    """Finds the k items with the largest inner products with each query, in descending order.

    It returns the same as `jax.lax.top_k(queries @ items.T, k)` (among equal items the smaller number comes first), but
    goes through the items block by block: memory for scores is [..., block], not [..., V].

    Args:
      queries: [..., D].
      items: [V, D]: a table, or an array of features.
      k: Number of items.
      block: Items that are scored at a time.

    Returns:
      Inner products, [..., k], and numbers of items, int32[..., k].

    Raises:
      ArgumentsError: there are no k items.

    Example:
      >>> import jax.numpy as jnp, autopar
      >>> values, numbers = autopar.top_k(jnp.ones((1, 2)), jnp.array([[1.0, 0], [2, 2], [3, 0]]), 2)
      >>> values.tolist(), numbers.tolist()
      ([[4.0, 3.0]], [[1, 2]])
    """
    count = items.shape[0]
    if not 0 < k <= count:
        raise ArgumentsError(f"top_k: k={k}, and there are {count} items")
    size = min(count, max(k, block))
    whole = count // size

    def better(found: tuple[Array, Array], rows: Array, first: Leaf) -> tuple[Array, Array]:
        scores = queries @ rows.T
        numbers = jnp.broadcast_to(first + jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
        values, order = jax.lax.top_k(jnp.concatenate([found[0], scores], -1), k)
        return values, jnp.take_along_axis(jnp.concatenate([found[1], numbers], -1), order, -1)

    def next_block(found: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], None]:
        rows = jax.lax.dynamic_slice_in_dim(items, n * size, size)
        return better(found, rows, n * size), None

    values, numbers = jax.lax.top_k(queries @ items[:size].T, k)
    found, _ = jax.lax.scan(next_block, (values, numbers), jnp.arange(1, whole, dtype=jnp.int32))
    return better(found, items[whole * size :], whole * size) if count % size else found
