"""`OneDeviceRunner`: calls a planned step on one device; `Lowered`: its program for users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.backends.emit import donation_order, has_unread_states
from autopar.interrupts import interruptible
from autopar.ir.program import Program
from autopar.jax_types import Leaf, Pytree, PyTreeDef
from autopar.run.buffers import is_shared_buffer, with_own_buffers
from autopar.run.planned_step import Runner


class OneDeviceRunner(Runner):
    """Calls a planned step on flat arrays, under one `jax.jit`. `name` is for JAX's messages and profiles; `donate`:
    states are updated in place."""

    def __init__(
        self, run: Callable[..., Sequence[Pytree]], program: Program, name: str, out_tree: PyTreeDef, donate: bool
    ) -> None:
        order = donation_order(program.new_states, len(program.outputs))
        self._is_in_order = list(order) == list(range(len(order)))
        self._order = sorted(range(len(order)), key=order.__getitem__)
        self._out_tree = out_tree
        self._types = [v.type for v in program.block.inputs]
        self._states = {k for k, input_ in enumerate(program.inputs) if input_.role == "state"} if donate else set()
        self._is_new = True

        def step(*leaves: Leaf) -> Pytree:
            with interruptible():
                results = run(*leaves)
            return out_tree.unflatten(results) if self._is_in_order else [results[k] for k in order]

        step.__name__ = step.__qualname__ = name
        keep = donate and has_unread_states(program)
        self._run = jax.jit(step, donate_argnums=tuple(sorted(self._states)), keep_unused=keep)

    def lower(self) -> Lowered:
        """Lowers the step at the plan's shapes."""
        shapes = (jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in self._types)
        return Lowered(self._run.lower(*shapes), self._results)

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns its results."""
        if self._is_new:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        try:
            return self._results(self._run(*leaves))
        except (RuntimeError, ValueError) as error:
            if not is_shared_buffer(error) or any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
                raise
            return self._results(self._run(*with_own_buffers(leaves, self._states)))

    def _results(self, returned: Leaf) -> Leaf:
        """Returns the results as a tree. JAX makes it, which is faster, unless donation needed another order."""
        return returned if self._is_in_order else self._out_tree.unflatten([returned[k] for k in self._order])


class Lowered:
    """A `jax.stages.Lowered` or `Compiled` of a step, with the user's arguments and results."""

    def __init__(self, stage: Any, results: Callable[[Leaf], Leaf]) -> None:
        self._stage, self._results = stage, results

    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        """Runs the compiled step; static arguments are left out."""
        return self._results(self._stage(*jax.tree.leaves((args, kwargs))))

    def compile(self, *args: Pytree, **kwargs: Pytree) -> Lowered:
        return Lowered(self._stage.compile(*args, **kwargs), self._results)

    @property
    def out_info(self) -> Any:
        return self._results(self._stage.out_info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)
