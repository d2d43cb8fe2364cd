"""`Server`: keeps leaves of the state, and updates them by each push as it comes."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.served import PullProgram, ServedPrograms, UpdateProgram
from autopar.errors import AutoparError
from autopar.servers.messages import Kept, Leave, Pull, Pulled, Push, Read, Reply
from autopar.servers.timeline import LEFT

Array = Any


class Server:
    """Takes one message after the other. It has no thread and waits for nobody: a pull that comes too early is kept.

    Args:
      leaves: What it keeps, by number of the step's input. It updates them in place.
      clocks: What it counts by itself.
      pull, update: Its programs.
      workers: N.
      staleness: s: a worker begins its step c once all pushes of steps up to c-1-s are applied; None: at any time.
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
        self._places, self._leaves = tuple(leaves), list(leaves.values())
        self._clock_places, self._clocks = tuple(clocks), list(clocks.values())
        self._pull, self._update, self._staleness = pull, update, staleness
        #: Steps of each worker whose push is applied.
        self._applied = [0] * workers
        #: Workers that nobody waits for.
        self._gone: set[int] = set()
        #: The version that each worker's last pull was given.
        self._given = [0] * workers
        self._version = 0
        self._waiting: list[Pull] = []
        self._events = array("q")

    def take(self, message: Pull | Push | Leave | Read) -> list[tuple[int, Reply]]:
        """Returns answers that are due now, each with the worker that it is for.

        Raises:
          AutoparError: a push that isn't the next one of its worker.
        """
        worker = message.worker
        if isinstance(message, Read):
            return [(worker, self._kept(message.leaves))]
        if isinstance(message, Leave):
            self._gone.add(worker)
            self._events.extend((worker, LEFT, self._version))
        elif isinstance(message, Push):
            if self._applied[worker] != message.step:
                raise AutoparError(
                    f"worker {worker} pushed step {message.step} where {self._applied[worker]} is next. This is a bug "
                    "of autopar"
                )
            self._leaves, self._clocks = self._update(self._leaves, self._clocks, message.values)
            self._applied[worker] = message.step + 1
            self._events.extend((worker, message.step, self._given[worker]))
            self._version += 1
        else:
            self._gone.discard(worker)
            self._waiting.append(message)
        due = [pull for pull in self._waiting if self._may_begin(pull.step)]
        self._waiting = [pull for pull in self._waiting if pull not in due]
        return [(pull.worker, self._pulled(pull)) for pull in due]

    @property
    def events(self) -> np.ndarray:
        """What was done so far, as `Timeline` has it, int64[n, 3]."""
        return np.array(self._events, np.int64).reshape(-1, 3)

    def _kept(self, wanted: Collection[int] | None) -> Kept:
        pairs = zip(self._places, self._leaves, strict=True)
        leaves = {k: on_host(x) for k, x in pairs if wanted is None or k in wanted}
        if wanted is not None:
            return Kept(leaves, {}, np.zeros((0, 3), np.int64))
        clocks = dict(zip(self._clock_places, map(on_host, self._clocks), strict=True))
        return Kept(leaves, clocks, self.events)

    def _may_begin(self, step: int) -> bool:
        """Whether all pushes of steps up to step-1-s are applied."""
        if self._staleness is None:
            return True
        there = (applied for w, applied in enumerate(self._applied) if w not in self._gone)
        return all(applied >= step - self._staleness for applied in there)

    def _pulled(self, pull: Pull) -> Pulled:
        self._given[pull.worker] = self._version
        return Pulled(self._version, [np.asarray(x) for x in self._pull(self._leaves, pull.ids)])


def served(
    programs: ServedPrograms, number: int, leaves: Sequence[Array], workers: int, staleness: int | None
) -> Server:
    """Returns a server that keeps copies of its part of the state. `leaves`: the step's flat arguments;
    others as of `Job`."""
    part = programs.step.servers[number]
    kept = {k: jnp.copy(leaves[k]) for k in part.leaves}
    return Server(kept, {k: leaves[k] for k in part.clocks}, *programs.servers[number], workers, staleness)


def state_of(clocks: Mapping[int, Array], kept: Sequence[Kept]) -> dict[int, Array]:
    """Returns the state by number of the step's input: what servers keep, and count; the rest is a worker's.

    Args:
      clocks: Of the first worker.
      kept: By all servers.
    """
    state = dict(clocks)
    for each in kept:
        state |= {**each.leaves, **each.clocks}
    return state


def on_host(leaf: Array) -> Array:
    """Returns a copy that later updates leave alone, and that can be sent."""
    return leaf if jax_compat.is_key(leaf.dtype) else np.array(leaf)
