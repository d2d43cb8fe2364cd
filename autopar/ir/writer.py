"""A block being written: its equations so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar import jax_compat
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var

#: Of zeros these make zeros.
_KEEPS_ZERO = frozenset(
    {"ap.full", "broadcast_in_dim", "convert_element_type", "copy"}
    | {f"ap.{over}shard" for over in ("", "microbatch_", "tensor_")}
)


@dataclass(eq=False)
class Writer:
    """Equations in order."""

    equations: list[Equation] = field(default_factory=list, kw_only=True)

    def append(self, equation: Equation) -> None:
        self.equations.append(equation)

    def extend(self, equations: Iterable[Equation]) -> None:
        for equation in equations:
            self.append(equation)

    def emit(
        self,
        op: str,
        inputs: Sequence[Atom],
        type_: Any,
        params: Mapping[str, Any] | None = None,
        bodies: tuple[Block, ...] = (),
    ) -> Var:
        """Append an operation of ours; its result."""
        out = Var(type_)
        self.append(Equation(op, tuple(inputs), (out,), params or {}, bodies))
        return out

    def full(self, value: Atom, type_: ArrayType) -> Var:
        """A scalar everywhere."""
        return self.emit("ap.full", (value,), type_, {"shape": type_.shape, "dtype": type_.dtype})

    def zeros(self, type_: ArrayType) -> Var:
        return self.full(Literal.scalar(0, type_.dtype), type_)


@dataclass(eq=False)
class ZeroWriter(Writer):
    """One that knows what makes each value, and which values are zero (`known_zeros`)."""

    producers: dict[Atom, Equation] = field(default_factory=dict, kw_only=True)
    known_zeros: set[Atom] = field(default_factory=set, kw_only=True)

    def append(self, equation: Equation) -> None:
        super().append(equation)
        self.producers.update(dict.fromkeys(equation.outputs, equation))
        if equation.op in _KEEPS_ZERO and self.is_zero(equation.inputs[0]):
            self.known_zeros.update(equation.outputs)

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero."""
        if isinstance(atom, Literal):
            return atom.shape == () and not jax_compat.is_key(atom.dtype) and not np.any(np.asarray(atom.value))
        return atom in self.known_zeros
