"""`ReplicaRunner`: calls a client's own step, and averages replicas where the plan says so (`autopar.sync.Average`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.across import is_global, local
from autopar.backends.clients import Clients
from autopar.errors import CheckpointError, StepError
from autopar.ir.program import Program
from autopar.ir.sync_plan import SyncPlan
from autopar.launch.slowness import SLOWNESS
from autopar.run.agreement import check_same_arrays
from autopar.run.runner import Runner
from autopar.run.touched_rows import TouchedRows
from autopar.sync import Average, Elastic
from autopar.tables.kinds import copied
from autopar.tables.leaf import TableLeaf
from autopar.tables.replica import OnItsWay, Replica, Replicas, moved, replicas_of

Array = Any


#: What names of touched rows begin with in a checkpoint.
_TOUCHED = "touched/"


class Averaging:
    """Says what happens to a client's weights behind each of its steps.

    Clients call it together, each with its own weights; `planning.replay_replicas` calls it for all of them in one
    process, one after the other. It is then the same programs, to the bit.

    Args:
      sync: The way that the user chose.
      plan: What was decided of it.
      program: The analysed step.
    """

    def __init__(self, sync: Average | Elastic, plan: SyncPlan, program: Program) -> None:
        self.sync, self._plan = sync, plan
        numbers = {input_.path: k for k, input_ in enumerate(program.inputs) if k in program.new_states}
        #: Of each fragment the inputs that are its weights.
        self.fragments = [[numbers[path] for path in fragment] for fragment in plan.fragments]
        self._outer = None if sync.outer is None else jax.jit(self._updated)

    @property
    def mode(self) -> str:
        """Says what other steps must have in common with this one to go on with its replicas."""
        return f"{self._plan.name} of {self._plan.fragments}"

    @property
    def servers(self) -> int:
        """How many keep a centre."""
        return self._plan.servers

    @property
    def in_place(self) -> bool:
        """Whether nobody reads what was sent, once there is a mean of it."""
        return self._outer is None and not self._plan.delay

    @property
    def weights(self) -> list[int]:
        """All inputs that are averaged."""
        return [k for fragment in self.fragments for k in fragment]

    def begin(self, clients: Clients, weights: Mapping[int, Array]) -> Replicas:
        """Returns what replicas share before the first step. `weights`: input -> as all clients have it."""
        if self.sync.outer is None:
            return Replicas(clients, self.mode)
        anchors = {k: copied(clients.placed(weights[k])) for k in self.weights}
        outer = {n: self.sync.outer.init(_picked(anchors, some)) for n, some in enumerate(self.fragments)}
        return Replicas(clients, self.mode, anchors=anchors, outer=outer)

    def resumed(self, clients: Clients, shared: Mapping[str, Array]) -> Replicas:
        """Returns what replicas share, of what a checkpoint has of that (`Replicas.shared`).

        Raises:
          CheckpointError: it was saved by another way.
        """
        arrays = {k: jnp.asarray(shared[name]) for k in self.weights if (name := f"anchors/{k}") in shared}
        known = len(arrays) == (0 if self._outer is None else len(self.weights))
        begun = self.begin(clients, arrays) if known else Replicas(clients, self.mode)
        begun = dataclasses.replace(begun, steps=int(shared["steps"]))
        if not known or [*begun.shared] != [*shared]:
            raise CheckpointError(
                "the replicas were saved by a step with another outer optimizer or other fragments: restore them by a "
                "step with the same sync=, or leave step= out to have their mean"
            )
        outer = {
            n: jax.tree.unflatten(
                jax.tree.structure(state),
                [clients.placed(jnp.asarray(shared[f"outer/{n}/{i}"])) for i in range(len(jax.tree.leaves(state)))],
            )
            for n, state in begun.outer.items()
        }
        return dataclasses.replace(begun, outer=outer)

    def sent(self, replicas: Replicas, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Returns what a client sends behind its step: weights of the fragments whose turn it is, or how far they went
        from where all were."""
        due = [k for n in self._plan.due(replicas.steps) for k in self.fragments[n]]
        if self.sync.outer is None:
            return {k: weights[k] for k in due}
        return dict(zip(due, _differences([replicas.anchors[k] for k in due], [weights[k] for k in due]), strict=True))

    def merged(
        self, replicas: Replicas, weights: Mapping[int, Array], means: Mapping[int, Array]
    ) -> tuple[Replicas, dict[int, Array]]:
        """Returns what replicas share from now on, and the weights that became others. `means`: of what was sent."""
        anchors, outer, pending = dict(replicas.anchors), dict(replicas.outer), dict(replicas.pending)
        new: dict[int, Array] = {}
        for n in self._plan.due(replicas.steps):
            some = self.fragments[n]
            made = _picked(means, some)
            if self._outer is not None:
                made, outer[n] = self._outer(made, outer[n], _picked(anchors, some))
                anchors |= made
            if self._plan.delay:
                # What one client alone has "on its way" is its own weights, which the next step updates in place.
                new_ones = made if self._outer is not None else _picked(made, some, copied)
                pending[n] = OnItsWay(replicas.steps + self._plan.delay, _picked(weights, some, copied), new_ones)
            else:
                new |= _picked(made, some, copied) if self._outer is not None else made
        for n, way in list(pending.items()):
            if way.due <= replicas.steps:
                del pending[n]
                some = self.fragments[n]
                new |= {k: moved(weights[k], way.sent[k], way.new[k]) for k in some}
        return dataclasses.replace(replicas, anchors=anchors, outer=outer, pending=pending), new

    def _updated(self, gradients: Mapping[int, Array], state: Any, weights: Mapping[int, Array]) -> Any:
        assert self.sync.outer is not None, "there is an outer optimizer"
        updates, state = self.sync.outer.update(gradients, state, weights)
        return jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates), state


