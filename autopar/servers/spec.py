"""`Spec`: says what a server begins with, and makes it in a worker's process, or in one that it has for itself."""

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
    """Says what a server begins with."""

    @abc.abstractmethod
    def handler(self) -> Handler:
        """Makes what takes the server's messages, in this process; replies are for workers, by their number."""

    def portable(self) -> Spec:
        """Returns a spec with which another process makes the same."""
        return self


@dataclass(frozen=True, slots=True)
class Opening:
    """Tells a dedicated server what it is from now on (`autopar.mpi.service.Opening`).

    Attributes:
      spec: A portable one.
      speakers: Of each worker the process that speaks for it to this server.
      wide: Whether the workers have 64-bit types.
    """

    spec: Spec
    speakers: Sequence[int]
    wide: bool

    def handler(self) -> Handler:
        """Makes what takes messages, as the workers would have it done in their own processes."""
        with jax_compat.enable_x64(self.wide):
            take = addressed(self.spec.handler(), self.speakers, wide=self.wide)

        def handle(message: Sent) -> list[tuple[int, Sent]]:
            with PROGRESS.during("answering workers"):
                return take(message)

        return handle


def addressed(take: Handler, speakers: Sequence[int], *, wide: bool) -> Handler:
    """Returns a handler whose replies are for processes: who speaks for a worker, or who asked for itself. It runs with
    the workers' types in whichever thread. `wide`: whether these have 64 bits."""

    def handle(message: Sent) -> list[tuple[int, Sent]]:
        with jax_compat.enable_x64(wide):
            replies = take(message)
        return replies if isinstance(message, OfProcess) else [(speakers[w], reply) for w, reply in replies]

    return handle
