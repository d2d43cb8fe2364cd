"""Clients train replicas of the state, which come together now and then (`sync=`); each runs its step in a way of its
own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.passes.replicate import replicate
from autopar.run.entry import Entry
from autopar.run.planner import Planner
from autopar.run.runner import Runner
from autopar.sync import Replicated
from autopar.tables.replica import Replica
from autopar.ways.way import SERVERS, Way

if TYPE_CHECKING:
    from autopar.planning.verify import Verification


class InReplicas(Way):
    """Replicas, which meet all at once, in a ring, or at servers."""

    @staticmethod
    def takes(options: Options) -> bool:
        """Takes steps whose clients have weights of their own."""
        return isinstance(options.sync, Replicated)

    @staticmethod
    def of_each(options: Options) -> Options:
        """Returns the options without `sync`."""
        return dataclasses.replace(options, sync=None)

    def passes(self, bound: BoundPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Plans what is exchanged; then a client's own passes."""
        assert self.inner is not None, "a client runs its step in some way"
        return ("replicate", self._replicate), *self.inner.passes(bound, measured)

    def _replicate(self, program: Program, bound: BoundPlan) -> tuple[Program, BoundPlan, str]:
        o = self.options
        assert isinstance(o.sync, Replicated), "clients have replicas"
        return program, *replicate(program, bound, o.sync, o.clients, o.batch_axis, o.plan, o.servers, o.server_ranks)

    exchanges = "replicas (sync=)"
    leaves = (Replica,)

    may_follow = False

    @property
    def is_asynchronous(self) -> bool:
        """Clients of a centre, and neighbors in a ring, never wait."""
        return self.options.is_asynchronous

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        """Messages to servers and neighbors do."""
        return SERVERS if self.is_asynchronous else None

    def runner(self, entry: Entry) -> Runner:
        """Runs a client's step by its own runner, and exchanges weights behind it."""
        from autopar.run.exchanges import ElasticRunner, RingRunner
        from autopar.run.means import MeansRunner
        from autopar.run.touched_rows import TouchedRows

        compiled, sync, plan = entry.compiled, self.options.sync, entry.compiled.plan.sync
        assert isinstance(sync, Replicated) and plan is not None and entry.clients is not None, "clients have replicas"
        touched, program = TouchedRows(compiled, plan), compiled.analysed
        given = entry.own_runner, sync, plan, touched, entry.clients, program, entry.out_tree, entry.plain
        if not self.is_asynchronous:
            return MeansRunner(*given)
        return ElasticRunner(*given) if sync.partners == "center" else RingRunner(*given)

    def replayed(self, entry: Entry, leaves: Sequence[Any], steps: int) -> Verification:
        """Compares all clients with their steps and means, one after the other."""
        from autopar.planning.replay_clients import compare_replicas, compare_served

        compare = compare_served if self.is_asynchronous else compare_replicas
        return compare(entry, leaves, steps)
