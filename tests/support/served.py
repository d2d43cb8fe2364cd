"""Steps whose state servers keep, and jobs of workers and servers in one process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.compile import Compiled, analyze_program, compile_program
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.served import CUTTING, Cutting
from autopar.ir.trace import block_of
from autopar.ways.servers import OnServers

ROWS, WIDTH, EXAMPLES = 3000, 4, 8
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.scale(-0.05))


def initial(seed: int, optimizer: optax.GradientTransformation = CLIPPED, dtype: Any = np.float32) -> Any:
    """A table, two dense layers and the optimizer's slots."""
    random = np.random.default_rng(seed)
    params = {
        "table": jnp.asarray(random.normal(size=(ROWS, WIDTH)), dtype),
        "hidden": jnp.asarray(random.normal(size=(WIDTH, 6)), dtype),
        "out": jnp.asarray(random.normal(size=(6,)), dtype),
    }
    return params, optimizer.init(params)


def loss(params: Any, ids: Any, target: Any) -> Any:
    """Mean squared error of a mean of rows."""
    hidden = jnp.tanh(params["table"][ids].mean(1) @ params["hidden"])
    return jnp.mean((hidden @ params["out"] - target) ** 2)


def step(state: Any, ids: Any, target: Any) -> Any:
    """A train step with a clip by the global norm, and Adam's count."""
    params, slots = state
    value, gradients = jax.value_and_grad(loss)(params, ids, target)
    updates, slots = CLIPPED.update(gradients, slots, params)
    return (optax.apply_updates(params, updates), slots), value


def batch(seed: int, dtype: Any = np.float32) -> Any:
    """Ids of three rows of each example, and targets."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (EXAMPLES, 3)).astype(np.int32)
    return jnp.asarray(ids), jnp.asarray(random.normal(size=EXAMPLES), dtype)


def compiled(fun: Any, servers: int, *arguments: Any, cutting: Cutting = CUTTING) -> Compiled:
    """A step as servers run it."""
    entry = autopar.parallelize(fun, donate=False).planned_for(*arguments)
    known = entry.compiled.analysed
    program = Program(block_of(entry.jaxpr), known.inputs, known.outputs, known.name)
    way = OnServers(Options(rows_travel=True), sync=autopar.sync.Async(), servers=servers, cutting=cutting)
    return compile_program(analyze_program(program, way), way)
