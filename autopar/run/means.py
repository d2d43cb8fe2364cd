"""`MeansRunner`: means of replicas' weights behind a client's steps (`autopar.sync.Average`, `Hybrid`, `DPSGD`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.clients import Clients
from autopar.errors import CheckpointError
from autopar.ir.ring import Ring
from autopar.ir.sync_plan import SyncPlan
from autopar.run.replicas import ReplicaRunner, Weights
from autopar.sync import Replicated
from autopar.tables.kinds import copied
from autopar.tables.replica import OnItsWay, Replica, Replicas, Rows, moved

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
      fragments: Of each fragment the inputs that are its weights.
      mode: What other steps must have in common with this one to go on with its replicas.
    """

    def __init__(self, sync: Replicated, plan: SyncPlan, fragments: Sequence[Sequence[int]], mode: str) -> None:
        self._sync, self._plan, self._fragments, self._mode = sync, plan, fragments, mode
        #: All inputs that are averaged.
        self.weights = [k for fragment in fragments for k in fragment]
        self._outer = None if sync.outer is None else jax.jit(self._updated)

    @property
    def in_place(self) -> bool:
        """Whether nobody reads what was sent, once there is a mean of it."""
        return self._outer is None and not self._plan.delay

    @property
    def is_beside(self) -> bool:
        """Whether weights are on their way while the next step updates them in place. That would wait for whoever reads
        them, so copies are sent; of tables by rows these are all that is kept."""
        return self._outer is None and self._plan.delay > 0

    def begin(self, clients: Clients, weights: Mapping[int, Array]) -> Replicas:
        """Returns what replicas share before the first step. `weights`: input -> as all clients have it."""
        if self._sync.outer is None:
            return Replicas(clients, self._mode)
        anchors = {k: copied(clients.placed(weights[k])) for k in self.weights}
        outer = {n: self._sync.outer.init(_picked(anchors, some)) for n, some in enumerate(self._fragments)}
        return Replicas(clients, self._mode, anchors=anchors, outer=outer)

    def resumed(self, clients: Clients, shared: Mapping[str, Array]) -> Replicas:
        """Returns what replicas share, of what a checkpoint has of that (`Replicas.shared`).

        Raises:
          CheckpointError: it was saved by another way.
        """
        arrays = {k: jnp.asarray(shared[name]) for k in self.weights if (name := f"anchors/{k}") in shared}
        known = len(arrays) == (0 if self._outer is None else len(self.weights))
        begun = self.begin(clients, arrays) if known else Replicas(clients, self._mode)
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

    def arrived(self, replicas: Replicas, weights: Mapping[int, Array]) -> tuple[Replicas, dict[int, Array]]:
        """Returns what replicas share once means that are due are merged, and the weights that this made."""
        due = {n: way for n, way in replicas.pending.items() if way.due <= replicas.steps}
        new = {k: moved(weights[k], way.sent[k], way.new[k]) for n, way in due.items() for k in self._fragments[n]}
        pending = {n: way for n, way in replicas.pending.items() if n not in due}
        return dataclasses.replace(replicas, pending=pending), new

    def sent(self, replicas: Replicas, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Returns what a client sends behind its step: weights of the fragments whose turn it is, or how far they went
        from where all were."""
        due = [k for n in self._plan.due(replicas.steps) for k in self._fragments[n]]
        if self._sync.outer is None:
            return {k: weights[k] for k in due}
        return dict(zip(due, _differences([replicas.anchors[k] for k in due], [weights[k] for k in due]), strict=True))

    @property
    def is_ring(self) -> bool:
        """Whether a mean is of two clients."""
        return self._sync.is_ring

    def turn(self, replicas: Replicas) -> int | None:
        """Returns the turn of the ring in which a mean of two is taken; None: it is of all clients."""
        return replicas.steps if self.is_ring else None

    def partners(self, client: int, replicas: Replicas, clients: int) -> Sequence[int]:
        """Returns the clients whose mean one of them takes."""
        turn = self.turn(replicas)
        return range(clients) if turn is None or clients == 1 else [client, Ring(clients).neighbor(client, turn)]

    def merged(
        self,
        replicas: Replicas,
        weights: Mapping[int, Array],
        sent: Mapping[int, Array | Rows],
        means: Mapping[int, Array | Rows],
    ) -> tuple[Replicas, dict[int, Array]]:
        """Returns what replicas share from now on, and the weights that became others. `means`: of what was sent."""
        anchors, outer, pending = dict(replicas.anchors), dict(replicas.outer), dict(replicas.pending)
        new: dict[int, Array] = {}
        for n in self._plan.due(replicas.steps):
            some = self._fragments[n]
            made = _picked(means, some)
            if self._outer is not None:
                made, outer[n] = self._outer(made, outer[n], _picked(anchors, some))
                anchors |= made
            if self._plan.delay:
                began = _picked(sent, some) if self._outer is None else _picked(weights, some, copied)
                pending[n] = OnItsWay(replicas.steps + self._plan.delay, began, made)
            else:
                new |= _picked(made, some, copied) if self._outer is not None else made
        return dataclasses.replace(replicas, anchors=anchors, outer=outer, pending=pending), new

    def _updated(self, gradients: Mapping[int, Array], state: Any, weights: Mapping[int, Array]) -> Any:
        assert self._sync.outer is not None, "there is an outer optimizer"
        updates, state = self._sync.outer.update(gradients, state, weights)
        return jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates), state


def _picked(arrays: Mapping[int, Array], some: Sequence[int], of: Callable[[Array], Array] = lambda x: x) -> Any:
    return {k: of(arrays[k]) for k in some}


@jax.jit
def _differences(anchors: Sequence[Array], weights: Sequence[Array]) -> Sequence[Array]:
    return [a - w for a, w in zip(anchors, weights, strict=True)]


class MeansRunner(ReplicaRunner):
    """Calls a client's own step, and averages replicas where the plan says so."""

    @functools.cached_property
    def averaging(self) -> Averaging:
        """Says what happens to weights behind a step."""
        return Averaging(self._sync, self._plan, self._fragments, self.mode)

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        bits = {name: saved[name] for name in saved if name.startswith(_TOUCHED)}
        shared = {name: saved[name] for name in saved if name not in bits}
        touched = {
            k: self.touched.of_bits(k, x)
            for name, x in bits.items()
            if (k := int(name[len(_TOUCHED) :])) in self.touched
        }
        return dataclasses.replace(self.averaging.resumed(self.clients, shared), touched=touched)

    def _first(self, weights: Mapping[int, Array]) -> Replicas:
        replicas = self.averaging.begin(self.clients, weights)
        return dataclasses.replace(replicas, touched=self.touched.none(self.weights))

    def _before(self, replicas: Replicas, leaves: Sequence[Any], own: Sequence[Any]) -> Replicas:
        kept = {k: some for k, some in replicas.touched.items() if isinstance(leaves[k], Replica) or not replicas.steps}
        return dataclasses.replace(replicas, touched=self.touched.after(kept, own))

    def _behind(self, replicas: Replicas, results: Sequence[Any]) -> tuple[Replicas, dict[int, Array]]:
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        weights = Weights({k: results[self._new_states[k]] for k in self.weights})
        replicas, arrived = self.averaging.arrived(replicas, weights)
        now = weights.but(arrived)
        sent = self.averaging.sent(replicas, now)
        replicas, sent, means = self._means(replicas, sent)
        replicas, new = self.averaging.merged(replicas, now, sent, means)
        return replicas, arrived | new

    def _means(
        self, replicas: Replicas, sent: Mapping[int, Array]
    ) -> tuple[Replicas, Mapping[int, Array | Rows], dict[int, Array | Rows]]:
        """Returns what replicas share, what is kept of what clients send, and the mean of that: of some tables the rows
        that any touched."""
        tables = [k for k in sent if k in self.touched]
        bits = [jnp.asarray(replicas.touched[k].bits) for k in tables]
        unions = zip(tables, self.clients.union(bits), strict=True)
        rows = {k: some for k, union in unions if (some := self.touched.rows(k, np.asarray(union))) is not None}
        is_beside = self.averaging.is_beside
        kept: dict[int, Any] = {k: copied(x) if is_beside and k not in rows else x for k, x in sent.items()}
        parts = [self.touched.picked(k, x, rows[k]) if k in rows else x for k, x in kept.items()]
        means: dict[int, Any] = dict(zip(kept, self.clients.mean(parts, self.averaging.turn(replicas)), strict=True))
        for (k, x), part in zip(sent.items(), parts, strict=True):
            if k in rows and is_beside:
                kept[k], means[k] = (self.touched.rows_of(k, rows[k], each) for each in (part, means[k]))
            elif k in rows:
                means[k] = self.touched.put(k, x, rows[k], means[k], in_place=self.averaging.in_place)
        if not self.averaging.is_ring:
            replicas = dataclasses.replace(replicas, touched={**replicas.touched, **self.touched.none(sent)})
        return replicas, kept, means
