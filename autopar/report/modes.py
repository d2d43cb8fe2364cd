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
      found: Way -> a simulation for each of `FACTORS`; the plan's is the first one.
    """

    clients: int
    own: str
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
    for way, other in ways(plan).items():
        simulated = []
        for factor in FACTORS:
            options = ClientOptions({clients - 1: factor}, step_s, steps=_STEPS)
            simulated.append(simulate_clients(other, cluster, numbers, options))
            step_s = simulated[-1].step_s
        found[way] = tuple(simulated)
    return Stragglers(clients, next(iter(found)), found)


def ways(plan: Plan) -> Mapping[str, Plan]:
    """Returns the plan by its way's name, and those of averaging in every step and of servers with a bound and without
    one, which aren't its own."""
    if plan.served is not None:
        servers = plan.served.servers
        leaves = tuple(path for server in servers for path in server.leaves)
        pulled, pushed = (sum(getattr(server, f"{what}_bytes") for server in servers) for what in ("pull", "push"))
        served, clients = plan.served, plan.served.clients
    else:
        assert plan.sync is not None, "clients train"
        leaves = tuple(path for fragment in plan.sync.fragments for path in fragment)
        pulled = pushed = sum(plan.sync.fragment_bytes)
        clients = plan.sync.clients
        server = ServerPlan(leaves, plan.state_bytes, pulled, pushed)
        served = ServedPlan("", clients, None, (server,), (), (), plan.sync.examples)
    average = SyncPlan("", clients, 1, 0, False, (leaves,), (pulled,), pulled, (), (), served.examples)
    others = [dataclasses.replace(plan, sync=average, served=None)]
    for bound in (_BOUND, None):
        others.append(dataclasses.replace(plan, sync=None, served=dataclasses.replace(served, staleness=bound)))
    return {name_of(plan): plan} | {name: other for other in others if (name := name_of(other)) != name_of(plan)}


def name_of(plan: Plan) -> str:
    """Returns a way as a user writes it."""
    if plan.served is not None:
        return "Async()" if plan.served.staleness is None else f"Async(staleness={plan.served.staleness})"
    assert plan.sync is not None, "clients train"
    sync = plan.sync
    if sync.servers:
        return f"Elastic(interval={sync.every})"
    said = {"every": sync.every, "fragments": len(sync.fragments)}
    options = [f"{name}={value}" for name, value in said.items() if value > 1] + ["outer"] * sync.outer
    return f"Average({', '.join([*options, *([f'delay={sync.delay}'] if sync.delay else [])])})"
