"""The demo over several processes: the language model's tables in the memory of the hosts, each rank owning a share.

`make demo-mpi`, or `python -m autopar launch -n 4 examples/language_model_mpi.py`, or mpirun with the script itself.
Every rank runs this file. The train step is that of language_model.py, as it stands; importing autopar connects the
ranks, and a batch means the global one, of which each rank computes its part. The demo prints the plan, trains, and
at the end times the step beside AllReduce and AllGather of the same model on the devices of the same processes, with
the bytes that a process sends in a step.

With `--ablation` it times the step with its optimisations switched on one after the other instead, as table 4 of the
Parallax paper does.

With `--sync` each rank trains a replica of its own, on texts of its own, its tables on its device: "average" takes the
mean of the weights after every step, "local" after every 30, and "diloco" has an outer optimizer move what all have by
it. "elastic" pulls weights and a centre towards each other every 30 steps, and by "async" all train one state, which
servers in the ranks keep, without waiting for each other. "hybrid" takes means beside the steps, and "dpsgd" and
"adpsgd" of two neighbours in a ring at a time, at once or whenever that suits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import optax
from compare import Form, compare
from corpus import Batch
from language_model import OPTIMIZERS, Task, positive, positive_rate, read_task, train, train_step
from progress import Screen

import autopar
from autopar.measure.compiled_collectives import sent_by_device

#: Every rank needs all of the sampled words; everything else in a batch is spread.
BATCH_AXIS = {"batch/negatives": None, "**": 0}
COUNTED_STEPS = 10  # whose bytes are averaged
TURNS = 3  # of each form, in the comparison at the end

#: Of `optimize=`, each switched on beside those before it.
SWITCHES = ("hybrid", "local", "owner", "border", "once")

EVERY = 30  # steps from one mean to the next
SYNCS = {
    "average": autopar.sync.Average(),
    "local": autopar.sync.Average(every=EVERY),
    "diloco": autopar.sync.Average(every=EVERY, outer=optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "async": autopar.sync.Async(),
    "elastic": autopar.sync.Elastic(alpha=0.25, interval=EVERY),
    "hybrid": autopar.sync.Hybrid(),
    "dpsgd": autopar.sync.DPSGD(),
    "adpsgd": autopar.sync.ADPSGD(),
}


def on_hosts(optimize: Any = "all") -> autopar.ParallelStep:
    return autopar.parallelize(train_step, strategy=("ps", "hosts"), batch_axis=BATCH_AXIS, optimize=optimize)


def sent_in_a_step(step: Any, state: Any, data: Iterator[Batch]) -> tuple[Any, dict[str, float]]:
    """The state after a few steps, and the bytes that this process sent in one, by kind, on average."""
    exchange = step.latest.runner.ranks.exchange

    def so_far() -> dict[str, int]:
        """To ranks on other machines, and on this one."""
        return {k: v + exchange.near_bytes.get(k, 0) for k, v in exchange.sent_bytes.items()}

    before = so_far()
    for batch in islice(data, COUNTED_STEPS):
        state, _ = step(state, batch)
    sent = {k: (v - before[k]) / COUNTED_STEPS for k, v in so_far().items()}
    sent["reduce"] *= 2 * (exchange.size - 1) / exchange.size  # a ring's, of what a rank contributes
    return state, sent


def forms(make_state: Callable[[], Any], sent: Mapping[str, float], example: Batch) -> dict[str, Form]:
    """Tables on the hosts, and the same model on all processes' devices by other methods."""

    def on_devices(method: str) -> Form:
        step = autopar.parallelize(train_step, strategy=method, batch_axis=BATCH_AXIS)
        compiled = step.lower(jax.eval_shape(make_state), example).compile()
        return Form(step, make_state, sent_by_device(compiled.as_text(), jax.device_count()))

    hosted = Form(on_hosts(), make_state, round(sum(sent.values())))
    return {"AllReduce": on_devices("allreduce"), "AllGather": on_devices("allgather"), "tables on hosts": hosted}


