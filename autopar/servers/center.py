"""`Center`: keeps a centre of all workers' weights, and pulls both towards each other (`autopar.sync.Elastic`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar.jax_types import Array
from autopar.mpi.service import Handler
from autopar.protocols import Log
from autopar.servers.messages import Exchange, Kept, Pulled, Read, Reply, Stepped
from autopar.servers.spec import Spec


class Center:
    """Takes one message after the other. An exchange moves one pair of weights and centre, so that the centre gains
    what a worker loses (Zhang et al., "Deep learning with elastic averaging SGD", 2015).

    Args:
      leaves: This server's part of the centre, by any number; copied.
      alpha: The strength of an exchange's pull.
      workers: N.
    """

    def __init__(self, leaves: Mapping[int, Array], alpha: float, workers: int) -> None:
        self._places, self._leaves = tuple(leaves), [jnp.copy(x) for x in leaves.values()]
        self._alpha, self._log = alpha, Log(workers)

    @property
    def leaves(self) -> dict[int, Array]:
        """The part of the centre that it keeps, by number."""
        return dict(zip(self._places, self._leaves, strict=True))

    def take(self, message: Exchange | Read) -> list[tuple[int, Reply]]:
        """Returns the answer with its worker; raises AutoparError if an exchange isn't the next one of its worker."""
        worker = message.worker
        if isinstance(message, Read):
            wanted = message.leaves
            leaves = {k: np.array(x) for k, x in self.leaves.items() if wanted is None or k in wanted}
            return [(worker, Kept(leaves, {}, self._log.events))]
        version = self._log.version
        self._log.see(worker)
        self._count(message)
        self._leaves, moves = _exchanged(self._leaves, list(message.values), self._alpha)
        return [(worker, Pulled(version, [np.asarray(x) for x in moves]))]

    def _count(self, message: Exchange | Stepped) -> None:
        self._log.check_next(message.worker, message.step, "sent exchange")
        self._log.change(message.worker, message.step)


@dataclass(frozen=True, slots=True)
class CenterSpec(Spec):
    """Makes a server that keeps a part of a centre (arguments of `Center`)."""

    leaves: Mapping[int, Array]
    alpha: float
    workers: int

    def handler(self) -> Handler:
        return Center(self.leaves, self.alpha, self.workers).take

    def portable(self) -> Spec:
        return replace(self, leaves={k: np.asarray(x) for k, x in self.leaves.items()})


@jax.jit
def _exchanged(center: Sequence[Array], weights: Sequence[Array], alpha: float) -> tuple[list[Array], list[Array]]:
    """Returns the next centre, c + e, and the moves of the weights: e = alpha (x - c)."""
    moves = [(alpha * (x - c)).astype(c.dtype) for x, c in zip(weights, center, strict=True)]
    return [c + e for c, e in zip(center, moves, strict=True)], moves
