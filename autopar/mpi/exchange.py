"""`Exchange`: rows and sums that the ranks of a job exchange in a step, as NumPy arrays.

Rows of a table are divided over ranks: storage index p belongs to rank `p // shard_rows` and is its row
`p % shard_rows`. A step asks the owners for the rows that its part of the batch touches (`ask`), gets them (`fetch`),
and returns the sums of their gradients (`deliver`); dense gradients, losses and norms are reduced (`reduce`). This is
Parallax's parameter server (papers/parallax.txt, 4.2 and 5.1), with one server in each worker.

Invariants:

- All calls are collective: every rank makes the same ones in the same order. Nothing else may use the communicator.
- Results are exact and reproducible: sums are taken in the order of the ranks, never of arrival. (If several ranks
  share a machine, `machines` exchanges by way of node leaders, and says in which order those add up.)
- What a rank asks of itself goes through memory, not through MPI.
- Results are no buffers of the exchange, and stay as they are. `out` and `memory` are for callers that reuse theirs
  (`buffers.Buffers`). With one rank a call may return its argument.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

import ml_dtypes
import numpy as np

from autopar.errors import ArgumentsError, AutoparError
from autopar.jax_types import Comm, Leaf, Request
from autopar.mpi.buffers import ALIGNMENT, Buffers, aligned
from autopar.mpi.rings import NodeRings, Rings
from autopar.mpi.waiting import BESIDE, LIMIT, Waiting, choose_waiting, post, swap

#: Ids in the first message of an ask, which says how many there are; the rest follows in a second one.
FIRST_IDS = 2047
#: The first tag of messages for a purpose, behind those of rings, and their number; MPI has 32,768 of them at least.
_FIRST_TAG, _TAGS = 100, 32_000
#: Numbers that mark sums of a purpose; those of all ranks add up to less than 2^24, which a float32 holds.
_MARKS = 251
T = TypeVar("T")
#: An exchange in rounds: it yields requests to wait for, and returns its result (`Exchange.together`).
Rounds = Generator[Sequence[Request], None, T]
#: What `Exchange.swap` counts bytes by.
Kind = Literal["ids", "rows", "gradients"]


@dataclass(frozen=True, slots=True, eq=False)
class Requested:
    """The rows that ranks want of each other, after `ask`.

    Attributes:
      rows: `[u]`, int32 (int64 if a shard needs it), sorted, unique: rows of this rank that any rank asked for.
      bounds: The storage indices that this rank asked of owner r are `indices[bounds[r]:bounds[r + 1]]`.
      sources: By rank, `[n_r]`, intp: positions of its rows in `rows`, in the order in which it asked.
    """

    rows: np.ndarray
    bounds: tuple[int, ...]
    sources: tuple[np.ndarray, ...]

    @property
    def counts(self) -> np.ndarray:
        """`[size]`, int64: the number of rows that this rank asked of each owner."""
        return np.diff(self.bounds)

    @property
    def size(self) -> int:
        """The number of rows that this rank asked for."""
        return self.bounds[-1]


class Exchange:
    """One rank's exchanges with the others.

    Attributes:
      sent_bytes: Bytes that this rank handed to MPI for other ranks, by kind. 'ids', 'rows', 'gradients' and 'gather'
        count messages; 'reduce' counts this rank's contribution once, whatever MPI's algorithm then sends (a ring's
        AllReduce 2(N-1)/N of it).
      near_bytes: Bytes for ranks of its own machine, if rows go by way of node leaders (`machines`); `sent_bytes` then
        has only what crosses machines. Else nothing.
      own_bytes: Bytes that the rank asked of itself, by kind.
      limit: Bytes of one MPI message at most; the same on all ranks.
      rings_from: Size in bytes from which reductions go in rings, which `autopar.calibrate` found faster than MPI's;
        None: never. The same on all ranks.
    """

    def __init__(
        self, rank: int, size: int, comm: Comm | None, *, polling: bool | None = None, shares_cores: bool = False
    ) -> None:
        """Prepares exchanges. Collective.

        Args:
          comm: An mpi4py communicator that nothing else uses; None with one rank.
          polling: Whether to wait by polling; None: if ranks or other threads want the cores (`waiting`).
          shares_cores: Whether other threads of the program communicate, as gloo's do.
        """
        if (comm is None) != (size == 1):
            raise ArgumentsError(f"an exchange of {size} ranks needs {'a' if size > 1 else 'no'} communicator")
        self.rank = rank
        self.size = size
        self.sent_bytes = dict.fromkeys(("ids", "rows", "gradients", "reduce", "gather"), 0)
        self.near_bytes = dict.fromkeys(("ids", "rows", "gradients"), 0)
        self.own_bytes = dict.fromkeys(("ids", "rows", "gradients"), 0)
        self.limit = LIMIT
        self.rings_from: int | None = None
        #: Rings by `beside`.
        self._rings: dict[bool, Rings | NodeRings] = {}
        self._comm = comm
        #: Of messages between two ranks: what they are exchanged for.
        self._tag = 0
        #: Memory of exchanges, of which none is under way.
        self._spare = deque[Buffers]()
        #: Exchanges within this rank's machine, and its ranks; as far as nobody says otherwise, all.
        self.near, self.near_ranks = self, tuple(range(size))
        #: Owners know what each rank asked for; node leaders ask for several.
        self.knows_lists = True
        #: Ranks that this one may ask for rows, and those that may ask it.
        self._askable = self._askers = frozenset(range(size))
        self._waiting = (
            Waiting(polling=False) if comm is None else choose_waiting(comm, polling, shares_cores=shares_cores)
        )

    @property
    def polling(self) -> bool:
        return self._waiting.polling

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Leaves the rank's cores to its programs while it waits. All ranks do so between the same calls."""
        mine, near = self._waiting, self.near._waiting
        self._waiting = self.near._waiting = BESIDE
        try:
            yield
        finally:
            self._waiting, self.near._waiting = mine, near

    @contextlib.contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Takes messages only of ranks that exchange for the same purpose: others wait, in place of taking what isn't
        meant for them. A sum with others is an error."""
        mine = self._tag, self.near._tag
        self._tag = self.near._tag = _FIRST_TAG + zlib.crc32(name.encode()) % _TAGS
        try:
            yield
        finally:
            self._tag, self.near._tag = mine

    def together(self, exchanges: Iterable[Rounds[T]]) -> list[T]:
        """Runs several exchanges at once (of `asking`, `fetching`, `delivering`), and waits once for each of their
        rounds; returns their results. All ranks run the same ones in the same order."""
        under_way, results = dict(enumerate(exchanges)), dict[int, T]()
        while under_way:
            requests: list[Request] = []
            for k, rounds in list(under_way.items()):
                try:
                    requests += next(rounds)
                except StopIteration as end:
                    results[k] = end.value
                    del under_way[k]
            if requests:
                self._waiting.finish(requests)
        return [results[k] for k in sorted(results)]

    def ask(self, indices: np.ndarray, shard_rows: int) -> Requested:
        """Tells owners which rows this rank wants, and learns which of its own are wanted. `indices`: storage indices,
        `[n]`, int32 or int64, sorted, unique, below `size * shard_rows`. `shard_rows`: rows of each rank."""
        return self.together([self.asking(indices, shard_rows)])[0]

    def fetch(self, requested: Requested, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Brings this rank the rows that it asked for, and the others theirs.

        Args:
          rows: `[u, ...]` of any dtype: this rank's rows, in the order of `requested.rows`.
          out: Where to write them: C order, `[at least n, ...]`, of the same dtype.

        Returns:
          `[n, ...]` in the order of the indices that were asked for: the first n of `out`, or an aligned array.
        """
        return self.together([self.fetching(requested, rows, out)])[0]

    def deliver(self, requested: Requested, sums: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns sums to the owners of their rows, and adds up those for this rank's.

        Sums of 16-bit and 8-bit floats are taken in float32 and rounded once; those of bools are "or".

        Args:
          sums: `[n, ...]`, in the order of the indices that were asked for. Not read after the call.
          out: Where to write: C order, `[at least u, ...]`, of the same dtype.

        Returns:
          `[u, ...]`: for each of `requested.rows` the sum over the ranks that asked for it, in the order of the ranks:
            the first u of `out`, or an aligned array.
        """
        return self.together([self.delivering(requested, sums, out)])[0]

    def asking(self, indices: np.ndarray, shard_rows: int) -> Rounds[Requested]:
        """Asks in rounds, as `ask`."""
        dtype = number_dtype(shard_rows)
        if self.size == 1:
            return Requested(indices.astype(dtype, copy=False), (0, indices.size), (np.arange(indices.size),))
        if indices.dtype != np.int64:
            indices = indices.astype(number_dtype(shard_rows * self.size), copy=False)  # that the shards' ends fit
        bounds = self._bounds(indices, shard_rows)
        with self._scratch() as scratch:
            wanted = yield from self._swap_ids(indices, bounds, shard_rows, dtype, scratch)
            self.own_bytes["ids"] += wanted[self.rank].nbytes
            rows, sources = union_rows(wanted)
        return Requested(rows, bounds, sources)

    def fetching(self, requested: Requested, rows: np.ndarray, out: np.ndarray | None = None) -> Rounds[np.ndarray]:
        """Fetches in rounds, as `fetch`."""
        require_rows(rows, len(requested.rows), "rows")
        n = requested.size
        if self.size == 1:
            return rows if out is None else copied_rows(rows, out)
        result = aligned((n, *rows.shape[1:]), rows.dtype) if out is None else first_of(out, n, rows)
        source, target = as_lines(rows), as_lines(result)
        slices, total = self._in_one_buffer(requested.sources)
        with self._scratch() as scratch:
            packed = scratch.take("rows", (total, source.shape[1]), np.uint8)
            messages = [None if part is None else packed[part] for part in slices]
            for back, message in zip(requested.sources, messages, strict=True):
                if message is not None:
                    take_lines(source, back, message)
            parts = [target[a:b] for a, b in pairwise(requested.bounds)]
            take_lines(source, requested.sources[self.rank], parts[self.rank])
            self.own_bytes["rows"] += parts[self.rank].nbytes
            yield self._post("rows", messages, parts)
        return result

    def delivering(self, requested: Requested, sums: np.ndarray, out: np.ndarray | None = None) -> Rounds[np.ndarray]:
        """Delivers in rounds, as `deliver`."""
        require_rows(sums, requested.size, "sums")
        u = len(requested.rows)
        if self.size == 1:
            return sums if out is None else copied_rows(sums, out)
        result = aligned((u, *sums.shape[1:]), sums.dtype) if out is None else first_of(out, u, sums)
        sums = np.ascontiguousarray(sums)
        lines = as_lines(sums)
        sends = [lines[a:b] for a, b in pairwise(requested.bounds)]
        slices, total = self._in_one_buffer(requested.sources)
        with self._scratch() as scratch:
            received = scratch.take("gradients", (total, *sums.shape[1:]), sums.dtype)
            own = sums[requested.bounds[self.rank] : requested.bounds[self.rank + 1]]
            parts = [own if part is None else received[part] for part in slices]
            self.own_bytes["gradients"] += parts[self.rank].nbytes
            yield self._post("gradients", sends, parts)
            _add_up(result, requested.sources, parts, scratch)
        return result

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Buffers]:
        """Gives memory to an exchange until it is done."""
        memory = self._spare.popleft() if self._spare else Buffers(sets=1)
        try:
            yield memory
        finally:
            self._spare.append(memory)

    def _post(
        self, kind: Kind, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]
    ) -> list[Request]:
        requests, sent = post(self._comm, sends, receives, self.limit, self._tag)
        self.sent_bytes[kind] += sent
        return requests

    def reduce(
        self, arrays: Sequence[np.ndarray], op: str = "sum", memory: np.ndarray | None = None, *, beside: bool = False
    ) -> list[np.ndarray]:
        """Combines arrays over the ranks, with the same bits on each: one AllReduce for each dtype, MPI's or in rings
        (`rings_from`).

        16-bit and 8-bit floats travel as float32. A NaN on any rank is the result of max and min, too. Sum, max and
        "or" of bools are "or"; "and" and "or" of integers are bitwise.

        Args:
          arrays: With the same shapes and dtypes on all ranks.
          op: One of `OPS`.
          memory: Aligned bytes for the results, at least `packed_bytes(arrays, op)` of them.
          beside: Whether the rank computes meanwhile and needs its cores; the same on all ranks.

        Returns:
          Aligned arrays: views of `memory`, or of new memory that they share; new arrays if another dtype travelled.
            With one rank the arguments.

        Raises:
          ArgumentsError: there is no such reduction of such elements, or `memory` is too small.
          AutoparError: a sum of floats met one of another `purpose`.
        """
        arrays = [np.asarray(a) for a in arrays]
        sent = packing(_specs(arrays), op).sent
        if self.size == 1:
            return arrays
        mark = self._mark(arrays, op)
        arrays += mark
        specs = _specs(arrays)
        plan = packing(specs, op)
        if memory is None:
            memory = aligned(plan.nbytes, np.uint8)
        elif memory.dtype != np.uint8 or memory.ndim != 1 or memory.size < plan.nbytes:
            raise ArgumentsError(
                f"memory is {memory.dtype}{list(memory.shape)}: it must be uint8, with at least {plan.nbytes} elements"
            )
        results: list[np.ndarray] = list(arrays)
        for segment in plan.segments:
            flat = segment.flat(memory)
            pack(segment, arrays, flat)
            self._all_reduce(flat, segment.op, beside)
            unpack(segment, specs, flat, results)
        self.sent_bytes["reduce"] += sent
        for own in mark:
            if results.pop() != self.size * own:
                raise AutoparError(
                    "sums of this rank met those of another step: ranks called different steps at the same moment. "
                    "Call steps in the same order on all ranks"
                )
        return results

    def _mark(self, arrays: Sequence[Leaf], op: str) -> list[np.ndarray]:
        """Returns a number that tells by its sum whether all ranks add up for the same purpose: one or none."""
        exact = [np.dtype(a.dtype) for a in arrays if np.dtype(a.dtype) in (np.float32, np.float64)]
        return [np.full((), 1 + self._tag % _MARKS, dtype) for dtype in exact[:1]] if op == "sum" else []

    def packed_bytes(self, arrays: Sequence[Leaf], op: str = "sum") -> int:
        """Returns the bytes of memory that `reduce` needs for such arrays."""
        return packing(_specs([*arrays, *self._mark(arrays, op)]), op).nbytes

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Returns every rank's array, in order; only the lengths may differ."""
        array = np.ascontiguousarray(array)
        if self.size == 1:
            return [array]
        results = [aligned((n, *array.shape[1:]), array.dtype) for n in self._lengths(array)]
        results[self.rank][...] = array
        self.sent_bytes["gather"] += swap(
            self._comm, self._waiting, [array] * self.size, results, self.limit, self._tag
        )
        return results

    def through_first(self, sums: np.ndarray) -> None:
        """Sends this owner's sums to the first rank and back, as where what follows them is computed there; in place.

        `sums`: `[u, ...]` in C order; only u may differ between ranks.
        """
        there, lengths = range(self.size), self._lengths(sums)
        nothing: list[np.ndarray | None] = [None] * self.size
        own = [sums if r == 0 and self.rank else None for r in there]
        others = [np.empty((lengths[r], *sums.shape[1:]), sums.dtype) if r else None for r in there]
        self.swap("gradients", own, nothing if self.rank else others)
        self.swap("gradients", nothing if self.rank else others, own)

    def _lengths(self, array: np.ndarray) -> list[int]:
        lengths = np.empty(self.size, np.int64)
        self._waiting.collective(self._comm, "Allgather", np.array([len(array)]), lengths)
        self.sent_bytes["gather"] += (self.size - 1) * lengths.itemsize
        return lengths.tolist()

    def swap(self, kind: Kind, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]) -> None:
        """Sends an array to each rank and fills one from each, of the lengths that the other side has; None: nothing.

        `kind`: by which `sent_bytes` and `own_bytes` count.
        """
        own, here = sends[self.rank], receives[self.rank]
        if own is not None and here is not None:
            here[...] = own
            self.own_bytes[kind] += own.nbytes
        self.sent_bytes[kind] += swap(self._comm, self._waiting, sends, receives, self.limit, self._tag)

    def _made_rings(self, waiting: Waiting) -> Rings | NodeRings:
        return Rings(self._comm, waiting)

    def _in_one_buffer(self, sources: Sequence[np.ndarray]) -> tuple[list[slice | None], int]:
        """Returns the slice of each other rank's rows in one buffer (None for this rank), and the buffer's length."""
        ends = [0, *accumulate(0 if r == self.rank else back.size for r, back in enumerate(sources))]
        slices = [None if r == self.rank else slice(a, b) for r, (a, b) in enumerate(pairwise(ends))]
        return slices, ends[-1]

    def _bounds(self, indices: np.ndarray, shard_rows: int) -> tuple[int, ...]:
        edges = np.arange(self.size + 1, dtype=indices.dtype) * shard_rows
        bounds = tuple(np.searchsorted(indices, edges).tolist())
        assert bounds[0] == 0 and bounds[-1] == indices.size, f"indices beyond {self.size} shards of {shard_rows} rows"
        return bounds

    def _swap_ids(
        self, indices: np.ndarray, bounds: tuple[int, ...], shard_rows: int, dtype: np.dtype, scratch: Buffers
    ) -> Rounds[tuple[np.ndarray, ...]]:
        """Exchanges row numbers; returns by rank the rows that it wants of this one. A message is `[count | ids]`."""
        sends: list[np.ndarray | None] = []
        parts: list[np.ndarray] = []
        packed = scratch.take("requested", indices.size + self.size, dtype)
        received = scratch.take("wanted", (self.size, 1 + FIRST_IDS), dtype)
        received[:, 0] = 0
        for r in range(self.size):
            start, end = bounds[r], bounds[r + 1]
            message = packed[start + r : end + r + 1]
            message[0] = end - start
            np.subtract(indices[start:end], r * shard_rows, out=message[1:], casting="same_kind")
            parts.append(message[1:])
            sends.append(message[: 1 + FIRST_IDS] if r in self._askable else None)
        first = [row if r in self._askers else None for r, row in enumerate(received)]
        requests, sent = post(self._comm, sends, first, tag=self._tag)
        self.sent_bytes["ids"] += sent
        yield requests
        return (yield from self._rest_of_ids(parts, received))

    def _rest_of_ids(self, parts: list[np.ndarray], received: np.ndarray) -> Rounds[tuple[np.ndarray, ...]]:
        """Exchanges the ids that didn't fit into the first messages; returns all ids by rank."""
        counts = received[:, 0].tolist()
        counts[self.rank] = 0
        wanted = [part[1 : 1 + count] for part, count in zip(received, counts, strict=True)]
        wanted[self.rank] = parts[self.rank]
        rest: list[np.ndarray | None] = [None] * self.size
        for r, count in enumerate(counts):
            if count > FIRST_IDS:
                whole = np.empty(count, received.dtype)
                whole[:FIRST_IDS] = wanted[r]
                wanted[r] = whole
                rest[r] = whole[FIRST_IDS:]
        yield self._post("ids", [part[FIRST_IDS:] for part in parts], rest)
        return tuple(wanted)

    def _all_reduce(self, flat: np.ndarray, op: str, beside: bool) -> None:
        """Reduces in place, in pieces if necessary; their number follows from the length, which all ranks share."""
        from mpi4py import MPI

        waiting = BESIDE if beside else self._waiting
        in_rings = self.rings_from is not None and flat.nbytes >= self.rings_from
        if in_rings and beside not in self._rings:
            self._rings[beside] = self._made_rings(waiting)
        step = max(self.limit // flat.itemsize, 1)
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            if in_rings:
                self._rings[beside].all_reduce(part, op)
            else:
                waiting.collective(self._comm, "Allreduce", MPI.IN_PLACE, part, getattr(MPI, op))


# --- many arrays in few messages: where they are in one buffer, and the form in which they are reduced ---
#
# Arrays that MPI can't reduce travel in another form:
#
# - float16, bfloat16 and the 8-bit floats as float32, rounded once, after the reduction;
# - bool as a byte, combined bitwise;
# - max and min of floats as integers of the same order, NaN beyond all others: a NaN on any rank is then the result, as
#   in JAX, while MPI's own max keeps or loses it depending on the order of the ranks.

#: Name of a reduction -> MPI's name.
OPS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN", "and": "BAND", "or": "BOR"}

#: Reductions of bools, as in NumPy.
_OF_BOOLS = {"sum": "BOR", "max": "BOR", "or": "BOR", "prod": "BAND", "min": "BAND", "and": "BAND"}

Spec = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True, slots=True)
class Segment:
    """Arrays that are reduced in one call.

    Attributes:
      dtype, op: The elements that MPI sees, and its name of the reduction.
      ordered: The floats' dtype if they travel as integers of the same order, else None.
      members: Numbers of the arrays.
      starts: Where each begins, in elements from the segment's start.
      size: Number of elements, including gaps.
      offset: Where the segment begins in the buffer, in bytes.
    """

    dtype: np.dtype
    op: str
    ordered: np.dtype | None
    members: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    offset: int

    def flat(self, memory: np.ndarray) -> np.ndarray:
        """Returns the segment in a buffer of bytes, `[size]`, as MPI sees it."""
        return memory[self.offset : self.offset + self.size * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True, slots=True)
