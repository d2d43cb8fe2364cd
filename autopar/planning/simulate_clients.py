"""Simulates steps with `sync=` on a cluster's devices: minibatches, waiting and staleness of all clients.

This module works out what clients send each other or servers, and what that takes; `cost` has the clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost.client_times import (
    ClientLoad,
    ClientTime,
    Pairs,
    Served,
    ServerLoad,
    simulate_averages,
    simulate_pairs,
    simulate_served,
)
from autopar.cost.collectives import all_reduce_s
from autopar.cost.simulate import simulate_step
from autopar.errors import ArgumentsError, check_whole, is_number
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan, ServedPlan, ServerPlan, SyncPlan
from autopar.ir.served import center_shares
from autopar.ir.strategy import Method
from autopar.ir.topology import Everyone
from autopar.planning.plan import client_workload, goes_by_rows, named_methods, untouched_bytes
from autopar.servers.timeline import Timeline

#: Least and most steps of a client that are simulated by default, and messages that all clients' may take.
_LEAST, _STEPS, _MESSAGES = 20, 200, 300_000
#: Most pairs of a worker and a server, or of clients' devices, whose messages can all be simulated.
_MOST_PAIRS = 1 << 16


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Arguments of `simulate` about clients, which describes them; raises ArgumentsError if a value makes no sense."""

    slow: Mapping[int, float] = field(default_factory=dict)
    step_s: float | None = None
    servers: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.slow, Mapping):
            raise ArgumentsError(f"slow={self.slow!r}: give a mapping from workers to factors, such as {{3: 10.0}}")
        for worker, factor in self.slow.items():
            if not is_number(factor) or factor < 1:
                raise ArgumentsError(
                    f"slow={{{worker!r}: {factor!r}}}: give how many times as long a worker's steps take, a number "
                    "from 1"
                )
        if self.step_s is not None and (not is_number(self.step_s) or self.step_s <= 0):
            raise ArgumentsError(f"step_s={self.step_s!r}: give seconds, more than 0")
        for name in ("servers", "steps"):
            if getattr(self, name) is not None:
                check_whole(f"{name}=%r", getattr(self, name))

    def check_workers(self, count: int) -> None:
        """Checks that all slow workers are among `count`, or raises ArgumentsError."""
        wrong = next((w for w in self.slow if isinstance(w, bool) or w not in range(count)), None)
        if wrong is not None:
            raise ArgumentsError(f"slow: there is no worker {wrong!r}; there are {count}, from 0")


