"""What every rank runs in `test_hosts.py`: ranks that are interrupted, each for itself, at random times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import optax

from tests.support.interrupting import BATCHES, Loop, interrupter, lookup_step, same

RANK, RANKS = jax.process_index(), jax.process_count()
FOLDER = Path(os.environ["XDG_CACHE_HOME"]).parent / "interrupts"


def _train(step: Any, state: Any, name: str, count: int) -> Any:
    """Steps until every rank was interrupted `count` times; all ranks do the same steps."""
    FOLDER.mkdir(exist_ok=True)
    loop = Loop(step, state)
    loop.run(2)
    state, interrupts, end = loop.state, 0, FOLDER / f"{name} end"
    with interrupter(seed=RANK) as found:
        found.ask()
        while True:
            try:
                k = int(state["step"])
                if k % 20 == 0:
                    if interrupts >= count:
                        (FOLDER / f"{name} {RANK}").touch()
                    if RANK == 0 and not end.exists() and len(list(FOLDER.glob(f"{name} [0-9]*"))) == RANKS:
                        end.with_suffix(".new").write_text(str(k + 20))  # no rank is so far ahead
                        end.with_suffix(".new").rename(end)
                    if end.exists() and k >= int(end.read_text()):
                        return state
                state, _ = step(state, loop.batches[k % BATCHES])
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts < count:
                    found.ask()


def _check(tx: optax.GradientTransformation, strategy: Any, name: str, count: int) -> None:
    make, step = lookup_step(tx)
    planned = autopar.parallelize(step, strategy=strategy)
    state = _train(planned, make(), name, count)
    same(state, Loop(planned, make()).run(int(state["step"])))


def check_interrupts_on_hosts() -> None:
    _check(optax.sgd(0.1), ("ps", "hosts"), "lifted", 200)


def check_interrupts_of_deferred_rows_on_hosts() -> None:
    _check(optax.adam(1e-2), ("ps", "hosts"), "deferred", 50)


def check_interrupts_on_devices_of_all_ranks() -> None:
    _check(optax.sgd(0.1), "ps", "devices", 30)
