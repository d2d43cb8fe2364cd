"""What the table says of primitives, against JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autopar.analysis.primitives import PRIMITIVES, Linear, Primitive, described_once, those_that

X = np.array([0.25, -0.5, 0.75, 0.0], np.float32)
Y = np.array([0.5, 0.25, -0.75, 1.0], np.float32)
NAN = np.float32(np.nan)

#: Primitives that no function of jax.lax with the same name is, or that take more than arrays -> how they are called.
CALLS: dict[str, Callable[..., Any]] = {
    "add_any": lax.add,
    "copy": lambda x: jnp.copy(x),
    "name": lambda x: checkpoint_name(x, "x"),
    "device_put": jax.device_put,
    "clamp": lambda x: lax.clamp(-1.0, x, 1.0),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.float16),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 4), (1,)),
    "reshape": lambda x: lax.reshape(x, (2, 2)),
    "transpose": lambda x: lax.transpose(x.reshape(2, 2), (1, 0)),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "cumsum": lax.cumsum,
    "slice": lambda x: lax.slice(x, (1,), (3,)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1,), (2,)),
    "split": lambda x: jnp.concatenate(lax.split(x, (1, 3))),
    "rev": lambda x: lax.rev(x, (0,)),
    "gather": lambda x: x[np.array([2, 0])],
    "concatenate": lambda x, y: lax.concatenate([x, y], 0),
    "stack": lambda x, y: jnp.stack([x, y]),
    "pad": lambda x: lax.pad(x, np.float32(0), [(1, 1, 0)]),
    "dot_general": jnp.dot,
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "is_finite": lax.is_finite,
    "real": lambda x: lax.real(lax.complex(x, 2 * x)),
    "imag": lambda x: lax.imag(lax.complex(x, 2 * x)),
    "conj": lambda x: lax.abs(lax.conj(lax.complex(x, 2 * x))),
    "complex": lambda x, y: lax.abs(lax.complex(x, y)),
}
#: Covered elsewhere, of newer versions, of other types, or of shapes that aren't those of X.
NOT_HERE = {
    "copy_p",
    "stop_gradient",
    "sharding_constraint",
    "layout_constraint",
    "pvary",
    "one_minus_square",
    "unstack",
}
NOT_HERE |= {"tile", "scatter-add", "dynamic_update_slice", "conv_general_dilated"}


def _call(op: str) -> Callable[..., Any]:
    fun = CALLS.get(op) or getattr(lax, op)
    return lambda *xs: np.asarray(fun(*map(jnp.asarray, xs)), np.float64)


def _operands(op: str) -> int:
    """How many arrays it takes."""
    fun = CALLS.get(op) or getattr(lax, op)
    try:
        jax.eval_shape(fun, X, Y)
    except TypeError:
        return 1
    return 2


def _named(says: Callable[[Any], bool]) -> list[str]:
    return sorted(those_that(says) - NOT_HERE)


@pytest.mark.parametrize("op", _named(lambda p: p.keeps_zero))
def test_zeros_give_zeros(op: str) -> None:
    zeros = [np.zeros_like(X)] * _operands(op)
    assert not _call(op)(*zeros).any()


@pytest.mark.parametrize("op", _named(lambda p: p.keeps_nan))
def test_nan_gives_nan(op: str) -> None:
    count = _operands(op)
    positive = np.abs(X) + 0.1
    assert np.isfinite(_call(op)(*[positive] * count)).all()
    for k in range(count):
        given: list[Any] = [positive] * count
        given[k] = np.full_like(X, NAN)
        assert np.isnan(_call(op)(*given)).all()


@pytest.mark.parametrize("op", _named(lambda p: p.compares))
def test_a_nan_says_nothing_of_what_it_is_compared_with(op: str) -> None:
    others = [X] * (_operands(op) - 1)
    assert len(np.unique(_call(op)(np.full_like(X, NAN), *others))) == 1


@pytest.mark.parametrize("op", _named(lambda p: p.linear is not Linear.NO))
def test_what_is_linear(op: str) -> None:
    fun, linear, count = _call(op), PRIMITIVES[op].linear, _operands(op)
    a, b = (X, Y), (Y, X + Y)
    if linear is Linear.EACH:
        pairs = [((a[0], Y), (b[0], Y)), ((Y, a[0]), (Y, b[0]))]
    else:
        pairs = [(a[:count], b[:count])]
    for one, other in pairs:
        both = [x if linear is Linear.EACH and x is y else x + y for x, y in zip(one, other, strict=True)]
        np.testing.assert_allclose(fun(*both), fun(*one) + fun(*other), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("op", _named(lambda p: p.fold is not None and p.keeps_nan))
def test_constants_fold_as_in_jax(op: str) -> None:
    fold = PRIMITIVES[op].fold
    assert fold is not None
    given = [np.abs(X) + 0.1, np.abs(Y)][: _operands(op)]
    np.testing.assert_allclose(fold(*given), _call(op)(*given), rtol=1e-5)


def test_a_primitive_is_described_once() -> None:
    with pytest.raises(ValueError, match="'sinh' is described twice"):
        described_once([("sinh", Primitive(elementwise=True)), ("cosh", Primitive()), ("sinh", Primitive())])
