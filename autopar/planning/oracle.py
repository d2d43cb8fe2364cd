"""The contract's oracle: the step's float32 program evaluated in float64.

Every equation is evaluated twice side by side: as it is, and with its floats promoted to float64, its complex numbers
to complex128. What is neither (ids, random bits, predicates, counters) is taken from the first evaluation, so that both
make the same choices. The two states are carried from step to step, so errors accumulate as they do in training. See
docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.emit import while_loop
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal

Array = Any
#: A value and its float64 counterpart (the same object where it is no float).
Pair = tuple[Array, Array]

#: Parameters that name a dtype.
_DTYPES = ("new_dtype", "dtype", "preferred_element_type")


def oracle(block: Block) -> Callable[[Sequence[Array], Sequence[Array]], tuple[list[Array], list[Array]]]:
    """Returns a function of (inputs, promoted inputs) that returns (outputs, float64 outputs), to run under
    `enable_x64`."""

    def run(inputs: Sequence[Array], promoted: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        pairs = _block(block, list(zip(inputs, promoted, strict=True)))
        return [a for a, _ in pairs], [b for _, b in pairs]

    return run


def promote(value: Array) -> Array:
    """Promotes a float to float64, a complex number to complex128; everything else stays as it is."""
    return value.astype(_wide(value.dtype)) if jnp.issubdtype(value.dtype, jnp.inexact) else value


def _wide(dtype: Any) -> Any:
    if jax_compat.is_float(dtype):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _promoted(type_: Any) -> bool:
    return isinstance(type_, ArrayType) and bool(jnp.issubdtype(type_.dtype, jnp.inexact))


def _block(block: Block, inputs: Sequence[Pair]) -> list[Pair]:
    env: dict[Atom, Pair] = dict(zip(block.inputs, inputs, strict=True))

    def read(atom: Atom) -> Pair:
        if isinstance(atom, Literal):
            value = atom.value if isinstance(atom.value, jax.Array) else jnp.asarray(atom.value, atom.type.dtype)
            return value, promote(value)
        return env[atom]

    for equation in block.equations:
        results = _equation(equation, [read(a) for a in equation.inputs])
        env.update(zip(equation.outputs, results, strict=True))
    return [read(a) for a in block.outputs]


def _equation(equation: Equation, operands: list[Pair]) -> list[Pair]:
    control = _CONTROL.get(equation.op)
    if control is not None:
        return control(equation, operands)
    params = equation.original if equation.original is not None else equation.params
    first = jax_compat.bind(equation.primitive, [a for a, _ in operands], params)
    if not any(_promoted(v.type) for v in equation.outputs) or not _follows(equation):
        return [(x, promote(x) if hasattr(x, "dtype") else x) for x in first]
    wide = [b for _, b in operands]
    if equation.op in _SCATTERS:
        second = [_scatter(equation, *wide)]
    else:
        second = jax_compat.bind(equation.primitive, wide, _promote_params(params))
    pairs = zip(first, second, equation.outputs, strict=True)
    return [(a, b if _promoted(v.type) else a) for a, b, v in pairs]


def _follows(equation: Equation) -> bool:
    """Returns whether the equation can be run on float64 operands.

    What has a body of its own (a kernel, a call into another library, a general reduction) can't, and what makes floats
    of bits mustn't.
    """
    if equation.op in ("bitcast_convert_type", "ffi_call") or equation.effects:
        return False
    return equation.op in _SCATTERS or not any(jax_compat.is_jaxpr(v) for v in equation.params.values())


def _promote_params(params: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(params)
    for name in _DTYPES:
        if changed.get(name) is not None:
            changed[name] = _wide(changed[name])
    return changed


_SCATTERS: Mapping[str, Callable[..., Array]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
    "scatter-sub": jax.lax.scatter_sub,
}


def _scatter(equation: Equation, operand: Array, index: Array, updates: Array) -> Array:
    """Makes a scatter anew: its reduction is a program with a dtype of its own."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: equation.params[name] for name in names}
    return _SCATTERS[equation.op](operand, index, updates, **options)


def _scan(equation: Equation, operands: list[Pair]) -> list[Pair]:
    p, body = equation.params, equation.bodies[0]
    consts, carry = p["num_consts"], p["num_carry"]

    def step(state: Sequence[Pair], xs: Sequence[Pair]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
        results = _block(body, [*operands[:consts], *state, *xs])
        return _cast(results[:carry], body.outputs), tuple(results[carry:])

    start = _cast(operands[consts : consts + carry], body.outputs)
    state, stacked = jax.lax.scan(
        step, start, tuple(operands[consts + carry :]), length=p["length"], reverse=p["reverse"]
    )
    return [*state, *stacked]


def _cast(pairs: Sequence[Pair], like: Sequence[Atom]) -> tuple[Pair, ...]:
    """Casts loop carries to strong types."""

    def strong(value: Array, dtype: Any) -> Array:
        return value if jax_compat.is_key(dtype) else jax.lax.convert_element_type(value, dtype)

    kinds = zip(pairs, like, strict=False)
    return tuple((strong(a, t.dtype), strong(b, _wide(t.dtype))) for (a, b), t in kinds)


def _remat(equation: Equation, operands: list[Pair]) -> list[Pair]:
    return _block(equation.bodies[0], operands)


def _cond(equation: Equation, operands: list[Pair]) -> list[Pair]:
    def branch(body: Block) -> Callable[..., tuple[Pair, ...]]:
        return lambda *xs: _cast(_block(body, xs), body.outputs)

    index = jnp.asarray(operands[0][0]).astype(jnp.int32)
    return list(jax.lax.switch(index, [branch(b) for b in equation.bodies], *operands[1:]))


def _while(equation: Equation, operands: list[Pair]) -> list[Pair]:
    condition, body = equation.bodies
    n, m = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    outside, inside = operands[:n], operands[n : n + m]
    start = _cast(operands[n + m :], body.outputs)
    return list(
        while_loop(
            lambda state: _block(condition, [*outside, *state])[0][0],
            lambda state: _cast(_block(body, [*inside, *state]), body.outputs),
            start,
        )
    )


_CONTROL: Mapping[str, Callable[[Equation, list[Pair]], list[Pair]]] = {
    "scan": _scan,
    "remat": _remat,
    "cond": _cond,
    "while": _while,
}
