"""What only the optimized program can tell: memory, in-place updates, the HLO of dense models, cost of a call.

XLA's optimizer is off in the other tests, so these run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
    import re, sys, time
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
    """The output of a program in a fresh process with XLA's defaults."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_NUM_CPU_DEVICES": str(devices)}
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_does_not_grow_with_the_table() -> None:
    out = run("""
        for metric in (None, "old", "new"):
            def with_metric(state, ids):
                new, metrics = step(state, ids)
                read = {"old": state, "new": new}.get(metric)
                return new, {**metrics, "size": optax.tree.norm(read["params"]) if read else 0.0}
            for rows in (20_000, 200_000):
                planned = autopar.parallelize(with_metric)
                compiled = planned.lower(make(rows), IDS).compile()
                assert planned.plan.lifts
                print(metric, compiled.memory_analysis().temp_size_in_bytes)
    """)
    sizes = [line.split() for line in out.splitlines()]
    for metric in ("None", "old", "new"):
        small, large = (int(size) for name, size in sizes if name == metric)
        assert small == large, out
        assert large < 2_000_000, out


def test_no_copy_of_a_table() -> None:
    out = run("""
        text = autopar.parallelize(step).lower(make(70_001), IDS).compile().as_text()
        print(sum("70001" in line and " copy(" in line for line in text.splitlines()))
    """)
    assert out.strip() == "0"


@pytest.mark.parametrize(
    "model, optimizer", [("mlp", "adam"), ("cnn_batchnorm", "clipped"), ("transformer_tied", "momentum")]
)
def test_dense_models_compile_to_plain_jits_hlo(model: str, optimizer: str) -> None:
    out = run(f"""
        from tests.zoo import MODELS, OPTIMIZERS

        case = MODELS["{model}"].make(OPTIMIZERS["{optimizer}"].make())

        def body(step):
            text = step.lower(case.state, case.batches(0)).compile().as_text()
            text = re.sub(r", metadata=\\{{[^}}]*\\}}|frame_id=\\d+|stack_frame_id=\\d+", "", text)
            text = text.split("FileNames")[0] + text[text.index("ENTRY") :]
            return re.sub(r"HloModule \\S+", "", text)

        a, b = body(autopar.parallelize(case.step)), body(jax.jit(case.step, donate_argnums=0))
        print(a == b)
        if a != b:
            import difflib
            print("\\n".join(list(difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm=""))[:40]))
    """)
    assert out.startswith("True"), out


def test_initializers_on_several_devices() -> None:
    out = run(
        """
        from tests.support.initializers import INITIALIZERS, check_initializer

        for kind in INITIALIZERS:
            check_initializer(kind)
            print(kind)
    """,
        devices=4,
    )
    assert len(out.splitlines()) == 6


def test_a_call_adds_little_to_jits_dispatch() -> None:
    """At 300 leaves."""
    out = run("""
        def many(state, x):
            return [s + x for s in state], x
        planned = autopar.parallelize(many, donate=False)
        plain = jax.jit(many)
        state, x = [jnp.float32(k) for k in range(300)], jnp.float32(1)
        planned(state, x), plain(state, x)
        ratios = []
        for _ in range(30):
            times = []
            for f in (planned, plain):
                start = time.perf_counter()
                for _ in range(20):
                    f(state, x)
                times.append(time.perf_counter() - start)
            ratios.append(times[0] / times[1])
        print(np.median(ratios))
    """)
    assert float(out) < 1.2, out
