"""What a new user meets in the first week: the first call, the first evaluation, the first 50 steps, and thousands.

Five models with AdamW and Adagrad, on one device, on 4 CPU devices and on 4 ranks, beside plain `jax.jit` (on several
devices data parallelism: the batch sharded, the state everywhere). Each case is a process of its own, both sides take
turns in it. `python -m benchmarks first_week` prints the table of docs/first_week.md; `FIRST_WEEK="DLRM:one device"`
in the environment selects cases, and JAX_PLATFORMS an accelerator for those on one device. Steps up to the last one
beside which something was compiled, and those after it, are told apart; nan: there were none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import FIRST_WEEK

OPTIMIZERS = ("adamw", "adagrad")
#: Where -> devices of a process, and ranks.
PLACES = {"one device": (1, 1), "4 devices": (4, 1), "4 ranks": (1, 4)}
#: The first steps, steps after these, those of a turn, and seconds after which a side begins no more of them.
FIRST, STEPS, TURN, SECONDS = 50, 3000, 50, 20.0
#: Later evaluations, and steps before each.
EVALUATIONS, BETWEEN = 3, 20


def first_week() -> None:
    """A line for each case, autopar / plain; then install to first step."""
    columns = ["first call, s", "evaluation, s", "first 50 steps, s", "while compiling: p50, ms", "p99, ms"]
    columns += ["steady: p50, ms", "p99, ms", "later evaluations, ms"]
    print("| model, optimizer | where |", " | ".join(columns), "|")
    print("|---" * (2 + len(columns)) + "|", flush=True)
    chosen = os.environ.get("FIRST_WEEK", "")
    for where, (devices, ranks) in PLACES.items():
        for model in FIRST_WEEK:
            for optimizer in OPTIMIZERS:
                if chosen in f"{model}:{where}":
                    found = _measured([model, optimizer, str(devices)], ranks)
                    print(f"| {model}, {optimizer} | {where} | {_shown(found)} |", flush=True)
    print(f"\npip install (with optax) and the first step of a two-tower model: {_installed_s():.0f} s")


def _shown(found: dict[str, list[float]]) -> str:
    pairs = zip(found["autopar"], found["plain"], strict=True)
    return " | ".join(f"{mine:.2f} / {plain:.2f}" for mine, plain in pairs)


def _installed_s() -> float:
    """Seconds from `pip install` into an empty environment to the first step's result."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        start, python = time.perf_counter(), Path(folder) / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", root, "optax"], check=True, stdout=subprocess.DEVNULL
        )
        first = [python, "-m", "benchmarks.first_week", "two-tower", "adamw", "1", "only"]
        subprocess.run(first, check=True, cwd=root, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def _measured(arguments: list[str], ranks: int) -> dict[str, list[float]]:
    launcher = Path(sys.executable).with_name("mpiexec")
    command = [sys.executable, "-m", "benchmarks.first_week", *arguments]
    if ranks > 1:
        command = [str(launcher if launcher.exists() else "mpiexec"), "-n", str(ranks), *command]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={"JAX_PLATFORMS": "cpu", **os.environ}
    )
    return json.loads(done.stdout.splitlines()[-1])


# --- in a process of its own ---


