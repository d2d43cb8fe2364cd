"""Views of tables on hosts for compiled programs: their own rank's rows, with routes that the runtime made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import Mapped, OwnPart, reduce_over
from autopar.backends.indices import with_size
from autopar.backends.row_backend import Route, RowBackend
from autopar.backends.sharded import ShardedRows
from autopar.backends.single import ReplicatedRows
from autopar.ir.program_plan import ProgramPlan
from autopar.jax_types import Array, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouteView:
    """A compiled program's view of a route."""

    rows: Array  #: int32[U], the owner's rows in its shard; the shard's size for padding.
    spare: Array  #: int32[1], a row of the shard that the step doesn't touch.
    #: int32[F], sorted storage indices of the rows that this rank asked for; one past the last for padding.
    requested: Array


@dataclass(frozen=True)
class RankView(OwnPart):
    """One rank among `ranks`, in a program of its own: nothing is exchanged within."""

    rank: int = 0
    ranks: int = 1

    @property
    def count(self) -> int:
        return self.ranks

    @property
    def examples(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    def position(self) -> Array:
        return jnp.int32(self.rank)

    def reduce(self, value: Array, op: str) -> Array:
        assert self.ranks == 1, "values are reduced between programs"
        return value

    def gathered(self, value: Array, along: int) -> Array:
        raise AssertionError("what is gathered from other ranks comes from outside")


@dataclass(frozen=True)
class RankDevice(Mapped):
    """One of all ranks' devices, in a program that each device of a mesh runs. `rank`: the own one, if the mesh has its
    devices only; None: it has all ranks'."""

    rank: int | None = None
    ranks: int = 1

    @property
    def count(self) -> int:
        return self.ranks * self.mesh.shape["local"]

    @property
    def examples(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    @property
    def by_ranks(self) -> OwnPart:
        if self.rank is None:
            return Mapped(self.mesh, "ranks")
        return RankView(self.mesh, "ranks", self.rank, self.ranks)

    def position(self) -> Array:
        before = 0 if self.rank is None else self.rank * self.mesh.size
        return before + jax.lax.axis_index(self.examples).astype(jnp.int32)

    def gathered(self, value: Array, along: int) -> Array:
        assert self.mesh.size == self.count, "of all ranks"
        return jax.lax.all_gather(value, self.examples, axis=along, tiled=True)

    def reduce(self, value: Array, op: str) -> Array:
        assert self.mesh.size == self.count, "over all ranks"
        return reduce_over(op, value, self.examples)

    def reduce_rank(self, value: Array, op: str) -> Array:
        """Reduces a value over the own rank's devices."""
        return reduce_over(op, value, "local")

    def once_a_rank(self, value: Array) -> Array:
        """Returns the value on the first device of each rank, zeros on the others."""
        return jnp.where(jax.lax.axis_index("local") == 0, value, jnp.zeros_like(value))


class RankRows(ShardedRows):
    """The rows of one rank of `ranks`."""

    def fetch(self, params: Params, rows: Array, route: Route) -> Array:
        assert self._devices.count == 1, "rows are fetched between programs"
        return with_size(rows, params["axis"], route.requested.shape[0])  # real rows fit both sizes

    def deliver(self, params: Params, sums: Array, route: Route, base: Array | None = None) -> Array:
        assert self._devices.count == 1, "sums are delivered between programs"
        delivered = with_size(sums, params["axis"], route.rows.shape[0])
        return delivered if base is None else base + delivered


def host_backends(bound: ProgramPlan, view: OwnPart) -> Mapping[int, RowBackend]:
    """Returns families' operations within a program; one device's own program needs none for tables on devices."""
    ranks, by_family = view.by_ranks, dict[int, RowBackend]()
    for family in bound.families:
        if family.on_hosts and family.layout is not None:
            by_family[family.family] = RankRows(ranks, family.layout, 0)
        elif isinstance(view, RankDevice):
            by_family[family.family] = ReplicatedRows(view)
    return by_family


def padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    filled = np.full((size,), fill, np.int32)
    filled[: values.size] = values
    return filled
