"""A small GPT on bytes, after nanoGPT, by default on the Python source of this machine. A sample is printed at the end.

python examples/transformer.py --devices 4                             4 devices divide the batch
python examples/transformer.py --devices 4 --stages 2 --tensor 2       2 stages; 2 devices divide products in each
mpirun -n 2 python examples/transformer.py --stages 2                  a stage on each process
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import python_sources, text_files
from flax.training.train_state import TrainState
from rich.progress import track

import autopar

Batch = dict[str, Any]


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a norm and beside a residual."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """[batch, length] bytes -> [batch, length, 256] logits of the bytes that follow."""

    layers: int
    heads: int
    dim: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.02), (ids.shape[1], self.dim))
        x = nn.Embed(256, self.dim)(ids) + positions
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


def loss_of(state: TrainState, params: Any, batch: Batch) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(lambda params: loss_of(state, params, batch))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@autopar.parallelize
def evaluate(state: TrainState, batch: Batch) -> jax.Array:
    return loss_of(state, state.params, batch)


def parallelize(args: argparse.Namespace) -> autopar.ParallelStep:
    """Divides the step as the flags say; devices that are left divide the batch."""
    options: dict[str, Any] = {}
    rows = jax.device_count() // args.tensor
    if args.tensor > 1:
        options = {"mesh": jax.make_mesh((rows, args.tensor), ("data", "tensor")), "strategy": "tensor"}
    if args.stages > 1:
        options["pipeline"] = autopar.Pipeline(
            stages=args.stages, microbatches=args.microbatches, replicas=rows // args.stages
        )
    elif args.microbatches:
        options["microbatches"] = args.microbatches
    return autopar.parallelize(train_step, **options)


def windows(text: np.ndarray, args: argparse.Namespace, seed: int) -> Iterator[Batch]:
    """Endless batches of pieces of the text."""
    rng = np.random.default_rng(seed)
    while True:
        places = rng.integers(len(text) - args.length, size=(args.batch, 1)) + np.arange(args.length)
        yield {"inputs": text[places], "targets": text[places + 1]}


def sample(model: GPT, params: Any, prompt: np.ndarray, count: int) -> str:
    """Returns what the model writes behind a prompt."""

    def write(ids: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jax.random.categorical(key, model.apply({"params": params}, ids[None])[0, -1] / 0.8)
        return jnp.append(ids[1:], new), new

    written = jax.lax.scan(write, jnp.asarray(prompt), jax.random.split(jax.random.key(0), count))[1]
    return bytes(written.tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a text file or a folder of them (default: Python's own source)")
    for name, default in {"layers": 4, "heads": 4, "dim": 128, "length": 64, "batch": 32, "steps": 300}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--devices", type=int, help="CPU devices of each process")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--microbatches", type=int, help="of a batch, one behind the other")
    parser.add_argument("--tensor", type=int, default=1, help="devices that divide products")
    parser.add_argument("--checkpoint", type=Path, help="a folder, from which it goes on (default: none)")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    say = print if jax.process_index() == 0 else lambda _: None  # under mpirun, one process prints

    files = text_files(args.corpus) if args.corpus else python_sources()
    text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:20_000_000], np.uint8).astype(np.int32)
    cut = len(text) * 95 // 100
    batches, held_out = autopar.shard(windows(text[:cut], args, seed=0)), next(windows(text[cut:], args, seed=1))
    model = GPT(args.layers, args.heads, args.dim)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))

    def make_state(key: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=model.init(key, held_out["inputs"])["params"], tx=tx)

    step = parallelize(args)
    part = max(1, args.steps // 10)
    with autopar.Checkpointer(args.checkpoint, step=step, batch=held_out, keep=2, every=part) as checkpoints:
        state, batches = checkpoints.resume(make_state, jax.random.key(0), batches=batches)
        say(autopar.explain(step, state, held_out))
        left = max(0, args.steps - checkpoints.steps)
        for batch in track(islice(batches, left), "training", left, disable=say is not print):
            state, metrics = step(state, batch)
            checkpoints.step(state)
            if (done := checkpoints.steps) % part == 0:
                say(f"step {done:>6}   loss {metrics['loss']:.3f}   held out {evaluate(state, held_out):.3f}")
    say(sample(model, autopar.materialize(state.params), text[cut : cut + args.length], 300))


if __name__ == "__main__":
    main()
