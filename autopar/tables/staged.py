"""`StageArray`: a leaf of the state that one stage of a pipeline holds, or whose layers several stages do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import StageDevice, sharding_over
from autopar.errors import donated
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Index, Pytree, Sharding
from autopar.launch.group import everyone
from autopar.tables.leaf import Described, Home, PlacedLeaf, Shards, Source, copied, is_traced, require_dtype


@dataclass(frozen=True, slots=True)
class StagePart:
    """A leaf of a pipeline's state, or some of its layers, on one stage."""

    ranks: tuple[int, ...]  #: Where stages are on several processes, those that hold it; else none.
    sharding: Sharding  #: On the devices of this process that do; None: there are none.
    #: The layers, which are rows of its first axis.
    start: int
    stop: int

    @staticmethod
    def of_parts(
        stages: Sequence[Sequence[StageDevice]], ends: Sequence[int], axis: int | None, devices: Sequence[StageDevice]
    ) -> tuple[StagePart, ...]:
        """Returns the parts of a leaf. `stages`: for each part the devices of its stage. `ends`: the layer at which
        each part ends. `axis`: the axis along which each part is divided over the devices of a tensor axis; None: it
        isn't. `devices`: those of all stages."""
        several = len({d.process_index for d in devices}) > 1
        parts = []
        for stage, start, stop in zip(stages, (0, *ends), ends, strict=False):
            ranks = tuple(dict.fromkeys(d.process_index for d in stage)) if several else ()
            own = [d for d in stage if d.process_index == jax.process_index()]
            parts.append(StagePart(ranks, sharding_over(own, axis) if own else None, start, stop))
        return tuple(parts)

    @property
    def whole(self) -> Pytree:
        """The sharding of an array that each of its devices has whole."""
        if isinstance(self.sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec())
        return self.sharding

    @property
    def writes(self) -> bool:
        """Tells whether this rank is the first one that holds it."""
        return jax.process_index() == self.ranks[0] if self.ranks else True


def is_staged(parts: Sequence[StagePart]) -> bool:
    """Tells whether a leaf that is there is a `StageArray`, not one of JAX's."""
    return len(parts) > 1 or any(part.ranks for part in parts)


@dataclass(frozen=True)
class StageHome(Home):
    """In the memory of stages, some layers on each of several stages."""

    parts: tuple[StagePart, ...]

    def made(self, source: Source, leaf: Described) -> StageArray:
        require_dtype(leaf)
        own = [None if part.sharding is None else _made(part, source, leaf) for part in self.parts]
        return StageArray(leaf.shape, leaf.numpy_dtype, self.parts, own, is_weak=leaf.weak)


def _made(part: StagePart, source: Source, leaf: Described) -> jax.Array:
    def read(index: Index) -> np.ndarray:
        start, stop, _ = index[0].indices(part.stop - part.start)
        return source.part((slice(part.start + start, part.start + stop), *index[1:]))

    array = jax.make_array_from_callback((part.stop - part.start, *leaf.shape[1:]), part.sharding, read)
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
        parts: Sequence[StagePart],
        values: Sequence[jax.Array | None],
        *,
        is_weak: bool = False,
    ) -> None:
        """Takes this rank's arrays (`values`), one for each part, None for other ranks' parts. `is_weak`: its dtype
        yields to others."""
        super().__init__(jax.ShapeDtypeStruct(shape, dtype))
        self.is_weak, self._parts, self._values = is_weak, tuple(parts), tuple(values)
        self._is_gone = False

    @property
    def parts(self) -> tuple[StagePart, ...]:
        """Its parts, in the order of its layers."""
        return self._parts

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who holds it, or some of it; none where all is in this process."""
        return tuple(dict.fromkeys(rank for part in self._parts for rank in part.ranks))

    @property
    def home(self) -> StageHome:
        return StageHome(self._parts)

    @property
    def shards(self) -> Shards:
        """The shards in which files hold it: each lies on one stage, which writes it."""
        rows = math.gcd(*(part.stop for part in self._parts))
        layout = RowLayout(self.shape[0], self.shape[0] // rows if rows else 1, cyclic=False)

        def own() -> Iterator[tuple[int, np.ndarray]]:
            for part, value in zip(self._parts, self.values, strict=True):
                for start in range(part.start, part.stop, layout.shard_rows) if part.writes else ():
                    first = start - part.start
                    yield start // layout.shard_rows, np.asarray(value)[first : first + layout.shard_rows]

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
        return StageArray(self.shape, self.dtype, self._parts, values, is_weak=self.is_weak)

    def is_deleted(self) -> bool:
        return self._is_gone or any(value is not None and value.is_deleted() for value in self._values)

    def hand_on(self) -> None:
        """Says that a step has taken it."""
        self._is_gone = True

    @uninterrupted  # the others wait for this rank
    def _on_host(self) -> np.ndarray:
        parts = [self._read(part, value) for part, value in zip(self._parts, self.values, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, part: StagePart, value: jax.Array | None) -> np.ndarray:
        """Returns a part; its first rank sends it to the others."""
        shape = (part.stop - part.start, *self.shape[1:])
        array = np.ascontiguousarray(value) if value is not None and part.writes else np.empty(shape, self.dtype)
        if part.ranks:
            everyone().share(array.reshape(-1).view(np.uint8), part.ranks[0])
        return array

    def __getitem__(self, index: Index) -> np.ndarray | jax.Array:
        """Indexes it as an array. Collective."""
        return jax.numpy.asarray(self)[index] if is_traced(index) else self._on_host()[index]

    @property
    def _where(self) -> str:
        ranks = self.ranks
        if not ranks:
            return f" on {len(set().union(*(part.sharding.device_set for part in self._parts)))} devices"
        return f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
