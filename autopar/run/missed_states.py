"""Arguments that look like state where nothing was found to be it: a step that would run plain without a word.

A train step returns its state updated, in the same form. That is how `arguments.find_states` knows it, but
for what could as well be something else: a lone array behind others (a prediction has its inputs' shape, and a
residual network even adds to them), a state that is returned scaled (so does a gradient with weight decay, though by
less than half: those are told apart here by the constant). Here such arguments are looked for once more, to be told of,
not to be acted on: a user who means them names them.

Told of are only those of a function that has other arguments as well (its data), and either differentiates something or
brings two such arguments back. Evaluation functions do neither.

A training step may also forget a part of its state: it returns new values of some leaves of an argument, or makes new
slots of its optimizer and doesn't return them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.analysis.flow import carried, updated
from autopar.errors import StateWarning, warn
from autopar.ir.program import Block
from autopar.run.arguments import Argument, Call, States, alike, subtrees, tops, type_of_shape


def warn_of_missed_states(
    name: str, call: Call, outputs: Any, block: Block, states: States, batches: Sequence[int]
) -> None:
    """Warn of arguments, or leaves of some, that may be state and aren't taken for it.

    Args:
      name: The step's.
      call: The call.
      outputs: The step's outputs, a pytree of ShapeDtypeStructs.
      block: The traced step.
      states: What was recognised.
      batches: Positions of what is said to be no state.
    """
    differentiates = any(jax_compat.in_backward_pass(e.info) for e in block.walk())
    told = None
    if states.outputs:
        forgotten = _forgotten(call, block, states, batches) if differentiates else None
        if forgotten is not None:
            place = "..." if forgotten.position is None else f"({forgotten.position},)"
            told = (
                f"{name} makes a new value of {forgotten.name!r} and doesn't return it: each step begins with the old "
                f"one. Return it as well; if it is no state, say so: parallelize(step, batch_argnums={place})"
            )
    elif missed := missed_states(call, outputs, block, batches, differentiates=differentiates):
        told = _told(name, missed)
    elif differentiates and (partly := _partly_returned(call, outputs, block, batches)):
        argument, path = partly
        told = (
            f"{name}: no argument was recognised as state, so the step runs as under jax.jit, without an update in "
            f"place or by rows. But it returns a new value of a part of {argument.name!r}, {path}. If that is state, "
            f"return all of it in the form in which it was given, optimizer state, too; if not, say "
            "parallelize(step, state_argnums=())"
        )
    if told:
        warn(told, StateWarning)


def _forgotten(call: Call, block: Block, states: States, batches: Sequence[int]) -> Argument | None:
    """The first argument with slots of a state, in that one's form, of which the step makes new values in vain."""
    forms = [(state.treedef, state.types) for state in map(call.arguments.__getitem__, states.outputs)]
    slots: list[tuple[Argument, int, int]] = []
    start = 0
    for k, argument in enumerate(call.arguments):
        if k not in states.outputs and not argument.is_lone_array and argument.position not in batches:
            slots += [
                (argument, start + first, len(types))
                for node, first in subtrees(argument.treedef)
                for form, types in forms
                if node == form and any(t.shape for t in types) and all(map(alike, argument.types[first:], types))
            ]
        start += len(argument.types)
    made = updated(block) if slots else 0
    return next((argument for argument, first, size in slots if made >> first & (1 << size) - 1), None)


def _partly_returned(call: Call, outputs: Any, block: Block, batches: Sequence[int]) -> tuple[Argument, str] | None:
    """An argument of which an output is a leaf's new value, and that leaf's path; None if there is none."""
    types = [type_of_shape(leaf) for leaf in jax.tree.leaves(outputs)]
    evidence = carried(block, scaled="little")
    leaves = [(argument, n) for argument in call.arguments for n in range(len(argument.types))]
    for i, (argument, n) in enumerate(leaves):
        old = argument.types[n]
        if argument.is_lone_array or argument.position in batches or not old.shape or len(call.arguments) == 1:
            continue
        for o, new in enumerate(types):
            if alike(old, new) and evidence[o] >> i & 1 and block.outputs[o] is not block.inputs[i]:
                return argument, argument.paths[n]
    return None


def missed_states(
    call: Call, outputs: Any, block: Block, batches: Sequence[int], *, differentiates: bool
) -> list[Argument]:
    """The arguments of which an outermost part of the output may be the new value.

    Args:
      call: The call.
      outputs: The step's outputs, a pytree of ShapeDtypeStructs.
      block: The traced step.
      batches: Positions of what is said to be no state.
      differentiates: Whether the step does.
    """
    leaves, tree = jax.tree.flatten(outputs)
    types = [type_of_shape(leaf) for leaf in leaves]
    parts = sorted(tops(tree), key=lambda part: part[0])
    evidence = carried(block, scaled="little" if differentiates else "never")
    missed: list[Argument] = []
    taken: set[int] = set()
    start = 0
    for argument in call.arguments:
        size = len(argument.types)
        for first, node in parts:
            new = range(first, first + size)
            if node != argument.treedef or not size or taken.intersection(new) or argument.position in batches:
                continue
            if not all(map(alike, argument.types, types[first : first + size])):
                continue
            pairs = [(start + n, o) for n, o in enumerate(new) if block.outputs[o] is not block.inputs[start + n]]
            if any(evidence[o] >> k & 1 for k, o in pairs):
                missed.append(argument)
                taken.update(new)
                break
        start += size
    has_data = any(argument.types and argument not in missed for argument in call.arguments)
    return missed if has_data and (len(missed) > 1 or differentiates) else []


def _told(name: str, missed: Sequence[Argument]) -> str:
    """What to tell the user of them."""
    names = " and ".join(repr(argument.name) for argument in missed)
    places = tuple(argument.position for argument in missed if argument.position is not None)
    by_name = "" if len(places) == len(missed) else " and pass it by position"
    shown = f"({', '.join(map(str, places))}{',' if len(places) == 1 else ''})" if places else "(...)"
    return (
        f"{name}: no argument was recognised as state, so the step runs as under jax.jit, without an update in place "
        f"or by rows. But it returns {names} in the same form. If that is state, say parallelize(step, "
        f"state_argnums={shown}){by_name}; if not, state_argnums=()"
    )
