"""Binds a `Plan` to one traced program, with families, inputs and layouts by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.layout import RowLayout
from autopar.ir.plan import Plan, TablePlan
from autopar.ir.program import Program


@dataclass(frozen=True, slots=True)
class Bounds:
    """The number of a family's rows that a step's arrays hold."""

    rows: int  #: The most that a step touches, one padding row included.
    #: Rows that all devices together ask for, if these travel by themselves ("ps", "allgather").
    requested: int | None = None
    capacity: int | None = None  #: With "ps", the most rows that one device asks another one for.
    layout: RowLayout | None = None  #: The distribution of the rows over devices, if they are sharded.
    tight: bool = False  #: `capacity` (`bag_ids`, too) was measured; a batch that exceeds it is run by the fallback.
    #: In the example, the most rows that a device asks one owner for over the average, if measured.
    imbalance: float | None = None
    #: On devices whose owners add up bags, the most ids (duplicates included) that one device looks up of another one.
    bag_ids: int | None = None
    #: The device that has all rows where the table is in a stack (`ir.stacked`); by itself it is spread by `layout`.
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """The plan of a lifted family (its id in `Program.rows`), which is its first table's, and its bounds."""

    family: int
    table: TablePlan
    bounds: Bounds
    stacked: tuple[TablePlan, ...] = ()  #: The plans of a stack's tables (`ir.stacked`); `table` is the first one.

    def tables(self) -> Iterator[tuple[TablePlan, frozenset[str]]]:
        """Yields the plan of each table, or of the stack's, and the paths of its leaves."""
        for table in self.stacked or (self.table,):
            yield table, frozenset((table.path, *table.slots))

    @property
    def on_hosts(self) -> bool:
        return self.table.where == "hosts"

    @property
    def method(self) -> str:
        """The way its rows travel; "ps" on one device, where nothing travels."""
        return self.table.method

    @property
    def layout(self) -> RowLayout | None:
        return self.bounds.layout


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """A plan's consequences for one traced program."""

    plan: Plan
    families: tuple[FamilyPlan, ...] = ()
    #: Axis of each input that is spread over the devices; None: each device holds all of it.
    placements: tuple[int | None, ...] = ()
    #: Input -> (layout, row axis), if it isn't stored in its plain layout.
    layouts: Mapping[int, tuple[RowLayout, int]] = field(default_factory=dict)
    fallback: tuple[FamilyPlan, ...] = ()  #: The families with the capacity that no batch exceeds, if some are tight.
    #: Dense leaves that are spread and gathered for use -> the axis.
    shards: Mapping[int, int] = field(default_factory=dict)
    #: Leaves that are divided over the devices of a tensor axis -> their axis.
    tensors: Mapping[int, int] = field(default_factory=dict)
    #: Inputs of examples that the devices don't divide -> their axis. Each device is given all examples, and takes its
    #: part in the step, padded and masked where it matters.
    uneven: Mapping[int, int] = field(default_factory=dict)
    undivided: int = 0  #: The number B of examples if the devices don't divide it, else 0.
    #: With tables on hosts, the number L of devices of each rank over which its examples are spread.
    rank_devices: int = 1

    @property
    def devices(self) -> int:
        return self.plan.devices

    @property
    def on_hosts(self) -> bool:
        return any(f.on_hosts for f in self.families)

    @property
    def host_layouts(self) -> dict[int, RowLayout]:
        """Family on hosts -> the layout of its rows over the ranks."""
        return {f.family: f.layout for f in self.families if f.on_hosts and f.layout is not None}

    def hosted(self, program: Program) -> dict[int, tuple[RowLayout, int]]:
        """Returns the inputs that are tables on hosts -> (layout, row axis)."""
        layouts = self.host_layouts
        spaces = (space for space in program.facts.spaces if space.family in layouts)
        return {k: (layouts[space.family], axis) for space in spaces for k, axis in space.row_axes.items()}

    def placement(self, k: int) -> tuple[int | None, int | None]:
        """Returns the axes of an input that are spread over the data axis and over the tensor axis."""
        return self.placements[k], self.tensors.get(k)

    @property
    def rewrites(self) -> bool:
        """The step is not run as JAX traced it."""
        kept = not (self.families or self.shards)
        return not kept or self.devices > 1 or bool(self.tensors) or self.plan.microbatches > 1

    @property
    def decisions(self) -> tuple[object, ...]:
        """The decisions that the compiled program depends on; equal decisions about one step compile to the same
        program."""
        families = [
            (f.family, f.table.taken, f.table.log_steps, replace(f.bounds, imbalance=None))
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
        return next((f for f in self.families if f.family == family), None)

    def noting(self, **fields: object) -> ProgramPlan:
        """Returns the plan with other fields of its `plan`, which later passes find out."""
        return replace(self, plan=replace(self.plan, **fields))

    def with_sizes(self, sizes: Mapping[int, tuple[int, int]]) -> ProgramPlan:
        """Returns the plan with other bounds for families on hosts: family -> (rows of an owner, rows that a rank
        asks for)."""
        families = []
        for family in self.families:
            if family.family in sizes:
                rows, requested = sizes[family.family]
                bounds = replace(family.bounds, rows=self.devices * rows, requested=self.devices * requested)
                family = replace(family, bounds=bounds)
            families.append(family)
        return replace(self, families=tuple(families))

    def without_limits(self) -> ProgramPlan:
        return replace(self, families=self.fallback, fallback=())
