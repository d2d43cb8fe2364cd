"""Ways of training the clients of a plan: its own, and others beside it, of the same weights and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.sync_plan import ServedPlan, ServerPlan, SyncPlan
from autopar.planning.simulate_clients import ClientOptions, SyncSimulation, simulate_clients
from autopar.planning.workload import goes_by_rows, untouched_bytes

#: How many times slower one worker is.
FACTORS = (1.0, 2.0, 4.0, 10.0, 30.0, 100.0)
#: Of the bound beside a plan that has none.
_BOUND = 4
#: Steps of a worker that are simulated; and workers for which that takes seconds.
_STEPS, MOST_WORKERS = 60, 20


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Says what clients do together, one of which is slower.

    Attributes:
      clients: n.
      own: The plan's way.
      plans: Way -> its plan; the plan's own is the first one.
      found: Way -> a simulation for each of `FACTORS`.
    """

    clients: int
    own: str
    plans: Mapping[str, Plan]
    found: Mapping[str, tuple[SyncSimulation, ...]]

    def speedups(self, way: str) -> tuple[float, ...]:
        """Returns the minibatches a second of all, over those of one client that nobody disturbs."""
        return tuple(simulated.speedups[0] for simulated in self.found[way])

    @property
    def free(self) -> tuple[float, ...]:
        """Returns the most that there is: (n-1) + 1/c."""
        return tuple(self.clients - 1 + 1 / c for c in FACTORS)

    @property
    def tied(self) -> tuple[float, ...]:
        """Returns what is left to those who wait for the slowest: n/c."""
        return tuple(self.clients / c for c in FACTORS)


def simulate_stragglers(plan: Plan, cluster: ClusterSpec) -> Stragglers:
    """Simulates all ways on all devices of a cluster, the last client slower than the others.

    Raises:
      ArgumentsError: it has devices for one client alone, or for so many that it would take long.
    """
    clients = cluster.count // plan.devices
    if clients < 2:
        raise ArgumentsError(f"{cluster} has devices for {clients} of its clients, of {plan.devices} devices each")
    if clients > MOST_WORKERS:
        raise ArgumentsError(
            f"{clients} clients take long to simulate; give fewer machines, report(plan, cluster=cluster.of(...)), or "
            "call autopar.simulate"
        )
    numbers, found, step_s = [clients * plan.devices], dict[str, tuple[SyncSimulation, ...]](), None
    plans = ways(plan)
    for way, other in plans.items():
        simulated = []
        for factor in FACTORS:
            options = ClientOptions({clients - 1: factor}, step_s, steps=_STEPS)
            simulated.append(simulate_clients(other, cluster, numbers, options))
            step_s = simulated[-1].step_s
        found[way] = tuple(simulated)
    return Stragglers(clients, next(iter(found)), plans, found)


def ways(plan: Plan) -> Mapping[str, Plan]:
    """Returns the plan by its way's name, and those of averaging in every step and of servers with a bound and without
    one, which aren't its own."""
    served = plan.served if plan.served is not None else _served(plan)
    leaves = dict.fromkeys([*served.by_rows, *(path for server in served.servers for path in server.leaves)])
    average = SyncPlan(
        name="",
        clients=served.clients,
        every=1,
        delay=0,
        outer=False,
        fragments=(tuple(leaves),),
        fragment_bytes=(size := _weight_bytes(plan, served),),
        mean_bytes=size,
        by_rows=served.by_rows,
        own=(),
        examples=served.examples,
    )
    others = [dataclasses.replace(plan, sync=average, served=None)]
    for bound in (_BOUND, None):
        others.append(dataclasses.replace(plan, sync=None, served=dataclasses.replace(served, staleness=bound)))
    return {name_of(plan): plan} | {name: other for other in others if (name := name_of(other)) != name_of(plan)}


def _served(plan: Plan) -> ServedPlan:
    """Returns what servers would do of a plan whose clients train replicas: one that keeps all of the state."""
    sync = plan.sync
    assert sync is not None, "clients train"
    weights = [path for fragment in sync.fragments for path in fragment]
    tables = [table for table in plan.tables if table.path in weights and goes_by_rows(table)]
    size = round(sum(sync.fragment_bytes) - sum(untouched_bytes(table, 1) for table in tables))
    leaves = dict.fromkeys([*weights, *(slot for table in tables for slot in table.slots)])
    server = ServerPlan(tuple(leaves), plan.state_bytes, pull_bytes=size, push_bytes=size)
    return ServedPlan("", sync.clients, None, (server,), tuple(table.path for table in tables), (), sync.examples)


def _weight_bytes(plan: Plan, served: ServedPlan) -> int:
    """Returns the bytes of all that workers pull, with whole tables."""
    rest = (untouched_bytes(table, 1) for table in plan.tables if table.path in served.by_rows)
    return round(sum(server.pull_bytes for server in served.servers) + sum(rest))


def name_of(plan: Plan) -> str:
    """Returns a way as a user writes it."""
    if plan.served is not None:
        return "Async()" if plan.served.staleness is None else f"Async(staleness={plan.served.staleness})"
    assert plan.sync is not None, "clients train"
    return plan.sync.way
