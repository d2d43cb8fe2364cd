"""`Group`: processes that do something together, and the exchanges by which they agree on it.

Ranks exchange by MPI (`MpiGroup`). Processes that `jax.distributed` connects exchange by its key-value store
(`StoreGroup`), on the host. Neither uses the devices: a message waits for no program in flight, needs no compilation,
and may have any size. All processes must make the same exchanges in the same order.

A process that failed alone would leave the others waiting. Where work may fail each process therefore says how it went
(`together`, `led`), and all raise the same error with the failed process's number. Messages are read as data: only
ranks, which MPI connects, pickle objects (`MpiGroup.objects`).
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import itertools
import json
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from autopar import errors, jax_compat
from autopar.errors import ArgumentsError, AutoparError, LaunchError
from autopar.jax_types import Json
from autopar.launch.progress import PROGRESS
from autopar.mpi.limits import machine_name
from autopar.mpi.world import World, world

S = TypeVar("S")
T = TypeVar("T")

_logger = logging.getLogger("autopar")

#: Seconds of waiting in the store after which a warning says for whom.
_PATIENCE_S = 20
#: Seconds between two looks at whether the other ranks have come: they may be writing files, and need the core.
_PAUSE_S = 5e-4
#: Processes compare what they were given at least once in so many calls.
_COMPARED_AT_LEAST = 1_024
#: Number of exchanges so far by members: each has a name of its own in the store. Global, as the store is.
_exchanges: Counter[tuple[int, ...]] = Counter()

#: Functions to call before this process waits in a group. Global, as other ranks wait for the process.
_before_waiting: list[Callable[[Group], None]] = []


def before_waiting(call: Callable[[Group], None]) -> None:
    """Registers a function to be called with a group before this process waits for its others."""
    if call not in _before_waiting:
        _before_waiting.append(call)


def _as_it_is(value: Json) -> Json:
    return value


class Group(abc.ABC):
    """Processes in an order of their own.

    Attributes:
      members: Their numbers among all processes of the job.
      noun, nouns: What messages call one, and several.
    """

    members: tuple[int, ...]
    noun: str
    nouns: str

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def several(self) -> bool:
        """Says whether there are other processes, so that arrays may have parts that this one can't read."""
        return self.size > 1

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process's index in the group."""

    def gather(self, value: bytes, about: str) -> list[bytes]:
        """Returns each process's value, in order. Collective. `value`: this process's value. `about`: the purpose;
        every process must give the same. Raises AutoparError if another process exchanges something else."""
        if not self.several:
            return [value]
        for call in _before_waiting:
            call(self)
        return self._gather(value, about)

    @abc.abstractmethod
    def _gather(self, value: bytes, about: str) -> list[bytes]:
        """Gathers values where there are several processes."""

    @abc.abstractmethod
    def share(self, array: np.ndarray, source: int) -> None:
        """Overwrites an array on every process with that of the process at `source`. Collective."""

    def name(self, number: int) -> str:
        return f"{self.noun} {self.members[number]}"

    def values(self, value: Json, about: str) -> list[Json]:
        """Returns each process's value (JSON), in order. Collective."""
        sent = self.gather(json.dumps(value).encode(), about)
        return self._read(sent, about, lambda data: read_json(data, value))

    def arrays(self, own: Sequence[np.ndarray], about: str) -> list[list[np.ndarray]]:
        """Returns each process's arrays, in order; all have the shapes and dtypes of this one's. Collective."""
        sent = self.gather(b"".join(x.tobytes() for x in own), about)
        return self._read(sent, about, lambda data: read_arrays(data, own))

    def first(self, value: Json, about: str) -> Json:
        """Returns the first process's value (JSON): all must choose by the same figures. Collective."""
        return self.values(value, about)[0]

    def together(
        self, kind: type[AutoparError], work: Callable[[], Any], about: str, read: Callable[[Any], T] = _as_it_is
    ) -> list[T]:
        """Runs `work()` on each process; returns all results in order. Collective.

        Args:
          kind: The class of errors that aren't autopar's own.
          work: This process's work, without exchanges. Its result is sent as JSON.
          about: The purpose, for messages.
          read: Reads a result from JSON; raises ValueError, TypeError or LookupError if it can't be one.

        Raises:
          AutoparError: on every process if any failed: of the class of the first failure if that is one of autopar's,
            else of `kind`.
        """
        own: Exception | None = None
        result: Json = None
        try:
            result = work()
        except Exception as error:
            own = error
        if not self.several:
            if own is None:
                return [read(result)]
            raise own if isinstance(own, AutoparError) else kind(text_of(own)) from own
        failure = None if own is None else Failure.of(own, kind).as_json()
        outcomes = self._read(self.values([failure, result], about), about, read_outcome)
        failed = [(member, failure) for member, (failure, _) in zip(self.members, outcomes, strict=True) if failure]
        if not failed:
            return self._read([result for _, result in outcomes], about, read)
        number, first = failed[0]
        if len(failed) == self.size and len({failure.text for _, failure in failed}) == 1:
            raise first.kind(first.text) from own
        where = "" if first.machine == machine_name() else f" (on machine {first.machine})"
        who = ", ".join(str(member) for member, _ in failed)
        others = f" {self.nouns.capitalize()} {who} failed." if len(failed) > 1 else ""
        raise first.kind(f"{self.noun} {number}{where}: {first.text}{others}") from own

    def led(
        self, kind: type[AutoparError], work: Callable[[], Any], about: str, read: Callable[[Any], T] = _as_it_is
    ) -> T:
        """Runs `work()` on the first process alone; returns its result to all. Collective.

        Errors as for `together`; the first process raises one of autopar's own unchanged.
        """
        failure: AutoparError | None = None

        def lead() -> list[Json]:
            nonlocal failure
            try:
                return [None, work() if self.rank == 0 else None]
            except AutoparError as error:
                failure = error
                return [Failure.of(error, kind).as_json(), None]

        outcomes = self.together(kind, lead, about)[:1]
        ((raised, result),) = self._read(outcomes, about, read_outcome)
        if raised is not None:
            raise raised.kind(raised.text) from failure
        return self._read([result], about, read)[0]

    def _read(self, sent: Sequence[S], about: str, read: Callable[[S], T], first: int = 0) -> list[T]:
        """Returns messages of processes, from the index `first` on, as `read` reads them; raises LaunchError if one
        isn't autopar's."""
        values = []
        for number, value in enumerate(sent, first):
            try:
                values.append(read(value))
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise LaunchError(
                    f"'{about}': what came in the name of {self.name(number)} is no message of autopar's "
                    f"({type(error).__name__}: {error}). Either that {self.noun} has another version of autopar, or a "
                    "program that isn't part of the job writes to the store of jax.distributed, which has no "
                    "password: let nobody else reach the coordinator's port"
                ) from error
        return values


