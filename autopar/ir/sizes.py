"""Sizes of a step's work with one table: all that its cost depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

#: Capacity over the example's load between two devices, before any batch has exceeded it.
HEADROOM = 1.25
#: Fraction of a capacity at which the next larger program is compiled: half of the headroom is used then.
NEAR = (1 + 1 / HEADROOM) / 2
#: Shape buckets on hosts are rounded up to this multiple, so that products waste nothing, less the entries for ids out
#: of range (`passes.once_per_row`).
_HOSTS_STEP, _HOSTS_APART = 16, 2


def bucket_size(need: int, limit: int, grown: int = 0) -> int:
    """Returns rows of the shape bucket for `need` rows on hosts, `limit` at most.

    Products for distinct rows run over the whole bucket, so it begins with a sixteenth more than is needed. Each time
    it was too small (`grown` times), the next has twice that headroom, up to all of it, so that growing batches are
    compiled only a few times.
    """
    return rounded_size(need + (need << min(grown, 4)) // 16, limit)


def rounded_size(need: int, limit: int) -> int:
    """Rounds up to a size that a shape bucket on hosts may have, `limit` at most."""
    return min(limit, -(-(need + _HOSTS_APART) // _HOSTS_STEP) * _HOSTS_STEP - _HOSTS_APART)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a step's work with one family on N devices; static bounds, since arrays have these shapes."""

    devices: int  #: N.
    extent: int  #: V, rows of the table.
    row_bytes: int  #: Bytes of a looked-up row as it is sent (a few columns, or a cast, of a row of the table).
    family_bytes: int  #: Bytes of a row of the table and of its slots.
    ids: int  #: Ids that each device looks up, duplicates included.
    requested: int  #: Most distinct rows among them.
    routed: int  #: Most rows that all devices together touch.
    #: With "ps", most rows that a device asks another one for; on hosts what it would be on devices, or 0 if nothing is
    #: known of the ids.
    capacity: int
    #: With "ps", most rows that an owner is asked for; on hosts the busiest one, by all ranks together, so that rows
    #: count for each rank that asks for them.
    owned: int
    checks: bool = False  #: The capacity is measured, so that each step checks it.
    spread: bool = True  #: The devices look up different rows; else all of them have the whole batch.
    constant: bool = False  #: Each step looks up all rows of a dense leaf on hosts, so that ids are sent but once.
    gradient_bytes: int | None = None  #: Bytes of a row of gradients as they are sent; None: as `row_bytes`.
    #: Bytes of a row of each gradient that is reduced over the devices ("allreduce", "allreduce_rows"); empty: one
    #: gradient of `sent_gradient` bytes.
    reduced: tuple[int, ...] = ()
    replayed: int = 0  #: Bytes of a table's row that a step brings up to date where it reads it, or 0.
    #: Number of tables, this one among them, that "ps" exchanges and updates as one (`passes.stack_tables`).
    together: int = 1

    @property
    def sent_gradient(self) -> int:
        return self.row_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def reduced_gradients(self) -> tuple[int, ...]:
        return self.reduced or (self.sent_gradient,)

    def on_devices(self) -> Sizes:
        """Returns the static sizes on devices of a table on hosts, whose messages are only as long as they must be."""
        requested, shard_rows = min(self.extent, self.ids), -(-self.extent // self.devices)
        capacity = min(requested, shard_rows, self.capacity or requested)
        owned = min(shard_rows, self.devices * capacity) + 1
        checks = capacity < min(requested, shard_rows)
        return dataclasses.replace(self, requested=requested, capacity=capacity, owned=owned, checks=checks)
