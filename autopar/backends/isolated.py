"""What every device runs by itself in a program that XLA partitions otherwise (`passes.shield`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autopar.backends.devices import Devices
from autopar.backends.reductions import reduce_across

Array = Any


def isolated(
    run: Callable[..., Sequence[Array]],
    devices: Devices,
    operands: Sequence[Array],
    *,
    given: Sequence[int | None],
    returned: int | None,
    reduction: str | None,
) -> Sequence[Array]:
    """Run a function on each device's share of the operands, which are brought there from wherever they are.

    Args:
      run: Takes and returns local arrays.
      devices: The mesh.
      operands: Global arrays.
      given: For each operand the axis along which it is spread; None: every device has all of it.
      returned: The same of all results.
      reduction: How the devices' results are reduced ("sum", "max", ...); None: they aren't.
    """
    names = devices.examples

    def inside(*shares: Array) -> tuple[Array, ...]:
        results = tuple(map(jnp.asarray, run(*shares)))
        return results if reduction is None else tuple(reduce_across(reduction, x, names) for x in results)

    def spec(along: int | None) -> P:
        return P() if along is None else P(*[None] * along, names)

    mapped = jax.shard_map(
        inside, mesh=devices.mesh, in_specs=tuple(map(spec, given)), out_specs=spec(returned), check_vma=False
    )
    return mapped(*operands)
