"""`docs/leaves.md`: what people do with leaves of a state between steps, for each kind of leaf, as a generated page.

python -m tests.support.leaves_page > docs/leaves.md
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import autopar
from autopar.tables.leaf import TableLeaf

_HEAD = """\
# Leaves of a state, and what can be done with them

Between steps a state may hold leaves that are no `jax.Array`s: rows that are spread over devices (`Table`), lie behind
those of other tables (`TablePart`), wait for updates (`DeferredTable`) or are in host memory (`HostTable`); weights
that a stage has (`StageArray`), or that minibatches still update (`PendingArray`); a client's own copy (`Replica`), or
what servers keep (`ServedLeaf`). Each is read like an array. `python -m tests.support.leaves_page` generates the table
by applying each operation to each kind; a test compares with NumPy.

| a cell says | the result is |
|---|---|
| array | an ordinary `jax.Array`, which later steps leave alone |
| NumPy | an array of NumPy |
| the kind's name | a leaf of that kind, on buffers of its own: a copy to go on from |

- **Reading takes all rows**: `table * 2`, `jnp.sum(table)`, `jax.jit(f)(table)` or `np.asarray(table)` brings all rows
  up to date, and makes an array of the whole table in each call. An evaluation that looks rows up is faster as a plan
  of its own, `autopar.parallelize(evaluate)`, which reads only these rows, where they are. A `SlowPlanWarning` appears
  once 64 MiB or more were read like this ten times.
- **Copies**: `copy.deepcopy(state)` is a state of its own; training can continue from either. On one device a table's
  copy is an ordinary array. Rows that wait for updates are brought up to date first. A `PendingArray`, a `Replica` and
  a `ServedLeaf` become ordinary arrays. `autopar.materialize(state)` makes ordinary arrays of all leaves.
- **Several processes**: reading a `HostTable`, a `StageArray`, a `PendingArray`, or a table that is spread over devices
  of several processes is collective: all processes must read it. `pickle` and `to_bytes` run in one process alone, so
  they raise a `CheckpointError` for leaves of which this process has a part, or a replica of its own: call
  `autopar.save(path, state)` on all, or `autopar.materialize(state)` on all and pickle what it returns on one. A
  `ServedLeaf` is pickled by any worker, as it is on the servers then. A `HostTable` is written from the memory of the
  host, as a NumPy array: a device may have no room for it.
- **Flax and Orbax** write these leaves (`to_bytes`, `save_checkpoint`, `PyTreeCheckpointer`) from the first step on
  that runs after they were imported. Flax's `msgpack_serialize` takes plain trees of arrays only (`materialize`).
- **Steps** are copied and pickled like functions: by name from a module, else (`cloudpickle`, which Ray uses) as the
  function and the options of `parallelize`. Plans aren't pickled: the other process makes one for its own devices.

