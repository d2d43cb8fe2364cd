"""Interrupts at any time: the training goes on with the state that the caller has, and nothing is computed twice."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar import interrupts
from autopar.backends.host import update_log
from autopar.integrations import nnx as anx
from autopar.interrupts import SECOND_S, interruptible, uninterrupted
from autopar.run.hosts import HostRunner
from tests.support.interrupting import (
    BATCHES,
    ROWS,
    Loop,
    batches,
    check_interrupted,
    interrupter,
    lookup_step,
    train_interrupted,
)

CASES = {
    "lifted": (optax.sgd(0.1), "ps"),
    "deferred": (optax.adam(1e-2), "ps"),
    "dense": (optax.adam(1e-2), "allreduce"),
    "hosts": (optax.sgd(0.1), ("ps", "hosts")),
    "deferred on hosts": (optax.adam(1e-2), ("ps", "hosts")),
}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(name: str) -> None:
    tx, strategy = CASES[name]
    make, step = lookup_step(tx)
    planned = autopar.parallelize(step, strategy=strategy)
    check_interrupted(planned, make(), lambda steps: Loop(planned, make()).run(steps))


def test_training_of_nnx_objects_goes_on() -> None:
    """The objects have the values of all steps that were done, each of them once."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.emb = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0))

    def step(model: Any, optimizer: Any, ids: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m.emb(ids) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    planned, data, tx = anx.parallelize(step, strategy="ps"), batches(), optax.adagrad(0.1)

    def made() -> tuple[Any, Any]:
        model = Model()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train(pair: tuple[Any, Any]) -> None:
        planned(*pair, data[int(pair[1].step[...]) % BATCHES])

    mine, theirs = made(), made()
    train(mine)
    with interrupter() as found:
        assert train_interrupted(lambda: train(mine), 200, found.ask) == 200
    steps = int(mine[1].step[...])
    assert steps > 1
    for _ in range(steps):
        train(theirs)
    a, b = (jax.tree.leaves(nnx.state(pair, nnx.Variable)) for pair in (mine, theirs))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("strategy", ["ps", ("ps", "hosts")], ids=["device", "hosts"])
def test_reading_deferred_rows_is_not_cut_short(strategy: Any) -> None:
    make, step = lookup_step(optax.adam(1e-2))
    planned = autopar.parallelize(step, strategy=strategy)
    mine, theirs = Loop(planned, make()), Loop(planned, make())

    def train() -> None:
        mine.run(int(mine.state["step"]) + 1)
        np.asarray(mine.state["params"]["emb"])

    train()
    with interrupter(10e-3) as found:
        assert train_interrupted(train, 30, found.ask) == 30
    emb = np.asarray(mine.state["params"]["emb"])
    wanted = np.asarray(theirs.run(int(mine.state["step"]))["params"]["emb"])
    np.testing.assert_allclose(emb, wanted, rtol=1e-4, atol=1e-5)  # rows are brought up to date at other times


# --- how signals are held ---


def _interrupt(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def _wait(done: Callable[[], bool] = lambda: False) -> None:
    """A moment in which signals are answered."""
    end_s = time.monotonic() + 10
    while not done() and time.monotonic() < end_s:
        time.sleep(1e-3)


@uninterrupted
def _given(work: Callable[[], None]) -> str:
    work()
    return "given"


def test_an_interrupt_waits_for_the_assignment() -> None:
    given = ""
    with pytest.raises(KeyboardInterrupt):
        given = _given(_interrupt)
        _wait()
    assert given == "given"


def test_an_interrupt_is_answered_where_the_next_call_begins() -> None:
    ran: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        _given(_interrupt)
        _given(lambda: ran.append(1))
    assert not ran
    assert _given(lambda: ran.append(1)) == "given" and ran == [1]  # once only
    time.sleep(5e-3)


def test_an_interrupt_outside_of_a_call_is_answered() -> None:
    """A guard: nothing is held there."""
    _given(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        _interrupt()
        _wait()


def test_the_second_interrupt_goes_through_at_once() -> None:
    ran: list[int] = []

    def work() -> None:
        _interrupt()
        _interrupt()  # from the terminal and from the launcher: one
        ran.append(1)
        time.sleep(1.2 * SECOND_S)
        _interrupt()
        ran.append(2)

    with pytest.raises(KeyboardInterrupt):
        _given(work)
    assert ran == [1]
    _given(lambda: None)  # nothing is left of either
    time.sleep(5e-3)


def test_none_is_sent_again_once_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends it loses the core just before: what came later hid the next one, which nobody answered."""
    begun, sent, send = threading.Event(), list[int](), interrupts._send_to_main

    def slowly(number: int) -> None:
        begun.set()
        time.sleep(0.1)
        send(number)
        sent.append(number)

    monkeypatch.setattr(interrupts, "_send_to_main", slowly)
    for k in range(1, 3):
        begun.clear()
        with pytest.raises(KeyboardInterrupt):
            _given(_interrupt)
            assert begun.wait(10)
            _given(lambda: None)
        assert len(sent) == k
    _given(lambda: None)  # nothing is left of either
    time.sleep(5e-3)


def test_inner_calls_hold_for_the_outer_one() -> None:
    given, ran = "", []

    def work() -> None:
        _given(_interrupt)
        _given(lambda: time.sleep(5e-3))
        ran.append(1)

    with pytest.raises(KeyboardInterrupt):
        given = _given(work)
        _wait()
    assert given == "given" and ran


def test_planning_can_be_interrupted() -> None:
    """A guard: what may take minutes holds nothing back."""

    def work() -> None:
        with interruptible():
            _interrupt()
            _wait()

    with pytest.raises(KeyboardInterrupt):
        _given(work)

    def held() -> None:
        _interrupt()
        with interruptible():
            raise AssertionError("what was held is answered first")

    with pytest.raises(KeyboardInterrupt):
        _given(held)
    assert _given(lambda: None) == "given"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_handlers_of_the_users_are_called_once_after_the_call(number: int) -> None:
    seen: list[str] = []
    given = ""
    signal.signal(number, lambda *_: seen.append(given))
    for k in range(1, 3):
        given = ""
        given = _given(lambda: _interrupt(number))
        _wait(lambda: len(seen) == k)  # noqa: B023
        assert seen == ["given"] * k
    first = signal.getsignal(number)

    def chained(*args: Any) -> None:
        seen.append("chained")
        first(*args)

    signal.signal(number, chained)  # one that calls ours, as handlers do that were set later
    os.kill(os.getpid(), number)  # ahead of the next call, which takes it up
    _wait(lambda: len(seen) >= 4)
    time.sleep(0.05)
    assert seen[2:] == ["chained", "given"], "each is called once a signal"
    _given(lambda: _interrupt(number))
    _wait(lambda: len(seen) == 6)
    assert seen[4:] == ["chained", "given"]


def test_a_loops_handlers_are_called_once() -> None:
    """Asyncio hears of every signal that is sent, whatever its handler: one that is sent once more is two. A guard."""

    async def main() -> list[int]:
        seen: list[int] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, seen.append, 1)
        _given(lambda: _interrupt(signal.SIGUSR1))
        await asyncio.sleep(0.02)
        return seen

    assert asyncio.run(main()) == [1]


def test_other_threads_hold_nothing() -> None:
    """Python answers signals in the main thread, which has other things to do meanwhile. A guard."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(10)

    thread = threading.Thread(target=_given, args=(work,))
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            begun.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            _wait()
        assert thread.is_alive()
    finally:
        end.set()
        thread.join()


# --- other exceptions ---


def _failing(strategy: Any) -> tuple[Any, Any, dict[str, bool]]:
    """A step whose callback fails when it is told to."""
    fails = {"now": False}

    def told(x: Any) -> Any:
        if fails["now"]:
            raise ValueError("the callback failed")
        return np.asarray(x)

    def step(state: Any, ids: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(lambda p: (p["emb"][ids] ** 2).mean() * p["w"].sum())(state)
        loss = jax.pure_callback(told, jax.ShapeDtypeStruct((), jnp.float32), loss)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    planned = autopar.parallelize(step, strategy=strategy)
    state, _ = planned({"emb": jnp.ones((ROWS, 4)), "w": jnp.ones(4)}, jnp.array([3, 4]))
    return planned, state, fails


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["ps", ("ps", "hosts")], ids=["device", "hosts"])
def test_a_step_that_fails_says_that_its_state_is_lost(strategy: Any) -> None:
    """It said that the state had been given to an earlier step, and to go on with what that one returned."""
    planned, state, fails = _failing(strategy)
    fails["now"] = True
    with pytest.raises(Exception, match="the callback failed") as caught:
        jax.block_until_ready(planned(state, jnp.array([3, 4])))
    (note,) = caught.value.__notes__
    assert "is gone" in note and "restore" in note
    assert not isinstance(caught.value, autopar.errors.DonatedStateError)
    fails["now"] = False
    with pytest.raises(autopar.errors.DonatedStateError):
        planned(state, jnp.array([3, 4]))


def test_rows_on_hosts_that_are_written_in_part_are_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    make, step = lookup_step(optax.adam(1e-2))
    planned = autopar.parallelize(step, strategy=("ps", "hosts"))
    monkeypatch.setattr(update_log, "_BLOCK_ELEMENTS", 4 * ROWS // 5)
    mine, theirs = Loop(planned, make()), Loop(planned, make())
    emb, wanted = (loop.run(3)["params"]["emb"] for loop in (mine, theirs))
    fails_at = [1]

    def fails_once(self: Any, *operands: Any) -> Any:
        fails_at[0] -= 1
        if not fails_at[0]:
            raise MemoryError("no memory for rows")
        return run(*operands)

    run = emb.waiting.log.programs._up_to_date
    monkeypatch.setattr(emb.waiting.log.programs, "_up_to_date", functools.partial(fails_once, None))
    with pytest.raises(MemoryError):
        np.asarray(emb)
    np.testing.assert_array_equal(np.asarray(emb), np.asarray(wanted))  # nothing had been written
    emb, fails_at[0] = mine.run(5)["params"]["emb"], 2
    with pytest.raises(MemoryError, match="some are lost"):
        np.asarray(emb)
    with pytest.raises(autopar.errors.DonatedStateError):
        np.asarray(emb)
    with pytest.raises(autopar.errors.DonatedStateError):
        planned(mine.state, batches()[0])

    emb = theirs.state["params"]["emb"]
    monkeypatch.setattr(HostRunner, "_result", staticmethod(functools.partial(fails_once, None)))
    fails_at[0] = 1
    with pytest.raises(MemoryError, match="new state isn't complete"):
        planned(theirs.state, batches()[0])
    assert emb.is_deleted()
