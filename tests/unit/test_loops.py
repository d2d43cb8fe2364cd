"""Loops over batches that are interrupted: the state and the source's position are at the same batch."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import optax
import pytest
from rich.console import Console
from rich.progress import track

import autopar
from autopar import interrupts
from autopar.interrupts import INTERRUPTS, SECOND_S, interruptible, uninterrupted
from tests.support.documented_loop import Script, check_interrupted_checkpointer, check_interrupted_script
from tests.support.interrupting import lookup_step, same


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    assert not INTERRUPTS.bodies


def test_the_documented_script_goes_on_where_it_was() -> None:
    make, step = lookup_step(optax.adagrad(0.1))
    check_interrupted_script(autopar.parallelize(step, strategy="ps"), make)


def test_the_documented_checkpointer_goes_on_where_it_was(tmp_path: Any) -> None:
    make, step = lookup_step(optax.adagrad(0.1))
    check_interrupted_checkpointer(tmp_path, autopar.parallelize(step, strategy="ps"), make)


def test_the_documented_script_goes_on_from_the_disk(tmp_path: Any) -> None:
    """Interrupted when the batch is there, and the step hasn't begun."""
    make, step = lookup_step(optax.adagrad(0.1))
    planned = autopar.parallelize(step, strategy="ps")
    path = tmp_path / "checkpoint"

    def interrupted(state: Any, ids: Any) -> Any:
        if int(state["step"]) % 3 == 2:
            _interrupt()
        return planned(state, ids)

    names = {
        "save": lambda _, state, **position: autopar.save(path, state, **position),
        "restore": lambda _, like, **options: autopar.restore(path, like),
        "init": lambda *_, **options: make(),
    }
    script = Script(interrupted, make, **names)
    for _ in range(3):
        script.run()
    saved = autopar.restore(path, make()).state
    assert int(saved["step"]) == 9
    same(saved, Script(planned, make).undisturbed(9))


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _wait(seconds: float = 5e-3) -> None:
    """A moment in which signals are answered."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(1e-3)


def _wait_for(text: str, capsys: pytest.CaptureFixture[str], seconds: float = 20) -> None:
    """Until it is said."""
    end_s, said = time.monotonic() + seconds, capsys.readouterr().err
    while text not in said and time.monotonic() < end_s:
        time.sleep(1e-3)
        said += capsys.readouterr().err
    assert text in said


class Source:
    """Examples 0 to 39; while it reads number `at`, `work` is done."""

    def __init__(self, at: int = -1, work: Callable[[], Any] = _interrupt) -> None:
        self._at, self._work = at, work

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> np.ndarray:
        if number == self._at:
            self._at = -1
            self._work()
            _wait()
        return np.int32(number)


def _batches(source: Any = None, **options: Any) -> Any:
    return autopar.shard(Source() if source is None else source, batch_size=4, **options)


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": iter,
    "enumerate": lambda batches: (batch for _, batch in enumerate(batches)),
    "zip": lambda batches: (batch for batch, _ in zip(batches, _batches(), strict=True)),
    "generator": lambda batches: (batch for batch in batches),
    "uninterrupted": autopar.uninterrupted,
}
PLACES = ("reading", "at first", "in a call", "planning", "at last", "evaluating")


@uninterrupted
def _call(place: str) -> int:
    if place == "in a call":
        _interrupt()
        _wait()
    with interruptible():
        if place == "planning":
            _interrupt()
            _wait()
    return 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_the_position_is_that_of_the_state(place: str, way: str) -> None:
    batches = _batches(Source(17) if place == "reading" else None, ahead=2)
    state, expected = 0, 3 if place == "reading" else 4
    with pytest.raises(KeyboardInterrupt):
        for batch in WAYS[way](batches):
            now = place if batch[0] == 12 else ""
            if now == "at first":
                _interrupt()
                _wait()
            state += _call(now)
            state += _call("") - 1
            for number in _batches():
                if now == "evaluating" and number[0] == 8:
                    _interrupt()
                    _wait()
            if now == "at last":
                _interrupt()
    assert batches.state()["batch"] == state
    assert state == expected
    rest = [int(batch[0]) for batch in batches]
    assert rest == list(range(4 * state, 40, 4)), "it goes on with the next one, in the same process, too"


def test_a_second_interrupt_goes_through_in_the_body(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        for _ in _batches():
            _interrupt()
            _wait(1.2 * SECOND_S)
            _interrupt()
            raise AssertionError("it was to be answered")
    _wait_for("cuts the loop at", capsys)  # by a thread


@pytest.mark.parametrize("around", [iter, lambda batches: track(islice(batches, 3), console=Console(quiet=True))])
def test_a_wait_says_for_which_loop(
    around: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interrupts, "SAY_S", 0.01)
    with pytest.raises(KeyboardInterrupt):
        for _ in around(_batches()):
            line = sys._getframe().f_lineno - 1
            _interrupt()
            _wait_for(f"SIGINT waits until the loop at {__file__}:{line} asks", capsys)


@pytest.mark.parametrize("how", ["break", "error", "dropped"])
def test_a_loop_that_is_left_holds_nothing(how: str) -> None:
    batches: Any = _batches()
    if how == "break":
        for _ in batches:
            break
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in batches:
                1 / 0  # noqa: B018
    else:
        next(iter(batches))
    assert batches.state()["batch"] == 1
    with pytest.raises(KeyboardInterrupt):
        _interrupt()
        _wait(1)


def test_an_iterator_goes_on_after_an_interrupt() -> None:
    found, source = [], iter(_batches())
    for _ in range(12):
        try:
            found.append(int(next(source)[0]))
            if len(found) == 3:
                _interrupt()
        except KeyboardInterrupt:
            found.append(-1)
        except StopIteration:
            break
    assert found == [0, 4, 8, -1, *range(12, 40, 4)]


def test_handlers_of_the_users_are_called_between_batches() -> None:
    seen: list[int] = []
    done = 0
    signal.signal(signal.SIGINT, lambda *_: seen.append(done))
    for _ in _batches():
        if done == 4:
            _interrupt()
            _wait()
        done += 1
    assert seen == [5] and done == 10


def test_other_threads_hold_nothing() -> None:
    """A guard: Python answers no signals there."""
    held: list[int] = []
    thread = threading.Thread(target=lambda: held.extend(len(INTERRUPTS.bodies) for _ in _batches()))
    thread.start()
    thread.join()
    assert held == [0] * 10


def test_children_hold_nothing() -> None:
    for _ in _batches():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that JAX has threads
            child = os.fork()
        if not child:
            os._exit(len(INTERRUPTS.bodies))
        assert os.waitpid(child, 0)[1] == 0
        break


@pytest.mark.parametrize("kind", ["examples", "batches"])
def test_a_source_that_fails_once_goes_on(kind: str) -> None:
    """It seemed to be at its end."""

    def fail() -> None:
        raise OSError("a disk that comes and goes")

    class Batches:
        source = Source(17, fail)

        def __iter__(self) -> Iterator[Any]:
            return (np.array([self.source[k] for k in range(first, first + 4)]) for first in range(0, 40, 4))

    batches = _batches(Source(17, fail)) if kind == "examples" else autopar.shard(Batches())
    found = []
    for _ in range(20):
        try:
            found.append(int(next(batches)[0]))
        except OSError:
            found.append(-1)
        except StopIteration:
            break
    assert sorted(found) == [-1, *range(0, 40, 4)]
