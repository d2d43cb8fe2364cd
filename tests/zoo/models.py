"""Small models, each as an ordinary Flax or plain JAX train step at the global batch.

They differ on purpose in style: TrainState, NamedTuple, dict and tuple states; dict, tuple and
dataclass batches; aux outputs, mutable batch statistics, an EMA, step counters, dropout keys.
Sizes are tiny, so that a step compiles in about a second.

Biases whose true gradient is zero (an attention key's, a convolution's before batch norm) are left out:
their gradient would be rounding noise, which no comparison can use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.zoo.case import Case, Tree, concrete, counter, initial_variables, zipf_ids
from tests.zoo.language import lstm_lm, transformer_sampled, transformer_tied


@dataclass(frozen=True)
class Model:
    """A model; `make(tx, rows=...)` is its Case under the optimizer `tx`.

    The Case's `tables` are those that must be lifted if the optimizer leaves untouched rows alone.
    `rows` is the vocabulary's size; the models that have none ignore it.
    """

    name: str
    make: Callable[..., Case]


# --- dense models ---------------------------------------------------------------------------------


def mlp(tx: optax.GradientTransformation, rows: int = 0) -> Case:
    """Regression by a two-layer perceptron, plain JAX: tuple state, tuple batch, no Flax."""
    del rows
    rng = np.random.default_rng(0)
    params = [
        {
            "kernel": rng.normal(0, fan_in**-0.5, (fan_in, fan_out)).astype(np.float32),
            "bias": np.full((fan_out,), 0.1, np.float32),
        }
        for fan_in, fan_out in ((6, 8), (8, 3))
    ]
    params = concrete(params)

    def batches(i: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(i)
        x = rng.normal(size=(8, 6)).astype(np.float32)
        return x, np.sin(x[:, :3])

    def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden, out = params
        x = jnp.tanh(x @ hidden["kernel"] + hidden["bias"])
        return jnp.mean((x @ out["kernel"] + out["bias"] - y) ** 2)

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, optax.tree.norm(grads))

    return Case(step, (params, concrete(tx.init(params))), batches, ())


class _Cnn(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(3)(x.mean(axis=(1, 2)))


class _BatchNormState(TrainState):
    batch_stats: Tree


def cnn_batchnorm(tx: optax.GradientTransformation, rows: int = 0) -> Case:
    """Classification of small images: batch statistics in the state, has_aux, an int metric."""
    del rows
    module = _Cnn()

    def batches(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        images = rng.normal(size=(8, 6, 6, 1)).astype(np.float32)
        return {"image": images, "label": rng.integers(0, 3, (8,), np.int32)}

    variables = initial_variables(module, batches(0)["image"])
    state = _BatchNormState.create(
        apply_fn=module.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )

    def step(state: _BatchNormState, batch: Tree) -> tuple[_BatchNormState, Tree]:
        def loss_fn(params: Tree) -> tuple[jax.Array, Tree]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (logits, changed["batch_stats"])

        (loss, (logits, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        correct = jnp.sum(jnp.argmax(logits, -1) == batch["label"])
        return state, {"loss": loss, "grad_norm": optax.tree.norm(grads), "correct": correct}

    return Case(step, concrete(state), batches, ())


# --- recommenders ---------------------------------------------------------------------------------


class _Tower(nn.Module):
    """An entity's vector: its own embedding beside that of its group, through a dense layer."""

    rows: int
    group_rows: int
    width: int

    @nn.compact
    def __call__(self, ids: jax.Array, groups: jax.Array) -> jax.Array:
        own = nn.Embed(self.rows, self.width, name="id_emb")(ids)
        group = nn.Embed(self.group_rows, self.width, name="group_emb")(groups)
        return nn.tanh(nn.Dense(self.width, name="out")(jnp.concatenate([own, group], -1)))


