"""Predicts the bytes that each device sends in a step, and its time, by table and method, and by part.

Bytes: docs/design.md (ring AllReduce, AllGather, a parameter server on each device; padding included). Seconds add up
measured parts (`Rates`): collectives, routing, rows moved and updated. `step_terms` leaves out what all methods share;
`step_parts` adds it: the model's products, lookups, dense parameters, the call itself.

`table_3` is Parallax's own formula: it counts one direction for AllReduce and both for the others, without a co-located
server's own bytes, so that AllGather never wins for N > 2.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.rates import FREE, NO_HOST_TIME, NO_TIME, Curve, HostRates, Rates
from autopar.ir.figures import SHARED_BYTES, Sizes, Term, wire_bytes
from autopar.ir.plan import TablePlan
from autopar.ir.strategy import HOSTED, METHODS, Where

ID_BYTES = 4
#: The name of the term of deferred rows; bringing one up to date takes as long as this many passes over it. Measured on
#: 2 cores, 4 devices, with AdamW: 30 ns a number, which is read and written in 0.4 ns.
REPLAY, REPLAY_WALKS = "bring rows up to date", 64
#: Terms that send ids alone, which families of the same ids may share.
ID_TERMS = ("send ids", "gather ids", "send bags")
#: No other exchanges, by method.
NO_OTHERS: Mapping[str, int] = {}


def sent_bytes(sizes: Sizes, where: Where = "devices") -> Mapping[str, int]:
    """Maps the methods that a family may be trained by to the bytes that each device, or rank, sends in a step."""
    terms = method_terms(sizes, where)
    methods = terms if where == "devices" else (HOSTED, "allgather", "allreduce")[:: 2 if sizes.constant else 1]
    return {method: sum(t.sent for t in terms[method]) for method in methods}


def with_sizes(table: TablePlan, sizes: Sizes) -> TablePlan:
    """Returns a table's plan with other sizes, and bytes of the same methods as before."""
    sent = sent_bytes(sizes, table.where)
    return replace(table, sizes=sizes, sent={method: sent[method] for method in table.sent})


def method_terms(
    sizes: Sizes,
    where: Where,
    rates: Rates = NO_TIME,
    hosts: HostRates = NO_HOST_TIME,
    others: Mapping[str, int] = NO_OTHERS,
) -> Mapping[str, tuple[Term, ...]]:
    """Maps methods to their terms in a step. A family on hosts has its own terms beside those it would have on
    devices. `others`: as for `step_terms`."""
    if where == "devices":
        return step_terms(rates, sizes, others)
    return {HOSTED: host_terms(sizes, hosts), **step_terms(rates, sizes.on_devices(), others)}


