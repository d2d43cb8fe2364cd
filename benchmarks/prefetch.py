"""Rows of the next batch that are fetched beside a step, on hosts that are network namespaces: how much of the time of
exchanges is hidden. Both ways take turns in the same processes."""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import ENVIRONMENT, hosts
from benchmarks.ranks import RANK, Ranks, serve, started

RANKS, ROWS, DIM, EXAMPLES, LENGTH, WIDTH = 2, 200_000, 128, 1024, 16, 256
STEPS, TURNS = 10, 7
#: What accelerators would take for a step of `accelerators`.
WAIT_MS = 60
RATES = ("10gbit", "1gbit")
#: Exponents of Zipf distributed ids; None: any row as likely as any other.
EXPONENTS = {"uniform": None, "Zipf (1.1)": 1.1}


def prefetch() -> None:
    """A step on 2 hosts with a table in their memory: ids and rows in the step that needs them, or beside the one
    before."""
    _on_hosts("adagrad")


def deferred() -> None:
    """The same with AdamW, weight decay and clipped gradients: rows are brought up to date as well."""
    _on_hosts("adamw")


def accelerators() -> None:
    """Both, with a wait in place of most of the devices' work: accelerators leave the hosts' cores alone."""
    for optimizer in ("adagrad", "adamw"):
        _on_hosts(optimizer, RATES[1:], wait_ms=WAIT_MS)


def _on_hosts(optimizer: str, rates: Sequence[str] = RATES, wait_ms: float = 0) -> None:
    for rate in rates:
        with tempfile.TemporaryDirectory() as folder, hosts(RANKS, Path(folder), rate=rate) as made:
            options: Any = {"wrapper": made.wrapper, "environment": {**ENVIRONMENT, "PJRT_NPROC": "1"}}
            options["environment"]["XDG_CACHE_HOME"] = folder
            with started("hosts", RANKS, "benchmarks.prefetch", **options) as ranks:
                for name, exponent in EXPONENTS.items():
                    _compare(ranks, f"{optimizer}, {rate}, {name}", exponent, optimizer, wait_ms)


def one_process() -> None:
    """One process, with a wait in place of most of its device's work: rows are copied to the device ahead."""
    for optimizer in ("adagrad", "adamw"):
        with started("process", 1, "benchmarks.prefetch") as ranks:
            for name, exponent in EXPONENTS.items():
                _compare(ranks, f"{optimizer}, one process, {name}", exponent, optimizer, WAIT_MS)


def one_machine() -> None:
    """The same by two ranks of one machine, which do nothing ahead unless they are made to."""
    with started("ranks", RANKS, "benchmarks.prefetch") as ranks:
        for name, exponent in EXPONENTS.items():
            _compare(ranks, f"one machine, {name}", exponent, "adagrad")


def _compare(ranks: Ranks, name: str, exponent: float | None, optimizer: str, wait_ms: float = 0) -> None:
    size, again = ranks("prepare", exponent=exponent, optimizer=optimizer, wait_ms=wait_ms)[0]
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(TURNS):
        for way, taken in found.items():
            taken.append(max(ranks("train", way=way)))
    (on, _), (off, exchanged) = (map(statistics.median, zip(*found[way], strict=True)) for way in found)
    print(
        f"{name}: a rank gets {size:.1f} MB a step, {again:.0%} of them written by the step before; {off:.1f} ms a "
        f"step, of which {exchanged:.1f} for ids and rows; beside the step before {on:.1f} ms, {on / off:.2f} of the "
        f"time: {off - on:.1f} ms are hidden",
        flush=True,
    )


