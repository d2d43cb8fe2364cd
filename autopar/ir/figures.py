"""Figures of a plan: rows that a step touches, bytes of exchanges, predicted terms. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Alpha:
    """Rows touched of `extent`, by `ids` looked-up ids; `measured` on a batch, or an upper bound.

    `local_rows`: rows that one device touches, averaged over the devices.
    """

    rows: int
    extent: int
    ids: int
    measured: bool
    local_rows: float

    @property
    def share(self) -> float:
        """Fraction of the rows that a step touches."""
        return self.rows / self.extent

    @property
    def local_share(self) -> float:
        """Fraction of the rows that one device touches, the paper's alpha of one worker."""
        return self.local_rows / self.extent


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """The number of distinct rows of a table that n workers touch together in a step."""

    extent: int  #: V, rows of the table.
    ids: float  #: Ids that a worker looks up in a step, duplicates included.
    points: tuple[tuple[float, float], ...]  #: Measured (n, rows that n workers touched together, on average).
    #: Parameters of Heaps' law.
    k: float
    beta: float
    residual: float  #: The largest relative error of the fit at a point.

    def rows(self, n: float) -> float:
        """Returns the expected number of distinct rows that n workers touch together."""
        drawn = n * self.ids
        return min(drawn, distinct(self.extent, self.k * drawn**self.beta))

    def with_ids(self, ids: float) -> RowGrowth:
        """Returns the growth for workers that look up `ids` ids each."""
        scale = self.ids / ids
        return replace(self, ids=ids, points=tuple((n * scale, rows) for n, rows in self.points))


def distinct(extent: int, endless: float) -> float:
    """Returns the distinct rows hit of V, if `endless` were hit in an endless table."""
    return -extent * math.expm1(-endless / extent)


def wire_bytes(collective: str, count: int, size: float) -> float:
    """Returns the bytes that each of `count` devices sends in a collective (rings: Patarasuk and Yuan, 2009).

    `collective`: XLA's name: "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute". `count`:
    devices that take part. `size`: bytes of the result on each device.
    """
    if collective == "collective-permute":
        return size
    rounds = {"all-reduce": 2, "reduce-scatter": count}.get(collective, 1)
    return rounds * (count - 1) * size / count


#: Most bytes that a device receives in a collective that shares a message with others.
SHARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a method's cost."""

    name: str
    seconds: float
    sent: int = 0  #: Bytes that each device sends for it.
    collective: str = ""  #: XLA's name of the collective that sends them; "" if there is none.
    fixed: bool = False  #: The method costs this however little there is to do.
    #: The least seconds, by bandwidths of wires and memory and the devices' full rate, if known; no file holds it.
    bound_s: float | None = field(default=None, compare=False, metadata={"saved": False})


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a step's products (matrix products and convolutions), and the sums over examples."""

    examples: float = 0.0  #: Operations of products that depend on the batch, which the devices share.
    parameters: float = 0.0  #: Operations of all others, which each device does.
    #: Bytes of the batch's values that products and elementwise operations read and write, if each product reads and
    #: writes its operands, and what lies between two products writes each result once. Some of that is fused away; the
    #: devices share all of it.
    moved_bytes: float = 0.0
    #: (bytes, number) of sums over examples that every device needs (dense gradients, mostly). Sums of a loop's
    #: iterations count each; gradients of lookups don't count.
    sums: tuple[tuple[int, int], ...] = ()

    def on(self, devices: int) -> float:
        """Returns the operations of each of `devices` devices."""
        return self.examples / devices + self.parameters


# --- sizes of a step's work with one table: all that its cost depends on ---


