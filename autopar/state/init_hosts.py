"""`HostMaker`: makes the state of a step whose tables are in the memory of the hosts, each rank its own share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.backends.across import local, place
from autopar.backends.devices import Devices
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.storage import HostRows
from autopar.backends.layouts import even_shares
from autopar.ir.layout import RowLayout
from autopar.mpi.host_memory import require_memory
from autopar.run.entry import Entry
from autopar.tables.host import HostTable, exchange


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf that is made for the memory of the hosts."""

    path: str
    layout: RowLayout
    axis: int

    @property
    def even(self) -> RowLayout:
        """Equal shares of adjacent rows, in which it is made."""
        return RowLayout(self.layout.extent, self.layout.devices, dealt=False)


@dataclass(frozen=True, eq=False)
class HostMaker:
    """Makes the leaves of a state.

    A table is made in equal shares of adjacent rows, one on each rank's devices, and dealt out from there: it is never
    whole on a device or in a process, but of a single one (and where a share would be rounded otherwise: `init`).

    Attributes:
      make: From flat arrays, as JAX traced it.
      ranks: Who takes part.
      tables: For each leaf that is to be on hosts where it is; None of others.
    """

    make: Callable[..., Sequence[Any]]
    ranks: Ranks
    tables: Sequence[HostLeaf | None]

    @staticmethod
    def of_plan(make: Callable[..., Sequence[Any]], entry: Entry, found: Sequence[int | None]) -> HostMaker:
        """`found`: which input of the step each leaf is."""
        inputs, hosted = entry.compiled.analysed.inputs, hosted_inputs(entry)
        tables = [HostLeaf(inputs[k].path, *hosted[k]) if k is not None and k in hosted else None for k in found]
        return HostMaker(make, Ranks(exchange(), "xla" if exchange().size > 1 else ""), tables)

    @property
    def _devices(self) -> Devices:
        return self.ranks.device_view

    @functools.cached_property
    def _by_itself(self) -> bool:
        """Whether a rank makes all leaves whole, and keeps what is its own."""
        return self.ranks.exchange.size == 1 or jax_compat.rounds_by_shape()

    @functools.cached_property
    def run(self) -> Any:
        """The jitted function of flat arrays."""
        if self._by_itself:
            return jax.jit(self.make)

        def make(*flat: Any) -> list[Any]:
            pairs = zip(self.make(*flat), self.tables, strict=True)
            return [x if t is None else even_shares(x, t.even, t.axis, self._devices) for x, t in pairs]

        shardings = [self._devices.sharding(None if t is None else t.axis) for t in self.tables]
        return jax.jit(make, out_shardings=shardings)

    def everywhere(self, leaf: Any) -> Any:
        """An argument on all devices."""
        if not isinstance(leaf, jax.Array):
            return leaf
        if self._by_itself:
            return leaf if self.ranks.exchange.size == 1 else local(leaf)
        return place(leaf, self._devices.sharding(None))

    def as_tables(self, leaves: Sequence[Any]) -> list[Any]:
        """What `run` returned, with HostTables, and ordinary arrays of this process."""
        made = list(leaves)
        pairs = ((t, x) for t, x in zip(self.tables, made, strict=True) if t is not None)
        own = {t.path: (resized(x.shape, t.axis, t.layout.share), x.dtype) for t, x in pairs}
        require_memory(self.ranks.exchange, own)
        for k, table in enumerate(self.tables):
            made[k] = self.ranks.own(made[k]) if table is None else HostTable(self._stored(made[k], table))
        return made

    def _stored(self, leaf: Any, table: HostLeaf) -> HostRows:
        ranks = self.ranks.exchange
        if self._by_itself:
            return HostRows.of(leaf, table.axis, table.layout, ranks.rank, table.path)
        shape = resized(leaf.shape, table.axis, table.layout.extent)
        found = HostRows.empty(shape, leaf.dtype, table.axis, table.layout, ranks.rank, table.path)
        share = np.moveaxis(np.asarray(leaf.addressable_data(0)), table.axis, 0)

        def read(numbers: np.ndarray) -> np.ndarray:
            places, back = np.unique(numbers, return_inverse=True)
            asked = ranks.ask(places, table.layout.share)
            return ranks.fetch(asked, share[asked.rows])[back]

        found.fill(read)
        return found


def hosted_inputs(entry: Entry) -> dict[int, tuple[RowLayout, int]]:
    """Input of a step -> layout and row axis, of those that are in host memory."""
    layouts = {f.family: f.layout for f in entry.compiled.plan.families if f.on_hosts and f.layout is not None}
    return {
        leaf: (layouts[space.family], axis)
        for space in entry.compiled.analysed.rows.spaces
        if space.family in layouts
        for leaf, axis in zip(space.leaves, space.axes, strict=True)
    }