class MpiGroup(Group):
    """Ranks of an MPI job, or this process alone (`comm` is None)."""

    noun, nouns = "rank", "ranks"

    def __init__(self, ranks: World, members: Sequence[int] | None = None) -> None:
        self._rank, self.comm = ranks.rank, ranks.comm
        self.members = tuple(range(ranks.size) if members is None else members)

    @property
    def rank(self) -> int:
        return self._rank

    def share(self, array: np.ndarray, source: int) -> None:
        if self.several:
            self.comm.Bcast(array.reshape(-1).view(np.uint8), root=source)  # MPI doesn't know all dtypes

    def objects(self, value: Json, about: str) -> list[Json]:
        """Returns each rank's picklable object, in order. Collective."""
        return [pickle.loads(data) for data in self.gather(pickle.dumps(value), about)]

    @contextlib.contextmanager
    def split(self, colour: Hashable) -> Iterator[MpiGroup]:
        """Yields a group of the ranks that give the same colour. Collective, at its end as well."""
        colours = self.objects(colour, "a part of the ranks")
        members = [member for member, other in zip(self.members, colours, strict=True) if other == colour]
        if not self.several:
            yield self
            return
        comm = self.comm.Split(colours.index(colour), self.rank)
        try:
            yield MpiGroup(World(comm.Get_rank(), comm.Get_size(), comm), members)
        finally:
            comm.Free()

    def _gather(self, value: bytes, about: str) -> list[bytes]:
        with PROGRESS.during(f"waiting for the others, {about}", "waits"):
            all_done = self.comm.Ibarrier()
            while not all_done.Test():
                time.sleep(_PAUSE_S)
            return self.comm.allgather(value)


