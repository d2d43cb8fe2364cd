"""What a step does with one table, in numbers: all that its cost depends on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

#: How much more than the example's load a device may send to another one, before any batch has exceeded that.
HEADROOM = 1.25
#: On hosts, room for more rows than a step was found to need, and what it is rounded up to: what is computed for
#: distinct rows (`passes.once_per_row`) is computed for all that there is room for.
_HOSTS_HEADROOM = 1.125
_HOSTS_STEP = 32


def room_for(need: int, limit: int, old: int = 0) -> int:
    """Rows on hosts that there is to be room for: `old` where that is enough, never more than `limit`."""
    if need <= old:
        return old
    return min(limit, -(-int(need * _HOSTS_HEADROOM) // _HOSTS_STEP) * _HOSTS_STEP)


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
      capacity: Rows that a device asks another one for, at most ("ps"); on hosts what it would be on devices, 0 where
        nothing is known of the ids.
      owned: Rows that an owner is asked for, at most ("ps"); on hosts the busiest one, by all ranks together, so that
        rows count for each rank that asks for them.
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

    def on_devices(self) -> Sizes:
        """Of a table on hosts, whose messages are as long as they must be: the static sizes of it on devices."""
        asked, share = min(self.extent, self.ids), -(-self.extent // self.devices)
        capacity = min(asked, share, self.capacity or asked)
        owned = min(share, self.devices * capacity) + 1
        checks = capacity < min(asked, share)
        return dataclasses.replace(self, asked=asked, capacity=capacity, owned=owned, checks=checks)
