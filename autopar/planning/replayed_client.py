"""Holds what replays of replicas share: a client's steps in this process, and the mean of what all come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.clients import mean_of
from autopar.run.runner import Runner
from autopar.tables.kinds import copied, materialize

Array = Any
_mean = jax.jit(mean_of)


class ReplayedClient:
    """A client's steps so far.

    Attributes:
      leaves: Its state, by number of the step's input.
      results: What its calls returned.
    """

    def __init__(self, runner: Runner, states: Mapping[int, int], start: Sequence[Any], calls: Sequence[Any]) -> None:
        self._runner, self._states, self._calls = runner, states, calls
        self.leaves = {k: copied(materialize(start[k])) for k in states}
        self.results: list[list[Any]] = []

    @property
    def turn(self) -> int:
        """Steps that it has done."""
        return len(self.results)

    @property
    def is_done(self) -> bool:
        """Whether it has no more minibatches."""
        return self.turn == len(self._calls)

    def computed(self) -> list[Any]:
        """Returns the results of its next step, which goes on until `end`."""
        return jax.block_until_ready(jax.tree.leaves(self._runner(self.call)))

    @property
    def call(self) -> list[Any]:
        """Returns the flat arguments of its next step."""
        return [self.leaves.get(k, x) for k, x in enumerate(self._calls[self.turn])]

    def end(self, results: list[Any], weights: Mapping[int, Array]) -> None:
        """End a step with some weights in place of those that it made."""
        for k, array in weights.items():
            results[self._states[k]] = array
        self.leaves = {k: results[out] for k, out in self._states.items()}
        self.results.append(results)


def with_means(start: Sequence[Any], clients: Sequence[ReplayedClient]) -> list[Any]:
    """Returns a call's flat arguments with the mean of the clients' states; the first one's, where it isn't floats."""
    made = list(start)
    for k in clients[0].leaves:
        own = [jnp.asarray(materialize(client.leaves[k])) for client in clients]
        made[k] = _mean(own) if jnp.issubdtype(own[0].dtype, jnp.floating) else own[0]
    return made
