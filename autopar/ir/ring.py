"""`Ring`: clients that average their weights with their neighbours' in turn (`autopar.sync.ADPSGD`, `DPSGD`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import ArgumentsError

_FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class Ring:
    """Says who averages with whom.

    The ring is even, so that every second client can be active, and all neighbours of an active one passive: who waits
    for an answer is never waited for (Zhang et al., "Distributed deep learning strategies for automatic speech
    recognition", section 3.2).

    Attributes:
      clients: C, an even number.
    """

    clients: int

    def is_active(self, client: int) -> bool:
        """Says whether a client asks its neighbours, and isn't asked."""
        return client % 2 == 0

    def neighbor(self, client: int, turn: int) -> int:
        """Returns whom a client averages with: its neighbours in turn, so that all have a partner."""
        side = 1 if turn % 2 == client % 2 else -1
        return (client + side) % self.clients

    @property
    def rounds(self) -> int:
        """Returns in how many turns a change of one client has come to all, to the last bit of a float32: two turns
        leave cos(2 pi/C)^2 of what clients differ by, and one turn nothing of what two do."""
        left = math.cos(2 * math.pi / self.clients) ** 2
        if self.clients == 2 or left < _FLOAT32_EPS:
            return min(self.clients, 4) // 2
        return 2 * math.ceil(math.log(_FLOAT32_EPS) / math.log(left))

    @property
    def passives(self) -> list[int]:
        """Returns the clients that are asked."""
        return [c for c in range(self.clients) if not self.is_active(c)]

    def server(self, client: int) -> int:
        """Returns the number of a passive client among these."""
        return client // 2

    def number(self, turn: int) -> int:
        """Returns which exchange of an active client with its neighbour of that turn it is, from 0."""
        return turn if self.clients == 2 else turn // 2


def check_even(clients: int, name: str, remedy: str) -> None:
    """Checks that so many clients make a ring. One alone has no partner, and needs none.

    Args:
      clients: How many.
      name, remedy: What asks for a ring, and what to do where it can't be; for the message.

    Raises:
      ArgumentsError: their number is odd.
    """
    if clients > 1 and clients % 2:
        raise ArgumentsError(
            f"{name}: {clients} clients make an odd ring: two adjacent ones would ask each other, or one would have no "
            f"partner. {remedy}"
        )