@functools.cache
def part_of_ranks(own: int, count: int) -> MpiGroup:
    """Returns the `own`th of `count` equal parts of the job's ranks. Collective, the first time."""
    ranks = world()
    each = ranks.size // count
    comm = ranks.comm.Split(own, ranks.rank)
    return MpiGroup(World(comm.Get_rank(), each, comm), range(own * each, (own + 1) * each))


@dataclass(frozen=True)
class StoreGroup(Group):
    """The processes that own devices of a mesh, in order. Whoever waits says for whom."""

    members: tuple[int, ...]
    noun, nouns = "process", "processes"

    def share(self, array: np.ndarray, source: int) -> None:
        about = "an array of one process"
        data = self.gather(array.tobytes() if self.rank == source else b"", about)[source]
        ((array[...],),) = self._read([data], about, lambda data: read_arrays(data, [array]), source)

    @staticmethod
    def of(mesh: Mesh) -> StoreGroup:
        return StoreGroup(tuple(sorted({d.process_index for d in mesh.devices.flat})))

    @property
    def rank(self) -> int:
        """This process's index in the group; raises ArgumentsError if it has none."""
        me = jax.process_index()
        if me not in self.members:
            raise ArgumentsError(
                f"process {me} has no device in the mesh, whose devices are those of {self.members}. Make the mesh of "
                "all devices, jax.devices(), or run the step on those processes alone"
            )
        return self.members.index(me)

    def _gather(self, value: bytes, about: str) -> list[bytes]:
        store = jax_compat.key_value_store()
        assert store is not None, "a mesh over several processes needs jax.distributed, and so its store"
        before = PROGRESS.last
        PROGRESS.mark(before.step, "an agreement of processes", "waits")
        try:
            return self._exchange(store, value, about)
        finally:
            PROGRESS.mark(before.step, before.what, before.kind)

    def _exchange(self, store: jax_compat.KeyValueStore, value: bytes, about: str) -> list[bytes]:
        number = _exchanges[self.members]
        _exchanges[self.members] += 1
        store.key_value_set_bytes(self._key(number, self.rank), about.encode() + b"\0" + value)
        values = []
        for k, member in enumerate(self.members):
            with PROGRESS.during(about, "waits"):
                theirs, _, data = self._wait(store, self._key(number, k), member, about).partition(b"\0")
            if theirs != about.encode():
                there = theirs[:80].decode(errors="replace")
                raise AutoparError(
                    f"process {member} is at '{there}' where this one, process {jax.process_index()}, is at "
                    f"'{about}'. All processes have to make the same calls in the same order"
                )
            values.append(data)
        if number:  # all have come to this one, so all have read the one before
            store.key_value_delete(self._key(number - 1, self.rank))
        return values

    def _key(self, number: int, rank: int) -> str:
        return f"autopar/{'-'.join(map(str, self.members))}/{number}/{rank}"

    @staticmethod
    def _wait(store: jax_compat.KeyValueStore, key: str, member: int, about: str) -> bytes:
        for turn in itertools.count(1):
            try:
                return store.blocking_key_value_get_bytes(key, 1000 * _PATIENCE_S)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                waited = turn * _PATIENCE_S
                _logger.warning("%s: waiting for process %d since %d s; all have to come", about, member, waited)
        raise AssertionError("itertools.count doesn't end")


def odd_one(values: Sequence[object]) -> int | None:
    """Returns the index of the first value that differs from the first one; None if all are equal."""
    return next((k for k, value in enumerate(values) if value != values[0]), None)


def next_compared(number: int) -> int:
    """Returns which call or batch processes compare after that number: 1, 2, 4, ..., 1,024, and each 1,024th one."""
    return number + min(max(number, 1), _COMPARED_AT_LEAST)


def everyone() -> Group:
    """Returns all processes of the job: ranks of an MPI launcher, or else those that `jax.distributed` connects.

    Collective under a launcher, the first time.
    """
    ranks = world()
    count = jax_compat.process()[1] if ranks.size == 1 else 1  # without starting a backend
    return StoreGroup(tuple(range(count))) if count > 1 else MpiGroup(ranks)


def go_on(what: str) -> None:
    """Tells the watchdog that long work of the main thread makes progress."""
    if threading.current_thread() is threading.main_thread():
        PROGRESS.mark(PROGRESS.last.step, what)


# --- messages, read as data ---
#
# Whoever reaches the port of JAX's store can write to it, so nothing there is pickled. Processes read JSON, arrays of
# known types, and errors by names from a fixed list. Readers raise ValueError, TypeError or LookupError for anything
# else.

