"""Ways of training by replicas, which change the function by design: `parallelize(step, sync=...)`.

Each client trains weights of its own on minibatches of its own; what is between them says the way. Clients are
processes, or groups of them, which then train one replica together, as by data parallelism. docs/replicas.md.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field
from typing import Literal

from autopar.errors import ArgumentsError, StabilityWarning, warn
from autopar.jax_types import Pytree


class Replicated(abc.ABC):
    """A way by which each client has weights of its own, which it exchanges with others."""

    clients: int | None
    #: As of `Average`: all weights are exchanged at once, and waited for.
    outer: Pytree = None
    fragments: int = 1
    delay: int = 0
    #: With whom: all other clients at once, a neighbour in a ring at once, servers that keep a centre, or neighbours in
    #: a ring whenever that suits.
    partners: Literal["all", "pairs", "center", "neighbors"] = "all"
    #: As of `Hybrid`.
    learning_rate: float | None = None
    curvature: float | Literal["measure"] | None = None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Returns what it is called."""

    @property
    def call(self) -> str:
        """Returns how a user writes it."""
        return f"{type(self).__name__}()"

    @property
    def is_asynchronous(self) -> bool:
        """Says whether no client waits for another one."""
        return self.partners in ("center", "neighbors")

    @property
    def is_ring(self) -> bool:
        """Says whether clients exchange weights with neighbours alone."""
        return self.partners in ("pairs", "neighbors")

    @property
    def period(self) -> int:
        """Returns the steps from one exchange to the next."""
        return 1

    @property
    def slope(self) -> float | None:
        """eta h, where both are given."""
        if self.learning_rate is None or not isinstance(self.curvature, int | float):
            return None
        return self.learning_rate * self.curvature

    def check_stable(self, slope: float) -> None:
        """Warns if training may diverge. `slope`: eta h."""
        most = stable_slope(self.delay)
        if slope >= most:
            warn(
                f"{type(self).__name__}(): eta h is {slope:.3g} (learning rate times curvature), and clients' weights "
                f"come together below {most:.3g} only: above that they diverge. Give a smaller learning rate",
                StabilityWarning,
            )


@dataclass(frozen=True, kw_only=True)
class _Bounded(Replicated):
    """A way that is known to be stable up to some rate only.

    Attributes:
      clients: How many there are; None: every process is one. A client has as many adjacent processes as another.
      learning_rate: eta, if training is to be known to be stable: a step's, as of SGD.
      curvature: h, the largest eigenvalue of the loss's Hessian, for the same. "measure": eta h is measured before the
        first step, on its state and minibatch, by power iteration on the step itself (64 Jacobian-vector products of it
        at most, on one device).
    """

    clients: int | None = None
    learning_rate: float | None = None
    curvature: float | Literal["measure"] | None = None

    def __post_init__(self) -> None:
        check_clients(self.clients)
        way = type(self).__name__
        for name in ("learning_rate", "curvature"):
            value = getattr(self, name)
            if value is None or (name == "curvature" and value == "measure"):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                measured = ', or "measure"' * (name == "curvature")
                raise ArgumentsError(f"{way}({name}={value!r}): give a number above 0{measured}, or leave it out")


