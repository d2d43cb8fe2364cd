"""`Server`: keeps leaves of the state, and applies each push as it comes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar import jax_compat
from autopar.backends.served import ExportedPrograms, PullProgram, ServedPrograms, UpdateProgram, copied
from autopar.errors import StateError
from autopar.jax_types import Array
from autopar.mpi.service import Handler
from autopar.protocols import Log
from autopar.servers.messages import Kept, Leave, Pull, Pulled, Push, Read, Reply, Return, Spec


class Server:
    """Takes one message after the other. It has no thread and waits for nobody: a pull that comes too early is kept.

    `leaves`: by number of the step's input, updated in place. `clocks`: leaves that it counts by itself. `staleness`:
    s: a worker begins its step c once all pushes of steps up to c-1-s are applied; None: at any time.
    """

    def __init__(
        self,
        leaves: Mapping[int, Array],
        clocks: Mapping[int, Array],
        pull: PullProgram,
        update: UpdateProgram,
        workers: int,
        staleness: int | None,
    ) -> None:
        self._leaf_indices, self._leaves = tuple(leaves), list(leaves.values())
        self._clock_indices, self._clocks = tuple(clocks), list(clocks.values())
        self._pull, self._update = pull, update
        self._log, self._workers, self._failed = Log(workers, staleness), workers, ""
        self._waiting: list[Pull] = []

    def take(self, message: Pull | Push | Leave | Return | Read) -> list[tuple[int, Reply]]:
        """Returns answers that are due now, each with its worker. Raises AutoparError if a push isn't the next one of
        its worker. Raises StateError if an earlier update failed."""
        worker = message.worker
        if self._failed:
            raise StateError(
                f"an update of what a server keeps failed, and its state is lost: {self._failed}. Begin once more with "
                "a state of before, as of a checkpoint"
            )
        if isinstance(message, Read):
            return [(worker, self._kept(message.leaves))]
        due: list[Pull] = []
        if isinstance(message, Leave):
            self._log.leave(worker)
            due = [pull for pull in self._waiting if pull.worker == worker]  # its step was cut short
        elif isinstance(message, Return):
            if self._log.standing.nobody:  # all come back together
                for other in range(self._workers):
                    self._log.come(other)
        elif isinstance(message, Push):
            self._log.check_next(worker, message.step, "pushed step")
            try:
                self._leaves, self._clocks = self._update(self._leaves, self._clocks, message.values)
            except Exception as error:
                self._failed = str(error).splitlines()[0]
                raise
            self._log.change(worker, message.step)
        else:
            if self._log.standing.is_gone(worker):
                self._log.come(worker)
            self._waiting.append(message)
        waiting, may_begin = [], self._log.standing.may_begin
        for pull in self._waiting:
            (due if pull not in due and may_begin(pull.worker, pull.step) else waiting).append(pull)
        self._waiting = [pull for pull in waiting if pull not in due]
        return [(pull.worker, self._pulled(pull)) for pull in due]

    def _kept(self, wanted: Collection[int] | None) -> Kept:
        pairs = zip(self._leaf_indices, self._leaves, strict=True)
        leaves = {k: on_host(x) for k, x in pairs if wanted is None or k in wanted}
        if wanted is not None:
            return Kept(leaves, {}, np.zeros((0, 3), np.int64))
        clocks = dict(zip(self._clock_indices, map(on_host, self._clocks), strict=True))
        return Kept(leaves, clocks, self._log.events)

    def _pulled(self, pull: Pull) -> Pulled:
        self._log.see(pull.worker)
        return Pulled(self._log.version, [sendable(x) for x in self._pull(self._leaves, pull.ids)])


@dataclass(frozen=True, slots=True)
class StateSpec(Spec):
    """Makes server `number` of a state, which it copies from `leaves`, the step's flat arguments."""

    programs: ServedPrograms
    number: int
    leaves: Sequence[Array]
    workers: int
    staleness: int | None

    def handler(self) -> Handler:
        return served(self.programs, self.number, self.leaves, self.workers, self.staleness).take

    def portable(self) -> Spec:
        part = self.programs.step.servers[self.number]
        return _PortableState(
            self.programs.exported(self.number, self.leaves),
            {k: on_host(self.programs.step.kept(k, self.leaves)) for k in part.leaves},
            {k: on_host(self.leaves[k]) for k in part.clocks},
            self.workers,
            self.staleness,
        )


@dataclass(frozen=True, slots=True)
class _PortableState(Spec):
    programs: ExportedPrograms
    leaves: Mapping[int, Array]
    clocks: Mapping[int, Array]
    workers: int
    staleness: int | None

    def handler(self) -> Handler:
        leaves, clocks = ({k: copied(x) for k, x in some.items()} for some in (self.leaves, self.clocks))
        return Server(leaves, clocks, *self.programs.programs(), self.workers, self.staleness).take


def served(
    programs: ServedPrograms, number: int, leaves: Sequence[Array], workers: int, staleness: int | None
) -> Server:
    """Returns a server with copies of its part of the state in `leaves`, the step's flat arguments."""
    part = programs.step.servers[number]
    kept: dict[int, Array] = {k: copied(programs.step.kept(k, leaves)) for k in part.leaves}
    return Server(kept, {k: copied(leaves[k]) for k in part.clocks}, *programs.servers[number], workers, staleness)


def state_of(clocks: Mapping[int, Array], kept: Sequence[Kept]) -> dict[int, Array]:
    """Returns the state by number: the servers' leaves and clocks, and the first worker's `clocks`."""
    state = dict(clocks)
    for each in kept:
        state |= {**each.leaves, **each.clocks}
    return state


def on_host(leaf: Array) -> Array:
    """Returns a copy that can be sent, and that later updates leave alone."""
    return copied(leaf) if jax_compat.is_key(leaf.dtype) else np.array(leaf)


def sendable(value: Array) -> Array:
    """Returns a NumPy array, without a copy if possible; a random key as it is, which can be pickled."""
    return value if jax_compat.is_key(value.dtype) else np.asarray(value)
