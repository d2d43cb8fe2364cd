"""A distributed key-value store, as below `autopar.sync`, for writing a way of training by hand.

After MXNET-MPI (section 4 and its figures 2 to 8). Servers are threads in the ranks, or dedicated processes (`launch
--servers`). Calls of one rank take effect in their order.

Example:
  >>> import numpy as np, optax
  >>> from autopar import kvstore
  >>> store = kvstore.create("async")
  >>> store.init(["w"], [np.ones(2, np.float32)])
  >>> store.set_optimizer(optax.sgd(0.5))
  >>> store.push("w", np.ones(2, np.float32))
  >>> store.pull("w").tolist()
  [0.5, 0.5]
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import Clients, checked_servers
from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError
from autopar.ir.served import balanced
from autopar.jax_types import Array, Dtype, Leaf, Pytree, Sent
from autopar.launch.group import everyone
from autopar.measure.cluster import reductions_here
from autopar.mpi.exchange import Exchange
from autopar.mpi.service import Handler
from autopar.mpi.world import check_ranks
from autopar.servers.link import Link
from autopar.servers.messages import OfProcess, Spec
from autopar.servers.server import on_host

#: "sync": a key's value is updated once by the sum of all workers' pushes. "async": by each push as it comes. "-mpi":
#: a worker is several ranks, whose values are summed by MPI first.
Kind = Literal["sync", "async", "sync-mpi", "async-mpi"]
K = TypeVar("K", bound=Hashable)


class Transformation(NamedTuple):
    """An optimizer, as Optax has them."""

    init: Any
    update: Any


def elastic(alpha: float) -> Transformation:
    """Returns the server's part of elastic averaging, for `KVStore.set_optimizer`.

    Workers push their weights x, and the centre c becomes c + alpha (x - c) (MXNET-MPI, equation 2 and figure 8).
    """
    return Transformation(lambda _: (), lambda x, state, c: (alpha * (x - c), state))


def create(kind: Kind = "sync", *, clients: int | None = None, servers: int | None = None) -> KVStore:
    """Makes a store over all ranks. Collective.

    Args:
      kind: "sync", "async", "sync-mpi" or "async-mpi".
      clients: With "-mpi" the number of workers, each of as many adjacent ranks; None: one of all ranks. Without "-mpi"
        every rank is a worker.
      servers: Number of ranks that keep keys, the first ones (of dedicated servers, if the job has some); None: all.

    Raises:
      ArgumentsError: there is no such kind, the clients don't divide the ranks, or more servers are asked for
        than there are.
      LaunchError: these processes are no ranks of an MPI job.
    """
    if kind not in get_args(Kind):
        raise ArgumentsError(f"kvstore.create({kind!r}): there are {', '.join(map(repr, get_args(Kind)))}")
    if clients is not None and not kind.endswith("-mpi"):
        raise ArgumentsError(f"kvstore.create({kind!r}, clients={clients}): every rank is a worker; say '{kind}-mpi'")
    check_ranks("kvstore.create", "servers", "train by autopar.sync.Average")
    count = None if not kind.endswith("-mpi") else 1 if clients is None else clients
    workers = Clients.of(Devices.of(None, None), count)
    return KVStore(kind, workers, checked_servers("kvstore.create", servers, workers.processes.size))


class KVStore:
    """Values by key, on servers. Made by `create`.

    Attributes:
      rank, workers: This rank's worker, and the number of workers.
    """

    def __init__(self, kind: Kind, clients: Clients, servers: int) -> None:
        self._clients, self.rank, self.workers = clients, clients.own, clients.count
        self._rank = everyone().rank
        self._is_synchronous = kind.startswith("sync")
        self._link = Link([KeySpec(clients.count, self._is_synchronous)] * servers, clients)
        #: The functions that make a value's state, and update both.
        self._optimizer: tuple[Callable[[Array], Any], Update] | None = None
        self._homes: dict[Key, int] = {}
        self._types: dict[Key, tuple[tuple[int, ...], Leaf]] = {}
        group = clients.members
        self._members = None if group is None else Exchange(group.rank, group.size, group.comm)
        if self._members is not None:
            self._members.rings_from = reductions_here().rings_from

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> None:
        """Stores the first rank's values under new keys, balanced over servers by bytes. Collective.

        Raises:
          ArgumentsError: a key is known already, or the numbers of keys and values differ.
        """
        if len(keys) != len(values):
            raise ArgumentsError(f"kvstore.init: {len(keys)} keys and {len(values)} values")
        known = [key for key in keys if key in self._homes]
        if known or len(set(keys)) < len(keys):
            raise ArgumentsError(f"kvstore.init: {known[0] if known else 'a key'!r} is known already")
        arrays = [merged(value[:1] if isinstance(value, list | tuple) else value) for value in values]
        group = everyone()
        for array in arrays:
            group.share(array, 0)
        for n, part in enumerate(balanced([array.nbytes for array in arrays], len(self._link.servers))):
            self._homes |= {keys[k]: n for k in part}
            if n in self._link.own:
                kept = {keys[k]: arrays[k] for k in part}
                self._link.command(n, KeepKeys(self._rank, kept, self._rules(kept)))
        self._types |= {key: _type_of(array) for key, array in zip(keys, arrays, strict=True)}
        group.gather(b"", "keys are there")

    def set_optimizer(self, optimizer: Any, rescale: float = 1.0) -> None:
        """Updates values by pushes from now on, with new optimizer states. Collective.

        Args:
          optimizer: An Optax transformation, or `elastic(alpha)`.
          rescale: Factor of pushes, such as 1/mini_batch_size if gradients are sums.

        Raises:
          ArgumentsError: it is no transformation.
        """
        if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
            raise ArgumentsError(f"kvstore.set_optimizer({optimizer!r}): give an Optax transformation, optax.sgd(0.1)")

        def update(pushed: Array, state: Pytree, value: Array) -> tuple[Array, Leaf]:
            updates, state = optimizer.update((rescale * pushed).astype(value.dtype), state, value)
            return (value + updates).astype(value.dtype), state

        group = everyone()
        group.gather(b"", "nobody pushes")
        self._optimizer = optimizer.init, jax.jit(update)
        group.together(ArgumentsError, self._set_rules, "the optimizer is there")

    def _set_rules(self) -> None:
        """Sends rules to the servers that this process speaks to for all."""
        for n in self._link.own:
            keys = [key for key, home in self._homes.items() if home == n]
            values = {key: self._link.command(n, ReadKey(self._rank, key)) for key in keys}
            self._link.command(n, SetRules(self._rank, self._rules(values)))

    def _rules(self, values: Mapping[Key, np.ndarray]) -> dict[Key, Rule]:
        if self._optimizer is None:
            return {}
        initial, update = self._optimizer
        rules = {key: Rule(initial(jnp.asarray(value)), update) for key, value in values.items()}
        if not self._link.is_dedicated:
            return rules
        types = {key: _type_of(value) for key, value in values.items()}
        some = {type_: key for key, type_ in types.items()}
        updates = {type_: rules[key].exported(jnp.asarray(values[key])) for type_, key in some.items()}
        return {key: rule.portable(updates[types[key]]) for key, rule in rules.items()}

    def push(self, keys: K | Sequence[K], values: Leaf) -> None:
        """Sends values, to be summed or applied. Returns at once. With "-mpi" collective within the worker.

        Args:
          keys: A key, or a list of them.
          values: A value: an array, or a list of one worker's arrays to be summed (one a device). For a list of keys a
            list of values.

        Raises:
          ArgumentsError: a key that isn't known; "async" without an optimizer; dedicated servers have an optimizer, and
            a value has another shape or dtype than its key's.
        """
        if not self._is_synchronous and self._optimizer is None:
            raise ArgumentsError(
                "kvstore.push: an asynchronous store needs to know what a push does: set_optimizer first"
            )
        for key, value in _pairs(keys, values):
            home, pushed = self._home(key), merged(value)
            if self._link.is_dedicated and self._optimizer and _type_of(pushed) != self._types[key]:
                shape, dtype = self._types[key]
                raise ArgumentsError(
                    f"kvstore.push({key!r}): {pushed.dtype}{pushed.shape} is pushed, but dedicated servers have an "
                    f"optimizer for values like the key's, {dtype}{shape}"
                )
            self._link.tell(home, PushKey(self.rank, key, self._reduced(pushed)))

    def pull(self, keys: K | Sequence[K]) -> Leaf:
        """Returns values of a key, or of a list of them, as NumPy arrays: with "sync" once all workers' pushes of the
        same round are in them, with "async" as they are. With "-mpi" collective within the worker.

        Raises:
          ArgumentsError: a key that isn't known.
        """
        pulled = [self._link.ask(self._home(key), PullKey(self.rank, key)) for key, _ in _pairs(keys, None)]
        return pulled if isinstance(keys, list) else pulled[0]

    def pushpull(self, keys: K | Sequence[K], values: Leaf) -> Leaf:
        """Pushes and pulls in one call. With one worker of all ranks ("sync-mpi") and no optimizer it is an AllReduce
        without servers."""
        if self.workers == 1 and self._clients.members is not None and self._optimizer is None:
            summed = [self._reduced(merged(value)) for _, value in _pairs(keys, values)]
            return summed if isinstance(keys, list) else summed[0]
        self.push(keys, values)
        return self.pull(keys)

    def _home(self, key: Key) -> int:
        if key not in self._homes:
            raise ArgumentsError(f"kvstore: {key!r} isn't known: init it first")
        return self._homes[key]

    def _reduced(self, value: np.ndarray) -> np.ndarray:
        return value if self._members is None else self._members.reduce([value])[0]


def _type_of(value: np.ndarray) -> tuple[tuple[int, ...], Dtype]:
    return value.shape, jax.dtypes.canonicalize_dtype(value.dtype)


def _pairs(keys: Any, values: Leaf) -> list[tuple[Key, Leaf]]:
    if not isinstance(keys, list):
        return [(keys, values)]
    if values is not None and len(values) != len(keys):
        raise ArgumentsError(f"kvstore: {len(keys)} keys and {len(values)} values")
    return list(zip(keys, values or [None] * len(keys), strict=True))


# --- the server, which keeps values by key and updates them by workers' pushes ---


Key = Hashable
#: The pushed value, the state and the old value -> the new value and state.
Update = Callable[[Array, Any, Array], tuple[Array, Any]]


@dataclass(frozen=True, slots=True)
class Rule:
    """An update of a key's value by pushes: the optimizer's first state, and a compiled function."""

    state: Pytree
    update: Update

    def exported(self, value: Array) -> ExportedUpdate:
        """Returns the update in a form to send to another process, for values, states and pushes like these."""
        leaves, tree = jax.tree.flatten(self.state)

        def update(pushed: Array, old: Array, *state: Array) -> list[Array]:
            new, after = self.update(pushed, tree.unflatten(state), old)
            return [new, *jax.tree.leaves(after)]

        return ExportedUpdate(jax_compat.exported(update, [value, value, *map(jnp.asarray, leaves)]))

    def portable(self, update: ExportedUpdate) -> Rule:
        """Returns the rule in a form to send to another process."""
        return Rule([on_host(jnp.asarray(x)) for x in jax.tree.leaves(self.state)], update)


@dataclass(frozen=True)
class ExportedUpdate:
    """A sent update; the state is a list of leaves. `program`: a `jax.export.Exported`."""

    program: Any

    def __call__(self, pushed: Array, state: Sequence[Array], value: Array) -> tuple[Array, list[Array]]:
        new, *after = self._run(pushed, value, *state)
        return new, after

    @functools.cached_property
    def _run(self) -> Callable[..., list[Array]]:
        return jax.jit(self.program.call)


@dataclass(frozen=True, slots=True)
class PushKey:
    """A worker's value for a key. Not answered."""

    worker: int
    key: Key
    value: np.ndarray


