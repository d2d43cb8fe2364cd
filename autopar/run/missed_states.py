"""Arguments that look like state where nothing was found to be it: a step that would run plain without a word.

A train step returns its state updated, in the same form. That is how `arguments.find_states` knows it, but
for what could as well be something else: a lone array behind others (a prediction has its inputs' shape, and a
residual network even adds to them), a state that is returned scaled (so does a gradient with weight decay, though by
less than half: those are told apart here by the constant). Here such arguments are looked for once more, to be told of,
not to be acted on: a user who means them names them.

Told of are only those of a function that has other arguments as well (its data), and either differentiates something or
brings two such arguments back. Evaluation functions do neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.analysis.flow import carried
from autopar.errors import StateWarning, warn
from autopar.ir.program import Block
from autopar.run.arguments import Argument, Call, alike, tops, type_of_shape


def warn_of_missed_states(name: str, call: Call, outputs: Any, block: Block, batches: Sequence[int]) -> None:
    """Warn of arguments that may be the state of a step of which nothing was recognised as such; as `missed_states`."""
    missed = missed_states(call, outputs, block, batches)
    if missed:
        warn(_told(name, missed), StateWarning)


def missed_states(call: Call, outputs: Any, block: Block, batches: Sequence[int]) -> list[Argument]:
    """The arguments of which an outermost part of the output may be the new value.

    Args:
      call: The call.
      outputs: The step's outputs, a pytree of ShapeDtypeStructs.
      block: The traced step.
      batches: Positions of what is said to be no state.
    """
    leaves, tree = jax.tree.flatten(outputs)
    types = [type_of_shape(leaf) for leaf in leaves]
    parts = sorted(tops(tree), key=lambda part: part[0])
    differentiates = any(jax_compat.in_backward_pass(e.info) for e in block.walk())
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
