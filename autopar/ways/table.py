"""The ways to run a step. Who adds one adds a line here."""

from __future__ import annotations

from autopar.ir.options import Options
from autopar.ways.devices import OnDevices
from autopar.ways.hosts import OnHosts
from autopar.ways.replicas import InReplicas
from autopar.ways.servers import OnServers
from autopar.ways.stages import InStages
from autopar.ways.way import Way

#: The first one that takes the options runs the step.
WAYS: tuple[type[Way], ...] = (OnServers, InReplicas, InStages, OnHosts, OnDevices)


def way_of(options: Options) -> Way:
    """Returns the way to run a step with some options."""
    way = next(way for way in WAYS if way.takes(options))
    each = way.of_each(options)
    return way(options, None if each is None else way_of(each))
