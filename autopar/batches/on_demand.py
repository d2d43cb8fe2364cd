"""`BatchesOnDemand`: minibatches for workers that don't wait for each other (`autopar.sync.Async`, `Elastic`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.batches.iterator import Batches
from autopar.batches.sources import Examples
from autopar.interrupts import SIGNALS, Loop
from autopar.jax_types import Json, Pytree
from autopar.launch.group import everyone
from autopar.mpi.service import Handler
from autopar.servers.link import Link
from autopar.servers.messages import Spec
from autopar.servers.sessions import leave_sessions


class BatchesOnDemand(Batches):
    """An iterator over a worker's minibatches: a free worker takes the next one, and waits for no other worker.

    All processes make it, and restore a position, together. Its position counts the minibatches that workers have
    taken; it is exact after a loop, when their steps with these are done.
    """

    def _go_to(self, epoch: int, batch: int, kept: str | None = None) -> None:
        source, epochs = self._examples, self._options.epochs
        if not hasattr(self, "_link"):
            count = None if epochs is None else epochs * source.batches
            clients = self._options.clients
            assert clients is not None, "workers have minibatches of their own"
            self._link = Link([MinibatchServerSpec(count, clients.count)], clients)
        self._next: int | None = None
        everyone().gather(b"", "nobody asks for minibatches")
        if self._link.number == 0:
            self._link.ask(0, Position(0, epoch * source.batches + batch))
        everyone().gather(b"", "a position in the minibatches")

    def __iter__(self) -> Iterator[Pytree]:
        return Loop(self, self._take)

    def __next__(self) -> Pytree:
        while self._next is None and self._take(()):
            pass  # a `for` loop answers the signals
        if self._next is None:
            raise StopIteration
        epoch, batch = divmod(self._next, self._examples.batches)
        self._next = None
        return self._put(next(self._examples.read(epoch, batch)))

    def state(self) -> dict[str, Json]:
        number = self._link.ask(0, Position(self._link.number))
        epoch, batch = divmod(number, self._examples.batches)
        self._position = epoch, batch, None
        return super().state()

    @property
    def _examples(self) -> Examples:
        assert isinstance(self._source, Examples), "minibatches have numbers"
        return self._source

    def _take(self, numbers: Sequence[int]) -> Sequence[int]:
        """Takes the next minibatch, and passes on this process's signals; returns all processes' signals."""
        clients = self._options.clients
        assert clients is not None, "workers have minibatches of their own"
        numbers = sorted({number for each in clients.said(tuple(numbers)) for number in each})
        if self._next is not None and not numbers:
            return ()
        answer = self._link.ask(0, Take(self._link.number, tuple(numbers)))
        self._next = answer.number if self._next is None else self._next
        if answer.number is None and not answer.signals:
            leave_sessions()  # others may have some left, and mustn't wait for this worker
        return answer.signals


# --- the server that gives minibatches of a source to free workers, and passes on signals between them ---


@dataclass(frozen=True, slots=True)
class Take:
    """A worker is free: answered by `NextMinibatch`. `signals`: those that it has received meanwhile."""

    worker: int
    signals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Asks for the next minibatch's number over all epochs, which answers it; sets it first if `number` isn't None."""

    worker: int
    number: int | None = None


@dataclass(frozen=True, slots=True)
class NextMinibatch:
    """A minibatch's number over all epochs; None: there is no more, or signals must be answered before."""

    number: int | None
    signals: Sequence[int]


@dataclass(frozen=True, slots=True)
class MinibatchServerSpec(Spec):
    """Makes a `MinibatchServer`."""

    count: int | None
    workers: int

    def handler(self) -> Handler:
        return MinibatchServer(self.count, self.workers).take


class MinibatchServer:
    """Gives each minibatch to one worker. `count`: minibatches of all epochs; None: no end."""

    def __init__(self, count: int | None, workers: int) -> None:
        self._count, self._workers, self._next = count, range(workers), 0
        self._uninformed: dict[int, set[int]] = {}  #: Signal -> workers that don't know of it yet.
        self._done: set[int] = set()  #: Workers that know that there are no more minibatches.

    def take(self, message: Take | Position) -> list[tuple[int, NextMinibatch | int]]:
        """Returns (worker, answer). Each worker that isn't done gets a signal before its next minibatch."""
        worker = message.worker
        if isinstance(message, Position):
            if message.number is not None:
                self._next = message.number
                self._uninformed.clear()
                self._done.clear()
            return [(worker, self._next)]
        for number in message.signals:
            self._uninformed.setdefault(number, set(self._workers) - self._done)
        signals = [number for number in SIGNALS if worker in self._uninformed.get(number, ())]
        for number in signals:
            self._uninformed[number].discard(worker)
            if not self._uninformed[number]:
                del self._uninformed[number]
        if signals:
            return [(worker, NextMinibatch(None, signals))]
        if self._count is not None and self._next >= self._count:
            self._done.add(worker)
            return [(worker, NextMinibatch(None, ()))]
        self._next += 1
        return [(worker, NextMinibatch(self._next - 1, ()))]
