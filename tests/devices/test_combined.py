"""Collectives of a device's program that share messages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import autopar
from autopar.backends.combined import combined, schedule
from autopar.measure.compiled_collectives import read_collectives
from tests.support.meshes import mesh_of

AXIS, COUNT = "data", 4
TYPES = ("float32", "int32", "bfloat16", "float16", "int8", "bool", "uint32", "complex64")


def on_devices(fun: Any, *operands: jax.Array) -> Any:
    spec = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(fun, mesh=mesh_of(COUNT), in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*operands).compile()


def counts(compiled: Any) -> dict[str, int]:
    names = [c.op for c in read_collectives(compiled.as_text())]
    return {name: names.count(name) for name in names}


def values(kind: str, seed: int) -> jax.Array:
    numbers = np.random.default_rng(seed).integers(-100, 100, (COUNT * COUNT, 3, 2 + seed % 3))
    return jnp.asarray(numbers % 2 == 0 if kind == "bool" else numbers / (1 if "int" in kind else 7)).astype(kind)


def test_what_moves_in_a_round_is_one_message() -> None:
    """Of all sizes, dtypes and axes: the same bits as by themselves."""

    def fun(*xs: jax.Array) -> Sequence[jax.Array]:
        gathers = [lax.all_gather(x, AXIS, axis=k % 3, tiled=k % 2 == 0).reshape(COUNT, -1) for k, x in enumerate(xs)]
        swaps = [lax.all_to_all(x, AXIS, 0, 0, tiled=k % 2 == 0) for k, x in enumerate(xs)]
        behind = lax.all_gather(swaps[0] + swaps[1].astype(np.float32).sum(), AXIS, tiled=True)
        return *gathers, *swaps, behind

    given = [values(kind, seed) for seed, kind in enumerate(itertools.chain(TYPES, TYPES))]
    empty = [jnp.zeros((COUNT * COUNT, 3, 0), kind) for kind in ("float32", "int8")]  # XLA drops it
    alone, together = on_devices(fun, *given, *empty), on_devices(combined(fun), *given, *empty)
    for a, b in zip(alone(*given, *empty), together(*given, *empty), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    # Of 4, 2, 1 and 8 bytes, and flags; those of 4 wait for the one behind an exchange.
    assert counts(together) == {"all-gather": 5, "all-to-all": 5}
    assert counts(alone)["all-gather"] == len(given) + 1


def test_large_arrays_are_messages_of_their_own() -> None:
    """Weights that are gathered for use aren't all in memory at once."""

    def fun(*xs: jax.Array) -> Sequence[jax.Array]:
        return [lax.all_gather(x, AXIS, tiled=True) for x in xs]

    large = [jnp.full((COUNT, 1 << 17), k, np.float32) for k in range(2)]  # 2 MiB on each device
    small = [jnp.full((COUNT, 1 << 10), k, np.float32) for k in range(3)]
    compiled = on_devices(combined(fun), *large, *small)
    assert counts(compiled) == {"all-gather": 2 + 1}
    assert all(
        np.array_equal(a, jnp.tile(b, (COUNT, 1))) for a, b in zip(compiled(*large, *small), large + small, strict=True)
    )


def test_what_is_not_needed_yet_waits_for_others_of_its_kind() -> None:
    """A gather in the first round, of which nothing depends, goes with one in the third; what depends on it does so."""

    def fun(x: jax.Array) -> Sequence[jax.Array]:
        early = lax.all_gather(x, AXIS, tiled=True) * 2
        behind = lax.all_to_all(lax.psum(x, AXIS).reshape(COUNT, -1), AXIS, 0, 0)
        return early, lax.all_gather(behind, AXIS, tiled=True), lax.all_gather(x.sum() + behind, AXIS, tiled=True)

    x = values("float32", 2)
    alone, together = on_devices(fun, x), on_devices(combined(fun), x)
    assert all(np.array_equal(a, b) for a, b in zip(alone(x), together(x), strict=True))
    assert counts(together) == {"all-reduce": 1, "all-to-all": 1, "all-gather": 1}