#: The errors that processes can send, by name.
_ERRORS: dict[str, type[AutoparError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AutoparError)
}


class Failure(NamedTuple):
    """An error of a process: the class that others raise, its text, and the process's machine."""

    kind: type[AutoparError]
    text: str
    machine: str

    @staticmethod
    def of(error: Exception, kind: type[AutoparError]) -> Failure:
        """Makes one of an error; others raise it as `kind` if it isn't one of autopar's."""
        known = next((c for c in type(error).__mro__ if c in _ERRORS.values()), kind)
        return Failure(known, text_of(error), machine_name())

    def as_json(self) -> list[str]:
        return [self.kind.__name__, self.text, self.machine]


def text_of(error: Exception) -> str:
    return str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"


def read_outcome(value: Json) -> tuple[Failure | None, Json]:
    """Reads the failure of a process's work, if any, and the work's result."""
    match value:
        case [None, result]:
            return None, result
        case [[str(name), str(text), str(machine)], result]:
            return Failure(_ERRORS[name], text, machine), result
    raise ValueError("it says neither what was found nor which error it was")


def read_json(data: bytes, like: Json) -> Json:
    """Reads a value of the same kind as another: an object, a list, a text, or anything else."""
    value = json.loads(data)
    kinds = ((dict, dict), (list, (list, tuple)), (str, str))
    theirs, ours = (next((kind for kind, types in kinds if isinstance(x, types)), None) for x in (value, like))
    if theirs is not ours:
        raise ValueError(f"a {type(value).__name__}, where this process has a {type(like).__name__}")
    return value


def read_arrays(data: bytes, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    ends = list(itertools.accumulate((x.nbytes for x in like), initial=0))
    if len(data) != ends[-1]:
        raise ValueError(f"{len(data)} bytes instead of {ends[-1]}")
    return [np.frombuffer(data, x.dtype, x.size, at).reshape(x.shape) for x, at in zip(like, ends, strict=False)]


# --- ranks are compared before they begin ---
#
# Ranks with another plan, other code or another batch size don't fail: they compute something else, or wait for each
# other for ever. Their fingerprints are compared before the first step, and the odd rank is named.


#: Characters of a value in messages.
SHOWN = 200


def check_same(world: World, facts: Mapping[str, str]) -> None:
    """Compares ranks' facts, such as {"JAX version": "0.10.2", "batch size": "64"}. Collective.

    They should be short (fingerprints, no programs), as each rank receives all of them.

    Raises:
      LaunchError: on every rank, naming those that differ from the majority (from rank 0, in a tie), and in what.
    """
    if world.size == 1:
        return
    facts_of_ranks: Sequence[dict[str, str]] = world.comm.allgather(dict(facts))
    names = list(dict.fromkeys(name for rank in facts_of_ranks for name in rank))
    different = [line for name in names for line in _differences(name, [rank.get(name) for rank in facts_of_ranks])]
    if different:
        raise LaunchError(
            f"rank {world.rank}: the ranks of this job don't do the same:\n  "
            + "\n  ".join(different)
            + "\nStart all ranks with the same script, arguments and environment"
        )


def _differences(name: str, values: Sequence[str | None]) -> list[str]:
    """Returns a line for each value other than the most frequent one."""
    counts = collections.Counter(values)
    reference = max(counts, key=lambda value: (counts[value], value == values[0], -values.index(value)))
    lines = []
    for value in (v for v in counts if v != reference):
        odd = [str(rank) for rank, v in enumerate(values) if v == value]
        same = [str(rank) for rank, v in enumerate(values) if v == reference]
        here, there = shown(value, reference), shown(reference, value)
        lines.append(f"{name}: {here} on {_ranks(odd)}, {there} on {_ranks(same)}")
    return lines


def _ranks(ranks: Sequence[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def shown(value: str | None, other: str | None) -> str:
    """Returns a value; a long one from shortly before its first difference."""
    if value is None:
        return "(missing)"
    if len(value) <= SHOWN:
        return value
    same = next((i for i, (a, b) in enumerate(zip(value, other or "", strict=False)) if a != b), 0)
    start = max(same - SHOWN // 4, 0)
    return ("..." if start else "") + value[start : start + SHOWN] + ("..." if start + SHOWN < len(value) else "")
