"""The plan of products that are divided over the devices of a tensor axis. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorGroupPlan:
    """Weights whose products are divided together, if `taken`."""

    #: Path of each leaf -> the axis along which it is divided; optimizer slots and biases among them.
    axes: Mapping[str, int]
    weights: tuple[str, ...]  #: Paths of those that products read, in order.
    taken: bool
    reason: str  #: Why they are divided, or not.
    #: Numbers of AllReduces and AllGathers in a step.
    reduces: int
    gathers: int
    sent: int  #: Bytes that each device sends for them in a step.
    flops: float = 0.0  #: Operations of the products.
    #: Predicted seconds that dividing the products saves, and that the exchanges take; 0 where nothing is known of the
    #: devices.
    saved_s: float = 0.0
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All groups, in the order of their first products, over T devices."""

    devices: int
    groups: tuple[TensorGroupPlan, ...]

    @property
    def axes(self) -> Mapping[str, int]:
        """The axis of each leaf that is divided, by path."""
        return {path: axis for group in self.taken for path, axis in group.axes.items()}

    @property
    def taken(self) -> tuple[TensorGroupPlan, ...]:
        return tuple(group for group in self.groups if group.taken)

    @property
    def saved_flops(self) -> float:
        """Operations that dividing saves each device."""
        return sum(group.flops for group in self.taken) * (1 - 1 / self.devices)

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(group.sent for group in self.taken)
