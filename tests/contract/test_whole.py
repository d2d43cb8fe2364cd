"""What only the optimized program can tell: memory, in-place updates, the HLO of dense models.

XLA's optimizer is off in the other tests, so these run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.support.pairs import long

PRELUDE = """
    import re, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import autopar

    TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))

    def make(rows, width=32):
        params = {"emb": jnp.ones((rows, width)), "w": jnp.eye(width)}
        return {"params": params, "opt": TX.init(params)}

    def step(state, ids):
        def loss_fn(p):
            return jnp.mean(jnp.tanh(p["emb"][ids] @ p["w"]) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt": opt}, {"loss": loss, "norm": optax.tree.norm(grads)}

    IDS = jnp.zeros((16, 8), jnp.int32)
"""


def run(code: str, devices: int = 1) -> str:
    """The output of a program in a fresh process with XLA's optimizer."""
    flags = "--xla_cpu_parallel_codegen_split_count=1"  # says in how many threads it is compiled
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": str(devices)}
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_does_not_grow_with_the_table() -> None:
    out = run("""
        for metric in ("old", "new"):
            def with_metric(state, ids):
                new, metrics = step(state, ids)
                read = {"old": state, "new": new}[metric]
                return new, {**metrics, "size": optax.tree.norm(read["params"])}
            for rows in (20_000, 200_000):
                planned = autopar.parallelize(with_metric)
                compiled = planned.lower(make(rows), IDS).compile()
                assert planned.plan.lifts
                print(metric, compiled.memory_analysis().temp_size_in_bytes)
    """)
    sizes = [line.split() for line in out.splitlines()]
    for metric in ("old", "new"):
        small, large = (int(size) for name, size in sizes if name == metric)
        assert small == large, out
        assert large < 2_000_000, out


def test_no_copy_of_a_table() -> None:
    out = run("""
        text = autopar.parallelize(step).lower(make(70_001), IDS).compile().as_text()
        print(sum("70001" in line and " copy(" in line for line in text.splitlines()))
    """)
    assert out.strip() == "0"


def test_dense_models_compile_to_plain_jits_hlo() -> None:
    out = run("""
        import difflib
        from tests.zoo import MODELS, OPTIMIZERS

        for model, optimizer in (("mlp", "adam"), ("cnn_batchnorm", "clipped"), ("transformer_tied", "momentum")):
            case = MODELS[model].make(OPTIMIZERS[optimizer].make())

            def body(step):
                text = step.lower(case.state, case.batches(0)).compile().as_text()
                text = re.sub(r", metadata=\\{[^}]*\\}|frame_id=\\d+|stack_frame_id=\\d+", "", text)
                text = text.split("FileNames")[0] + text[text.index("ENTRY") :]
                return re.sub(r"HloModule \\S+", "", text)

            a, b = body(autopar.parallelize(case.step)), body(jax.jit(case.step, donate_argnums=0))
            print("\\n".join([model, *list(difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm=""))[:40]]))
    """)
    assert out.split() == ["mlp", "cnn_batchnorm", "transformer_tied"], out


@pytest.mark.parametrize("every", [3, long(1)])
def test_initializers_on_several_devices(every: int) -> None:
    out = run(
        f"""
        from tests.support.initializers import INITIALIZERS, check_initializer

        for kind in [*INITIALIZERS][::{every}]:
            check_initializer(kind)
            print(kind)
    """,
        devices=4,
    )
    assert len(out.splitlines()) == 6 // every


def test_a_call_does_as_much_for_many_leaves_as_for_few() -> None:
    """In Python; how long it takes beside jit's own dispatch, `python -m benchmarks one_device.dispatch` tells."""

    def many(state: Any, x: jax.Array) -> Any:
        return [s + x for s in state], x

    def calls(leaves: int) -> int:
        planned = autopar.parallelize(many, donate=False)
        state, x = [jnp.float32(k) for k in range(leaves)], jnp.float32(1)
        planned(state, x), planned(state, x)
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            planned(state, x)
        finally:
            sys.setprofile(None)
        return events.count("call")

    assert calls(300) == calls(30)
