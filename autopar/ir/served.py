"""The programs of a worker and of each server, of a step whose state servers keep (`autopar.sync.Async`); and how
leaves are divided among servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NewType, TypeVar

import jax.numpy as jnp
import numpy as np

from autopar.ir.program import Block
from autopar.jax_types import Array, Leaf

ServerIndex = NewType("ServerIndex", int)
#: The index under which a server keeps a leaf (that of the step's input) or a piece of a leaf (beyond those).
KeptIndex = NewType("KeptIndex", int)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part [start:stop] along `axis` of a leaf (an input's index) that several servers keep."""

    leaf: int
    axis: int
    start: int
    stop: int

    def of(self, array: Leaf) -> Leaf:
        """Slices the piece out of the whole leaf."""
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def __str__(self) -> str:
        return f"[{':, ' * self.axis}{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True, eq=False)
class ServerPart:
    """The leaves that one server keeps, and its programs."""

    leaves: tuple[KeptIndex, ...]  #: What it keeps.
    clocks: tuple[int, ...]  #: Clocks that its programs read; it advances a copy of its own.
    pull: Block  #: The program of a pull, from leaves and ids to what a worker is given.
    ids: tuple[int, ...]  #: Indices of its ids among those that a worker sends.
    update: Block  #: The program of a push, from leaves, clocks and pushed values to new leaves and clocks.
    pushed: tuple[int, ...]  #: Indices of its values among those that a worker pushes.
    #: Bytes of its leaves, and of a worker's messages.
    leaf_bytes: int
    pull_bytes: int
    push_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class LocalWorker:
    """A worker's program on each of its devices."""

    block: Block  #: Takes and returns a device's part.
    #: The axis along which the devices divide each input; None: each has all of it. Each has all results.
    axes: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class ServedStep:
    """The programs of a step that is cut into a worker's part, for its minibatch, and the servers'.

    A worker's program takes what it pulled, server by server, and then the step's inputs that it has (`own`). It
    returns what it pushes, the step's results (`results`), and new clocks. Inputs and outputs are named by
    their indices in the step.
    """

    ids: Block  #: The program that computes ids from `id_inputs`.
    id_inputs: tuple[int, ...]
    worker: Block  #: The program that works on a minibatch.
    own: tuple[int, ...]  #: Inputs that aren't pulled: clocks, and all that is no state.
    pushed: int  #: Number of values that a worker pushes.
    results: tuple[int, ...]  #: Outputs that are no state.
    #: State that advances by itself (counts, random keys, untrained leaves): its new value depends on nothing but such
    #: state. Every process has it.
    clocks: tuple[int, ...]
    whole: frozenset[int]  #: Leaves that a worker pulls whole.
    servers: tuple[ServerPart, ...]  #: Each server's part; there may be fewer than were asked for.
    #: Leaves that several servers keep, by indices beyond those of the inputs.
    pieces: Mapping[KeptIndex, Piece] = field(default_factory=dict)
    #: The worker's program on each of its devices, if several can divide its minibatch.
    local_worker: LocalWorker | None = None

    @functools.cached_property
    def homes(self) -> Mapping[int, Sequence[tuple[ServerIndex, KeptIndex]]]:
        """The servers that keep each leaf, with its index there."""
        found: dict[int, list[tuple[ServerIndex, KeptIndex]]] = {}
        for n, part in enumerate(self.servers):
            for k in part.leaves:
                found.setdefault(self.leaf_of(k), []).append((ServerIndex(n), k))
        return {leaf: sorted(pieces, key=lambda piece: piece[1]) for leaf, pieces in found.items()}

    def leaf_of(self, number: KeptIndex) -> int:
        """Returns the leaf that an index names, perhaps by a piece of it."""
        return self.pieces[number].leaf if number in self.pieces else number

    def kept(self, number: KeptIndex, leaves: Sequence[Leaf]) -> Leaf:
        """Returns the array that a server keeps under an index, from the step's flat arguments."""
        return self.pieces[number].of(leaves[self.pieces[number].leaf]) if number in self.pieces else leaves[number]

    def whole_leaves(self, kept: Mapping[int, Leaf]) -> dict[int, Leaf]:
        """Returns leaves by input index, with pieces put together."""
        cut: dict[int, list[Array]] = {}
        for number in sorted(self.pieces.keys() & kept.keys()):
            cut.setdefault(self.pieces[number].leaf, []).append(kept[number])
        axes = {piece.leaf: piece.axis for piece in self.pieces.values()}
        joined = {leaf: _concatenated(parts, axes[leaf]) for leaf, parts in cut.items()}
        return {k: x for k, x in kept.items() if k not in self.pieces} | joined


