"""Programs for the devices of a mesh are made in one place, so that none is a wait that the watchdog can't see."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.backends.global_arrays import Watched, jit_on
from autopar.launch.progress import Progress

PACKAGE = Path(autopar.__file__).parent
#: Programs of stages, each of which has devices of one process.
OF_STAGES = {("run/stage_executor.py", "lower"), ("state/init.py", "run")}


def jitted_on_meshes(tree: ast.AST, function: str = "") -> set[str]:
    """Functions that call `jax.jit` with shardings, or of a function that is mapped over a mesh."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.jit":
            named = {str(keyword.arg) for keyword in node.keywords}
            called = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
            if named & {"in_shardings", "out_shardings"} or called & {"shard_map", "local"}:
                found.add(function)
        found |= jitted_on_meshes(node, inner)
    return found


def test_no_program_of_a_mesh_is_made_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    found = {(path.relative_to(PACKAGE).as_posix(), f) for path, tree in trees.items() for f in jitted_on_meshes(tree)}
    assert found == OF_STAGES


@pytest.mark.parametrize("sharded", [False, True])
def test_a_program_of_several_processes(sharded: bool) -> None:
    here = Progress()
    here.watched = True
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    options = {"out_shardings": [NamedSharding(mesh, P("data")), None]} if sharded else {}
    kinds: list[str] = []

    def run(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        jax.debug.callback(lambda: kinds.append(here.seen.kind))
        return [x + y, x.sum()]

    program = Watched(run, {2, 3}, "on the devices", {**options, "donate_argnums": 0}, here)
    for k in range(2):
        made, total = program(jnp.full(3, float(k)), jnp.ones(3))
        assert made.tolist() == [k + 1.0] * 3 and float(total) == 3 * k
    jax.effects_barrier()
    assert kinds == ["waits"] * 2
    assert here.seen.kind == "computes"


def test_a_program_of_one_process_is_jax_s_own() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    assert type(jit_on(mesh, jnp.sin)) is type(jax.jit(jnp.sin))
