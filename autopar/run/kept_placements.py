"""`KeptPlacements`: places arguments that stay the same from call to call only once.

JAX arrays and Tables are immutable. Their placements are kept by identity for as long as they live, and are shared by
all steps that place them alike. NumPy arrays can change and are placed in each call; a warning names large ones that
don't change. Global arrays aren't kept: placing them is collective, and processes might differ in what they have kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.backends.devices import StageDevice
from autopar.backends.global_arrays import is_global
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.figures import format_bytes
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import ArrayType, Program, Var
from autopar.jax_compat import ConcreteArray
from autopar.jax_types import Array, Leaf, Pytree
from autopar.tables.sharded import Table

#: The number of arrays that are kept for each argument, the latest ones. More would fill the devices of a user who
#: cycles through a list of batches.
_KEPT = 4
#: Bytes on all devices that are worth a warning, and the calls before it.
_BYTES, _CALLS = 16 << 20, 3
#: Elements of a NumPy array that are compared to see whether it has changed.
_COMPARED = 256


@dataclass(eq=False)
class _Kept:
    """An array's placements, dropped once the array is gone."""

    source: weakref.ref[Pytree]
    placed: dict[Hashable, Array]

    @staticmethod
    def of(leaf: Leaf) -> _Kept:
        placed: dict[Hashable, Array] = {}
        return _Kept(weakref.ref(leaf, lambda _: placed.clear()), placed)


#: An array's id -> its placements, while a step keeps them.
_known: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def forget(leaves: Iterable[Leaf]) -> None:
    """Drops the placements of leaves that are about to be donated."""
    for leaf in leaves if _known else ():
        kept = _known.get(id(leaf))
        if kept is not None and kept.source() is leaf:
            kept.placed.clear()


class KeptPlacements:
    """Keeps a step's placed arguments. `copies`: for each input how many devices hold all of it."""

    def __init__(self, program: Program, copies: Sequence[int]) -> None:
        self._program = program
        #: Inputs that the step returns unchanged: their buffers become results, and mustn't be shared.
        self._returned = frozenset(program.echoes.values())
        self._recent: dict[int, list[_Kept]] = {}
        sizes = [v.type.nbytes if isinstance(v.type, ArrayType) else 0 for v in program.block.inputs]
        self._large = {k for k, (size, count) in enumerate(zip(sizes, copies, strict=True)) if size * count >= _BYTES}
        #: For large inputs the last call's array, some of its elements, and the number of calls that had the same.
        self._seen: dict[int, tuple[weakref.ref[Leaf], np.ndarray, int]] = {}

    def placed(self, k: int, leaf: Leaf, where: Hashable, place: Callable[[Leaf], Array]) -> Array:
        """Returns an argument, which isn't updated in place, where the step takes it.

        `k`, `leaf`: the input's index; an array or a Table. `where`: key of the placement, equal for all steps that
        share it. `place`: brings the leaf there. Its result must not share memory with a NumPy view of the leaf, which
        would keep the leaf alive.
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
        """Warns once of a large argument that several calls placed anew although it was the same."""
        is_numpy = isinstance(leaf, np.ndarray)
        if k not in self._large or not (is_numpy or is_global(leaf)):
            return
        numbers = leaf.flat[:: -(-leaf.size // _COMPARED)] if is_numpy else np.zeros(0)
        source, before, calls = self._seen.get(k, (weakref.ref(leaf), numbers, 0))
        calls = calls + 1 if source() is leaf and np.array_equal(before, numbers) else 1
        self._seen[k] = weakref.ref(leaf), numbers, calls
        if calls < _CALLS:
            return
        self._large.remove(k)  # warn once
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
    """Keeps a pipeline's other arguments (neither state nor batch) on its stages' devices."""

    def __init__(self, program: Program, step: StagedStep) -> None:
        self._kept = KeptPlacements(program, [1] * len(program.inputs))
        others = {*step.homes, *step.results, *(whole for whole, _ in step.parts.values())}
        self._numbers = {v: k for k, v in enumerate(step.inputs) if isinstance(v, Var) and v not in others}

    def look(self, leaves: Sequence[Leaf]) -> None:
        for k in self._numbers.values():
            if isinstance(leaves[k], np.ndarray):
                self._kept.look(k, leaves[k])

    def put(self, var: Var, array: Leaf, device: StageDevice, axis: int | None) -> Array:
        """Returns an argument on a device; `axis`: the axis that the stage's devices divide, if any."""
        if var not in self._numbers:
            return device.put(array, axis)
        return self._kept.placed(self._numbers[var], array, device.sharding(axis), lambda x: device.put(x, axis))


def _is_constant(leaf: Leaf) -> bool:
    array = leaf.stored if isinstance(leaf, Table) else leaf
    return type(array) is ConcreteArray and array.is_fully_addressable and not array.is_deleted()
