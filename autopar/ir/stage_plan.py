"""`PipelinePlan`: the stages of a pipeline as a plan has them: what is decided, and what it is predicted to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.asynchronous import Calls
from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import Places, Schedule


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage.

    Attributes:
      devices: By number; several are replicas, which take microbatches in turn.
      weights: Paths of its parameters, in the order of their first use.
      seconds: Kind of task ("F", "B", "W": gradients of weights) -> what it takes for a microbatch; nothing where the
        devices' rates aren't known.
      update_s: Seconds of the update of its weights and slots.
      flops: Floating-point operations of its products for a microbatch.
      ahead_bytes, back_bytes: Sent for a microbatch to later stages, and to earlier ones.
      state_bytes: Of its weights, slots and other leaves, and of copies of other stages' weights.
      gradient_bytes: Of the sums that it keeps over the microbatches: of tables the touched rows.
      weight_bytes: Of its weights.
      activation_bytes: What the forward of a microbatch leaves for its backward.
      exchanged_bytes, exchanges: What each device of a tensor axis sends to the others for a microbatch, and how often.
    """

    devices: tuple[int, ...]
    weights: tuple[str, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    update_s: float = 0.0
    flops: float = 0.0
    ahead_bytes: int = 0
    back_bytes: int = 0
    state_bytes: int = 0
    gradient_bytes: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    exchanged_bytes: int = 0
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The stages of a step, and their schedule.

    Attributes:
      schedule, microbatches, stages_per_device, remat: As in `ir.pipeline.Pipeline`.
      stages: In order.
      tensor: T, the devices that each place of a stage has, which divide its products. What is said of a stage's
        seconds, operations and bytes is of each of them.
      tied_bytes: Sent in each step for weights that several stages use: copies there, gradients back.
      send_byte_s: Seconds for each byte from a device to another; 0 where that isn't known.
      candidates: Where the number of stages was chosen, what there was to choose from, in words, and its seconds.
      updates: Of an asynchronous pipeline the call of each stage's update, counted from the minibatch's; else none.
      last: When all of a minibatch is done, what it returns, too.
      slack: Of an asynchronous one, minibatches for each border between stages besides those of devices.
      ahead: Of one that predicts, s of each stage: of its forwards and of its backwards.
      statistics: Lines of sums over the batch that are taken over each microbatch: the step is another function.
    """

    schedule: str
    microbatches: int
    stages: tuple[StagePlan, ...]
    stages_per_device: int = 1
    remat: bool = False
    tensor: int = 1
    tied_bytes: int = 0
    send_byte_s: float = 0.0
    updates: tuple[int, ...] = ()
    last: int = 0
    slack: int = 0
    ahead: tuple[tuple[int, int], ...] = ()
    statistics: tuple[str, ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()

    @property
    def places(self) -> Places:
        """The devices of each stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def devices(self) -> int:
        """The number of devices that the stages have together, those of a tensor axis counted as one."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def size(self) -> int:
        """The number of real devices that these are."""
        return self.devices * self.tensor

    @property
    def pipeline(self) -> Pipeline:
        """Returns what `parallelize` is asked for so."""
        return Pipeline(
            stages=tuple(stage.weights for stage in self.stages),
            schedule=self.schedule,
            microbatches=self.microbatches,
            replicas=tuple(len(stage.devices) for stage in self.stages),
            stages_per_device=self.stages_per_device,
            remat=self.remat,
            statistics="microbatch" if self.statistics else "batch",
            ahead=self.ahead or None,
            slack=self.slack if self.updates else None,
        )

    @property
    def calls(self) -> Calls:
        """The calls in which an asynchronous pipeline issues its tasks."""
        return Calls(self.places, self.updates, self.last, self.schedule == "stash", self.slack)

    def version_bytes(self, stage: int) -> int:
        """Counts what a device of a stage holds of its weights besides them: stashed versions, or the last change."""
        own = self.stages[stage]
        stashed = self.calls.stashed(stage) * own.weight_bytes if self.updates else 0
        return stashed + own.gradient_bytes * bool(self.ahead and any(self.ahead[stage]))

    @property
    def scheduled(self) -> Schedule:
        """Its tasks; of an asynchronous one those of enough minibatches for a steady state."""
        if self.updates:
            return self.calls.schedule(3 * (self.calls.last + 1) + 2)
        return self.pipeline.scheduled(self.microbatches)

    @property
    def is_timed(self) -> bool:
        """Returns whether the devices' rates are known, and so the seconds of tasks."""
        return all(stage.seconds for stage in self.stages)