class Packing:
    """Places of arrays in one buffer of `nbytes`: segments by dtype, in the order of their first arrays. `sent`: bytes
    that MPI is given, without gaps between segments."""

    segments: tuple[Segment, ...]
    nbytes: int
    sent: int


def _specs(arrays: Sequence[Leaf]) -> tuple[Spec, ...]:
    return tuple((tuple(a.shape), np.dtype(a.dtype)) for a in arrays)


@functools.lru_cache(maxsize=64)
def packing(specs: tuple[Spec, ...], op: str) -> Packing:
    """Packs arrays, each at a multiple of 64 bytes; raises ArgumentsError if there is no such reduction of such
    elements."""
    groups: dict[tuple[np.dtype, str, np.dtype | None], list[int]] = {}
    for k, (_, dtype) in enumerate(specs):
        groups.setdefault(_wire(dtype, op), []).append(k)
    segments: list[Segment] = []
    offset = sent = 0
    for (dtype, name, ordered), members in groups.items():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        starts: list[int] = []
        size, unit = 0, max(ALIGNMENT // dtype.itemsize, 1)
        for k in members:
            size = -(-size // unit) * unit
            starts.append(size)
            size += math.prod(specs[k][0])
        segments.append(Segment(dtype, name, ordered, tuple(members), tuple(starts), size, offset))
        offset += size * dtype.itemsize
        sent += size * dtype.itemsize
    return Packing(tuple(segments), offset, sent)


def pack(segment: Segment, arrays: Sequence[np.ndarray], flat: np.ndarray) -> None:
    """Writes a segment's arrays to its part of the buffer."""
    floats = flat if segment.ordered is None else flat.view(segment.ordered)
    for k, start in zip(segment.members, segment.starts, strict=True):
        array = arrays[k]
        np.copyto(floats[start : start + array.size].reshape(array.shape), array, casting="unsafe")
    if segment.ordered is not None:
        _order(floats, -1.0 if segment.op == "MIN" else 1.0)


def unpack(segment: Segment, specs: Sequence[Spec], flat: np.ndarray, results: list[np.ndarray]) -> None:
    """Stores a segment's arrays in `results`: views of `flat`, or new arrays if another dtype travelled."""
    if segment.ordered is not None:
        _swap_order(flat)
        flat = flat.view(segment.ordered)
    with np.errstate(all="ignore"):  # what overflows in a narrower float is infinite, as in JAX
        for k, start in zip(segment.members, segment.starts, strict=True):
            shape, dtype = specs[k]
            part = flat[start : start + math.prod(shape)].reshape(shape)
            if dtype.kind == "b":
                part = part.view(bool)
            results[k] = part if part.dtype == dtype else part.astype(dtype)


def _wire(dtype: np.dtype, op: str) -> tuple[np.dtype, str, np.dtype | None]:
    """Returns the dtype that travels, MPI's name of its reduction, and the floats' dtype if they travel as ordered
    integers."""
    if op not in OPS:
        raise ArgumentsError(f"no reduction {op!r}; there are {', '.join(OPS)}")
    if dtype.kind == "b":
        return np.dtype(np.uint8), _OF_BOOLS[op], None
    floating = dtype if dtype in (np.float32, np.float64) else np.dtype(np.float32) if _is_small_float(dtype) else None
    fits = dtype.kind in "iu" or (op in ("sum", "prod") and dtype.kind == "c") or (op not in ("and", "or") and floating)
    if not fits or dtype.itemsize > 16:
        remedy = "convert it to a float, an integer or a bool that has one"
        raise ArgumentsError(f"no {op} over ranks of {dtype}: {remedy}")
    if floating is None:
        return dtype, OPS[op], None
    if op in ("max", "min"):
        return np.dtype(f"i{floating.itemsize}"), OPS[op], floating
    return floating, OPS[op], None


def _is_small_float(dtype: np.dtype) -> bool:
    if dtype.itemsize > 2:
        return False
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def _order(floats: np.ndarray, nan_sign: float) -> None:
    """Replaces floats in place by integers of the same order, with NaN beyond infinity on the side of `nan_sign`."""
    holes = np.isnan(floats)
    if holes.any():
        floats[holes] = np.copysign(np.nan, nan_sign)
    _swap_order(floats.view(f"i{floats.itemsize}"))


def _swap_order(bits: np.ndarray) -> None:
    """Exchanges floats' bits and integers of the same order in place; it is its own inverse.

    A float's bits are a sign and a magnitude, whose bits are inverted for negative floats.
    """
    signs = bits >> (8 * bits.itemsize - 1)
    signs &= np.iinfo(bits.dtype).max
    bits ^= signs


# --- rows in arrays: the distinct ones of several lists, their bytes, what callers may give ---

_INT32_MAX = np.iinfo(np.int32).max


def number_dtype(count: int) -> np.dtype:
    return np.dtype(np.int32 if count <= _INT32_MAX else np.int64)


def distinct_rows(values: np.ndarray) -> np.ndarray:
    """Returns distinct values, sorted; sorts `values` in place."""
    values.sort()
    new = np.empty(values.size, bool)
    new[:1] = True
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return values[new]


def union_rows(wanted: Sequence[np.ndarray]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Returns the sorted distinct rows of all sources (each sorted), and each source's positions among them."""
    rows = distinct_rows(np.concatenate(wanted))
    return rows, tuple(rows.searchsorted(part) for part in wanted)


def as_lines(rows: np.ndarray) -> np.ndarray:
    """Views rows as `[rows, bytes of a row]`, without a copy if they are contiguous."""
    rows = np.ascontiguousarray(rows)
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), -1 if rows.size else 0)


def take_lines(lines: np.ndarray, back: np.ndarray, out: np.ndarray) -> None:
    if out.size:
        np.take(lines, back, axis=0, out=out, mode="clip")


def _add_up(result: np.ndarray, sources: Sequence[np.ndarray], parts: Sequence[np.ndarray], scratch: Buffers) -> None:
    """Adds each source's rows where they belong. A source's rows are distinct, so that `+=` loses none."""
    wide = np.dtype(np.float32) if result.dtype.itemsize <= 2 and result.dtype.kind in "fV" else result.dtype
    total = result if wide == result.dtype else scratch.take("wide", result.shape, wide)
    total.fill(0)
    with np.errstate(all="ignore"):  # sums that overflow are infinite, as in JAX
        for back, part in zip(sources, parts, strict=True):
            total[back] += part.astype(wide, copy=False)
        if total is not result:
            np.copyto(result, total, casting="unsafe")


def first_of(out: np.ndarray, count: int, like: np.ndarray) -> np.ndarray:
    """Returns the first rows of `out`, which must have the dtype and row shape of `like`."""
    if out.dtype != like.dtype or out.shape[1:] != like.shape[1:] or len(out) < count or not out.flags.c_contiguous:
        raise ArgumentsError(
            f"out is {out.dtype}{list(out.shape)}: it must be C-contiguous, {like.dtype}, with at least {count} rows "
            f"of shape {like.shape[1:]}"
        )
    return out[:count]


def copied_rows(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    result = first_of(out, len(rows), rows)
    result[...] = rows
    return result


def require_rows(array: np.ndarray, count: int, name: str) -> None:
    if array.ndim < 1 or len(array) != count:
        raise ArgumentsError(
            f"{name} has shape {array.shape}: there must be {count} rows, one for each that was asked for"
        )


# --- rows that are fetched ahead of the step that needs them, beside the one before ---
#
# An owner knows which rows the step under way writes. It tells each rank which of the rows that this has asked for are
# among them (`divide`: a bit a row), sends all others at once, and these after they have been written: each row travels
# once, as it would without (`Exchange.fetch`).


@dataclass(frozen=True, slots=True, eq=False)
class RequestedPart:
    """Some of the rows that ranks want of each other."""

    requested: Requested  #: The request of these alone; `requested.rows` are those of the whole request.
    positions: np.ndarray  #: `[n]`, intp, sorted: where they are among the rows that this rank asked for.


def divide(exchange: Exchange, requested: Requested, written: np.ndarray) -> tuple[RequestedPart, RequestedPart]:
    """Divides a request into rows that stay as they are, and rows that are written before they are needed. Collective.
    `requested`: of ranks that ask owners themselves (`Exchange.knows_lists`). `written`: rows of this rank that are
    written, distinct."""
    is_written = np.isin(requested.rows, written, assume_unique=True)
    theirs = [is_written[back] for back in requested.sources]
    counts = requested.counts.tolist()
    received = [np.empty(-(-count // 8), np.uint8) for count in counts]
    exchange.swap("ids", [np.packbits(flags) for flags in theirs], received)
    mine = [np.unpackbits(bits, count=n).view(bool) for bits, n in zip(received, counts, strict=True)]

    def part(wanted: bool) -> RequestedPart:
        sources = tuple(b[flags == wanted] for b, flags in zip(requested.sources, theirs, strict=True))
        bounds = (0, *accumulate(int(np.count_nonzero(flags == wanted)) for flags in mine))
        positions = np.flatnonzero(np.concatenate(mine) == wanted)
        return RequestedPart(Requested(requested.rows, bounds, sources), positions)

    return part(False), part(True)
