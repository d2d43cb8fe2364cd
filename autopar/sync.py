"""Ways of training with clients, which change the function by design: `parallelize(step, sync=...)`.

Each client trains on minibatches of its own, as a rule with weights of its own; the way says what they exchange.
Clients are processes, or groups of them, which then train one replica by data parallelism. docs/replicas.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from autopar.errors import ArgumentsError, StabilityWarning, check_whole, is_number, warn
from autopar.jax_types import Pytree


class Replicated:
    """A way by which each client has weights of its own, and exchanges them with others."""

    clients: int | None
    #: As for `Average`: all weights are exchanged at once, and waited for.
    outer: Pytree = None
    fragments: int = 1
    delay: int = 0
    #: Partners of an exchange: a name in `ir.plan.TOPOLOGIES`, or "center" for servers that keep one.
    partners: str = "all"
    _name: str = ""
    #: As for `Hybrid`.
    learning_rate: float | None = None
    curvature: float | Literal["measure"] | None = None

    @property
    def name(self) -> str:
        """The way's name in texts."""
        return self._name

    @property
    def call(self) -> str:
        """The way as a user writes it."""
        return f"{type(self).__name__}()"

    @property
    def is_asynchronous(self) -> bool:
        """Says whether no client waits for another."""
        return self.partners in ("center", "neighbors")

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return 1

    @property
    def slope(self) -> float | None:
        """The product eta h, if both are given."""
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
    """A way that is known to be stable up to some learning rate.

    Attributes:
      clients: Number of clients; None: every process is one. Each has the same number of adjacent processes.
      learning_rate: eta, a step's as of SGD, to check that training is stable.
      curvature: h, the largest eigenvalue of the loss's Hessian, for the same. "measure": eta h is measured before the
        first step, on its state and minibatch, by power iteration on the step itself (at most 64 of its Jacobian-vector
        products, on one device).
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
            if not is_number(value) or value <= 0:
                measured = ', or "measure"' * (name == "curvature")
                raise ArgumentsError(f"{way}({name}={value!r}): give a number above 0{measured}, or leave it out")


@dataclass(frozen=True)
class Average(Replicated):
    """Each client takes some steps by itself; then its weights become the mean of all clients'.

    With `every=1` that is SYNC of Zhang et al., "Distributed deep learning strategies for automatic speech recognition"
    (section 3.2), and, if the update is linear in gradients (SGD, momentum), data parallelism; with more steps it is
    local SGD (Stich, 2019). With `outer=` it is DiLoCo (Douillard et al., 2023, algorithm 1): the clients' mean change
    is a gradient, by which an optimizer moves the weights that all had before. Optimizer slots, statistics, counts and
    random keys stay each client's own.

    Attributes:
      every: k, steps from one mean to the next.
      outer: An Optax transformation, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`; None: the mean itself.
      fragments: p, parts of the weights of about equal bytes, which are averaged in turn, k/p steps apart (Streaming
        DiLoCo, Douillard et al., 2025): a p-th of the bytes at a time.
      delay: d, steps after which a mean is merged. Until then it travels beside the compute; what a client changes
        meanwhile is added to it.
      clients: Number of clients (default: one per process). Processes are split evenly: each client has the same number
        of adjacent ones.

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
            check_whole(f"Average({name}=%r)", getattr(self, name), least)
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
    """Servers keep the state. Each worker pulls weights, computes a gradient of its own minibatch, and pushes it; a
    server applies each push as it comes (ASGD; MXNET-MPI, section 2).

    So a gradient is applied to weights that have moved since it was computed. How many pushes came in between, its
    staleness, is recorded, and `autopar.replay_timeline` computes the same from the record. The worker computes
    everything in the update that depends on gradients alone, such as the norm of a clip. The optimizer's state is the
    servers', including counts: a schedule goes by the pushes of all workers.

    Attributes:
      staleness: s: a worker begins its step c once all workers' pushes of steps up to c-1-s are applied (stale
        synchronous parallel, Ho et al., 2013). 0: no gradient is stale, and all of a step are averaged and applied
        once: data parallelism. None: no bound.
      warmup: Number of first steps that are trained by data parallelism.
      clients: Number of workers (default: one per process). Processes are split evenly; those of a worker are adjacent,
        and compute its gradient together ("mpi-ASGD").
      servers: Number of processes that keep the state, the first ones, or of dedicated servers if the job has some
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
            check_whole("Async(staleness=%r)", self.staleness, 0, ", or None for no bound")
        check_whole("Async(warmup=%r)", self.warmup, 0)

    @property
    def is_joined(self) -> bool:
        """Says whether some steps are trained by data parallelism."""
        return self.staleness == 0 or self.warmup > 0

    @property
    def name(self) -> str:
        """The way's name in texts."""
        return "asynchronous SGD" if self.staleness is None else f"staleness at most {self.staleness}"


@dataclass(frozen=True)
class Elastic(_Bounded):
    """Each worker trains weights of its own; now and then an exchange pulls them and a centre towards each other
    (EASGD, Zhang et al., 2015; MXNET-MPI, section 5).

    Servers keep the centre c. After every `interval` steps, beside the next step, e = alpha (x - c) is computed from
    one pair of a worker's weights x and the centre: c becomes c + e, and the step's result is reduced by e (equations 2
    and 3 of MXNET-MPI; its figure 8 moves x by a centre that has moved already). Everything else that a step keeps
    stays each worker's own.

    Attributes:
      alpha: The strength of the pull, above 0 and below 1.
      interval: Steps from one exchange of a worker to its next.
      clients: Number of workers (default: one per process). Processes are split evenly; those of a worker are adjacent,
        and train one replica together ("mpi-ESGD").
      servers: Number of processes that keep the centre, the first ones, or of dedicated servers if the job has some
        (`launch --servers`); None: all.
      learning_rate, curvature: eta and h, the largest eigenvalue of the loss's Hessian, to check that training is
        stable. Each step with an exchange contracts up to alpha = (4 - 2 eta h) / (4 - eta h) (Zhang et al., section
        4.1, for workers in turn); above that a warning says so. `curvature="measure"`: eta h is measured before the
        first step, by power iteration on the step itself.

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    alpha: float
    interval: int = 64
    servers: int | None = None

    partners = "center"
    _name = "elastic averaging"

    def __post_init__(self) -> None:
        check_clients(self.servers, "servers")
        if not is_number(self.alpha) or not 0 < self.alpha < 1:
            raise ArgumentsError(
                f"Elastic(alpha={self.alpha!r}): give a number above 0 and below 1, such as 0.9 / workers"
            )
        check_whole("Elastic(interval=%r)", self.interval, 1)
        super().__post_init__()

    @property
    def call(self) -> str:
        return f"Elastic(interval={self.interval})"

    @property
    def period(self) -> int:
        return self.interval

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

    After a step a client has the mean of the weights before it, plus the change by its own step: with SGD x_i' = mean_j
    x_j - eta g_i(x_i). So a mean takes no time of its own if computing takes longer; but gradients are computed at
    weights that differ from the mean by the distance between clients. With SGD on a quadratic of curvature h this
    distance shrinks by eta h a step: eta h must be below 1, where SYNC allows 2.

    Attributes:
      clients: Number of clients (default: one per process). Processes are split evenly: each client has the same number
        of adjacent ones.
      learning_rate, curvature: eta and h, to check that training is stable (as for `Elastic`).

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    delay = 1
    _name = "averaging beside the gradient"


@dataclass(frozen=True)
class DPSGD(_Bounded):
    """After each step a client's weights become the mean of its own and a neighbour's, left and right in turn, in a
    ring (decentralised parallel SGD; Zhang et al., "Distributed deep learning strategies for automatic speech
    recognition", equation 4; Lian et al., 2017).

    All clients have a partner in every step, so their number is even. They wait for their partners alone, and send each
    other all weights once, where a mean over all costs up to twice that.

    Attributes:
      clients: Number of clients (default: one per process). Processes are split evenly: each client has the same number
        of adjacent ones.
      learning_rate, curvature: eta and h, to check that training is stable (as for `Elastic`): eta h below 2.

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    partners = "pairs"
    _name = "averaging with a neighbour in every step"


@dataclass(frozen=True)
class ADPSGD(_Bounded):
    """A client's weights are averaged with a neighbour's beside each step, and nobody waits for another's step
    (asynchronous decentralised parallel SGD; Lian et al., 2018; Zhang et al., "Distributed deep learning strategies for
    automatic speech recognition", section 3.2).

    In an even ring every second client is active: beside each step it asks its left and its right neighbour in turn,
    with the weights x_i that the step begins with. The passive neighbour answers at once, from a thread: both become
    the mean m of this one pair of weights. The change by a client's step meanwhile is added: with SGD x_i' = m - eta
    g_i(x_i). So gradients alone move the sum of all weights; on a quadratic of curvature h eta h must be below 1. A
    passive client's leaves show its neighbours' averages after its next step, `average(state)` at once.

    Attributes:
      clients: Number of clients (default: one per process). Processes are split evenly: each client has the same number
        of adjacent ones.
      learning_rate, curvature: eta and h, to check that training is stable (as for `Elastic`).

    Raises:
      ArgumentsError: a number that makes no sense.
    """

    delay = 1
    _name = "averaging with neighbours at any time"
    partners = "neighbors"


#: A way of training by replicas.
Sync = Replicated | Async


def stable_slope(delay: int) -> float:
    """Returns the eta h up to which SGD with gradients that are D = `delay` steps late converges on a quadratic of one
    parameter: 2 sin(pi / (4D + 2)), where a root of z^(D+1) - z^D + eta h first leaves the unit circle. 0: 2, as of
    SGD; 1: 1."""
    return 2 * math.sin(math.pi / (4 * delay + 2))


def stable_alpha(learning_rate: float, curvature: float, clients: int = 1, *, synchronous: bool = False) -> float:
    """Returns the largest alpha of `Elastic` by which a quadratic doesn't diverge (Zhang et al., section 4.1).

    Args:
      learning_rate, curvature: eta, h.
      clients: p.
      synchronous: Whether all clients exchange at once: (4 - 2 eta h) / (2 + 2p - p eta h). Else they do in turn: (4 -
        2 eta h) / (4 - eta h), up to which no exchange expands; several clients may allow more. 0 or less: no alpha is
        stable.
    """
    slope = learning_rate * curvature
    return (4 - 2 * slope) / (2 + 2 * clients - clients * slope if synchronous else 4 - slope)


def check_clients(count: object, noun: str = "clients") -> None:
    """Checks a number of clients, or of something else, or raises ArgumentsError."""
    if count is not None:
        check_whole(f"{noun}=%r", count, 1, ", or leave it out", of=f" of {noun}")