class _Rank:
    """The steps of one rank, by whether rows are fetched beside the step before."""

    def __init__(self) -> None:
        self._steps: dict[bool, Any] = {}
        self._exchanged_s = 0.0
        self._wait_s = self._ends_s = 0.0

    def prepare(self, exponent: float | None, optimizer: str, wait_ms: float) -> tuple[float, float]:
        """Makes both steps and runs them; returns MB of rows that the rank gets in a step, and the share of them that
        the step before writes.

        `wait_ms`: from when a step has its rows until devices have their gradients; they compute little then."""
        import jax
        import jax.numpy as jnp
        import optax

        import autopar
        from autopar.backends.host import ranks, storage
        from autopar.ir.strategy import OPTIMIZATIONS

        ranks.Ranks.hides_exchanges = staticmethod(lambda exchange: True)  # on one machine as well
        self._wait_s = wait_ms / 1e3
        alone = jax.process_count() == 1
        rows, gets, gives = (storage.HostRows, ["pull"], "commit") if alone else (ranks.Ranks, ["fetch"], "deliver")
        if not self._steps:
            for owner, name in [(ranks.Ranks, "ask"), *((rows, name) for name in gets)]:
                setattr(owner, name, self._timed(getattr(owner, name)))
            for name in (*gets, gives):
                setattr(rows, name, self._waiting(getattr(rows, name), is_end=name == gives))
        width = 8 if wait_ms else WIDTH
        clipped = optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=1e-2)
        update = {"adagrad": optax.adagrad(0.01), "adamw": optax.chain(*clipped)}[optimizer]

        def loss(params: Any, batch: Any) -> Any:
            x = jnp.tanh(params["words"][batch["ids"]]).reshape(-1, LENGTH * DIM) @ params["in"]
            for layer in params["layers"]:
                x = x + jax.nn.relu(x @ layer)
            return ((x.mean(-1) - batch["y"]) ** 2).mean()

        def step(state: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], batch)
            updates, slots = update.update(gradients, state["slots"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, value

        def make() -> Any:
            keys = jax.random.split(jax.random.key(0), 5)
            layers = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys[2:]]
            first = jax.random.normal(keys[1], (LENGTH * DIM, width)) / width**0.5
            params = {"words": jax.random.normal(keys[0], (ROWS, DIM)), "in": first, "layers": layers}
            return {"params": params, "slots": update.init(params)}

        rng = np.random.default_rng(0)
        shape = EXAMPLES, LENGTH
        draw = functools.partial(rng.integers, 0, ROWS) if exponent is None else functools.partial(rng.zipf, exponent)
        self._batches = [
            {"ids": (draw(size=shape) % ROWS).astype(np.int32), "y": np.zeros(EXAMPLES, np.float32)}
            for _ in range(STEPS + 1)
        ]
        others = [name for name in OPTIMIZATIONS if name != "prefetch"]
        for way in (False, True):
            optimize = "all" if way else others
            planned = autopar.parallelize(step, strategy={"params/words": ("ps", "hosts")}, optimize=optimize)
            self._steps[way] = planned, make()
            self.train(way)
        count = jax.process_count()
        asked = [np.unique(np.split(batch["ids"], count)[RANK]) for batch in self._batches]
        pairs = zip(asked[1:], self._batches, strict=False)
        again = statistics.mean(np.isin(ids, batch["ids"]).mean() for ids, batch in pairs)
        far = statistics.mean(ids.size if alone else np.count_nonzero(ids % count != RANK) for ids in asked)
        return 4 * DIM * far / 1e6, again

    def _timed(self, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._exchanged_s += time.perf_counter() - start

        return timed

    def _waiting(self, call: Any, *, is_end: bool) -> Any:
        @functools.wraps(call)
        def waiting(*arguments: Any) -> Any:
            if is_end:
                time.sleep(max(0.0, self._ends_s - time.perf_counter()))
            result = call(*arguments)
            if not is_end and threading.current_thread() is threading.main_thread():
                self._ends_s = time.perf_counter() + self._wait_s
            return result

        return waiting

    def train(self, way: bool) -> tuple[float, float]:
        """Milliseconds of a step, and of exchanges of ids and rows, whether or not they are beside a step."""
        import jax

        import autopar

        planned, state = self._steps[way]
        start = 0.0
        for k, batch in enumerate(autopar.shard(self._batches, step=planned)):
            if k == 1:  # nothing of the first one was done ahead
                start, self._exchanged_s = time.perf_counter(), 0.0
            state, value = planned(state, batch)
            float(value)
        jax.block_until_ready(state)
        taken = time.perf_counter() - start
        self._steps[way] = planned, state
        return taken / STEPS * 1e3, self._exchanged_s / STEPS * 1e3


def main(address: str) -> None:
    """Serves the steps of one rank at an address."""
    rank = _Rank()
    serve(address, RANK, {name: getattr(rank, name) for name in ("prepare", "train")})


if __name__ == "__main__":
    main(*sys.argv[1:])
