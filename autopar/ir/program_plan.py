"""`ProgramPlan`: a `Plan` as one traced program follows it: families, inputs and layouts by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.layout import RowLayout
from autopar.ir.plan import Plan, TablePlan


@dataclass(frozen=True, slots=True)
class Bounds:
    """Says how many rows of a family a step's arrays hold.

    Attributes:
      rows: The most that a step touches, one padding row included.
      requested: Rows that all devices together ask for, where these travel by themselves ("ps", "allgather"); else
        None.
      capacity: The most rows that one device asks another one for; else None.
      layout: How the rows are spread; else None.
      tight: Whether `capacity` was measured, so that a batch may exceed it: then the step is run by the fallback.
      imbalance: Of the example, the rows that a device asks one owner for at most over the average, if measured.
    """

    rows: int
    requested: int | None = None
    capacity: int | None = None
    layout: RowLayout | None = None
    tight: bool = False
    imbalance: float | None = None


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """A lifted family: its id in `Program.rows`, the plan of its first table, which holds for all, and its bounds."""

    family: int
    table: TablePlan
    bounds: Bounds

    @property
    def on_hosts(self) -> bool:
        """Returns whether the rows are in the memory of the hosts."""
        return self.table.where == "hosts"

    @property
    def method(self) -> str:
        """The way its rows travel ("ps" on one device, where nothing travels)."""
        return self.table.method

    @property
    def layout(self) -> RowLayout | None:
        """The way the rows are spread; None if they aren't."""
        return self.bounds.layout


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The consequences of a plan for one traced program.

    Attributes:
      plan: The plan.
      families: The tables that are lifted, with their slots.
      placements: For each input of the program the axis along which it is spread over the devices; None: each device
        holds all of it.
      uneven: Inputs of examples that the devices don't divide -> the axis of these. Each device is given all of it, and
        takes its part in the step, padded and masked where it matters.
      undivided: B, the number of examples, if there are such; else 0.
      rank_devices: L, over how many devices of each rank the rank's examples are spread, with tables on hosts.
      layouts: Input -> (layout, row axis) of those that are stored otherwise than as they are.
      fallback: The families once more with the capacity that no batch exceeds, if some are tight.
      shards: Dense leaves that are spread and gathered for use -> the axis.
      tensors: Leaves that are divided over the devices of a tensor axis -> their axis.
    """

    plan: Plan
    families: tuple[FamilyPlan, ...] = ()
    placements: tuple[int | None, ...] = ()
    layouts: Mapping[int, tuple[RowLayout, int]] = field(default_factory=dict)
    fallback: tuple[FamilyPlan, ...] = ()
    shards: Mapping[int, int] = field(default_factory=dict)
    tensors: Mapping[int, int] = field(default_factory=dict)
    uneven: Mapping[int, int] = field(default_factory=dict)
    undivided: int = 0
    rank_devices: int = 1

    @property
    def devices(self) -> int:
        """N."""
        return self.plan.devices

    @property
    def on_hosts(self) -> bool:
        """Returns whether any table is in the memory of the hosts."""
        return any(f.on_hosts for f in self.families)

    def place(self, k: int) -> tuple[int | None, int | None]:
        """Returns the axes of an input that are spread over the data axis, and over the tensor axis."""
        return self.placements[k], self.tensors.get(k)

    @property
    def rewrites(self) -> bool:
        """Returns whether the step is run otherwise than as JAX traced it."""
        kept = not (self.families or self.shards)
        return not kept or self.devices > 1 or bool(self.tensors) or self.plan.microbatches > 1

    @property
    def decisions(self) -> tuple[object, ...]:
        """Returns what the program depends on: plans of one step whose decisions are equal are compiled to the same."""
        families = [
            (f.family, f.table.taken, f.table.log_steps, dataclasses.replace(f.bounds, imbalance=None))
            for f in (*self.families, *self.fallback)
        ]
        return (
            families,
            len(self.fallback),
            self.placements,
            self.layouts,
            self.shards,
            self.tensors,
            self.uneven,
            self.undivided,
            self.rank_devices,
            self.plan.microbatches,
        )

    def family(self, family: int) -> FamilyPlan | None:
        """Returns the plan of a family, None if it stays dense."""
        return next((f for f in self.families if f.family == family), None)

    def noting(self, **fields: object) -> ProgramPlan:
        """Returns the same with fields of the plan that passes find out: who reduces, and stages."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, **fields))

    def with_sizes(self, sizes: Mapping[int, tuple[int, int]]) -> ProgramPlan:
        """Returns the plan with other bounds for families on hosts: family -> (rows of an owner, rows that a rank asks
        for)."""
        families = []
        for family in self.families:
            if family.family in sizes:
                rows, requested = sizes[family.family]
                bounds = dataclasses.replace(
                    family.bounds, rows=self.devices * rows, requested=self.devices * requested
                )
                family = dataclasses.replace(family, bounds=bounds)
            families.append(family)
        return dataclasses.replace(self, families=tuple(families))

    def without_limits(self) -> ProgramPlan:
        """Returns the fallback's plan."""
        return dataclasses.replace(self, families=self.fallback, fallback=())
