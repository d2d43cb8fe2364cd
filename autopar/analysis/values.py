"""Numbers values: finds equations that compute the same value."""

from __future__ import annotations

from collections.abc import Hashable

import jax
import numpy as np

from autopar.ir.program import Atom, Block, Equation, Literal, Var

#: Pure equations that are not merged all the same: a barrier is there to keep things apart.
_NEVER = frozenset({"optimization_barrier", "remat", "while", "cond"})
#: Parameters that a scatter's name implies.
_IMPLIED = frozenset({"update_jaxpr", "update_consts"})


class Numbering:
    """Remembers equations of one block; equal later ones get the earlier ones' outputs."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[Var, ...]] = {}

    def find(self, equation: Equation) -> tuple[Var, ...] | None:
        """Returns outputs of an equal earlier equation, or None (and the equation is remembered)."""
        if equation.effects or equation.op in _NEVER:
            return None
        try:
            key = (equation.op, params_key(equation), tuple(map(atom_key, equation.inputs)), _bodies_key(equation))
            earlier = self._seen.setdefault(key, equation.outputs)
        except TypeError:  # a parameter that can't be hashed: never equal to another
            return None
        return None if earlier is equation.outputs else earlier


def atom_key(atom: Atom) -> Hashable:
    """Returns a key that is equal for equal values of one block."""
    if isinstance(atom, Literal):
        if atom.shape == () and not isinstance(atom.value, jax.Array):
            value = np.asarray(atom.value)
            return (str(value.dtype), value.tobytes(), atom.type.weak_type)
        return ("array", id(atom.value))
    return atom


def params_key(equation: Equation) -> Hashable:
    """Returns a key that is equal for equal parameters. Raises TypeError if one can't be hashed."""
    scatter = equation.op.startswith("scatter") and equation.op != "scatter"
    items = [(k, v) for k, v in equation.params.items() if not (scatter and k in _IMPLIED)]
    key = tuple(sorted(items, key=lambda item: item[0]))
    hash(key)
    return key


def _bodies_key(equation: Equation) -> Hashable:
    return tuple(block_key(b) for b in equation.bodies)


def block_key(block: Block) -> Hashable:
    """Returns a key that is equal for blocks that compute the same function. Raises TypeError if a parameter can't be
    hashed."""
    numbers: dict[Var, int] = {}

    def key(atom: Atom) -> Hashable:
        if isinstance(atom, Var):
            return numbers.setdefault(atom, len(numbers))
        return atom_key(atom)

    for var in block.inputs:
        key(var)
    lines = []
    for e in block.equations:
        inputs = tuple(map(key, e.inputs))
        lines.append((e.op, params_key(e), inputs, tuple(map(key, e.outputs)), _bodies_key(e), e.effects))
    return (tuple(v.type for v in block.inputs), tuple(lines), tuple(map(key, block.outputs)))
