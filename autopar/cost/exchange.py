"""What a step's work on one table costs, by method: the bytes that each device sends, and the time that it takes.

Bytes: docs/design.md (ring AllReduce, AllGather, a parameter server on each device; padding included). The
time is made of measured parts: collectives, routing, rows moved and updated. What all methods have in common (the
model itself, the lookup and the sum of a device's own gradients) is left out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.cost.rates import FREE, NO_HOST_TIME, NO_TIME, HostRates, Rates
from autopar.ir.figures import Term
from autopar.ir.sizes import Sizes
from autopar.ir.strategy import HOSTED

#: Bytes of a row's number.
ID_BYTES = 4
#: Terms that send ids alone: families of the same ids may have them in common.
ID_TERMS = ("send ids", "gather ids")


def sent_bytes(sizes: Sizes) -> Mapping[str, int]:
    """Method -> bytes that each device sends in a step."""
    return {method: sum(t.sent for t in terms) for method, terms in step_terms(NO_TIME, sizes).items()}


def host_terms(sizes: Sizes, rates: HostRates = NO_HOST_TIME) -> tuple[Term, ...]:
    """What a rank does for a table on hosts, for itself and as an owner of a shard.

    Messages are as long as they must be. Where ranks share machines, what crosses machines is less, as far as they want
    the same rows.
    """
    s, row, host = sizes, sizes.row_bytes, rates.host

    def sent(name: str, size: int) -> Term:
        return Term(name, host.all_to_all(s.requested * size), (s.devices - 1) * s.requested * size // s.devices)

    ids = () if s.constant else (Term("route ids", host.route(s.ids)), sent("send ids", ID_BYTES))
    return (
        *ids,
        Term("look up at owners", host.gather(s.owned, row)),
        sent("send rows", row),
        Term("copy rows to the device", rates.copy(s.requested * row)),
        Term("copy gradients to the host", rates.copy(s.requested * s.sent_gradient)),
        sent("send gradients", s.sent_gradient),
        Term("add gradients at owners", host.scatter(s.owned, s.sent_gradient)),
        *_update(host, sizes, min(s.owned, -(-s.extent // s.devices))),
    )


def host_sent_bytes(sizes: Sizes) -> Mapping[str, int]:
    """Method -> bytes that each rank sends, of a table on hosts. The other methods are those the devices would use."""
    others = sent_bytes(sizes)
    hosts = sum(t.sent for t in host_terms(sizes))
    methods = ("allreduce",) if sizes.constant else ("allgather", "allreduce")
    return {HOSTED: hosts, **{method: others[method] for method in methods}}


def step_seconds(rates: Rates, sizes: Sizes) -> Mapping[str, float]:
    """Method -> seconds of a step."""
    return {method: sum(t.seconds for t in terms) for method, terms in step_terms(rates, sizes).items()}


def step_terms(rates: Rates, sizes: Sizes) -> Mapping[str, tuple[Term, ...]]:
    """Method -> all that it does in a step, in the order in which it is done."""
    s, row, others = sizes, sizes.row_bytes, sizes.devices - 1
    gradient, reduced_row = s.sent_gradient, sum(s.reduced_gradients)
    if not s.spread:
        rates = dataclasses.replace(rates, all_gather=FREE, all_reduce=FREE)
    all_requested, sent = s.devices * s.requested, s.devices * s.capacity

    def gathered(name: str, count: int, size: int) -> Term:
        sent = others * count * size if s.spread else 0
        return Term(name, rates.all_gather(s.devices * count * size), sent, "all-gather")

    def reduced(name: str, size: int) -> Term:
        sent = 2 * others * size // s.devices if s.spread else 0
        return Term(name, rates.all_reduce(size), sent, "all-reduce")

    def routed(name: str, size: int) -> Term:
        return Term(name, rates.all_to_all(sent * size), others * s.capacity * size, "all-to-all")

    terms: dict[str, tuple[Term, ...]] = {
        "ps": (
            Term("route ids", rates.route(s.ids)),
            routed("send ids", ID_BYTES),
            Term("route ids at owners", rates.route(sent)),
            Term("look up at owners", rates.gather(sent, row)),
            routed("send rows", row),
            Term("pick rows", rates.gather(s.requested, row)),
            Term("pack gradients", rates.scatter(s.requested, gradient)),
            # Devices that all have the whole batch have its gradients, too.
            routed("send gradients", gradient) if s.spread else Term("send gradients", 0.0),
            Term("add gradients at owners", rates.scatter(sent, gradient)),
            *_update(rates, s, s.owned),
            *((Term("check capacities", rates.all_reduce(1), 0, "all-reduce"),) if s.checks else ()),
        ),
        "allgather": (
            Term("route ids", rates.route(s.ids)),
            gathered("gather ids", s.requested, ID_BYTES),
            Term("route all ids", rates.route(all_requested)),
            gathered("gather gradients", s.requested, gradient),
            Term("add gradients", rates.scatter(all_requested, gradient)),
            *_update(rates, s, s.routed),
        ),
        "allreduce_rows": (
            gathered("gather ids", s.ids, ID_BYTES),
            Term("route all ids", rates.route(s.devices * s.ids)),
            Term("zero rows", rates.walk(s.routed * reduced_row)),
            reduced("reduce rows", s.routed * reduced_row),
            *_update(rates, s, s.routed),
        ),
        "allreduce": (
            Term("zero the gradient", rates.walk(s.extent * reduced_row)),
            reduced("reduce the gradient", s.extent * reduced_row),
            Term("update all rows", rates.update_s(2 * s.extent * (gradient + s.family_bytes))),
        ),
    }
    for method, seconds in rates.fixed.items():
        if method in terms and seconds:
            terms[method] += (Term("more in a call than the quickest method", seconds, fixed=True),)
    return terms


def _update(rates: Rates, sizes: Sizes, rows: int) -> tuple[Term, ...]:
    """The optimizer, on so many rows and their slots."""
    moved = rates.gather(rows, sizes.family_bytes) + rates.scatter(rows, sizes.family_bytes)
    return (
        Term("pull and commit rows", moved),
        Term("update rows", rates.update_s(2 * rows * (sizes.sent_gradient + sizes.family_bytes))),
    )
