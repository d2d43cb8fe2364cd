"""One run of a step with tables on hosts: its routes, its values, and what runs of the next step beside it.

`OtherShapes` says that the step's rows don't fit, or fit a smaller bucket, before anything has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import numpy as np

from autopar.backends.host.shape_buckets import Rows
from autopar.backends.host.storage import HostRows
from autopar.backends.host.view import RouteView
from autopar.ir.program import Atom, Equation
from autopar.jax_types import Array, Leaf
from autopar.mpi.bags import RequestedBags
from autopar.mpi.exchange import Requested, RequestedPart

if TYPE_CHECKING:  # which runs them
    from autopar.backends.host.segmented import SegmentedProgram


class OtherShapes(Exception):
    """A step needs another shape bucket."""

    def __init__(self, needs: Rows) -> None:
        super().__init__(str(needs))
        self.needs = needs


@dataclass(eq=False)
class HostRoute:
    """The rows of a family in one step."""

    requested: Requested
    indices: np.ndarray  #: Sorted storage indices that this rank asks for.
    view: RouteView
    rows: np.ndarray  #: Rows of this owner that are asked for, padded.
    spare: int  #: A row that the step doesn't touch, which padding reads.

    @property
    def count(self) -> int:
        """Rows of this owner that are asked for."""
        return len(self.requested.rows)

    @property
    def read(self) -> np.ndarray:
        """The rows that are read, that of padding included."""
        return np.where(np.arange(len(self.rows)) < self.count, self.rows, self.spare)


@dataclass(eq=False)
class RunningStep:
    """One run of the segments.

    All but `values` outlives a run that begins again in another shape bucket: other ranks need not begin again, so
    exchanges aren't repeated.

    Attributes:
      routes: Family -> its request, and the storage indices in it.
      needs: Family -> number of rows of this owner that are asked for, and of rows that this rank asks for.
      reduced: (Level, gradient bucket, operation) -> a function that waits for the sums.
      beside: Reductions under way beside programs, and where their results go.
      bags: By the operands that bags are made of.
      lagging: Tables whose rows are brought up to date when they are pulled.
      catch_up_some: Brings some lagging rows up to date, beside the devices' first program.
      expects: Whether rows of deferred tables are brought up to date ahead.
      is_first: Whether it is the first one of all ranks, which then agree on a bucket.
      has_written: Whether a table has changed.
      ahead: What was done of it beside the step before.
      looks_ahead: Whether the next step's prefix is run beside it, on all ranks or none.
      following: The next step, if its batch is known here.
      under_way: Waits for what is done of the next step, in a thread.
    """

    values: dict[Atom, Leaf]
    routes: dict[int, tuple[Requested, np.ndarray]] = field(default_factory=dict)
    needs: dict[int, tuple[int, int]] = field(default_factory=dict)
    reduced: dict[tuple[int, int | None, str], Callable[[], Sequence[Array]]] = field(default_factory=dict)
    beside: list[tuple[Sequence[Equation], Callable[[], Sequence[Array]]]] = field(default_factory=list)
    bags: dict[tuple[Atom, ...], RequestedBags] = field(default_factory=dict)
    lagging: frozenset[HostRows] = frozenset()
    catch_up_some: Callable[[], None] | None = None
    expects: bool = True
    is_first: bool = False
    has_written: bool = False
    ahead: Ahead | None = None
    looks_ahead: bool = False
    following: Ahead | None = None
    under_way: Callable[[], None] | None = None


@dataclass(eq=False)
class Ahead:
    """A step whose prefix (`analysis.prefix.Prefix`) runs beside the step before it."""

    segmented: SegmentedProgram  #: The program that runs it.
    running: RunningStep  #: Its routes and needs.
    values: dict[Atom, Leaf] = field(default_factory=dict)  #: Its ids and routes.
    is_there: bool = False  #: Whether all ranks have asked for its rows.
    #: The rows that were fetched, and the part of them that the step before writes and that is still to come.
    fetched: dict[Equation, tuple[np.ndarray, RequestedPart]] = field(default_factory=dict)
    tables: tuple[int, ...] = ()  #: Inputs that they are of.
    #: These, at the versions that this step leaves.
    versions: MutableMapping[HostRows, int] = field(default_factory=weakref.WeakKeyDictionary)
    #: What the step before was expected to write to update logs, and what these are by then, by input.
    new_entries: dict[Atom, Leaf] = field(default_factory=dict)
    entries: dict[int, np.ndarray] = field(default_factory=dict)
    #: Pulls of deferred tables -> which rows the step before writes; and all, the others brought up to date.
    caught: dict[Equation, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    #: Pulls that devices read -> which rows the step before writes; and all, on each device.
    sent: dict[Equation, tuple[np.ndarray, Sequence[jax.Array]]] = field(default_factory=dict)
    refusal: str = ""  #: Why devices took none.

    @property
    def has_rows(self) -> bool:
        """Says whether rows were fetched or sent."""
        return bool(self.fetched or self.sent)

    def drop_rows(self) -> None:
        """Leaves routes alone."""
        self.fetched, self.caught, self.sent = {}, {}, {}

    @property
    def fits(self) -> bool:
        """Says whether its program is compiled for its rows."""
        return self.segmented.fits(self.running.needs)
