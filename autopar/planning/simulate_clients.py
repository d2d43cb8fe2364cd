"""Simulates steps with `sync=` on the devices of a cluster: minibatches of all clients, who waits, staleness."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.cost.clients import ClientLoad, ClientRun, ClientTime, simulate_averages
from autopar.cost.collectives import all_reduce_s
from autopar.cost.served import Served, ServerLoad, simulate_served
from autopar.cost.simulate import simulate_step
from autopar.errors import ArgumentsError
from autopar.ir.center_shares import center_shares
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.sync_plan import ServedPlan, ServerPlan, SyncPlan
from autopar.planning.workload import client_workload, goes_by_rows, named_methods, table_bytes, untouched_bytes
from autopar.servers.timeline import Timeline

#: Steps of a client that are simulated by default, at least and at most; and messages that are simulated for that.
_LEAST, _STEPS, _MESSAGES = 20, 200, 300_000
#: Pairs of a worker and a server, all of whose messages are simulated.
_MOST_PAIRS = 1 << 16
#: What servers keep, and what is pulled of it and pushed to it: the sizes of a `ServerPlan`.
_BYTES = ("leaf_bytes", "pull_bytes", "push_bytes")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Says what is simulated of clients; `simulate` takes each of them.

    Attributes:
      slow: Client -> how many times as long its own steps take.
      step_s: Seconds of a client's own step; None: as its devices are predicted to take.
      servers: How many there are; None: as many as in the plan, or one for each client, if they are in all processes
        there.
      steps: Steps of a client that are simulated, on average; None: some.

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    slow: Mapping[int, float] = field(default_factory=dict)
    step_s: float | None = None
    servers: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.slow, Mapping):
            raise ArgumentsError(f"slow={self.slow!r}: give a mapping from workers to factors, such as {{3: 10.0}}")
        for worker, factor in self.slow.items():
            if not _is_number(factor) or factor < 1:
                raise ArgumentsError(
                    f"slow={{{worker!r}: {factor!r}}}: give how many times as long a worker's steps take, a number "
                    "from 1"
                )
        if self.step_s is not None and (not _is_number(self.step_s) or self.step_s <= 0):
            raise ArgumentsError(f"step_s={self.step_s!r}: give seconds, more than 0")
        for name in ("servers", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ArgumentsError(f"{name}={value!r}: give a whole number, 1 or more")

    def check_workers(self, count: int) -> None:
        """Check that all slow workers are there.

        Raises:
          ArgumentsError: one isn't.
        """
        wrong = next((w for w in self.slow if isinstance(w, bool) or w not in range(count)), None)
        if wrong is not None:
            raise ArgumentsError(f"slow: there is no worker {wrong!r}; there are {count}, from 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, eq=False)
class SyncTime:
    """Says what clients do on some devices.

    Attributes:
      devices: N, of all clients.
      clients: What each of them did.
      rates: Minibatches a second of each, once training goes on evenly.
      timeline: What servers did, as `autopar.timeline` has it; None without servers.
    """

    devices: int
    clients: Sequence[ClientTime]
    rates: Sequence[float]
    timeline: Timeline | None

    @property
    def minibatches_s(self) -> float:
        """Returns the minibatches a second of all clients."""
        return sum(self.rates)

    @property
    def waiting(self) -> float:
        """Returns the share of the clients' time in which they wait."""
        return float(np.mean([client.waiting for client in self.clients]))

    @property
    def staleness(self) -> float:
        """Returns how many pushes of others a server applied since the pull of a push's weights, on average."""
        late = () if self.timeline is None else self.timeline.staleness
        return float(np.mean(late)) if len(late) else 0.0

    @property
    def limit(self) -> str:
        """Says what clients spend most time on."""
        parts = {
            "own steps": sum(client.computing_s for client in self.clients),
            "slower clients": sum(client.slowest_s for client in self.clients),
            "exchanges": sum(client.exchange_s for client in self.clients),
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, slots=True)
class SyncSimulation:
    """Holds what clients of a step with `sync=` do, by number of devices; `str()` is a table.

    Attributes:
      step: The step's name.
      mode: How they train, in words.
      cluster: Whose devices they are; their number differs.
      slow: Client -> how many times as long its own steps take.
      step_s: Seconds of a client's own step that nobody disturbs.
      times: One for each number of devices.
    """

    step: str
    mode: str
    cluster: ClusterSpec
    slow: Mapping[int, float]
    step_s: float
    times: tuple[SyncTime, ...]

    @property
    def speedups(self) -> tuple[float, ...]:
        """Returns minibatches a second over those of one client that nobody disturbs, and that exchanges nothing."""
        return tuple(self.step_s * t.minibatches_s for t in self.times)

    def __str__(self) -> str:
        slow = "".join(f"; worker {w} takes {factor:g} times as long" for w, factor in self.slow.items())
        lines = [
            f"{self.step} on {self.cluster.device.name} ({self.cluster.name}), simulated: {self.mode}{slow}",
            f"A worker's own step takes {1e3 * self.step_s:.4g} ms; speed-ups are over one that exchanges nothing",
            f"{'devices':>8}{'workers':>9}{'minibatches/s':>15}{'speed-up':>10}{'waiting':>9}{'staleness':>11}  "
            "most of the time",
        ]
        for t, speedup in zip(self.times, self.speedups, strict=True):
            stale = "-" if t.timeline is None else f"{t.staleness:.2f}"
            lines.append(
                f"{t.devices:>8}{len(t.clients):>9}{t.minibatches_s:>15.2f}{speedup:>10.2f}{t.waiting:>9.0%}"
                f"{stale:>11}  {t.limit}"
            )
        return "\n".join([*lines, *self._by_worker()])

    def _by_worker(self) -> list[str]:
        """Tabulates what each worker does, where there is one number of devices."""
        if len(self.times) != 1:
            return []
        (time,) = self.times
        lines = [f"{'worker':>8}{'minibatches':>13}{'a second':>10}{'waiting':>9}  s for slower workers, and exchanges"]
        for w, (client, rate) in enumerate(zip(time.clients, time.rates, strict=True)):
            lines.append(
                f"{w:>8}{client.minibatches:>13}{rate:>10.2f}{client.waiting:>9.0%}"
                f"{client.slowest_s:>22.2f}{client.exchange_s:>14.2f}"
            )
        return lines

    __repr__ = __str__


