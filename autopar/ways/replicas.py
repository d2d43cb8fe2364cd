"""Clients that train replicas of the state and average them (`sync=`). `inner` is the way that runs one client's
step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.figures import format_bytes
from autopar.ir.plan import TOPOLOGIES
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.jax_types import Leaf
from autopar.passes.replicate import replicate
from autopar.run.planned_step import PlannedStep, Runner
from autopar.run.request import StepRequest
from autopar.sync import Elastic, Replicated
from autopar.tables.replica import Replica
from autopar.ways.clients import WithClients
from autopar.ways.way import AllCalls, Replayed

if TYPE_CHECKING:
    from autopar.backends.clients import Clients
    from autopar.planning.check import Check
    from autopar.planning.verify import Verification
    from autopar.servers.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class InReplicas(WithClients):
    """Replicas that average all at once, in a ring, or through servers."""

    sync: Replicated

    @classmethod
    def check(cls, request: StepRequest) -> None:
        """Warns if training may diverge."""
        super().check(request)
        if isinstance(request.sync, Replicated) and request.sync.slope is not None:
            request.sync.check_stable(request.sync.slope)

    def among(self, clients: int, servers: int | None = None) -> Self:
        """Checks that a ring has an even number of clients."""
        if self.sync.partners in TOPOLOGIES:
            remedy = "Give clients= {}, or train on one process less"
            TOPOLOGIES[self.sync.partners](clients).check(f"sync={self.sync.call}", remedy)
        return super().among(clients, servers)

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        assert self.inner is not None, "a client runs its step in some way"
        return ("replicate", self._replicate), *self.inner.passes(bound, measured)

    def _replicate(self, program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
        axis, earlier, servers = self.options.batch_axis, self.options.plan, (self.servers, self.server_ranks)
        return program, *replicate(program, bound, self.sync, self.clients, axis, earlier, *servers)

    leaves = (Replica,)

    @property
    def is_asynchronous(self) -> bool:
        return self.sync.is_asynchronous and (self.sync.partners == "center" or self.clients > 1)

    def runner(self, planned: PlannedStep) -> Runner:
        """Returns the inner runner, wrapped in the exchange of weights."""
        from autopar.run.averaging import ElasticRunner, MeansRunner, RingRunner
        from autopar.run.replicas import TouchedRows

        compiled, sync, plan = planned.compiled, self.sync, planned.compiled.plan.sync
        assert plan is not None and planned.clients is not None, "clients have replicas"
        touched, program = TouchedRows(compiled, plan), compiled.analysed
        given = planned.own_runner, sync, plan, touched, planned.clients, program, planned.out_tree, planned.plain
        if not self.is_asynchronous:
            return MeansRunner(*given)
        return ElasticRunner(*given) if sync.partners == "center" else RingRunner(*given)

    def replayed(self, planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification:
        """Compares with a sequential run of all clients' steps and means."""
        from autopar.planning.replay_clients import compare_replicas, compare_served

        if not self.is_asynchronous:
            return compare_replicas(planned, leaves, steps)
        if isinstance(self.sync, Elastic):  # at interval 1, so that few steps have two exchanges: others do the same
            way = replace(self, sync=replace(self.sync, interval=1))
            planned, steps = replace(planned, way=way), max(steps, 3)
        return compare_served(planned, leaves, steps)

    def followed(
        self, planned: PlannedStep, start: Sequence[Leaf], calls: AllCalls, timeline: Timeline, clients: Clients | None
    ) -> Replayed:
        from autopar.planning.replay_clients import replay_center, replay_ring

        if isinstance(self.sync, Elastic):
            return replay_center(self.sync, planned, start, calls, timeline)
        return replay_ring(planned, start, calls, timeline)

    def sends(self, planned: PlannedStep, name: str) -> Check:
        """Compares a client's own step with the plan; says of what clients exchange that it is no part of that."""
        from autopar.planning.check import compare_step

        assert self.inner is not None and planned.compiled.plan.sync is not None, "a client runs its step in some way"
        own = compare_step(replace(planned, way=self.inner, clients=None), name)
        size = format_bytes(round(planned.compiled.plan.sync.sent_bytes))
        exchanged = f"What a client sends the others, {size} a step by the plan, is in no program of its step"
        return replace(own, note=f"{exchanged}: autopar.explain({name}, ...) tells of it")

    def share_choices(self, first: PlannedStep, planned: PlannedStep) -> PlannedStep:
        # Clients meet another shape at different times and measure it on their own minibatches: their choices of tables
        # that are sent by rows could differ, so the first plan's stays.
        known, plan = first.compiled.plan.sync, planned.compiled.plan.sync
        assert known is not None and plan is not None, "clients have replicas"
        bound = planned.compiled.bound.noting(sync=replace(known, examples=plan.examples))
        return replace(planned, compiled=replace(planned.compiled, bound=bound))