@dataclass(frozen=True, slots=True)
class Room:
    """A table's share of what all messages of a device have room for, in a stack of which devices have tables whole."""

    rows: int
    bag_ids: int = 0
    bags: int = 0  #: Sums, and as many cotangents.


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
    compiled only a few times. Numbers of random rows spread by their root, or less: twice that is left at least.
    """
    return rounded_size(need + max((need << min(grown, 4)) // 16, 2 * math.isqrt(need)), limit)


def rounded_size(need: int, limit: int) -> int:
    """Rounds up to a size that a shape bucket on hosts may have, `limit` at most."""
    return min(limit, -(-(need + _HOSTS_APART) // _HOSTS_STEP) * _HOSTS_STEP - _HOSTS_APART)


def coarse_size(need: int) -> int:
    """Rounds up to a multiple of a sixteenth of the power of two below, so that needs that are alike mostly become the
    same."""
    step = 1 << max(need.bit_length() - 5, 0)
    return -(-need // step) * step


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
    bags: int = 0  #: Bags of a device, or rank, that owners add up; 0: rows travel.
    #: Ids of a rank in these; an id counts for each bag that it is in. On devices, those that messages have room for.
    bag_ids: int = 0
    bag_id_bytes: int = 0  #: Bytes that tell an owner of an id in a bag; on hosts, its weight's among them.
    bag_count_bytes: int = 0  #: Bytes that tell each owner how many of a bag's ids are its own.
    bag_weight: int = 0  #: On devices, bytes of the weight of an id in a bag.
    #: How many of these are the bags of all ranks, because the batch says which bag each id is in.
    bags_of_all: int = 0
    bags_filled: int | None = None  #: The most bags in which a rank has ids, if some are those of all ranks; None: all.
    #: On hosts, the share of rows that crosses machines where what ranks of a machine want alike does so once.
    crossing: float = 1.0
    #: On hosts, sums of gradients go by way of the first rank (`optimize=` without "owner").
    by_first: bool = False
    whole: bool = False  #: One rank, or device, has all rows, so that each bag has one owner.
    room: Room | None = None  #: On devices; None: each message has room for this table's `capacity` and bags.

    @property
    def sent_gradient(self) -> int:
        return self.row_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def messages(self) -> Room:
        """The room that all messages of a device have."""
        return self.room or Room(self.devices * self.capacity, self.bag_ids, self.devices * self.bags)

    @property
    def bag_bytes(self) -> int:
        """Bytes that tell owners of their rows in bags."""
        return self.messages.bag_ids * self.bag_id_bytes + self.messages.bags * self.bag_count_bytes

    @property
    def bag_sums(self) -> int:
        """Sums that a rank gets of owners, each of which adds up its own rows of a bag."""
        filled = self.bags if self.bags_filled is None else self.bags_filled
        return filled if self.whole else min(self.devices * filled, self.bag_ids)

    @property
    def reduced_gradients(self) -> tuple[int, ...]:
        return self.reduced or (self.sent_gradient,)

    @classmethod
    def alone(cls, extent: int, row_bytes: int, family_bytes: int, ids: int) -> Sizes:
        """Returns the sizes of a step on one device, whose ids all differ."""
        rows = min(extent, ids)
        return cls(1, extent, row_bytes, family_bytes, ids, rows, rows + 1, rows, rows + 1)

    def with_ids(self, ids: int) -> Sizes:
        """Returns the sizes of a step in which each device looks up so many ids, in bags of as many as before."""
        scale = ids / self.ids if self.ids else 1.0
        bags, of_all, placed = (math.ceil(scale * x) for x in (self.bags, self.bags_of_all, self.bag_ids))
        filled = None if self.bags_filled is None else math.ceil(scale * self.bags_filled)
        room = self.room and replace(
            self.room, bag_ids=math.ceil(scale * self.room.bag_ids), bags=math.ceil(scale * self.room.bags)
        )
        return replace(self, ids=ids, bags=bags, bags_of_all=of_all, bags_filled=filled, bag_ids=placed, room=room)

    def on_devices(self) -> Sizes:
        """Returns the static sizes on devices of a table on hosts, whose messages are only as long as they must be."""
        requested, shard_rows = min(self.extent, self.ids), -(-self.extent // self.devices)
        capacity = min(requested, shard_rows, self.capacity or requested)
        owned = min(shard_rows, self.devices * capacity) + 1
        checks = capacity < min(requested, shard_rows)
        by_rows = self.by_rows()
        return replace(by_rows, requested=requested, capacity=capacity, owned=owned, checks=checks)

    def by_rows(self) -> Sizes:
        """Returns the sizes of a table whose rows travel, in place of bags."""
        no_bags = replace(self, bags=0, bags_of_all=0, bags_filled=None, bag_ids=0)
        no_bags = replace(no_bags, room=self.room and Room(self.room.rows))
        return replace(no_bags, bag_id_bytes=0, bag_count_bytes=0, bag_weight=0)


# --- figures for people ---


def format_bytes(size: float) -> str:
    """Writes 1536 as '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
