"""A step whose state is kept by servers: the programs of a worker and of each server (`autopar.sync.Async`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from autopar.ir.program import Block
from autopar.jax_types import Array, Leaf


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a leaf that is kept by several servers.

    Attributes:
      leaf: By the number of the step's input.
      axis, start, stop: Which part.
    """

    leaf: int
    axis: int
    start: int
    stop: int

    def of(self, array: Leaf) -> Leaf:
        """Returns this part of the whole."""
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def __str__(self) -> str:
        return f"[{':, ' * self.axis}{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True, eq=False)
class ServerPart:
    """Holds what one server keeps, and what it computes of that.

    Attributes:
      leaves: The leaves of the state that it keeps, by the number of the step's input, and pieces, by theirs.
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
class LocalWorker:
    """A worker's program on each of its devices.

    Attributes:
      block: Takes and returns what a device has.
      axes: Of each input the axis along which the devices divide it; None: each has all of it, as of all results.
    """

    block: Block
    axes: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
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
      whole: Leaves that a worker pulls whole.
      servers: What each server keeps; there may be fewer than were asked for.
      pieces: Of leaves that several servers keep, by numbers behind those of the step's inputs.
      local_worker: The worker's program on each of its devices, if it has several that can divide its minibatch.
    """

    ids: Block
    id_inputs: tuple[int, ...]
    worker: Block
    own: tuple[int, ...]
    pushed: int
    results: tuple[int, ...]
    clocks: tuple[int, ...]
    whole: frozenset[int]
    servers: tuple[ServerPart, ...]
    pieces: Mapping[int, Piece] = field(default_factory=dict)
    local_worker: LocalWorker | None = None

    @functools.cached_property
    def homes(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Leaf -> the servers that keep it, each with the number that it has there."""
        found: dict[int, list[tuple[int, int]]] = {}
        for n, part in enumerate(self.servers):
            for k in part.leaves:
                found.setdefault(self.leaf_of(k), []).append((n, k))
        return {leaf: sorted(places, key=lambda place: place[1]) for leaf, places in found.items()}

    def leaf_of(self, number: int) -> int:
        """Returns the leaf that a number stands for, or a piece of which."""
        return self.pieces[number].leaf if number in self.pieces else number

    def kept(self, number: int, leaves: Sequence[Leaf]) -> Leaf:
        """Returns what a server keeps by a number, of the step's flat arguments."""
        return self.pieces[number].of(leaves[self.pieces[number].leaf]) if number in self.pieces else leaves[number]

    def whole_leaves(self, kept: Mapping[int, Leaf]) -> dict[int, Leaf]:
        """Returns leaves by number of the step's input, of what servers keep: pieces are put together."""
        cut: dict[int, list[Array]] = {}
        for number in sorted(kept.keys() & self.pieces.keys()):
            cut.setdefault(self.pieces[number].leaf, []).append(kept[number])
        axes = {piece.leaf: piece.axis for piece in self.pieces.values()}
        joined = {leaf: _concatenated(parts, axes[leaf]) for leaf, parts in cut.items()}
        return {k: x for k, x in kept.items() if k not in self.pieces} | joined


def _concatenated(parts: Sequence[Leaf], axis: int) -> Leaf:
    is_numpy = all(isinstance(x, np.ndarray) for x in parts)
    return np.concatenate(parts, axis) if is_numpy else jnp.concatenate(parts, axis)
