"""`MinibatchServer`: gives minibatches of a source to free workers, and passes on signals between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.interrupts import SIGNALS
from autopar.mpi.service import Handler
from autopar.servers.spec import Spec


@dataclass(frozen=True, slots=True)
class Take:
    """A worker is free: answered by `NextMinibatch`. `signals`: those that it has received meanwhile."""

    worker: int
    signals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Asks for the number of the next minibatch over all epochs, or sets it. Answered by it."""

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
    """Takes one message after the other. Each minibatch goes to one worker. `count`: minibatches of all epochs; None:
    no end."""

    def __init__(self, count: int | None, workers: int) -> None:
        self._count, self._workers, self._next = count, range(workers), 0
        #: Signals -> workers that haven't been told yet; and workers that know that there is no more.
        self._untold: dict[int, set[int]] = {}
        self._done: set[int] = set()

    def take(self, message: Take | Position) -> list[tuple[int, NextMinibatch | int]]:
        """Returns the answer with its worker. All workers that still ask are told of a signal, each before its next
        minibatch."""
        worker = message.worker
        if isinstance(message, Position):
            if message.number is not None:
                self._next = message.number
                self._untold.clear()
                self._done.clear()
            return [(worker, self._next)]
        for number in message.signals:
            self._untold.setdefault(number, set(self._workers) - self._done)
        signals = [number for number in SIGNALS if worker in self._untold.get(number, ())]
        for number in signals:
            self._untold[number].discard(worker)
            if not self._untold[number]:
                del self._untold[number]
        if signals:
            return [(worker, NextMinibatch(None, signals))]
        if self._count is not None and self._next >= self._count:
            self._done.add(worker)
            return [(worker, NextMinibatch(None, ()))]
        self._next += 1
        return [(worker, NextMinibatch(self._next - 1, ()))]
