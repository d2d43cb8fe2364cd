"""`ServedRunner`: runs a worker's step on a state that servers keep (`autopar.sync.Async`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import is_global, local
from autopar.backends.served import ServedPrograms
from autopar.compile import Compiled
from autopar.errors import StateError, StepError
from autopar.ir.paths import example_axes, path_name
from autopar.jax_types import Leaf, Pytree, PyTreeDef
from autopar.run.agreement import check_same_arrays, warn_if_alone
from autopar.run.kept_placements import KeptPlacements
from autopar.run.planned_step import PlannedStep, Runner
from autopar.run.step import ParallelStep
from autopar.servers.sessions import Session
from autopar.sync import Async
from autopar.tables.kinds import is_table, materialize
from autopar.tables.served import ServedLeaf, session_of


class ServedRunner(Runner):
    """Runs a worker's step."""

    several_programs = "with sync="

    def __init__(self, compiled: Compiled, sync: Async, clients: Clients, out_tree: PyTreeDef) -> None:
        self._analysed, self._sync = compiled.analysed, sync
        self._clients, self._out_tree = clients, out_tree
        devices = clients.devices if clients.devices.mesh.size > 1 else None
        placements = compiled.bound.placements
        copies = [0 if devices is None else 1 if along is not None else devices.mesh.size for along in placements]
        self._kept = KeptPlacements(compiled.analysed, copies)
        self.programs = ServedPrograms(compiled.program, compiled.analysed, devices, self._kept.placed)
        shapes = ", ".join(f"{i.path} {v.type}" for v, i in self._analysed.named_inputs if i.role != "state")
        self._mode = f"{compiled.plan.served}, {shapes} (program {self.programs.digest})"
        states = self._analysed.new_states
        self._types = {k: self._analysed.block.outputs[out].type for k, out in states.items()}

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns leaves that servers keep, and this worker's minibatch's results."""
        session = session_of(leaves)
        if session is None:
            session = self._begun(leaves)
        elif session.mode != self._mode:
            raise StepError(
                f"{self._analysed.name}: servers keep the state for one step, with the same figures and minibatches of "
                f"one shape: {session.mode}. This is {self._mode}. Give minibatches of one size (drop_remainder=True), "
                "or begin once more with autopar.average(state)"
            )
        else:
            self._check_whole(leaves)
        for k, leaf in enumerate(leaves):
            if k not in self._types and isinstance(leaf, np.ndarray):
                self._kept.look(k, leaf)
        results = session.step(self.programs, leaves)
        for k, out in self._analysed.new_states.items():
            results[out] = ServedLeaf(session, k, self._types[k])
        return self._out_tree.unflatten([results[k] for k in range(len(self._analysed.outputs))])

    def _check_whole(self, leaves: Sequence[Leaf]) -> None:
        """Checks that every leaf of the state is the one that servers keep; raises StateError if a leaf is another
        one."""
        for k in self._types:
            leaf = leaves[k]
            if not isinstance(leaf, ServedLeaf) or leaf.index != k:
                raise StateError(
                    f"{self._analysed.name}: servers keep the state, but {self._analysed.inputs[k].path} is another "
                    "array than the step returned there. Take autopar.average(state) on all processes, replace it in "
                    "that, and go on with the result"
                )

    def _begun(self, leaves: Sequence[Leaf]) -> Session:
        """Begins to train an ordinary state. Collective. Raises StateError if the workers' states differ."""
        warn_if_alone(self._analysed.name, self._sync, self._clients)
        states = list(self._analysed.new_states)
        made = materialize([leaves[k] for k in states], copy=False)
        arrays = {k: local(x) for k, x in zip(states, made, strict=True)}
        named = {self._analysed.inputs[k].path: arrays[k] for k in states}
        check_same_arrays(self._clients.processes, self._analysed.name, named)
        given = [arrays.get(k, x) for k, x in enumerate(leaves)]
        return Session(self.programs, given, self._sync.staleness, self._mode, self._clients)


# --- steps by data parallelism to which each process gives its own minibatch, as clients do ---


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
        options = replace(self.options, devices=1)
        alone = replace(self.planner, options=options, devices=None, in_stages=None)
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
