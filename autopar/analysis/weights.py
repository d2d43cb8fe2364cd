"""Which leaves of a state are weights: those that examples meet. Slots, averages and counts meet sums over them."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from autopar import jax_compat
from autopar.analysis.flow import dependent
from autopar.ir.program import Block, Equation, Program, Var


def weights(program: Program, batch: Mapping[Var, int]) -> list[int]:
    """The inputs, by number, that are weights: floating-point leaves of the state which the step changes, and which
    values that run over the batch follow from, in order.

    What follows from a gradient is no weight any more: a slot that it is added to may meet examples later, in the next
    update of the same step, or in a loss that is logged. (Of gradients that JAX didn't make nobody knows.)

    Args:
      program: An analysed program.
      batch: The axis of each variable that runs over the batch.
    """
    block = program.block
    starts: dict[Var, set[int]] = {}
    for k, out in program.new_states.items():
        var = block.inputs[k]
        if jnp.issubdtype(var.dtype, jnp.floating) and var not in batch and block.outputs[out] is not var:
            starts[var] = {k}
    return sorted(_met(block, starts, batch))


def _met(block: Block, starts: Mapping[Var, set[int]], batch: Mapping[Var, int]) -> set[int]:
    """Finds the leaves that values which meet the batch in a block follow from."""
    reached, gradients, found = dict(starts), set[Var](), set[int]()
    for equation in block.equations:
        atoms = [a for a in equation.inputs if isinstance(a, Var)]
        leaves = {k for a in atoms for k in reached.get(a, ())}
        is_updated = not gradients.isdisjoint(atoms)
        if any(a in batch for a in (*atoms, *equation.outputs)):
            inside = equation.op == "scan" and any(v in batch for v in equation.bodies[0].inputs)
            found |= _met_in_scan(equation, reached, batch) if inside else leaves
            if jax_compat.in_backward_pass(equation.info):
                gradients.update(v for v in equation.outputs if v not in batch)
        elif is_updated:
            gradients.update(equation.outputs)
        elif leaves:
            reached.update((v, leaves) for v in equation.outputs)
    return found


def _met_in_scan(equation: Equation, reached: Mapping[Var, set[int]], batch: Mapping[Var, int]) -> set[int]:
    """Finds them in a loop, in whose iterations weights and their slots are carried along."""
    body = equation.bodies[0]
    pairs = zip(body.inputs, equation.inputs, strict=True)
    starts = {inner: reached[a] for inner, a in pairs if isinstance(a, Var) and a in reached}
    return _met(body, starts, batch)


def goes_on(program: Program, batch: Mapping[Var, int], k: int) -> bool:
    """Whether a leaf's new value follows from the old one, otherwise than by what examples make of it.

    Arguments as of `weights`; `k`: the leaf's input.
    """
    plain = (e for e in program.block.equations if e.bodies or not any(a in batch for a in (*e.inputs, *e.outputs)))
    return program.block.outputs[program.new_states[k]] in dependent(plain, [program.block.inputs[k]])