@dataclass(frozen=True, slots=True)
class PullKey:
    """Asks for a key's value. The answer is the value once it includes this worker's earlier pushes."""

    worker: int
    key: Key


@dataclass(frozen=True, slots=True)
class KeepKeys(OfProcess):
    """Makes a server keep some keys from now on. Answered. A key without a rule takes the value that is pushed."""

    worker: int
    values: Mapping[Key, np.ndarray]
    rules: Mapping[Key, Rule]


@dataclass(frozen=True, slots=True)
class SetRules(OfProcess):
    """Sets the rules of keys. Answered."""

    worker: int
    rules: Mapping[Key, Rule]


@dataclass(frozen=True, slots=True)
class ReadKey(OfProcess):
    """Asks for a key's value now: answered by it."""

    worker: int
    key: Key


Message = PushKey | PullKey | KeepKeys | SetRules | ReadKey


@dataclass(slots=True)
class _Kept:
    """A key: its value and rule, pushes of rounds that aren't complete, and waiting workers."""

    value: Array
    rule: Rule | None
    state: Pytree
    pushed: dict[int, list[np.ndarray]] = field(default_factory=dict)
    rounds: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)


class KeyServer:
    """Takes one message after the other; it has no thread, and waits for nobody. If it is `synchronous`, all workers'
    pushes to a key are summed into one update; otherwise each push is one."""

    def __init__(self, workers: int, *, synchronous: bool) -> None:
        self._workers, self.synchronous = workers, synchronous
        self._keys: dict[Key, _Kept] = {}

    def take(self, message: Message) -> list[tuple[int, Sent]]:
        """Returns answers that are due now, each with its worker (or process)."""
        if isinstance(message, KeepKeys):
            for key, value in message.values.items():
                rule = message.rules.get(key)
                self._keys[key] = _Kept(jnp.asarray(value), rule, rule and rule.state)
            return [(message.worker, None)]
        if isinstance(message, SetRules):
            for key, rule in message.rules.items():
                self._keys[key].rule, self._keys[key].state = rule, rule.state
            return [(message.worker, None)]
        if isinstance(message, ReadKey):
            return [(message.worker, np.array(self._keys[message.key].value))]
        kept, worker = self._keys[message.key], message.worker
        if isinstance(message, PushKey):
            kept.sent[worker] = kept.sent.get(worker, 0) + 1
            kept.pushed.setdefault(worker, []).append(message.value)
            self._apply(kept)
        else:
            kept.waiting.append((worker, kept.sent.get(worker, 0) if self.synchronous else 0))
        due = [worker for worker, round_ in kept.waiting if round_ <= kept.rounds]
        kept.waiting = [(worker, round_) for worker, round_ in kept.waiting if round_ > kept.rounds]
        return [(worker, np.array(kept.value)) for worker in due]

    def _apply(self, kept: _Kept) -> None:
        """Updates by complete rounds: a push of each worker, or any push."""
        while len(kept.pushed) == (self._workers if self.synchronous else 1):
            parts = [kept.pushed[w].pop(0) for w in sorted(kept.pushed)]
            kept.pushed = {w: some for w, some in kept.pushed.items() if some}
            total = functools.reduce(operator.add, parts[1:], jnp.asarray(parts[0]))
            kept.rounds += 1
            if kept.rule is not None:
                kept.value, kept.state = kept.rule.update(total, kept.state, kept.value)
            else:
                kept.value = total


@dataclass(frozen=True, slots=True)
class KeySpec(Spec):
    """Makes a `KeyServer`."""

    workers: int
    synchronous: bool

    def handler(self) -> Handler:
        return KeyServer(self.workers, synchronous=self.synchronous).take


def merged(values: Array | Sequence[Array]) -> np.ndarray:
    """Returns one value; for a list, which comes from one worker's devices, the sum."""
    return np.array(functools.reduce(np.add, map(np.asarray, values)) if isinstance(values, list | tuple) else values)
