"""What every rank runs in `test_worlds.py`: ranks that are interrupted, each for itself, at random times."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import optax

from autopar import interrupts
from tests.support.documented_loop import BATCH_SIZE, Script
from tests.support.interrupting import BATCHES, Loop, interrupter, lookup_step, same

#: How often the documented script is interrupted, each time after a step at least.
RUNS = 6
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
    _check(optax.sgd(0.1), ("ps", "hosts"), "lifted", 80)


def check_interrupts_of_deferred_rows_on_hosts() -> None:
    _check(optax.adam(1e-2), ("ps", "hosts"), "deferred", 30)


def check_interrupts_on_devices_of_all_ranks() -> None:
    _check(optax.sgd(0.1), "ps", "devices", 30)


def check_the_documented_script() -> None:
    """Ctrl-C reaches each rank at a time of its own. All save the same, and go on from it."""
    make, step = lookup_step(optax.sgd(0.1))
    planned = autopar.parallelize(step, strategy=("ps", "hosts"))
    folder, times, timers = FOLDER / "checkpoint", random.Random(RANK), []

    def interrupted(state: Any, ids: Any) -> Any:
        if not timers:
            timers.append(threading.Timer(times.random() * 20e-3, os.kill, [os.getpid(), signal.SIGINT]))
            timers[0].start()
        return planned(state, ids)

    def restore(path: str, like: Any = None, *, step: Any, batch: Any) -> Any:
        return autopar.restore(folder, like, step=planned, batch=batch)

    def init(make_state: Any, key: Any, *, step: Any, batch: Any) -> Any:
        return autopar.init(make_state, key, step=planned, batch=batch)

    def save(path: str, state: Any, *, position: Any) -> None:
        autopar.save(folder, state, position=position)

    interrupts.LATE_S = 60.0  # its own signal comes once, and may come late on a busy machine
    signal.signal(signal.SIGINT, signal.default_int_handler)
    script = Script(interrupted, make, save=save, restore=restore, init=init)
    for _ in range(RUNS):
        script.run()
        timers.pop().join()
    batch = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
    found = autopar.restore(folder, jax.eval_shape(make), step=planned, batch=batch).state
    steps = int(found["step"])
    assert steps >= RUNS
    same(found, Script(planned, make).undisturbed(steps))
