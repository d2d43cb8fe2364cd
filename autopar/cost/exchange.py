"""What a step's work on one table costs, by method: the bytes that each device sends, and the time that it takes.

Source of the bytes: DESIGN 6 (ring AllReduce, AllGather, a parameter server on each device; padding included). The
time is made of measured parts: collectives, routing, rows moved and updated. What all methods have in common (the
model itself, the lookup and the sum of a device's own gradients) is left out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.rates import FREE, Rates

#: Bytes of a row's number.
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step does with one family on N devices; static bounds, since arrays have these shapes.

    Attributes:
      devices: N.
      extent: V, rows of the table.
      row_bytes: Bytes of a row of what is looked up.
      family_bytes: Bytes of a row of the table and of its slots.
      ids: Ids that each device looks up, duplicates included.
      asked: Distinct rows of them, at most.
      routed: Rows that all devices together touch, at most.
      capacity: Rows that a device asks another one for, at most ("ps").
      owned: Rows that an owner is asked for, at most ("ps").
      checks: Whether the capacity is measured, so that each step checks it.
      spread: Whether the devices look up different rows; else all of them have the whole batch.
    """

    devices: int
    extent: int
    row_bytes: int
    family_bytes: int
    ids: int
    asked: int
    routed: int
    capacity: int
    owned: int
    checks: bool = False
    spread: bool = True


def sent_bytes(sizes: Sizes) -> Mapping[str, int]:
    """Method -> bytes that each device sends in a step."""
    s, others, row = sizes, sizes.devices - 1, sizes.row_bytes
    found = {
        "ps": others * s.capacity * (ID_BYTES + 2 * row),
        "allgather": others * s.asked * (ID_BYTES + row),
        "allreduce_rows": others * s.ids * ID_BYTES + 2 * others * s.routed * row // s.devices,
        "allreduce": 2 * others * s.extent * row // s.devices,
    }
    return found if s.spread else {**dict.fromkeys(found, 0), "ps": found["ps"]}


def host_sent_bytes(sizes: Sizes) -> Mapping[str, int]:
    """The same for a table on hosts: bytes that a rank sends, for itself and as an owner that is asked for its share.

    Messages are as long as they must be. Where ranks share machines, what crosses machines is less, as far as they want
    the same rows. The other methods are those that the devices would use."""
    s = sizes
    hosts = (s.devices - 1) * s.asked * (ID_BYTES + 2 * s.row_bytes) // s.devices
    others = sent_bytes(sizes)
    return {"ps on hosts": hosts, "allgather": others["allgather"], "allreduce": others["allreduce"]}


def step_seconds(rates: Rates, sizes: Sizes) -> Mapping[str, float]:
    """Method -> seconds of a step."""
    s, row = sizes, sizes.row_bytes
    if not s.spread:
        rates = dataclasses.replace(rates, all_gather=FREE, all_reduce=FREE)
    all_asked, sent = s.devices * s.asked, s.devices * s.capacity

    def update(rows: int) -> float:
        """Pull, optimizer and commit of the touched rows."""
        moved = rates.gather(rows, s.family_bytes) + rates.scatter(rows, s.family_bytes)
        return moved + rates.walk(2 * rows * (row + s.family_bytes))

    ps = (
        rates.route(s.ids)
        + rates.all_to_all(sent * ID_BYTES)
        + rates.route(sent)
        + rates.gather(sent, row)  # what an owner answers
        + rates.all_to_all(sent * row)
        + rates.gather(s.asked, row)  # what of it was asked for
        + rates.scatter(s.asked, row)  # gradients into messages
        + rates.all_to_all(sent * row)
        + rates.scatter(sent, row)
        + update(s.owned)
        + (rates.all_reduce(1) if s.checks else 0.0)
    )
    allgather = (
        rates.route(s.ids)
        + rates.all_gather(all_asked * ID_BYTES)
        + rates.route(all_asked)
        + rates.all_gather(all_asked * row)
        + rates.scatter(all_asked, row)
        + update(s.routed)
    )
    allreduce_rows = (
        rates.all_gather(s.devices * s.ids * ID_BYTES)
        + rates.route(s.devices * s.ids)
        + rates.walk(s.routed * row)  # zeros to add to
        + rates.all_reduce(s.routed * row)
        + update(s.routed)
    )
    allreduce = (
        rates.walk(s.extent * row)
        + rates.all_reduce(s.extent * row)
        + rates.walk(2 * s.extent * (row + s.family_bytes))
    )
    found = {"ps": ps, "allgather": allgather, "allreduce_rows": allreduce_rows, "allreduce": allreduce}
    return {method: rates.fixed.get(method, 0.0) + seconds for method, seconds in found.items()}
