"""`join_pads`: gradients of slices, which keep their bits, and sums of pads that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.backends.emit import emit
from autopar.ir.program import Input, Program
from autopar.ir.slicing import eliminate_dead
from autopar.ir.trace import block_of
from autopar.passes.normalizing.follow_lookups import join_pads

N = 6
X = np.random.default_rng(0).normal(size=(3, N, N)).astype(np.float32)


def gradient(parts: Callable[[Any], list[Any]]) -> Callable[[Any], Any]:
    """Makes the gradient of the sum of the parts' sines."""
    return jax.grad(lambda x: sum(jnp.sum(jnp.sin(k * part)) for k, part in enumerate(parts(x), 1)))


def _above(x: Any) -> list[Any]:
    return [x[:, k, k + 1 :] for k in range(N - 1)]


def _in_scan(x: Any) -> Any:
    rows = gradient(_above)
    return jax.lax.scan(lambda c, _: (c + rows(c), None), x, None, length=2)[0]


def _printed(x: Any) -> Any:
    jax.debug.callback(lambda _: None, x[0, 0, 0])  # without a result
    return gradient(_above)(x)


JOINED: dict[str, Callable[[Any], Any]] = {
    "rows above the diagonal": gradient(_above),
    "blocks": gradient(lambda x: [x[:, i : i + 3, j : j + 3] for i in (0, 3) for j in (0, 3)]),
    "of the last axis": gradient(lambda x: [x[..., k] for k in range(N)]),
    "of 16 bits": gradient(lambda x: _above(x.astype(jnp.bfloat16))),
    "in a scan": _in_scan,
    "beside an effect": _printed,
    "beside a long sum": lambda x: (gradient(_above)(x), sum(x[0, 0, 0] * k for k in range(3000))),
}
KEPT: dict[str, Callable[[Any], Any]] = {
    "that overlap": gradient(lambda x: [x[:, k : k + 2] for k in range(N - 1)]),
    "of examples": gradient(lambda x: [x[k : k + 1] for k in (0, 1, 2)] + [x[:, 0]]),
    "few": gradient(lambda x: [x[:, :2], x[:, 2:4], x[:, 4:]]),
    "beside something else": gradient(lambda x: [*(x[:, k] for k in range(N)), jnp.cos(x)]),
}


def _rewritten(fun: Callable[[Any], Any], role: str = "batch") -> tuple[Program, int, Any]:
    block = block_of(jax.make_jaxpr(fun)(X))
    program, count = join_pads(Program(block, (Input("x", role),), ()))
    made, _ = eliminate_dead(program.block)
    return Program(made, (), ()), count, emit(block)(X)


@pytest.mark.parametrize("name", JOINED)
def test_joined(name: str) -> None:
    program, count, wanted = _rewritten(JOINED[name])
    assert count == 1
    assert not [e for e in program.block.walk() if e.op == "pad"]
    np.testing.assert_array_equal(emit(program.block)(X)[0], wanted[0])


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    assert _rewritten(KEPT[name])[1] == 0


def test_gradients_of_the_state_are_kept() -> None:
    """Their pads say which rows are touched."""
    assert _rewritten(JOINED["blocks"], "state")[1] == 0
