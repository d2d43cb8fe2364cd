"""`Timeline`: what servers did, in which order: the event log of asynchronous training, from which it can be replayed.

A server's events are rows (worker, step, version): it applied that worker's push of that step, whose gradient was
computed of the leaves as they were after `version` pushes. The k-th push that it applies makes version k+1. That is
all there is to know: each server is a function of its pushes in their order, and each push of what was pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import TimelineError

#: In place of a step: from here on nobody waits for the worker, until its next push.
LEFT = -1


@dataclass(frozen=True, eq=False)
class Timeline:
    """What all servers did.

    Attributes:
      workers: N.
      bound: s, the staleness bound; None: there was none.
      events: For each server int64[n, 3], rows (worker, step, version).
    """

    workers: int
    bound: int | None
    events: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        self._check()

    def __repr__(self) -> str:
        return f"Timeline({self.workers} workers, {len(self.events)} servers, {sum(map(len, self.pushes))} pushes)"

    @property
    def pushes(self) -> list[np.ndarray]:
        """Events of each server that are pushes, in order, int64[n, 3]."""
        return [events[events[:, 1] != LEFT] for events in self.events]

    @property
    def steps(self) -> np.ndarray:
        """How many steps each worker has done, int64[N]."""
        counts = np.zeros(self.workers, np.int64)
        for pushes in self.pushes[:1]:
            np.add.at(counts, pushes[:, 0], 1)
        return counts

    @property
    def staleness(self) -> np.ndarray:
        """Of each push how many others a server applied between the pull of its weights and itself, int64[n]."""
        return np.concatenate([np.arange(len(pushes)) - pushes[:, 2] for pushes in self.pushes])

    def _check(self) -> None:
        """Check that it can have happened so.

        Raises:
          TimelineError: it can't.
        """
        for n, events in enumerate(self.events):
            applied = np.zeros(self.workers, np.int64)
            gone = np.zeros(self.workers, bool)
            #: Of each version how many steps of each worker are in it, and for whom nobody waited.
            versions = [(applied.copy(), gone.copy())]
            for worker, step, given in events.tolist():
                if step == LEFT:
                    gone[worker] = True
                    versions[-1][1][worker] = True
                    continue
                push = f"server {n} applied step {step} of worker {worker}"
                if step != applied[worker]:
                    raise TimelineError(f"{push} {'twice' if step < applied[worker] else 'before an earlier one'}")
                if not 0 <= given < len(versions):
                    raise TimelineError(f"{push} when there were {len(versions)} versions, and it was of {given}")
                there, away = versions[given]
                if self.bound is not None and (there < step - self.bound)[~away].any():
                    raise TimelineError(
                        f"{push}, which began when {there.tolist()} steps of the workers were applied: with "
                        f"staleness={self.bound} that is {step - self.bound} or more of each"
                    )
                applied[worker] += 1
                gone[worker] = False
                versions.append((applied.copy(), gone.copy()))
