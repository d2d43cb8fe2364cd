"""`Link`: a worker's way to the servers, each of them in one of the first processes."""

from __future__ import annotations

import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from autopar.backends.clients import Clients
from autopar.launch.group import everyone
from autopar.launch.progress import PROGRESS
from autopar.mpi.service import Handler, service
from autopar.servers.messages import Kept, Read


class Link:
    """Sends messages to servers, and takes their replies. Collective to make.

    Each process of a worker speaks for it to some of the servers, and tells the others what it was answered. So a
    worker's messages go over the wires of all its machines (MXNET-MPI, section 4).

    Args:
      servers: How many there are.
      serve: Makes what takes messages in a process, of its number.
      clients: The workers; messages name them by number.
      farewell: A message for all servers, once nobody has the link any more; None: there is none.
    """

    def __init__(self, servers: int, serve: Callable[[int], Handler], clients: Clients, farewell: Any = None) -> None:
        self._service, self._clients, self.servers = service(), clients, range(servers)
        here = self._service.rank
        #: Of each server the replies that are still to come.
        self._open: Counter[int] = Counter()
        self._number = self._service.register(self._addressed(serve(here)) if here < servers else None)
        everyone().gather(b"", "servers are there")
        farewells = [(n, farewell) for n in self.servers if farewell is not None and self.speaks_to(n)]
        weakref.finalize(self, self._service.release, self._number, farewells).atexit = False

    @property
    def number(self) -> int:
        """This worker's."""
        return self._clients.own

    @property
    def workers(self) -> int:
        """N."""
        return self._clients.count

    def speaks_to(self, server: int) -> bool:
        """Says whether this process speaks for its worker to a server."""
        return self._clients.speaker(self.number, server) == self._service.rank

    def tell(self, server: int, message: Any) -> None:
        """Send a message of the worker that isn't answered. Its arrays mustn't change any more."""
        if self.speaks_to(server):
            self._service.send(self._number, server, message)

    def request(self, server: int, message: Any) -> None:
        """Send a message of the worker that is answered."""
        if self.speaks_to(server):
            self._request(server, message)

    def drain(self) -> None:
        """Forget replies to a step that was cut short: whoever asks now wants another one."""
        for server in self.servers:
            while self._open[server]:
                self._next(server)

    def receive(self) -> list[Any]:
        """Wait for the next reply of each server. Collective within the worker."""
        all_ = self._clients.said({n: self._next(n) for n in self.servers if self.speaks_to(n)})
        replies = {n: reply for each in all_ for n, reply in each.items()}
        return [replies[n] for n in self.servers]

    def ask(self, server: int, message: Any) -> Any:
        """Send a message and wait for its reply. Collective within the worker."""
        self.request(server, message)
        said = self._clients.said(self._next(server) if self.speaks_to(server) else None)
        return next(reply for reply in said if reply is not None)

    def read(self, server: int, leaf: int) -> Any:
        """Ask a server for a leaf as it is now; this process alone does."""
        self.drain()
        self._request(server, Read(self._service.rank, (leaf,)))
        return self._next(server).leaves[leaf]

    def settled(self, own: Any, resumed: Any = None) -> tuple[list[Kept], Any]:
        """Ask for what each server keeps once all workers' messages are done, and what the first worker says.
        Collective.

        Args:
          own: What this worker says.
          resumed: A message that each worker tells servers then; None: it tells them nothing.
        """
        self.drain()
        here, processes = self._service.rank, everyone()
        for n in filter(self.speaks_to, self.servers):  # whose answer says that all messages before it are done
            self._request(n, Read(here, ()))
            self._next(n)
        with PROGRESS.during("waiting for the others' steps", "waits"):
            processes.gather(b"", "all messages are done")
        mine = None
        if here in self.servers:
            self._request(here, Read(here))
            mine = self._next(here)
        sent = pickle.dumps((mine, own if here == 0 else None))
        all_ = [pickle.loads(x) for x in processes.gather(sent, "what servers keep")]
        if resumed is not None:
            for n in self.servers:
                self.tell(n, resumed)
        return [kept for kept, _ in all_[: len(self.servers)]], all_[0][1]

    def _request(self, server: int, message: Any) -> None:
        self._open[server] += 1
        self._service.send(self._number, server, message)

    def _next(self, server: int) -> Any:
        with PROGRESS.during("waiting for servers", "pulls"):
            reply = self._service.receive(self._number, server)
        self._open[server] -= 1
        return reply

    def _addressed(self, take: Handler) -> Handler:
        """With replies to who speaks for a worker; what was read goes to the process that asked."""
        here, speaker = self._service.rank, self._clients.speaker

        def addressed(message: Any) -> list[tuple[int, Any]]:
            replies = take(message)
            return replies if isinstance(message, Read) else [(speaker(w, here), reply) for w, reply in replies]

        return addressed
