"""`Options`: what a whole step is compiled by, however it is run; a way to run it has its own beside (`ways`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.examples import BatchAxis
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.rowspace import Refusal
from autopar.ir.sizes import HEADROOM
from autopar.ir.strategy import Results, Sparse, Strategy


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
    #: Where results by example are, across processes.
    results: Results | None = None
    #: Whether tables that don't fit the devices may leave them for the hosts.
    may_leave: bool = True
    #: Parts of the batch, one after the other.
    microbatches: int = 1
    #: How much more than the example's load a device may send to another one.
    headroom: float = HEADROOM
    #: Steps that deferred rows wait for at most; None: what is cheapest.
    log_steps: int | None = None
    #: State leaves whose rows can't be deferred, and why.
    undeferred: Mapping[int, Refusal] = field(default_factory=dict)
    #: Paths of leaves that came in shards -> the axis along which they stay so, by "ps" or "tensor".
    spread_axes: Mapping[str, int] = field(default_factory=dict)
    #: Rows travel to whoever updates them, so that a table goes by its rows wherever a step doesn't touch all of them.
    rows_travel: bool = False
    #: T, devices over which products are divided.
    tensor: int = 1
    #: An earlier plan, by which the step is to be run.
    plan: Plan | None = None

    def are_results_whole(self, program: Program) -> bool:
        """Returns whether every process has all results by example: by default those of a function without state."""
        return not program.new_states if self.results is None else self.results == "whole"
