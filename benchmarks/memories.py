"""The memories of docs/memories.md, each trained by the page's own step: plain JAX, on the device, in host memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import autopar
from benchmarks.timing import Runner, alternate, median_ms, ratio

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import ngram_memory

PAGE = Path(__file__).parents[1] / "docs" / "memories.md"
#: What the page calls each memory's function of (params, ids), and its parameters; the paths of its tables.
MEMORIES = {
    "n-grams": ("with_ngrams", "ngrams", "params/memory*"),
    "an embedding for each layer": ("with_layer_embeddings", "per_layer", "params/per_layer"),
    "the same in a scan": ("scanned", "in_a_scan", "params/per_layer"),
    "product keys": ("with_product_keys", "product_keys", "params/values"),
}


def page(rows: int = 200_000, keys: int = 450) -> dict[str, Any]:
    """Runs the page's programs with tables of `rows`, and of `keys` squared, and returns their names."""
    found: dict[str, Any] = {}
    text = PAGE.read_text().replace("200_000, 32", f"{rows}, 32").replace("KEYS, TOP = 450", f"KEYS, TOP = {keys}")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), found)
    return found


def memories() -> None:
    """Tables of 200,000 rows, 128 words, AdamW, in turns; all train 16 steps before the first that counts."""
    found = page()
    keys = jax.random.split(jax.random.key(0), 100)
    texts = [jax.random.randint(key, (8, found["LENGTH"] + 1), 0, found["VOCAB"]) for key in keys]
    batches = [{"inputs": text[:, :-1], "targets": text[:, 1:]} for text in texts]
    for name, (logits, params, tables) in MEMORIES.items():
        step = found["step_of"](found[logits])
        steps = {
            "plain": jax.jit(step, donate_argnums=0),
            "device": autopar.parallelize(step),
            "hosts": autopar.parallelize(step, strategy={tables: ("ps", "hosts")}),
        }
        runners = {
            where: Runner(each, found["state_of"]({**found["model"], **found[params]})) for where, each in steps.items()
        }
        times = alternate(runners, lambda k: batches[k % 100], 8, turns={"plain": 4}, warm=2)
        told = [f"{where} {median_ms(times[where]):.1f} ms" for where in steps]
        fast = [f"{ratio(times['plain'], times[where]):.1f} times" for where in ("device", "hosts")]
        print(f"{name}: {', '.join(told)}; plain takes {' and '.join(fast)} as long", flush=True)


def gpt(rows: int = 1_000_000, steps: int = 700, where: tuple[str, ...] = ("device", "hosts")) -> None:
    """What tables of `rows` rows of 8 cost a GPT of the size that nanoGPT has for CPUs, in turns of 20 steps.

    4 layers of 128, 12 texts of 64 words, AdamW; two tables, of which a word reads 4 rows each. Tables of 64 rows show
    what the layers cost that read them. From step 512 on, rows are also brought up to date between the steps.
    """
    corpus = ngram_memory.load_corpus(None, 4096)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, b2=0.95, weight_decay=0.01))
    rng = np.random.default_rng(0)
    starts = rng.integers(len(corpus.train) - 64, size=(steps, 12))
    batches = [ngram_memory.windows(corpus.train, at, 64) for at in starts]
    hosted = {"params/memory*": ("ps", "hosts")}
    forms = {"none": (0, "auto"), "64 rows": (64, "auto"), "device": (rows, "auto"), "hosts": (rows, hosted)}
    forms = {name: form for name, form in forms.items() if form[0] < rows or name in where}
    runners = {}
    for name, (count, strategy) in forms.items():
        model = ngram_memory.GPT(vocab=len(corpus.words), layers=4, dim=128, rows=count, width=8, heads=4)

        def make_state(model: Any = model) -> TrainState:
            params = jax.jit(model.init)(jax.random.key(0), batches[0]["inputs"])["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        step = autopar.parallelize(ngram_memory.train_step, strategy=strategy)
        runners[name] = Runner(step, autopar.init(make_state, step=step, batch=batches[0]))
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for start in range(0, steps, 20):
        for name, runner in runners.items():
            seconds[name] += [runner.seconds(batch) for batch in batches[start : start + 20]]
    for some in (slice(100, 500), slice(520, steps)):
        medians = {name: median_ms(of[some]) for name, of in seconds.items()}
        told = [f"{name} {ms:.1f} ms ({ms / medians['64 rows']:.2f})" for name, ms in medians.items()]
        print(f"steps {some.start} to {some.stop}, over those of 64 rows: {', '.join(told)}", flush=True)


def accelerator(rows: int = 100_000_000) -> None:
    """Predicts what tables of `rows` rows of 8 in host memory cost a GPT on one H100: nothing is run, or made.

    12 texts; GPT-2 small, and the model of `gpt`. AdamW; two tables, of which a word reads 4 rows each.
    """
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, b2=0.95, weight_decay=0.01))
    vocab, cluster = 50_304, autopar.Cluster.named("dgx-h100").of(1, 1)
    simulated = None
    for layers, dim, length in ((12, 768, 1024), (4, 128, 64)):
        words = np.minimum(np.random.default_rng(0).zipf(1.2, (12 * (length + 1))), vocab) - 1
        batch = ngram_memory.windows(words.astype(np.int32), np.arange(12) * (length + 1), length)
        seconds = {}
        for count, strategy in ((0, "auto"), (64, "auto"), (rows, {"params/memory*": ("ps", "hosts")})):
            model = ngram_memory.GPT(vocab=vocab, layers=layers, dim=dim, rows=count, width=8, heads=4)

            def make_state(model: Any = model, batch: Any = batch) -> TrainState:
                params = model.init(jax.random.key(0), batch["inputs"])["params"]
                return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

            step = autopar.parallelize(ngram_memory.train_step, strategy=strategy)
            simulated = autopar.simulate(autopar.plan(step, jax.eval_shape(make_state), batch, cluster=cluster))
            seconds[count] = simulated.times[0].seconds
        told = ", ".join(
            f"{count} rows {1e3 * each:.2f} ms ({each / seconds[64]:.3f})" for count, each in seconds.items()
        )
        print(f"{layers} layers of {dim}, 12 texts of {length} words, over tables of 64 rows: {told}", flush=True)
    print(str(simulated).splitlines()[-1], flush=True)
