"""Writes blocks, equation by equation or from JAX functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var
from autopar.ir.slicing import clone, eliminate_dead
from autopar.ir.trace import block_of
from autopar.jax_types import Params, Pytree, ValueType

#: Operations that map zeros to zeros.
_KEEPS_ZERO = frozenset(
    {"ap.full", "broadcast_in_dim", "convert_element_type", "copy"}
    | {f"ap.{over}shard" for over in ("", "microbatch_", "tensor_")}
)


@dataclass(eq=False)
class Writer:
    """Collects equations in order."""

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
        type_: ValueType,
        params: Params | None = None,
        bodies: tuple[Block, ...] = (),
    ) -> Var:
        out = Var(type_)
        self.append(Equation(op, tuple(inputs), (out,), params or {}, bodies))
        return out

    def full(self, value: Atom, type_: ArrayType) -> Var:
        """Returns an array that is `value` everywhere."""
        return self.emit("ap.full", (value,), type_, {"shape": type_.shape, "dtype": type_.dtype})

    def zeros(self, type_: ArrayType) -> Var:
        return self.full(Literal.scalar(0, type_.dtype), type_)


@dataclass(eq=False)
class ZeroWriter(Writer):
    """Writer that knows which equation makes each value, and which values are zero."""

    producers: dict[Atom, Equation] = field(default_factory=dict, kw_only=True)
    known_zeros: set[Atom] = field(default_factory=set, kw_only=True)

    def append(self, equation: Equation) -> None:
        super().append(equation)
        self.producers.update(dict.fromkeys(equation.outputs, equation))
        if equation.op in _KEEPS_ZERO and self.is_zero(equation.inputs[0]):
            self.known_zeros.update(equation.outputs)

    def is_zero(self, atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return atom.shape == () and not jax_compat.is_key(atom.dtype) and not np.any(np.asarray(atom.value))
        return atom in self.known_zeros


# --- equations made from a JAX function: a pass writes several operations in place of one ---


def expand(
    fun: Callable[..., Pytree], like: Equation, atoms: Sequence[Atom], output: Var | None = None, *, again: bool = False
) -> list[Equation]:
    """Returns the equations of `fun(*atoms)`, with the line and context of `like`.

    `fun`: returns one array, which an equation computes. `output`: the variable of the result; by default a new one,
    the last equation's output. `again`: `fun` is a lasting object that holds nothing large, so that its trace is cached
    by shapes.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a.type, "weak_type", False)) for a in atoms]
    trace = _traced if again else _traced.__wrapped__
    block = trace(fun, tuple(shapes), jax.config.read("jax_enable_x64"))
    assert _is_last(block), "the last equation computes the result"
    env: dict[Var, Atom] = dict(zip(block.inputs, atoms, strict=True))
    if output is not None:
        env[block.equations[-1].outputs[0]] = output
    copy, _ = clone(block, env)
    return [replace(e, context=like.context, info=like.info, origin=like.origin) for e in copy.equations]


@functools.lru_cache(maxsize=256)
def _traced(fun: Callable[..., Pytree], shapes: tuple[jax.ShapeDtypeStruct, ...], x64: bool) -> Block:
    block, _ = eliminate_dead(block_of(jax.make_jaxpr(fun)(*shapes)))  # a scatter of no updates reads no ids
    # JAX writes no equation for a choice between arrays without elements.
    return block if _is_last(block) else _traced.__wrapped__(lambda *xs: jnp.copy(fun(*xs)), shapes, x64)


def _is_last(block: Block) -> bool:
    """Returns whether the last equation computes the one result."""
    (result,) = block.outputs
    return bool(block.equations) and result is block.equations[-1].outputs[0]
