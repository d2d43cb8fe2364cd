"""`StageArray`: a leaf of the state that one stage of a pipeline holds, or whose layers several stages do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.stage_device import StageDevice, sharding_over
from autopar.errors import donated
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Index, Pytree
from autopar.launch.group import everyone
from autopar.tables.leaf import Described, Home, PlacedLeaf, Shards, Source, copied, require_dtype


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A place of a leaf of a pipeline's state, or of some of its layers.

    Attributes:
      ranks: Where stages are on several processes, those that hold it; else none.
      sharding: On the devices of this process that do; None: there are none.
      start, stop: The layers, which are rows of its first axis.
    """

    ranks: tuple[int, ...]
    sharding: Any
    start: int
    stop: int

    @staticmethod
    def of_parts(
        stages: Sequence[Sequence[StageDevice]],
        ends: Sequence[int],
        axis: int | None,
        devices: Sequence[StageDevice],
    ) -> tuple[StagePlace, ...]:
        """Returns the places of a leaf's parts.

        Args:
          stages: Of each part its replicas.
          ends: In layers.
          axis: Along which each is divided over the devices of a tensor axis.
          devices: Those of all stages.
        """
        several = len({d.process_index for d in devices}) > 1
        places = []
        for stage, start, stop in zip(stages, (0, *ends), ends, strict=False):
            ranks = tuple(dict.fromkeys(d.process_index for d in stage)) if several else ()
            own = [d for d in stage if d.process_index == jax.process_index()]
            places.append(StagePlace(ranks, sharding_over(own, axis) if own else None, start, stop))
        return tuple(places)

    @property
    def whole(self) -> Pytree:
        """The sharding of what all of its devices have."""
        if isinstance(self.sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec())
        return self.sharding

    @property
    def writes(self) -> bool:
        """Tells whether this rank is the first one that holds it."""
        return jax.process_index() == self.ranks[0] if self.ranks else True


def is_staged(places: Sequence[StagePlace]) -> bool:
    """Tells whether a leaf that is there is a `StageArray`, not one of JAX's."""
    return len(places) > 1 or any(place.ranks for place in places)


@dataclass(frozen=True)
class StageHome(Home):
    """In the memory of stages, some layers in each of several places."""

    places: tuple[StagePlace, ...]

    def made(self, source: Source, leaf: Described) -> StageArray:
        require_dtype(leaf)
        own = [None if place.sharding is None else _part(place, source, leaf) for place in self.places]
        return StageArray(leaf.shape, leaf.numpy_dtype, self.places, own, is_weak=leaf.weak)


def _part(place: StagePlace, source: Source, leaf: Described) -> jax.Array:
    def read(index: Index) -> np.ndarray:
        start, stop, _ = index[0].indices(place.stop - place.start)
        return source.part((slice(place.start + start, place.start + stop), *index[1:]))

    array = jax.make_array_from_callback((place.stop - place.start, *leaf.shape[1:]), place.sharding, read)
    return jax_compat.weak(array) if leaf.weak else array


class StageArray(PlacedLeaf):
    """A weight or slot in the memory of its stage's ranks, or of those of several stages, each with some layers of it;
    the other ranks have none of it.

    A leaf of the state like an array: `jax.tree` maps over it, and a step in stages takes and returns it. Reading it
    (`np.asarray`, functions of JAX, indexing) is collective: every rank must read, and gets the same.
    `autopar.materialize(state)` makes ordinary arrays.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Dtype,
        places: Sequence[StagePlace],
        values: Sequence[jax.Array | None],
        *,
        is_weak: bool = False,
    ) -> None:
        """Takes who holds it, part by part, and this rank's arrays; `is_weak`: its dtype yields to others."""
        super().__init__(jax.ShapeDtypeStruct(shape, dtype))
        self.is_weak, self._places, self._values = is_weak, tuple(places), tuple(values)
        self._is_gone = False

    @property
    def places(self) -> tuple[StagePlace, ...]:
        """Its places, in the order of its layers."""
        return self._places

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who holds it, or some of it; none where all is in this process."""
        return tuple(dict.fromkeys(rank for place in self._places for rank in place.ranks))

    @property
    def home(self) -> StageHome:
        return StageHome(self._places)

    @property
    def shards(self) -> Shards:
        """Its parts in files: shards that one stage has each, which writes them."""
        rows = math.gcd(*(place.stop for place in self._places))
        layout = RowLayout(self.shape[0], self.shape[0] // rows if rows else 1, cyclic=False)

        def own() -> Iterator[tuple[int, np.ndarray]]:
            for place, part in zip(self._places, self.values, strict=True):
                for start in range(place.start, place.stop, layout.shard_rows) if place.writes else ():
                    first = start - place.start
                    yield start // layout.shard_rows, np.asarray(part)[first : first + layout.shard_rows]

        return Shards(layout, 0, own)

    @property
    def values(self) -> tuple[jax.Array | None, ...]:
        """This rank's arrays; None for parts of other ranks. A DonatedStateError if they were given to a step."""
        if self.is_deleted():
            raise donated("this array")
        return self._values

    @property
    def is_whole_here(self) -> bool:
        return not self.ranks

    def duplicate(self) -> StageArray:
        values = [None if value is None else copied(value) for value in self.values]
        return StageArray(self.shape, self.dtype, self._places, values, is_weak=self.is_weak)

    def is_deleted(self) -> bool:
        return self._is_gone or any(value is not None and value.is_deleted() for value in self._values)

    def hand_on(self) -> None:
        """Says that a step has taken it."""
        self._is_gone = True

    @uninterrupted  # the others wait for this rank
    def _on_host(self) -> np.ndarray:
        parts = [self._read(place, value) for place, value in zip(self._places, self.values, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, place: StagePlace, value: jax.Array | None) -> np.ndarray:
        """Returns a part, of which its first rank tells the others."""
        shape = (place.stop - place.start, *self.shape[1:])
        array = np.ascontiguousarray(value) if value is not None and place.writes else np.empty(shape, self.dtype)
        if place.ranks:
            everyone().share(array.reshape(-1).view(np.uint8), place.ranks[0])
        return array

    def __getitem__(self, index: Index) -> np.ndarray:
        """Indexes it as an array. Collective."""
        return self._on_host()[index]

    @property
    def _where(self) -> str:
        ranks = self.ranks
        if not ranks:
            return f" on {len(set().union(*(place.sharding.device_set for place in self._places)))} devices"
        return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
