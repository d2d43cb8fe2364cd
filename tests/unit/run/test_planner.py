"""What the processes of a step tell each other of their options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import autopar
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices, StageDevice
from autopar.ir.options import Options
from autopar.ir.pipeline import Pipeline
from autopar.measure.figures import NOWHERE
from autopar.run.arguments import NamedArguments
from autopar.run.per_device import PerDevice
from autopar.run.planner import Planner
from autopar.ways.hosts import OnHosts
from autopar.ways.replicas import InReplicas
from autopar.ways.servers import OnServers
from autopar.ways.stages import InStages
from autopar.ways.table import way_of
from autopar.ways.way import Way

#: Of a Planner, what else than an option it is, and is compared in another way or follows from the options.
_NO_OPTIONS = {"fun", "options", "machine", "in_stages", "way_of"}

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
        "clients": Clients.of(Devices.of(None), 1),
    }
    assert set(others) == {f.name for f in dataclasses.fields(Planner)} - _NO_OPTIONS
    for name, value in others.items():
        changed: Any = {name: value}
        assert dataclasses.replace(_PLAIN, **changed).choices != _PLAIN.choices, name


_WAYS: dict[str, Way] = {
    "stages": InStages(Options(), pipeline=Pipeline(stages=2)),
    "hosts": OnHosts(Options()),
    "replicas": InReplicas(Options(), sync=autopar.sync.Average()),
    "servers": OnServers(Options(), sync=autopar.sync.Async()),
}


@pytest.mark.parametrize("name", _WAYS)
def test_options_of_a_way_are_compared(name: str) -> None:
    way = _WAYS[name]
    own = {f.name for f in dataclasses.fields(way)} - {f.name for f in dataclasses.fields(Way)} - {"group"}
    alone = dataclasses.replace(_PLAIN, way_of=way.by)
    assert own and alone.choices != _PLAIN.choices
    for option in own:
        changed: Any = {option: "another"}
        assert dataclasses.replace(_PLAIN, way_of=dataclasses.replace(way, **changed).by).choices != alone.choices


def test_devices_of_stages_and_outer_optimizers_are_compared() -> None:
    others = {
        "stages": {"stage_devices": (StageDevice((_DEVICE,)),)},
        "replicas": {"sync": autopar.sync.Average(outer=optax.sgd(1.0))},
    }
    for name, changed in others.items():
        way: Any = _WAYS[name]
        changed_way = dataclasses.replace(way, **changed)
        old, new = (dataclasses.replace(_PLAIN, way_of=each.by).choices for each in (way, changed_way))
        assert old != new


def test_a_plan_is_compared_by_what_it_decides() -> None:
    w = jnp.ones(3)
    step = autopar.parallelize(lambda w, x: (w - x.sum(), x.mean()))
    step(w, jnp.ones(3))
    planned = [autopar.parallelize(lambda w, x: (w, x), plan=step.plan).planner.choices for _ in range(2)]
    assert planned[0] == planned[1] and len(planned[0]["plan"]) < 100