@dataclass(frozen=True)
class Average(Replicated):
    """Each client takes some steps by itself; then its weights become the mean of all clients'.

    With `every=1` that is SYNC of Zhang et al., "Distributed deep learning strategies for automatic speech recognition"
    (section 3.2), and, where the update is linear in gradients (SGD, momentum), data parallelism; with more steps local
    SGD (Stich, 2019). With `outer=` it is DiLoCo (Douillard et al., 2023,
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
    outer: Pytree = field(default=None, repr=False)
    fragments: int = 1
    delay: int = 0
    clients: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            _check_whole(f"Average({name}=%r)", getattr(self, name), least)
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
    def call(self) -> str:
        said = {"every": self.every, "fragments": self.fragments}
        options = [f"{name}={value}" for name, value in said.items() if value > 1]
        options += ["outer"] * (self.outer is not None) + [f"delay={self.delay}"] * (self.delay > 0)
        return f"Average({', '.join(options)})"

    @property
    def period(self) -> int:
        return self.every

    @property
    def name(self) -> str:
        if self.outer is not None:
            return "streaming DiLoCo" if self.fragments > 1 or self.delay else "DiLoCo"
        return "averaging in every step" if self.every == 1 else "local SGD"


@dataclass(frozen=True)
class Async:
    """Servers keep the state; each worker pulls weights, computes a gradient of its own minibatch, and pushes it, and a
    server updates what it keeps by each push as it comes (ASGD; MXNET-MPI, section 2).

    So a gradient is applied to weights that have moved since it was computed: how often, its staleness, is recorded,
    and `autopar.replay_timeline` computes the same of the record. Everything of the update that gradients alone decide,
    as the norm of a clip, is computed by the worker. The state of the optimizer is the servers', counts among it: a
    schedule goes by the pushes of all workers.

    Attributes:
      staleness: s: a worker begins its step c once all workers' pushes of steps up to c-1-s are applied (stale
        synchronous parallel, Ho et al., 2013). 0: no gradient is stale, and all of a step are averaged before they are
        applied once: data parallelism. None: no bound.
      warmup: Steps that are trained by data parallelism before.
      clients: How many workers there are; None: every process is one. A worker has as many adjacent processes as
        another, which compute its gradient together ("mpi-ASGD").
      servers: How many keep the state, the first ones of the processes, or of dedicated servers where the job has some
        (`launch --servers`); None: all.
    """

    staleness: int | None = None
    warmup: int = 0
    clients: int | None = None
    servers: int | None = None

    is_asynchronous = True

    def __post_init__(self) -> None:
        check_clients(self.clients)
        check_clients(self.servers, "servers")
        if self.staleness is not None:
            _check_whole("Async(staleness=%r)", self.staleness, 0, ", or None for no bound")
        _check_whole("Async(warmup=%r)", self.warmup, 0)

    @property
    def is_joined(self) -> bool:
        """Says whether some steps are trained by data parallelism."""
        return self.staleness == 0 or self.warmup > 0

    @property
    def name(self) -> str:
        """Returns what it is called."""
        return "asynchronous SGD" if self.staleness is None else f"staleness at most {self.staleness}"


@dataclass(frozen=True)
class Elastic(_Bounded):
    """Each worker trains weights of its own, and now and then an exchange pulls them and a centre towards each other
    (EASGD, Zhang et al., 2015; MXNET-MPI, section 5).

    Servers keep the centre c. Behind every `interval` steps, and in the next one, e = alpha (x - c) of one pair of a
    worker's weights x and the centre: c becomes c + e, and x what the step makes of it less e (equations 2 and 3 of
    MXNET-MPI; its figure 8 moves x by a centre that has moved already). The exchange runs beside the step. Everything
    else that a step keeps stays each worker's own.

    Attributes:
      alpha: How far, above 0 and below 1.
      interval: Steps from one exchange of a worker to its next.
      clients: How many workers there are; None: every process is one. A worker has as many adjacent processes as
        another, which train one replica together ("mpi-ESGD").
      servers: How many keep the centre, the first ones of the processes, or of dedicated servers where the job has some
        (`launch --servers`); None: all.
      learning_rate, curvature: eta and h, if training is to be known to be stable, h being the largest eigenvalue of
        the loss's Hessian. Where alpha is above (4 - 2 eta h) / (4 - eta h), up to which each step with an exchange
        contracts (Zhang et al., section 4.1, for workers in turn), a warning says so. `curvature="measure"`: eta h is
        measured before the first step, by power iteration on the step itself.

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    alpha: float
    interval: int = 64
    servers: int | None = None

    partners = "center"

    def __post_init__(self) -> None:
        check_clients(self.servers, "servers")
        if not isinstance(self.alpha, int | float) or isinstance(self.alpha, bool) or not 0 < self.alpha < 1:
            raise ArgumentsError(
                f"Elastic(alpha={self.alpha!r}): give a number above 0 and below 1, such as 0.9 / workers"
            )
        _check_whole("Elastic(interval=%r)", self.interval, 1)
        super().__post_init__()

    @property
    def call(self) -> str:
        return f"Elastic(interval={self.interval})"

    @property
    def period(self) -> int:
        return self.interval

    @property
    def name(self) -> str:
        return "elastic averaging"

    def check_stable(self, slope: float) -> None:
        most = stable_alpha(1.0, slope)
        if self.alpha > most:
            remedy = (
                "Give a smaller learning rate" if most <= 0 else f"Give an alpha up to {most:.3g}, or train at less"
            )
            warn(
                f"Elastic(alpha={self.alpha:.3g}): with eta h = {slope:.3g} (learning rate times curvature) an "
                f"exchange and a step contract up to (4 - 2 eta h) / (4 - eta h) = {most:.3g}; above that weights may "
                f"diverge. {remedy}",
                StabilityWarning,
            )


