"""The plan of products that are divided over the devices of a tensor axis. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorGroupPlan:
    """Weights whose products are divided together.

    Attributes:
      axes: Path of each leaf -> the axis along which it is divided; optimizer slots and biases among them.
      weights: Paths of those that products read, in order.
      taken: Whether they are divided.
      reason: Why, or why not.
      reduces, gathers: AllReduces and AllGathers of a step.
      sent: Bytes that each device sends for them.
      flops: Operations of the products.
      saved_s, sent_s: Seconds that the products are predicted to save, and that the exchanges take; 0 where nothing is
        known of the devices.
    """

    axes: Mapping[str, int]
    weights: tuple[str, ...]
    taken: bool
    reason: str
    reduces: int
    gathers: int
    sent: int
    flops: float = 0.0
    saved_s: float = 0.0
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All of them.

    Attributes:
      devices: T.
      groups: In the order of their first products.
    """

    devices: int
    groups: tuple[TensorGroupPlan, ...]

    @property
    def axes(self) -> Mapping[str, int]:
        """Path of each leaf that is divided -> its axis."""
        return {path: axis for group in self.taken for path, axis in group.axes.items()}

    @property
    def taken(self) -> tuple[TensorGroupPlan, ...]:
        """The groups that are divided."""
        return tuple(group for group in self.groups if group.taken)

    @property
    def saved_flops(self) -> float:
        """Operations that each device has less of than all of them have together."""
        return sum(group.flops for group in self.taken) * (1 - 1 / self.devices)

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(group.sent for group in self.taken)
