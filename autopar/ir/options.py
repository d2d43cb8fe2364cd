"""The user's options for compiling a whole step; those of one way to run it are in `ways`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.figures import HEADROOM
from autopar.ir.paths import BatchAxis
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.rowspace import Refusal
from autopar.ir.strategy import Choose, Results, Sparse, Strategy, is_on


@dataclass(frozen=True, slots=True)
class Options:
    strategy: Strategy = "auto"
    sparse: Sparse = "exact"
    #: What "auto" compares methods by.
    choose: Choose = "times"
    #: The optimisations that are on, as `optimize_text` has them.
    optimize: str = "all"
    devices: int = 1
    batch_axis: BatchAxis = 0
    #: The devices are accelerators, which have a memory of their own.
    accelerators: bool = False
    #: Tables on hosts are asked for; `devices` are ranks then.
    hosts: bool = False
    #: Devices of each rank then, at most.
    rank_devices: int = 1
    #: Placement of results by example across processes.
    results: Results | None = None
    #: Tables that don't fit the devices may be put on the hosts.
    may_leave: bool = True
    #: M.
    microbatches: int = 1
    #: Capacity over the example's load between two devices.
    headroom: float = HEADROOM
    #: Most steps that deferred rows wait; None: the cheapest number.
    log_steps: int | None = None
    #: State leaves whose rows can't be deferred, and why.
    undeferred: Mapping[int, Refusal] = field(default_factory=dict)
    #: Path of a leaf that came in shards -> the axis along which it stays sharded, by "ps" or "tensor".
    spread_axes: Mapping[str, int] = field(default_factory=dict)
    #: Rows travel to those that update them, so every table goes by rows unless a step touches all of them.
    rows_travel: bool = False
    #: T.
    tensor: int = 1
    #: An earlier plan to follow.
    plan: Plan | None = None

    def optimizes(self, name: str) -> bool:
        """Says whether an optimisation is on."""
        return is_on(self.optimize, name)

    def are_results_whole(self, program: Program) -> bool:
        """Returns whether every process has all results by example; by default, if the function has no state."""
        return not program.new_states if self.results is None else self.results == "whole"