class _TwoTower(nn.Module):
    rows: int
    width: int

    @nn.compact
    def __call__(self, users: Any, countries: Any, items: Any, categories: Any) -> jax.Array:
        """Logits [B, B] of each user with each item of the batch."""
        user = _Tower(self.rows, self.rows // 3, self.width, name="user")(users, countries)
        item = _Tower(self.rows, self.rows // 2, self.width, name="item")(items, categories)
        return 4 * user @ item.T


def two_tower(tx: optax.GradientTransformation, rows: int = 53) -> Case:
    """Two towers, four tables (two of them of `rows` rows), softmax over the items of the batch.

    Dict state with a step counter and an EMA of the dense layers only; tuple batch.
    """
    module = _TwoTower(rows, 4)
    sizes = (rows, rows // 3, rows, rows // 2)

    def batches(i: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(i)
        return tuple(zipf_ids(rng, (8,), size) for size in sizes)

    def dense(params: Tree) -> Tree:
        return {tower: params[tower]["out"] for tower in ("user", "item")}

    params = initial_variables(module, *batches(0))["params"]
    state = {
        "params": params,
        "opt_state": tx.init(params),
        "ema": dense(params),
        "step": counter(),
    }

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        items = batch[2]

        def loss_fn(params: Tree) -> tuple[jax.Array, jax.Array]:
            logits: Any = module.apply({"params": params}, *batch)
            own = jnp.eye(len(items), dtype=bool)
            logits = jnp.where((items[:, None] == items[None]) & ~own, -1e9, logits)
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits))), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {
            "params": params,
            "opt_state": opt_state,
            "ema": optax.incremental_update(dense(params), state["ema"], 0.1),
            "step": state["step"] + 1,
        }
        top1 = jnp.mean(jnp.argmax(logits, -1) == jnp.arange(len(items)), dtype=jnp.float32)
        return new, {"loss": loss, "grad_norm": optax.tree.norm(grads), "top1": top1}

    tables = tuple(f"params/{tower}/{name}/embedding" for tower in ("item", "user") for name in ("group_emb", "id_emb"))
    return Case(step, concrete(state), batches, tables)


def multi_hot(tx: optax.GradientTransformation, rows: int = 71) -> Case:
    """Bags of ids padded with id 0, mean-pooled under a mask; plain JAX, dict state.

    Wide and deep: a table [V, D] and one weight for each id, a table [V].
    """
    width = 4
    rng = np.random.default_rng(0)
    params = {
        "deep_emb": rng.normal(0, 1.0, (rows, width)),
        "wide_emb": rng.normal(0, 0.1, (rows,)),
        "hidden": rng.normal(0, 0.5, (width, width)),
        "out": rng.normal(0, 0.5, (width,)),
    }
    params = concrete({name: value.astype(np.float32) for name, value in params.items()})

    def batches(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        bags = 1 + zipf_ids(rng, (6, 5), rows - 1)
        bags[np.arange(5) >= rng.integers(1, 6, (6, 1))] = 0
        return {"bags": bags, "clicked": rng.integers(0, 2, (6,)).astype(np.float32)}

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        mask = (batch["bags"] != 0).astype(jnp.float32)
        count = jnp.maximum(mask.sum(-1, keepdims=True), 1)
        deep = jnp.einsum("blw,bl->bw", params["deep_emb"][batch["bags"]], mask / count)
        wide = jnp.sum(params["wide_emb"][batch["bags"]] * mask, -1)
        logits = jnp.tanh(deep @ params["hidden"]) @ params["out"] + wide
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return new, {"loss": loss, "ids": jnp.sum(batch["bags"] != 0)}

    state = {"params": params, "opt_state": concrete(tx.init(params))}
    return Case(step, state, batches, ("params/deep_emb", "params/wide_emb"))


#: Models of which no table is lifted, with any optimizer: there are none, or they are mixed as a whole.
WITHOUT_TABLES = ("mlp", "cnn_batchnorm", "transformer_tied")
MODELS = {
    make.__name__: Model(make.__name__, make)
    for make in (
        mlp,
        cnn_batchnorm,
        lstm_lm,
        transformer_sampled,
        transformer_tied,
        two_tower,
        multi_hot,
    )
}
WITH_TABLES = tuple(name for name in MODELS if name not in WITHOUT_TABLES)
