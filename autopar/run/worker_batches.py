"""Steps by data parallelism to which each process gives its own minibatch, as clients do (`autopar.sync.Async`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.across import is_global, local
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.ir.examples import example_axes
from autopar.ir.paths import path_name
from autopar.jax_types import Leaf, Pytree
from autopar.run.planned_step import PlannedStep
from autopar.run.step import ParallelStep
from autopar.tables.kinds import is_table, materialize


@dataclass(eq=False)
class GlobalBatchStep(ParallelStep):
    """A step by data parallelism on the minibatches of all processes as one batch: `Async(staleness=0)`."""

    all_devices: Devices | None = None
    _states: frozenset[int] | None = None

    @property
    def minibatch_clients(self) -> Clients | None:
        return None if self.all_devices is None else Clients.of(self.all_devices, None)

    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        given, named = self._joined(args, kwargs)
        return super().__call__(*given, **named)

    def planned_for(self, *args: Pytree, **kwargs: Pytree) -> PlannedStep:
        given, named = self._joined(args, kwargs)
        return super().planned_for(*given, **named)

    def _joined(
        self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]
    ) -> tuple[Sequence[Pytree], Mapping[str, Pytree]]:
        """Joins a call's arguments, except its state, over all processes."""
        devices = self.all_devices
        if devices is None or not devices.processes.several:
            return args, kwargs
        if self._states is None:
            self._states = self._find_states(args, kwargs)
        batches, apart = self.planner.batch_argnums, {*self.static.argnums, *self._states}
        is_batch = [k in batches if batches is not None else k not in apart for k in range(len(args))]
        given = ([a for k, a in enumerate(args) if is_batch[k]], dict(kwargs) if batches is None else {})
        paths, tree = jax.tree_util.tree_flatten_with_path(given)
        leaves = [leaf for _, leaf in paths]
        known = [(path_name(path), tuple(np.shape(leaf)) if _is_examples(leaf) else ()) for path, leaf in paths]
        axes = example_axes(self.options.batch_axis, known)
        joined, named = jax.tree.unflatten(tree, [_join(x, a, devices) for x, a in zip(leaves, axes, strict=True)])
        rest = iter(joined)
        return [next(rest) if is_batch[k] else a for k, a in enumerate(args)], {**kwargs, **named}

    def _find_states(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> frozenset[int]:
        """Returns positions of the state, found by planning the step on this process's minibatch alone."""
        options = dataclasses.replace(self.options, devices=1)
        alone = dataclasses.replace(self.planner, options=options, devices=None, in_stages=None)
        dynamic = [k for k in range(len(args)) if k not in self.static]
        states = ParallelStep(alone).planned_for(*args, **kwargs).states.outputs
        return frozenset(dynamic[k] for k in states if k < len(dynamic))


def _is_examples(leaf: Leaf) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and not is_global(leaf) and not jax_compat.is_key(leaf.dtype)


def _join(leaf: Leaf, axis: int | None, devices: Devices) -> Leaf:
    """Returns the global array of the processes' examples, in the processes' order."""
    if axis is None or not _is_examples(leaf):
        return leaf
    return jax.make_array_from_process_local_data(devices.sharding(axis), np.asarray(leaf))


@dataclass(eq=False)
class WarmupStep(ParallelStep):
    """A step whose first `warmup` calls another step runs: `Async(warmup=)`."""

    first: Callable[..., Leaf] | None = None
    warmup: int = 0
    _done: int = 0

    @property
    def takes_turns(self) -> bool:
        return True

    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        if self.first is None or self._done > self.warmup:
            return super().__call__(*args, **kwargs)
        self._done += 1
        if self._done <= self.warmup:
            return self.first(*args, **kwargs)
        args, kwargs = jax.tree.map(_own, (args, kwargs), is_leaf=is_table)
        return super().__call__(*args, **kwargs)


def _own(leaf: Leaf) -> Leaf:
    return local(materialize(leaf, copy=False)) if isinstance(leaf, jax.Array) or is_table(leaf) else leaf
