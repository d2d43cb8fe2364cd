"""`WithClients`: what the ways with clients (`sync=`) share: their number, their devices and their servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from autopar.backends.clients import Clients, checked_servers
from autopar.errors import ArgumentsError, LaunchError
from autopar.ir.strategy import asks_for_hosts
from autopar.launch.group import StoreGroup
from autopar.mpi.limits import machine_name
from autopar.mpi.world import CLIENTS_VARIABLE, job
from autopar.run.planner import Planner
from autopar.run.request import StepRequest
from autopar.sync import Sync
from autopar.ways.way import Way


@dataclass(frozen=True, eq=False, kw_only=True)
class WithClients(Way):
    """Clients, each of which trains on minibatches of its own."""

    sync: Any  #: How clients exchange weights or gradients.
    clients: int = 1  #: Number of clients.
    servers: int = 1  #: Number of servers; unused where clients need none.
    #: Ranks of servers that are processes of their own; (): servers are threads of the clients.
    server_ranks: tuple[int, ...] = ()

    exchanges = "replicas (sync=)"
    may_follow = False
    is_made_at_once = True
    is_watched = False
    #: Advice for those who ask for tables on hosts as well.
    not_on_hosts = 'Keep their rows on the devices, strategy="ps"'

    @classmethod
    def check(cls, request: StepRequest) -> None:
        """Refuses `sync=` together with `pipeline=` or tables on hosts."""
        if not isinstance(request.sync, Sync):
            raise ArgumentsError(
                f"sync={request.sync!r}: give autopar.sync.Average(every=...) or autopar.sync.Async(...)"
            )
        if request.pipeline is not None:
            raise ArgumentsError("sync= and pipeline= don't go together: leave one of them out")
        if asks_for_hosts(request.planner.options.strategy):
            raise ArgumentsError(
                f"sync={type(request.sync).__name__}(...): tables on hosts are one for all ranks that train one state "
                f"together. {cls.not_on_hosts}"
            )

    @classmethod
    def planner(cls, request: StepRequest) -> Planner:
        sync, processes = request.sync, request.devices.processes
        assert sync is not None, "clients are asked for"
        clients = Clients.of(request.devices, sync.clients if sync.clients is not None else said_clients(processes))
        planner = request.on(clients.devices)
        servers = checked_servers("sync", getattr(sync, "servers", None), clients.processes.size)
        own = tuple(range(job().workers, job().workers + servers)) if job().servers else ()
        options = replace(planner.options, may_leave=False)
        way = cls(options, planner.way_of(options), sync=sync, server_ranks=own).among(clients.count, servers)
        return way.planned(planner, clients)

    def planned(self, planner: Planner, clients: Clients) -> Planner:
        return replace(planner, options=self.options, clients=clients, way_of=self.by)

    def among(self, clients: int, servers: int | None = None) -> Self:
        return replace(self, clients=clients, servers=servers or self.servers)

    @property
    def has_timeline(self) -> bool:
        """True, also where there is one client and `is_asynchronous` is False."""
        return self.sync.is_asynchronous

    @property
    def keeps_shards(self) -> bool:
        """Waiting clients keep shards; asynchronous ones exchange whole arrays."""
        return not self.is_asynchronous

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        if not self.is_asynchronous:
            return None
        return "servers", "let clients average, sync=autopar.sync.Average(every=...)"

    @property
    def choices(self) -> Mapping[str, object]:
        """Adds that there is an outer optimizer: all processes have one, or none."""
        return {**super().choices, "outer": getattr(self.sync, "outer", None) is not None}


def said_clients(processes: StoreGroup) -> int | None:
    """Returns the number of clients that the environment asks for (`launch --clients`), or None. Collective.

    Raises LaunchError if the variable is neither a positive number nor "machines". Raises ArgumentsError if it is
    "machines", and these have different numbers of processes, or ranks that aren't adjacent.
    """
    text = os.environ.get(CLIENTS_VARIABLE, "")
    if text != "machines":
        if text and not (text.isdecimal() and int(text)):
            raise LaunchError(f"{CLIENTS_VARIABLE}={text!r} is no number of clients, and not 'machines'")
        return int(text) if text else None
    names = processes.values(machine_name(), "machines of the processes")
    count = len(set(names))
    if names != [name for name in dict.fromkeys(names) for _ in range(len(names) // count)]:
        raise ArgumentsError(
            f"{CLIENTS_VARIABLE}=machines: the {count} machines haven't as many adjacent processes each. Start as many "
            "on each, machine by machine, or give clients="
        )
    return count
