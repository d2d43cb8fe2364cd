"""`Spec`: makes a server, in a worker's process or in a process of its own."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from autopar import jax_compat
from autopar.jax_types import Sent
from autopar.launch.progress import PROGRESS
from autopar.mpi.service import Handler
from autopar.servers.messages import OfProcess


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
    """Makes a process a dedicated server (`autopar.mpi.service.Opening`).

    Attributes:
      spec: A portable spec.
      speakers: For each worker the process that speaks for it to this server.
      wide: Whether the workers have 64-bit types.
    """

    spec: Spec
    speakers: Sequence[int]
    wide: bool

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