@dataclass(frozen=True, slots=True, eq=False)
class SyncTime:
    """The simulated clients on some devices."""

    devices: int  #: N, the devices of all clients.
    clients: Sequence[ClientTime]  #: Each client's time.
    rates: Sequence[float]  #: Each client's minibatches a second, in the steady state.
    #: What servers, or passive clients of a ring, did (see `autopar.timeline`); None without them.
    timeline: Timeline | None

    @property
    def minibatches_s(self) -> float:
        """Minibatches a second of all clients."""
        return sum(self.rates)

    @property
    def waiting(self) -> float:
        """The share of the clients' time in which they wait."""
        return float(np.mean([client.waiting for client in self.clients]))

    @property
    def staleness(self) -> float:
        """The mean number of others' pushes that a server applied between the pull and the push of a step; 0 without
        servers."""
        late = self.timeline.staleness if self.timeline is not None and self.has_servers else ()
        return float(np.mean(late)) if len(late) else 0.0

    @property
    def has_servers(self) -> bool:
        """Says whether servers keep something; a ring's clients are none."""
        return self.timeline is not None and not self.timeline.ring

    @property
    def limit(self) -> str:
        """The activity that clients spend most time on."""
        parts = {
            "own steps": sum(client.computing_s for client in self.clients),
            "slower clients": sum(client.slowest_s for client in self.clients),
            "exchanges": sum(client.exchange_s for client in self.clients),
        }
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True, slots=True)
class SyncSimulation:
    """Simulated clients of a step with `sync=`, by number of devices; `str()` is a table.

    Attributes:
      step: The step's name.
      mode: The way of training, in words.
      cluster: The kind of devices; their number varies.
      slow: Client -> factor of its own steps' time.
      step_s: Seconds of an undisturbed client's own step.
      times: A time for each number of devices.
      update_s: Seconds of the update in it; None if `step_s` was given.
    """

    step: str
    mode: str
    cluster: ClusterSpec
    slow: Mapping[int, float]
    step_s: float
    times: tuple[SyncTime, ...]
    update_s: float | None = None

    @property
    def speedups(self) -> tuple[float, ...]:
        """Minibatches a second relative to one undisturbed client that exchanges nothing."""
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
            stale = f"{t.staleness:.2f}" if t.has_servers else "-"
            lines.append(
                f"{t.devices:>8}{len(t.clients):>9}{t.minibatches_s:>15.2f}{speedup:>10.2f}{t.waiting:>9.0%}"
                f"{stale:>11}  {t.limit}"
            )
        return "\n".join([*lines, *self._by_worker()])

    def _by_worker(self) -> list[str]:
        """Returns a table of the workers, if one number of devices was simulated."""
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
    methods: Mapping[str, Method | str] | Method | str = "auto",
    overlap: float = 0.0,
    variation: float = 0.0,
) -> SyncSimulation:
    """Simulates the clients of a plan on several numbers of devices; see `planning.simulate`.

    Raises ArgumentsError if a number of devices is no multiple of a client's; a slow worker doesn't exist; there are
    more servers than processes; a ring is odd; or a step is predicted to take no time.
    """
    way = plan.clients_plan
    assert way is not None, "clients train"
    wrong = [n for n in numbers if n % plan.devices]
    if wrong:
        raise ArgumentsError(
            f"devices={wrong[0]}: a client of {plan.step} has {plan.devices} devices; give multiples of them"
        )
    if plan.sync is not None and not plan.sync.servers:
        for n in numbers:
            remedy = f"Give devices= for {{}} of clients, which have {plan.devices} each"
            plan.sync.topology(n // plan.devices).check(f"devices={n}, sync={plan.sync.way}", remedy)
    options.check_workers(min(numbers) // plan.devices)
    step_s, update_s = options.step_s, None
    if step_s is None:
        step_s, update_s = _own_step_s(plan, cluster, methods, overlap)
    times = []
    for n in numbers:
        load = ClientLoad(n // plan.devices, step_s, options.steps or _STEPS, options.slow, variation)
        there = cluster.of(math.ceil(n / cluster.devices), min(n, cluster.devices))
        times.append(_time(plan, there, load, options))
    mode = way.name if plan.sync is None else f"{way.name}, {plan.sync.way}"
    return SyncSimulation(plan.step, mode, cluster, dict(options.slow), step_s, tuple(times), update_s)


def _own_step_s(
    plan: Plan, cluster: ClusterSpec, methods: Mapping[str, Method | str] | Method | str, overlap: float
) -> tuple[float, float]:
    """Returns predicted seconds of a client's own step, and of the update in it (0 if servers update); raises
    ArgumentsError if the step takes no time."""
    work = client_workload(plan)
    there = cluster.of(math.ceil(plan.devices / cluster.devices), min(plan.devices, cluster.devices))
    time = simulate_step(work, there, methods=named_methods(methods, work), overlap=overlap)
    parts = dict(time.by_part())
    if plan.served is not None:
        del parts["dense updates"], parts["tables"]
    terms = [term for part in ("dense updates", "tables") if part in parts for term in time.parts[part]]
    seconds, update_s = sum(parts.values()), sum(term.seconds for term in terms if term.name.startswith("update"))
    if not seconds:
        raise ArgumentsError(f"{plan.step} is predicted to take no time on {cluster}: give step_s=, in seconds")
    return seconds, update_s


def _time(plan: Plan, cluster: ClusterSpec, load: ClientLoad, options: ClientOptions) -> SyncTime:
    """Simulates the clients on all devices of a cluster, or on as many as there are clients for."""
    devices, sync, served = load.count * plan.devices, plan.sync, _answerers(plan, cluster, load, options.servers)
    if served is not None:
        is_ring = served.topology is not None
        asked = 1 if is_ring else len(served.servers)
        load = _followed(load, options, asked, "" if is_ring else f" and {asked} servers", served.every)
        run = simulate_served(load, served)
        timeline = Timeline(load.count, served.bound, run.events, ring=is_ring)
        return SyncTime(devices, run.clients, run.rates, timeline)
    assert sync is not None, "clients train"
    topology = sync.topology(load.count)
    if not isinstance(topology, Everyone) and load.count > 1:
        load = _followed(load, options, plan.devices, "")

        def sent(step: int) -> float:
            # Of tables by rows, a client sends the rows that any client has touched until then: an upper bound.
            return sum(_averaged_bytes(plan, sync, load.count * step))

        run = simulate_pairs(load, Pairs(topology, cluster, plan.devices, sent_bytes=sent))
    else:
        seconds = _means_s(plan, sync, cluster, load)
        run = simulate_averages(load, means_s=seconds, due=sync.due, every=sync.every, delay=sync.delay)
    return SyncTime(devices, run.clients, run.rates, None)


def _followed(load: ClientLoad, options: ClientOptions, messages: int, servers: str, every: int = 0) -> ClientLoad:
    """Returns a load with few enough steps to follow each of their messages, or raises ArgumentsError.

    `messages`: messages of a client in an exchange. `servers`: the number of servers in words, for the error; ""
    without any. `every`: k, steps from an exchange with a centre to the next; 0: there is no centre.
    """
    count = load.count * messages
    if count > _MOST_PAIRS:
        raise ArgumentsError(
            f"{load.count} workers{servers} are too many to follow each of their messages; give fewer devices="
            + ", or servers=" * bool(servers)
        )
    if options.steps is not None:
        return load
    return replace(load, steps=max(4 * every, _LEAST, min(_STEPS, _MESSAGES // count)))


# --- what clients send each other, or servers, and what that takes ---


def sent_bytes(plan: Plan, clients: int) -> float:
    """Returns mean bytes that each of `clients` clients sends in a step; with servers the bytes of its pushes."""
    if plan.served is not None:
        return sum(server.push_bytes for server in plan.served.servers)
    assert plan.sync is not None, "clients train"
    if plan.sync.servers or plan.sync.asks_neighbors:  # tables go whole
        size = sum(_weight_bytes(plan, plan.sync))
    else:
        size = round(sum(_averaged_bytes(plan, plan.sync, clients * plan.sync.every)))
    return replace(plan.sync, clients=clients, mean_bytes=size).sent_bytes


def _averaged_bytes(plan: Plan, sync: SyncPlan, minibatches: int) -> list[float]:
    """Returns the bytes of each fragment that are averaged. Of tables that are sent by rows, these are at most the rows
    that `minibatches` minibatches have touched."""
    rest = {
        table.path: untouched_bytes(table, minibatches)
        for table in plan.tables
        if (table.path in sync.by_rows if sync.clients > 1 else goes_by_rows(table))
    }
    pairs = zip(sync.fragments, sync.fragment_bytes, strict=True)
    return [size - sum(rest.get(path, 0.0) for path in fragment) for fragment, size in pairs]


def _weight_bytes(plan: Plan, sync: SyncPlan) -> list[int]:
    sizes = {leaf.path: leaf.nbytes for leaf in (*plan.dense, *plan.tables)}
    return [sizes[path] for fragment in sync.fragments for path in fragment]


def _means_s(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad) -> Sequence[float]:
    each = max(1, cluster.devices // plan.devices)  # clients of a machine
    ends = replace(cluster, machines=math.ceil(load.count / each), devices=min(each, load.count))
    copies = min(plan.devices, cluster.devices)  # of a sum, which share a machine's interfaces
    sent = _averaged_bytes(plan, sync, load.count * sync.every)
    return [all_reduce_s(ends, size, copies=copies) if load.count > 1 else 0.0 for size in sent]


def _answerers(plan: Plan, cluster: ClusterSpec, load: ClientLoad, wanted: int | None) -> Served | None:
    """Returns how clients ask servers, or passive clients of a ring; None if they ask nobody. Raises ArgumentsError for
    more servers (`wanted`; None: the plan's) than processes."""
    sync = plan.sync
    if plan.served is not None:
        return _with_servers(plan, plan.served, cluster, load, wanted)
    assert sync is not None, "clients train"
    if sync.servers:
        weights = _weight_bytes(plan, sync)
        count = _server_count(plan, load, wanted, planned=sync.servers)
        parts = (sum(span.nbytes for span in share) for share in center_shares(weights, count))
        served = _beside_steps(plan, cluster, load, sum(weights), enumerate(parts))
        return replace(served, every=sync.every)
    if sync.asks_neighbors and load.count > 1:
        topology = sync.topology(load.count)
        # Of tables by rows, at most those that all clients touch while a change goes round the ring.
        size = int(sum(_averaged_bytes(plan, sync, load.count * topology.rounds)))
        served = _beside_steps(plan, cluster, load, size, ((c * plan.devices, size) for c in topology.passives))
        return replace(served, topology=topology)
    return None


def _with_servers(plan: Plan, served: ServedPlan, cluster: ClusterSpec, load: ClientLoad, wanted: int | None) -> Served:
    """Returns how workers pull from and push to the plan's servers, or to another number of equal ones."""
    servers = served.servers
    pulled, pushed = sum(server.pull_bytes for server in servers), sum(server.push_bytes for server in servers)
    # For each server bytes of a pull, of a push, and of what a push updates.
    sizes = [(server.pull_bytes, server.push_bytes, _touched_bytes(plan, served, server)) for server in servers]
    leaves = sum(len(server.leaves) for server in servers)
    count = min(_server_count(plan, load, wanted, planned=len(sizes)), max(1, leaves))
    if count != len(sizes):
        sizes = [(pulled // count, pushed // count, sum(update for *_, update in sizes) / count)] * count
    memory_s = 1 / cluster.device.memory_bytes_s
    return Served(
        servers=[
            ServerLoad(n, pull, push, cluster.to_host(pull), cluster.to_host(push) + (2 * update + push) * memory_s)
            for n, (pull, push, update) in enumerate(sizes)
        ],
        cluster=cluster,
        devices=range(0, load.count * plan.devices, plan.devices),
        bound=served.staleness,
        receive_s=cluster.to_host(pulled),
        send_s=cluster.to_host(pushed),
    )


def _touched_bytes(plan: Plan, served: ServedPlan, server: ServerPlan) -> float:
    """Returns the bytes that a push updates on a server: all, except untouched rows of tables by rows."""
    touched = float(server.leaf_bytes)
    for table in plan.tables:
        if table.path in served.by_rows:
            touched -= untouched_bytes(table, 1) * sum(map(server.part_of, (table.path, *table.slots)))
    return touched


def _beside_steps(
    plan: Plan, cluster: ClusterSpec, load: ClientLoad, size: int, parts: Iterable[tuple[int, int]]
) -> Served:
    """Returns how clients exchange `size` bytes of weights beside a step. `parts`: device and bytes of each
    answerer."""
    memory_s = 1 / cluster.device.memory_bytes_s

    def update_s(part: int) -> float:
        # Reads both sides' weights; writes those that are kept and the moves.
        return 2 * cluster.to_host(part) + 4 * part * memory_s

    return Served(
        servers=[ServerLoad(device, part, part, update_s=update_s(part)) for device, part in parts],
        cluster=cluster,
        devices=range(0, load.count * plan.devices, plan.devices),
        receive_s=cluster.to_host(size) + 3 * size * memory_s,
        send_s=cluster.to_host(size),
    )


def _server_count(plan: Plan, load: ClientLoad, wanted: int | None, planned: int) -> int:
    """Returns the number of simulated servers: `wanted`, or as the plan has `planned` ones for its own clients. Raises
    ArgumentsError for more servers than processes."""
    way, processes = plan.clients_plan, load.count * plan.devices
    assert way is not None, "clients train"
    if wanted is not None and wanted > processes:
        raise ArgumentsError(f"servers={wanted} of {processes} processes: give as many at most")
    found = wanted or (planned if planned < way.clients else planned * load.count // way.clients)
    return max(1, min(found, processes))
