"""`KeyServer`: keeps values by key, and updates them by workers' pushes (`autopar.kvstore`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.jax_types import Array, Pytree, Sent
from autopar.mpi.service import Handler
from autopar.servers.messages import OfProcess, Spec
from autopar.servers.server import on_host

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
            total = jnp.asarray(parts[0])
            for part in parts[1:]:
                total = total + part
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
    if not isinstance(values, list | tuple):
        return np.array(values)
    total = np.array(values[0])
    for value in values[1:]:
        total = total + np.asarray(value)
    return total
