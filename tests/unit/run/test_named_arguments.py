"""Static and donated arguments, named as for `jax.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

IDS = jnp.array([1, 4, 4])


def step(table: jax.Array, ids: jax.Array, rate: float, kind: str = "sum", *, sign: int = 1) -> Any:
    reduced = jnp.sum if kind == "sum" else jnp.mean
    loss, gradient = jax.value_and_grad(lambda t: reduced(t[ids] ** 2) * sign)(table)
    return table - rate * gradient, {kind: loss}


def make_table() -> jax.Array:
    return jnp.arange(60.0).reshape(20, 3)


def same(planned: Any, plain: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), planned, plain)


#: How `kind`, the fourth argument, and `sign`, which is passed by keyword alone, are said to be static.
NAMED: dict[str, dict[str, Any]] = {
    "positions": {"static_argnums": 3},
    "name": {"static_argnames": "kind"},
    "names": {"static_argnames": ("kind", "sign")},
    "both": {"static_argnums": 3, "static_argnames": ["kind", "sign"]},
}


@pytest.mark.filterwarnings("ignore::autopar.RecompileWarning")
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize("named", NAMED)
def test_static_arguments_are_named_as_for_jit(named: str, wrapped: bool) -> None:
    """By position and by keyword, for autopar or for the `jax.jit` that has wrapped the step."""
    jitted = jax.jit(step, **NAMED[named])
    planned = autopar.parallelize(
        jitted if wrapped else step, strategy="ps", donate=False, **({} if wrapped else NAMED[named])
    )
    signs = {"sign": -1} if "sign" in str(NAMED[named]) else {}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {"kind": "sum"}), (("sum",), {}), ((), {})]
    for args, kwargs in calls:
        arguments = (make_table(), IDS, 0.1, *args)
        same(planned(*arguments, **kwargs, **signs), jitted(*arguments, **kwargs, **signs))
    assert planned.plan is not None and [p.path for p in planned.plan.parameters if p.lifted] == ["table"]
    with pytest.warns(autopar.RecompileWarning, match="a static argument changed"):
        same(
            planned(make_table(), IDS, 0.1, kind="mean", **signs), jitted(make_table(), IDS, 0.1, kind="mean", **signs)
        )
    assert autopar.verify(planned, make_table(), IDS, 0.1, kind="sum", **signs).ok
    assert "module" in planned.lower(make_table(), IDS, 0.1, kind="sum", **signs).as_text()


def test_statics_of_autopar_join_those_of_jit() -> None:
    planned = autopar.parallelize(jax.jit(step, static_argnames="kind"), static_argnames="sign", donate=False)
    plain = jax.jit(step, static_argnames=("kind", "sign"))
    same(planned(make_table(), IDS, 0.1, kind="mean", sign=-1), plain(make_table(), IDS, 0.1, kind="mean", sign=-1))


def test_equal_static_values_of_other_types_are_others() -> None:
    def scaled(table: jax.Array, ids: jax.Array, times: Any) -> Any:
        return table - 0.1 * jax.grad(lambda t: jnp.sum(t[ids]))(table), ids * times

    planned, plain = autopar.parallelize(scaled, static_argnums=2, donate=False), jax.jit(scaled, static_argnums=2)
    planned(make_table(), IDS, 1)
    for times in (1.0, True):
        with pytest.warns(autopar.RecompileWarning, match="static argument"):
            mine = planned(make_table(), IDS, times)[1]
        assert mine.dtype == plain(make_table(), IDS, times)[1].dtype


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"static_argnums": 4}, r"argument 4; step takes 4, numbered from 0\. .* by keyword: static_argnames='sign'"),
        (
            {"static_argnames": "king"},
            "static_argnames names 'king'; step takes table, ids, rate, kind, sign by keyword",
        ),
        ({"static_argnames": 3}, "static_argnames=3: give names"),
        ({"donate_argnames": ("table", 0)}, "donate_argnames=.*: give names"),
        ({"donate_argnums": 9}, "donate_argnums names argument 9"),
        ({"static_argnums": 0, "donate_argnames": "table"}, "argument 0 is static and donated"),
        ({"donate": False, "donate_argnums": 0}, "donate=False, and donate_argnums"),
    ],
)
def test_names_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=told):
        autopar.parallelize(step, **options)


def test_what_is_static_is_told_how_to_say_so() -> None:
    with pytest.raises(autopar.ArgumentsError, match=r"kind is no array .*static_argnames='kind'\)"):
        autopar.parallelize(step)(make_table(), IDS, 0.1, kind="sum")
    with pytest.raises(autopar.ArgumentsError, match=r"kind is no array .*static_argnums=3\)"):
        autopar.parallelize(step)(make_table(), IDS, 0.1, "sum")


def momentum(params: Any, slots: Any, ids: jax.Array) -> Any:
    gradient = jax.grad(lambda p: jnp.sum(p["t"][ids] ** 2))(params)
    slots = jax.tree.map(lambda s, g: 0.9 * s + g, slots, gradient)
    return jax.tree.map(lambda p, s: p - 0.1 * s, params, slots), slots, jnp.sum(ids)


def make_state() -> tuple[Any, Any]:
    return {"t": make_table()}, {"t": jnp.zeros((20, 3))}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({}, True),
        ({"donate_argnums": (0, 1)}, True),
        ({"donate_argnames": ("params", "slots")}, True),
        ({"donate_argnums": (0, 1, 2)}, True),
        ({"donate_argnums": ()}, False),
        ({"donate_argnums": 2}, False),
        ({"donate": False}, False),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "jitted"])
def test_donated_arguments_are_named_as_for_jit(options: dict[str, Any], gone: bool, wrapped: bool) -> None:
    """But for a `jax.jit` that donates nothing: that is its default, and autopar's is to update in place."""
    if wrapped and "donate" not in options:
        planned = autopar.parallelize(jax.jit(momentum, **options))
        gone = gone or options == {"donate_argnums": ()}
    else:
        planned = autopar.parallelize(momentum, **options)
    for call in (lambda p, s: planned(p, s, IDS), lambda p, s: planned(params=p, slots=s, ids=IDS)):
        params, slots = make_state()
        same(call(params, slots), momentum(*make_state(), IDS))
        assert params["t"].is_deleted() == slots["t"].is_deleted() == gone and not IDS.is_deleted()


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "jitted"])
def test_a_part_of_the_state_that_is_donated_is_told_of(wrapped: bool) -> None:
    planned = (
        autopar.parallelize(jax.jit(momentum, donate_argnums=0))
        if wrapped
        else autopar.parallelize(momentum, donate_argnums=0)
    )
    params, slots = make_state()
    with pytest.warns(autopar.SlowPlanWarning, match="momentum: donate_argnums .* leaves out 'slots': so each step"):
        planned(params, slots, IDS)
    assert not params["t"].is_deleted() and not slots["t"].is_deleted()


def test_a_partial_of_a_method() -> None:
    class Trainer:
        @autopar.parallelize(static_argnames=("self", "kind"), strategy="ps", donate=False)
        def step(self, table: jax.Array, ids: jax.Array, *, kind: str) -> Any:
            return step(table, ids, 0.1, kind)

    trainer = Trainer()
    mean: Callable[..., Any] = functools.partial(trainer.step, kind="mean")
    same(mean(make_table(), IDS), step(make_table(), IDS, 0.1, "mean"))
