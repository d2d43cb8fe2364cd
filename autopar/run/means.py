"""`MeansRunner`: averages replicas' weights after a client's steps (`autopar.sync.Average`, `Hybrid`, `DPSGD`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import CheckpointError
from autopar.ir.sync_plan import FragmentIndex
from autopar.ir.topology import Everyone, Topology
from autopar.jax_types import Array, Leaf, Pytree
from autopar.run.replicas import ReplicaRunner, Weights
from autopar.tables.kinds import copied
from autopar.tables.replica import OnItsWay, Replica, Replicas, Rows, moved

#: See `MeansRunner.exchange`.
Exchange = Generator[Any, Any, None]

#: Prefix of touched rows' names in a checkpoint.
_TOUCHED = "touched/"


class MeansRunner(ReplicaRunner):
    """Calls a client's own step, and averages replicas when they are due."""

    def exchange(self, replicas: Replicas, weights: Weights) -> Exchange:
        """Yields a client's part of the exchange after a step, without IO. Collectives answer it on processes; in
        `planning.replay_clients` all clients' values are there.

        Yields:
          1. For tables that are sent, the bits of touched rows; the answer is their union over clients.
          2. The arrays to send; the answer is their means.
          3. The new shared state, and the weights that changed.
        """
        due = {n: way for n, way in replicas.on_way.items() if way.due <= replicas.steps}
        new = {k: moved(weights[k], way.sent[k], way.new[k]) for n, way in due.items() for k in self._fragments[n]}
        replicas = dataclasses.replace(replicas, on_way={n: x for n, x in replicas.on_way.items() if n not in due})
        weights = weights.but(new)
        sent = self._sent(replicas, weights)
        tables = [k for k in sent if k in self.touched]
        unions = zip(tables, (yield [replicas.touched[k].bits for k in tables]), strict=True)
        rows = {k: some for k, union in unions if (some := self.touched.rows(k, np.asarray(union))) is not None}
        # Where a mean travels beside the next step, copies are sent: the step would otherwise wait for reads of what it
        # updates in place. Of tables that are sent by rows only these rows are kept.
        is_beside = self._outer is None and self._plan.delay > 0
        kept: dict[int, Leaf] = {k: copied(x) if is_beside and k not in rows else x for k, x in sent.items()}
        parts = [self.touched.picked(k, x, rows[k]) if k in rows else x for k, x in kept.items()]
        means: dict[int, Any] = dict(zip(kept, (yield parts), strict=True))
        for (k, x), part in zip(sent.items(), parts, strict=True):
            if k in rows and is_beside:
                kept[k], means[k] = (self.touched.rows_of(k, rows[k], each) for each in (part, means[k]))
            elif k in rows:
                nobody_reads = self._outer is None and not self._plan.delay
                means[k] = self.touched.put(k, x, rows[k], means[k], in_place=nobody_reads)
        if isinstance(self.topology(self.clients.count), Everyone):
            replicas = dataclasses.replace(replicas, touched={**replicas.touched, **self.touched.none(sent)})
        replicas, merged = self._merged(replicas, weights, kept, means)
        yield replicas, new | merged

    def topology(self, clients: int) -> Topology:
        """Says whose mean each of so many clients takes after a step, counted from 1."""
        return self._plan.topology(clients)

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        bits = {int(name[len(_TOUCHED) :]): saved[name] for name in saved if name.startswith(_TOUCHED)}
        shared = [name for name in saved if not name.startswith(_TOUCHED)]
        arrays = {k: jnp.asarray(saved[name]) for k in self.weights if (name := f"anchors/{k}") in saved}
        known = len(arrays) == (0 if self._outer is None else len(self.weights))
        begun = self.first(arrays) if known else Replicas(self.clients, self.mode)
        if not known or [*begun.shared] != shared:
            raise CheckpointError(
                "the replicas were saved by a step with another outer optimizer or other fragments: restore them by a "
                "step with the same sync=, or leave step= out to have their mean"
            )

        def placed(n: FragmentIndex, state: Pytree) -> Leaf:
            names = [f"outer/{n}/{i}" for i in range(len(jax.tree.leaves(state)))]
            leaves = [self.clients.placed(jnp.asarray(saved[name])) for name in names]
            return jax.tree.unflatten(jax.tree.structure(state), leaves)

        outer = {n: placed(n, state) for n, state in begun.outer.items()}
        touched = {k: self.touched.of_bits(k, x) for k, x in bits.items() if k in self.touched}
        return dataclasses.replace(begun, steps=int(saved["steps"]), outer=outer, touched=touched)

    def first(self, weights: Mapping[int, Array]) -> Replicas:
        touched = self.touched.none(self.weights)
        if self._sync.outer is None:
            return Replicas(self.clients, self.mode, touched=touched)
        anchors = {k: copied(self.clients.placed(weights[k])) for k in self.weights}
        outer = {
            FragmentIndex(n): self._sync.outer.init(_picked(anchors, some)) for n, some in enumerate(self._fragments)
        }
        return Replicas(self.clients, self.mode, anchors=anchors, outer=outer, touched=touched)

    def _before(self, replicas: Replicas, leaves: Sequence[Leaf], own: Sequence[Leaf]) -> Replicas:
        kept = {k: some for k, some in replicas.touched.items() if isinstance(leaves[k], Replica) or not replicas.steps}
        return dataclasses.replace(replicas, touched=self.touched.after(kept, own))

    def _after(self, replicas: Replicas, results: Sequence[Leaf]) -> tuple[Replicas, dict[int, Array]]:
        replicas = dataclasses.replace(replicas, steps=replicas.steps + 1)
        exchange = self.exchange(replicas, Weights({k: results[self._new_states[k]] for k in self.weights}))
        unions = self.clients.union([jnp.asarray(bits) for bits in next(exchange)])
        means = self.clients.mean(exchange.send(unions), self.topology(self.clients.count), replicas.steps)
        return exchange.send(means)

    def _sent(self, replicas: Replicas, weights: Mapping[int, Array]) -> dict[int, Array]:
        """Returns the due fragments' weights, or with an outer optimizer their differences from the anchors."""
        due = [k for n in self._plan.due(replicas.steps) for k in self._fragments[n]]
        if self._sync.outer is None:
            return {k: weights[k] for k in due}
        return dict(zip(due, _differences([replicas.anchors[k] for k in due], [weights[k] for k in due]), strict=True))

    def _merged(
        self,
        replicas: Replicas,
        weights: Mapping[int, Array],
        sent: Mapping[int, Array | Rows],
        means: Mapping[int, Array | Rows],
    ) -> tuple[Replicas, dict[int, Array]]:
        """Returns the new shared state and the weights that changed. `means` are those of `sent`."""
        anchors, outer, on_way = dict(replicas.anchors), dict(replicas.outer), dict(replicas.on_way)
        new: dict[int, Array] = {}
        for n in self._plan.due(replicas.steps):
            some = self._fragments[n]
            made = _picked(means, some)
            if self._outer is not None:
                made, outer[n] = self._outer(made, outer[n], _picked(anchors, some))
                anchors |= made
            if self._plan.delay:
                began = _picked(sent, some) if self._outer is None else _picked(weights, some, copied)
                on_way[n] = OnItsWay(replicas.steps + self._plan.delay, began, made)
            else:
                new |= _picked(made, some, copied) if self._outer is not None else made
        return dataclasses.replace(replicas, anchors=anchors, outer=outer, on_way=on_way), new

    @functools.cached_property
    def _outer(self) -> Callable[..., Leaf] | None:
        """The outer optimizer's step from the anchors, compiled, if there is one."""
        optimizer = self._sync.outer
        if optimizer is None:
            return None

        def update(gradients: Mapping[int, Array], state: Pytree, weights: Mapping[int, Array]) -> Leaf:
            updates, state = optimizer.update(gradients, state, weights)
            return jax.tree.map(lambda w, u: (w + u).astype(w.dtype), weights, updates), state

        return jax.jit(update)


def _picked(arrays: Mapping[int, Array], some: Sequence[int], of: Callable[[Array], Array] = lambda x: x) -> Leaf:
    return {k: of(arrays[k]) for k in some}


@jax.jit
def _differences(anchors: Sequence[Array], weights: Sequence[Array]) -> Sequence[Array]:
    return [a - w for a, w in zip(anchors, weights, strict=True)]
