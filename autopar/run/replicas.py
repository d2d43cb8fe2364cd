"""`ReplicaRunner`: runs a client's own step, and exchanges its weights with others' (`autopar.sync`)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.across import is_global, local
from autopar.backends.clients import Clients
from autopar.errors import StepError
from autopar.ir.plan import SyncPlan
from autopar.ir.program import Program
from autopar.jax_types import Array, Leaf, Pytree, PyTreeDef
from autopar.launch.slowness import SLOWNESS
from autopar.measure.curvature import slope_of
from autopar.run.agreement import check_same_arrays, warn_if_alone
from autopar.run.runner import Runner
from autopar.run.touched_rows import TouchedRows
from autopar.sync import Replicated
from autopar.tables.kinds import materialize
from autopar.tables.leaf import TableLeaf
from autopar.tables.replica import Replica, Replicas, replicas_of


def fragments_of(plan: SyncPlan, program: Program) -> list[list[int]]:
    """Returns for each fragment the inputs that are its weights."""
    numbers = {input_.path: k for k, input_ in enumerate(program.inputs) if k in program.new_states}
    return [[numbers[path] for path in fragment] for fragment in plan.fragments]


class ReplicaRunner(Runner):
    """Runs a client's own step.

    Args:
      inner: The runner of that step.
      sync, plan: The user's choice, and the plan made of it.
      touched: Finds the rows of tables that steps touch.
      clients: All clients.
      program, plain: The analysed step, and the traced one on flat arrays.
      out_tree: The structure of its results.
    """

    several_programs = "with sync="

    def __init__(
        self,
        inner: Runner,
        sync: Replicated,
        plan: SyncPlan,
        touched: TouchedRows,
        clients: Clients,
        program: Program,
        out_tree: PyTreeDef,
        plain: Callable[..., Sequence[Any]],
    ) -> None:
        self.inner, self.touched, self.clients = inner, touched, clients
        self._sync, self._plan, self._plain = sync, plan, plain
        self._new_states, self._out_tree = program.new_states, out_tree
        self._name, self._paths = program.name, [input_.path for input_ in program.inputs]
        self._fragments = fragments_of(plan, program)
        #: Inputs that are exchanged.
        self.weights = [k for fragment in self._fragments for k in fragment]

    @property
    def mode(self) -> str:
        """A name that steps share which can go on with each other's replicas."""
        return f"{self._plan.name} of {self._plan.fragments}"

    @abc.abstractmethod
    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        """Returns the shared state that a checkpoint has (`Replicas.shared`, and this client's own part); raises
        CheckpointError if it was saved with another `sync=`."""

    @abc.abstractmethod
    def first(self, weights: Mapping[int, Array]) -> Replicas:
        """Returns the shared state before the first step. `weights`: input -> its value on all clients."""

    @abc.abstractmethod
    def _before(self, replicas: Replicas, leaves: Sequence[Leaf], own: Sequence[Leaf]) -> Replicas:
        """Returns the shared state before a step. `leaves`: the step's flat arguments; `own`: this client's arrays for
        them."""

    @abc.abstractmethod
    def _after(self, replicas: Replicas, results: Sequence[Leaf]) -> tuple[Replicas, dict[int, Array]]:
        """Returns the shared state after a step, and the weights that aren't the step's results."""

    def loads(self) -> Sequence[int] | None:
        return self.inner.loads()

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns its new state as replicas, and its own minibatch's results."""
        replicas = replicas_of(leaves)
        own = [self._own(leaf) for leaf in leaves]
        for k in self._new_states:
            own[k] = self.clients.placed(own[k]) if isinstance(own[k], jax.Array) else own[k]
        if replicas is None:
            replicas = self._begun(own)
        elif replicas.mode != self.mode:
            raise StepError(
                f"{self._name}: the state's replicas are of another sync=, {replicas.mode}, and this step has "
                f"{self.mode}. Begin with their mean, autopar.average(state)"
            )
        replicas = self._before(replicas, leaves, own)
        if SLOWNESS.is_on:
            jax.block_until_ready([x for x in own if isinstance(x, jax.Array)])  # a mean, which others may be late for
        with SLOWNESS.computing():
            results = jax.tree.leaves(self.inner(own))
            if SLOWNESS.is_on:
                jax.block_until_ready(results)
        replicas, new = self._after(replicas, results)
        for k, array in new.items():
            results[self._new_states[k]] = array
        for k, out in self._new_states.items():
            results[out] = Replica(results[out], replicas, k)
        return self._out_tree.unflatten(results)

    def _begun(self, leaves: Sequence[Leaf]) -> Replicas:
        """Returns the shared state before the first step of ordinary arrays. Collective. Raises StateError if the
        clients' arrays differ."""
        warn_if_alone(self._name, self._sync, self.clients)
        weights = Weights(dict(enumerate(leaves)))
        if self.clients.count > 1:
            mine = {self._paths[k]: local(weights[k]) for k in self.weights}
            check_same_arrays(self.clients.processes, self._name, mine)
        if self._sync.curvature == "measure" and self.clients.own == 0 and self.clients.leads:
            states = {k: self._new_states[k] for k in self.weights}
            self._sync.check_stable(slope_of(self._plain, [local(materialize(x)) for x in leaves], states))
        return self.first(weights)

    def _own(self, leaf: Leaf) -> Leaf:
        """Returns a client's own array; of one that is also on other clients' devices a copy."""
        if isinstance(leaf, Replica):
            return leaf.own
        is_elsewhere = is_global(leaf) and not leaf.sharding.device_set <= set(self.clients.devices.mesh.devices.flat)
        return local(leaf) if is_elsewhere else leaf


class Weights(Mapping[int, Array]):
    """Input -> leaf as an ordinary array, its rows in order and up to date. Each is made when it is read."""

    def __init__(self, leaves: Mapping[int, Leaf]) -> None:
        self._leaves = leaves

    def but(self, new: Mapping[int, Array]) -> Weights:
        return Weights({**self._leaves, **new})

    def __getitem__(self, k: int) -> Array:
        leaf = self._leaves[k]
        return leaf.read() if isinstance(leaf, TableLeaf) else jnp.asarray(leaf)

    def __iter__(self) -> Iterator[int]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
