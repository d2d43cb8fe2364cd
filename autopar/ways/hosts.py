"""Tables in host memory, a shard a rank. A step runs as several compiled programs with exchanges of rows between
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import ArgumentsError
from autopar.ir.local import NotLocal
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.stacked import StackedProgram
from autopar.launch.group import everyone
from autopar.mpi.machines import exchange
from autopar.passes.classify import classify
from autopar.passes.localize_rank import localize_rank, not_on_hosts
from autopar.passes.once_per_row import once_per_row
from autopar.passes.place import place
from autopar.passes.pool_bags import pool_bags
from autopar.passes.pull_whole import pull_whole
from autopar.passes.reduce_tables import reduce_tables
from autopar.passes.split_segments import split_segments
from autopar.passes.stack_tables import stack_tables
from autopar.run.planned_step import PlannedStep, Runner
from autopar.run.planner import ON_DEVICES, Planner
from autopar.run.request import StepRequest
from autopar.tables.host import HostHome
from autopar.tables.leaf import Home
from autopar.ways.way import Way, in_microbatches, lifting, rewriting

if TYPE_CHECKING:
    from jax.stages import Traced

    from autopar.planning.check import Check
    from autopar.state.init import Maker


@dataclass(frozen=True, eq=False, kw_only=True)
class OnHosts(Way):
    """Tables on hosts. `bucket_bytes`: size of gradient buckets, each summed over ranks while later ones are computed;
    None: one."""

    bucket_bytes: int | None = None

    is_watched = False

    @classmethod
    def check(cls, request: StepRequest) -> None:
        super().check(request)
        if request.devices.tensor_axis is not None:
            raise ArgumentsError(
                f"{request.tensor} doesn't go with tables on hosts, whose ranks run programs of their own"
            )

    @classmethod
    def planner(cls, request: StepRequest) -> Planner:
        planner = request.on(request.devices, everyone().size)
        return replace(planner, options=replace(planner.options, hosts=True))

    @property
    def keeps_shards(self) -> bool:
        return False

    divides = True

    def classified(self, program: Program) -> tuple[Program, str]:
        """Finds tables, and marks dense leaves that the strategy puts on hosts."""
        program, note = classify(program, self.options.strategy)
        program, pulled = pull_whole(program, self.options.strategy, all_dense=not self.options.optimizes("hybrid"))
        return program, f"{note}{pulled}"

    def stacked(self, program: Program, bound: ProgramPlan) -> StackedProgram | None:
        return stack_tables(program, bound, self.analyzed_again) if bound.on_hosts else None

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Returns no passes if nothing can be on hosts: the step is then planned for devices."""
        if not bound.on_hosts:
            return ()
        made = [*lifting(bound)]
        if bound.shards:
            made.append(("place", rewriting(place)))
        made.append(("reduce_tables", rewriting(reduce_tables)))
        if bound.plan.microbatches > 1:
            made.append(("split_update", rewriting(in_microbatches)))
        made += [("localize", localize_rank), ("pool_bags", pool_bags)]
        if self.options.optimizes("once"):
            made.append(("once_per_row", rewriting(once_per_row)))
        made.append(("split_segments", self._split_segments))
        return tuple((name, partial(_checked, run)) for name, run in made)

    def _split_segments(self, program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
        hosted = [f for f in bound.families if f.on_hosts]
        owners = bound.devices > 1 or any(f.table.pulled for f in hosted)
        segments = split_segments(program, {f.family for f in hosted}, owners=owners, bucket_bytes=self.bucket_bytes)
        bound = bound.noting(stages=tuple(map(str, segments.items)))
        return replace(program, segments=segments), bound, f"{segments.programs} compiled programs"

    exchanges = "tables on hosts"

    def needs_mpi(self, planner: Planner) -> tuple[str, str]:
        return "tables on hosts", ON_DEVICES

    def runner(self, planned: PlannedStep) -> Runner:
        from autopar.run.hosts import HostRunner

        def in_buckets(nbytes: int | None) -> Way:
            return replace(self, bucket_bytes=nbytes)

        return HostRunner(planned.compiled, in_buckets, planned.out_tree, planned.donate)

    def homes(self, planned: PlannedStep) -> Mapping[int, Home]:
        hosted = planned.compiled.bound.hosted(planned.compiled.analysed)
        return {k: HostHome(*at, exchange().rank) for k, at in hosted.items()}

    def maker(self, planned: PlannedStep, traced: Traced, numbers: Sequence[int | None]) -> Maker:
        from autopar.state.init import HostMaker

        return HostMaker.of_plan(traced, planned, numbers)

    def sends(self, planned: PlannedStep, name: str) -> Check:
        """Raises `ArgumentsError`: ranks send through MPI, and no compiled program shows it."""
        raise ArgumentsError(
            f"{name} has tables on hosts: what ranks send goes through MPI, and is in no compiled program. Check it "
            "with the tables on devices; autopar.explain tells what ranks send"
        )


def _checked(
    run: Callable[..., tuple[Program, ProgramPlan, str]], program: Program, bound: ProgramPlan
) -> tuple[Program, ProgramPlan, str]:
    try:
        return run(program, bound)
    except NotLocal as error:
        raise not_on_hosts(program, error) from error
