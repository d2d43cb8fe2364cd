"""`Service`: ranks send each other requests while both go on with their work.

A thread makes all MPI calls, on communicators of its own: it takes messages, has the registered handler answer them,
and hands on replies. So a rank answers while its main thread is inside a compiled program, which has released Python's
lock. Objects travel by pickle's protocol 5, with arrays out of band, without a copy.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autopar.errors import AutoparError
from autopar.jax_types import Comm, Sent
from autopar.mpi.world import World, job

#: Takes a rank's message; returns the replies that are due now, each with its rank.
Handler = Callable[[Any], list[tuple[int, Any]]]


class Opening(Protocol):
    """Tells a dedicated server how to answer messages. It is sent by pickle."""

    def handler(self) -> Handler: ...


#: Seconds between two looks for messages, at least and at most, and as a part of the time since the last message.
_PAUSE_S, _LONGEST_S, _GROWTH = 50e-6, 2e-3, 0.15
#: Seconds after which a waiting thread looks whether the service has failed.
_LOOK_S = 0.5


class Service:
    """Messages of this rank, and those that it answers. Collective to make.

    Attributes:
      rank, size: This rank's number in the job, and the number of ranks.
      servers: How many ranks, the last ones, are dedicated servers. They have no thread: their main thread `serve`s.
    """

    def __init__(self, here: World) -> None:
        self._handlers: list[Handler | None] = []
        #: Handlers of a dedicated server, by number.
        self._opened: dict[int, Handler] = {}
        self._released: Counter[int] = Counter()
        self._answering = threading.Lock()
        self._replies: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self._early: dict[tuple[int, int], deque[Any]] = {}
        self._outgoing: deque[tuple[int, Any]] = deque()
        self._woken, self._ends = threading.Event(), False
        self._failure: Exception | None = None
        self.rank, self.size, self.servers = here.rank, here.size, here.servers
        self._thread: threading.Thread | None = None
        self._comm: Comm = None
        if here.comm is None:
            return
        from mpi4py.util import pkl5

        self._comm = pkl5.Intracomm(here.comm.Dup())
        if here.is_server:
            return
        self._thread = threading.Thread(target=self._serve, name="autopar service", daemon=True)
        self._thread.start()

    @property
    def first_server(self) -> int:
        """The rank of the first server. Servers that are threads in workers are on the first ranks."""
        return self.size - self.servers if self.servers else 0

    def register(self, handler: Handler | None) -> int:
        """Registers a handler until all ranks `release` it; returns its number. None: this rank is asked nothing.

        All register in the same order, and none sends before all have.
        """
        self._handlers.append(handler)
        return len(self._handlers) - 1

    def open(self, number: int, rank: int, opening: Opening) -> None:
        """Makes a dedicated server answer messages from now on, which it confirms by a reply."""
        self._post(rank, (number, "open", opening))

    def release(self, number: int, farewells: Sequence[tuple[int, Any]] = ()) -> None:
        """Says, at any time and from any thread, that this rank asks no more. `farewells`: last messages, with their
        ranks, which aren't answered."""
        if self._thread is None:
            self._handlers[number] = None
        else:  # a garbage collection may call this in the middle of anything: take no lock
            self._outgoing.extend((rank, (number, "ask", message)) for rank, message in farewells)
            self._outgoing.extend((rank, (number, "release", None)) for rank in range(self.size))

    def send(self, number: int, rank: int, message: Sent) -> None:
        """Sends a message to a rank's handler. Messages to one handler arrive in order. Arrays mustn't change."""
        if rank == self.rank:
            self._answer(number, message)
        else:
            self._post(rank, (number, "ask", message))

    def receive(self, number: int, rank: int) -> Sent:
        """Waits for the next reply of a rank's handler; raises AutoparError if this rank's own service failed."""
        wanted = (number, rank)
        while not (known := self._early.get(wanted)):
            try:
                number_, rank_, reply = self._replies.get(timeout=_LOOK_S)
                self._early.setdefault((number_, rank_), deque()).append(reply)
            except queue.Empty:
                pass
            if self._failure is not None and not self._early.get(wanted):
                raise AutoparError(f"rank {self.rank} can't answer others: {self._failure}") from self._failure
        return known.popleft()

    def stop(self) -> None:
        """Ends the thread, when all ranks do. Nobody may send any more. Collective."""
        self._ends = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Answers messages in this thread, until it `is_over` on all ranks. Collective, with their `stop`."""
        self._exchange(is_over)

    def _answer(self, number: int, message: Sent) -> None:
        with self._answering:
            handler = self._opened[number] if number in self._opened else self._handlers[number]
            assert handler is not None, "only those who haven't released it ask"
            replies = handler(message)
            for rank, reply in replies:
                if rank == self.rank:
                    self._replies.put((number, self.rank, reply))
                else:
                    self._post(rank, (number, "reply", reply))

    def _take(self, source: int, number: int, kind: str, content: Sent) -> None:
        if kind == "reply":
            self._replies.put((number, source, content))
        elif kind == "ask":
            self._answer(number, content)
        elif kind == "open":
            self._opened[number] = content.handler()
            self._post(source, (number, "reply", None))
        else:
            self._released[number] += 1
            if self._released[number] == self.size - self.servers:
                self._forget(number)

    def _forget(self, number: int) -> None:
        self._opened.pop(number, None)
        if number < len(self._handlers):
            self._handlers[number] = None

    def _post(self, rank: int, message: Sent) -> None:
        if self._comm is None:
            self._take(rank, *message)
            return
        self._outgoing.append((rank, message))
        self._woken.set()

    def _serve(self) -> None:
        try:
            self._exchange(lambda: self._ends)
        except Exception as error:
            self._failure = error
            raise  # the thread's hook reports it and ends the job

    def _exchange(self, is_over: Callable[[], bool]) -> None:
        """Takes and sends messages until all ranks end."""
        from mpi4py import MPI

        status, sending, last, all_end = MPI.Status(), [], time.monotonic(), None
        while all_end is None or not all_end.Test():
            is_idle = True
            if all_end is None and not self._outgoing and not sending and is_over():
                all_end = self._comm.Ibarrier()  # until all have received what was sent to them
            while self._outgoing:
                rank, message = self._outgoing.popleft()
                if rank == self.rank:
                    self._take(rank, *message)
                else:
                    sending.append(self._comm.isend(message, rank))
                is_idle = False
            # The source is named: over TCP (UCX) mpich 5.0.2 loses messages to receives from any source, for good.
            while self._comm.Iprobe(status=status):
                source = status.Get_source()
                self._take(source, *self._comm.recv(source=source))
                is_idle = False
            sending = [request for request in sending if not request.test()[0]]
            now = time.monotonic()
            if not is_idle:
                last = now
                continue
            pause = min(max(_PAUSE_S, _GROWTH * (now - last)), _LONGEST_S)
            if self._woken.wait(pause):
                self._woken.clear()


@functools.cache
def service() -> Service:
    """Returns this process's service. Collective over the job, the first time."""
    return Service(job())


def stop_service() -> None:
    """Ends this process's service, if it has one, once all ranks are done."""
    if service.cache_info().currsize:
        service().stop()
