"""`StageArray`: a leaf of the state that the ranks of one stage of a pipeline hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import donated
from autopar.interrupts import uninterrupted
from autopar.mpi.world import world
from autopar.tables.leaf import TableLeaf


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where a leaf of a pipeline's state is.

    Attributes:
      ranks: Where stages are on several processes, those that hold it; else none.
      sharding: On the devices of this process that do; None: there are none.
    """

    ranks: tuple[int, ...]
    sharding: Any

    @staticmethod
    def of(stage: Sequence[Any], devices: Sequence[Any]) -> StagePlace:
        """Of a leaf of a stage; `devices`: those of all stages."""
        ranks = tuple(dict.fromkeys(d.process_index for d in stage))
        own = [d for d in stage if d.process_index == jax.process_index()]
        several = len({d.process_index for d in devices}) > 1
        return StagePlace(ranks if several else (), replicated_over(own) if own else None)


def replicated_over(devices: Sequence[Any]) -> Any:
    """The sharding of an array that some devices have all of."""
    if len(devices) == 1:
        return jax.sharding.SingleDeviceSharding(devices[0])
    mesh = jax.sharding.Mesh(np.array(devices), ("replica",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


class StageArray(TableLeaf):
    """A weight or slot in the memory of its stage's ranks; the other ranks have none of it.

    A leaf of the state like an array: `jax.tree` maps over it, and a step in stages takes and returns it. Reading it
    (`np.asarray`, `jnp.asarray`, indexing) is collective: every rank must read, and gets the same. Other JAX functions
    refuse it: `autopar.materialize(state)` makes ordinary arrays.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, ranks: tuple[int, ...], value: Any) -> None:
        """`ranks`: who holds it; `value`: the array on these, None on others."""
        self._shape, self._dtype, self._ranks, self._value = shape, dtype, ranks, value
        self._is_gone = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who holds it."""
        return self._ranks

    @property
    def sharding(self) -> Any:
        """On the devices of this process that hold it; None: there are none."""
        return None if self._value is None else self._value.sharding

    @property
    def value(self) -> jax.Array | None:
        """This rank's array; None on ranks of other stages. A DonatedStateError if it was given to a step."""
        if self.is_deleted():
            raise donated("this array")
        return self._value

    def is_deleted(self) -> bool:
        return self._is_gone or (self._value is not None and self._value.is_deleted())

    def hand_on(self) -> None:
        """Say that a step has taken it."""
        self._is_gone = True

    def materialize(self) -> jax.Array:
        """An ordinary array of this process. Collective."""
        return jnp.asarray(np.asarray(self))

    @uninterrupted  # the others wait for this rank
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        ranks, value = world(), self.value
        is_first = value is not None and ranks.rank == self._ranks[0]
        array = np.ascontiguousarray(value) if is_first else np.empty(self._shape, self._dtype)
        if ranks.comm is not None:
            ranks.comm.Bcast(array.reshape(-1).view(np.uint8), root=self._ranks[0])
        return array.astype(dtype or self._dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """As of an array. Collective."""
        return np.asarray(self)[index]

    @property
    def _where(self) -> str:
        return f" on rank{'s' * (len(self._ranks) > 1)} {', '.join(map(str, self._ranks))}"