def ablation(make_state: Callable[[], Any], data: Iterator[Batch], words: int) -> str:
    """A table of the step with optimisations switched on one after the other; the first row has none."""
    levels = {}
    for count, name in enumerate(("none", *(f"+ {name}" for name in SWITCHES))):
        step = on_hosts(SWITCHES[:count])
        state, _ = step(make_state(), next(data))
        _, sent = sent_in_a_step(step, state, data)
        levels[name] = Form(step, make_state, round(sum(sent.values())))
    found = compare(levels, data, TURNS)
    lines = [f"{'optimize=':10} {'words/s':>9} {'ms':>8} {'MiB sent':>9} {'over none':>10}"]
    for name, seconds in found.seconds.items():
        times, nbytes = found.seconds["none"] / seconds, found.sent[name] or 0
        lines.append(f"{name:10} {words / seconds:9.0f} {1e3 * seconds:8.1f} {nbytes / 2**20:9.3f} {times:10.2f}")
    return "\n".join(
        [
            *lines,
            f"medians of {found.steps} steps in turn; metrics differ by {found.difference:.1e} at most",
            "prefetch isn't among them: these batches don't come by autopar.shard(source, step=), which knows the next",
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains a language model with its tables in the memory of the hosts.")
    parser.add_argument("--steps", type=positive, default=200, help="train steps (default %(default)s)")
    parser.add_argument("--vocab", type=int, help="the most frequent N words (default: all seen at least twice)")
    parser.add_argument("--corpus", type=Path, help="a text file or a folder of them (default: Python's own source)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--learning-rate", type=positive_rate, help="default: one that suits the optimizer")
    parser.add_argument("--batch", type=positive, default=32, help="texts in a global batch (default %(default)s)")
    parser.add_argument("--length", type=positive, default=20, help="words in a text (default %(default)s)")
    parser.add_argument("--dim", type=positive, default=128, help="width of the tables (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the batches (default %(default)s)")
    parser.add_argument("--sync", choices=SYNCS, help="train a replica on each rank (docs/replicas.md)")
    parser.add_argument("--ablation", action="store_true", help="time each optimisation (docs/optimisations.md)")
    return parser


def train_replicas(args: argparse.Namespace, task: Task, screen: Screen, rank: int) -> None:
    """Each rank's own minibatches; what is evaluated is the mean of all replicas."""
    step = autopar.parallelize(train_step, sync=SYNCS[args.sync], batch_axis=BATCH_AXIS)
    training_data, state = task.data(args.seed + 1000 * rank), task.make_state()
    screen.print(autopar.explain(step, state, next(training_data)))
    screen.print()

    def held_out(params: Any) -> float:
        whole = autopar.average(params)  # every rank takes part
        return task.perplexity(whole, task.windows) if rank == 0 else float("nan")

    train(step, state, training_data, args.steps, held_out, screen)


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    rank, ranks = jax.process_index(), jax.process_count()
    if args.batch % jax.device_count():
        parser.error(f"{jax.device_count()} devices can't share a batch of {args.batch} texts equally: change --batch")
    if args.ablation and args.sync:
        parser.error("--ablation switches what tables on hosts have: leave out --sync")
    screen = Screen(shown=rank == 0)

    screen.print(f"{ranks} processes; each reads the corpus ...")
    if args.sync:
        args.batch //= ranks
        train_replicas(args, read_task(parser, args, screen), screen, rank)
        return
    task = read_task(parser, args, screen)
    make_state, training_data = task.make_state, task.data(args.seed)
    if args.ablation:
        screen.print(f"optimisations of tables on hosts, {ranks} processes, {args.batch * args.length} words a step:")
        screen.print(ablation(make_state, training_data, args.batch * args.length))
        return
    step = on_hosts()
    example = next(training_data)
    state = autopar.init(make_state, step=step, batch=example)  # no process has a whole table
    screen.print()
    screen.print(autopar.explain(step, state, example))
    screen.print()

    def held_out(params: Any) -> float:
        # Every rank takes part in reading the tables; one has use for them.
        whole = autopar.materialize(params, copy=False)
        return task.perplexity(whole, task.windows) if rank == 0 else float("nan")

    state = train(step, state, training_data, args.steps, held_out, screen)
    state, sent = sent_in_a_step(step, state, training_data)
    del state  # more are to come
    screen.print()
    screen.print(f"sent by each of {ranks} processes in a step, tables on hosts:")
    for kind, nbytes in sent.items():
        if nbytes:
            screen.print(f"  {kind:10} {nbytes / 2**20:8.3f} MiB")
    screen.print("timing the same train step by other methods, on the devices of the same processes ...")
    screen.print(compare(forms(make_state, sent, example), task.data(args.seed + 1), TURNS))


if __name__ == "__main__":
    main()
