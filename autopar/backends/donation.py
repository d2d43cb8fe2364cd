"""The order in which `jax.jit` gets a step's results, so that each new state is written where the old one was.

JAX pairs donated buffers with results of their shape and dtype, first come, first served. Where a result takes the
buffer of another leaf's old value, XLA copies both, whole tables in every step. So new states are returned first, in
the order of their inputs, and everything else after them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.ir.program import Program


def donation_order(new: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Results in the order in which JAX is to get them.

    Args:
      new: Donated input -> the result that is its new value; no result twice.
      count: How many results there are.
    """
    first = [new[k] for k in sorted(new)]
    return (*first, *sorted(set(range(count)) - set(first)))


def pairs_rightly(program: Program) -> bool:
    """Whether JAX finds each state's new value by itself, with the results in their own order."""
    new = program.new_states
    waiting: dict[Any, collections.deque[int]] = collections.defaultdict(collections.deque)
    for k in sorted(new):
        waiting[_kind(program.block.inputs[k])].append(k)
    for out, atom in enumerate(program.block.outputs):
        inputs = waiting[_kind(atom)]
        if inputs and new[inputs.popleft()] != out:
            return False
    return True


def _kind(atom: Any) -> tuple[Any, Any]:
    return atom.shape, atom.dtype


def has_unread_states(program: Program) -> bool:
    """Whether the new value of a state doesn't depend on the old one (the last gradient), nor does anything else.

    JAX drops arguments that nothing reads, and pairs the other ones: such a state must be kept, `jit(keep_unused=)`.
    """
    read = {a for e in program.block.equations for a in e.inputs} | set(program.block.outputs)
    return any(program.block.inputs[k] not in read for k in program.new_states)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True)
class Reordered:
    """What `jax.jit` returns for a step whose results it is to get in another order than the user's.

    Attributes:
      leaves: The results, in the order for JAX.
      tree: The user's.
      order: For each of `leaves` its place among those of the user's tree.
    """

    leaves: Sequence[Any]
    tree: Any
    order: tuple[int, ...]

    @staticmethod
    def of(results: Sequence[Any], tree: Any, order: tuple[int, ...]) -> Reordered:
        """From results in the user's order."""
        return Reordered([results[k] for k in order], tree, order)

    def restored(self) -> Any:
        """What the user's step returns."""
        results = list(self.leaves)
        for k, leaf in zip(self.order, self.leaves, strict=True):
            results[k] = leaf
        return self.tree.unflatten(results)

    def tree_flatten(self) -> tuple[Sequence[Any], tuple[Any, tuple[int, ...]]]:
        return self.leaves, (self.tree, self.order)

    @staticmethod
    def tree_unflatten(known: tuple[Any, tuple[int, ...]], leaves: Sequence[Any]) -> Reordered:
        return Reordered(leaves, *known)


class Restoring:
    """A jitted function that returns `Reordered` results, or a stage of its compilation, with the user's results."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage(*args, **kwargs).restored()

    def lower(self, *args: Any, **kwargs: Any) -> Restoring:
        """As of a jitted function."""
        return Restoring(self._stage.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> Restoring:
        """As of `jax.stages.Lowered`."""
        return Restoring(self._stage.compile(*args, **kwargs))

    @property
    def out_info(self) -> Any:
        """As of `jax.stages.Lowered`."""
        return self._stage.out_info.restored()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


@dataclass(frozen=True, slots=True)
class Donation:
    """How a step on one device is given to `jax.jit`.

    Attributes:
      names: Positions and names of the arguments that are donated, the states.
      keeps_unused: Arguments that nothing reads are kept.
      reorders: The results come back `Reordered`.
    """

    names: frozenset[int | str] = frozenset()
    keeps_unused: bool = False
    reorders: bool = False

    @staticmethod
    def of(program: Program, names: frozenset[int | str]) -> Donation:
        """For the states of a program."""
        return Donation(names, has_unread_states(program), not pairs_rightly(program))

    def jit(self, run: Callable[..., Any], static_argnums: Sequence[int]) -> Any:
        """`jax.jit` of a step that returns its results as `reorders` says."""
        jitted = jax.jit(
            run,
            static_argnums=static_argnums,
            donate_argnums=tuple(sorted(k for k in self.names if isinstance(k, int))),
            donate_argnames=tuple(sorted(k for k in self.names if isinstance(k, str))),
            keep_unused=self.keeps_unused,
        )
        return Restoring(jitted) if self.reorders else jitted
