"""Messages between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.jax_types import Array


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
