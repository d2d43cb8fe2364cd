"""`WithClients`: what ways have in common in which clients train (`sync=`): who these are, and whom they ask."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from autopar.backends.clients import Clients, checked_servers
from autopar.errors import ArgumentsError, LaunchError
from autopar.ir.strategy import asks_for_hosts
from autopar.launch.group import StoreGroup
from autopar.mpi.limits import machine_name
from autopar.mpi.world import CLIENTS_VARIABLE, job
from autopar.run.asked import Asked
from autopar.run.planner import Planner
from autopar.sync import Sync
from autopar.ways.way import Way


@dataclass(frozen=True, eq=False, kw_only=True)
class WithClients(Way):
    """Clients, each on minibatches of its own.

    Attributes:
      sync: How they come together.
      clients: How many there are.
      servers: Servers that keep what they ask for, if any do.
      server_ranks: Their ranks where they are processes of their own; (): they are threads of the clients.
    """

    sync: Any
    clients: int = 1
    servers: int = 1
    server_ranks: tuple[int, ...] = ()

    exchanges = "replicas (sync=)"
    may_follow = False
    is_made_at_once = True
    is_watched = False
    #: What to do in place of tables on hosts.
    not_on_hosts = 'Keep their rows on the devices, strategy="ps"'

    @classmethod
    def check(cls, asked: Asked) -> None:
        """Checks that neither stages nor hosts are asked for, too."""
        if not isinstance(asked.sync, Sync):
            raise ArgumentsError(
                f"sync={asked.sync!r}: give autopar.sync.Average(every=...) or autopar.sync.Async(...)"
            )
        if asked.pipeline is not None:
            raise ArgumentsError("sync= and pipeline= don't go together: leave one of them out")
        if asks_for_hosts(asked.planner.options.strategy):
            raise ArgumentsError(
                f"sync={type(asked.sync).__name__}(...): tables on hosts are one for all ranks that train one state "
                f"together. {cls.not_on_hosts}"
            )

    @classmethod
    def planner(cls, asked: Asked) -> Planner:
        """Plans for the devices of a client."""
        sync, processes = asked.sync, asked.devices.processes
        assert sync is not None, "clients are asked for"
        clients = Clients.of(asked.devices, sync.clients if sync.clients is not None else said_clients(processes))
        planner = asked.on(clients.devices)
        servers = checked_servers("sync", getattr(sync, "servers", None), clients.processes.size)
        own = tuple(range(job().workers, job().workers + servers)) if job().servers else ()
        options = dataclasses.replace(planner.options, may_leave=False)
        way = cls(options, planner.way_of(options), sync=sync, server_ranks=own).among(clients.count, servers)
        return way.planned(planner, clients)

    def planned(self, planner: Planner, clients: Clients) -> Planner:
        """Returns the planner of a client's own step with clients."""
        return dataclasses.replace(planner, options=self.options, clients=clients, way_of=self.by)

    def among(self, clients: int, servers: int | None = None) -> Self:
        """Returns the way of other numbers of clients and servers."""
        return dataclasses.replace(self, clients=clients, servers=servers or self.servers)

    @property
    def has_timeline(self) -> bool:
        """Says whether clients that wait for nobody are asked for; one alone may have nobody to wait for."""
        return self.sync.is_asynchronous

    @property
    def keeps_shards(self) -> bool:
        """Says that nobody else answers: what others send is whole."""
        return not self.is_asynchronous

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        """Messages to servers and neighbors do."""
        if not self.is_asynchronous:
            return None
        return "servers", "let clients average, sync=autopar.sync.Average(every=...)"

    @property
    def choices(self) -> Mapping[str, object]:
        """All have an outer optimizer, or none."""
        return {**super().choices, "outer": getattr(self.sync, "outer", None) is not None}


def said_clients(processes: StoreGroup) -> int | None:
    """Returns how many clients the environment says that processes are (`launch --clients`); None: it doesn't.
    Collective.

    Raises:
      LaunchError: it says something else.
      ArgumentsError: "machines" that haven't as many adjacent processes each.
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
