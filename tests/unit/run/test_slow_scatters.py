"""What is said of jaxlibs whose scatters are slow on NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.run import slow_plans
from autopar.ways.table import way_of

H100, FLAG = "NVIDIA H100 80GB HBM3", "--xla_backend_extra_options=-nvptx-allow-ftz-atomics"


@pytest.mark.parametrize(
    ("version", "kind", "flags", "slow"),
    [
        ((0, 10, 1), H100, "", False),
        ((0, 10, 2), H100, "", True),
        ((0, 11, 0), H100, "--xla_dump_to=/tmp", True),
        ((0, 11, 0), H100, FLAG, False),
        ((0, 11, 0), H100, "--xla_gpu_ftz=true", False),
        ((0, 11, 0), "AMD Instinct MI300X", "", False),
        ((0, 11, 0), "cpu", "", False),
        ((0, 11, 1), H100, "", False),
        ((0, 12, 0, 1), H100, "", False),
    ],
)
def test_versions_and_devices(
    version: tuple[int, ...], kind: str, flags: str, slow: bool, environment: Callable[..., None]
) -> None:
    environment(XLA_FLAGS=flags)
    assert slow_plans.has_slow_scatters(kind, version) == slow


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_step_that_adds_to_rows_is_told_of(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = autopar.parallelize(lambda t, i: (t - jax.grad(lambda t: t[i].sum())(t), i.sum()), strategy="ps")
    entry = step.planned_for(jnp.ones((9, 2), dtype), jnp.arange(3))
    monkeypatch.setattr(slow_plans, "has_slow_scatters", lambda kind: True)
    entry.way = way_of(dataclasses.replace(entry.options, accelerators=True))
    if dtype == "float32":
        with pytest.warns(autopar.SlowPlanWarning, match=r"as at .*test_slow_scatters.py:\d+.*" + FLAG):
            slow_plans.warn_of_slow_plan("step", entry)
    else:
        slow_plans.warn_of_slow_plan("step", entry)
