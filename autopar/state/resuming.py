"""`Maker`: the first state of a training, or a saved one, where the training's step wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.run.step import MethodStep, ParallelStep
from autopar.state.checkpoint import restore
from autopar.state.files.places import Place
from autopar.state.init import init
from autopar.state.restoring import template_of


@dataclass(frozen=True)
class Maker:
    """Makes and restores states. `step`, `batch`, `call`: as of `Checkpointer`."""

    step: ParallelStep | MethodStep | None
    batch: Any
    call: Callable[[Any], Sequence[Any]] | None

    def made(self, make_state: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Makes the first state."""
        if self.step is None:
            return make_state(*args)
        return init(make_state, *args, step=self.step, batch=self.batch, call=self.call)

    def restored(
        self, path: Place, plan: Plan | None, make_state: Callable[..., Any], args: Sequence[Any], resize: bool
    ) -> tuple[Any, Any]:
        """Restores a state and its position. `plan`: that of the step when it was saved; `resize`: as of `resume`."""
        if self.step is None:
            like = make_state(*args) if resize else template_of(make_state, *args)
            return restore(path, like, resize=resize)
        pure = self.step.step if isinstance(self.step, MethodStep) else self.step
        own = pure.planner
        if plan is not None and pure.latest is None and own.may_follow(plan):
            pure.planner = own.following(plan)
        try:
            return self._restored(path, make_state, args, resize)
        except PlanError:  # the step has changed
            pure.planner = own
            return self._restored(path, make_state, args, resize)

    def _restored(
        self, path: Place, make_state: Callable[..., Any], args: Sequence[Any], resize: bool
    ) -> tuple[Any, Any]:
        if resize:
            return restore(path, self.made(make_state, args), resize=True)
        shapes = jax.eval_shape(make_state, *args)  # `init` makes arrays of all
        return restore(path, shapes, step=self.step, batch=self.batch, call=self.call)
