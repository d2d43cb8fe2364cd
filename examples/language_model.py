"""The demo: a word-level language model with a vocabulary of everything, trained on two cores.

`make demo`, or `python examples/language_model.py`. The model (model.py) has tables of some 200,000 rows, the words
come from the Python source on this machine (corpus.py), and a step touches less than one row in a hundred. Under
plain `jax.jit` each step computes a gradient for every row, and runs the optimizer over all of them; autopar takes
the same `train_step`, as it stands, and computes the rows that the batch touches. The demo prints the plan, trains,
and at the end times both forms of the step side by side (compare.py).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compare import Form, Step, compare
from corpus import UNKNOWN, Batch, Corpus, CorpusError, batches, held_out_windows, load_corpus, unigram_perplexity
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model import LanguageModel, perplexity_of
from progress import Screen

import autopar
from autopar.measure.compiled_collectives import sent_by_device

NEGATIVES = 256  # words sampled for the softmax, a step
CLIP_NORM = 0.5  # low enough that most steps are clipped
WARM_UP_STEPS = 100
EVALUATIONS = 4  # while training, beside the one before it
EVALUATION_TOKENS = 1280
REPORT_EVERY = 20  # steps; reading the loss waits for the step, so not after each
TURNS = 4  # of each form, in the comparison at the end
METHODS = ("ps", "allgather", "allreduce_rows")

# Each with a learning rate that suits this model; --learning-rate overrides it.
OPTIMIZERS: dict[str, tuple[Callable[[optax.Schedule], optax.GradientTransformation], float]] = {
    "adagrad": (optax.adagrad, 2.0),
    "sgd": (optax.sgd, 2.0),
    "momentum": (lambda rate: optax.sgd(rate, momentum=0.9), 0.5),
    "rmsprop": (optax.rmsprop, 0.003),
    "adam": (optax.adam, 0.005),
    "adamw": (optax.adamw, 0.005),
}


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    """An ordinary Flax and Optax step for one device. Nothing in it is written for autopar."""

    def loss_of(params: Any) -> jax.Array:
        return state.apply_fn({"params": params}, batch["inputs"], batch["targets"], batch["negatives"])

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def state_maker(
    model: LanguageModel, optimizer: str, learning_rate: float | None, seed: int
) -> Callable[[], TrainState]:
    """A function that makes the same new state each time, and compiles the initialization once."""
    make_optimizer, usual_rate = OPTIMIZERS[optimizer]
    rate = learning_rate or usual_rate
    warm_up = optax.linear_schedule(rate / WARM_UP_STEPS, rate, WARM_UP_STEPS)
    tx = optax.chain(optax.clip_by_global_norm(CLIP_NORM), make_optimizer(warm_up))
    init = jax.jit(model.init)
    ids = jnp.zeros((1, 1), jnp.int32)

    def make_state() -> TrainState:
        params = init(jax.random.key(seed), ids, ids, ids[0])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return make_state


def train(
    step: Step,
    state: TrainState,
    data: Iterator[Batch],
    steps: int,
    perplexity: Callable[[Any], float],
    screen: Screen,
) -> TrainState:
    """Trains, and prints the held-out perplexity before, now and then, and after."""
    milestones = {steps * part // EVALUATIONS for part in range(1, EVALUATIONS + 1)}
    screen.print(f"held-out perplexity before training: {perplexity(state.params):,.0f}")
    with screen.training(steps) as update:
        words, start = 0, time.perf_counter()
        for done in range(1, steps + 1):
            batch = next(data)
            state, metrics = step(state, batch)
            words += batch["inputs"].size
            if done % REPORT_EVERY and done not in milestones and done > 1:
                continue
            loss = finite(float(metrics["loss"]), done)  # waits for the step
            if done > 1:  # the first step compiles: its time says nothing
                update(done, words / (time.perf_counter() - start), loss)
            if done in milestones:
                screen.print(f"held-out perplexity after {done:,} steps: {perplexity(state.params):,.0f}")
            words, start = 0, time.perf_counter()
    return state


def forms_of_one_device(step: Step, make_state: Callable[[], TrainState]) -> dict[str, Form]:
    plain = Form(jax.jit(train_step, donate_argnums=0), make_state)
    return {"plain jax.jit": plain, "autopar": Form(step, make_state)}


def forms_of_several(sparse: Any, make_state: Callable[[], TrainState], example: Batch) -> dict[str, Form]:
    """Plain data parallelism, XLA's own sharding of the tables' rows where it can, and autopar's methods."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))

    def plain(spread_rows: bool) -> Form:
        def placement(leaf: jax.Array) -> NamedSharding:
            large = leaf.ndim > 0 and leaf.shape[0] > 10_000 and leaf.shape[0] % mesh.size == 0
            return NamedSharding(mesh, PartitionSpec("data") if spread_rows and large else PartitionSpec())

        def shapes(tree: Any, placements: Any) -> Any:
            return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, placements)

        shardings = jax.tree.map(placement, jax.eval_shape(make_state))
        data = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("data")), example)
        step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
        compiled = step.lower(shapes(jax.eval_shape(make_state), shardings), shapes(example, data)).compile()

        def placed_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
            return compiled(state, jax.device_put(batch, data))

        return Form(placed_step, lambda: jax.device_put(make_state(), shardings), sent(compiled))

    def planned(method: str) -> Form:
        step = autopar.parallelize(train_step, sparse=sparse, strategy=method, mesh=mesh)
        return Form(step, make_state, sent(step.lower(jax.eval_shape(make_state), example).compile()))

    def sent(compiled: Any) -> int:
        return sent_by_device(compiled.as_text(), mesh.size)

    plain_forms = {"plain data parallel": plain(False), "row sharding by XLA": plain(True)}
    return plain_forms | {f"autopar, {m}": planned(m) for m in METHODS}


def finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss} after {step} steps: try a smaller --learning-rate")
    return loss


def describe(corpus: Corpus, windows: Batch) -> str:
    """What was read, in counts."""
    unknown = float(np.mean(corpus.held_out == 0))
    return (
        f"corpus: {corpus.tokens:,} words in {corpus.files:,} files, {corpus.distinct_words:,} distinct\n"
        f"vocabulary: {len(corpus.words):,} (the most frequent: {', '.join(corpus.words[1:9])})\n"
        f"held out: {len(corpus.held_out):,} words, {unknown:.1%} of them {UNKNOWN}; "
        f"word frequencies alone reach perplexity {unigram_perplexity(corpus, windows['targets']):,.0f}"
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def positive_rate(text: str) -> float:
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains a language model with large sparse tables under autopar.")
    parser.add_argument("--steps", type=positive, default=1000, help="train steps (default %(default)s)")
    parser.add_argument("--vocab", type=int, help="the most frequent N words (default: all seen at least twice)")
    parser.add_argument("--corpus", type=Path, help="a text file or a folder of them (default: Python's own source)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--learning-rate", type=positive_rate, help="default: one that suits the optimizer")
    parser.add_argument("--sparse", choices=("exact", "lazy", "off"), default="exact", help="default %(default)s")
    parser.add_argument("--devices", type=positive, default=4, help="CPU devices to run on (default %(default)s)")
    parser.add_argument(
        "--strategy",
        choices=("auto", *METHODS, "allreduce"),
        default="auto",
        help="how tables travel (default %(default)s)",
    )
    parser.add_argument("--batch", type=positive, default=32, help="texts in a batch (default %(default)s)")
    parser.add_argument("--length", type=positive, default=20, help="words in a text (default %(default)s)")
    parser.add_argument("--dim", type=positive, default=128, help="width of the tables (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the batches (default %(default)s)")
    return parser


@dataclass(frozen=True)
class Task:
    """What a run of the demo is about, as its flags say."""

    args: argparse.Namespace
    corpus: Corpus
    windows: Batch  # held out
    perplexity: Callable[[Any, Batch], float]
    make_state: Callable[[], TrainState]

    def data(self, seed: int) -> Iterator[Batch]:
        """Batches without end."""
        return batches(self.corpus, batch=self.args.batch, length=self.args.length, negatives=NEGATIVES, seed=seed)


def read_task(parser: argparse.ArgumentParser, args: argparse.Namespace, screen: Screen) -> Task:
    """Reads the corpus, and says what is in it."""
    try:
        corpus = load_corpus(args.corpus, args.vocab)
        windows = held_out_windows(corpus, tokens=EVALUATION_TOKENS, length=args.length)
        model = LanguageModel(len(corpus.words), args.dim, hidden=args.dim)
        make_state = state_maker(model, args.optimizer, args.learning_rate, args.seed)
        task = Task(args, corpus, windows, perplexity_of(model), make_state)
        task.data(args.seed)  # too short a corpus is found here
    except CorpusError as error:
        parser.error(str(error))
    screen.print(describe(corpus, windows))
    return task


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.batch % args.devices:
        parser.error(f"{args.devices} devices can't share a batch of {args.batch} texts equally: change --batch")
    if args.devices > 1:  # before JAX is used at all
        jax.config.update("jax_num_cpu_devices", args.devices)
    screen = Screen()

    screen.print("reading the corpus ...")
    task = read_task(parser, args, screen)
    make_state, training_data = task.make_state, task.data(args.seed)
    state = make_state()
    step = autopar.parallelize(train_step, sparse=args.sparse, strategy=args.strategy)
    screen.print()
    screen.print(autopar.explain(step, state, next(training_data)))
    screen.print()

    def held_out(params: Any) -> float:
        return task.perplexity(jax.device_put(autopar.materialize(params, copy=False), jax.devices()[0]), task.windows)

    state = train(step, state, training_data, args.steps, held_out, screen)
    del state  # more are to come
    screen.print()
    screen.print("timing the same train step in its plain forms and under autopar ...")
    timed = task.data(args.seed + 1)
    if args.devices == 1:
        forms = forms_of_one_device(step, make_state)
    else:
        forms = forms_of_several(args.sparse, make_state, next(timed))
    screen.print(compare(forms, timed, TURNS))


if __name__ == "__main__":
    main()