def main(model_name: str, optimizer: str, devices: str, only: str = "") -> None:
    """Times both sides, or takes autopar's first step alone."""
    import autopar  # first: under a launcher it makes the ranks JAX's processes

    # isort: split
    import jax
    import optax
    from jax.experimental.multihost_utils import broadcast_one_to_all
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", int(devices))
    model = FIRST_WEEK[model_name]()
    tx = {"adamw": optax.adamw(1e-3, weight_decay=1e-2), "adagrad": optax.adagrad(1e-2)}[optimizer]

    def make_state() -> Any:
        params = model.init(jax.random.key(0))
        return {"params": params, "opt": tx.init(params)}

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(model.loss)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def evaluate(state: Any, batch: Any) -> jax.Array:
        return model.loss(state["params"], batch)

    batches = [model.batch(k) for k in range(200)]
    step, evaluation = autopar.parallelize(train_step), autopar.parallelize(evaluate)
    state = autopar.init(make_state, step=step, batch=batches[0])
    if only:
        jax.block_until_ready(step(state, batches[0]))
        return
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def spread(batch: Any) -> Any:
        """As a user would: both sides are given arrays of NumPy."""
        if jax.device_count() == 1:
            return batch
        if jax.process_count() == 1:
            return jax.device_put(batch, split)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, split, x.__getitem__), batch)

    plain = jax.jit(train_step, out_shardings=whole, donate_argnums=0)
    plain_evaluation = jax.jit(evaluate, out_shardings=whole)
    sides = {
        "autopar": _Side(step, evaluation, state, batches),
        "plain": _Side(
            lambda state, batch: plain(state, spread(batch)),
            lambda state, batch: plain_evaluation(state, spread(batch)),
            jax.jit(make_state, out_shardings=whole)(),
            batches,
        ),
    }
    settled = FIRST

    def listen(event: str, seconds: float, **_: Any) -> None:
        nonlocal settled
        if event.endswith("/backend_compile_duration"):
            settled = max(settled, len(sides["autopar"].seconds))

    first = {name: side.begin() for name, side in sides.items()}
    jax.monitoring.register_event_duration_secs_listener(listen)
    slowest = max(np.median(side.seconds) for side in sides.values())
    turns = max(1, min(STEPS, int(SECONDS / slowest)) // TURN)
    for _ in range(int(broadcast_one_to_all(np.int32(turns)))):
        for side in sides.values():
            side.run(TURN)
    spread_ms = {name: side.spread_ms(settled) for name, side in sides.items()}
    later_ms = {name: side.later_evaluation_ms() for name, side in sides.items()}
    if jax.process_index() == 0:
        print(json.dumps({name: [*first[name], *spread_ms[name], later_ms[name]] for name in sides}))


class _Side:
    """A step and its evaluation, with a state of their own; `seconds` of the steps."""

    def __init__(self, step: Callable[..., Any], evaluate: Callable[..., Any], state: Any, batches: list[Any]) -> None:
        self._step, self._evaluate, self._state, self._batches = step, evaluate, state, batches
        self.seconds: list[float] = []

    def run(self, count: int) -> None:
        """Take some steps."""
        import jax

        for _ in range(count):
            batch = self._batches[len(self.seconds) % len(self._batches)]
            start = time.perf_counter()
            self._state, loss = self._step(self._state, batch)
            jax.block_until_ready((self._state, loss))
            self.seconds.append(time.perf_counter() - start)

    def begin(self) -> tuple[float, float, float]:
        """Seconds of the first step, of an evaluation behind it, and of the first steps together."""
        self.run(1)
        evaluation_s = self._evaluation_s()
        self.run(FIRST - 1)
        return self.seconds[0], evaluation_s, sum(self.seconds)

    def _evaluation_s(self) -> float:
        start = time.perf_counter()
        float(self._evaluate(self._state, self._batches[1]))
        return time.perf_counter() - start

    def later_evaluation_ms(self) -> float:
        """The median of evaluations some steps after each other."""
        found = []
        for _ in range(EVALUATIONS):
            self.run(BETWEEN)
            found.append(self._evaluation_s())
        return float(np.median(found)) * 1e3

    def spread_ms(self, settled: int) -> list[float]:
        """The median and the 99th percentile of the steps behind the first ones up to `settled`, and of those after."""
        parts = self.seconds[FIRST:settled], self.seconds[settled:]
        return [1e3 * float(np.quantile(part or np.nan, q)) for part in parts for q in (0.5, 0.99)]


if __name__ == "__main__":
    main(*sys.argv[1:])
