"""`KeptPlacements`: arguments that stay the same from call to call are brought to where a step takes them once.

An array of JAX, or a Table, can't change. What it was placed as is kept for as long as it lives, by identity, and steps
that take it to the same place share that. NumPy's arrays can change, so they are placed in each call; a warning names
large ones that don't change. Arrays over several processes aren't kept, either: placing them is collective, and one
process might have what another one hasn't.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.backends.across import is_global
from autopar.backends.stage_device import StageDevice
from autopar.cost.units import format_bytes
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import ArrayType, Program, Var
from autopar.jax_compat import ConcreteArray
from autopar.jax_types import Array, Leaf, Pytree
from autopar.tables.sharded import Table

#: Arrays of each argument whose placements are kept: those that were given last. More would fill the devices where
#: someone goes through a list of batches again and again.
_KEPT = 4
#: Bytes that an argument takes on all devices from which on it is worth a warning, and after how many calls.
_BYTES, _CALLS = 16 << 20, 3
#: Numbers of an array that are compared to see whether it has changed.
_COMPARED = 256


@dataclass(eq=False)
class _Kept:
    """Holds what an array was placed as, by where; nothing once the array is gone."""

    source: weakref.ref[Pytree]
    placed: dict[Hashable, Array]

    @staticmethod
    def of(leaf: Leaf) -> _Kept:
        """Begins with nothing; what is put there goes with the leaf."""
        placed: dict[Hashable, Array] = {}
        return _Kept(weakref.ref(leaf, lambda _: placed.clear()), placed)


#: An array's id -> what it was placed as, while a step keeps that.
_known: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def forget(leaves: Iterable[Leaf]) -> None:
    """Lets go what leaves were placed as that are about to be given away."""
    for leaf in leaves if _known else ():
        kept = _known.get(id(leaf))
        if kept is not None and kept.source() is leaf:
            kept.placed.clear()


class KeptPlacements:
    """Keeps a step's arguments where it takes them.

    Args:
      program: The analysed step.
      copies: Of each input how many times the devices have all of it.
    """

    def __init__(self, program: Program, copies: Sequence[int]) -> None:
        self._program = program
        #: Inputs that are returned as they are given: nobody else is to have their buffers.
        self._returned = frozenset(program.echoes.values())
        self._recent: dict[int, list[_Kept]] = {}
        sizes = [v.type.nbytes if isinstance(v.type, ArrayType) else 0 for v in program.block.inputs]
        self._large = {k for k, (size, count) in enumerate(zip(sizes, copies, strict=True)) if size * count >= _BYTES}
        #: Of large inputs the last call's array, some numbers of it, and how many calls have had these.
        self._seen: dict[int, tuple[weakref.ref[Leaf], np.ndarray, int]] = {}

    def placed(self, k: int, leaf: Leaf, where: Hashable, place: Callable[[Any], Array]) -> Array:
        """Returns an argument, which isn't updated in place, where the step takes it.

        Args:
          k: The input.
          leaf: An array, or a Table.
          where: Says where, of whichever step.
          place: Brings it there; the result shares no memory with NumPy's view of the leaf, which would keep it alive.
        """
        if k in self._returned or not _is_constant(leaf):
            return place(leaf)
        kept = _known.get(id(leaf))
        if kept is None or kept.source() is not leaf:
            kept = _Kept.of(leaf)
        recent = self._recent.setdefault(k, [])
        if not recent or recent[-1] is not kept:  # before there is one more
            others = [each for each in recent if each.placed and each is not kept]
            recent[:] = [*others[1 - _KEPT :], kept]
            _known[id(leaf)] = kept
        placed = kept.placed.get(where)
        if placed is None or placed.is_deleted():
            placed = place(leaf)
            if placed is not leaf:  # which would keep itself alive
                kept.placed[where] = placed
        return placed

    def look(self, k: int, leaf: Leaf) -> None:
        """Warns of a large argument that was the same in several calls, and is placed in each of them."""
        is_numpy = isinstance(leaf, np.ndarray)
        if k not in self._large or not (is_numpy or is_global(leaf)):
            return
        numbers = leaf.flat[:: -(-leaf.size // _COMPARED)] if is_numpy else np.zeros(0)
        source, before, calls = self._seen.get(k, (weakref.ref(leaf), numbers, 0))
        calls = calls + 1 if source() is leaf and np.array_equal(before, numbers) else 1
        self._seen[k] = weakref.ref(leaf), numbers, calls
        if calls < _CALLS:
            return
        self._large.remove(k)  # it is told once
        path = self._program.inputs[k].path
        remedy = (
            f"NumPy's arrays can change. If it doesn't, make it JAX's once, {path.rpartition('/')[-1]} = "
            "jax.numpy.asarray(...)"
            if is_numpy
            else "it is spread over the processes otherwise than the step takes it. Bring it there once, jax.device_put"
        )
        warn(
            f"{self._program.name}: {path} ({format_bytes(leaf.nbytes)}) was the same in {_CALLS} calls, and each of "
            f"them put it on the devices anew: {remedy}; it then stays there as long as it lives",
            SlowPlanWarning,
        )


class KeptArguments:
    """Keeps what the stages of a pipeline are given, besides the state and the batch, on their devices.

    Args:
      program: The analysed step.
      step: Its programs.
    """

    def __init__(self, program: Program, step: StagedStep) -> None:
        self._kept = KeptPlacements(program, [1] * len(program.inputs))
        others = {*step.homes, *step.results, *(whole for whole, _ in step.parts.values())}
        self._numbers = {v: k for k, v in enumerate(step.inputs) if isinstance(v, Var) and v not in others}

    def look(self, leaves: Sequence[Leaf]) -> None:
        """Warns of large arrays of NumPy that were the same in several calls."""
        for k in self._numbers.values():
            if isinstance(leaves[k], np.ndarray):
                self._kept.look(k, leaves[k])

    def put(self, var: Var, array: Leaf, device: StageDevice, axis: int | None) -> Array:
        """Brings what a call was given to a device, divided along an axis if one is given."""
        if var not in self._numbers:
            return device.put(array, axis)
        return self._kept.placed(self._numbers[var], array, device.sharding(axis), lambda x: device.put(x, axis))


def _is_constant(leaf: Leaf) -> bool:
    """Returns whether it is an array of this process that nobody can change."""
    array = leaf.stored if isinstance(leaf, Table) else leaf
    return type(array) is ConcreteArray and array.is_fully_addressable and not array.is_deleted()