@dataclass(frozen=True)
class Hybrid(_Bounded):
    """The mean of all clients' weights is taken beside the gradient (HYBRID; Zhang et al., "Distributed deep learning
    strategies for automatic speech recognition", section 3.2).

    Behind a step a client has the mean of what all had before it, and what its own step has changed:
    x_i' = mean_j x_j - eta g_i(x_i) with SGD. So a mean takes no time of its own where computing takes longer, and each
    gradient is of weights that are off those which it is applied to by as much as clients are apart. With SGD on a
    quadratic of curvature h that shrinks by eta h a step: eta h must be below 1, where SYNC has 2.

    Attributes:
      clients: How many there are; None: every process is one. A client has as many adjacent processes as another.
      learning_rate, curvature: eta and h, if training is to be known to be stable (as of `Elastic`).

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    delay = 1

    @property
    def name(self) -> str:
        return "averaging beside the gradient"


@dataclass(frozen=True)
class DPSGD(_Bounded):
    """Behind each step a client's weights become the mean of its own and a neighbour's, left and right in turn, in a
    ring (decentralised parallel SGD; Zhang et al., "Distributed deep learning strategies for automatic speech
    recognition", equation 4; Lian et al., 2017).

    All clients have a partner in every step, so their number is even. They wait for their partners alone, and send each
    other all weights once, where a mean over all costs up to twice that.

    Attributes:
      clients: How many there are; None: every process is one. A client has as many adjacent processes as another.
      learning_rate, curvature: eta and h, if training is to be known to be stable (as of `Elastic`): eta h below 2.

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    partners = "pairs"

    @property
    def name(self) -> str:
        return "averaging with a neighbour in every step"


@dataclass(frozen=True)
class ADPSGD(_Bounded):
    """A client's weights are averaged with a neighbour's beside each step, and nobody waits for another one's step
    (asynchronous decentralised parallel SGD; Lian et al., 2018; Zhang et al., "Distributed deep learning strategies for
    automatic speech recognition", section 3.2).

    In an even ring every second client is active: beside each step it asks its left and its right neighbour in turn,
    with the weights x_i that the step begins with. The passive neighbour answers at once, from a thread: both become
    the mean m of this one pair of weights. What a client's step changes meanwhile is added: x_i' = m - eta g_i(x_i)
    with SGD. So the sum of all weights moves by gradients alone; on a quadratic of curvature h eta h must be below 1. A
    passive client's leaves have what neighbours averaged with it behind its next step, `average(state)` has it at once.

    Attributes:
      clients: How many there are; None: every process is one. A client has as many adjacent processes as another.
      learning_rate, curvature: eta and h, if training is to be known to be stable (as of `Elastic`).

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    delay = 1
    partners = "neighbors"

    @property
    def name(self) -> str:
        return "averaging with neighbours at any time"


#: A way of training by replicas.
Sync = Replicated | Async


def stable_slope(delay: int) -> float:
    """Returns the eta h up to which gradients that are some steps late make a quadratic of one parameter converge:
    2 sin(pi / (4D + 2)), the root of z^(D+1) - z^D + eta h that leaves the unit circle first.

    Args:
      delay: D, in steps. 0: 2, as of SGD; 1: 1.
    """
    return 2 * math.sin(math.pi / (4 * delay + 2))


def stable_alpha(learning_rate: float, curvature: float, clients: int = 1, *, synchronous: bool = False) -> float:
    """Returns the largest alpha of `Elastic` by which a quadratic doesn't diverge (Zhang et al., section 4.1).

    Args:
      learning_rate, curvature: eta, h.
      clients: p.
      synchronous: Whether all clients exchange at once: (4 - 2 eta h) / (2 + 2p - p eta h). Else one after the other:
        (4 - 2 eta h) / (4 - eta h), up to which no exchange expands; with several clients more may do. 0 or less: no
        alpha is stable.
    """
    slope = learning_rate * curvature
    return (4 - 2 * slope) / (2 + 2 * clients - clients * slope if synchronous else 4 - slope)


def check_clients(count: object, noun: str = "clients") -> None:
    """Checks a number of clients, or of something else.

    Raises:
      ArgumentsError: it is none.
    """
    if count is not None:
        _check_whole(f"{noun}=%r", count, 1, ", or leave it out", of=f" of {noun}")


def _check_whole(what: str, value: object, least: int, otherwise: str = "", of: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentsError(f"{what % (value,)}: give a whole number{of}, {least} or more{otherwise}")
