"""Servers keep the state (`sync=Async(...)`); workers pull what a minibatch reads, and push gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.backends.served import one_worker
from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import StrategyError
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.local import NotLocal
from autopar.ir.options import Options
from autopar.ir.program import Program, known
from autopar.passes.localizing.rank import localize_worker
from autopar.passes.replicate import check_replicas
from autopar.passes.split_servers import gradient_equations, served_plan, split_servers
from autopar.run.entry import Entry
from autopar.run.planner import Planner
from autopar.run.runner import Runner
from autopar.sync import Async
from autopar.tables.replica import average
from autopar.tables.served import ServedLeaf
from autopar.ways.way import SERVERS, Way, in_microbatches, lifting, rewriting

if TYPE_CHECKING:
    from autopar.planning.verify import Verification


class OnServers(Way):
    """Servers and workers."""

    @staticmethod
    def takes(options: Options) -> bool:
        """Takes steps whose state servers keep."""
        return isinstance(options.sync, Async)

    @property
    def defers(self) -> bool:
        """Servers know nothing of rows that wait."""
        return False

    @property
    def divides(self) -> bool:
        """A worker's batch is followed, which is cut at its gradients."""
        return True

    def passes(self, bound: BoundPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Cuts the step into what workers and servers run."""
        made: list[Pass] = [
            *lifting(bound),
            ("split_update", rewriting(_split_update)),
            ("split_servers", self._split_servers),
        ]
        if self.options.worker_devices:
            made.append(("localize", rewriting(self._localize)))
        return tuple(made)

    def _split_servers(self, program: Program, bound: BoundPlan) -> tuple[Program, BoundPlan, str]:
        options, sync = self.options, self.options.sync
        assert isinstance(sync, Async), "servers keep the state"
        is_cut = any(e.op == "ap.microbatches" for e in program.block.equations)
        served = split_servers(program, options.servers, None if is_cut else gradient_equations(program))
        plan = served_plan(program, bound, served, sync, options.clients, options.server_ranks)
        check_replicas(options.plan, program.name, options.plan and options.plan.served, plan)
        program = dataclasses.replace(program, served=served)
        return program, bound.noting(served=plan), f"{served.pushed} values are pushed to {options.servers} servers"

    def _localize(self, program: Program, bound: BoundPlan) -> tuple[Program, str]:
        devices = self.options.worker_devices
        try:
            worker = localize_worker(program, bound, devices)
        except NotLocal as error:
            return program, f"{devices} devices of a worker are all given the whole minibatch: {error}"
        served = dataclasses.replace(known(program.served), local_worker=worker)
        return dataclasses.replace(program, served=served), f"a worker's minibatch is divided over {devices} devices"

    exchanges = "replicas (sync=)"
    leaves = (ServedLeaf,)

    may_follow = False

    @property
    def is_asynchronous(self) -> bool:
        """Workers never wait."""
        return True

    def needs_mpi(self, planner: Planner) -> tuple[str, str]:
        """Messages to servers and neighbors do."""
        return SERVERS

    def runner(self, entry: Entry) -> Runner:
        """Runs a worker."""
        from autopar.run.served import ServedRunner

        sync = self.options.sync
        assert isinstance(sync, Async) and entry.clients is not None, "servers keep the state"
        return ServedRunner(entry.compiled, sync, entry.clients, entry.out_tree)

    def replayed(self, entry: Entry, leaves: Sequence[Any], steps: int) -> Verification:
        """Compares what one worker does by itself with the plain step; and all workers with what servers did."""
        from autopar.planning.replay_clients import compare_served
        from autopar.planning.verify import compare_runs
        from autopar.run.served import ServedRunner

        assert isinstance(entry.runner, ServedRunner), "servers keep the state"
        planned = one_worker(entry.runner.programs, entry.compiled.analysed)
        alone = compare_runs(entry, [average(list(leaves))] * steps, planned=planned)
        return compare_served(entry, leaves, steps) if alone.ok else alone


def _split_update(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    is_whole = bound.plan.microbatches == 1
    try:
        return in_microbatches(program, bound, own_statistics=is_whole, option="sync=")
    except StrategyError as error:
        if not is_whole:
            raise
        if not gradient_equations(program):
            raise StrategyError(f"{error} Or return the loss: it shows which weights the examples meet") from error
        return program, "examples meet others: a worker's minibatch is whole"
