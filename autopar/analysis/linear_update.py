"""Whether a step's update is linear in gradients: only then is averaging weights what averaging gradients is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax.numpy as jnp

from autopar import jax_compat
from autopar.analysis.local import keeps_partial
from autopar.ir.program import Atom, Equation, Program, Var


def gradient_equations(program: Program) -> set[Equation]:
    """Returns the equations of JAX's backward pass, and those that these follow from. None if there is no such pass."""
    found: set[Equation] = set()
    read: set[Atom] = set()
    for equation in reversed(program.block.equations):
        if jax_compat.in_backward_pass(equation.info) or not read.isdisjoint(equation.outputs):
            found.add(equation)
            read.update(equation.inputs)
    return found


def first_nonlinear(program: Program, gradients: Collection[Equation], weights: Sequence[int]) -> Equation | None:
    """Returns the first equation from gradients or slots to new weights that isn't linear in them all; None: all are.

    Clients that average their weights after each step have the same weights before it. So weights are constants here,
    as is everything that neither gradients nor slots, which stay each client's own, are a part of.

    Args:
      program: The analysed program.
      gradients: The equations that make gradients.
      weights: Inputs, by number.
    """
    block, new = program.block, program.new_states
    slots = (v for k, v in enumerate(block.inputs) if k in new and k not in weights)
    own = {v for v in slots if jnp.issubdtype(v.dtype, jnp.floating)}
    batch = {v for v, input_ in zip(block.inputs, program.inputs, strict=True) if input_.role == "batch"}
    varying: set[Var] = own | batch
    broken: dict[Var, Equation] = {}
    for equation in block.equations:
        atoms = [a if isinstance(a, Var) else None for a in equation.inputs]
        partial = [a in varying for a in atoms]
        if not any(partial):
            continue
        varying.update(equation.outputs)
        if equation in gradients:
            continue
        earlier = next((broken[a] for a in atoms if a in broken), None)
        if earlier is None and keeps_partial(equation, partial) is None:
            earlier = equation
        if earlier is not None:
            broken.update(dict.fromkeys(equation.outputs, earlier))
    results = (block.outputs[new[k]] for k in weights)
    return next((broken[out] for out in results if isinstance(out, Var) and out in broken), None)
