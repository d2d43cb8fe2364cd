"""`Link`: a worker's way to the servers, each of them in one of the first processes."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any

from autopar.launch.group import everyone
from autopar.launch.progress import PROGRESS
from autopar.mpi.service import service
from autopar.servers.messages import Kept, Read


class Link:
    """Sends messages to servers, and takes their replies. Collective to make.

    Args:
      servers: How many there are.
      serve: Makes what takes messages in a process, of its number.

    Attributes:
      rank, size: This worker's number, and how many there are.
    """

    def __init__(self, servers: int, serve: Callable[[int], Callable[[Any], Any]]) -> None:
        self._service, self.servers = service(), range(servers)
        self.rank, self.size = self._service.rank, self._service.size
        self._number = self._service.register(serve(self.rank) if self.rank < servers else None)
        everyone().gather(b"", "servers are there")
        weakref.finalize(self, self._service.release, self._number)

    def send(self, server: int, message: Any) -> None:
        """Send a message. Its arrays mustn't change any more."""
        self._service.send(self._number, server, message)

    def receive(self, server: int) -> Any:
        """Wait for a server's next reply."""
        with PROGRESS.during("waiting for servers", "pulls"):
            return self._service.receive(self._number, server)

    def settled(self, own: Any) -> tuple[list[Kept], Any]:
        """What each server keeps once all workers' messages are done, and what the first worker says. Collective."""
        for n in self.servers:
            self.send(n, Read(self.rank, ()))
        for n in self.servers:
            self.receive(n)
        processes = everyone()
        with PROGRESS.during("waiting for the others' steps", "waits"):
            processes.gather(b"", "all messages are done")
        mine = None
        if self.rank in self.servers:
            self.send(self.rank, Read(self.rank))
            mine = self.receive(self.rank)
        sent = pickle.dumps((mine, own if self.rank == 0 else None))
        all_ = [pickle.loads(x) for x in processes.gather(sent, "what servers keep")]
        return [kept for kept, _ in all_[: len(self.servers)]], all_[0][1]
