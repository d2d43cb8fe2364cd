"""`ObjectStep`: a step of another library's objects (flax.nnx, Equinox), as `explain` and `verify` see it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import ArgumentsError, RecompileWarning, warn
from autopar.ir.plan import Plan
from autopar.jax_types import Pytree
from autopar.run.arguments import step_name
from autopar.run.planned_step import PlannedStep, Upcoming
from autopar.run.step import MAX_PLANS, MethodStep, ParallelStep, PickledByOptions


@dataclass(eq=False, repr=False)
class ObjectStep(PickledByOptions, abc.ABC):
    """A step of a library's objects, which an integration (`autopar.integrations`) converts to steps of arrays."""

    fun: Callable[..., Pytree]  #: The user's step.
    options: Mapping[str, Any]  #: Options of `autopar.parallelize`.
    #: Static values -> the step of arrays for them.
    steps: dict[Any, ParallelStep] = field(default_factory=dict, init=False)
    upcoming: Upcoming | None = field(default=None, init=False)  #: The next batch, for all `steps`.
    _latest: ParallelStep | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fun)
        self.made_by(functools.partial(_wrapped, type(self)), self.options)

    @abc.abstractmethod
    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        """Runs one step."""

    @property
    def latest(self) -> PlannedStep | None:
        """The step as planned for the latest call that was planned."""
        return self._latest.latest if self._latest else None

    @property
    def name(self) -> str:
        return step_name(self.fun)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first call."""
        return self._latest.plan if self._latest else None

    @property
    def minibatch_clients(self) -> None:
        """None: all processes take global batches; ArgumentsError under `sync=`."""
        if self.options.get("sync") is not None:
            raise ArgumentsError(
                f"shard(step=...) deals minibatches to clients of a step of arrays, and {self.name} takes objects: "
                "make it a function of arrays"
            )

    def announce(self, batch: Pytree, following: Pytree | None) -> None:
        """Notes the batch after `batch` for all steps of arrays (`ParallelStep.announce`)."""
        if self.upcoming is None:
            self.upcoming = Upcoming()
            for step in self.steps.values():
                step.upcoming = self.upcoming
        self.upcoming.announce(batch, following)

    @abc.abstractmethod
    def pure(
        self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]
    ) -> tuple[ParallelStep, Sequence[Pytree], Mapping[str, Pytree]]:
        """Returns the step of arrays for these arguments, and its own arguments."""

    def lower(self, *args: Pytree, **kwargs: Pytree) -> Any:
        """Lowers the planned step as `jax.jit(step).lower` does."""
        step, pure_args, pure_kwargs = self.pure(args, kwargs)
        return step.lower(*pure_args, **pure_kwargs)

    def __get__(self, instance: Pytree, owner: type | None = None) -> Any:
        """Binds to an instance, as a function does."""
        return self if instance is None else MethodStep(self, instance)

    def _step_of(self, fixed: Any, make: Callable[[], ParallelStep], change: str, remedy: str) -> ParallelStep:
        """Returns the step of arrays for static values (`fixed`, hashable); makes it if they are new.

        `change`, `remedy`: for the warning that the step is planned again.
        """
        step = self.steps.get(fixed)
        if step is None:
            if len(self.steps) >= MAX_PLANS:
                raise ArgumentsError(
                    f"{self.name} was called in {MAX_PLANS} different ways, and is planned and compiled anew for each: "
                    f"{change}. {remedy}"
                )
            if self.steps:
                warn(f"{self.name} is planned and compiled again: {change}", RecompileWarning)
            step = self.steps[fixed] = make()
            step.upcoming = self.upcoming
        self._latest = step
        return step


def _wrapped(kind: type[ObjectStep], fun: Callable[..., Pytree], **options: Any) -> ObjectStep:
    return kind(fun, options)


#: The steps that `explain`, `verify` and the like take.
AnyStep = ParallelStep | ObjectStep | MethodStep


def require_step(step: Pytree, what: str) -> None:
    """Raises ArgumentsError unless `parallelize` returned a user's step. `what`: the function that takes it."""
    if not isinstance(step, (ParallelStep, ObjectStep, MethodStep)):
        hint = f": {what}(autopar.parallelize({getattr(step, '__name__', 'step')}), ...)" if callable(step) else ""
        raise ArgumentsError(f"{what} takes a step that parallelize returned, not a {type(step).__name__}{hint}")


def unwrapped(
    step: AnyStep, args: Sequence[Pytree], kwargs: Mapping[str, Pytree], what: str
) -> tuple[ParallelStep, Sequence[Pytree], Mapping[str, Pytree]]:
    """Returns the step of arrays behind any kind of step, and its arguments. `what`: the function that takes it. Raises
    ArgumentsError if `step` isn't from `parallelize`, or there are no arguments."""
    require_step(step, what)
    if not args and not kwargs:
        raise ArgumentsError(f"{what} takes a step's arguments as well: {what}({step.name}, state, batch)")
    if isinstance(step, MethodStep):
        return unwrapped(step.step, (step.instance, *args), kwargs, what)
    return step.pure(args, kwargs) if isinstance(step, ObjectStep) else (step, args, kwargs)
