"""Servers keep the state (`sync=Async(...)`). Workers pull the rows that a minibatch reads, and push gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.backends.clients import Clients
from autopar.backends.served import one_worker
from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import ArgumentsError, StrategyError
from autopar.ir.local import NotLocal
from autopar.ir.program import Program, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.served import CUTTING, Cutting
from autopar.jax_types import Leaf
from autopar.passes.localize_rank import localize_worker
from autopar.passes.replicate import check_replicas
from autopar.passes.split_servers import gradient_equations, served_plan, split_servers
from autopar.run.planned_step import PlannedStep, Runner
from autopar.run.planner import Planner
from autopar.run.request import StepRequest
from autopar.run.served import GlobalBatchStep, WarmupStep
from autopar.run.step import ParallelStep
from autopar.sync import Async
from autopar.tables.replica import average
from autopar.tables.served import ServedLeaf
from autopar.ways.clients import WithClients
from autopar.ways.way import AllCalls, Replayed, in_microbatches, lifting, rewriting

if TYPE_CHECKING:
    from autopar.planning.check import Check
    from autopar.planning.verify import Verification
    from autopar.servers.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class OnServers(WithClients):
    """Servers and workers. `worker_devices`: devices that divide a worker's minibatch; 0: it has one. `cutting`: which
    leaves several servers keep in pieces."""

    sync: Async
    worker_devices: int = 0
    cutting: Cutting = CUTTING

    not_on_hosts = "The servers of Async keep the state, in the processes: leave strategy= out"

    @classmethod
    def check(cls, request: StepRequest) -> None:
        """Leaves a joined step (`is_joined`) to the checks of the `parallelize` calls in `step`."""
        assert isinstance(request.sync, Async), "servers are asked for"
        if not request.sync.is_joined:
            super().check(request)

    @classmethod
    def step(cls, request: StepRequest) -> ParallelStep:
        """Returns the step that a user calls: one of workers; with staleness 0 data parallelism over all minibatches;
        or the latter as a warm-up of the former."""
        sync = request.sync
        assert isinstance(sync, Async), "servers are asked for"
        if not sync.is_joined:
            return super().step(request)
        plain = request.parallelize(sync=None)
        joined = GlobalBatchStep(plain.planner, all_devices=plain.devices)
        if sync.staleness == 0:
            return joined
        later = request.parallelize(sync=replace(sync, warmup=0))
        return WarmupStep(later.planner, first=joined, warmup=sync.warmup)

    def planned(self, planner: Planner, clients: Clients) -> Planner:
        """Returns the planner of one program for a worker's whole minibatch. `_localize` divides it over the worker's
        devices."""
        options = replace(self.options, devices=1, rows_travel=True)
        divided = 0 if planner.devices is None else planner.devices.count
        way = replace(self, options=options, inner=None, worker_devices=divided)
        return replace(planner, options=options, devices=None, clients=clients, way_of=way.by)

    @property
    def defers(self) -> bool:
        return False

    divides = True  # the step is cut at its gradients, so the batch is followed in any case

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        made: list[Pass] = [
            *lifting(bound),
            ("split_update", rewriting(_split_update)),
            ("split_servers", self._split_servers),
        ]
        if self.worker_devices:
            made.append(("localize", rewriting(self._localize)))
        return tuple(made)

    def _split_servers(self, program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
        earlier = self.options.plan
        is_cut = any(e.op == "ap.microbatches" for e in program.block.equations)
        served = split_servers(program, self.servers, None if is_cut else gradient_equations(program), self.cutting)
        plan = served_plan(program, bound, served, self.sync, self.clients, self.server_ranks)
        check_replicas(earlier, program.name, earlier and earlier.served, plan)
        program = replace(program, served=served)
        return program, bound.noting(served=plan), f"{served.pushed} values are pushed to {self.servers} servers"

    def _localize(self, program: Program, bound: ProgramPlan) -> tuple[Program, str]:
        devices = self.worker_devices
        try:
            worker = localize_worker(program, bound, devices)
        except NotLocal as error:
            return program, f"{devices} devices of a worker are all given the whole minibatch: {error}"
        served = replace(known(program.served), local_worker=worker)
        return replace(program, served=served), f"a worker's minibatch is divided over {devices} devices"

    leaves = (ServedLeaf,)

    @property
    def is_asynchronous(self) -> bool:
        return True

    def runner(self, planned: PlannedStep) -> Runner:
        from autopar.run.served import ServedRunner

        assert planned.clients is not None, "servers keep the state"
        return ServedRunner(planned.compiled, self.sync, planned.clients, planned.out_tree)

    def followed(
        self, planned: PlannedStep, start: Sequence[Leaf], calls: AllCalls, timeline: Timeline, clients: Clients | None
    ) -> Replayed:
        """Replays with the programs of this process's worker, or with those of a step that isn't run here."""
        from autopar.planning.replay_clients import programs_here, replay_served
        from autopar.run.served import ServedRunner

        runner = None if planned.clients is None else planned.runner
        programs = runner.programs if isinstance(runner, ServedRunner) else programs_here(planned, clients)
        return replay_served(planned, start, calls, timeline, programs)

    def replayed(self, planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification:
        """Compares one worker alone with the plain step, then all workers with a replay of the servers' events."""
        from autopar.planning.replay_clients import compare_served
        from autopar.planning.verify import compare_runs
        from autopar.run.served import ServedRunner

        assert isinstance(planned.runner, ServedRunner), "servers keep the state"
        run = one_worker(planned.runner.programs, planned.compiled.analysed)
        alone = compare_runs(planned, [average(list(leaves))] * steps, run=run)
        return compare_served(planned, leaves, steps) if alone.ok else alone

    def sends(self, planned: PlannedStep, name: str) -> Check:
        """Raises: what workers send is in no compiled program."""
        raise ArgumentsError(
            f"{name} trains with servers: what workers pull and push goes in messages, and is in no compiled program. "
            f"autopar.explain({name}, ...) tells what a worker sends; to check a step of one program, leave sync= out"
        )


def _split_update(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    is_whole = bound.plan.microbatches == 1
    try:
        return in_microbatches(program, bound, own_statistics=is_whole, option="sync=")
    except StrategyError as error:
        if not is_whole:
            raise
        if not gradient_equations(program):
            raise StrategyError(f"{error} Or return the loss: it shows which weights the examples meet") from error
        return program, "examples meet others: a worker's minibatch is whole"
