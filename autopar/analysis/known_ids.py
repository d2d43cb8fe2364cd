"""Ids that are known before a lookup's own are: those of its rows alone, or candidates among which its rows are.

    q[states, q[states].argmax(-1)]         which rows: states; the column alone depends on rows
    t[candidates[top_k(u @ t[candidates])]] which rows: some of the candidates

A route needs ids before any row is read, and may have more than are looked up. So ids that depend on rows of their own
table don't keep it dense where others are known to include them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.expand import expand
from autopar.ir.program import Atom, Equation, Literal
from autopar.ir.rowspace import Access, KnownIds

#: Hand all elements on, in whatever shape.
_SHAPED = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy"})


def known_ids(access: Access, producers: Mapping[Atom, Equation]) -> Iterator[KnownIds]:
    """Yields ids that include those of an access, the narrower ones first.

    Args:
      access: A gather or scatter.
      producers: What makes the values of the block that it stands in.
    """
    equation = access.equation
    if not (equation.op == "gather" or equation.op.startswith("scatter")):
        return
    numbers = equation.params["dimension_numbers"]
    mapped = numbers.start_index_map if equation.op == "gather" else numbers.scatter_dims_to_operand_dims
    column = _column(equation.inputs[1], mapped.index(access.axis), producers)
    if column is None:
        return
    if column is not equation.inputs[1]:
        yield KnownIds((), column)
    if access.path:
        return
    candidates = _Candidates(producers)
    compute = candidates.of(column)
    if compute is not None and candidates.source is not None and 0 not in candidates.source.shape:
        atoms = (candidates.source, *candidates.scalars)
        made = expand(lambda *values: compute(values)[:, None], equation, atoms)
        yield KnownIds(tuple(made), made[-1].outputs[0])


def _column(index: Atom, position: int, producers: Mapping[Atom, Equation]) -> Atom | None:
    """Returns one component of index vectors, [..., 1], as it is before they are joined; None where it can't be had."""
    if index.shape[-1] == 1:
        return index
    joined = producers.get(index)
    if joined is None or joined.op != "concatenate" or joined.params["dimension"] != len(index.shape) - 1:
        return None
    for part in joined.inputs:
        if position == 0 and part.shape[-1] == 1:
            return part
        position -= part.shape[-1]
        if position < 0:
            return None
    return None


@dataclass(eq=False)
class _Candidates:
    """Finds an array of which ids are elements, one by one the same function of them.

    Attributes:
      producers: What makes the values of the block.
      source: The array; None until it is found.
      scalars: What the function depends on besides.
    """

    producers: Mapping[Atom, Equation]
    source: Atom | None = None
    scalars: list[Atom] = field(default_factory=list)
    _picked: Equation | None = None

    def of(self, atom: Atom) -> Callable[..., Any] | None:
        """Returns the function of (the source, the scalars) that gives all values that the ids may have, flat."""
        equation = self.producers.get(atom)
        while equation is not None and equation.op in _SHAPED and equation.inputs[0].shape != ():
            atom = equation.inputs[0]
            equation = self.producers.get(atom)
        return self._elements(atom)

    def _elements(self, atom: Atom) -> Callable[..., Any] | None:
        """Returns the function for a value in the shape in which it was picked; None of floats.

        A second computation of floats could round otherwise.
        """
        if jax_compat.is_key(atom.dtype) or np.dtype(atom.dtype).kind not in "iub":
            return None
        if atom.shape == ():
            return self._scalar(atom)
        equation = self.producers.get(atom)
        if equation is None:
            return None
        if equation.op == "gather":
            return self._pick(equation)
        if equation.op == "broadcast_in_dim" and equation.inputs[0].shape == ():
            return self._scalar(equation.inputs[0])
        if equation.op not in ELEMENTWISE or any(a.shape not in ((), atom.shape) for a in equation.inputs):
            return None
        parts = [self._elements(a) for a in equation.inputs]
        if any(part is None for part in parts):
            return None
        params = {**equation.params, "sharding": None} if "sharding" in equation.params else equation.params

        def compute(values: Any) -> Any:
            operands = [part(values) for part in parts if part is not None]
            shape = max((np.shape(x) for x in operands), key=len)
            if equation.op == "select_n":  # which takes no scalars among arrays
                operands = [jnp.broadcast_to(x, shape) for x in operands]
            return jax_compat.bind(equation.primitive, operands, params)[0]

        return compute

    def _scalar(self, atom: Atom) -> Callable[..., Any]:
        if isinstance(atom, Literal):
            return lambda values: np.asarray(atom.value, atom.dtype)
        if atom not in self.scalars:
            self.scalars.append(atom)
        place = 1 + self.scalars.index(atom)
        return lambda values: values[place]

    def _pick(self, equation: Equation) -> Callable[..., Any] | None:
        """Returns the function for what is picked from the source, by one gather, so that elements belong together."""
        if self._picked not in (None, equation) or np.dtype(equation.outputs[0].dtype).kind not in "iu":
            return None
        self._picked, self.source = equation, equation.inputs[0]
        fill = _filled(equation)

        def compute(values: Any) -> Any:
            flat = values[0].reshape(-1)
            return flat if fill is None else jnp.append(flat, jnp.asarray(fill, flat.dtype))

        return compute


def _filled(equation: Equation) -> Any:
    """Returns what a gather of integers gives where an index is out of range; None if that is an element."""
    if "FILL" not in str(equation.params["mode"]):
        return None
    fill, dtype = equation.params["fill_value"], np.dtype(equation.outputs[0].dtype)
    if fill is not None:
        return fill
    return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
