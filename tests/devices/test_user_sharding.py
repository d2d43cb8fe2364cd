"""Steps that say themselves where their values are: `shard_map`, sharding constraints, `custom_partitioning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.row_steps import same

D, B = 8, 16
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def _both(x: Any) -> Any:
    return jax.lax.psum(x, ("x", "y"))


def _both_of(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.psum((a * b).sum(), "y")


def sums(w: jax.Array, x: jax.Array) -> jax.Array:
    """Sums over one axis and over both, a place of its own, and of a neighbour's."""
    own = jnp.tanh(x @ w) + jax.lax.axis_index("x")
    beside = jax.lax.ppermute(own, "y", [(0, 1), (1, 0)])
    return jax.lax.pmean(_both_of(own, beside), "x") + _both((own**2).sum())


def gathers(w: jax.Array, x: jax.Array) -> jax.Array:
    everyone = jax.lax.all_gather(x @ w, ("x", "y"), tiled=True)
    scattered = jax.lax.psum_scatter(everyone, ("y", "x"), tiled=True)
    swapped = jax.lax.all_to_all(x @ w, "x", 1, 0, tiled=True)
    return _both((scattered**3).mean() + jnp.cos(swapped).sum()) / 7


def loops(w: jax.Array, x: jax.Array) -> jax.Array:
    def turn(carry: jax.Array, row: jax.Array) -> Any:
        return carry + jax.lax.psum(jnp.sin(row @ w).sum(), ("x", "y")), ()

    total, _ = jax.lax.scan(turn, jnp.zeros(()), x)
    return total


def with_options(body: Callable[..., jax.Array], mesh: Mesh, specs: Any, **options: Any) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), **options)(w, x)

        loss, g = jax.value_and_grad(loss_of)(w)
        return w - 0.01 * g, loss

    return step


@pytest.mark.parametrize(
    ("body", "check"), [(sums, True), (sums, False), (loops, True), (loops, False), (gathers, False)]
)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_shard_maps(body: Callable[..., jax.Array], check: bool, devices: int) -> None:
    """Over a mesh of the user's, whatever devices the step is planned for; JAX can't check what is gathered."""
    step = with_options(body, MESH, (P(), P(("x", "y"))), check_vma=check)
    plain = jax.jit(with_options(body, MESH, (P(), P(("x", "y")))) if check else step)
    planned = autopar.parallelize(step, state_argnums=0, mesh=mesh_of(devices))
    mine, theirs = (jax.random.normal(jax.random.key(0), (D, D)) for _ in range(2))
    for k in range(3):
        x = jax.random.normal(jax.random.key(k), (B, D))
        (mine, a), (theirs, b) = planned(mine, x), plain(theirs, x)
        same((mine, a), (theirs, b))


def test_a_collective_that_cannot_be_batched() -> None:
    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        turned = jax.lax.ppermute(x @ w, ("x", "y"), [(k, (k + 1) % 4) for k in range(4)])
        return _both(turned.sum())

    planned = autopar.parallelize(with_options(body, MESH, (P(), P(("x", "y")))), state_argnums=0, mesh=mesh_of(4))
    with pytest.raises(autopar.StepError, match=r"its shard_map \(.*test_user_sharding\.py:\d+.*one axis at a time"):
        planned(jnp.ones((D, D)), jnp.ones((B, D)))


def test_results_in_shards() -> None:
    """A result along both axes of the mesh, one along one of them, and one that all have."""

    def body(w: jax.Array, x: jax.Array) -> Any:
        y = x @ w
        return y, jax.lax.psum(y, "y"), _both(y.sum()), y.T

    specs = (P(("y", "x")), P("x"), P(), P(None, ("y", "x")))

    def step(w: jax.Array, x: jax.Array) -> Any:
        a, b, c, d = jax.shard_map(body, mesh=MESH, in_specs=(P(), P(("y", "x"))), out_specs=specs)(w, x)
        return w - 0.1 * c * (a.T @ a), (a, b, d)

    w, x = jax.random.normal(jax.random.key(0), (D, D)), jax.random.normal(jax.random.key(1), (B, D))
    planned = autopar.parallelize(step, state_argnums=0, mesh=mesh_of(4))
    same(planned(w, x), jax.jit(step)(w, x))


def test_each_device_does_its_own() -> None:
    """A step whose examples a `shard_map` divides is divided as it would be without: one AllReduce, of the gradient."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.pmean((jnp.tanh(x @ w) ** 2).mean(), "x")

    planned = autopar.parallelize(with_options(body, mesh, (P(), P("x"))), state_argnums=0, mesh=mesh_of(4))
    text = planned.lower(jnp.ones((D, D)), jnp.ones((B, D))).compile().as_text()
    assert f"f32[{B // 4},{D}]" in text and f"f32[{B},{D}]" not in text and "all-gather" not in text


def test_constraints_are_told() -> None:
    """Numbers don't depend on them; the plan says where values are."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            hidden = jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("x", "y")))
            total, _ = jax.lax.scan(
                lambda c, h: (jax.lax.with_sharding_constraint(c + h, NamedSharding(MESH, P("y"))), ()), w[0], hidden
            )
            return (total**2).sum()

        loss, g = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * g, loss

    w, x = jax.random.normal(jax.random.key(0), (D, D)), jax.random.normal(jax.random.key(1), (B, D))
    planned = autopar.parallelize(step, state_argnums=0, mesh=mesh_of(4))
    same(planned(w, x), jax.jit(step)(w, x))
    assert "test_user_sharding.py" in explained(planned)
    assert "not followed, the plan says where values are" in explained(planned)


def test_custom_partitioning() -> None:
    """What is partitioned by the user's rules is as the function without them."""

    @custom_partitioning
    def scaled(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2

    def partition(mesh: Any, given: Any, returned: Any) -> Any:
        return mesh, lambda x: jnp.tanh(x) * 2, returned.sharding, (given[0].sharding,)

    scaled.def_partition(partition=partition, sharding_rule="i j -> i j")

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * (x.T @ scaled(x @ w)), scaled(x @ w).sum()

    w, x = jax.random.normal(jax.random.key(0), (D, D)), jax.random.normal(jax.random.key(1), (B, D))
    planned = autopar.parallelize(step, state_argnums=0, mesh=mesh_of(4))
    same(planned(w, x), jax.jit(step)(w, x))
    assert "XLA partitions" not in explained(planned)
