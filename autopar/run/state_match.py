"""Which result is the new value of which state, where several have one form.

`(slot, table, ids) -> (table, slot, loss)`: by form alone the slot's new value would be the table's. So, of arguments
and results of one form, those are paired of which one carries on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.analysis.flow import carried
from autopar.ir.program import Block
from autopar.run.arguments import Argument, Call, States, find_states, result_places, tops

#: How sure a leaf of a result is the new value of a leaf of an argument: `old + update`, `decay * old + update`, `old`.
_ADDED, _SCALED, _SAME = 4, 2, 1


def match_states(
    call: Call, block: Block, outputs: Any, state_argnums: Sequence[int] | None, batch_argnums: Sequence[int]
) -> States:
    """The states of a traced step, and where their new values are.

    Args:
      call: The call.
      block: The traced step.
      outputs: Its results, a pytree of ShapeDtypeStructs.
      state_argnums: Positions that the user named as state; None to find them.
      batch_argnums: Positions of what is no state.

    Raises:
      StateError, ArgumentsError: as `find_states` does.
    """
    states = find_states(call, outputs, state_argnums, batch_argnums)
    score = None
    starts = dict(states.outputs)
    for group in _groups(call, starts):
        others = [(starts[k], starts[k] + len(call.arguments[k].types)) for k in starts if k not in group]
        free = result_places(call.arguments[group[0]], outputs, others)
        if len(free) > 1:
            score = score or _scores(call, block)
            starts |= _best({k: starts[k] for k in group}, free, score)
    states = States(starts)
    return states if state_argnums is not None else states.confirmed(call, block, tops(jax.tree.structure(outputs)))


def _groups(call: Call, starts: Mapping[int, int]) -> list[list[int]]:
    """States of one form."""
    groups: dict[Any, list[int]] = {}
    for k in starts:
        groups.setdefault(_form(call.arguments[k]), []).append(k)
    return list(groups.values())


def _form(argument: Argument) -> Any:
    return argument.treedef, tuple((t.shape, t.dtype) for t in argument.types)


def _scores(call: Call, block: Block) -> Callable[[int, int], int]:
    """A function of an argument and a result's first leaf: how sure they are old and new."""
    added, scaled = carried(block, scaled="never"), carried(block, scaled="ever")
    starts = [0]
    for argument in call.arguments:
        starts.append(starts[-1] + len(argument.types))

    def of_leaf(i: int, o: int) -> int:
        if block.outputs[o] is block.inputs[i]:
            return _SAME
        return _ADDED if added[o] >> i & 1 else _SCALED if scaled[o] >> i & 1 else 0

    return lambda k, first: sum(of_leaf(i, first + i - starts[k]) for i in range(starts[k], starts[k + 1]))


def _best(starts: dict[int, int], free: Sequence[int], score: Callable[[int, int], int]) -> dict[int, int]:
    """The pairs with the highest score; where nothing tells, in order: improved by turns until no turn improves it."""
    improved = True
    while improved:
        improved = False
        for k in starts:
            for first in free:
                other = next((j for j in starts if starts[j] == first and j != k), None)
                before = score(k, starts[k]) + (0 if other is None else score(other, first))
                after = score(k, first) + (0 if other is None else score(other, starts[k]))
                if after > before:
                    if other is not None:
                        starts[other] = starts[k]
                    starts[k] = first
                    improved = True
    return starts
