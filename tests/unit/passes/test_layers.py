"""Stacked leaves cut into parts: which leaves are, and that the program computes the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.emit import emit
from autopar.ir.paths import layers_path, matches_layers, split_layers
from autopar.ir.program import Program
from autopar.passes.staging.layers import cut_layers, find_stacks
from tests.support.microbatched import batch, language_model
from tests.support.pairs import diagonal

#: Of the model's layers.
STACKED = {"params/layers/w", "params/layers/b"}


def _program(step: Any, *args: Any) -> Program:
    planned = autopar.parallelize(step, microbatches=2, sparse="off")
    return planned.planned_for(*args).compiled.program


def _paths(program: Program) -> list[set[str]]:
    paths = {v: leaf.path for v, leaf in zip(program.block.inputs, program.inputs, strict=True)}
    return [{paths[v] for v in stack.leaves} for stack in find_stacks(program)]


#: Each with how many leaves of its state at least are stacked as the weights are.
OPTIMIZERS = {
    "sgd": (optax.sgd(0.1), 0),
    "clipped adamw": (optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 2),
    "lamb": (optax.lamb(1e-2), 2),  # a norm of each leaf: the sum of its parts'
    "adafactor": (optax.adafactor(1e-2), 1),
    "accumulated": (optax.MultiSteps(optax.adam(1e-2), 2), 0),
}


@pytest.mark.parametrize(("optimizer", "remat"), diagonal(OPTIMIZERS, [False, True]))
def test_a_cut_program_computes_the_same(optimizer: tuple[Any, int], remat: bool) -> None:
    tx, slots = optimizer
    with jax.enable_x64(True):
        step, make = language_model(tx, stacked=True, dropout=0.2, remat=remat)
        state, given = make(), batch(0)
        program = _program(step, state, given)
        (stack,) = find_stacks(program)
        (paths,) = _paths(program)
        assert stack.layers == 4 and paths >= STACKED
        assert sum(path not in STACKED for path in paths) >= slots
        cut = cut_layers(program, dict.fromkeys(stack.leaves, (1, 3, 4)))
        scans = [e.params["length"] for e in _body(cut.program).equations if e.op == "scan"]
        assert sorted(scans) == [1, 1, 1, 1, 2, 2]  # forward and backward
        leaves = jax.tree.leaves((state, given))
        expected = emit(program.block)(*leaves)
        parts = [
            part
            for leaf, own in zip(leaves, cut.inputs, strict=True)
            for part in ([leaf[:1], leaf[1:3], leaf[3:]] if isinstance(own, tuple) else [leaf])
        ]
        results = iter(emit(cut.program.block)(*parts))
        for whole, out in zip(expected, cut.outputs, strict=True):
            found = jnp.concatenate([next(results) for _ in out]) if isinstance(out, tuple) else next(results)
            if jax.dtypes.issubdtype(whole.dtype, jax.dtypes.prng_key):
                whole, found = jax.random.key_data(whole), jax.random.key_data(found)
            np.testing.assert_allclose(found, whole, atol=1e-12)


def _body(program: Program) -> Any:
    (equation,) = (e for e in program.block.equations if e.op == "ap.microbatches")
    return equation.bodies[0]


def test_what_is_read_otherwise_stays_whole() -> None:
    """Two stacks of a scan, of which a product reads one; one that is scanned over backwards by itself."""

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] + w[1]), None), x, (params["w"], params["b"]))
        y, _ = jax.lax.scan(lambda y, s: (y * s, None), y, params["scales"], reverse=True)
        return jnp.mean((y @ params["b"].T) ** 2)

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    params = {"w": np.ones((3, 4, 4)), "b": np.ones((3, 4)), "scales": np.ones((5, 4))}
    program = _program(step, params, np.ones((4, 4)))
    assert sorted(map(sorted, _paths(program))) == [["scales"], ["w"]]


def test_paths_of_layers() -> None:
    assert layers_path("a/w", (1, 3)) == ["a/w[0:1]", "a/w[1:3]"]
    assert split_layers("a/*[1:3]") == ("a/*", range(1, 3)) and split_layers("a/[1-3]") == ("a/[1-3]", None)
    assert matches_layers("a/**", "a/b/w[1:2]") and matches_layers("a/w[0:2]", "a/w[1:2]")
    assert not matches_layers("a/w[0:2]", "a/w[1:3]") and not matches_layers("a/w[0:2]", "a/w")
