"""DLRM (Naumov et al., 2019): the clicks of a log in the form of Criteo's, which is generated if none is given.

    python examples/recommender.py --devices 4
    python examples/recommender.py --log train.txt --lines 1000000
    mpirun -n 2 python examples/recommender.py --checkpoint run

Each line of the log has a label, 13 integers and 26 categories in hexadecimal, with tabs between them. With
--checkpoint, a training that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental.multihost_utils import process_allgather
from rich.progress import track

import autopar

Batch = dict[str, Any]
INTEGERS, CATEGORIES = 13, 26


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for width in widths for layer in (nn.relu, nn.Dense(width))]
    return nn.Sequential(layers[1:])


class DLRM(nn.Module):
    """Logits of clicks, by the products of all pairs of vectors: one for the numbers, and one for each category."""

    rows: int
    dim: int

    @nn.compact
    def __call__(self, numbers: jax.Array, categories: jax.Array) -> jax.Array:
        dense = mlp(64, self.dim)(numbers)
        tables = nn.Embed(CATEGORIES * self.rows, self.dim, name="tables")  # one behind the other
        sparse = tables(categories + self.rows * jnp.arange(CATEGORIES))
        vectors = jnp.concatenate([dense[:, None], sparse], axis=1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        first, second = np.triu_indices(1 + CATEGORIES, k=1)
        return mlp(128, 64, 1)(jnp.concatenate([dense, products[:, first, second]], axis=1))[:, 0]


@autopar.parallelize
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["numbers"], batch["categories"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@autopar.parallelize
def predict(state: TrainState, batch: Batch) -> jax.Array:
    return state.apply_fn({"params": state.params}, batch["numbers"], batch["categories"])


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """How often an example with a click has a larger score than one without."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def read(lines: Iterable[str], rows: int) -> Batch:
    """The lines of a log as arrays: the logarithms of the integers, and categories as rows of their tables."""
    fields = [line.rstrip("\n").split("\t") for line in lines]
    integers = np.array([[int(x or 0) for x in f[1 : 1 + INTEGERS]] for f in fields])
    return {
        "label": np.array([int(f[0]) for f in fields], np.float32),
        "numbers": np.log1p(np.maximum(integers, 0)).astype(np.float32),
        "categories": np.array([[int(x or "0", 16) % rows for x in f[1 + INTEGERS :]] for f in fields], np.int32),
    }


def generated(lines: int) -> Iterator[str]:
    """A log whose clicks depend on each category and each integer."""
    rng = np.random.default_rng(0)
    categories = rng.zipf(1.3, (lines, CATEGORIES)) % 100_000
    integers = rng.poisson(5, (lines, INTEGERS))
    weights = rng.normal(size=(CATEGORIES, 100_000))
    logits = 0.4 * weights[np.arange(CATEGORIES), categories].sum(1) + 0.1 * (integers - 5) @ rng.normal(size=INTEGERS)
    clicks = rng.random(lines) < 1 / (1 + np.exp(1 - logits))
    for click, numbers, ids in zip(clicks, integers, categories, strict=True):
        yield "\t".join([f"{click:d}", *map(str, numbers), *(f"{i * 2654435761 % 2**32:08x}" for i in ids.tolist())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="a file in the form of Criteo's (default: one is generated)")
    parser.add_argument("--lines", type=int, default=120_000, help="of the log, of which a tenth is held out")
    parser.add_argument("--checkpoint", type=Path, help="a folder for the last two, and the best (default: none)")
    parser.add_argument("--rows", type=int, default=100_000, help="of each category's table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=200, help="steps from an evaluation to the next")
    parser.add_argument("--devices", type=int, help="CPU devices of each process")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    say = print if jax.process_index() == 0 else lambda _: None  # under mpirun, one process prints

    log = read(islice(args.log.open() if args.log else generated(args.lines), args.lines), args.rows)
    cut = len(log["label"]) // 10
    held_out, training = ({name: x[part] for name, x in log.items()} for part in (slice(cut), slice(cut, None)))
    batches = autopar.shard(training, batch_size=args.batch, shuffle=0, epochs=None, last="drop")
    example = {name: x[: args.batch] for name, x in training.items()}
    model = DLRM(args.rows, args.dim)
    tx = optax.adamw(1e-3, weight_decay=1e-5)

    def make_state(key: jax.Array) -> TrainState:
        params = model.init(key, example["numbers"], example["categories"])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    with autopar.Checkpointer(
        args.checkpoint, step=train_step, batch=example, keep=2, every=args.every, best=("auc", max)
    ) as checkpoints:
        state, batches = checkpoints.resume(make_state, jax.random.key(0), batches=batches)
        say(autopar.explain(train_step, state, example))
        left = max(0, args.steps - checkpoints.steps)
        for batch in track(islice(batches, left), "training", left, disable=say is not print):
            state, metrics = train_step(state, batch)
            checkpoints.step(state)
            if checkpoints.steps % args.every == 0:
                found = auc(held_out["label"], process_allgather(predict(state, held_out), tiled=True))
                checkpoints.evaluated(state, {"auc": found})
                say(f"step {checkpoints.steps:>6}   loss {metrics['loss']:.3f}   held out: AUC {found:.3f}")


if __name__ == "__main__":
    main()
