"""`StepRequest`: a user's request for a step, from which the chosen way makes its planner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax

from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError
from autopar.ir.pipeline import Pipeline
from autopar.ir.strategy import TENSOR, split_method
from autopar.measure.figures import Machine
from autopar.run.drift import AlphaWatch
from autopar.run.planner import Planner
from autopar.run.step import ParallelStep
from autopar.sync import Sync
from autopar.ways.way import Way


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRequest:
    """A user's request for a step."""

    planner: Planner  #: A planner with the options that all ways share, without devices.
    #: As for `parallelize`.
    mesh: jax.sharding.Mesh | None
    data_axis: str | None
    tensor_axis: str | None
    pipeline: Pipeline | None
    sync: Sync | None
    replan: Literal["warn", "off"]
    machine_of: Callable[[Devices], Machine]  #: Measures the machine that some devices are in.
    parallelize: Callable[..., ParallelStep]  #: Makes the same step with other options.
    way_for: Callable[..., type[Way]]  #: Chooses the way (`ways.table`).

    @functools.cached_property
    def devices(self) -> Devices:
        """All devices that the step may have; raises ArgumentsError if products are to be divided, and no axis of the
        mesh can do that."""
        return Devices.of(self.mesh, self.data_axis, self._tensor_axis())

    def on(self, devices: Devices, count: int | None = None) -> Planner:
        """Returns a planner for some devices. `count`: number of parts of a batch; None: all devices along the data
        axis."""
        count, old = devices.count if count is None else count, self.planner
        options = replace(
            old.options,
            devices=count,
            accelerators=devices.mesh.devices.flat[0].platform != "cpu",
            rank_devices=jax.local_device_count(),
            tensor=devices.tensor,
        )
        return replace(
            old,
            options=options,
            machine=self.machine_of(devices),
            devices=devices if devices.mesh.size > 1 else None,
            per_device=old.per_device and replace(old.per_device, count=count),
        )

    def planner_by(self, **changes: object) -> Planner:
        """Returns the planner of the same request with changes."""
        request = replace(self, **changes)
        return self.way_for(request.sync, request.pipeline, request.planner.options.strategy).planner(request)

    def made(self, planner: Planner, *, is_watched: bool) -> ParallelStep:
        """Returns the step. `is_watched`: this way allows watching the rows that batches touch."""
        is_watched = is_watched and self.replan != "off" and not self.devices.processes.several
        return ParallelStep(planner, AlphaWatch() if is_watched else None)

    @property
    def tensor(self) -> str:
        """The option that asks for a tensor axis, as the user wrote it, or ""."""
        if self.tensor_axis is not None:
            return f"tensor_axis={self.tensor_axis!r}"
        strategy = self.planner.options.strategy
        methods = strategy.values() if isinstance(strategy, Mapping) else [strategy]
        return "strategy='tensor'" * any(split_method(method)[0] == TENSOR for method in methods)

    def _tensor_axis(self) -> str | None:
        """Returns the axis of the mesh over which products are divided, if any."""
        if not self.tensor:
            return None
        names: Sequence[str] = [] if self.mesh is None else list(self.mesh.axis_names)
        others = [axis for axis in names if axis != (self.data_axis or names[0])]
        if not others or (self.tensor_axis is not None and self.tensor_axis not in others):
            shown = f"; there are {', '.join(map(repr, others))}" if others else ""
            raise ArgumentsError(
                f"{self.tensor} takes a mesh with an axis beside the data axis{shown}: "
                'mesh=jax.make_mesh((2, 4), ("data", "tensor")), with 1 in place of 2 to divide no batch'
            )
        return self.tensor_axis or others[0]
