"""Numbers of what a step does with one table: all that its cost depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

#: How much more than the example's load a device may send to another one, before any batch has exceeded that.
HEADROOM = 1.25
#: What batches may need of a capacity until the next larger program is compiled: half of the headroom is used then.
NEAR = (1 + 1 / HEADROOM) / 2
#: On hosts, what shape buckets are rounded up to, less the entries of ids out of range (`passes.once_per_row`):
#: products of so many rows waste nothing.
_HOSTS_STEP, _HOSTS_APART = 16, 2


def bucket_size(need: int, limit: int, grown: int = 0) -> int:
    """Returns rows of the shape bucket for `need` rows on hosts, `limit` at most.

    What is computed for distinct rows is computed for the whole bucket, so that it begins with a sixteenth
    more than is needed. Each time it was too small, the next has twice that headroom, up to all of it: batches of ever
    more rows are compiled for a few times only. `grown`: how often it was made larger.
    """
    return rounded_size(need + (need << min(grown, 4)) // 16, limit)


def rounded_size(need: int, limit: int) -> int:
    """Returns the next size that a shape bucket on hosts may have, `limit` at most."""
    return min(limit, -(-(need + _HOSTS_APART) // _HOSTS_STEP) * _HOSTS_STEP - _HOSTS_APART)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a step's work with one family on N devices; static bounds, since arrays have these shapes.

    Attributes:
      devices: N.
      extent: V, rows of the table.
      row_bytes: Bytes of a row of what is looked up, as it is sent: a few columns, or a cast, of a row of the table.
      family_bytes: Bytes of a row of the table and of its slots.
      ids: Ids that each device looks up, duplicates included.
      requested: Distinct rows of them, at most.
      routed: Rows that all devices together touch, at most.
      capacity: Rows that a device asks another one for, at most ("ps"); on hosts what it would be on devices, 0 where
        nothing is known of the ids.
      owned: Rows that an owner is asked for, at most ("ps"); on hosts the busiest one, by all ranks together, so that
        rows count for each rank that asks for them.
      checks: Whether the capacity is measured, so that each step checks it.
      spread: Whether the devices look up different rows; else all of them have the whole batch.
      constant: Whether each step looks up all rows, so that ids are sent but once: of a dense leaf on hosts.
      gradient_bytes: Bytes of a row of gradients, as they are sent; None: as many as are looked up.
      reduced: Bytes of a row of each gradient that is reduced over the devices ("allreduce", "allreduce_rows"); empty:
        one of `sent_gradient` bytes.
      replayed: Bytes of a table's row that a step brings up to date where it reads it; 0: of none.
    """

    devices: int
    extent: int
    row_bytes: int
    family_bytes: int
    ids: int
    requested: int
    routed: int
    capacity: int
    owned: int
    checks: bool = False
    spread: bool = True
    constant: bool = False
    gradient_bytes: int | None = None
    reduced: tuple[int, ...] = ()
    replayed: int = 0

    @property
    def sent_gradient(self) -> int:
        """Bytes of a row of gradients, as they are sent."""
        return self.row_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def reduced_gradients(self) -> tuple[int, ...]:
        """Bytes of a row of each gradient that is reduced over the devices."""
        return self.reduced or (self.sent_gradient,)

    def on_devices(self) -> Sizes:
        """Returns the static sizes on devices of a table on hosts, whose messages are as long as they must be."""
        requested, shard_rows = min(self.extent, self.ids), -(-self.extent // self.devices)
        capacity = min(requested, shard_rows, self.capacity or requested)
        owned = min(shard_rows, self.devices * capacity) + 1
        checks = capacity < min(requested, shard_rows)
        return dataclasses.replace(self, requested=requested, capacity=capacity, owned=owned, checks=checks)
