"""`KeyServer`: keeps values by key, and updates them by what workers push (`autopar.kvstore`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
Key = Hashable
#: What is pushed, the state and the old value -> the new value and state.
Update = Callable[[Array, Any, Array], tuple[Array, Any]]


@dataclass(frozen=True, slots=True)
class PushKey:
    """A worker's value for a key. Not answered."""

    worker: int
    key: Key
    value: np.ndarray


@dataclass(frozen=True, slots=True)
class PullKey:
    """Asks for a key's value: answered by it, once the worker's own pushes are in it."""

    worker: int
    key: Key


@dataclass(slots=True)
class _Kept:
    """A key: its value, the optimizer's state, pushes of a round that aren't all there, and those who wait."""

    value: Array
    state: Any
    pushed: dict[int, list[np.ndarray]] = field(default_factory=dict)
    rounds: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)


class KeyServer:
    """Takes one message after the other; it has no thread, and waits for nobody.

    Args:
      workers: N.
      synchronous: Whether the pushes of all workers to a key are summed, and are one update; else each push is one.
    """

    def __init__(self, workers: int, *, synchronous: bool) -> None:
        self._workers, self.synchronous = workers, synchronous
        self._keys: dict[Key, _Kept] = {}
        self._update: Update | None = None
        self._initial: Callable[[Array], Any] = lambda _: ()

    def init(self, key: Key, value: np.ndarray) -> None:
        """Keep a key."""
        array = jnp.asarray(value)
        self._keys[key] = _Kept(array, self._initial(array))

    def set_optimizer(self, initial: Callable[[Array], Any], update: Update) -> None:
        """Update values so from now on, with new states."""
        self._initial, self._update = initial, jax.jit(update)
        for kept in self._keys.values():
            kept.state = initial(kept.value)

    @property
    def updates(self) -> bool:
        """Says whether there is an optimizer."""
        return self._update is not None

    def take(self, message: PushKey | PullKey) -> list[tuple[int, np.ndarray]]:
        """Returns answers that are due now, each with the worker that it is for."""
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
        """Update by what is complete: a push of each worker, or any."""
        while len(kept.pushed) == (self._workers if self.synchronous else 1):
            parts = [kept.pushed[w].pop(0) for w in sorted(kept.pushed)]
            kept.pushed = {w: some for w, some in kept.pushed.items() if some}
            total = jnp.asarray(parts[0])
            for part in parts[1:]:
                total = total + part
            kept.rounds += 1
            if self._update is not None:
                kept.value, kept.state = self._update(total, kept.state, kept.value)
            else:
                kept.value = total


def merged(values: Array | Sequence[Array]) -> np.ndarray:
    """Returns one value: the sum of a list's, which are of one worker's devices."""
    if not isinstance(values, list | tuple):
        return np.array(values)
    total = np.array(values[0])
    for value in values[1:]:
        total = total + np.asarray(value)
    return total
