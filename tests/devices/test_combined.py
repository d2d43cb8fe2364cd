"""Collectives of a device's program that share messages."""

from __future__ import annotations

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
from autopar.measure.collectives import read_collectives
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
    # Of 4, 2, 1 and 8 bytes, and flags; what is behind an exchange is in a round of its own.
    assert counts(together) == {"all-gather": 5 + 1, "all-to-all": 5}
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


def test_effects_stay_in_their_order() -> None:
    def fun(x: jax.Array) -> jax.Array:
        jax.debug.print("first {}", lax.psum(x.sum(), AXIS))
        jax.debug.print("second {}", x.sum())
        return lax.all_gather(x, AXIS) + x.sum()

    def program(x: jax.Array) -> jax.Array:
        order = [e for (e, *_) in schedule(jax.make_jaxpr(fun)(x).eqns) if "debug" in e.primitive.name]
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
