"""`Options`: what a whole step is compiled by. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.examples import BatchAxis
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.rowspace import Refusal
from autopar.ir.sizes import HEADROOM
from autopar.ir.strategy import Results, Sparse, Strategy
from autopar.sync import Async, Replicated, Sync


@dataclass(frozen=True, slots=True)
class Options:
    """Holds what the user chose for the whole step."""

    strategy: Strategy = "auto"
    sparse: Sparse = "exact"
    devices: int = 1
    batch_axis: BatchAxis = 0
    #: Whether the devices are accelerators, which have a memory of their own.
    accelerators: bool = False
    #: Tables on hosts are asked for; `devices` are ranks then.
    hosts: bool = False
    #: Devices of each rank then, at most.
    rank_devices: int = 1
    #: Bytes of gradients that ranks begin to add up while later ones are computed; None: all are added up at once.
    bucket_bytes: int | None = None
    #: Where results by example are, across processes.
    results: Results | None = None
    #: Whether tables that don't fit the devices may leave them for the hosts.
    may_leave: bool = True
    #: Parts of the batch, one after the other.
    microbatches: int = 1
    #: Stages, one after the other; None: every device runs the whole step.
    pipeline: Pipeline | None = None
    #: What a pipeline was chosen from, in words, and the seconds that each is predicted to take.
    candidates: tuple[tuple[str, float], ...] = ()
    #: Devices that stages may have.
    stage_devices: int = 1
    #: How much more than the example's load a device may send to another one.
    headroom: float = HEADROOM
    #: Steps that deferred rows wait for at most; None: what is cheapest.
    log_steps: int | None = None
    #: State leaves whose rows can't be deferred, and why.
    undeferred: Mapping[int, Refusal] = field(default_factory=dict)
    #: Paths of leaves that came in shards -> the axis along which they stay so, by "ps" or "tensor".
    spread_axes: Mapping[str, int] = field(default_factory=dict)
    #: How the replicas of clients come together, and how many there are; None: all processes train one state.
    sync: Sync | None = None
    clients: int = 1
    #: Over how many of its devices a worker divides its minibatch, where servers keep the state; 0: it has one device.
    worker_devices: int = 0
    #: Servers that keep the state, if any do.
    servers: int = 1
    #: Their ranks where they are processes of their own; (): they are threads of the workers.
    server_ranks: tuple[int, ...] = ()
    #: T, devices over which products are divided.
    tensor: int = 1
    #: An earlier plan, by which the step is to be run.
    plan: Plan | None = None

    @property
    def is_asynchronous(self) -> bool:
        """No client or worker waits for another one."""
        if self.sync is None or (isinstance(self.sync, Replicated) and self.sync.is_ring and self.clients == 1):
            return False
        return self.sync.is_asynchronous

    def are_results_whole(self, program: Program) -> bool:
        """Returns whether every process has all results by example: by default those of a function without state."""
        return not program.new_states if self.results is None else self.results == "whole"

    @property
    def is_served(self) -> bool:
        """Servers keep the state."""
        return isinstance(self.sync, Async)
