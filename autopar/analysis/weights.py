"""Finds the leaves of a state that are weights: examples meet those, but slots and averages only sums over examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp

from autopar import jax_compat
from autopar.analysis.flow import dependent
from autopar.analysis.local import keeps_partial
from autopar.ir.program import Atom, Block, Equation, Program, Var


def weights(program: Program, batch: Mapping[Var, int]) -> list[int]:
    """Returns the inputs, by number, that are weights: floating-point leaves of the state which the step changes, and
    which values that run over the batch follow from, in order.

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
    body = equation.bodies[0]
    pairs = zip(body.inputs, equation.inputs, strict=True)
    starts = {inner: reached[a] for inner, a in pairs if isinstance(a, Var) and a in reached}
    return _met(body, starts, batch)


def goes_on(program: Program, batch: Mapping[Var, int], k: int) -> bool:
    """Returns whether a leaf's new value follows from the old one, otherwise than by what examples make of it.

    Arguments as of `weights`; `k`: the leaf's input.
    """
    plain = (e for e in program.block.equations if e.bodies or not any(a in batch for a in (*e.inputs, *e.outputs)))
    return program.block.outputs[program.new_states[k]] in dependent(plain, [program.block.inputs[k]])


# Whether a step's update is linear in gradients: only then is averaging weights what averaging gradients is.


def backward_pass(program: Program) -> set[Equation]:
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
