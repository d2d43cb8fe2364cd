"""`follow_spread`, `whole_operands_once` and `localize` against brute force: a function of whole arrays, and its
program on each of N devices (simulated by `jax.vmap` with a named axis), must give the same, to the last bit where they
are integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.scipy.linalg import solve_triangular
from jax.sharding import Mesh

from autopar.backends.devices import Mapped
from autopar.backends.emit import emit
from autopar.ir.local import PARTIAL, Spread, State
from autopar.ir.plan import Plan
from autopar.ir.program import Block
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.trace import block_of
from autopar.passes.local_forms import Localization
from autopar.passes.localize import Localizer

N = 2
A, B, D = 4, 6, 3
E = Spread(0)


class _Devices(Mapped):
    """N devices, simulated on one."""

    @property
    def count(self) -> int:
        return N


def local_program(
    fun: Callable[..., Any], given: Sequence[State], args: Sequence[Any]
) -> tuple[Localizer, Block, list[State]]:
    """The walk through a function, its local block with results as they come, and what each device has of those."""
    block = block_of(jax.make_jaxpr(fun)(*args))
    walk = Localizer(Localization(ProgramPlan(Plan("step", N, None, "exact", (), (), 0)), True))
    inputs = tuple(walk.define(v, s) for v, s in zip(block.inputs, given, strict=True))
    for equation in block.equations:
        walk.add(equation)
    local = Block(inputs, tuple(walk.equations), tuple(map(walk.read, block.outputs)))
    return walk, local, list(map(walk.state, block.outputs))


def run(fun: Callable[..., Any], given: Sequence[State], args: Sequence[np.ndarray]) -> list[tuple[State, np.ndarray]]:
    """Each result's form, and [N, ...]: what the devices have of it."""
    _, local, states = local_program(fun, given, args)
    emitted = emit(local, {}, _Devices(Mesh(np.array(jax.devices()[:1]), ("data",)), "data"))
    parts = [_parts(x, s) for x, s in zip(args, given, strict=True)]
    results = jax.vmap(lambda *xs: [jnp.asarray(r) for r in emitted(*xs)], axis_name="data", axis_size=N)(*parts)
    return list(zip(states, map(np.asarray, results), strict=True))


def _parts(x: np.ndarray, state: State) -> np.ndarray:
    """[N, ...]: what the devices have."""
    if isinstance(state, Spread):
        return np.stack(np.split(x, N, state.axis))
    if state is PARTIAL:
        rng = np.random.default_rng(7)
        first = rng.integers(-9, 9, x.shape).astype(x.dtype)
        return np.stack([first, x - first])
    return np.stack([x] * N)


def _whole(state: State, parts: np.ndarray) -> np.ndarray:
    if isinstance(state, Spread):
        return np.concatenate(list(parts), state.axis)
    if state is PARTIAL:
        return parts.sum(0, dtype=parts.dtype)
    assert all(np.array_equal(parts[0], p) for p in parts), "devices don't have the same"
    return parts[0]