def test_small_sums_and_gathers_as_messages_to_all() -> None:
    """As between CPUs of several processes. Sums are those in the devices' order, to the bit; large ones stay alone.
    What the compiled program is read to send are all arrays."""

    def fun(*xs: jax.Array) -> Sequence[jax.Array]:
        gathers = [lax.all_gather(x, AXIS, axis=k % 3, tiled=k % 2 == 0).reshape(COUNT, -1) for k, x in enumerate(xs)]
        sums = [lax.psum(x, AXIS) for x in xs if x.dtype != bool]
        largest = lax.pmax(xs[0], AXIS)
        return *gathers, *sums, largest, lax.psum(sums[0].sum(), AXIS)[None]

    given = [values(kind, seed) for seed, kind in enumerate(itertools.chain(TYPES, TYPES))]
    given += [jnp.full((COUNT, 3), x, np.float32) for x in (-0.0, np.nan)] + [jnp.ones((COUNT, 1 << 19), np.int8)]
    given += [jnp.linspace(-3, 5, COUNT * n).reshape(COUNT, 1, n) ** 3 for n in (1, 1001)]
    given += [given[-1].astype(np.complex64) * (1 + 0.3j)]
    alone, together = on_devices(fun, *given), on_devices(combined(fun, direct=True), *given)
    flat = iter(zip(alone(*given), together(*given), strict=True))
    for a, b in itertools.islice(flat, len(given)):
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan="float" in str(a.dtype))
    for x in (x for x in given if x.dtype != bool):
        a, b = next(flat)
        parts = np.asarray(x).reshape(COUNT, -1)
        whole = np.asarray(b).reshape(COUNT, -1)
        assert a.dtype == b.dtype
        assert np.array_equal(whole, np.tile(whole[0], (COUNT, 1)), equal_nan="float" in str(a.dtype)), "on all devices"
        if x.dtype.itemsize >= 4:  # XLA may round sums of narrow floats once
            expected = functools.reduce(np.add, parts)
            assert np.array_equal(whole[0], expected, equal_nan=True)
            assert np.array_equal(np.signbit(whole[0].real), np.signbit(expected.real)), "-0.0 stays"
        np.testing.assert_allclose(*(np.asarray(y).astype(np.complex64) for y in (a, b)), rtol=2e-2, atol=2)
    assert all(np.array_equal(a, b) for a, b in flat)
    sent = {op: sum(c.nbytes for c in read_collectives(together.as_text()) if c.op == op) for op in counts(together)}
    summed = [x.nbytes // COUNT for x in given if x.dtype != bool] + [given[0].nbytes // COUNT, 4]
    assert sent == {"all-gather": sum(x.nbytes for x in given), "all-reduce": sum(summed)}
    # Sums of the two rounds and seven dtypes, gathers of four widths and flags, the largest and the int8 array alone.
    assert counts(together) == {"all-gather": 5 + 1, "all-reduce": 1 + 7 + 1}


def test_effects_stay_in_their_order() -> None:
    def fun(x: jax.Array) -> jax.Array:
        jax.debug.print("first {}", lax.psum(x.sum(), AXIS))
        jax.debug.print("second {}", x.sum())
        return lax.all_gather(x, AXIS) + x.sum()

    def program(x: jax.Array) -> jax.Array:
        order = [e for _, (e, *_) in schedule(jax.make_jaxpr(fun)(x).eqns) if "debug" in e.primitive.name]
        seen.append([e.params.get("fmt", str(e.params)) for e in order])
        return x

    seen: list[Any] = []
    on_devices(program, jnp.ones((COUNT, 3)))
    ((first, second),) = seen
    assert "first" in str(first) and "second" in str(second)


@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows"])
def test_tables_share_exchanges(method: str) -> None:
    """Of eight tables each exchange is one collective; bytes are those of the plan."""
    state = {f"t{k}": jnp.linspace(0, 1, 8 * (50 + k)).reshape(-1, 8) for k in range(8)}
    optimizer = optax.adagrad(0.1)

    def step(state: Any, batch: Any) -> Any:
        def loss(tables: Any) -> jax.Array:
            rows = [t[batch[:, k] % len(t)] for k, t in enumerate(tables.values())]
            return sum((a * b).sum() for a, b in itertools.pairwise(rows))

        tables, slots = state
        value, grads = jax.value_and_grad(loss)(tables)
        updates, slots = optimizer.update(grads, slots, tables)
        return (optax.apply_updates(tables, updates), slots), value

    given = (state, optimizer.init(state)), np.arange(16 * 8, dtype=np.int32).reshape(16, 8) * 7
    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(COUNT), donate=False)
    assert autopar.verify(planned, *given, steps=3).ok
    found = autopar.check(planned, *given)
    assert found.ok, str(found)
    compiled = planned.lower(*given).compile()
    exchanges = {"ps": {"all-to-all": 3}, "allgather": {"all-gather": 2}, "allreduce_rows": {"all-gather": 1}}[method]
    made = counts(compiled)
    assert {op: made[op] for op in exchanges} == exchanges, made
