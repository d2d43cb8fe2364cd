"""Rule truth: what each primitive's rule claims, against brute force (`row_claims`).

Every case applies one op to values of row space. What mixes rows must be refused or read whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from autopar.analysis.rules import RULES
from autopar.ir.rowspace import Const, Row, RowFacts, Same
from tests.support.row_claims import ROWS, Build, Rows, analysed, check, equations

#: Names that no public function of jax.lax or jax.numpy leads to.
UNREACHABLE = {
    "copy_p": "named `copy` by JAX; the variable is called copy_p",
    "mul_add": "no such primitive in jax 0.10 to 0.12",
    "random_bits_like": "no such primitive in jax 0.10 to 0.12",
    "pvary": "inside shard_map only",
    "layout_constraint": "like sharding_constraint; layouts are a backend's",
}
#: Primitives of newer versions: jax 0.12's derivative of tanh.
NEWER = {"one_minus_square"}


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
    for base in (r.t, r.g, r.g + 1, jnp.zeros_like(r.t), jnp.ones_like(r.t)):
        for columns in (r.t[:, :1], r.g[:, 1:], r.g[:, :2] + 1):
            lax.dynamic_update_slice(base, columns, (r.ids[1], r.ids[0]))


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


def _conds(r: Rows) -> None:
    """Each branch taken once: rows in and out, lookups and pushes inside."""

    def one(t: Any, g: Any) -> Any:
        return t + g, g * 2, jnp.zeros_like(t), t[r.ids].sum(), g

    def other(t: Any, g: Any) -> Any:
        return t, jnp.zeros_like(t), jnp.zeros_like(t).at[r.ids].add(r.up), r.k, jnp.ones_like(t)

    lax.cond(r.k > 2, one, other, r.t, r.g), lax.cond(r.k > 4, one, other, r.t, r.g)


def _complex(r: Rows) -> None:
    for z in (lax.complex(r.t, r.x), lax.complex(r.t, r.g), lax.complex(r.g, r.g + 1)):
        lax.real(z), lax.imag(z), lax.conj(z)


def _functions(r: Rows) -> None:
    """Functions of the row, made twice, of what is the leaf off the rows and of what isn't."""
    for a, b in ((r.t, r.t + r.g), (jnp.sqrt(r.t), jnp.sqrt(r.t + r.g)), (r.t @ r.x[:3], (r.t - r.g) @ r.x[:3])):
        a - b, a == b, a != b, a < b, a <= b, a > b, a >= b, jnp.maximum(a, b), jnp.minimum(a, b)
        jnp.where(a != b, r.x, a), jnp.where(r.x > 2, a, b), jnp.sum(a - b, 1), jnp.sum(a - b, 0)
    for a, b in ((r.q, r.q + r.d), (r.q * 3, (r.q + r.d) * 3)):
        a ^ b, a & b, a | b, a - b


def _other_functions(r: Rows) -> None:
    """Functions of the row that differ by a parameter, a shape, a constant, a dense operand, or from turn to turn."""
    wide = jnp.concatenate([r.g + 1, r.g + 1], 1)
    for a, b in (
        (jnp.sin(r.t), jnp.cos(r.t)),
        (jnp.cumsum(r.t, 1), jnp.cumsum(r.t + r.g, 1)[:, ::-1]),
        (r.t**2, (r.t + r.g) ** 3),
        (r.t + r.x, r.t + r.x[::-1]),
        (r.t + 1.0, r.t + 2.0),
        (r.t * r.k, r.t * (r.k + 1)),
        (jnp.sum(r.t[:, :2], 1), jnp.sum(r.t, 1)),
        ((r.g + 1) @ jnp.ones((3, 2)) * r.t[:, :2], wide @ jnp.ones((6, 2)) * r.t[:, :2]),
        (jnp.sin(r.t)[:, :1], jnp.sin(r.t)[:, 1:2]),
        (*jnp.split(jnp.sin(r.t), (1,), 1)[:1], jnp.split(jnp.sin(r.t), (2,), 1)[1]),
        (lax.sort((jnp.sin(r.t), r.t), num_keys=1)[0], lax.sort((jnp.sin(r.t), r.t), num_keys=1)[1]),
        (r.m, r.m.transpose(0, 2, 1)),
        (r.t + jnp.arange(3), r.t + jnp.arange(3)[::-1]),
    ):
        a - b, a == b, a != b, jnp.maximum(a, b), jnp.where(r.k > 2, a, b)