"""


def _flax_bytes(x: Any) -> Any:
    return flax.serialization.msgpack_restore(flax.serialization.to_bytes({"x": x}))["x"]


def _orbax(x: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/x", {"x": x})
        return checkpointer.restore(f"{folder}/x")["x"]


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    np.save(file, x)
    file.seek(0)
    return np.load(file)


#: What is done -> (by what, what NumPy makes of it).
OPERATIONS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "copy.deepcopy(x)": (copy.deepcopy, lambda x: x),
    "copy.copy(x)": (copy.copy, lambda x: x),
    "pickle.loads(pickle.dumps(x))": (lambda x: pickle.loads(pickle.dumps(x)), lambda x: x),
    "flax.serialization.to_bytes(x)": (_flax_bytes, lambda x: x),
    "flax.serialization.to_state_dict(x)": (lambda x: flax.serialization.to_state_dict({"x": x})["x"], lambda x: x),
    "PyTreeCheckpointer().save(path, x)": (_orbax, lambda x: x),
    "autopar.materialize(x)": (autopar.materialize, lambda x: x),
    "np.asarray(x)": (np.asarray, lambda x: x),
    "np.save(file, x)": (_saved, lambda x: x),
    "jax.device_get(x)": (jax.device_get, lambda x: x),
    "jnp.asarray(x)": (jnp.asarray, lambda x: x),
    "jnp.array(x)": (jnp.array, lambda x: x),
    "jnp.copy(x)": (jnp.copy, lambda x: x),
    "x.copy()": (lambda x: x.copy(), lambda x: x),
    "jax.device_put(x, device)": (lambda x: jax.device_put(x, jax.devices()[0]), lambda x: x),
    "x[...]": (lambda x: x[...], lambda x: x),
    "x[2]": (lambda x: x[2], lambda x: x[2]),
    "jnp.take(x, ids, axis=0)": (lambda x: jnp.take(x, np.array([2, 0]), axis=0), lambda x: x[[2, 0]]),
    "0.9 * x + 0.1": (lambda x: 0.9 * x + 0.1, lambda x: 0.9 * x + 0.1),
    "array - x": (lambda x: jnp.ones(4) - x, lambda x: 1 - x),
    "numpy_array - x": (lambda x: np.ones(4, np.float32) - x, lambda x: 1 - x),
    "x @ x.T": (lambda x: x @ x.T, lambda x: x @ x.T),
    "x == x": (lambda x: x == x, lambda x: x == x),
    "x.mean()": (lambda x: x.mean(), np.mean),
    "x.astype(jnp.float16)": (lambda x: x.astype(jnp.float16), lambda x: x.astype(np.float16)),
    "x.at[0].set(1.0)": (lambda x: x.at[0].set(1.0), lambda x: np.concatenate([np.ones_like(x[:1]), x[1:]])),
    "jnp.where(x > 1, x, 0)": (lambda x: jnp.where(x > 1, x, 0), lambda x: np.where(x > 1, x, 0)),
    "jnp.where(cond, x, x)": (lambda x: jnp.where(np.ones(4, bool), x, x), lambda x: x),
    "jnp.concatenate([x, x])": (lambda x: jnp.concatenate([x, x]), lambda x: np.concatenate([x, x])),
    "jnp.linalg.norm(x, axis=-1)": (lambda x: jnp.linalg.norm(x, axis=-1), lambda x: np.linalg.norm(x, axis=-1)),
    "jnp.isnan(x)": (jnp.isnan, np.isnan),
    "jnp.zeros_like(x)": (jnp.zeros_like, np.zeros_like),
    "optax.tree.norm(tree)": (lambda x: optax.tree.norm({"x": x}), np.linalg.norm),
    "optax.global_norm(tree)": (lambda x: _global_norm({"x": x}), np.linalg.norm),
    "optax.incremental_update(x, x, 0.1)": (lambda x: optax.incremental_update(x, x, 0.1), lambda x: x),
    "jax.lax.top_k(x, 2)": (lambda x: jax.lax.top_k(x, 2)[0], lambda x: -np.sort(-x, axis=-1)[..., :2]),
    "jax.jit(f)(x)": (lambda x: _doubled(x), lambda x: 2 * x),
    "jax.vmap(f)(x)": (lambda x: jax.vmap(jnp.sum)(x), lambda x: x.reshape(len(x), -1).sum(1)),
    "jax.vmap(lambda k: x[k])(ids)": (lambda x: jax.vmap(lambda k: x[k])(jnp.array([2, 0])), lambda x: x[[2, 0]]),
    "jax.grad(f)(x)": (lambda x: jax.grad(lambda x: (x**2).sum())(x), lambda x: 2 * x),
    "jax.jit(lambda y: y * jnp.sin(x))(y)": (lambda x: jax.jit(lambda y: y * jnp.sin(x))(2.0), lambda x: 2 * np.sin(x)),
}
_doubled = jax.jit(lambda x: 2 * x)


def _global_norm(tree: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of Optax call it otherwise
        return optax.global_norm(tree)


def _row_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, ids: Any) -> Any:
        params, slots = state
        grads = jax.grad(lambda p: (p["e"][ids] ** 2).sum())(params)
        updates, slots = tx.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), {}

    return step


def _many_tables_step(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, ids: Any) -> Any:
        params, slots = state
        grads = jax.grad(lambda p: sum((table[ids] ** 2).sum() for table in p.values()))(params)
        updates, slots = tx.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), {}

    return step


def _layers(state: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return (jax.lax.scan(lambda h, m: (jnp.tanh(h @ m), None), x, w["e"])[0] ** 2).sum()

    value, grads = jax.value_and_grad(loss)(state[0])
    return (jax.tree.map(lambda w, g: w - 0.1 * g, state[0], grads), ()), value


def _weights(state: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda w: (jnp.tanh(jnp.tanh(x @ w["e"]) @ w["b"]) ** 2).sum())(state[0])
    return (jax.tree.map(lambda w, g: w - 0.1 * g, state[0], grads), ()), value


class Case:
    """A step whose state has a leaf of a kind, at `state[0]["e"]`."""

    def __init__(self, step: Callable[..., Any], params: Any, tx: Any, batch: Any, **options: Any) -> None:
        self._step, self._params, self._tx, self.batch, self._options = step, params, tx, batch, options

    @functools.cached_property
    def step(self) -> Any:
        return autopar.parallelize(self._step, **self._options)

    def state(self) -> Any:
        """The state behind two steps."""
        params = jax.tree.map(jnp.array, self._params)
        state = (params, () if self._tx is None else self._tx.init(params))
        for _ in range(2):
            state, _ = self.step(state, self.batch)
        return state


def cases() -> dict[str, Case]:
    """By kind of leaf, in one process with several devices."""
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, ids = {"e": jnp.arange(2003 * 4.0).reshape(2003, 4) / 1000}, jnp.arange(8)
    tables = {name: rows["e"][: 2003 - k] for k, name in enumerate("efgh")}
    stacked, x = {"e": jnp.arange(64.0).reshape(4, 4, 4) / 100}, jnp.ones((8, 4))
    weights = {"e": jnp.arange(16.0).reshape(4, 4) / 20, "b": jnp.ones((4, 4)) / 5}
    sgd, adam = optax.sgd(0.1), optax.adam(0.1)
    two, spectrain = autopar.Pipeline(2, microbatches=2), autopar.Pipeline(2, schedule="spectrain")
    average, served = autopar.sync.Average(every=2), autopar.sync.Async(staleness=2)
    return {
        "Table": Case(_row_step(sgd), rows, sgd, ids, strategy="ps", mesh=mesh),
        "TablePart": Case(_many_tables_step(adam), tables, adam, ids, strategy="ps", mesh=mesh),
        "DeferredTable": Case(_row_step(adam), rows, adam, ids, strategy="ps", mesh=mesh),
        "HostTable": Case(_row_step(adam), rows, adam, ids, strategy=("ps", "hosts"), mesh=one),
        "StageArray": Case(_layers, stacked, None, x, pipeline=two, mesh=mesh),
        "PendingArray": Case(_weights, weights, None, x, pipeline=spectrain, mesh=mesh),
        "Replica": Case(_row_step(adam), rows, adam, ids, sync=average, strategy="ps", mesh=one),
        "ServedLeaf": Case(_row_step(adam), rows, adam, ids, sync=served, mesh=one),
    }


def said(result: Any) -> str:
    """What a cell says of a result."""
    if isinstance(result, TableLeaf):
        return type(result).__name__
    return "array" if isinstance(result, jax.Array) else "NumPy" if isinstance(result, np.ndarray) else "?"


def page() -> str:
    """The whole page."""
    leaves = {kind: case.state()[0]["e"] for kind, case in cases().items()}
    lines = [_HEAD, f"| | {' | '.join(leaves)} |\n|---|{'---|' * len(leaves)}\n"]
    for name, (act, _) in OPERATIONS.items():
        lines.append(f"| `{name}` | {' | '.join(said(act(leaf)) for leaf in leaves.values())} |\n")
    return "".join(lines)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    print(page(), end="")
