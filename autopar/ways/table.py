"""The table of ways to run a step. A new way is a line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from autopar.ir.options import Options
from autopar.ir.pipeline import Pipeline
from autopar.ir.strategy import Strategy, asks_for_hosts
from autopar.sync import Async, Sync
from autopar.ways.way import Way

#: Module and class of each way (loaded on demand) -> whether `sync`, `pipeline` and the strategy ask for it. The first
#: that is asked for runs the step.
WAYS: dict[str, Callable[[Sync | None, Pipeline | None, Strategy], bool]] = {
    "servers.OnServers": lambda sync, pipeline, strategy: isinstance(sync, Async),
    "replicas.InReplicas": lambda sync, pipeline, strategy: sync is not None,
    "stages.InStages": lambda sync, pipeline, strategy: pipeline is not None,
    "hosts.OnHosts": lambda sync, pipeline, strategy: asks_for_hosts(strategy),
    "devices.OnDevices": lambda sync, pipeline, strategy: True,
}


def way_for(sync: Sync | None, pipeline: Pipeline | None, strategy: Strategy) -> type[Way]:
    """Returns the class of the first way that these options ask for."""
    return _loaded(next(name for name, is_asked in WAYS.items() if is_asked(sync, pipeline, strategy)))


def way_of(options: Options) -> Way:
    """Returns the way without clients or stages that the options ask for."""
    return _loaded("hosts.OnHosts" if options.hosts else "devices.OnDevices")(options)


def _loaded(name: str) -> type[Way]:
    module, name = name.split(".")
    return getattr(import_module(f"autopar.ways.{module}"), name)
