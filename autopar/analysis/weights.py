"""Which leaves of a state are weights: those that examples meet. Slots, averages and counts meet sums over them."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from autopar.ir.program import Program, Var


def weights(program: Program, batch: Mapping[Var, int]) -> list[int]:
    """The inputs, by number, that are weights: floating-point leaves of the state which the step changes, and which
    values that run over the batch follow from, in order.

    Args:
      program: An analysed program.
      batch: The axis of each variable that runs over the batch.
    """
    block = program.block
    reached: dict[Var, set[int]] = {}
    for k, out in program.new_states.items():
        var = block.inputs[k]
        if jnp.issubdtype(var.dtype, jnp.floating) and var not in batch and block.outputs[out] is not var:
            reached[var] = {k}
    found: set[int] = set()
    for equation in block.equations:
        leaves = {k for a in equation.inputs if isinstance(a, Var) for k in reached.get(a, ())}
        if any(a in batch for a in (*equation.inputs, *equation.outputs) if isinstance(a, Var)):
            found |= leaves
        elif leaves:
            reached.update((v, leaves) for v in equation.outputs)
    return sorted(found)