def ints(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-5, 6, shape).astype(np.int32)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Small integers as floats, so that sums are exact in any order."""
    return ints(*shape, seed=seed).astype(np.float32)


x, y, w, ids = (
    floats(A, D),
    floats(A, D, seed=1),
    floats(D, B, seed=2),
    np.array([[2, 0], [5, 2], [1, 1], [0, 3]], np.int32),
)
v, m = floats(D, seed=3), floats(A, A, seed=4)
P = PARTIAL
CASES: dict[str, tuple[Callable[..., Any], Sequence[State], Sequence[np.ndarray], State]] = {
    # examples
    "elementwise": (lambda a, b: a * b + 1, [E, E], [x, y], E),
    "with what all have": (lambda a, b: a + b, [E, None], [x, y], E),
    "with one for all": (lambda a, b: a + b, [E, None], [x, v], E),
    "sum of a row": (lambda a: a.sum(1), [E], [x], E),
    "sum of examples": (lambda a: a.sum(0), [E], [x], P),
    "sum of all": (lambda a: a.sum(), [E], [x], P),
    "max of examples": (lambda a: a.max(0), [E], [x], None),
    "any example": (lambda a: (a > 2).any(0), [E], [x], None),
    "every example": (lambda a: (a > -9).all(), [E], [x], None),
    "product of examples": (lambda a: a.prod(0), [E], [x], None),
    "mean and square": (lambda a: (a.mean(0) ** 2).sum(), [E], [x], None),
    "products of rows": (lambda a, b: a @ b, [E, None], [x, w], E),
    "gradient of a matrix": (lambda a, b: a.T @ b, [E, E], [x, y], P),
    "gradient, one side whole": (lambda a, b: a.T @ b, [E, None], [x, y], P),
    "other examples": (lambda a, b: a @ b.T, [E, E], [x, y], E),
    "batched product": (lambda a, b: jnp.einsum("bd,bd->b", a, b), [E, E], [x, y], E),
    "transposed": (lambda a: a.T, [E], [x], Spread(1)),
    "second axis": (lambda a, b: a.T * b, [E, Spread(1)], [x, np.ascontiguousarray(y.T)], Spread(1)),
    "merged axes": (lambda a: a.reshape(A * D), [E], [x], E),
    "split axes": (lambda a: a.reshape(2, 2, D), [E], [x], E),
    "taken apart": (lambda a: a.reshape(D, A), [E], [x], None),
    "along the examples": (lambda a: jnp.cumsum(a, 0), [E], [x], None),
    "sorted examples": (lambda a: jnp.sort(a, 0), [E], [x], None),
    "sorted rows": (lambda a: jnp.sort(a, 1), [E], [x], E),
    "argmax of rows": (lambda a: a.argmax(1), [E], [x], E),
    "argmax of examples": (lambda a: a.argmax(0), [E], [x], None),
    "reversed examples": (lambda a: a[::-1], [E], [x], E),
    "columns": (lambda a: a[:, 1:], [E], [x], E),
    "some examples": (lambda a: a[1:3], [E], [x], E),
    "concatenated columns": (lambda a, b: jnp.concatenate([a, b], 1), [E, None], [x, y], E),
    "stacked": (lambda a, b: jnp.stack([a, b], 1), [E, E], [x, y], E),
    "padded columns": (lambda a: jnp.pad(a, ((0, 0), (1, 2))), [E], [x], E),
    "shifted by padding": (lambda a: jax.lax.pad(a, 0.0, ((1, -1, 0), (0, 0, 0))), [E], [x], E),
    "taken apart by padding": (lambda a: jax.lax.pad(a, 0.0, ((0, 1 - A, 1), (0, 0, 0))), [E], [x], E),
    "broadcast": (lambda a: jnp.broadcast_to(a[:, None], (A, 2, D)) * 2, [E], [x], E),
    "made constant": (lambda a: a + jnp.full((A, D), 3.0), [E], [x], E),
    "numbers of examples": (lambda a: a + jnp.arange(A)[:, None], [E], [x], E),
    "selected": (lambda a, b: jnp.where(a > 0, a, b), [E, None], [x, y], E),
    "lookup": (lambda t, i: t[i], [None, E], [floats(B, D), ids], E),
    "lookup in rows": (lambda a, i: jnp.take_along_axis(a, i, 1), [E, E], [x, ids % D], E),
    "gradient of a lookup": (lambda i, g: jnp.zeros((B, 2)).at[i].add(g), [E, E], [ids[:, 0], floats(A, 2)], P),
    "onto a base": (
        lambda t, i, g: jnp.asarray(t).at[i].add(g),
        [None, E, E],
        [floats(B, 2), ids[:, 0], floats(A, 2)],
        P,
    ),
    "set by examples": (
        lambda t, i, g: jnp.asarray(t).at[i].set(g),
        [None, E, E],
        [floats(B, 2), np.arange(A), floats(A, 2)],
        None,
    ),
    "named": (lambda a: checkpoint_name(a, "a") + 1, [E], [x], E),
    "put on a device": (lambda a, b: sum(jax.device_put((a, b))), [E, None], [x, y], E),
    "a name of a partial sum": (lambda s: checkpoint_name(s, "a"), [P], [v], P),
    "the largest of a row": (lambda a: jax.lax.top_k(a, 2)[1], [E], [x], E),
    "the largest examples": (lambda a: jax.lax.top_k(a, 2, axis=0)[0], [E], [x], None),
    "roughly the largest of a row": (lambda a: jax.lax.approx_max_k(a, 2)[0], [E], [x], E),
    "a column set": (lambda a: jnp.asarray(a).at[:, 1].set(7.0), [E], [x], E),
    "columns added up": (lambda a: jnp.zeros((A, 2)).at[:, np.array([0, 1, 1])].add(a), [E], [x], E),
    "an example set": (lambda a: jnp.asarray(a).at[1].set(7.0), [E], [x], None),
    "a matrix for each": (
        lambda a: jnp.linalg.cholesky(a),
        [E],
        [np.stack([np.eye(D) * k**2 for k in range(1, 5)])],
        E,
    ),
    "solved for each": (lambda a, b: jnp.linalg.solve(a, b[..., None]), [E, E], [np.stack([np.eye(D)] * A), x], E),
    "a matrix for all": (lambda a, b: solve_triangular(a, b.T), [None, E], [np.eye(D), x], Spread(1)),
    "a key for each": (
        lambda a: jax.vmap(lambda a: jax.random.fold_in(jax.random.key(0), a))(a).shape[0] + a,
        [E],
        [ids[:, 0]],
        E,
    ),
    "random bits": (lambda a: a + jax.random.bernoulli(jax.random.key(0), 0.5, (A, D)), [E], [x], E),
    "integers": (lambda a: (a > 0).sum(), [E], [x], P),
    # partial sums
    "scaled": (lambda s: 3 * s / 2, [P], [v], P),
    "times a factor of the step, perhaps infinite": (lambda s, c: s * c, [P, None], [v, v], None),
    "added": (lambda s, t: s + t, [P, P], [v, v], P),
    "added to zeros": (lambda s: jnp.zeros((D,)) + s, [P], [v], P),
    "added to a weight": (lambda s, t: s + t, [P, None], [v, v], None),
    "reshaped": (lambda s: s.reshape(B, D).T[1:], [P], [w], P),
    "times a matrix": (lambda s, c: s @ c, [P, None], [v, w], P),
    "squared": (lambda s: (s**2).sum(), [P], [v], None),
    "times itself": (lambda s: s * s, [P], [v], None),
    "times the examples": (lambda s, a: a * s, [P, E], [v, x], E),
    "rounded": (lambda s: s.astype(jnp.bfloat16), [P], [v], None),
    "widened": (lambda s: s.astype(jnp.float32), [P], [ints(D).astype(np.float16)], None),  # rounded before
    "of 16 bits": (lambda s, t: (s + t).reshape(1, -1), [P, P], [ints(D).astype(np.float16)] * 2, P),
    "of 16 bits, halved": (lambda s: s * np.float16(0.5), [P], [ints(D).astype(np.float16)], None),
    "widened integers": (lambda s: s.astype(jnp.int32), [P], [np.array([3, 5, 250], np.uint8)], None),
    "of another sign": (lambda s: s.astype(jnp.uint32), [P], [ints(D)], P),
    "selected by a flag": (lambda s, f: jnp.where(f > 0, s, 0.0), [P, None], [v, v], P),
    "selected by a partial sum": (lambda s: jnp.where(s > 0, 1.0, 0.0), [P], [v], None),
    "concatenated": (lambda s, t: jnp.concatenate([s, t, jnp.zeros(2)]), [P, P], [v, v], P),
    "what all have, on top": (lambda s, g: jnp.asarray(s).at[np.array([2, 0])].add(g[:2]), [P, None], [v, v], None),
    "looked up": (lambda s: jnp.take(s, np.array([0, 9]), mode="fill", fill_value=0), [P], [v], P),
    "looked up or 1": (lambda s: jnp.take(s, np.array([0, 9]), mode="fill", fill_value=1), [P], [v], None),
    "looked up or the least": (lambda s: jnp.take(s, np.array([0, 9]), mode="fill"), [P], [ints(D)], None),
    "the larger one": (lambda s, t: jnp.maximum(s, t), [P, None], [v, v], None),
    "divided by": (lambda s: 1 / (s + 100), [P], [v], None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_device_s_part(name: str) -> None:
    fun, given, args, expected = CASES[name]
    ((state, parts),) = run(lambda *xs: [fun(*xs)], given, args)
    assert state == expected
    np.testing.assert_array_equal(_whole(state, parts), np.asarray(fun(*args)))


def loop_cases() -> dict[str, tuple[Callable[..., Any], Sequence[State], Sequence[np.ndarray], Sequence[State], int]]:
    """Function, forms, arguments, forms of the results, and how many reductions stand in the loop."""
    seq = floats(5, A, D)

    def carried(xs: Any) -> Any:
        return jax.lax.scan(lambda h, x: (h + x, (h * x).sum(1)), jnp.zeros((A, D)), xs)

    def summed(xs: Any, w: Any) -> Any:
        return jax.lax.scan(lambda g, x: (g + (x.T @ x), x @ w), jnp.zeros((D, D)), xs)

    def decayed(xs: Any, w: Any) -> Any:
        return jax.lax.scan(lambda g, x: (g + x.sum(0) + w, ()), jnp.ones((D,)), xs)[0]

    def normed(xs: Any) -> Any:
        return jax.lax.scan(lambda m, x: (m + x.sum(0) ** 2, x - m), jnp.zeros((D,)), xs)

    def over_examples(xs: Any) -> Any:
        return jax.lax.scan(lambda h, x: (h + x, h), jnp.zeros((D,)), xs[0])

    def remat(xs: Any) -> Any:
        return jax.checkpoint(lambda x: (x * x).sum(0))(xs[0])

    def cond(xs: Any, flag: Any) -> Any:
        return jax.lax.cond(flag[0] > 0, lambda x: x.sum(0), lambda x: jnp.ones((D,)) * 4, xs[0])

    def while_(xs: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, xs[0]))

    def while_by_example(xs: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.lax.while_loop(lambda c: c[1].sum() < 9 + c[0], lambda c: (c[0] + 1, c[1] + 2), (0, x))

        return jax.vmap(one)(xs[0])

    def while_of_all(xs: Any) -> Any:
        return jax.lax.while_loop(lambda c: c.sum() < 99, lambda c: c + 2, xs[0])

    one = [Spread(1)]
    return {
        "while": (while_, one, [seq], [None, E], 0),
        "while, by example": (while_by_example, one, [seq], [E, E], 0),
        "while, all examples": (while_of_all, one, [seq], [None], 0),
        "a carry of examples": (carried, one, [seq], [E, Spread(1)], 0),
        "gradients add up": (summed, [*one, None], [seq, w], [P, Spread(1)], 0),
        "gradients and decay": (decayed, [*one, None], [seq, v], [P], 0),
        "a norm in the loop": (normed, one, [seq], [None, Spread(1)], 1),
        "over examples": (over_examples, one, [seq], [None, None], 0),
        "remat": (remat, one, [seq], [P], 0),
        "cond": (cond, [*one, None], [seq, v], [P], 0),
    }


@pytest.mark.parametrize("name", loop_cases())
def test_loops_and_branches(name: str) -> None:
    fun, given, args, expected, nested = loop_cases()[name]
    wanted = jax.tree.leaves(fun(*args))

    def flat(*xs: Any) -> list[Any]:
        return jax.tree.leaves(fun(*xs))

    found = run(flat, given, args)
    assert [state for state, _ in found] == list(expected)
    walk, _, _ = local_program(flat, given, args)
    assert sum(r.nested for r in walk.shared.reductions) == nested
    for (state, parts), theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(_whole(state, parts), np.asarray(theirs))


def test_what_depends_on_a_sum_is_told() -> None:
    def normed(a: Any) -> Any:
        return [a - a.mean(0)]

    walk, _, _ = local_program(normed, [E], [x])
    assert walk.shared.examples_meet is not None and "depend on a sum over all" in str(walk.shared.examples_meet)
    assert "test_local.py" in str(walk.shared.examples_meet)
    walk, _, _ = local_program(lambda a, b: [a @ b.T], [E, E], [x, y])
    assert "examples with other examples" in str(walk.shared.examples_meet)
    walk, _, _ = local_program(lambda a, b: [jnp.tanh(a @ b).sum() ** 2], [E, None], [x, w])
    assert walk.shared.examples_meet is None and len(walk.shared.reductions) == 1