def _picked(arrays: Mapping[int, Array], some: Sequence[int], of: Callable[[Array], Array] = lambda x: x) -> Any:
    return {k: of(arrays[k]) for k in some}


@jax.jit
def _differences(anchors: Sequence[Array], weights: Sequence[Array]) -> Sequence[Array]:
    return [a - w for a, w in zip(anchors, weights, strict=True)]


class ReplicaRunner:
    """Calls a client's own step.

    Args:
      inner: Who runs it.
      averaging: What is done between steps.
      touched: Which rows of tables steps touch.
      clients: All of them.
      program: The analysed step.
      out_tree: The structure of its results.
    """

    def __init__(
        self,
        inner: Runner,
        averaging: Averaging,
        touched: TouchedRows,
        clients: Clients,
        program: Program,
        out_tree: Any,
    ) -> None:
        self.inner, self.averaging, self.touched, self.clients = inner, averaging, touched, clients
        self._new_states, self._out_tree = program.new_states, out_tree
        self._name, self._paths = program.name, [input_.path for input_ in program.inputs]

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        """Returns what replicas share, and which rows this client touched, of what a checkpoint has of that."""
        bits = {name: saved[name] for name in saved if name.startswith(_TOUCHED)}
        shared = {name: saved[name] for name in saved if name not in bits}
        touched = {
            k: self.touched.of_bits(k, x)
            for name, x in bits.items()
            if (k := int(name[len(_TOUCHED) :])) in self.touched
        }
        return dataclasses.replace(self.averaging.resumed(self.clients, shared), touched=touched)

    def lower(self) -> Any:
        """A mean over clients is a program of its own."""
        raise StepError("a step with sync= runs in several programs, and so can't be traced into one (lower, jax.jit)")

    def was_exceeded(self) -> bool:
        """Whether an earlier call of this client is known to have exceeded a measured capacity."""
        return self.inner.was_exceeded()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The step's results, of flat arguments: its new state as replicas, and what this client's minibatch gave."""
        replicas = replicas_of(leaves)
        own = [self._own(leaf) for leaf in leaves]
        for k in self._new_states:
            own[k] = self.clients.placed(own[k]) if isinstance(own[k], jax.Array) else own[k]
        if replicas is None:
            replicas = self._begun(own)
        elif replicas.mode != self.averaging.mode:
            raise StepError(
                f"{self._name}: the state's replicas are of another sync=, {replicas.mode}, and this step has "
                f"{self.averaging.mode}. Begin with their mean, autopar.average(state)"
            )
        replicas = self._before(replicas, leaves, own)
        if SLOWNESS.is_on:
            jax.block_until_ready([x for x in own if isinstance(x, jax.Array)])  # a mean, which others may be late for
        with SLOWNESS.computing():
            results = jax.tree.leaves(self.inner(own))
            if SLOWNESS.is_on:
                jax.block_until_ready(results)
        replicas, new = self._behind(replicas, results)
        for k, array in new.items():
            results[self._new_states[k]] = array
        for k, out in self._new_states.items():
            results[out] = Replica(results[out], replicas, k)
        return self._out_tree.unflatten(results)

    def _before(self, replicas: Replicas, leaves: Sequence[Any], own: Sequence[Any]) -> Replicas:
        """What replicas share once a step is about to begin. `leaves`: its flat arguments, `own`: as it gets them."""
        kept = {k: some for k, some in replicas.touched.items() if isinstance(leaves[k], Replica) or not replicas.steps}
        return dataclasses.replace(replicas, touched=self.touched.after(kept, own))

    def _behind(self, replicas: Replicas, results: Sequence[Any]) -> tuple[Replicas, dict[int, Array]]:
        """What replicas share behind a step, and the weights that aren't those that it returned."""
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        weights = Weights({k: results[self._new_states[k]] for k in self.averaging.weights})
        sent = self.averaging.sent(replicas, weights)
        replicas, means = self._means(replicas, sent)
        return self.averaging.merged(replicas, weights, means)

    def _begun(self, leaves: Sequence[Any]) -> Replicas:
        """Returns what replicas share before the first step with ordinary arrays, if all have the same. Collective.

        Raises:
          StateError: they aren't the same.
        """
        weights = Weights(dict(enumerate(leaves)))
        if self.clients.count > 1:
            mine = {self._paths[k]: local(weights[k]) for k in self.averaging.weights}
            check_same_arrays(self.clients.processes, self._name, mine)
        replicas = self.averaging.begin(self.clients, weights)
        return dataclasses.replace(replicas, touched=self.touched.none(self.averaging.weights))

    def _own(self, leaf: Any) -> Any:
        """What a client's step is given: of an array over devices of other clients, too, a copy."""
        if isinstance(leaf, Replica):
            return leaf.own
        is_elsewhere = is_global(leaf) and not leaf.sharding.device_set <= set(self.clients.devices.mesh.devices.flat)
        return local(leaf) if is_elsewhere else leaf

    def _means(self, replicas: Replicas, sent: Mapping[int, Array]) -> tuple[Replicas, dict[int, Array]]:
        """What replicas share, and the mean of what clients send: of some tables the rows that any of them touched."""
        tables = [k for k in sent if k in self.touched]
        bits = [jnp.asarray(replicas.touched[k].bits) for k in tables]
        unions = zip(tables, self.clients.union(bits), strict=True)
        rows = {k: some for k, union in unions if (some := self.touched.rows(k, np.asarray(union))) is not None}
        parts = [self.touched.picked(k, x, rows[k]) if k in rows else x for k, x in sent.items()]
        means = dict(zip(sent, self.clients.mean(parts), strict=True))
        for k, some in rows.items():
            means[k] = self.touched.put(k, sent[k], some, means[k], in_place=self.averaging.in_place)
        return dataclasses.replace(replicas, touched={**replicas.touched, **self.touched.none(sent)}), means


class Weights(Mapping[int, Array]):
    """Input -> a leaf as an ordinary array, its rows in their order, all of them up to date; made when it is read."""

    def __init__(self, leaves: Mapping[int, Any]) -> None:
        self._leaves = leaves

    def __getitem__(self, k: int) -> Array:
        leaf = self._leaves[k]
        return leaf.read() if isinstance(leaf, TableLeaf) else jnp.asarray(leaf)

    def __iter__(self) -> Iterator[int]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
