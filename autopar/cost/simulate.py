"""Predicts a step on 1 to 10,000 devices of a kind: compute, exchanges, busy owners, stragglers, overlap.

Weak scaling: every device keeps its number of examples. Sent arrays have the static shapes of the compiled step
(`passes.choosing.capacity`), so padding is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from autopar.cost.exchange import (
    HOSTED,
    DenseLoad,
    Term,
    cheapest_together,
    count_exchanges,
    sent_bytes,
    step_parts,
    with_bounds,
)
from autopar.cost.rates import bound_rates, planned_host_rates, planned_rates
from autopar.ir.cluster import STATE_SHARE, ClusterSpec
from autopar.ir.figures import HEADROOM, Room, Sizes
from autopar.ir.strategy import Where

#: The backward pass has two of three products.
BACKWARD = 2 / 3


@dataclass(frozen=True, slots=True)
class TableLoad:
    """The load that a device puts on one table, for any number of devices."""

    path: str
    sizes: Sizes  #: On some number of devices.
    rows: Callable[[int], float]  #: n -> expected distinct rows that n devices look up together in a step.
    hosted: bool = False  #: Its rows are in host memory, unless another method is asked for.


@dataclass(frozen=True, slots=True)
class Workload:
    """The dense part and the tables of a step on one device. `by_leaders`: what ranks of a machine want alike of tables
    on hosts crosses machines once."""

    dense: DenseLoad
    tables: tuple[TableLoad, ...] = ()
    by_leaders: bool = True


@dataclass(frozen=True, slots=True)
class StepTime:
    """A simulated step."""

    devices: int  #: N.
    parts: Mapping[str, tuple[Term, ...]]  #: Part -> its terms; a table's part is its path.
    methods: Mapping[str, str] = field(default_factory=dict)  #: Table -> its method.
    waiting_s: float = 0.0  #: Seconds that the slowest of N devices needs longer for its own work than the average one.
    hidden_s: float = 0.0  #: Seconds of dense gradients' exchanges during the backward pass.
    fits: bool = True  #: The state fits the devices' and the hosts' memory, with room for the model.

    @property
    def seconds(self) -> float:
        return sum(self.by_part().values())

    def by_part(self) -> Mapping[str, float]:
        """Maps parts to seconds; hidden exchanges are taken off the dense gradients."""
        seconds = {part: sum(t.seconds for t in terms) for part, terms in self.parts.items()}
        seconds["dense gradients"] -= self.hidden_s
        return {**seconds, "stragglers": self.waiting_s}

    @property
    def bound_s(self) -> float:
        """Lower bound of the seconds, by bandwidths and operations alone, less hidden exchanges; 0 if unknown."""
        least = {part: sum(t.bound_s or 0.0 for t in terms) for part, terms in self.parts.items()}
        return sum(least.values()) - min(self.hidden_s, least["dense gradients"])

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        parts = self.by_part()
        return max(parts, key=lambda part: parts[part])


def simulate_step(
    work: Workload,
    cluster: ClusterSpec,
    *,
    methods: Mapping[str, str] | str = "auto",
    overlap: float = 0.0,
    variation: float = 0.0,
) -> StepTime:
    """Simulates a step on all devices of a cluster.

    `methods`: of each table, or of all; "auto": the fastest that fits the memory, and the hosts for tables there. If
    tables move to hosts, dense gradients go by MPI. `overlap`: fraction of the dense gradients' exchange that may go on
    during the backward pass, 0 to 1. `variation`: standard deviation of a device's own work over its mean (stragglers).
    """
    n, rates, hosts = cluster.count, planned_rates(cluster), planned_host_rates(cluster)
    chosen: dict[str, str] = {}
    loads: list[tuple[str, Sizes]] = []
    asked = {t.path: methods if isinstance(methods, str) else methods.get(t.path, "auto") for t in work.tables}
    open_ = [t for t in work.tables if asked[t.path] == "auto" and not t.hosted]
    named = count_exchanges((asked[t.path], sizes_at(t, n)) for t in work.tables if t not in open_)
    together = cheapest_together(rates, [sizes_at(t, n) for t in open_], named)
    cheapest = {t.path: method for t, method in zip(open_, together, strict=True)}
    budget, state = STATE_SHARE * cluster.device.memory_bytes, work.dense.state_bytes
    host_budget, host_state = STATE_SHARE * cluster.host_bytes, 0.0
    for table in work.tables:
        method = asked[table.path]
        size = table.sizes.extent * table.sizes.family_bytes
        if method == "auto" and table.hosted:
            method = HOSTED
        elif method == "auto":
            method = cheapest[table.path] if state + size <= budget else "ps"
        chosen[table.path] = method
        sizes = sizes_at(table, n)
        if method == HOSTED:
            sizes = host_sizes_at(table, n)
            if work.by_leaders and cluster.machines > 1:
                sizes = replace(sizes, crossing=crossing(table.rows, cluster.devices))
        loads.append((method, sizes))
        if method == HOSTED:
            host_state += size / cluster.machines
        else:
            state += size / n if method == "ps" else size
    are_on_hosts = any(chosen[t.path] == HOSTED for t in work.tables)
    by_mpi = are_on_hosts and (work.dense.by_mpi or not any(t.hosted for t in work.tables))
    dense_load = replace(work.dense, by_mpi=by_mpi)
    least = step_parts(bound_rates(cluster), dense_load, loads, n, hosts.bound)
    parts = with_bounds(step_parts(rates, dense_load, loads, n, hosts), least)
    model = sum(t.seconds for part in ("model", "lookups") for t in parts[part])
    dense = sum(t.seconds for t in parts["dense gradients"])
    waiting, hidden = variation * model * expected_maximum(n), min(overlap * dense, BACKWARD * model)
    if cluster.devices_are_hosts:
        host_state += cluster.devices * state
    return StepTime(n, parts, chosen, waiting, hidden, state <= budget and host_state <= host_budget)


def scaling(work: Workload, cluster: ClusterSpec, counts: Iterable[int], **options: object) -> list[StepTime]:
    """Simulates a step on several numbers of the cluster's devices; machines are filled one after the other."""
    shapes = ((math.ceil(n / cluster.devices), min(n, cluster.devices)) for n in counts)
    return [simulate_step(work, cluster.of(*shape), **options) for shape in shapes]  # type: ignore[arg-type]


