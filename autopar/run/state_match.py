"""Pairs states with the results that are their new values, and warns of arguments that look like unrecognised state.

In `(slot, table, ids) -> (table, slot, loss)` the forms alone would take the slot's new value for the table's.
Arguments and results of one form are therefore paired by dataflow: a result is an argument's new value if it carries it
on.

A step without recognised state runs plain, and a user should know. `arguments.find_states` recognises state only if it
comes back in the same form and can be nothing else. It passes over a lone array behind other arguments (a prediction
has its inputs' shape, and a residual network even adds to them), and over an argument that comes back scaled (so does a
gradient with weight decay, though by less than half: its constant tells). `warn_of_missed_states` names such arguments
without acting on them. It does so only for functions that also have other arguments (data), and that differentiate
something or return two such arguments, as no evaluation does. It also names state that a training step forgets: new
values of some leaves only, or new optimizer slots that aren't returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar import jax_compat
from autopar.analysis.flow import carried, updated
from autopar.errors import StateWarning, warn
from autopar.ir.program import ArrayType, Block
from autopar.jax_types import Pytree, PyTreeDef
from autopar.run.arguments import (
    Argument,
    Call,
    States,
    alike,
    find_states,
    possible_starts,
    subtrees,
    tops,
    type_of_shape,
)

#: Scores of a result's leaf as the new value of an argument's: `old + update`, `decay * old + update`, `old`.
_ADDED, _SCALED, _SAME = 4, 2, 1


def match_states(
    call: Call, block: Block, outputs: Pytree, state_argnums: Sequence[int] | None, batch_argnums: Sequence[int]
) -> States:
    """Finds the states of a traced step, and their new values. Arguments and errors as for `find_states`."""
    states = find_states(call, outputs, state_argnums, batch_argnums)
    score = None
    starts = dict(states.outputs)
    for group in _groups(call, starts):
        others = [(starts[k], starts[k] + len(call.arguments[k].types)) for k in starts if k not in group]
        free = possible_starts(call.arguments[group[0]], outputs, others)
        if len(free) > 1:
            score = score or _scores(call, block)
            starts |= _best({k: starts[k] for k in group}, free, score)
    states = States(starts)
    return states if state_argnums is not None else states.confirmed(call, block, tops(jax.tree.structure(outputs)))


def _groups(call: Call, starts: Mapping[int, int]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for k in starts:
        groups.setdefault(_form(call.arguments[k]), []).append(k)
    return list(groups.values())


def _form(argument: Argument) -> Hashable:
    return argument.treedef, tuple((t.shape, t.dtype) for t in argument.types)


def _scores(call: Call, block: Block) -> Callable[[int, int], int]:
    """Returns a function of an argument and a result's first leaf that scores the result as the argument's new
    value."""
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
    """Returns the pairing of highest score, found by exchanging pairs until nothing improves; ties stay in order."""
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


def warn_of_missed_states(
    name: str, call: Call, outputs: Pytree, block: Block, states: States, batches: Sequence[int]
) -> None:
    """Warns of arguments, or leaves of some, that may be state and weren't recognised. `batches`: positions that the
    user named as no state."""
    differentiates = any(jax_compat.in_backward_pass(e.info) for e in block.walk())
    message = None
    optimizers = [a.name for a in call.arguments if _is_nnx_optimizer(a)]
    if optimizers and not states.outputs:
        message = (
            f"{name} is given {' and '.join(map(repr, optimizers))}, an optimizer of flax.nnx, and returns no state: "
            "what it changes in objects is lost. autopar.integrations.nnx.parallelize runs steps that change objects; "
            "or return the objects, (model, optimizer, ...)"
        )
    elif states.outputs:
        forgotten = _forgotten(call, block, states, batches) if differentiates else None
        if forgotten is not None:
            named = "..." if forgotten.position is None else f"({forgotten.position},)"
            message = (
                f"{name} makes a new value of {forgotten.name!r} and doesn't return it: each step begins with the old "
                f"one. Return it as well; if it is no state, say so: parallelize(step, batch_argnums={named})"
            )
    elif missed := missed_states(call, outputs, block, batches, differentiates=differentiates):
        message = _missed_message(name, missed)
    elif differentiates and (partly := _partly_returned(call, outputs, block, states, batches)):
        argument, path = partly
        message = (
            f"{name}: no argument was recognised as state, so the step runs as under jax.jit, without an update in "
            f"place or by rows. But it returns a new value of a part of {argument.name!r}, {path}. If that is state, "
            f"return all of it in the form in which it was given, optimizer state, too; if not, say "
            "parallelize(step, state_argnums=())"
        )
    if message:
        warn(message, StateWarning)


def _is_nnx_optimizer(argument: Argument) -> bool:
    kind, _ = argument.treedef.node_data() or (type(None), None)
    return any(base.__module__.startswith("flax.nnx") and base.__name__ == "Optimizer" for base in kind.__mro__)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A container or leaf within an argument, with the number of its first leaf in the argument and among all
    inputs."""

    argument: Argument
    treedef: PyTreeDef
    first: int
    input_: int

    @property
    def types(self) -> Sequence[ArrayType]:
        return self.argument.types[self.first : self.first + self.treedef.num_leaves]


