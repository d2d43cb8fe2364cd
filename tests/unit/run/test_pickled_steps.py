"""A step is copied and pickled as a function is; what reads it plans anew."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.integrations import equinox as aeqx
from autopar.integrations import nnx as anx
from autopar.run.step import _Mesh
from tests.support import pickled_steps
from tests.support.pickled_steps import Trainer, decorated, plain, start

ROOT = Path(__file__).parents[3]


def again(step: Any) -> Any:
    return pickle.loads(pickle.dumps(step))


def test_a_step_of_a_module_is_pickled_by_name() -> None:
    decorated(*start())
    assert again(decorated) is decorated is pickled_steps.decorated
    bound = Trainer(0.25).step
    assert again(bound).step is Trainer.step and again(bound).instance.rate == 0.25
    assert float(again(bound)(*start())[0][0, 0]) == 0.5


@pytest.mark.parametrize("options", [{}, {"batch_axis": {"ids": None}}, {"sync": autopar.sync.Average(every=2)}])
def test_other_steps_are_made_anew_by_their_options(options: Any) -> None:
    mesh = {} if "sync" in options else {"mesh": jax.make_mesh((1,), ("rows",))}
    step = autopar.parallelize(plain, strategy="ps", donate=False, **mesh, **options)
    want, _ = step(*start())
    found = again(step)
    assert found is not step and found.latest is None and found.__wrapped__ is plain
    table, ids = start()
    np.testing.assert_array_equal(found(table, ids)[0], want)
    assert not table.is_deleted() and (found.plan, found.options) == (step.plan, step.options)
    assert again(found).options == step.options


def test_a_copy_is_the_step_itself() -> None:
    step = autopar.parallelize(plain)
    held = {"step": step, "more": [step]}
    assert copy.copy(step) is step and copy.deepcopy(held) == held and copy.deepcopy(held)["more"] is not held["more"]


@pytest.mark.parametrize("kind", [anx, aeqx])
def test_steps_of_objects(kind: Any) -> None:
    step = kind.parallelize(plain, strategy="ps")
    found = again(step)
    assert type(found) is type(step) and found.options == step.options and copy.deepcopy(step) is step
    np.testing.assert_array_equal(found(*start())[0], step(*start())[0])


def test_a_mesh_of_devices_that_are_not_there() -> None:
    with pytest.raises(autopar.ArgumentsError, match=r"devices 98, 99, and this process has .*without mesh="):
        _Mesh(np.array([[98, 99]]), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2).made()


_SENDS = """
import sys, cloudpickle, jax, autopar
from tests.support.pickled_steps import start
rate = 0.25
@autopar.parallelize(strategy="ps", donate=False)
def step(table, ids):
    return table - rate * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
def loop(count):
    table, ids = start()
    for _ in range(count):
        table, _ = step(table, ids)
    return float(table[0, 0]), float(table[9, 0])
assert loop(1) == (0.5, 1.0)
sys.stdout.buffer.write(cloudpickle.dumps(loop))
"""
_READS = """
import sys, pickle
loop = pickle.load(sys.stdin.buffer)
from autopar import jax_compat
assert not jax_compat.backend_is_up()  # jax.distributed can still connect processes
print(loop(2))
"""


def test_another_process_is_sent_a_step_of_a_script() -> None:
    """As Ray sends functions of a driver."""
    sent = subprocess.run([sys.executable, "-c", _SENDS], cwd=ROOT, capture_output=True, check=True, timeout=120)
    read = subprocess.run([sys.executable, "-c", _READS], cwd=ROOT, input=sent.stdout, capture_output=True, timeout=120)
    assert read.stdout.decode().strip() == "(0.25, 1.0)", read.stderr.decode()
