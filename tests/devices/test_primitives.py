"""What each device's own program makes of each primitive, by brute force.

Each function is evaluated on operands that are spread over the devices along each of their axes in turn, and must give
what it gives on one device. XLA's own partitioner gets several of them wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import autopar
from tests.support.meshes import mesh_of
from tests.support.pairs import long
from tests.support.partitioned import GROUPS, IDS, convolution

N = 4


#: (operand, axis) that is spread; all along their first axes.
Variant = tuple[int | None, int | None]


def variants(shapes: Sequence[tuple[int, ...]]) -> list[Variant]:
    """Each way to spread one operand; at last all along their first axes."""
    found: list[Variant] = [(k, d) for k, shape in enumerate(shapes) for d, n in enumerate(shape) if n % N == 0]
    return [*found, (None, None)] if len(shapes) > 1 else found


def of_size(size: int) -> Callable[[Sequence[tuple[int, ...]]], list[Variant]]:
    """Each way to spread one operand along an axis of a size."""
    return lambda shapes: [(k, d) for k, shape in enumerate(shapes) for d, n in enumerate(shape) if n == size]


SOME = ["reductions", "indices", *(long(g) for g in GROUPS if g not in ("reductions", "indices"))]


@pytest.mark.parametrize("group", SOME)
def test_every_primitive(group: str) -> None:
    """Of examples that the devices divide, and of those that they don't; of several groups of devices over one."""
    for count, spread in ((4, variants), (3, of_size(4)), (3, of_size(8))):
        check_group(group, mesh_of(count), spread)
    check_group(group, jax.make_mesh((N // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2), variants)


def check_group(group: str, mesh: Any, spread: Callable[[Sequence[tuple[int, ...]]], list[Variant]]) -> None:
    """Compares all functions of a group, with operands spread in some ways."""
    batch: dict[str, Any] = {}
    axes: dict[str, int | None] = {}
    calls: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, (fun, shapes) in GROUPS[group].items():
        for operand, axis in spread(shapes):
            paths = [f"{name} {operand} {axis} {k}" for k in range(len(shapes))]
            for k, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
                batch[path] = np.random.default_rng(k).normal(size=shape).astype(np.float32)
                along = axis if k == operand else 0 if operand is None and shape[0] % N == 0 else None
                axes[f"batch/{path}"] = along
            calls[f"{name} {operand} {axis}"] = fun, paths

    def evaluate(batch: Any) -> Any:
        found = {}
        for name, (fun, paths) in calls.items():
            value = fun(*(batch[p] for p in paths))
            found[name] = [value]
            if jnp.issubdtype(value.dtype, jnp.floating) and "NaN" not in name and group != "gradients by example":

                def loss(*xs: Any, fun: Any = fun) -> Any:
                    value = fun(*xs)
                    return jnp.sum(value * jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape))

                if not name.startswith("top_k"):
                    found[name] += jax.grad(loss, tuple(range(len(paths))))(*(batch[p] for p in paths))
        return found

    planned = autopar.parallelize(evaluate, mesh=mesh, data_axis="data", batch_axis=axes)
    mine, theirs = planned(batch), jax.jit(evaluate)(batch)
    wrong = []
    for name, expected in theirs.items():
        for k, (a, b) in enumerate(zip(mine[name], expected, strict=True)):
            scale = np.nanmax(np.abs(np.asarray(b)), initial=1e-6)
            if not np.allclose(a, b, rtol=1e-4, atol=1e-4 * scale, equal_nan=True):
                wrong.append((name, k))
    assert not wrong, wrong


# --- maxima and cumulative reductions in nested programs ---


def looped(fun: Callable[..., Any], x: jax.Array) -> Any:
    """In a loop that autopar doesn't follow the examples into."""
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fun, x))
    return lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, fun(x + c[0])), (0, empty))[1]


def derived(fun: Callable[..., Any], x: jax.Array) -> Any:
    outer = jax.custom_vjp(lambda x: jax.jit(fun)(x))
    outer.defvjp(lambda x: (fun(x), None), lambda rest, g: (g,))
    return outer(x)


NESTED: Mapping[str, Callable[..., Any]] = {
    "top": lambda fun, x: fun(x),
    "while": looped,
    "scan": lambda fun, x: lax.scan(lambda c, k: (c, fun(x * k)), 0, jnp.ones(2))[1],
    "cond": lambda fun, x: lax.cond(jnp.isnan(x).any(), fun, lambda x: fun(2 * x), x),
    "remat": lambda fun, x: jax.checkpoint(fun)(x),
    "custom_vjp": derived,
    "unknown place": lambda fun, x: fun(jnp.concatenate([x.T, x.T], 1)[:, :8].T),
}
SPREAD: Mapping[str, Callable[..., Any]] = {
    "maxima": lambda x: (x.max(0), x.max(1), x.max()),
    "minima": lambda x: (x.min(0), x.min(1), jnp.abs(x).min()),
    "scattered": lambda x: (jnp.zeros(8).at[IDS % 2].max(x[:, 0]), jax.ops.segment_min(x.T, IDS[:4] % 2, 8)),
    "cumulative": lambda x: (lax.cumprod(x, 0), lax.cumsum(x, 0), lax.cummin(x, 1), lax.cummax(x, 1)),
    "softmax": lambda x: (jax.nn.softmax(x, 0), jax.nn.logsumexp(x, 1)),
}


