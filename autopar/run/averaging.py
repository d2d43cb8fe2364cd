"""Runners of clients that average their weights: in pairs, without waiting for each other (`autopar.sync.Elastic`,
`ADPSGD`), or over all clients or neighbours at once (`Average`, `Hybrid`, `DPSGD`)."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.global_arrays import local
from autopar.errors import CheckpointError
from autopar.ir.plan import FragmentIndex
from autopar.ir.topology import Everyone, Topology
from autopar.jax_types import Array, Leaf, Pytree
from autopar.protocols import Send, Want, ring_step
from autopar.run.replicas import ReplicaRunner, TouchedRows, Weights
from autopar.servers.center import NeighborSpec
from autopar.servers.sessions import CenterSession, End, ExchangeSession, RingSession, pulled
from autopar.sync import Elastic
from autopar.tables.kinds import copied
from autopar.tables.replica import OnItsWay, Replica, Replicas, Rows, moved


class ExchangeRunner(ReplicaRunner):
    """Runs a client's own step while its weights are exchanged."""

    @abc.abstractmethod
    def _opened(self, replicas: Replicas, weights: Mapping[int, Array]) -> tuple[Replicas, ExchangeSession]:
        """Returns the replicas' shared state and the session that exchanges their weights, opened if necessary."""

    def _before(self, replicas: Replicas, leaves: Sequence[Leaf], own: Sequence[Leaf]) -> Replicas:
        weights = Weights(dict(enumerate(own)))
        replicas, session = self._opened(replicas, weights)
        # Of a leaf that the user put in a replica's place any row may have changed.
        known = {k for k in self.weights if isinstance(leaves[k], Replica) or not replicas.steps}
        session.end.look_up(own, known)
        session.begin(weights, replicas.steps)
        return replicas

    def _after(self, replicas: Replicas, results: Sequence[Leaf]) -> tuple[Replicas, dict[int, Array]]:
        session = replicas.center or replicas.ring
        assert session is not None, "a step has begun"
        weights = Weights({k: results[self._new_states[k]] for k in self.weights})
        return replace(replicas, steps=replicas.steps + 1), session.finish(weights)


class ElasticRunner(ExchangeRunner):
    """Exchanges weights with a centre."""

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        anchors = {k: saved[name] for k in self.weights if (name := f"anchors/{k}") in saved}
        if len(anchors) < len(self.weights):
            raise CheckpointError(
                "the replicas were saved by a step without a centre: restore them by a step with the same sync=, or "
                "leave step= out to have their mean"
            )
        return self._centered(anchors, int(saved["own_steps"][0]))

    def first(self, weights: Mapping[int, Array]) -> Replicas:
        return self._centered(weights, 0)

    def _opened(self, replicas: Replicas, weights: Mapping[int, Array]) -> tuple[Replicas, ExchangeSession]:
        assert replicas.center is not None, "servers keep a centre"
        return replicas, replicas.center

    def _centered(self, weights: Mapping[int, Array], steps: int) -> Replicas:
        sync = self._sync
        assert isinstance(sync, Elastic), "there is a centre"
        first = {k: jnp.asarray(local(weights[k])) for k in self.weights}
        center = CenterSession(first, sync.alpha, sync.interval, self.clients, self._plan.servers)
        return Replicas(self.clients, self.mode, steps, center=center)


class RingRunner(ExchangeRunner):
    """Averages weights with a neighbour in a ring."""

    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        if "own_steps" not in saved:
            raise CheckpointError(
                "the replicas were saved by a step whose clients form no ring: restore them by a step with the same "
                "sync=, or leave step= out to have their mean"
            )
        return Replicas(self.clients, self.mode, int(saved["own_steps"][0]))

    def first(self, weights: Mapping[int, Array]) -> Replicas:
        return Replicas(self.clients, self.mode)

    def _opened(self, replicas: Replicas, weights: Mapping[int, Array]) -> tuple[Replicas, ExchangeSession]:
        if replicas.ring is not None:
            return replicas, replicas.ring
        clients, topology = self.clients, self._plan.topology(self.clients.count)
        end = RingEnd(self.weights, self.touched, topology, clients.own, equal=not replicas.steps)
        here = {k: np.array(local(weights[k])) for k in self.weights}
        ring = RingSession(end, self.weights, {c: end.neighbor(here, c) for c in topology.passives}, clients)
        return replace(replicas, ring=ring), ring


