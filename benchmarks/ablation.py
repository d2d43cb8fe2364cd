"""Table 4 of the Parallax paper: a language model and a translator, optimisations switched on one after the other.

Hosts are network namespaces that share this machine's cores, joined at a given rate, with one or two ranks each;
without namespaces all ranks are on one host. All levels see the same batches, from the same state, and take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.network import ENVIRONMENT, CannotMake, hosts, sent_by_interface
from benchmarks.ranks import RANK, ROOT, serve, started

#: Hosts, and ranks of each.
Shape = tuple[int, int]
#: Of `optimize=`, one after the other; `LEVELS` names what is on.
ORDER = ("hybrid", "local", "owner", "border", "prefetch", "once")
LEVELS = ("BASE", "+HYB", "+LA", "+OPAU", "+OPSW", "+prefetch", "+once")
#: Throughput over BASE's in the paper, as far as it goes.
PAPER = {"LM": (1.0, 1.11, 2.49, 2.56, 2.73), "NMT": (1.0, 1.34, 2.16, 2.16, 2.20)}
#: First steps, and those after them by which ranks decide whether it pays to fetch ahead: fewer than in a training.
_UNTIMED, _TIMED = 3, 8
#: Losses of levels may differ by this much of themselves.
AGREEMENT = 1e-3


class Task(NamedTuple):
    """A model and its batches. `batch_axis`: as of `parallelize`."""

    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    words: int  #: Of a batch of all ranks.
    batch_axis: Any


def language_model(
    vocab: int = 50_000, width: int = 64, texts: int = 64, length: int = 20, sampled: int = 256, hosts: int = 1
) -> Task:
    """The demo's (examples/model.py), with words drawn log-uniformly; of `texts` on each host."""
    texts *= hosts
    sys.path.append(str(ROOT / "examples"))
    model, ids = import_module("model").LanguageModel(vocab, width, width), np.zeros((1, 1), np.int32)

    def batch(k: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(k)
        text = _words(random, vocab, texts, length + 1)
        return {"inputs": text[:, :-1], "targets": text[:, 1:], "negatives": _words(random, vocab, sampled)}

    def loss(params: Any, batch: Any) -> Any:
        return model.apply({"params": params}, batch["inputs"], batch["targets"], batch["negatives"])

    axes = {"batch/negatives": None, "**": 0}
    return Task(lambda key: model.init(key, ids, ids, ids[0])["params"], loss, batch, texts * length, axes)


def translator(
    vocab: int = 32_000, width: int = 64, narrow: int = 16, texts: int = 32, length: int = 12, hosts: int = 1
) -> Task:
    """An encoder and a decoder (LSTMs) with attention; its softmax over all words is dense, as in the paper's NMT. Of
    `texts` on each host."""
    texts *= hosts
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Translator(nn.Module):
        @nn.compact
        def __call__(self, source: Any, inputs: Any, targets: Any) -> Any:
            encoded: Any = nn.RNN(nn.OptimizedLSTMCell(width))(nn.Embed(vocab, width, name="source")(source))
            decoded: Any = nn.RNN(nn.OptimizedLSTMCell(width))(nn.Embed(vocab, width, name="target")(inputs))
            weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", decoded, encoded) / width**0.5)
            joined = jnp.concatenate([decoded, jnp.einsum("bts,bsd->btd", weights, encoded)], -1)
            logits = nn.Dense(vocab, name="softmax")(jnp.tanh(nn.Dense(narrow)(joined)))
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    model, ids = Translator(), np.zeros((1, 1), np.int32)

    def batch(k: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(k)
        text = _words(random, vocab, texts, length + 1)
        return {"source": _words(random, vocab, texts, length), "inputs": text[:, :-1], "targets": text[:, 1:]}

    def loss(params: Any, batch: Any) -> Any:
        return model.apply({"params": params}, batch["source"], batch["inputs"], batch["targets"])

    return Task(lambda key: model.init(key, ids, ids, ids)["params"], loss, batch, 2 * texts * length, 0)


TASKS: Mapping[str, Callable[..., Task]] = {"LM": language_model, "NMT": translator}


def _words(random: np.random.Generator, vocab: int, *shape: int) -> np.ndarray:
    """Draws words log-uniformly, about as often as those of a language."""
    return np.minimum(np.exp(random.random(shape) * np.log(vocab + 1)) - 1, vocab - 1).astype(np.int32)


def step_of(task: Task) -> tuple[Callable[[Any, Any], Any], Callable[[], Any]]:
    """Returns the step for one device, and what makes its state: clipped by the norm over all, Adagrad."""
    import jax
    import optax

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(task.loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    def make() -> Any:
        params = task.init(jax.random.key(0))
        return {"params": params, "opt_state": tx.init(params)}

    return step, make


def _planned(name: str, level: int) -> tuple[Any, Callable[[], Any], Task]:
    import autopar

    task = TASKS[name]()
    step, make = step_of(task)
    options: Any = {"strategy": ("ps", "hosts"), "batch_axis": task.batch_axis, "optimize": ORDER[:level]}
    return autopar.parallelize(step, **options), make, task


def ablation() -> None:
    """Two hosts with two ranks each, at 100 Mbit/s."""
    _compare((2, 2), "100mbit")


def table4() -> None:
    """Four hosts with one rank each, and with two, at 10, 1 and 0.1 Gbit/s."""
    for each in (1, 2):
        for rate in ("10gbit", "1gbit", "100mbit"):
            _compare((4, each), rate)


def _compare(shape: Shape, rate: str, steps: int = 5, turns: int = 3) -> None:
    """Prints words a second, bytes that leave a host, and throughput over BASE's beside the paper's and the predicted
    one."""
    count, each = shape
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options: Any = {"environment": {"XDG_CACHE_HOME": folder}}
        where = "on one host (no namespaces here)"
        with contextlib.suppress(CannotMake):
            made = stack.enter_context(hosts(count, Path(folder), each, rate))
            options = {"wrapper": made.wrapper, "environment": {**ENVIRONMENT, **options["environment"]}}
            where = f"on {count} hosts at {rate}/s"
        for name in TASKS:
            with started("ablation", count * each, "benchmarks.ablation", str(each), **options) as ranks:
                (words, *_) = ranks("prepare", name=name)
                found: list[list[float]] = [[] for _ in LEVELS]
                sent, losses = [0] * len(LEVELS), np.zeros((len(LEVELS), turns * steps))
                for turn in range(turns):
                    for level in range(len(LEVELS)):
                        answers = ranks("turn", level=level, count=steps)
                        found[level].append(max(seconds for seconds, *_ in answers) / steps)
                        sent[level] += sum(n for _, n, _ in answers[::each])
                        losses[level, turn * steps :][:steps] = answers[0][2]
            seconds = [statistics.median(each) for each in found]
            expected = predicted(name, shape, rate)
            print(f"{name}, {count * each} ranks {where}, {words:,} words a step, {turns} turns of {steps} steps:")
            for level, label in enumerate(LEVELS):
                paper = f"{PAPER[name][level]:.2f}" if level < len(PAPER[name]) else "-"
                print(
                    f"  {label:10s} {words / seconds[level]:8.0f} words/s  {1e3 * seconds[level]:6.0f} ms  "
                    f"{sent[level] / count / turns / steps / 1e6:6.2f} MB a host  over BASE "
                    f"{seconds[0] / seconds[level]:.2f} (paper {paper}, predicted {expected[0] / expected[level]:.2f})",
                    flush=True,
                )
            apart = float(np.max(np.abs(losses / losses[0] - 1)))
            print(f"  losses differ by at most {apart:.1e}", flush=True)
            if not apart <= AGREEMENT:
                raise SystemExit("the levels don't compute the same")


def predicted(name: str, shape: Shape, rate: str) -> list[float]:
    """Returns `simulate`'s seconds of each level, by figures of this machine, whose ranks share it."""
    import jax

    import autopar
    from autopar.ir.cluster import Link

    here, (machines, each) = autopar.Cluster.detect(), shape
    count = machines * each
    device = dataclasses.replace(
        here.device, flops_s=here.device.flops_s / count, memory_bytes_s=here.device.memory_bytes_s / count
    )
    between = Link(1e-4, _bits_s(rate) / 8)
    figures: Any = {"device": device, "between": between, "host_bytes_s": here.host_bytes_s / machines, "measured": {}}
    cluster = dataclasses.replace(here, machines=machines, devices=each, **figures)
    times = []
    for level in range(len(LEVELS)):
        step, make, task = _planned(name, level)
        plan = autopar.plan(step, jax.eval_shape(make), task.batch(0), cluster=cluster)
        simulated: Any = autopar.simulate(plan, devices=count)
        times.append(simulated.times[0].seconds)
    return times


def _bits_s(rate: str) -> float:
    """Reads a rate as `tc` has it."""
    return float(rate[:-4]) * {"gbit": 1e9, "mbit": 1e6}[rate[-4:]]


class _Rank:
    """The steps of one rank. `each`: ranks of a host."""

    def __init__(self, each: int) -> None:
        self._each = each

    def prepare(self, name: str) -> int:
        """Makes and compiles all levels; returns the words of a batch."""
        import autopar

        # isort: split
        from autopar.mpi import machines
        from autopar.run import hosts as runner

        runner._UNTIMED, runner.TIMED = _UNTIMED, _TIMED
        if sent_by_interface() is not None:  # namespaces are one machine to the system
            machines.machine_name = lambda: f"host {RANK // self._each}"
        self.states: list[Any] = []
        self.steps: list[Any] = []
        self.batches: list[Iterator[Any]] = []
        words = 0
        for level in range(len(LEVELS)):
            step, make, task = _planned(name, level)
            words = task.words
            self.steps.append(step)
            self.states.append(autopar.init(make, step=step, batch=task.batch(0)))
            source = map(task.batch, range(10**6))
            self.batches.append(iter(autopar.shard(source, step=step, batch_axis=task.batch_axis)))
            self.turn(level, 1 + _UNTIMED + _TIMED)
        return words

    def turn(self, level: int, count: int) -> tuple[float, int, list[float]]:
        """Takes some steps; returns their seconds, the bytes that left this host, and the losses."""
        import jax

        step, state, losses = self.steps[level], self.states[level], []
        before, start = sent_by_interface() or 0, time.perf_counter()
        for _ in range(count):
            state, loss = step(state, next(self.batches[level]))
            losses.append(float(loss))
        jax.block_until_ready(state)
        self.states[level] = state
        return time.perf_counter() - start, (sent_by_interface() or 0) - before, losses


def main(address: str, each: str) -> None:
    """Runs one rank."""
    rank = _Rank(int(each))
    serve(address, RANK, {"prepare": rank.prepare, "turn": rank.turn})


if __name__ == "__main__":
    main(*sys.argv[1:])