def _functions_in_turns(r: Rows) -> None:
    """What a loop carries, stacks and takes apart, and what its turns make of rows."""

    def body(carry: Any, xs: Any) -> Any:
        number, plane = xs
        new = jnp.sin(r.t * number)
        return new, (carry - new, new - jnp.sin((r.t + r.g) * number), jnp.sin(plane), new)

    planes = jnp.stack([r.t, 2 * r.t, r.t + r.g])
    last, (_, _, sines, each) = lax.scan(body, jnp.sin(r.t), (r.up[:, 0].repeat(2)[:3], planes))
    last - each[0], each - sines, sines[0] - sines[2], each[1] - each[2], last - jnp.sin(r.t)
    lax.scan(lambda c, n: (jnp.sin(r.t) + 0 * n, c - jnp.sin(r.t + r.g)), jnp.sin(r.t), r.up[:, 0])
    once = lax.cond(r.k > 2, lambda: jnp.sin(r.t), lambda: jnp.cos(r.t))
    both = lax.cond(r.k > 2, lambda: jnp.sin(r.t), lambda: jnp.sin(r.t + r.g))
    again = jax.checkpoint(jnp.sin)(r.t)
    once - jnp.sin(r.t), both - jnp.sin(r.t), again - both, jax.checkpoint(jnp.cos)(r.t) - once


_NUMBERS = (lambda r: r.t, lambda r: r.g, lambda r: r.g + 1, lambda r: r.d + 2)
_TRUTHS = (lambda r: r.t > 2, lambda r: r.g == 0, lambda r: r.g != 0)
_SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
_BITS = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
_UNARY = (
    "neg sign abs square sqrt rsqrt cbrt exp exp2 expm1 log log1p tanh sin cos tan logistic floor ceil round is_finite "
    "asin acos atan sinh cosh asinh acosh atanh erf erfc erf_inv lgamma digamma stop_gradient "
    "bessel_i0e bessel_i1e"
)
_BINARY = (
    "add sub mul div rem max min pow atan2 nextafter igamma igammac igamma_grad_a polygamma zeta eq ne lt le gt ge"
)
_TOTAL_ORDER = (primitives.eq_to_p, primitives.lt_to_p, primitives.le_to_p)
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
    **{p.name: _each(lambda r, p=p: (p.bind(r.t, r.x), p.bind(r.g, r.t), p.bind(r.g, r.g))) for p in _TOTAL_ORDER},
    "mulhi": _binary(lax.mulhi, jnp.int32),
    "copy": _unary(jnp.copy),
    "name": _unary(lambda x: checkpoint_name(x, "x")),
    "device_put": _unary(jax.device_put),
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
    "stack": _each(lambda r: (jnp.stack((r.t, r.g), 0), jnp.stack((r.g, r.g), 1), jnp.stack((r.t.T, r.g.T), 2))),
    "unstack": _each(lambda r: (jnp.unstack(r.t, axis=1), jnp.unstack(r.g.T), jnp.unstack(r.g + 1, axis=1))),
    "sort": _each(_along(lambda x, axis: lax.sort(x, dimension=axis)), lambda r: lax.sort((r.t, r.g), num_keys=1)),
    "top_k": _along(lambda x, axis: lax.top_k(x, 2, axis=axis)),
    "rev": _along(lambda x, axis: lax.rev(x, (axis,))),
    "dot_general": _dots,
    "gather": _gather,
    "slice": _slices,
    "dynamic_slice": _dynamic_slices,
    "dynamic_update_slice": _dynamic_updates,
    "pad": _pads,
    "scan": _scans,
    "remat": _remats,
    "cond": _conds,
}
FUNCTIONS = {"the same": _functions, "others": _other_functions, "in turns": _functions_in_turns}


@pytest.mark.parametrize("op", CLAIMS)
def test_claims_hold(op: str) -> None:
    program = analysed(CLAIMS[op])
    assert [(s.refusal, s.notes) for s in program.rows.spaces] == [(None, ())], "the case mixes rows"
    assert op in check(program), f"no rows came out of {op}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_claims_of_functions_of_the_row_hold(name: str) -> None:
    check(analysed(FUNCTIONS[name]))


def _untouched_values(build: Callable[[Rows], Any], op: str) -> list[Any]:
    """What results of an op are off the touched rows."""
    program = analysed(build)
    made = (program.rows.value(v) for e in program.block.equations if e.op == op for v in e.outputs)
    return [value.untouched for value in made if isinstance(value, Row)]


