"""`beside`: a thread that compiles; the process ends, and errors are told, whatever it does."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest

from autopar import jax_compat
from autopar.backends.background import THREAD, beside
from tests.support.compilations import compilations, finish

SHAPE = jax.ShapeDtypeStruct((5, 5), jnp.float32)


def test_one_thread_does_all_in_order() -> None:
    done: list[tuple[int, str]] = []

    def work(k: int) -> int:
        done.append((k, threading.current_thread().name))
        return k

    work_of = [beside("a number", lambda k=k: work(k)) for k in range(5)]
    assert [w.wait() for w in work_of] == list(range(5)) and all(w.is_done() for w in work_of)
    assert done == [(k, THREAD) for k in range(5)]


def test_what_waits_for_others_may_be_done_here() -> None:
    """Once, and not where it has begun."""
    gate, done = threading.Event(), list[str]()
    slow = beside("what takes its time", gate.wait)
    named = beside("a name", lambda: done.append(threading.current_thread().name))
    named.finish()
    assert done == [threading.current_thread().name] and named.is_done() and not slow.is_done()
    threading.Timer(0.1, gate.set).start()
    assert slow.finish() and beside("another one", lambda: 1).wait() == 1
    assert len(done) == 1


def test_what_nobody_has_any_more_is_not_compiled() -> None:
    """Such as the programs of a step that is gone, and that knows what it has asked for."""
    gate, done = threading.Event(), list[str]()
    slow = beside("what takes its time", gate.wait)

    class Step:
        def __init__(self, name: str) -> None:
            self.compilation = beside("a program", lambda: self.compile(name))

        def compile(self, name: str) -> None:
            done.append(name)

    gone, kept = weakref.ref(Step("gone")), Step("kept")
    gc.collect()
    assert gone() is None
    gate.set()
    kept.compilation.wait()
    assert slow.is_done() and done == ["kept"]
    held = weakref.ref(kept)
    del kept
    beside("another one", lambda: None).wait()
    gc.collect()
    assert held() is None, "nor does the thread keep what it has done"


def test_steps_get_the_lock_of_python_soon() -> None:
    before = sys.getswitchinterval()
    try:
        for usual in (0.005, 1e-5):
            sys.setswitchinterval(usual)
            usual = sys.getswitchinterval()
            assert beside("a program", sys.getswitchinterval).wait() == pytest.approx(min(usual, 5e-4))
            finish()
            assert sys.getswitchinterval() == usual
        beside("what sets another one", lambda: sys.setswitchinterval(0.002)).wait()
        finish()
        assert sys.getswitchinterval() == pytest.approx(0.002)
    finally:
        sys.setswitchinterval(before)


def test_calls_find_what_was_compiled() -> None:
    f = jax.jit(lambda x: jnp.sin(x) @ x)
    given = jnp.ones((5, 5))
    with compilations() as made:
        beside("f", lambda: f.lower(SHAPE).compile()).wait()
        f(given)
    assert (made.here, made.beside) == (0, 1)


def test_in_the_contexts_of_who_asks() -> None:
    """By which JAX tells compilations apart, so that calls in them find what was compiled."""
    f = jax.jit(lambda x: jnp.cos(x) @ x.astype(float))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    given = jax.device_put(jnp.ones((5, 5)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    with compilations() as made, jax_compat.enable_x64(), jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        shape = jax.ShapeDtypeStruct((5, 5), jnp.float32, sharding=given.sharding)
        beside("f", lambda: f.lower(shape).compile()).wait()
        assert f(given).dtype == jnp.float64
    assert (made.here, made.beside) == (0, 1)
    assert not beside("its types", lambda: jax_compat.uses_x64()).wait(), "a context ends with who asked for it"


def test_an_error_is_told_and_left_to_the_step(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> int:
        raise ValueError("no such program")

    with caplog.at_level(logging.WARNING, "autopar"):
        assert beside("a program", fails).wait() is None
        assert beside("a program", fails, otherwise=7).wait() == 7
    assert "a program couldn't be compiled beside the steps" in caplog.text
    assert "ValueError: no such program" in caplog.text
    assert beside("another one", lambda: 1).wait() == 1, "the thread goes on"


_ENDS = """
import threading, time
import jax
from autopar.backends.background import beside

begun, ends = threading.Event(), threading.Event()

def slow(x):
    for _ in range(100):
        x = jax.numpy.sin(x) @ x
    return x

def first():
    lowered = jax.jit(slow).lower(jax.ShapeDtypeStruct((9, 9), "float32"))
    begun.set()
    ends.wait()
    lowered.compile()
    print("compiled")

late = [beside("the first", first), beside("the second", lambda: print("never")), beside("more", time.sleep)]
begun.wait()
print("ends")
ends.set()
"""


def test_a_process_ends_whatever_is_under_way() -> None:
    """XLA would abort it in the midst of a program; what waits is dropped."""
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout.split()) == (0, ["ends", "compiled"]), ended.stderr


_AT_EXIT = """
import atexit
from autopar.backends.background import beside
atexit.register(lambda: print(beside("late", lambda: 1).wait()))  # the last one is called first
print(beside("in time", lambda: 1).wait())
"""


def test_what_comes_after_the_end_waits_for_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout.split()) == (0, ["1", "None"]), ended.stderr
