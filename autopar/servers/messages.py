"""Messages between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.jax_types import Array


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A worker begins a step: answered by `Pulled`, once that may be.

    Attributes:
      worker, step: Which one's, and its number, from 0.
      ids: Of the rows that the worker needs.
    """

    worker: int
    step: int
    ids: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Push:
    """Holds what a worker's minibatch gave, for a server to apply. Not answered."""

    worker: int
    step: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A worker's weights, which are to be pulled to a centre: answered by `Pulled`, how far.

    Attributes:
      worker, step: Whose, and which exchange of its, from 0.
      values: As the server keeps them.
    """

    worker: int
    step: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A passive client's weights as its step made them: answered by `Pulled`, with what they are now.

    Attributes:
      worker, step: Whose, and which one of its, from 0.
      values: As whoever answers for it keeps them.
    """

    worker: int
    step: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker pushes nothing before it pulls again: nobody needs to wait for it. Not answered."""

    worker: int


@dataclass(frozen=True, slots=True)
class Return:
    """Says that all workers are waited for again, where all have left. Not answered."""

    worker: int


class OfProcess:
    """A message of a process for itself: its `worker` is the number of the process, which is answered."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Read(OfProcess):
    """Asks for what a server keeps: answered by `Kept`.

    Attributes:
      worker: The process that asks.
      leaves: By number of the step's input; None: all, clocks and events too.
    """

    worker: int
    leaves: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """Values as all pushes up to a version made them, or how far an exchange at that version pulls weights."""

    version: int
    values: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Kept:
    """Holds what a server keeps, and what it has done.

    Attributes:
      leaves, clocks: By number of the step's input.
      events: Its `Timeline` events, int64[n, 3].
    """

    leaves: dict[int, Array]
    clocks: dict[int, Array]
    events: np.ndarray


Message = Pull | Push | Exchange | Stepped | Leave | Return | Read
Reply = Pulled | Kept