@pytest.mark.parametrize("nested", NESTED)
def test_a_nan_and_what_is_accumulated(nested: str) -> None:
    def evaluate(batch: Any) -> Any:
        return {(axis, op): NESTED[nested](fun, x) for axis, x in batch.items() for op, fun in SPREAD.items()}

    planned = autopar.parallelize(evaluate, mesh=mesh_of(N), batch_axis={"batch/0": 0, "batch/1": 1})
    plain = jax.jit(evaluate)
    for row, column, value in ((0, 0, 1.0), (5, 2, np.nan), (2, 0, -np.inf)):
        x = np.random.default_rng(3).normal(size=(8, 4)).astype(np.float32)
        x[row, column] = value
        batch = {"0": x, "1": x}
        mine, theirs = planned(batch), plain(batch)
        wrong = [
            (key, k)
            for key, found in theirs.items()
            for k, (a, b) in enumerate(zip(mine[key], found, strict=True))
            if not np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        ]
        assert not wrong, (value, wrong)


@pytest.mark.parametrize("strategy", ["ps", "allgather"])
def test_what_each_device_does_on_its_examples_stays(strategy: Any) -> None:
    """A maximum over classes, of examples that look rows up: nothing can be lost."""

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            logits = jnp.tanh(state["table"][batch["ids"]]) @ state["w"]
            return -jnp.mean(jax.nn.log_softmax(logits)[:, 0]), (jnp.cumsum(logits, 1), logits)

        (_, (sums, logits)), grads = jax.value_and_grad(loss, has_aux=True)(state)
        largest = jnp.max(logits) if batch["most"].shape else logits.max(1)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), (sums, largest)

    state = {"table": jnp.arange(88.0).reshape(22, 4), "w": jnp.ones((4, 6))}
    for most in (False, True):
        batch = {"ids": np.arange(8, dtype=np.int32) * 3 % 22, "most": np.zeros((1,) if most else ())}
        planned = autopar.parallelize(
            step, mesh=mesh_of(N), donate=False, strategy=strategy, batch_axis={"batch/ids": 0, "**": None}
        )
        state["table"] = state["table"].at[3, 1].set(jnp.nan)
        (_, mine), (_, theirs) = planned(state, batch), jax.jit(step)(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), mine, theirs)


# --- whole steps ---


def images(examples: int = 8) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    params = {"kernel": jnp.asarray(0.1 * rng.normal(size=(3, 3, 4, 8)), jnp.float32), "bias": jnp.zeros(8)}
    x, y = rng.normal(size=(examples, 6, 6, 4)), rng.normal(size=(examples, 8))
    return params, {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of one example."""
    hidden = jnp.tanh(convolution()(x[None], params["kernel"])[0] + params["bias"])
    return jnp.sum((hidden.max((0, 1)) - y) ** 2)


def private(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """A step that clips each example's gradient, as in JAX's own differentially_private_sgd example."""

    def step(params: Any, batch: Any) -> Any:
        grads = gradients(params, batch["x"], batch["y"])
        norms = jnp.sqrt(sum(jnp.sum(g.reshape(g.shape[0], -1) ** 2, 1) for g in jax.tree.leaves(grads)))
        scale = 1 / jnp.maximum(norms, 1.0)
        clipped = jax.tree.map(lambda g: jnp.einsum("b,b...->...", scale, g) / scale.size, grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, clipped), norms

    return step


PER_EXAMPLE = jax.vmap(jax.grad(loss_of), (None, 0, 0))


def in_scan(params: Any, x: jax.Array, y: jax.Array) -> Any:
    """Two microbatches, whose examples lie behind one another."""
    parts = jax.tree.map(lambda a: a.reshape(a.shape[0] // 2, 2, *a.shape[1:]).swapaxes(0, 1), (x, y))
    _, grads = lax.scan(lambda c, part: (c, PER_EXAMPLE(params, *part)), 0, parts)
    return jax.tree.map(lambda g: g.swapaxes(0, 1).reshape(-1, *g.shape[2:]), grads)


def in_cond(params: Any, x: jax.Array, y: jax.Array) -> Any:
    some = lax.cond(y.sum() < 1e6, lambda x: x, lambda x: 2 * x, x)
    return lax.cond(y.sum() < 1e6, PER_EXAMPLE, lambda p, x, y: PER_EXAMPLE(p, -x, y), params, some, y)


def in_remat(params: Any, x: jax.Array, y: jax.Array) -> Any:
    return jax.vmap(jax.grad(jax.checkpoint(loss_of)), (None, 0, 0))(params, x, y)


@jax.custom_vjp
def scaled(x: jax.Array) -> jax.Array:
    return x


scaled.defvjp(lambda x: (x, x.sum()), lambda rest, g: (g * jnp.tanh(rest),))


def in_custom_vjp(params: Any, x: jax.Array, y: jax.Array) -> Any:
    return jax.vmap(jax.grad(lambda p, x, y: scaled(loss_of(p, x, y))), (None, 0, 0))(params, x, y)


def relative(mine: Any, theirs: Any, old: Any) -> float:
    """The largest error of a leaf's change, over its largest change."""
    leaves = zip(*map(jax.tree.leaves, (mine, theirs, old)), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max() / np.abs(b - np.asarray(c)).max()) for a, b, c in leaves)