class RingEnd(End):
    """A client's part of its exchanges with neighbours.

    Of a table that is sent by rows, an active client sends the rows that changed since its last exchange with the same
    neighbour: its steps looked them up, or exchanges with the other neighbour changed them.

    Args:
      weights: Indices of the step's inputs that are averaged.
      touched: The tables among them that are sent by rows.
      topology: Which clients average with which.
      own: The client's number.
      equal: Whether all clients have the same weights now.
    """

    def __init__(
        self, weights: Sequence[int], touched: TouchedRows, topology: Topology, own: int, *, equal: bool
    ) -> None:
        self._topology, self._own, self._rows = topology, own, touched
        self._dense = [k for k in weights if k not in touched]
        self._tables = [k for k in weights if k in touched]
        self._partner, self._is_open = 0, not equal
        #: Number of exchanges that began, and of steps that finished.
        self._turns, self._steps = 0, 0
        self._touched: Mapping[int, np.ndarray] = {}
        #: By passive neighbor: rows of each table changed since the last exchange with it.
        self._since: dict[int, dict[int, list[np.ndarray]]] = {
            self._topology.server(c): {k: [] for k in self._tables} for c in self._neighbors(own)
        }

    def neighbor(self, weights: Mapping[int, Array], passive: int) -> NeighborSpec:
        """Returns the recipe of the server that answers for a passive client."""
        axes = {k: self._rows.axis(k) for k in self._tables}
        return NeighborSpec(weights, self._topology.clients, axes, self._neighbors(passive))

    def look_up(self, leaves: Sequence[Leaf], known: Collection[int]) -> None:
        found = self._rows.after(self._rows.none(known), leaves)
        self._touched = {k: some.calls[-1] for k, some in found.items()}

    def step(self, number: int) -> Iterator[Want]:
        self._turns += 1
        return ring_step(self._topology, self._own, self._steps, self._turns - 1)

    def sent(self, want: Send, weights: Mapping[int, Array]) -> Mapping[int, Sequence[Array]]:
        assert want.server is not None, "one client answers"
        rows = self._touched if want.kind == "step" else self._changed(want.server)
        values = [local(weights[k]) for k in self._dense]
        for k in self._tables:
            values += [rows[k], self._picked(k, weights[k], rows[k])]
        return {want.server: values}

    def applied(self, weights: Mapping[int, Array], answers: Sequence[Sequence[Array]]) -> dict[int, Array]:
        (values,), count = answers, len(self._dense)
        dense, is_active = dict(zip(self._dense, values[:count], strict=True)), self._topology.is_active(self._own)
        made = pulled(weights, dense) if is_active else {k: jnp.asarray(x) for k, x in dense.items()}
        for k, indices, rows in zip(self._tables, values[count::2], values[count + 1 :: 2], strict=True):
            if not indices.size:
                continue
            array = weights[k]
            if is_active:
                with np.errstate(all="ignore"):
                    rows = self._picked(k, array, indices) - rows
                for server, known in self._since.items():
                    if server != self._partner:
                        known[k] = [*known[k], indices]
            padded = self._rows.padded(indices)
            made[k] = self._rows.put(k, array, padded, np.resize(rows, (padded.size, *rows.shape[1:])), in_place=True)
        self._is_open, self._steps = False, self._steps + 1
        return made

    def _changed(self, server: int) -> Mapping[int, np.ndarray]:
        """Returns the rows of each table to send to a passive client, and keeps the step's rows for the other
        neighbour."""
        if self._is_open:  # a step was cut short: its answer is lost, and the rows that it changed are unknown
            everything = {k: [self._rows.everything(k)] for k in self._tables}
            self._since = {n: dict(everything) for n in self._since}
        self._partner, self._is_open = server, True
        since = self._since[server]
        rows = {k: np.unique(np.concatenate([np.zeros(0, np.int64), *some])) for k, some in since.items()}
        self._since[server] = {k: [] for k in self._tables}
        for known in self._since.values():
            for k in self._tables:
                known[k] = [*known[k], self._touched[k]]
        return rows

    def _picked(self, k: int, array: Array, indices: np.ndarray) -> np.ndarray:
        return np.asarray(local(self._rows.picked(k, array, self._rows.padded(indices))))[: indices.size]

    def _neighbors(self, client: int) -> list[int]:
        turns = range(self._topology.period)
        return sorted({other for turn in turns for other in self._topology.neighbors(client, turn)})


