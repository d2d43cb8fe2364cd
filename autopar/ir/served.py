"""A step whose state is kept by servers: the programs of a worker and of each server (`autopar.sync.Async`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.program import Block


@dataclass(frozen=True, slots=True, eq=False)
class ServerPart:
    """Holds what one server keeps, and what it computes of that.

    Attributes:
      leaves: The leaves of the state that it keeps, by the number of the step's input.
      clocks: Leaves that it counts by itself, as every server does that reads them.
      pull: The program of a pull: leaves and ids -> what a worker is given.
      ids: Numbers of the ids among those that a worker sends.
      update: The program of a push: leaves, clocks and what was pushed -> new leaves and clocks.
      pushed: Numbers of the values among those that a worker pushes.
      leaf_bytes, pull_bytes, push_bytes: Of its leaves, and of a worker's messages.
    """

    leaves: tuple[int, ...]
    clocks: tuple[int, ...]
    pull: Block
    ids: tuple[int, ...]
    update: Block
    pushed: tuple[int, ...]
    leaf_bytes: int
    pull_bytes: int
    push_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ServedStep:
    """The programs of a step that is cut into what a worker does with its minibatch, and what servers do with that.

    A worker's program takes what it pulled, of one server after the other, and then the step's inputs that it has
    (`own`). It returns what it pushes, the step's results (`results`, by number of the output), and new clocks.

    Attributes:
      ids: The program that makes ids of the step's inputs (`id_inputs`).
      id_inputs: Numbers of the step's inputs.
      worker: The program that works on a minibatch.
      own: Numbers of the step's inputs: clocks, and all that is no state.
      pushed: How many values a worker pushes.
      results: Numbers of the step's outputs that are no state.
      clocks: Leaves of the state whose new value follows from such leaves alone: counts, random keys, what isn't
        trained. Everyone has them.
      whole: Leaves that a worker pulls whole: leaf -> its number among what is pulled.
      servers: What each server keeps; there may be fewer than were asked for.
    """

    ids: Block
    id_inputs: tuple[int, ...]
    worker: Block
    own: tuple[int, ...]
    pushed: int
    results: tuple[int, ...]
    clocks: tuple[int, ...]
    whole: Mapping[int, int]
    servers: tuple[ServerPart, ...]

    @property
    def homes(self) -> dict[int, int]:
        """Leaf -> the server that keeps it."""
        return {k: n for n, part in enumerate(self.servers) for k in part.leaves}
