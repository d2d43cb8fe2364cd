"""Ways of training by replicas, which change the function by design: `parallelize(step, sync=...)`.

Each client trains weights of its own on minibatches of its own; what is between them says the way. Clients are
processes, or groups of them, which then train one replica together, as by data parallelism. docs/replicas.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.errors import ArgumentsError


@dataclass(frozen=True)
class Average:
    """Each client takes some steps by itself; then its weights become the mean of all clients'.

    With `every=1` that is SYNC of "Improving the Efficiency of ... ASR" (section 2), and, where the optimizer is SGD,
    data parallelism; with more steps local SGD (Stich, 2019). With `outer=` it is DiLoCo (Douillard et al., 2023,
    algorithm 1): the mean of what clients changed is a gradient, by which an optimizer moves the weights that all had
    before. Optimizer slots, statistics, counts and random keys stay each client's own.

    Attributes:
      every: k, steps from one mean to the next.
      outer: An Optax transformation, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`; None: the mean itself.
      fragments: p, parts of the weights, of about as many bytes each, which are averaged in turn, k/p steps apart
        (Streaming DiLoCo, Douillard et al., 2025): a p-th of the bytes at a time.
      delay: d, steps after which a mean is merged. Until then it is on its way beside the compute; what a client
        changes meanwhile is added to it.
      clients: How many there are; None: every process is one. A client has as many adjacent processes as another.

    Raises:
      ArgumentsError: a number that makes no sense, or an `outer` that is no transformation.
    """

    every: int = 1
    outer: Any = field(default=None, repr=False)
    fragments: int = 1
    delay: int = 0
    clients: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentsError(f"Average({name}={value!r}): give a whole number, {least} or more")
        if self.every % self.fragments:
            raise ArgumentsError(
                f"Average(every={self.every}, fragments={self.fragments}): fragments are averaged in turn, at equal "
                f"distances; give an every= that {self.fragments} divides"
            )
        if self.delay >= self.every:
            raise ArgumentsError(
                f"Average(every={self.every}, delay={self.delay}): a mean is merged before the next one of the same "
                "weights is taken; give a delay= below every="
            )
        if self.outer is not None and not all(callable(getattr(self.outer, name, None)) for name in ("init", "update")):
            raise ArgumentsError(
                f"Average(outer={self.outer!r}): give an Optax transformation, optax.sgd(0.7, momentum=0.9, "
                "nesterov=True)"
            )
        check_clients(self.clients)

    @property
    def name(self) -> str:
        """What it is called."""
        if self.outer is not None:
            return "streaming DiLoCo" if self.fragments > 1 or self.delay else "DiLoCo"
        return "averaging in every step" if self.every == 1 else "local SGD"


def check_clients(clients: object) -> None:
    """Check a number of clients.

    Raises:
      ArgumentsError: it is none.
    """
    if clients is not None and (not isinstance(clients, int) or isinstance(clients, bool) or clients < 1):
        raise ArgumentsError(f"clients={clients!r}: give a whole number of clients, or None for one a process")
