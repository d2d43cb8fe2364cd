"""Measures the curvature of a step's update, eta h of SGD, by power iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar.jax_types import Array

#: Most products with the Jacobian, and the relative change of the eigenvalue that ends them.
_PRODUCTS, _TOLERANCE = 64, 1e-3


def slope_of(step: Callable[..., Sequence[Array]], leaves: Sequence[Array], weights: Mapping[int, int]) -> float:
    """Returns the largest eigenvalue of I - dx'/dx, where the step maps weights x to x'.

    With SGD x' = x - eta g(x), so it is eta h with h the largest eigenvalue of the loss's Hessian on this batch; with
    momentum, too. With other optimizers it is the rate at which a step shrinks a distance from a minimum. It takes at
    most 64 Jacobian-vector products, or 128 if the eigenvalue of largest magnitude is negative.

    Args:
      step: The plain step, on flat arrays.
      leaves: Its arguments.
      weights: Floating-point arguments -> the results that are their new values.
    """
    numbers = list(weights)

    @jax.jit
    def product(x: Sequence[Array], along: Sequence[Array], leaves: Sequence[Array]) -> list[Array]:
        def moved(x: Sequence[Array]) -> list[Array]:
            results = step(*({**dict(enumerate(leaves)), **dict(zip(numbers, x, strict=True))}.values()))
            return [results[out] for out in weights.values()]

        _, change = jax.jvp(moved, (x,), (along,))
        return [a - b for a, b in zip(along, change, strict=True)]

    x = [jnp.asarray(leaves[k]) for k in numbers]
    keys = jax.random.split(jax.random.key(0), len(x))
    start = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, x, strict=True)]
    largest = _dominant(lambda along: product(x, along, leaves), start)
    if largest >= 0:
        return largest
    # The eigenvalue of largest magnitude is negative: shifted by it, the largest one dominates.
    return largest + _dominant(
        lambda along: [a - largest * b for a, b in zip(product(x, along, leaves), along, strict=True)], start
    )


def _dominant(product: Callable[[list[Array]], list[Array]], along: list[Array]) -> float:
    """Returns the eigenvalue of largest magnitude of a roughly symmetric matrix."""
    value = 0.0
    for _ in range(_PRODUCTS):
        norm = jnp.sqrt(sum(jnp.vdot(a, a).real for a in along))
        if not norm > 0:
            return 0.0
        along = [(a / norm).astype(a.dtype) for a in along]
        image = product(along)
        last, value = value, float(sum(jnp.vdot(a, b).real for a, b in zip(along, image, strict=True)))
        if abs(value - last) <= _TOLERANCE * abs(value):
            break
        along = image
    return value
