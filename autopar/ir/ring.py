"""The ring of clients that average their weights with their neighbours in turn (`autopar.sync.ADPSGD`, `DPSGD`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import ArgumentsError

_FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of an even number of clients.

    Every second client is active, and all neighbours of an active one are passive, so no client waits for one that
    waits (Zhang et al., "Distributed deep learning strategies for automatic speech recognition", section 3.2).
    """

    clients: int

    def is_active(self, client: int) -> bool:
        """Returns whether a client asks its neighbours rather than being asked."""
        return client % 2 == 0

    def neighbor(self, client: int, turn: int) -> int:
        """Returns a client's partner in a turn; all clients are paired."""
        side = 1 if turn % 2 == client % 2 else -1
        return (client + side) % self.clients

    @property
    def rounds(self) -> int:
        """Number of turns after which one client's change has come to all, to the last bit of a float32.

        Two turns leave cos(2 pi/C)^2 of the clients' differences; one turn leaves nothing of two clients'.
        """
        left = math.cos(2 * math.pi / self.clients) ** 2
        if self.clients == 2 or left < _FLOAT32_EPS:
            return min(self.clients, 4) // 2
        return 2 * math.ceil(math.log(_FLOAT32_EPS) / math.log(left))

    @property
    def passives(self) -> list[int]:
        """The clients that are asked."""
        return [c for c in range(self.clients) if not self.is_active(c)]

    def server(self, client: int) -> int:
        return client // 2

    def number(self, turn: int) -> int:
        """Returns how many exchanges an active client had with its neighbour of a turn before it."""
        return turn if self.clients == 2 else turn // 2


def check_even(clients: int, name: str, remedy: str) -> None:
    """Checks that the clients make a ring; a single client has no partner, and needs none.

    Args:
      name, remedy: The option that asks for a ring, and what else to do, for the message.

    Raises:
      ArgumentsError: their number is odd.
    """
    if clients > 1 and clients % 2:
        raise ArgumentsError(
            f"{name}: {clients} clients make an odd ring: two adjacent ones would ask each other, or one would have no "
            f"partner. {remedy}"
        )
