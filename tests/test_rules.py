"""Rule truth: what each primitive's rule claims, against brute force on small arrays of small integers.

Every case applies one op to values of row space. The step is analysed, each of its equations is run, and whatever
the analysis says of a variable is checked: a `Row` must not change when another row of the operands does, and must be
on the untouched rows what its `off` says; a `Free` must be the same all along its axes; a lookup must read no
untouched row. What mixes rows must be refused or read whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import jax_compat
from autopar.arguments import describe, find_states, read_call
from autopar.ir.program import Block, Equation, Literal, Program, Var
from autopar.ir.rowspace import Const, Free, Row, RowFacts, Same
from autopar.ir.rules import RULES
from autopar.ir.trace import block_of
from autopar.passes.analyze_rows import analyze_rows
from autopar.passes.classify import classify

ROWS = 5
TOUCHED = (1, 3)

#: Names that no public function of jax.lax or jax.numpy leads to.
UNREACHABLE = {
    "copy_p": "named `copy` by JAX; the variable is called copy_p",
    "mul_add": "no such primitive in jax 0.10 to 0.12",
    "random_bits_like": "no such primitive in jax 0.10 to 0.12",
    "pvary": "inside shard_map only",
}
#: Primitives of newer versions: jax 0.12's derivative of tanh.
NEWER = {"one_minus_square"}


@dataclass(frozen=True)
class Rows:
    """What a case may use: leaves with ROWS rows, the gradient `g` of one of them, dense values."""

    t: Any  # f32[5, 3], the table
    s: Any  # f32[5], a slot
    m: Any  # f32[5, 2, 2], too long for a bfloat16
    h: Any  # bf16[5, 3]
    ids: Any  # int32[2]: 1 and 3
    up: Any  # f32[2, 3], new rows
    x: Any  # f32[5, 3], dense
    k: Any  # f32[]
    g: Any  # f32[5, 3], zero off the touched rows

    @property
    def q(self) -> Any:
        return self.t.astype(jnp.int32)

    @property
    def d(self) -> Any:
        return self.g.astype(jnp.int32)


def _arguments() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    rng = np.random.default_rng(7)

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(1, 5, shape).astype(np.float32)

    state = {
        "t": ints(ROWS, 3),
        "s": ints(ROWS),
        "m": 2 * ints(ROWS, 2, 2) + 299,
        "h": jnp.asarray(ints(ROWS, 3), jnp.bfloat16),
    }
    batch = {"ids": np.asarray(TOUCHED, np.int32), "up": ints(2, 3), "x": ints(ROWS, 3), "k": np.float32(3)}
    return jax.tree.map(jnp.asarray, state), jax.tree.map(jnp.asarray, batch)


Build = Callable[[Rows], Any]


def _analysed(build: Build) -> Program:
    """A step that looks rows up and trains on them by SGD, and does what the case does besides."""

    def step(state: Any, batch: Any) -> Any:
        g = jnp.zeros_like(state["t"]).at[batch["ids"]].add(batch["up"])
        build(Rows(**state, **batch, g=g))
        return {**state, "t": state["t"] - 0.5 * g}, state["t"][batch["ids"]].sum()

    call = read_call(step, _arguments(), {}, frozenset())
    traced = jax_compat.trace(step, *call.shapes)
    inputs, outputs = describe(call, find_states(call, traced.out_info, None), traced.out_info)
    return analyze_rows(classify(Program(block_of(traced.jaxpr), inputs, outputs))[0])[0]


# --- running a block, equation by equation ---


@dataclass(frozen=True)
class Event:
    """An equation that was run, with its operands' and results' values."""

    equation: Equation
    operands: list[Any]
    results: list[Any]


def _run(block: Block, inputs: Sequence[Any]) -> Iterator[Event]:
    """Runs a block and the bodies of its scans (each iteration) and remats."""
    env: dict[Var, Any] = dict(zip(block.inputs, inputs, strict=True))
    for equation in block.equations:
        operands = [a.value if isinstance(a, Literal) else env[a] for a in equation.inputs]
        results = _apply(equation, operands)
        env.update(zip(equation.outputs, results, strict=True))
        yield Event(equation, operands, results)
        if equation.op == "remat":
            yield from _run(equation.bodies[0], operands)
        elif equation.op == "scan":
            yield from _run_scan(equation, operands)


def _run_scan(equation: Equation, operands: Sequence[Any]) -> Iterator[Event]:
    p, body = equation.params, equation.bodies[0]
    consts, end = p["num_consts"], p["num_consts"] + p["num_carry"]
    state = list(operands[consts:end])
    for k in range(p["length"]):
        inputs = [*operands[:consts], *state, *(x[k] for x in operands[end:])]
        env = dict(zip(body.inputs, inputs, strict=True))
        for event in _run(body, inputs):
            yield event
            env.update(zip(event.equation.outputs, event.results, strict=True))
        outs = body.outputs[: p["num_carry"]]
        state = [a.value if isinstance(a, Literal) else env[a] for a in outs]


def _apply(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    params = equation.original if equation.original is not None else equation.params
    return jax_compat.bind(equation.primitive, [jnp.asarray(x) for x in operands], params)


# --- checks ---


def _check(program: Program) -> set[str]:
    """Check all claims; the ops of equations that rows come out of, or are looked up or reduced by."""
    facts: RowFacts = program.rows
    inputs = jax.tree.leaves(_arguments())
    leaves = dict(enumerate(np.asarray(x) for x in inputs))
    seen = set()
    for event in _run(program.block, inputs):
        equation = event.equation
        values = [facts.value(a) for a in equation.inputs]
        results = [facts.value(v) for v in equation.outputs]
        for value, result in zip(results, event.results, strict=True):
            _check_off(equation, value, np.asarray(result), leaves)
        if not equation.bodies and any(isinstance(v, Row) for v in results):
            _check_parallel(event, values, results)
        role = facts.roles.get(equation)
        if role in ("lookup", "contract"):
            _check_reads_touched(event, values)
        if role in ("lookup", "contract", "reduce") or any(isinstance(v, (Row, Free)) for v in results):
            seen.add(equation.op)
    return seen


def _check_off(equation: Equation, value: Any, result: np.ndarray, leaves: dict[int, np.ndarray]) -> None:
    if isinstance(value, Free):
        for axis in value.axes - {value.index_axis}:
            np.testing.assert_array_equal(result, np.broadcast_to(result.take([0], axis), result.shape), equation.op)
        if isinstance(value.off, Const):
            _check_const(equation, value.off, result)
    elif isinstance(value, Row):
        rows = np.delete(np.moveaxis(result, value.axis, 0), TOUCHED, 0)
        if isinstance(value.off, Const):
            _check_const(equation, value.off, rows)
        elif isinstance(value.off, Same):
            old = np.delete(leaves[value.off.leaf], TOUCHED, 0).reshape(len(rows), -1).astype(rows.dtype)
            new = rows.reshape(len(rows), -1)
            if new.shape == old.shape:
                np.testing.assert_array_equal(new, old, f"{equation.op}: unchanged off the rows")
            else:  # a broadcast of the leaf
                assert all(set(a) == set(b) for a, b in zip(new, old, strict=True)), equation.op


def _check_const(equation: Equation, off: Const, actual: np.ndarray) -> None:
    expected = np.broadcast_to(np.asarray(off.value), actual.shape)
    exact = off.is_zero or off.is_one or actual.dtype.kind in "bi"
    np.testing.assert_allclose(actual, expected, rtol=0 if exact else 1e-6, err_msg=f"{equation.op}: {off}")


def _changed(operand: Any, axis: int, row: int) -> jax.Array:
    """The operand with one row changed."""
    rows = np.moveaxis(np.array(operand), axis, 0)
    rows[row] = ~rows[row] if rows.dtype == np.bool_ else rows[row] + np.asarray(1, rows.dtype)
    return jnp.asarray(np.moveaxis(rows, 0, axis))


def _with_row_changed(event: Event, values: Sequence[Any], row: int, const: bool = True) -> list[Any]:
    operands = []
    for operand, value in zip(event.operands, values, strict=True):
        change = isinstance(value, Row) and (const or not isinstance(value.off, Const))
        operands.append(_changed(operand, value.axis, row) if change else operand)
    return operands


def _check_parallel(event: Event, values: Sequence[Any], results: Sequence[Any]) -> None:
    """Changing a row of all row operands changes that row of the results only."""
    if not any(isinstance(v, Row) for v in values):
        return
    for row in range(ROWS):
        again = _apply(event.equation, _with_row_changed(event, values, row))
        for value, old, new in zip(results, event.results, again, strict=True):
            if isinstance(value, Row):
                rest = [np.delete(np.asarray(x), row, value.axis) for x in (old, new)]
                np.testing.assert_array_equal(*rest, f"{event.equation.op}: row {row} changes others")


def _check_reads_touched(event: Event, values: Sequence[Any]) -> None:
    """No untouched row is read by a lookup, nor by a product with rows that are zero there."""
    const = event.equation.op != "dot_general"
    for row in set(range(ROWS)) - set(TOUCHED):
        again = _apply(event.equation, _with_row_changed(event, values, row, const))
        np.testing.assert_array_equal(again[0], event.results[0], f"{event.equation.op} reads row {row}")


# --- cases: what is done to rows ---


def _unary(fun: Callable[[Any], Any]) -> Build:
    def build(r: Rows) -> None:
        for value in (r.t, r.t / 8, r.g, r.g + 1, r.g + 2, jnp.full_like(r.t, r.k), jnp.zeros_like(r.t)):
            fun(value)

    return build


def _binary(fun: Callable[[Any, Any], Any], dtype: Any = jnp.float32) -> Build:
    """Pairs of rows, of values that are constant off the rows, of dense ones, of constants."""

    def build(r: Rows) -> None:
        atoms = (r.t, r.g, r.g + 1, r.g - 3, r.x, jnp.full_like(r.t, r.k), jnp.zeros_like(r.t))
        atoms = tuple(a.astype(dtype) for a in atoms)
        for a in atoms:
            for b in (*atoms, *np.asarray([0, 1, 2], dtype)):
                fun(a, b)
        for b in atoms[:4]:
            fun(np.asarray(2, dtype), b)

    return build


def _booleans(fun: Callable[..., Any]) -> Build:
    def build(r: Rows) -> None:
        atoms = (r.t > 2, r.g == 0, r.g != 0, r.x > 2, jnp.ones_like(r.t, bool))
        for pair in itertools.product(atoms, atoms):
            fun(*pair)

    return build


def _each(*funs: Callable[[Rows], Any]) -> Build:
    return lambda r: [fun(r) for fun in funs]


def _along(fun: Callable[..., Any]) -> Build:
    return _each(lambda r: fun(r.t, 1), lambda r: fun(r.g, 1), lambda r: fun(r.m, 2), lambda r: fun(r.t.T, 0))


def _reduce(fun: Callable[..., Any], *values: Callable[[Rows], Any]) -> Build:
    """Over other axes; over the rows too of all values but the first, which are constant off them."""

    def build(r: Rows) -> None:
        for k, value in enumerate(v(r) for v in values):
            for axes in ((1,), (0,), (0, 1)) if k else ((1,),):
                fun(value, axes)
            fun(value.T, (0,))

    return build


def _scatter(method: str) -> Build:
    def build(r: Rows) -> None:
        for base in (r.t, r.g, r.g + 2, jnp.zeros_like(r.t)):
            for mode in ("drop", "clip", "promise_in_bounds"):
                getattr(base.at[r.ids], method)(r.up, mode=mode)
        getattr(r.t.T.at[:, r.ids], method)(r.up.T)
        getattr(r.t.at[r.ids, r.ids - 1], method)(r.up[:, 0])

    return build


def _gather(r: Rows) -> None:
    for mode in ("fill", "clip", "promise_in_bounds"):
        r.t.at[r.ids].get(mode=mode)
        (r.g * r.t).T.at[:, r.ids].get(mode=mode)
    r.t[r.ids, r.ids - 1], jnp.take(r.t, r.ids, axis=0), jnp.take_along_axis(r.t, r.ids[:, None], axis=0)


def _slices(r: Rows) -> None:
    r.t[:, 1:], r.g[:, ::2], r.t.T[1:], r.t[1], r.t[1:4:2], (r.g + 1)[:, :2]


def _dynamic_slices(r: Rows) -> None:
    start = r.ids[0] - 1
    lax.dynamic_slice(r.t, (start, start), (ROWS, 2)), lax.dynamic_slice(r.g, (start, start), (ROWS, 2))
    lax.dynamic_slice_in_dim(r.t, r.ids[0], 1), lax.dynamic_slice(r.t, (r.ids[1], start), (1, 2))


def _dynamic_updates(r: Rows) -> None:
    for base in (r.t, r.g + 1, jnp.zeros_like(r.t)):
        lax.dynamic_update_slice(base, r.up[:1], (r.ids[1], jnp.int32(0)))


def _pads(r: Rows) -> None:
    lax.pad(r.up, 0.0, ((1, 1, 1), (0, 0, 0)))
    for value in (r.t, r.g, r.g + 1):
        for filled in (0.0, 1.0, r.k):
            lax.pad(value, filled, ((0, 0, 0), (1, 0, 1)))


def _broadcasts(r: Rows) -> None:
    for shape, dims in (((ROWS, 3), (0,)), ((2, ROWS, 3), (1,)), ((2, ROWS), (1,))):
        lax.broadcast_in_dim(r.s, shape, dims), lax.broadcast_in_dim(r.g[:, 0], shape, dims)
    jnp.broadcast_to(r.k, (ROWS, 3)), jnp.broadcast_to(r.x[:, :1], (ROWS, 3)), jnp.broadcast_to(r.x[0], (ROWS, 3))


def _selects(r: Rows) -> None:
    predicates = (r.t > 2, r.g == 0, r.g != 0, r.x > 2, jnp.zeros_like(r.t, bool))
    cases = (r.t, r.g, r.g + 1, r.x, jnp.ones_like(r.t))
    for which, a, b in itertools.product(predicates, cases, cases):
        lax.select_n(which, a, b)
    lax.select_n(r.k > 2, r.t, r.t + r.g), lax.select_n(r.d, r.t, r.x)


def _dots(r: Rows) -> None:
    w = r.x[:3]
    r.t @ w, r.g @ w, w.T @ r.t.T, (r.g + 1) @ w, r.s[:, None] * (r.t @ w[:, 0])[:, None]
    r.g.T @ r.t, r.t.T @ r.g, jnp.einsum("vij,jk->ivk", r.m, r.x[:2])


def _scans(r: Rows) -> None:
    """Rows as a constant, a carry and a sequence of a scan; pushes and lookups inside."""

    def body(carry: Any, xs: Any) -> Any:
        (grads, acc, zeros), (i, plane) = carry, xs
        grads = grads.at[i].add(r.t[i])
        return (grads, acc + 2 * r.t, zeros * 2), (plane * grads, r.s + i)

    planes = jnp.concatenate([r.t[None], r.g[None] + 1])
    lax.scan(body, (jnp.zeros_like(r.t), r.t, jnp.zeros_like(r.t)), (r.ids, planes))
    lax.scan(lambda c, i: (c.at[i].mul(2.0), c.sum(1)), r.t, r.ids, reverse=True)


def _remats(r: Rows) -> None:
    jax.checkpoint(lambda t, g: (jnp.sin(t) * g, t[r.ids].sum(), jnp.zeros_like(g).at[r.ids].add(r.up)))(r.t, r.g)
    jax.vjp(jax.checkpoint(lambda t: jnp.tanh(t)[r.ids]), r.t)[1](r.up)


def _complex(r: Rows) -> None:
    for z in (lax.complex(r.t, r.x), lax.complex(r.t, r.g), lax.complex(r.g, r.g + 1)):
        lax.real(z), lax.imag(z), lax.conj(z)


_NUMBERS = (lambda r: r.t, lambda r: r.g, lambda r: r.g + 1, lambda r: r.d + 2)
_TRUTHS = (lambda r: r.t > 2, lambda r: r.g == 0, lambda r: r.g != 0)
_SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
_BITS = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
_UNARY = (
    "neg sign abs square sqrt rsqrt cbrt exp exp2 expm1 log log1p tanh sin cos tan logistic floor ceil round is_finite "
    "asin acos atan sinh cosh asinh acosh atanh erf erfc erf_inv lgamma digamma stop_gradient"
)
_BINARY = "add sub mul div rem max min pow atan2 nextafter igamma igammac eq ne lt le gt ge"
_SCATTERS = {"add": "add", "sub": "subtract", "mul": "multiply", "min": "min", "max": "max"}
_CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp"

#: op -> a case that brings rows to it.
CLAIMS: dict[str, Build] = {
    **{op: _unary(getattr(lax, op)) for op in _UNARY.split()},
    **{op: _binary(getattr(lax, op)) for op in _BINARY.split()},
    **{op: _binary(getattr(lax, op), jnp.int32) for op in _SHIFTS},
    **{op: _each(_binary(fun, jnp.int32), _booleans(fun)) for op, fun in _BITS.items()},
    **{op: _along(getattr(lax, op)) for op in _CUMULATIVE.split()},
    **{f"reduce_{op}": _reduce(getattr(lax, f"reduce_{op}"), *_NUMBERS) for op in ("sum", "prod", "max", "min")},
    **{f"reduce_{op}": _reduce(getattr(lax, f"reduce_{op}"), *_TRUTHS) for op in ("and", "or")},
    **{op: _along(lambda x, axis, op=op: getattr(lax, op)(x, axis, jnp.int32)) for op in ("argmax", "argmin")},
    **{f"scatter-{op}": _scatter(name) for op, name in _SCATTERS.items()},
    "scatter": _scatter("set"),
    "not": _each(_booleans(lambda a, b: ~a), lambda r: (~r.q, ~r.d)),
    "population_count": _each(lambda r: lax.population_count(r.q)),
    "clz": _each(lambda r: lax.clz(r.q)),
    "integer_pow": _each(*(_unary(lambda x, y=y: lax.integer_pow(x, y)) for y in (-1, 0, 2, 3))),
    "clamp": _each(lambda r: (lax.clamp(2.0, r.t, 3.0), lax.clamp(1.0, r.g, 2.0), lax.clamp(r.g, r.t, r.x + r.g))),
    "convert_element_type": _each(
        _unary(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
        lambda r: (
            r.m.astype(jnp.bfloat16).astype(jnp.float32),
            (r.h.astype(jnp.float32) + 0).astype(jnp.bfloat16),
            r.q.astype(jnp.float32),
            (r.g > 0).astype(int),
        ),
    ),
    "select_n": _selects,
    "copy": _unary(jnp.copy),
    "sharding_constraint": _unary(
        lambda x: lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    ),
    "reduce_precision": _unary(lambda x: lax.reduce_precision(x, 5, 3)),
    "bitcast_convert_type": _unary(lambda x: lax.bitcast_convert_type(x, jnp.int16)),
    "complex": _complex,
    "real": _complex,
    "imag": _complex,
    "conj": _complex,
    "add_any": _each(lambda r: jax.vjp(lambda u: lax.mul(u, u), r.t + r.g)[1](r.t)),
    "optimization_barrier": _each(lambda r: lax.optimization_barrier((r.t, r.g, r.x, jnp.zeros_like(r.t)))),
    "broadcast_in_dim": _broadcasts,
    "reshape": _each(lambda r: (r.m.reshape(ROWS, 4), r.t.reshape(ROWS, 1, 3), (r.g + 1).reshape(1, ROWS, 3))),
    "transpose": _each(lambda r: (r.t.T, r.g.T, jnp.zeros_like(r.m).T, r.m.transpose(1, 2, 0))),
    "squeeze": _each(lambda r: (lax.squeeze(r.t[:, :1], (1,)), lax.squeeze(jnp.zeros((ROWS, 1)), (1,)))),
    "iota": _each(lambda r: (jnp.arange(ROWS)[:, None] * r.t, lax.broadcasted_iota(jnp.float32, (3, ROWS), 1) + r.t.T)),
    "split": _each(lambda r: (lax.split(r.t, (1, 2), axis=1), lax.split((r.g + 1).T, (1, 2)))),
    "concatenate": _each(lambda r: [jnp.concatenate(p, 1) for p in ((r.t, r.x), (r.g, r.g), (r.g, r.g + 1, r.x))]),
    "sort": _each(_along(lambda x, axis: lax.sort(x, dimension=axis)), lambda r: lax.sort((r.t, r.g), num_keys=1)),
    "rev": _along(lambda x, axis: lax.rev(x, (axis,))),
    "dot_general": _dots,
    "gather": _gather,
    "slice": _slices,
    "dynamic_slice": _dynamic_slices,
    "dynamic_update_slice": _dynamic_updates,
    "pad": _pads,
    "scan": _scans,
    "remat": _remats,
}


@pytest.mark.parametrize("op", CLAIMS)
def test_claims_hold(op: str) -> None:
    program = _analysed(CLAIMS[op])
    assert [(s.refusal, s.notes) for s in program.rows.spaces] == [(None, ())], "the case mixes rows"
    assert op in _check(program), f"no rows came out of {op}"


def test_transposed_rows_are_not_unchanged() -> None:
    """A transpose within the rows moves the elements of the untouched ones too."""
    _check(_analysed(lambda r: jnp.where(r.t[:, :1, None] > 2, r.m, r.m.transpose(0, 2, 1))))


@pytest.mark.parametrize("op", ["div", "rem"])
def test_integers_divided_by_zero(op: str) -> None:
    """XLA's result isn't NumPy's: -1, and the dividend."""
    assert op in _check(_analysed(_binary(getattr(lax, op), jnp.int32)))