def _parts(call: Call, states: States, batches: Sequence[int]) -> Iterator[_Part]:
    """Yields the proper parts of arguments that are neither state nor named as no state."""
    start = 0
    for k, argument in enumerate(call.arguments):
        if k not in states.outputs and argument.position not in batches:
            for treedef, first in subtrees(argument.treedef):
                if treedef != argument.treedef:
                    yield _Part(argument, treedef, first, start + first)
        start += len(argument.types)


def _forgotten(call: Call, block: Block, states: States, batches: Sequence[int]) -> Argument | None:
    """Returns the first argument with slots in the form of a state whose new values the step makes but doesn't
    return."""
    known = [call.arguments[k] for k in states.outputs]
    slots = [
        part
        for part in _parts(call, states, batches)
        if any(_is_alike(part, state.treedef, state.types) for state in known)
    ]
    made = updated(block) if slots else 0
    return next((p.argument for p in slots if made >> p.input_ & (1 << len(p.types)) - 1), None)


def _partly_returned(
    call: Call, outputs: Pytree, block: Block, states: States, batches: Sequence[int]
) -> tuple[Argument, str] | None:
    """Returns an argument of which the output has only a part's new value, and the path of that part's first new
    leaf."""
    leaves, tree = jax.tree.flatten(outputs)
    types = [type_of_shape(leaf) for leaf in leaves]
    evidence = carried(block, scaled="little")
    for part in _parts(call, states, batches) if len(call.arguments) > 1 else ():
        for o, treedef in _parts_returned(part.argument, tree):
            if _is_alike(part, treedef, types[o:]):
                pairs = [(part.input_ + n, o + n) for n in range(len(part.types))]
                new = (i for i, o in pairs if block.outputs[o] is not block.inputs[i] and evidence[o] >> i & 1)
                i = next(new, None)
                if i is not None:
                    return part.argument, part.argument.paths[part.first + i - part.input_]
    return None


def _parts_returned(argument: Argument, tree: Pytree) -> Iterator[tuple[int, Pytree]]:
    """Yields the outermost parts of an output with the number of their first leaf, and the parts of a dictionary with
    some of an argument's keys."""
    for first, treedef in sorted(tops(tree), key=lambda top: top[0]):
        yield first, treedef
        (kind, keys), (own_kind, own_keys) = (t.node_data() or (None, ()) for t in (treedef, argument.treedef))
        if kind is own_kind is dict and set(keys) < set(own_keys):
            for child in treedef.children():
                yield first, child
                first += child.num_leaves


def _is_alike(part: _Part, treedef: PyTreeDef, types: Sequence[ArrayType]) -> bool:
    return part.treedef == treedef and all(map(alike, part.types, types)) and any(t.shape for t in part.types)


def missed_states(
    call: Call, outputs: Pytree, block: Block, batches: Sequence[int], *, differentiates: bool
) -> list[Argument]:
    """Returns the arguments whose new value an outermost part of the output may be."""
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


def _missed_message(name: str, missed: Sequence[Argument]) -> str:
    names = " and ".join(repr(argument.name) for argument in missed)
    positions = tuple(argument.position for argument in missed if argument.position is not None)
    by_name = "" if len(positions) == len(missed) else " and pass it by position"
    shown = f"({', '.join(map(str, positions))}{',' if len(positions) == 1 else ''})" if positions else "(...)"
    return (
        f"{name}: no argument was recognised as state, so the step runs as under jax.jit, without an update in place "
        f"or by rows. But it returns {names} in the same form. If that is state, say parallelize(step, "
        f"state_argnums={shown}){by_name}; if not, state_argnums=()"
    )