def crossovers(times: Sequence[StepTime]) -> list[str]:
    """Describes in a line each where a table's method, or the slowest part, changes."""
    lines = []
    for old, new in itertools.pairwise(times):
        for path, method in new.methods.items():
            if old.methods[path] != method:
                lines.append(f"from {new.devices} devices on {path} goes by {method}, not {old.methods[path]}")
        if old.limit != new.limit:
            lines.append(f"from {new.devices} devices on most of a step is {new.limit}, not {old.limit}")
    return lines


def sizes_at(table: TableLoad, devices: int) -> Sizes:
    """Returns the sizes of a table in a step of N devices, with the static shapes of the compiled step."""
    own = table.sizes.by_rows() if table.hosted else table.sizes
    requested, shard_rows = min(own.extent, own.ids), -(-own.extent // devices)
    capacity = min(requested, shard_rows, math.ceil(HEADROOM * busiest(table.rows(1), devices)))
    slots = own.bag_ids / own.devices * busiest(own.ids, devices) / max(1, busiest(own.ids, own.devices))
    sizes = replace(
        own,
        devices=devices,
        requested=requested,
        routed=min(own.extent, devices * own.ids) + 1,
        capacity=capacity,
        owned=min(shard_rows, devices * capacity) + 1,
        checks=True,
        bag_ids=devices * math.ceil(slots),
        room=None,
    )
    if own.whole:  # devices have equal parts of all such tables
        rows = min(requested, math.ceil(HEADROOM * table.rows(1)))
        sizes = replace(sizes, room=Room(rows, own.bag_ids // own.devices, own.bags))
    return _with_fewer_bytes(sizes, "devices", "ps")


def host_sizes_at(table: TableLoad, devices: int) -> Sizes:
    """Returns the sizes of a table on hosts in a step of N devices.

    Messages have a device's distinct rows, and the busiest of N owners of cyclic rows has a Poisson load.
    """
    rows = math.ceil(min(table.rows(1), table.sizes.extent))
    busy = rows + expected_maximum(devices) * math.sqrt(rows) if devices > 1 else rows
    own = table.sizes if table.hosted else table.sizes.by_rows()
    bags = own.bags + own.bags_of_all * devices // own.devices - own.bags_of_all
    sizes = replace(own, devices=devices, requested=rows, owned=math.ceil(busy), capacity=0, checks=False, bags=bags)
    return _with_fewer_bytes(sizes, "hosts", HOSTED)


def _with_fewer_bytes(sizes: Sizes, where: Where, method: str) -> Sizes:
    by_rows = sizes.by_rows()
    bags, rows = (sent_bytes(each, where)[method] for each in (sizes, by_rows))
    return sizes if bags < rows else by_rows


def crossing(rows: Callable[[int], float], each: int) -> float:
    """Returns the share of the rows that `each` ranks of a machine ask for which is left where they ask together."""
    alone = each * rows(1)
    return min(1.0, rows(each) / alone) if alone else 1.0


def busiest(rows: float, devices: int) -> int:
    """Returns rows in the longest of N^2 messages, if each device asks N owners for `rows` cyclically distributed rows.

    Loads are Poisson's; the longest message is the least length that fewer than half a message exceeds on average (Raab
    and Steger, "Balls into bins", 1998).
    """
    mean, messages = rows / devices, devices * devices
    if devices == 1:
        return math.ceil(rows)
    length = max(0, math.floor(mean - 10 * math.sqrt(mean)))  # almost no message is shorter
    log_term = length * math.log(mean) - mean - math.lgamma(length + 1)
    above = -math.expm1(log_term)
    while messages * above > 0.5 and length < rows:
        length += 1
        log_term += math.log(mean / length)
        above -= math.exp(log_term)
    return max(1, length)


def expected_maximum(count: int) -> float:
    """Returns the expected maximum of `count` standard normal numbers (Blom, 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