def simulate_clients(
    plan: Plan,
    cluster: ClusterSpec,
    numbers: Sequence[int],
    options: ClientOptions,
    *,
    methods: Any = "auto",
    overlap: float = 0.0,
    variation: float = 0.0,
) -> SyncSimulation:
    """Simulates the clients of a plan on several numbers of devices; see `planning.simulate`.

    Raises:
      ArgumentsError: a number of devices that isn't a multiple of a client's; a slow worker that there isn't; more
        servers than processes; a ring; or a step that is predicted to take no time.
    """
    way = plan.way
    assert way is not None, "clients train"
    if plan.sync is not None and plan.sync.partners in ("pairs", "neighbors"):
        raise ArgumentsError(
            f"simulate: {plan.step} has sync={plan.sync.way}, and rings aren't simulated. Give Average(), Async() or "
            "Elastic(), or count by (n-1) + 1/c, which ADPSGD comes near to with one of n clients c times slower"
        )
    wrong = [n for n in numbers if n % plan.devices]
    if wrong:
        raise ArgumentsError(
            f"devices={wrong[0]}: a client of {plan.step} has {plan.devices} devices; give multiples of them"
        )
    options.check_workers(min(numbers) // plan.devices)
    step_s = options.step_s or _own_step_s(plan, cluster, methods, overlap)
    times = []
    for n in numbers:
        load = ClientLoad(n // plan.devices, step_s, options.steps or _STEPS, options.slow, variation)
        there = cluster.of(math.ceil(n / cluster.devices), min(n, cluster.devices))
        times.append(_time(plan, there, load, options))
    return SyncSimulation(plan.step, way.name, cluster, dict(options.slow), step_s, tuple(times))


def _own_step_s(plan: Plan, cluster: ClusterSpec, methods: Any, overlap: float) -> float:
    """Predicts the seconds of a client's own step; without updates, where servers do them.

    Raises:
      ArgumentsError: no time.
    """
    work = client_workload(plan)
    there = cluster.of(math.ceil(plan.devices / cluster.devices), min(plan.devices, cluster.devices))
    time = simulate_step(work, there, methods=named_methods(methods, work), overlap=overlap)
    parts = dict(time.by_part())
    if plan.served is not None:
        del parts["dense updates"], parts["tables"]
    seconds = sum(parts.values())
    if not seconds:
        raise ArgumentsError(f"{plan.step} is predicted to take no time on {cluster}: give step_s=, in seconds")
    return seconds


def _time(plan: Plan, cluster: ClusterSpec, load: ClientLoad, options: ClientOptions) -> SyncTime:
    """Simulates the clients on all devices of a cluster, or those of them that there are clients for."""
    n = load.count * plan.devices
    if plan.served is not None:
        served = _pulling(plan, plan.served, cluster, load, options)
    elif plan.sync is not None and plan.sync.servers:
        served = _exchanging(plan, plan.sync, cluster, load, options)
    else:
        assert plan.sync is not None, "clients train"
        run = _averages(plan, plan.sync, cluster, load)
        return SyncTime(n, run.clients, run.rates, None)
    pairs = load.count * len(served.servers)
    if pairs > _MOST_PAIRS:
        raise ArgumentsError(
            f"{load.count} workers and {len(served.servers)} servers are too many to follow each of their messages; "
            "give fewer devices=, or servers="
        )
    if options.steps is None:
        load = dataclasses.replace(load, steps=max(4 * served.every, _LEAST, min(_STEPS, _MESSAGES // pairs)))
    run = simulate_served(load, served)
    events = [np.array(each, np.int64).reshape(-1, 3) for each in run.events]
    return SyncTime(n, run.clients, run.rates, Timeline(load.count, served.bound, events))


def _averages(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad) -> ClientRun:
    """Simulates clients that average their replicas."""
    each = max(1, cluster.devices // plan.devices)  # clients of a machine
    ends = dataclasses.replace(cluster, machines=math.ceil(load.count / each), devices=min(each, load.count))
    copies = min(plan.devices, cluster.devices)  # of a sum, which share a machine's interfaces
    sent = _sent_bytes(plan, sync, load.count)
    means = [all_reduce_s(ends, size, copies=copies) if load.count > 1 else 0.0 for size in sent]
    return simulate_averages(load, means_s=means, due=sync.due, every=sync.every, delay=sync.delay)


def _sent_bytes(plan: Plan, sync: SyncPlan, clients: int) -> list[float]:
    """Returns the bytes of each fragment that are averaged: of tables whose other rows no step moves those rows alone
    that clients have touched, at most."""
    rest = {
        table.path: untouched_bytes(table, clients * sync.every)
        for table in plan.tables
        if (table.path in sync.by_rows if sync.clients > 1 else goes_by_rows(table))
    }
    pairs = zip(sync.fragments, sync.fragment_bytes, strict=True)
    return [size - sum(rest.get(path, 0.0) for path in fragment) for fragment, size in pairs]


def _pulling(plan: Plan, served: ServedPlan, cluster: ClusterSpec, load: ClientLoad, options: ClientOptions) -> Served:
    """Says how workers pull and push: what the plan's servers keep, or an equal part of it, if there are others."""
    sums = {name: sum(getattr(s, name) for s in served.servers) for name in _BYTES}
    total = dataclasses.replace(served.servers[0], leaves=(), pieces={}, **sums)
    touched = [_touched_bytes(plan, served, server) for server in served.servers]
    leaves = sum(len(server.leaves) for server in served.servers)
    count = _servers(options, len(served.servers), served.clients, load.count, load.count * plan.devices, leaves)
    servers, memory_s = served.servers, 1 / cluster.device.memory_bytes_s
    if count != len(servers):
        servers = [dataclasses.replace(total, **{name: getattr(total, name) // count for name in _BYTES})] * count
        touched = [sum(touched) / count] * count
    return Served(
        servers=[
            ServerLoad(
                device=n,
                pull_bytes=server.pull_bytes,
                push_bytes=server.push_bytes,
                read_s=cluster.to_host(server.pull_bytes),
                update_s=cluster.to_host(server.push_bytes) + (2 * touched[n] + server.push_bytes) * memory_s,
            )
            for n, server in enumerate(servers)
        ],
        cluster=cluster,
        devices=range(0, load.count * plan.devices, plan.devices),
        bound=served.staleness,
        receive_s=cluster.to_host(total.pull_bytes),
        send_s=cluster.to_host(total.push_bytes),
    )


def _exchanging(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad, options: ClientOptions) -> Served:
    """Says how workers exchange weights with a centre, of which servers keep what they would keep."""
    sizes = {leaf.path: leaf.nbytes for leaf in plan.dense} | {table.path: table_bytes(table) for table in plan.tables}
    weights = [sizes[path] for fragment in sync.fragments for path in fragment]
    processes, size, memory_s = load.count * plan.devices, sum(weights), 1 / cluster.device.memory_bytes_s
    count = _servers(options, sync.servers, sync.clients, load.count, processes, processes)
    parts = [sum(span.nbytes for span in share) for share in center_shares(weights, count)]

    def update_s(part: int) -> float:
        """Predicts what reads weights and centre, and writes centre and moves."""
        return 2 * cluster.to_host(part) + 4 * part * memory_s

    return Served(
        servers=[ServerLoad(n, part, part, update_s=update_s(part)) for n, part in enumerate(parts)],
        cluster=cluster,
        devices=range(0, load.count * plan.devices, plan.devices),
        every=sync.every,
        receive_s=cluster.to_host(size) + 3 * size * memory_s,
        send_s=cluster.to_host(size),
    )


def _servers(options: ClientOptions, planned: int, clients: int, count: int, processes: int, leaves: int) -> int:
    """Returns how many servers there are.

    Args:
      options: What is asked for.
      planned, clients: Servers and clients of the plan.
      count, processes: Clients and processes that are simulated.
      leaves: That servers keep: a server has one at least.

    Raises:
      ArgumentsError: more than processes.
    """
    if options.servers is not None and options.servers > processes:
        raise ArgumentsError(f"servers={options.servers} of {processes} processes: give as many at most")
    wanted = options.servers or (planned if planned < clients else planned * count // clients)
    return max(1, min(wanted, processes, leaves))


def _touched_bytes(plan: Plan, served: ServedPlan, server: ServerPlan) -> float:
    """Returns the bytes of what a push updates on a server: all of it, but of tables by rows those rows alone."""
    touched = float(server.leaf_bytes)
    for table in plan.tables:
        if table.path in served.by_rows:
            touched -= untouched_bytes(table, 1) * sum(map(server.part_of, (table.path, *table.slots)))
    return touched