# --- averages of replicas' weights after a client's steps (`autopar.sync.Average`, `Hybrid`, `DPSGD`) ---


#: See `MeansRunner.exchange`.
Exchange = Generator[Any, Any, None]

#: Prefix of touched rows' names in a checkpoint.
_TOUCHED = "touched/"


class MeansRunner(ReplicaRunner):
    """Calls a client's own step, and averages replicas when they are due."""

    def exchange(self, replicas: Replicas, weights: Weights) -> Exchange:
        """Does a client's part of the exchange after a step, without IO: whoever drives it sends the answers.

        On processes these are results of collectives; `planning.replay_clients` has all clients' values itself.

        Yields:
          1. Bits of the touched rows of tables that are due; the answer is their union over clients.
          2. The arrays to average; the answer is their means.
          3. The new shared state, and the weights that changed.
        """
        due = {n: way for n, way in replicas.on_way.items() if way.due <= replicas.steps}
        new = {k: moved(weights[k], way.sent[k], way.new[k]) for n, way in due.items() for k in self._fragments[n]}
        replicas = replace(replicas, on_way={n: x for n, x in replicas.on_way.items() if n not in due})
        weights = weights.but(new)
        sent = self._sent(replicas, weights)
        tables = [k for k in sent if k in self.touched]
        unions = zip(tables, (yield [replicas.touched[k].bits for k in tables]), strict=True)
        rows = {k: some for k, union in unions if (some := self.touched.rows(k, np.asarray(union))) is not None}
        # If the mean is computed beside the next step, copies are sent: the step would otherwise wait for reads of what
        # it updates in place. Of tables that are sent by rows only these rows are kept.
        is_beside = self._outer is None and self._plan.delay > 0
        kept: dict[int, Leaf] = {k: copied(x) if is_beside and k not in rows else x for k, x in sent.items()}
        parts = [self.touched.picked(k, x, rows[k]) if k in rows else x for k, x in kept.items()]
        means: dict[int, Leaf] = dict(zip(kept, (yield parts), strict=True))
        for (k, x), part in zip(sent.items(), parts, strict=True):
            if k in rows and is_beside:
                kept[k], means[k] = (self.touched.rows_of(k, rows[k], each) for each in (part, means[k]))
            elif k in rows:
                nobody_reads = self._outer is None and not self._plan.delay
                means[k] = self.touched.put(k, x, rows[k], means[k], in_place=nobody_reads)
        if isinstance(self.topology(self.clients.count), Everyone):
            replicas = replace(replicas, touched={**replicas.touched, **self.touched.none(sent)})
        replicas, merged = self._merged(replicas, weights, kept, means)
        yield replicas, new | merged

    def topology(self, clients: int) -> Topology:
        """Returns the topology of so many clients."""
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
        return replace(begun, steps=int(saved["steps"]), outer=outer, touched=touched)

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
        return replace(replicas, touched=self.touched.after(kept, own))

    def _after(self, replicas: Replicas, results: Sequence[Leaf]) -> tuple[Replicas, dict[int, Array]]:
        replicas = replace(replicas, steps=replicas.steps + 1)
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
        """Returns the new shared state, and the weights that changed. `means`: of `sent`."""
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
        return replace(replicas, anchors=anchors, outer=outer, on_way=on_way), new

    @functools.cached_property
    def _outer(self) -> Callable[..., Leaf] | None:
        """The outer optimizer's compiled step from the anchors; None without one."""
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
