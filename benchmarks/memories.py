"""The memories of docs/memories.md, each trained by the page's own step: plain JAX, on the device, in host memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax

import autopar
from benchmarks.timing import Runner, alternate, median_ms, ratio

PAGE = Path(__file__).parents[1] / "docs" / "memories.md"
#: What the page calls each memory's function of (params, ids), and its parameters; the paths of its tables.
MEMORIES = {
    "n-grams": ("with_ngrams", "ngrams", "params/memory*"),
    "an embedding for each layer": ("with_layer_embeddings", "per_layer", "params/per_layer"),
    "the same in a scan": ("scanned", "in_a_scan", "params/per_layer"),
    "product keys": ("with_product_keys", "product_keys", "params/values"),
}


def page() -> dict[str, Any]:
    """Runs the page's programs, and returns their names."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
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