def host_terms(sizes: Sizes, rates: HostRates = NO_HOST_TIME) -> tuple[Term, ...]:
    """Lists a rank's work for a table on hosts, its own and that of an owner of a shard.

    Messages are only as long as they must be. Where ranks share machines and want the same rows, fewer bytes cross
    machines.
    """
    s, row = sizes, sizes.row_bytes
    host, copy = rates.host.shared(s.together), rates.copy.shared(s.together)

    def sent(name: str, size: int) -> Term:
        nbytes = s.requested * size * s.crossing
        return Term(name, host.all_to_all(nbytes), int(wire_bytes("all-to-all", s.devices, nbytes)))

    ids = () if s.constant else (Term("route ids", host.route(s.ids)), sent("send ids", ID_BYTES))
    owned = min(s.owned, -(-s.extent // s.devices))
    update = _update(host, sizes, owned)
    if s.by_first:
        nbytes = s.devices * owned * s.sent_gradient
        back = int(wire_bytes("all-to-all", s.devices, nbytes))  # the first rank's, the busiest one's
        way = rates.to_first(nbytes)
        sums = Term("sums to the first rank", way), Term("and back", way, back)
        update = *sums, *update
    if s.bags:
        return (*ids, *_bag_terms(sizes, rates), *update)
    return (
        *ids,
        Term("look up at owners", host.gather(s.owned, row)),
        sent("send rows", row),
        Term("copy rows to the device", copy(s.requested * row)),
        Term("copy gradients to the host", copy(s.requested * s.sent_gradient)),
        sent("send gradients", s.sent_gradient),
        Term("add gradients at owners", host.scatter(s.owned, s.sent_gradient)),
        *update,
    )


def alone_terms(sizes: Sizes, rates: Rates, hosts: HostRates) -> tuple[Term, ...]:
    """Lists the work of one process for a table in its host's memory: rows travel to the device with their slots, and
    the device updates them."""
    rows, row, host = sizes.requested, sizes.family_bytes, hosts.host
    return (
        Term("route ids", host.route(sizes.ids)),
        Term("look up in host memory", host.gather(rows, row)),
        Term("copy rows and slots to the device", hosts.copy(rows * row)),
        Term("update rows", rates.update_s(2 * rows * (sizes.sent_gradient + row))),
        Term("copy rows and slots to the host", hosts.copy(rows * row)),
        Term("write to host memory", host.scatter(rows, row)),
    )


def _bag_terms(sizes: Sizes, rates: HostRates) -> tuple[Term, ...]:
    """Lists a rank's work where owners add up bags: each sends a sum of each bag in which it has rows."""
    s, row, gradient, host = sizes, sizes.row_bytes, sizes.sent_gradient, rates.host

    def sent(name: str, nbytes: int) -> Term:
        return Term(name, host.all_to_all(nbytes), int(wire_bytes("all-to-all", s.devices, nbytes)))

    return (
        sent("send bags", s.bag_bytes),
        Term("look up at owners", host.gather(s.owned, row)),
        Term("add up bags at owners", host.gather(s.bag_ids, row)),
        sent("send sums", s.bag_sums * row),
        Term("copy sums to the device", rates.copy(s.bags * row)),
        Term("copy cotangents to the host", rates.copy(s.bags * gradient)),
        sent("send cotangents", s.bag_sums * gradient),
        Term("add gradients at owners", host.scatter(s.bag_ids, gradient)),
    )


def step_seconds(rates: Rates, sizes: Sizes, others: Mapping[str, int] = NO_OTHERS) -> Mapping[str, float]:
    """Maps methods to the seconds of a step. `others`: as for `step_terms`."""
    return {method: sum(t.seconds for t in terms) for method, terms in step_terms(rates, sizes, others).items()}


def step_terms(rates: Rates, sizes: Sizes, others: Mapping[str, int] = NO_OTHERS) -> Mapping[str, tuple[Term, ...]]:
    """Maps methods to a family's terms in a step, in order; of what takes one time for several its share. `others`:
    method -> number of other exchanges by it, of which each message is part of the same one."""
    s, row = sizes, sizes.row_bytes
    gradient, reduced_row = s.sent_gradient, sum(s.reduced_gradients)
    if not s.spread:
        rates = replace(rates, all_gather=FREE, all_reduce=FREE)
    all_requested, sent = s.devices * s.requested, s.messages.rows
    own = rates.shared(s.together)

    def sends(name: str, curve: Curve, collective: str, size: int, spread: bool = True, method: str = "") -> Term:
        if s.together * size <= SHARED_BYTES:  # larger ones go by themselves (`backends.combined`)
            curve = curve.shared(1 + others.get(method, 0))
        return Term(name, curve(size), int(wire_bytes(collective, s.devices, size)) if spread else 0, collective)

    def gathered(name: str, method: str, count: int, size: int) -> Term:
        return sends(name, rates.all_gather, "all-gather", s.devices * count * size, s.spread, method)

    def reduced(name: str, size: int) -> Term:
        return sends(name, rates.all_reduce, "all-reduce", size, s.spread)

    def routed(name: str, size: int) -> Term:
        return sends(name, own.all_to_all, "all-to-all", sent * size, method="ps")

    def by_rows() -> Iterator[Term]:
        yield Term("look up at owners", own.gather(sent, row))
        yield routed("send rows", row)
        yield Term("pick rows", own.gather(s.requested, row))
        yield Term("pack gradients", own.scatter(s.requested, gradient))
        # Devices that all have the whole batch also have its gradients.
        yield routed("send gradients", gradient) if s.spread else Term("send gradients", 0.0)
        yield Term("add gradients at owners", own.scatter(sent, gradient))

    def by_bags() -> Iterator[Term]:
        sums, placed = s.messages.bags, s.messages.bag_ids
        yield sends("send bags", own.all_to_all, "all-to-all", s.bag_bytes, method="ps")
        if s.bag_weight:
            yield sends("send weights", own.all_to_all, "all-to-all", placed * s.bag_weight, method="ps")
        yield Term("add up bags at owners", own.route(placed) + own.gather(placed, row) + own.scatter(placed, row))
        yield sends("send sums", own.all_to_all, "all-to-all", sums * row, method="ps")
        curve, collective = (own.all_gather, "all-gather") if s.room is None else (own.all_to_all, "all-to-all")
        yield sends("send cotangents", curve, collective, sums * gradient, method="ps")
        yield Term("add gradients at owners", own.gather(placed, gradient) + own.scatter(placed, gradient))

    # Where owners add up bags by "ps", looking up rows is part of the other methods alone.
    looked_up = _lookups(rates, s) if s.bags else ()
    terms: dict[str, tuple[Term, ...]] = {
        "ps": (
            Term("route ids", own.route(s.ids)),
            routed("send ids", ID_BYTES),
            Term("route ids at owners", own.route(sent)),
            *_replay(own, s, s.owned),
            *(by_bags() if s.bags else by_rows()),
            *_update(own, s, s.owned),
        ),
        "allgather": (
            *looked_up,
            Term("route ids", rates.route(s.ids)),
            gathered("gather ids", "allgather", s.requested, ID_BYTES),
            Term("route all ids", rates.route(all_requested)),
            *_replay(rates, s, s.routed),
            gathered("gather gradients", "allgather", s.requested, gradient),
            Term("add gradients", rates.scatter(all_requested, gradient)),
            *_update(rates, s, s.routed),
        ),
        "allreduce_rows": (
            *looked_up,
            gathered("gather ids", "allreduce_rows", s.ids, ID_BYTES),
            Term("route all ids", rates.route(s.devices * s.ids)),
            *_replay(rates, s, s.routed),
            Term("zero rows", rates.walk(s.routed * reduced_row)),
            reduced("reduce rows", s.routed * reduced_row),
            *_update(rates, s, s.routed),
        ),
        "allreduce": (
            *looked_up,
            Term("zero the gradient", rates.walk(s.extent * reduced_row)),
            reduced("reduce the gradient", s.extent * reduced_row),
            Term("update all rows", rates.update_s(2 * s.extent * (gradient + s.family_bytes))),
        ),
    }
    for method, seconds in rates.fixed.items():
        if method in terms and seconds:
            families = (1 + others.get(method, 0)) * (s.together if method == "ps" else 1)
            terms[method] += (Term("more in a call than the quickest method", seconds / families, fixed=True),)
    return terms


# --- exchanges that families share ---
#
# Tables that are alike are exchanged as one (`Sizes.together`). What goes by the same method sends its ids in one
# message, its rows in another, and so on. Each family has its share of the time, so that the shares add up to it.


def count_exchanges(families: Iterable[tuple[str, Sizes]]) -> Counter[str]:
    """Returns the number of exchanges in a step by method. `families`: the method and the sizes of each."""
    shares: dict[str, float] = {}
    for method, sizes in families:
        shares[method] = shares.get(method, 0.0) + (1 / sizes.together if method == "ps" else 1.0)
    return Counter({method: round(count) for method, count in shares.items()})


def least(costs: Mapping[str, float]) -> str:
    """Returns the method that costs least; among equal ones "ps"."""
    return min(costs, key=lambda method: (costs[method], method != "ps"))


def cheapest_together(rates: Rates, families: Sequence[Sizes], named: Counter[str]) -> list[str]:
    """Returns a method for each family, so that none by itself would be faster by another one. `families`: the sizes of
    each. `named`: number of exchanges by method of other families, which go so at any rate."""

    def cheapest(sizes: Sizes, others: Counter[str]) -> str:
        return least(step_seconds(rates, sizes, others))

    # First as if all went by each method.
    methods = [cheapest(sizes, named + Counter((len(families) - 1) * [*METHODS])) for sizes in families]
    for _ in families:
        before = list(methods)
        for k, sizes in enumerate(families):
            counts = named + count_exchanges(zip(methods, families, strict=True))
            methods[k] = cheapest(sizes, counts - Counter([methods[k]]))
        if methods == before:
            break
    return methods


def _replay(rates: Rates, sizes: Sizes, rows: int) -> tuple[Term, ...]:
    if not sizes.replayed:
        return ()
    return (Term(REPLAY, rates.walk(REPLAY_WALKS * rows * sizes.replayed)),)


def _update(rates: Rates, sizes: Sizes, rows: int) -> tuple[Term, ...]:
    moved = rates.gather(rows, sizes.family_bytes) + rates.scatter(rows, sizes.family_bytes)
    return (
        Term("pull and commit rows", moved),
        Term("update rows", rates.update_s(2 * rows * (sizes.sent_gradient + sizes.family_bytes))),
    )


@dataclass(frozen=True, slots=True)
class DenseLoad:
    """The load on each device of everything that isn't looked up by rows."""

    flops: float  #: Floating-point operations of matrix products and convolutions.
    sums: tuple[tuple[int, int], ...]  #: (bytes, number) of sums over examples, mostly of gradients.
    #: Bytes of each parameter and slot, which the optimizer reads and writes once, beside gradients.
    leaves: tuple[int, ...]
    moved_bytes: float = 0.0  #: Bytes of the batch's values that the model reads and writes.
    by_mpi: bool = False  #: Gradients are summed by MPI, in host memory.

    @property
    def state_bytes(self) -> int:
        """Bytes of all parameters and slots."""
        return sum(self.leaves)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all sums over examples."""
        return sum(size * count for size, count in self.sums)


def step_parts(
    rates: Rates, dense: DenseLoad, tables: Sequence[tuple[str, Sizes]], devices: int, hosts: HostRates = NO_HOST_TIME
) -> Mapping[str, tuple[Term, ...]]:
    """Maps parts of a step to their terms, in order. `tables`: method (or `HOSTED`) and sizes of each family."""
    fixed = max((rates.fixed.get(method, 0.0) for method, _ in tables), default=0.0)
    counts = count_exchanges(tables)
    exchanges = [_table_terms(rates, hosts, *table, counts - Counter([table[0]])) for table in tables]
    updates = rates.update_s(3 * dense.state_bytes)
    if rates.dense is not None:  # it has a parameter, its slot, and the sum of its gradient
        shared = rates.all_reduce(1) if rates.joins_sums else 0.0
        updates = sum(max(0.0, rates.dense(size) - rates.all_reduce(size) + shared) / 2 for size in dense.leaves)
    return {
        "call": (Term("call", rates.call_s + fixed),),
        "model": (
            Term("products", dense.flops * rates.flop_s),
            Term("values of the batch", rates.moved_s(dense.moved_bytes)),
        ),
        "lookups": tuple(term for _, sizes in tables for term in lookup_terms(rates, sizes)),
        "tables": tuple(term for terms in exchanges for term in terms if not term.fixed),
        "dense gradients": _reduced(rates, dense, devices, hosts),
        "dense updates": (Term("update dense parameters", updates),),
    }


def _reduced(rates: Rates, dense: DenseLoad, devices: int, hosts: HostRates) -> tuple[Term, ...]:
    """Lists the sums over examples. Rates that were measured in whole steps hold for each sum by itself, since XLA runs
    them so, unless sums share messages."""
    size = dense.gradient_bytes
    sent = int(wire_bytes("all-reduce", devices, size))
    if not size:
        return ()
    if dense.by_mpi and devices > 1:
        copied = Term("copy dense gradients to the host and back", 2 * hosts.copy(size))
        return copied, Term("reduce dense gradients", hosts.host.all_reduce(size), sent)
    seconds = rates.all_reduce(size)
    if rates.dense is not None and not rates.joins_sums:
        seconds = sum(count * rates.all_reduce(each) for each, count in dense.sums)
    return (Term("reduce dense gradients", seconds, sent),)


def _table_terms(
    rates: Rates, hosts: HostRates, method: str, sizes: Sizes, others: Mapping[str, int]
) -> tuple[Term, ...]:
    if method == HOSTED and sizes.devices == 1:
        return alone_terms(sizes, rates, hosts)
    return host_terms(sizes, hosts) if method == HOSTED else step_terms(rates, sizes, others)[method]


def lookup_terms(rates: Rates, sizes: Sizes) -> tuple[Term, ...]:
    """Lists the work that all methods share: a device reads its ids' rows, and adds up their gradients."""
    return () if sizes.bags else _lookups(rates, sizes)


def _lookups(rates: Rates, sizes: Sizes) -> tuple[Term, ...]:
    return (
        Term("look up rows", rates.gather(sizes.ids, sizes.row_bytes)),
        Term("add up own gradients", rates.scatter(sizes.ids, sizes.sent_gradient)),
    )


def with_bounds(
    terms: Mapping[str, Sequence[Term]], bounds: Mapping[str, Sequence[Term]]
) -> Mapping[str, tuple[Term, ...]]:
    """Returns terms by method, or by part, with lower bounds, which are the same terms at rates of bandwidths alone.

    Fixed terms have no counterpart there, and bound 0.
    """
    return {
        name: tuple(
            replace(term, bound_s=0.0 if bound is None else bound.seconds)
            for term, bound in itertools.zip_longest(own, bounds[name])
        )
        for name, own in terms.items()
    }


def total(parts: Mapping[str, Sequence[Term]]) -> float:
    """Adds up the seconds of all parts."""
    return sum(term.seconds for terms in parts.values() for term in terms)


def transfer_bytes(method: str, kind: str, *, b: float, n: int, alpha: float = 1.0) -> float:
    """Returns bytes that one worker transfers in a step for one parameter (Parallax, section 5.3.1, table 3, verbatim).

    Args:
      method: "ps", "allreduce" (dense parameters) or "allgather" (sparse ones).
      kind: "dense" or "sparse".
      b: Bytes of the parameter.
      n: Number of workers N.
      alpha: Fraction of the rows that a step touches.

    Raises:
      ValueError: the table doesn't define the pair, or a number is out of range.
    """
    if b < 0 or n < 1 or not 0 <= alpha <= 1:
        raise ValueError(f"b={b}, n={n}, alpha={alpha}: bytes are not negative, n is at least 1, alpha is in [0, 1]")
    table = {
        ("ps", "dense"): 2 * b,
        ("allreduce", "dense"): 2 * (n - 1) * b / n,
        ("ps", "sparse"): 2 * alpha * b,
        ("allgather", "sparse"): 2 * (n - 1) * alpha * b,
    }
    if (method, kind) not in table:
        known = ", ".join(f"{m} for {k}" for m, k in table)
        raise ValueError(f"the table has no {method!r} for {kind!r} parameters; it has {known}")
    return table[method, kind]


def table_3(*, b: float, n: int, alpha: float) -> Mapping[str, float]:
    """Maps methods to the table's bytes of one parameter: a sparse one, or a dense one for "allreduce"."""
    return {
        "ps": transfer_bytes("ps", "sparse", b=b, n=n, alpha=alpha),
        "allgather": transfer_bytes("allgather", "sparse", b=b, n=n, alpha=alpha),
        "allreduce": transfer_bytes("allreduce", "dense", b=b, n=n),
    }
