"""Plans of a step that clients train on replicas of their own, or with servers (`autopar.sync`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from autopar.ir.topology import Everyone, Ring, Topology

#: Clients that average weights: `sync.Replicated.partners` -> who with whom. "neighbors" don't wait for each other.
TOPOLOGIES: Mapping[str, type[Topology]] = {"all": Everyone, "pairs": Ring, "neighbors": Ring}

#: The number of a fragment of the weights; a type of its own, since dicts are also keyed by input numbers.
FragmentIndex = NewType("FragmentIndex", int)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Says when and how clients average their replicas."""

    name: str  #: The strategy in words; `way` as the user writes it.
    clients: int  #: C, the number of replicas.
    #: k and d, in steps.
    every: int
    delay: int
    outer: bool  #: An outer optimizer moves the weights by the mean change.
    #: Paths of the weights that are averaged together, each fragment k/p steps after the one before.
    fragments: tuple[tuple[str, ...], ...]
    fragment_bytes: tuple[int, ...]  #: Bytes of each fragment, with whole tables.
    mean_bytes: int  #: Bytes of all that is averaged; of tables, at most of the touched rows.
    by_rows: tuple[str, ...]  #: Paths of the tables of which only the rows that clients touched since are sent.
    own: tuple[str, ...]  #: Paths of the floating-point leaves of the state that aren't averaged.
    examples: int  #: Examples of a client's minibatch; 0 if unknown.
    servers: int = 0  #: Number of servers that keep a centre to exchange weights with; 0: weights are averaged.
    alpha: float = 0.0  #: The weight of an exchange with the centre.
    slope: float | None = None  #: eta h, if it was given.
    server_bytes: tuple[int, ...] = ()  #: Bytes of the centre on each server.
    way: str = "Average()"
    partners: str = "all"  #: With whom clients exchange weights, as `sync.Replicated` has it.
    #: With means in every step, the place where the update isn't linear in the gradients; "" if there is none, or none
    #: is known.
    nonlinear: str = ""
    averages_gradients: bool = False  #: The means are known to equal averaging gradients.
    server_ranks: tuple[int, ...] = ()  #: Ranks that only serve; (): servers are threads of processes that train.

    @property
    def sent_bytes(self) -> float:
        """Bytes that a client sends in a step on average, 2(C-1)/C of the weights every k steps.

        An upper bound where touched rows are sent, some of which steps share. To a centre or a neighbour go all
        weights.
        """
        sent = self.mean_bytes if self.servers else self.topology(self.clients).sent_bytes(self.mean_bytes)
        return sent / self.every

    @property
    def asks_neighbors(self) -> bool:
        """Says whether clients average with neighbors without waiting for them."""
        return self.partners == "neighbors"

    def topology(self, clients: int) -> Topology:
        """Says who averages with whom where there are so many clients, and no centre."""
        return TOPOLOGIES[self.partners](clients)

    def __str__(self) -> str:
        more = f", {len(self.fragments)} fragments" * (len(self.fragments) > 1) + f", {self.delay} late" * bool(
            self.delay
        )
        return f"{self.clients} client{'s' * (self.clients > 1)}, {self.name}, every {self.every}{more}"

    def due(self, step: int) -> Sequence[FragmentIndex]:
        """Returns the fragments that are averaged after a step (counted from 1)."""
        distance = self.every // len(self.fragments)
        due = (k for k in range(len(self.fragments)) if (step - k * distance) % self.every == 0)
        return [FragmentIndex(k) for k in due]


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The leaves that a server keeps."""

    leaves: tuple[str, ...]  #: Their paths, with the place of a piece.
    leaf_bytes: int  #: Bytes of the leaves.
    #: Bytes that a worker pulls from it and pushes to it in a step.
    pull_bytes: int
    push_bytes: int
    #: Paths of leaves of which it keeps a piece -> the fraction.
    pieces: Mapping[str, float] = field(default_factory=dict)

    def part_of(self, path: str) -> float:
        """Returns the fraction of a leaf that it keeps."""
        return 1.0 if path in self.leaves else self.pieces.get(path, 0.0)


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """Says how workers train a state that servers keep."""

    name: str  #: The strategy in words.
    clients: int  #: N, the number of workers.
    staleness: int | None  #: s, the bound; None: there is none.
    servers: tuple[ServerPlan, ...]
    by_rows: tuple[str, ...]  #: Paths of the tables of which workers pull only rows.
    clocks: tuple[str, ...]  #: Paths of leaves that every process counts by itself.
    examples: int  #: Examples of a worker's minibatch; 0 if unknown.
    #: Ranks of servers that are processes of their own; (): they are threads of the workers.
    ranks: tuple[int, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes that a worker and all servers exchange in a step, those of a server in its own process included."""
        return sum(server.pull_bytes + server.push_bytes for server in self.servers)

    def __str__(self) -> str:
        servers = f"{len(self.servers)} server{'s' * (len(self.servers) > 1)}"
        return f"{self.clients} worker{'s' * (self.clients > 1)}, {servers}, {self.name}"
