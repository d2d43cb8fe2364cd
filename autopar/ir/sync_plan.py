"""Plans of a step that clients train by replicas of their own, or with servers (`autopar.sync`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from autopar.ir.figures import wire_bytes

#: The number of a fragment of the weights: dicts by fragments and by inputs of a step can't be confused.
FragmentIndex = NewType("FragmentIndex", int)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Says how replicas come together.

    Attributes:
      name: The way's, in words.
      clients: C, how many replicas there are.
      every, delay: k and d, in steps.
      outer: Whether an optimizer of its own moves the weights by the mean of what changed.
      fragments: Paths of the weights that are averaged at a time, each part k/p steps after the one before.
      fragment_bytes: Of each part, with whole tables.
      mean_bytes: Of all that is averaged, of tables the touched rows, at most.
      by_rows: Paths of the tables of which the rows are sent that clients have touched since.
      own: Paths of the floating-point leaves of the state that stay each client's own.
      examples: Of a client's minibatch; 0 where that isn't known.
      servers: How many keep a centre, which weights are exchanged with; 0: there is none, and they are averaged.
      alpha: How far an exchange with it pulls.
      slope: eta h, where it was given.
      server_bytes: Of the centre, on each server.
      way: How the user writes it.
      partners: With whom clients exchange weights, as `sync.Replicated` has it.
      nonlinear: Of means in every step, what of the update isn't linear in gradients, with its place; "": nothing is,
        or it isn't known.
      averages_gradients: Whether they are known to be what averaging gradients is.
      server_ranks: Of the processes that keep a centre, and do nothing else; (): they train, too.
    """

    name: str
    clients: int
    every: int
    delay: int
    outer: bool
    fragments: tuple[tuple[str, ...], ...]
    fragment_bytes: tuple[int, ...]
    mean_bytes: int
    by_rows: tuple[str, ...]
    own: tuple[str, ...]
    examples: int
    servers: int = 0
    alpha: float = 0.0
    slope: float | None = None
    server_bytes: tuple[int, ...] = ()
    way: str = "Average()"
    partners: str = "all"
    nonlinear: str = ""
    averages_gradients: bool = False
    server_ranks: tuple[int, ...] = ()

    @property
    def sent_bytes(self) -> float:
        """Bytes that a client sends in a step, on average: 2(C-1)/C of the weights, every k steps. An upper bound where
        touched rows are sent, of which steps have some in common. To a centre or a neighbour all of them."""
        if self.servers:
            return self.mean_bytes / self.every
        if self.partners != "all":
            return self.mean_bytes * (self.clients > 1)
        return wire_bytes("all-reduce", self.clients, self.mean_bytes) / self.every

    def __str__(self) -> str:
        more = f", {len(self.fragments)} fragments" * (len(self.fragments) > 1) + f", {self.delay} late" * bool(
            self.delay
        )
        return f"{self.clients} client{'s' * (self.clients > 1)}, {self.name}, every {self.every}{more}"

    def due(self, step: int) -> Sequence[FragmentIndex]:
        """Returns the fragments whose mean is taken after a step, which are counted from 1."""
        distance = self.every // len(self.fragments)
        due = (k for k in range(len(self.fragments)) if (step - k * distance) % self.every == 0)
        return [FragmentIndex(k) for k in due]


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server keeps some leaves.

    Attributes:
      leaves: Paths of what it keeps, with the place of a piece.
      leaf_bytes: Of these.
      pull_bytes, push_bytes: Of what a worker pulls of it and pushes to it in a step.
      pieces: Paths of leaves of which it keeps a piece -> how much of the leaf that is.
    """

    leaves: tuple[str, ...]
    leaf_bytes: int
    pull_bytes: int
    push_bytes: int
    pieces: Mapping[str, float] = field(default_factory=dict)

    def part_of(self, path: str) -> float:
        """Returns how much of a leaf it keeps."""
        return 1.0 if path in self.leaves else self.pieces.get(path, 0.0)


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """Says how workers train a state that servers keep.

    Attributes:
      name: The way's, in words.
      clients: N, how many workers there are.
      staleness: s, the bound; None: there is none.
      servers: What each of them does.
      by_rows: Paths of the tables of which workers pull rows alone.
      clocks: Paths of leaves that everyone counts by itself.
      examples: Of a worker's minibatch; 0 where that isn't known.
      ranks: Of the servers that are processes of their own; (): they are threads of the workers.
    """

    name: str
    clients: int
    staleness: int | None
    servers: tuple[ServerPlan, ...]
    by_rows: tuple[str, ...]
    clocks: tuple[str, ...]
    examples: int
    ranks: tuple[int, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes that a worker and all servers exchange in a step, those of a server in its own process included."""
        return sum(server.pull_bytes + server.push_bytes for server in self.servers)

    def __str__(self) -> str:
        servers = f"{len(self.servers)} server{'s' * (len(self.servers) > 1)}"
        return f"{self.clients} worker{'s' * (self.clients > 1)}, {servers}, {self.name}"
