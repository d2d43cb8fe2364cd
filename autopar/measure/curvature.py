"""`slope_of`: how fast a step's own update bends, by power iteration: eta h of SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from autopar.jax_types import Array

#: Products with the Jacobian at most, and the relative change of the eigenvalue that ends them.
_PRODUCTS, _TOLERANCE = 64, 1e-3


def slope_of(
    step: Callable[..., Sequence[Array]], leaves: Sequence[Array], weights: Mapping[int, int], *, seed: int = 0
) -> float:
    """Returns the largest eigenvalue of I - dx'/dx, x' being what the step makes of the weights x.

    With SGD x' = x - eta g(x), and so it is eta h, h being the largest eigenvalue of the loss's Hessian on this batch;
    with momentum, too, and with any other optimizer what a step does about the weights' distance from a minimum. It
    takes 64 Jacobian-vector products at most, 128 if the eigenvalue that is largest in size is negative.

    Args:
      step: The plain step, on flat arrays.
      leaves: Its arguments.
      weights: Floating-point arguments -> the results that are their new values.
      seed: Of the first direction.
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
    keys = jax.random.split(jax.random.key(seed), len(x))
    start = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, x, strict=True)]
    largest = _dominant(lambda along: product(x, along, leaves), start)
    if largest >= 0:
        return largest
    # The one that is largest in size is negative: what lies above it, shifted by it, is the largest one.
    return largest + _dominant(
        lambda along: [a - largest * b for a, b in zip(product(x, along, leaves), along, strict=True)], start
    )


def _dominant(product: Callable[[list[Array]], list[Array]], along: list[Array]) -> float:
    """Computes the eigenvalue that is largest in size, of a matrix that is about symmetric."""
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
