"""Messages between workers and servers, and the recipe of a server that answers them (`Spec`)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar import jax_compat
from autopar.jax_types import Array, Sent
from autopar.launch.progress import PROGRESS
from autopar.mpi.service import Handler


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Begins a worker's step (numbered from 0): answered by `Pulled`, once it may begin. `ids`: of the rows that it
    needs."""

    worker: int
    step: int
    ids: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Push:
    """The gradient of a worker's minibatch, for a server to apply. Not answered."""

    worker: int
    step: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A worker's weights, to be pulled to a centre: answered by `Pulled`, with the moves. `step`: counts its exchanges
    from 0."""

    worker: int
    step: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A passive client's weights as its step (numbered from 0) made them: answered by `Pulled`, with what they are
    now."""

    worker: int
    step: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker pushes nothing before it pulls again: nobody needs to wait for it. Not answered."""

    worker: int


@dataclass(frozen=True, slots=True)
class Return:
    """All workers are waited for again, after all have left. Not answered."""

    worker: int


class OfProcess:
    """A message of a process for itself: `worker` is the number of the process, which is answered."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Read(OfProcess):
    """Asks for what a server keeps: answered by `Kept`. `leaves`: numbers of the step's inputs; None: all, with clocks
    and events."""

    worker: int
    leaves: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """Values after all pushes up to a version, or an exchange's moves of weights at that version."""

    version: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Kept:
    """A server's leaves and clocks by number of the step's input, and its `Timeline` events, int64[n, 3]."""

    leaves: dict[int, Array]
    clocks: dict[int, Array]
    events: np.ndarray


Message = Pull | Push | Exchange | Stepped | Leave | Return | Read
Reply = Pulled | Kept


# --- the recipe of a server, in a worker's process or in a process of its own ---


class Spec(abc.ABC):
    """The recipe of a server."""

    @abc.abstractmethod
    def handler(self) -> Handler:
        """Makes the handler of the server's messages, in this process; replies go to workers by number."""

    def portable(self) -> Spec:
        """Returns a spec that another process can make the same server of."""
        return self


@dataclass(frozen=True, slots=True)
class Opening:
    """Makes a process a dedicated server (`autopar.mpi.service.Opening`)."""

    spec: Spec  #: A portable spec.
    speakers: Sequence[int]  #: For each worker the process that speaks for it to this server.
    wide: bool  #: Whether the workers have 64-bit types.

    def handler(self) -> Handler:
        """Makes a handler that computes as it would in the workers' own processes."""
        with jax_compat.enable_x64(self.wide):
            take = addressed(self.spec.handler(), self.speakers, wide=self.wide)

        def handle(message: Sent) -> list[tuple[int, Sent]]:
            with PROGRESS.during("answering workers"):
                return take(message)

        return handle


def addressed(take: Handler, speakers: Sequence[int], *, wide: bool) -> Handler:
    """Returns a handler whose replies go to processes: a worker's speaker, or the process that asked for itself. It
    runs with the workers' types in any thread; `wide`: 64 bits."""

    def handle(message: Sent) -> list[tuple[int, Sent]]:
        with jax_compat.enable_x64(wide):
            replies = take(message)
        return replies if isinstance(message, OfProcess) else [(speakers[w], reply) for w, reply in replies]

    return handle