@pytest.mark.parametrize(
    ("op", "build", "untouched"),
    [
        ("sub", lambda r: jnp.sqrt(r.t + r.g) - jnp.sqrt(r.t), Const(0)),
        ("ne", lambda r: (r.t - r.g) != r.t, Const(0)),
        ("ge", lambda r: jnp.sin(r.t - r.g) >= jnp.sin(r.t), Const(1)),
        ("max", lambda r: jnp.maximum(r.t - r.g, r.t), Same(3, np.dtype(np.float32))),
        ("sub", lambda r: jnp.cumsum(r.t + r.g, 1) - jnp.cumsum(r.t, 1), Const(0)),
    ],
)
def test_two_equal_functions_of_a_row(op: str, build: Build, untouched: Any) -> None:
    assert untouched in _untouched_values(build, op)


@pytest.mark.parametrize("op", ["sub", "ne", "eq"])
def test_a_value_with_itself_is_asked_whether_it_is_finite(op: str) -> None:
    """`jnp.isnan(x)` is `x != x`."""
    asked = {"sub": lambda r: r.t - r.t, "ne": lambda r: jnp.isnan(jnp.sin(r.t)), "eq": lambda r: r.t == r.t}[op]
    assert not any(isinstance(untouched, Const) for untouched in _untouched_values(lambda r: asked(r), op)[:1])


def test_transposed_rows_are_not_unchanged() -> None:
    """A transpose within the rows moves the elements of the untouched ones too."""
    check(analysed(lambda r: jnp.where(r.t[:, :1, None] > 2, r.m, r.m.transpose(0, 2, 1))))


@pytest.mark.parametrize("op", ["div", "rem"])
def test_integers_divided_by_zero(op: str) -> None:
    """XLA's result isn't NumPy's: -1, and the dividend."""
    assert op in check(analysed(_binary(getattr(lax, op), jnp.int32)))


def test_ids_with_a_padded_zero_are_no_rows_of_the_table() -> None:
    """Shifting ids to the right is a pad with zeros, as the gradient of a slice is: it must not stand in the way."""
    program = analysed(lambda r: r.t[jnp.pad(r.ids, (1, 0))])
    assert [(s.refusal, s.notes) for s in program.rows.spaces] == [(None, ())]


# --- refusals: op, what is done, what is said ---


def _sum_in_branch(carry: Any, i: Any) -> Any:
    return carry.at[i].mul(2.0), lax.cond(i > 2, lambda: carry.sum(), lambda: 0.0)


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
    "branch": ("cond", lambda r: lax.scan(_sum_in_branch, r.t, r.ids), "inside a cond: reduce_sum over all rows"),
    "stacked": ("stack", lambda r: jnp.stack([r.t, r.x]), "stacks rows"),
    "unstacked": ("unstack", lambda r: jnp.unstack(r.t), "apart by rows"),
    "while": ("while", lambda r: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c * 2, r.t), "inside a while loop"),
    "largest rows": ("top_k", lambda r: lax.top_k(r.t, 2, axis=0), "top_k along the rows"),
    "no rule": ("approx_top_k", lambda r: lax.approx_max_k(r.t, 2), "approx_top_k has no rule"),
    "window": ("reduce_window_sum", lambda r: lax.reduce_window(r.t, 0.0, lax.add, (2, 1), (1, 1), "SAME"), "no rule"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_mixes_rows_is_refused_or_read_whole(name: str) -> None:
    op, build, reason = REFUSALS[name]
    program = analysed(build)
    facts: RowFacts = program.rows
    told = [str(s.refusal) for s in facts.spaces if s.refusal] + [n for s in facts.spaces for n in s.notes]
    assert any(re.search(re.escape(reason), text) for text in told), told
    refused = [e for e in equations(program.block) if e.op == op and not any(map(facts.value, e.outputs))]
    assert refused, f"{op} is claimed to keep rows apart"
    check(program)


def test_every_rule_has_a_case() -> None:
    refused = {op for op, _, _ in REFUSALS.values()}
    missing = set(RULES) - set(CLAIMS) - refused - set(UNREACHABLE) - NEWER
    assert not missing
    assert not set(UNREACHABLE) & set(CLAIMS)
    assert not set(UNREACHABLE) - set(RULES), "an exception for a rule that is gone"


def test_tanh_gradient_claims_hold() -> None:
    """Newer versions of JAX have a primitive for it, `one_minus_square`."""
    program = analysed(_unary(lambda x: jax.vjp(jnp.tanh, x)[1](x)))
    assert "tanh" in check(program)
