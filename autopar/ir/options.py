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
    choose: Choose = "times"  #: The criterion by which "auto" compares methods.
    optimize: str = "all"  #: The optimisations that are on, as `optimize_text` writes them.
    devices: int = 1  #: N; with `hosts`, ranks.
    batch_axis: BatchAxis = 0
    accelerators: bool = False  #: The devices are accelerators, with a memory of their own.
    hosts: bool = False  #: Some tables are on hosts.
    rank_devices: int = 1  #: Most devices of each rank, with `hosts`.
    results: Results | None = None  #: Placement of results by example across processes.
    may_leave: bool = True  #: Tables that don't fit the devices may be moved to the hosts.
    microbatches: int = 1  #: M.
    headroom: float = HEADROOM  #: A capacity divided by the example's load between two devices.
    log_steps: int | None = None  #: Most steps that deferred rows wait; None: the cheapest number.
    #: Owners add up bags, or serve tables that aren't named for it, only if a rank sends this many bytes less by it:
    #: each exchange takes two or three more messages to each rank.
    least_saved: int = 1 << 16
    slow_bytes: int = 64 << 20  #: Memory traffic of a step that is worth a warning.
    #: State leaves whose rows can't be deferred, and why.
    undeferred: Mapping[int, Refusal] = field(default_factory=dict)
    #: Path of a leaf that came sharded -> the axis along which it stays sharded, by "ps" or "tensor".
    spread_axes: Mapping[str, int] = field(default_factory=dict)
    #: Servers update the rows, so every table goes by rows unless a step touches all of them.
    rows_travel: bool = False
    tensor: int = 1  #: T, devices along the tensor axis.
    plan: Plan | None = None  #: An earlier plan to follow.

    def optimizes(self, name: str) -> bool:
        """Says whether an optimisation is on."""
        return is_on(self.optimize, name)

    def are_results_whole(self, program: Program) -> bool:
        """Returns whether every process has all results by example; by default, if the function has no state."""
        return not program.new_states if self.results is None else self.results == "whole"