def _concatenated(parts: Sequence[Leaf], axis: int) -> Leaf:
    is_numpy = all(isinstance(x, np.ndarray) for x in parts)
    return np.concatenate(parts, axis) if is_numpy else jnp.concatenate(parts, axis)


# --- leaves divided among servers, in parts of about equal size in bytes ---


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cutting:
    """Says what is cut: things of `least_bytes` or more, while a part would have `uneven` times the mean of all."""

    least_bytes: int = 1 << 16
    uneven: float = 1.1


CUTTING = Cutting()


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divides things into parts of about equal size: the largest come first, each to the emptiest part."""
    made: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for n in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        k = min(range(parts), key=lambda k: (filled[k], len(made[k]), k))
        made[k].append(n)
        filled[k] += sizes[n]
    return [sorted(part) for part in made]


def balanced_pieces(
    things: Sequence[T],
    parts: int,
    size: Callable[[T], int],
    cut: Callable[[T], Sequence[T]],
    cutting: Cutting = CUTTING,
) -> list[list[T]]:
    """Returns the things of each nonempty part. While one part has much more than others, large things are cut.

    Its own large things are cut first, then those of other parts, whose pieces could fill the gaps.

    `size`: returns a thing's bytes. `cut`: cuts a thing into pieces, which aren't cut again; none if it can't be cut.
    """
    made, may_cut = list(things), [True] * len(things)
    while True:
        sizes = [size(thing) for thing in made]
        shares = balanced(sizes, parts)
        fullest = max(shares, key=lambda share: sum(sizes[n] for n in share))
        large = [n for n, size_ in enumerate(sizes) if may_cut[n] and size_ >= cutting.least_bytes]
        if len(fullest) == 1 or not set(large).isdisjoint(fullest):
            large = [n for n in large if n in fullest]
        if not large or sum(sizes[n] for n in fullest) * parts <= cutting.uneven * sum(sizes):
            return [[made[n] for n in share] for share in shares if share]
        n = max(large, key=lambda n: sizes[n])
        pieces = cut(made[n]) or [made[n]]
        made[n : n + 1] = pieces
        may_cut[n : n + 1] = [False] * len(pieces)


# --- the shares of servers that keep a centre (`autopar.sync.Elastic`) ---

#: Pieces begin at multiples of this many bytes, a multiple of any element's size.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes from `start` to `stop` of a weight (by number), whose elements lie contiguously."""

    weight: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def center_shares(sizes: Sequence[int], servers: int) -> list[list[Span]]:
    """Returns the spans that each server keeps, balanced by bytes; servers without any are left out.

    An exchange goes element by element, so any large weight can be cut (MXNET-MPI, section 2: large keys are cut over
    all servers). `sizes`: bytes of each weight.
    """

    def cut(whole: Span) -> list[Span]:
        units = whole.nbytes // _ALIGNMENT
        ends = [*(_ALIGNMENT * (units * n // servers) for n in range(servers)), whole.nbytes]
        return [Span(whole.weight, start, stop) for start, stop in pairwise(ends) if stop > start]

    wholes = [Span(k, 0, size) for k, size in enumerate(sizes)]
    return balanced_pieces(wholes, servers, lambda span: span.nbytes, cut)
