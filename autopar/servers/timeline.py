"""`Timeline`: the event log of asynchronous training, from which it can be replayed.

A server's events are rows (worker, step, version): it applied that worker's push of that step, whose gradient was
computed from the leaves after `version` pushes. The k-th push that it applies makes version k+1. Nothing else is
needed: each server is a function of its pushes in order, and each push of what was pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import TimelineError
from autopar.protocols import CAME, LEFT, Standing


@dataclass(frozen=True, eq=False)
class Timeline:
    """The events of all servers.

    Attributes:
      workers: N.
      bound: s, the staleness bound; None: there was none.
      events: For each server int64[n, 3], rows (worker, step, version).
      ring: Whether these are passive clients of a ring: their own steps, and exchanges of their two neighbours.
    """

    workers: int
    bound: int | None
    events: Sequence[np.ndarray]
    ring: bool = False

    def __post_init__(self) -> None:
        self._check()

    def __repr__(self) -> str:
        return f"Timeline({self.workers} workers, {len(self.events)} servers, {sum(map(len, self.pushes))} pushes)"

    @property
    def pushes(self) -> list[np.ndarray]:
        """Each server's pushes in order, int64[n, 3]."""
        return [events[events[:, 1] >= 0] for events in self.events]

    @property
    def steps(self) -> np.ndarray:
        """The number of steps that each worker has done, int64[N]."""
        own = self.pushes if self.ring else self.pushes[:1]
        pushes = np.concatenate([np.zeros((0, 3), np.int64), *own])
        return np.bincount(pushes[:, 0], minlength=self.workers)

    @property
    def staleness(self) -> np.ndarray:
        """For each push the number of others that a server applied since the pull of its weights, int64[n]."""
        late = [np.arange(len(pushes)) - pushes[:, 2] for pushes in self.pushes]
        return np.concatenate([np.zeros(0, np.int64), *late])

    def _check(self) -> None:
        """Checks that it can have happened so, or raises TimelineError."""
        if not self.events:
            raise TimelineError("a timeline has the events of one server at least")
        for n, events in enumerate(self.events):
            if (
                np.ndim(events) != 2
                or np.shape(events)[1] != 3
                or not np.issubdtype(np.asarray(events).dtype, np.integer)
            ):
                raise TimelineError(
                    f"the events of server {n} aren't int64[n, 3], but {np.asarray(events).dtype}{np.shape(events)}"
                )
            standing = Standing(self.workers, self.bound)
            limits = [standing.limit]  # for each version the last step that could begin with it
            for worker, step, given in events.tolist():
                push = f"server {n} applied step {step} of worker {worker}"
                if not 0 <= worker < self.workers:
                    raise TimelineError(f"{push}, and there are {self.workers} workers")
                if step == LEFT:
                    standing.leave(worker)
                elif step == CAME:
                    standing.come(worker)
                elif step != standing.applied[worker]:
                    twice = step < standing.applied[worker]
                    raise TimelineError(f"{push} {'twice' if twice else 'before an earlier one'}")
                elif not 0 <= given < len(limits):
                    raise TimelineError(f"{push} when there were {len(limits)} versions, and it was of {given}")
                elif (since := standing.since(worker, step)) > limits[given]:
                    raise TimelineError(
                        f"{push}: that is its step {since} since it joined, but version {given} allows steps up to "
                        f"{limits[given]:.0f} only (staleness={self.bound})"
                    )
                else:
                    standing.push(worker)
                    limits.append(standing.limit)
                limits[-1] = max(limits[-1], standing.limit)
        if not self.ring and len({tuple(np.bincount(p[:, 0], minlength=self.workers)) for p in self.pushes}) > 1:
            raise TimelineError("the servers applied different numbers of pushes of a worker")