def test_ids_with_a_padded_zero_are_no_rows_of_the_table() -> None:
    """Shifting ids to the right is a pad with zeros, as the gradient of a slice is: it must not stand in the way."""
    program = _analysed(lambda r: r.t[jnp.pad(r.ids, (1, 0))])
    assert [(s.refusal, s.notes) for s in program.rows.spaces] == [(None, ())]


# --- refusals: op, what is done, what is said ---

_UPDATE = "dynamic_update_slice"
REFUSALS: dict[str, tuple[str, Build, str]] = {
    "pairs": ("gather", lambda r: jax.vmap(lambda i: lax.dynamic_slice_in_dim(r.t, i, 2))(r.ids), "adjacent rows"),
    "own columns": ("gather", lambda r: jnp.take_along_axis(r.t, r.x.astype(int) - 2, axis=1), "batched over the rows"),
    "ids are rows": ("gather", lambda r: r.t[r.q[:, 0]], "the ids are themselves rows"),
    "rows scattered": ("scatter-add", lambda r: jnp.zeros((9, 3)).at[jnp.arange(ROWS)].add(r.t), "a scatter of rows"),
    "column scatter": ("scatter-add", lambda r: r.t.at[:, r.ids - 1].add(1.0), "not by rows"),
    "unknown function": ("scatter", lambda r: r.t.at[r.ids].apply(jnp.sin), "not by rows"),
    "column update": (_UPDATE, lambda r: lax.dynamic_update_slice(r.t, r.x[:, :1], (0, 1)), "not by rows"),
    "rows as an update": (_UPDATE, lambda r: lax.dynamic_update_slice(jnp.ones((9, 3)), r.t, (1, 0)), "of rows"),
    "padded": ("pad", lambda r: lax.pad(r.t, 0.0, ((1, 0, 0), (0, 0, 0))), "pads the table by rows"),
    "sum": ("reduce_sum", lambda r: r.t.sum(), "reduce_sum over all rows"),
    "softmax": ("reduce_max", lambda r: r.up @ jax.nn.softmax(r.t, 0).T, "reduce_max over all rows"),
    "argmax": ("argmax", lambda r: r.g.argmax(0), "argmax over all rows"),
    "flat": ("reshape", lambda r: r.t.reshape(-1), "rows run into each other"),
    "as if transposed": ("reshape", lambda r: r.t.reshape(3, ROWS), "rows run into each other"),
    "split": ("split", lambda r: jnp.split(r.t, (2,)), "splits the table by rows"),
    "longer": ("concatenate", lambda r: jnp.concatenate([r.t, r.x]), "concatenates rows"),
    **{op: (op, lambda r, op=op: getattr(lax, op)(r.t, 0), f"{op} along the rows") for op in _CUMULATIVE.split()},
    "sorted": ("sort", lambda r: jnp.sort(r.t, axis=0), "sort along the rows"),
    "reversed": ("rev", lambda r: r.t[::-1], "rev along the rows"),
    "contracted": ("dot_general", lambda r: r.x.T @ r.t, "sums over all rows"),
    "squared": ("dot_general", lambda r: r.t @ r.t.T, "a product of two tables' rows"),
    "batched product": ("dot_general", lambda r: jax.vmap(jnp.dot)(r.t, r.x), "batched over the rows"),
    "outer": ("add", lambda r: r.t[:, 0][:, None] + r.t[:, 0][None, :], "along different axes"),
    "scan over rows": ("scan", lambda r: lax.scan(lambda c, row: (c + row, None), r.x[0], r.t), "a scan over the rows"),
    "branch": ("cond", lambda r: lax.cond(r.k > 2, lambda: r.t[0], lambda: r.t[1]), "inside a cond"),
    "while": ("while", lambda r: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c * 2, r.t), "inside a while loop"),
    "no rule": ("top_k", lambda r: lax.top_k(r.t, 2), "top_k has no rule"),
    "window": ("reduce_window_sum", lambda r: lax.reduce_window(r.t, 0.0, lax.add, (2, 1), (1, 1), "SAME"), "no rule"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_mixes_rows_is_refused_or_read_whole(name: str) -> None:
    op, build, reason = REFUSALS[name]
    program = _analysed(build)
    facts: RowFacts = program.rows
    told = [str(s.refusal) for s in facts.spaces if s.refusal] + [n for s in facts.spaces for n in s.notes]
    assert any(re.search(re.escape(reason), text) for text in told), told
    refused = [e for e in program.block.equations if e.op == op and not any(map(facts.value, e.outputs))]
    assert refused, f"{op} is claimed to keep rows apart"
    _check(program)


def test_every_rule_has_a_case() -> None:
    refused = {op for op, _, _ in REFUSALS.values()}
    missing = set(RULES) - set(CLAIMS) - refused - set(UNREACHABLE) - NEWER
    assert not missing
    assert not set(UNREACHABLE) & set(CLAIMS)
    assert not set(UNREACHABLE) - set(RULES), "an exception for a rule that is gone"


def test_tanh_gradient_claims_hold() -> None:
    """Newer versions of JAX have a primitive for it, `one_minus_square`."""
    program = _analysed(_unary(lambda x: jax.vjp(jnp.tanh, x)[1](x)))
    assert "tanh" in _check(program)
