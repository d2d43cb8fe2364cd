"""`Topology`: which clients average their weights with which others, and when (`autopar.sync`).

Processes, replays and simulations ask it. Another one is a subclass in a file of its own, and a line of
`ir.plan.TOPOLOGIES`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopar.errors import ArgumentsError
from autopar.ir.figures import wire_bytes

_FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class Topology(abc.ABC):
    """Who averages with whom. Whoever is somebody's neighbor in a turn has it as a neighbor, too."""

    clients: int
    period: ClassVar[int] = 1  #: Turns after which all have the same neighbors again.
    wanted: ClassVar[str] = "another number"  #: The numbers of clients that there can be, in words.
    #: What becomes of a client's weights ("they and ..."), and who waits for whom, in words.
    averages: ClassVar[tuple[str, str]] = ("", "")

    @abc.abstractmethod
    def neighbors(self, client: int, turn: int) -> Sequence[int]:
        """Returns whom a client, one of several, averages with in a turn; as many for each client."""

    @property
    @abc.abstractmethod
    def rounds(self) -> int:
        """Returns in how many turns a change of one client has come to all, to the last bit of a float32."""

    @property
    def problem(self) -> str:
        """Returns why so many clients can't be neighbors; "" if they can. One alone has none, and needs none."""
        return ""

    def check(self, name: str, remedy: str) -> None:
        """Raises an `ArgumentsError` if so many clients can't be neighbors.

        `name`: what asks for it; `remedy`: what to do, "{}" being `wanted`.
        """
        if self.problem:
            raise ArgumentsError(f"{name}: {self.problem}. {remedy.format(self.wanted)}")

    def partners(self, client: int, turn: int) -> Sequence[int]:
        """Returns the clients whose weights' mean a client takes, in the order in which they are added up."""
        return [client, *(self.neighbors(client, turn) if self.clients > 1 else ())]

    def sent_bytes(self, size: float) -> float:
        """Returns the bytes that a client sends in a turn, of so many that are averaged."""
        return size * (len(self.partners(0, 0)) - 1)

    # --- where nobody waits: every second client asks one neighbor in a turn, and the others answer ---

    def is_active(self, client: int) -> bool:
        """Says whether a client asks its neighbors, and isn't asked."""
        return client % 2 == 0

    @property
    def passives(self) -> list[int]:
        """Returns the clients that are asked."""
        return [c for c in range(self.clients) if not self.is_active(c)]

    def server(self, client: int) -> int:
        """Returns the number of a passive client among these."""
        return client // 2

    def number(self, client: int, turn: int) -> int:
        """Returns which exchange of an active client with its neighbor of that turn it is, from 0."""
        around = [self.neighbors(client, t) == self.neighbors(client, turn) for t in range(self.period)]
        rounds, rest = divmod(turn, self.period)
        return rounds * sum(around) + sum(around[:rest])


@dataclass(frozen=True, slots=True)
class Everyone(Topology):
    """All clients average at once."""

    @property
    def rounds(self) -> int:
        return 1

    def neighbors(self, client: int, turn: int) -> Sequence[int]:
        return [c for c in range(self.clients) if c != client]

    def partners(self, client: int, turn: int) -> Sequence[int]:
        return range(self.clients)

    def sent_bytes(self, size: float) -> float:
        return wire_bytes("all-reduce", self.clients, size)


@dataclass(frozen=True, slots=True)
class Ring(Topology):
    """A client averages with its left and its right neighbor in turn.

    The ring is even, so that every second client can be active, and all neighbors of an active one passive: who waits
    for an answer is never waited for (Zhang et al., "Distributed deep learning strategies for automatic speech
    recognition", section 3.2).
    """

    period = 2
    wanted = "an even number"
    averages = (
        "those of the left or the right neighbour, in turn, become the mean of both",
        "these two wait for each other",
    )

    def neighbors(self, client: int, turn: int) -> Sequence[int]:
        side = 1 if turn % 2 == client % 2 else -1
        return [(client + side) % self.clients]

    @property
    def rounds(self) -> int:
        """Returns it: two turns leave cos(2 pi/C)^2 of what clients differ by, and one turn nothing of what two do."""
        left = math.cos(2 * math.pi / self.clients) ** 2
        if self.clients == 2 or left < _FLOAT32_EPS:
            return min(self.clients, 4) // 2
        return 2 * math.ceil(math.log(_FLOAT32_EPS) / math.log(left))

    @property
    def problem(self) -> str:
        odd = "clients make an odd ring: two adjacent ones would ask each other, or one would have no partner"
        return f"{self.clients} {odd}" if self.clients > 1 and self.clients % 2 else ""
