"""What a profile of JAX's shows of a planned step: its number, exchanges, and what of its programs is autopar's own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

TX = optax.adamw(1e-2)


def train_step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradients = jax.value_and_grad(lambda p: (p["emb"][ids] ** 2).mean())(state["params"])
    updates, opt = TX.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def make_state() -> Any:
    params = {"emb": jnp.ones((1000, 4))}
    return {"params": params, "opt": TX.init(params)}


def events(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_steps_and_exchanges_are_named(tmp_path: Path) -> None:
    step, state, ids = autopar.parallelize(train_step, strategy=("ps", "hosts")), make_state(), np.arange(3)
    state, _ = step(state, ids)
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            state, loss = step(state, ids)
        jax.block_until_ready(loss)
    found = events(tmp_path)
    assert [e["args"]["step_num"] for e in found if e.get("name") == "train_step"] == ["1", "2"]
    assert sum(e.get("name") == "autopar: asking for rows" for e in found) == 2


def test_programs_say_what_is_autopars_own() -> None:
    entry = autopar.parallelize(train_step, strategy="ps").planned_for(make_state(), np.arange(3))
    text = entry.runner.lower().as_text(debug_info=True)
    assert "autopar.catch_up/" in text and "autopar.commit/" in text
