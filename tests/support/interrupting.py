"""Training that is interrupted again and again, at random times, for tests on one device, on several, and on ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.backends.global_arrays import local

ROWS, BATCHES = 3000, 4

Step = Callable[[Any, Any], tuple[Any, Any]]


def batches() -> list[jax.Array]:
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.integers(0, ROWS, 8)) for _ in range(BATCHES)]


def lookup_step(tx: optax.GradientTransformation) -> tuple[Callable[[], Any], Step]:
    """What makes a state, and a step: a table, a vector, and the number of steps."""

    def make() -> Any:
        rng = np.random.default_rng(0)
        params = {"emb": jnp.asarray(rng.normal(size=(ROWS, 4)), jnp.float32), "w": jnp.ones((4,), jnp.float32)}
        return {"params": params, "opt": tx.init(params), "step": jnp.zeros((), jnp.int32)}

    def step(state: Any, ids: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(lambda p: ((p["emb"][ids] @ p["w"]) ** 2).mean())(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, loss

    return make, step


class Interrupter:
    """Sends this process SIGINT, once each time that it is asked to, up to `within_s` seconds later."""

    def __init__(self, within_s: float, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._within_s = within_s
        self._requested, self._stop = threading.Event(), threading.Event()
        self.ask = self._requested.set
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        self._requested.wait()
        while not self._stop.wait(self._random.random() * self._within_s):
            self._requested.clear()
            os.kill(os.getpid(), signal.SIGINT)
            if not self._requested.wait(20):
                os.kill(os.getpid(), signal.SIGALRM)  # which fails the test; it would go on for ever
                return

    def close(self) -> None:
        self._stop.set()
        self._requested.set()
        self._thread.join()


@contextmanager
def interrupter(within_s: float = 2e-3, seed: int = 0) -> Iterator[Interrupter]:
    """Interrupts this process, whose launcher may have it ignore them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    if not callable(before[signal.SIGINT]):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, _never_answered)
    found = Interrupter(within_s, seed)
    try:
        yield found
    finally:
        found.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _never_answered(number: int, frame: Any) -> None:
    raise AssertionError("an interrupt was never answered")


def train_interrupted(train: Callable[[], Any], count: int, ask: Callable[[], None]) -> int:
    """Run `train`, which doesn't end, until it has been interrupted so often; how often it was."""
    interrupts = 0
    while interrupts < count:
        try:
            ask()
            while True:
                train()
        except KeyboardInterrupt:
            interrupts += 1
    return interrupts


class Loop:
    """`state, loss = step(state, batch)` over and over; the batch is that of the state's own step."""

    def __init__(self, step: Step, state: Any) -> None:
        self.step, self.state = step, state
        self.batches = batches()

    def train(self) -> None:
        step, state = self.step, self.state
        try:
            while True:
                state, _ = step(state, self.batches[int(state["step"]) % BATCHES])
        finally:
            self.state = state

    def run(self, steps: int) -> Any:
        while int(self.state["step"]) < steps:
            self.state, _ = self.step(self.state, self.batches[int(self.state["step"]) % BATCHES])
        return self.state


def check_interrupted(step: Step, state: Any, wanted: Any, count: int = 200) -> None:
    """A training that is interrupted `count` times has the very numbers of `wanted` after as many steps.

    Args:
      step: Planned.
      state: Its own, may be donated.
      wanted: From steps to the state of an uninterrupted run.
    """
    loop = Loop(step, state)
    loop.run(3)  # compiled
    with interrupter() as found:
        assert train_interrupted(loop.train, count, found.ask) == count
    steps = int(loop.state["step"])
    assert steps > 3
    same(loop.state, wanted(steps))


def same(mine: Any, theirs: Any) -> None:
    """The same bits. Collective, where leaves are spread over ranks."""
    mine, theirs = (jax.tree.map(lambda x: np.asarray(local(x)), tree) for tree in (mine, theirs))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
