"""What the processes of a step tell each other of their options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import autopar
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.backends.stage_device import StageDevice
from autopar.ir.options import Options
from autopar.measure.machine import NOWHERE
from autopar.run.per_device import PerDevice
from autopar.run.planner import Planner
from autopar.run.positions import NamedArguments
from autopar.ways.table import way_of

#: Of a Planner, what else than an option it is, and is compared in another way or follows from the options.
_NO_OPTIONS = {"fun", "options", "machine", "in_stages", "stage_processes", "way_of"}

_PLAIN = Planner(abs, Options(), NOWHERE, True, None, None, NamedArguments(), way_of=way_of)
_DEVICE = jax.devices()[0]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Options)])
def test_each_option_is_compared(name: str) -> None:
    options: Any = dataclasses.replace(Options(), **{name: "another"})
    assert dataclasses.replace(_PLAIN, options=options).choices != _PLAIN.choices


def test_each_option_outside_of_options_is_compared() -> None:
    others = {
        "donate": False,
        "state_argnums": (0,),
        "batch_argnums": (1,),
        "static": NamedArguments((2,), ("kind",)),
        "donated": NamedArguments((0,), ("state",)),
        "devices": Devices(Mesh([_DEVICE], ("data",)), "data"),
        "per_device": PerDevice("batch", 1, 0),
        "stage_devices": (StageDevice((_DEVICE,)),),
        "clients": Clients.of(Devices.of(None), 1),
    }
    assert set(others) == {f.name for f in dataclasses.fields(Planner)} - _NO_OPTIONS
    for name, value in others.items():
        changed: Any = {name: value}
        assert dataclasses.replace(_PLAIN, **changed).choices != _PLAIN.choices, name


def test_a_plan_is_compared_by_what_it_decides() -> None:
    w = jnp.ones(3)
    step = autopar.parallelize(lambda w, x: (w - x.sum(), x.mean()))
    step(w, jnp.ones(3))
    planned = [autopar.parallelize(lambda w, x: (w, x), plan=step.plan).planner.choices for _ in range(2)]
    assert planned[0] == planned[1] and len(planned[0]["plan"]) < 100