@pytest.mark.parametrize("gradients", [PER_EXAMPLE, in_scan, in_cond, in_remat, in_custom_vjp])
def test_clipped_gradients_by_example(gradients: Any) -> None:
    step, (params, batch) = private(gradients), images()
    planned = autopar.parallelize(step, mesh=mesh_of(N), donate=False)
    (new, norms), (expected, told) = planned(params, batch), jax.jit(step)(params, batch)
    assert relative(new, expected, params) < 1e-5
    np.testing.assert_allclose(norms, told, rtol=1e-4)


def test_examples_that_the_devices_do_not_divide() -> None:
    """A guard: all devices have all of them."""
    step, (params, batch) = private(PER_EXAMPLE), images(6)
    planned = autopar.parallelize(step, mesh=mesh_of(N), donate=False)
    assert relative(planned(params, batch)[0], jax.jit(step)(params, batch)[0], params) < 1e-5


def test_a_step_written_for_one_device() -> None:
    """Its gradients, one for each device, are those of convolutions in groups once it is batched over the devices. A
    guard: XLA gets those right whose groups are the devices."""

    def step(params: Any, batch: Any) -> Any:
        def mean(p: Any) -> Any:
            return jax.vmap(loss_of, (None, 0, 0))(p, batch["x"], batch["y"]).mean()

        loss, grads = lax.pmean(jax.value_and_grad(mean)(params), "batch")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, batch = images()
    planned = autopar.parallelize(step, mesh=mesh_of(N), donate=False, axis_name="batch")
    whole = jax.vmap(step, (None, None), axis_name="batch", axis_size=1)
    expected = jax.tree.map(lambda x: x[0], jax.jit(whole)(params, batch))
    new, _ = planned(params, batch)
    assert relative(new, expected[0], params) < 1e-5


@pytest.mark.parametrize("strategy", ["ps", {"**": "ps"}, ("ps", "hosts")], ids=str)
def test_beside_a_table(strategy: Any) -> None:
    """Rows by themselves, dense parameters in shards, and tables on a host that has several devices."""

    def step(state: Any, batch: Any) -> Any:
        params = state["params"]
        rest, _ = private(PER_EXAMPLE)(params, batch)
        grad = jax.grad(lambda t: jnp.sum(t[batch["ids"]] ** 2))(state["table"])
        return {"params": rest, "table": state["table"] - 0.1 * grad}, batch["ids"].sum()

    params, batch = images()
    state = {"params": params, "table": jnp.arange(64.0).reshape(16, 4)}
    batch["ids"] = np.arange(8, dtype=np.int32) * 3 % 16
    mesh = None if isinstance(strategy, tuple) else mesh_of(N)
    planned = autopar.parallelize(step, mesh=mesh, donate=False, strategy=strategy)
    mine, theirs = autopar.materialize(planned(state, batch)[0]), jax.jit(step)(state, batch)[0]
    assert relative(mine, theirs, state) < 1e-5


def test_updates_that_the_devices_do_not_divide() -> None:
    """XLA would spread the ids of two inner steps over groups of devices, and add a fourth update to the first row."""

    def inner(state: Any, batch: Any) -> Any:
        ids = jnp.nonzero(jnp.zeros(8).at[state["ids"]].set(1), size=3)[0]
        value, grad = jax.value_and_grad(lambda t: jnp.sum(t[ids] * batch["y"][:3, None]))(state["t"])
        seen = state["seen"].at[batch["ids"]].set(state["count"])
        moved = state["t"] - grad
        moved = jnp.where((state["count"] - seen >= 20)[:, None], 0.5 * moved, moved)
        return {"t": moved, "seen": seen, "count": state["count"] + 1, "ids": state["ids"] + 1}, value

    def step(state: Any, batch: Any) -> Any:
        return lax.scan(lambda state, _: inner(state, batch), state, length=2)

    state = {
        "t": jnp.zeros((8, 1)),
        "seen": jnp.zeros(8, jnp.int32),
        "count": jnp.int32(0),
        "ids": jnp.arange(4),
    }
    batch = {"ids": jnp.asarray([0, 6, 0, 4]), "y": jnp.asarray([1.0, 10.0, 100.0, 1000.0])}
    planned = autopar.parallelize(step, mesh=mesh_of(N), donate=False, strategy="allreduce_rows")
    mine, theirs = planned(state, batch)[0], jax.jit(step)(state, batch)[0]
    np.testing.assert_allclose(autopar.materialize(mine)["t"], theirs["t"], rtol=1e-6)
