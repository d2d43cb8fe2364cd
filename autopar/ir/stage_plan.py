"""The plan of a pipeline's stages: decisions and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.asynchronous import Calls
from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import Places, Schedule


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of one stage. Bytes and operations are those of a microbatch, on each device of a tensor axis."""

    devices: tuple[int, ...]  #: By number; several are replicas, which take microbatches in turn.
    weights: tuple[str, ...]  #: Paths of its parameters, in the order of their first use.
    #: Kind of task ("F", "B", "W": gradients of weights) -> seconds; empty if the devices' rates aren't known.
    seconds: Mapping[str, float] = field(default_factory=dict)
    update_s: float = 0.0  #: Seconds of the update of its weights and slots.
    flops: float = 0.0  #: Floating-point operations of its products.
    #: Bytes sent to later stages, and to earlier ones.
    ahead_bytes: int = 0
    back_bytes: int = 0
    state_bytes: int = 0  #: Bytes of its weights, slots and other leaves, and of copies of other stages' weights.
    gradient_bytes: int = 0  #: Bytes of the sums that it keeps over the microbatches; of tables the touched rows.
    weight_bytes: int = 0  #: Bytes of its weights.
    activation_bytes: int = 0  #: Bytes that the forward leaves for its backward.
    #: Bytes that each device of a tensor axis sends to the others, and the number of exchanges.
    exchanged_bytes: int = 0
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The stages of a step, and their schedule."""

    #: As in `ir.pipeline.Pipeline`.
    schedule: str
    microbatches: int
    stages: tuple[StagePlan, ...]
    stages_per_device: int = 1
    remat: bool = False
    tensor: int = 1  #: T, the devices of each place of a stage, which divide its products.
    tied_bytes: int = 0  #: Bytes sent in each step for weights that several stages use: copies there, gradients back.
    send_byte_s: float = 0.0  #: Seconds for each byte from a device to another; 0 if unknown.
    #: In an asynchronous pipeline, the call of each stage's update, counted from the minibatch's.
    updates: tuple[int, ...] = ()
    last: int = 0  #: The call in which all of a minibatch is done, its results included.
    slack: int = 0  #: In an asynchronous pipeline, extra minibatches in flight for each border between stages.
    ahead: tuple[
        tuple[int, int], ...
    ] = ()  #: Predicted weights: by how many updates, for each stage's (forward, backward).
    #: Lines of sums over the batch that are taken over each microbatch, which changes the function.
    statistics: tuple[str, ...] = ()
    #: If the number of stages was chosen, the candidates in words, and their seconds.
    candidates: tuple[tuple[str, float], ...] = ()

    @property
    def places(self) -> Places:
        return tuple(stage.devices for stage in self.stages)

    @property
    def devices(self) -> int:
        """Number of devices of all stages together, those of a tensor axis counted as one."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def size(self) -> int:
        """Number of devices, those of the tensor axis included."""
        return self.devices * self.tensor

    @property
    def pipeline(self) -> Pipeline:
        """The options of `parallelize` that ask for this plan."""
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
        """Counts the bytes of stashed versions, or of the last change, that a device of a stage keeps."""
        own = self.stages[stage]
        stashed = self.calls.stashed(stage) * own.weight_bytes if self.updates else 0
        return stashed + own.gradient_bytes * bool(self.ahead and any(self.ahead[stage]))

    @property
    def scheduled(self) -> Schedule:
        """The schedule; of an asynchronous pipeline, with enough minibatches for a steady state."""
        if self.updates:
            return self.calls.schedule(3 * (self.calls.last + 1) + 2)
        return self.pipeline.scheduled(self.microbatches)

    @property
    def is_timed(self) -> bool:
        """The devices' rates are known, and so the seconds of tasks."""
        return all(stage.seconds for stage in self.stages)
