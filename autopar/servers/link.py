"""`Link`: a worker's connection to servers, which are dedicated processes or threads in the first workers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from autopar import jax_compat
from autopar.backends.clients import Clients
from autopar.errors import StepError
from autopar.jax_types import Leaf, Sent
from autopar.launch.group import MpiGroup, everyone
from autopar.launch.progress import PROGRESS
from autopar.mpi.service import service
from autopar.servers.messages import Kept, OfProcess, Opening, Read, Spec, addressed


class Link:
    """Sends messages to servers, and takes their replies. Collective to make.

    Each process of a worker sends its messages to some of the servers (it *speaks to* them), and tells the worker's
    other processes the answers, so that messages use the links of all the worker's machines (MXNET-MPI, section 4).

    Args:
      servers: The recipe of each server, the same in all processes.
      clients: The workers; messages name them by number.
      farewell: A message to all servers once the link is no longer referenced; None: there is none.
      processes: For each server the process that it is a thread of; None: dedicated processes if the job has any.

    Attributes:
      servers: Their numbers.
      own: Servers that this process opens, and reads for all workers.
    """

    def __init__(
        self, servers: Sequence[Spec], clients: Clients, farewell: Sent = None, processes: Sequence[int] | None = None
    ) -> None:
        self._service, self._clients, self.servers = service(), clients, range(len(servers))
        here, group = self._service.rank, everyone()
        #: Whether servers are processes of their own.
        self.is_dedicated = processes is None and self._service.servers > 0
        self._processes = [self._service.first_server + n for n in self.servers] if processes is None else processes
        self.own = self.servers[here :: group.size]
        if not self.is_dedicated:
            self.own = [n for n in self.servers if self._processes[n] == here]
        #: For each server the number of replies that are to come.
        self._open: Counter[int] = Counter()
        speakers = [[clients.speaker(w, n) for w in range(clients.count)] for n in self.servers]
        if self.is_dedicated:
            self._number = self._service.register(None)
            group.together(StepError, lambda: self._open_own(servers, speakers), "servers begin")
        else:
            handlers = [addressed(servers[n].handler(), speakers[n], wide=jax_compat.uses_x64()) for n in self.own]
            self._number = self._service.register(handlers[0] if handlers else None)
        group.gather(b"", "servers are there")
        farewells = [(self._process(n), farewell) for n in self.servers if farewell is not None and self.speaks_to(n)]
        weakref.finalize(self, self._service.release, self._number, farewells).atexit = False

    @property
    def number(self) -> int:
        return self._clients.own

    @property
    def workers(self) -> int:
        return self._clients.count

    def speaks_to(self, server: int) -> bool:
        """Says whether this process speaks for its worker to a server."""
        return self._clients.speaker(self.number, server) == self._service.rank

    def tell(self, server: int, message: Sent) -> None:
        """Sends a message that gets no answer. Its arrays mustn't change afterwards."""
        if self.speaks_to(server):
            self._service.send(self._number, self._process(server), message)

    def request(self, server: int, message: Sent) -> None:
        """Sends a message that gets an answer (`receive`, `answer`)."""
        if self.speaks_to(server):
            self._request(server, message)

    def drain(self) -> None:
        """Takes and drops replies to a step that was cut short."""
        for server in self.servers:
            while self._open[server]:
                self._next(server)

    def receive(self) -> list[Sent]:
        """Waits for the next reply of each server. Collective within the worker."""
        all_ = self._clients.said({n: self._next(n) for n in self.servers if self.speaks_to(n)})
        replies = {n: reply for each in all_ for n, reply in each.items()}
        return [replies[n] for n in self.servers]

    def ask(self, server: int, message: Sent) -> Sent:
        """Sends a message and waits for its reply. Collective within the worker."""
        self.request(server, message)
        return self.answer(server)

    def answer(self, server: int) -> Sent:
        """Waits for the reply of a server. Collective within the worker."""
        said = self._clients.said(self._next(server) if self.speaks_to(server) else None)
        return next(reply for reply in said if reply is not None)

    def read(self, server: int, leaf: int) -> Sent:
        """Asks a server for a leaf's value now, for this process alone."""
        self.drain()
        return self.command(server, Read(self._service.rank, (leaf,))).leaves[leaf]

    def collect(
        self, own: Leaf = None, resumed: Sent = None, leaves: tuple[int, ...] | None = None
    ) -> tuple[list[Kept], Sent]:
        """Returns what each server keeps after all workers' messages, and the first worker's `own`. Collective.

        `own`: this worker's value. `resumed`: a message that each worker sends to all servers afterwards, if any.
        `leaves`: as in `Read`.
        """
        self.finish()
        here, group = self._service.rank, everyone()
        mine = {n: self.command(n, Read(here, leaves)) for n in self.own}
        assert isinstance(group, MpiGroup), "servers need MPI"
        all_ = group.objects((mine, own if here == 0 else None), "what servers keep")
        if resumed is not None:
            for n in self.servers:
                self.tell(n, resumed)
        kept = {n: each for some, _ in all_ for n, each in some.items()}
        return [kept[n] for n in self.servers], all_[0][1]

    def finish(self) -> None:
        """Waits until all workers' messages are done. Collective."""
        self.drain()
        for n in filter(self.speaks_to, self.servers):  # the answer says that all earlier messages are done
            self._request(n, Read(self._service.rank, ()))
            self._next(n)
        with PROGRESS.during("waiting for the others' steps", "waits"):
            everyone().gather(b"", "all messages are done")

    def command(self, server: int, message: OfProcess) -> Sent:
        """Sends a message for this process alone, and waits for its reply."""
        self._request(server, message)
        return self._next(server)

    def _open_own(self, servers: Sequence[Spec], speakers: Sequence[Sequence[int]]) -> None:
        """Opens dedicated servers; raises StepError if their programs can't be sent to them."""
        wide = jax_compat.uses_x64()
        for n in self.own:
            try:
                spec = servers[n].portable()
            except Exception as error:
                raise StepError(
                    f"what server {n} is to run can't be sent to a dedicated one ({error}). Train without launch "
                    "--servers, by servers in the workers"
                ) from error
            self._open[n] += 1
            self._service.open(self._number, self._process(n), Opening(spec, speakers[n], wide))
        for n in self.own:
            self._next(n)

    def _process(self, server: int) -> int:
        return self._processes[server]

    def _request(self, server: int, message: Sent) -> None:
        self._open[server] += 1
        self._service.send(self._number, self._process(server), message)

    def _next(self, server: int) -> Sent:
        with PROGRESS.during("waiting for servers", "pulls"):
            reply = self._service.receive(self._number, self._process(server))
        self._open[server] -= 1
        return reply
