"""Tables are in the memory of the hosts, each rank with its shard, and a step runs as several compiled programs with
exchanges of rows between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from autopar.analysis.local import NotLocal
from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.passes.classify import classify
from autopar.passes.localizing.rank import localize_rank, not_on_hosts
from autopar.passes.once_per_row import once_per_row
from autopar.passes.place import place
from autopar.passes.pull_whole import pull_whole
from autopar.passes.reduce_tables import reduce_tables
from autopar.passes.split_stages import split_stages
from autopar.ways.way import Way, in_microbatches, lifting, rewriting


class OnHosts(Way):
    """Tables on hosts."""

    @staticmethod
    def takes(options: Options) -> bool:
        """Takes steps that ask for hosts."""
        return options.hosts

    @property
    def divides(self) -> bool:
        """Ranks have the same number of examples each."""
        return True

    def classified(self, program: Program) -> tuple[Program, str]:
        """Finds tables; dense leaves that the strategy has on hosts become such."""
        program, note = classify(program, self.options.strategy)
        program, pulled = pull_whole(program, self.options.strategy)
        return program, f"{note}{pulled}"

    def passes(self, bound: BoundPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Lifts tables, and writes the programs of a rank; none if nothing can be on hosts: the step is planned again
        then."""
        if not bound.on_hosts:
            return ()
        made = [*lifting(bound)]
        if bound.shards:
            made.append(("place", rewriting(place)))
        made.append(("reduce_tables", rewriting(reduce_tables)))
        if bound.plan.microbatches > 1:
            made.append(("split_update", rewriting(in_microbatches)))
        made += [
            ("localize", localize_rank),
            ("once_per_row", rewriting(once_per_row)),
            ("split_stages", self._split_stages),
        ]
        return tuple((name, partial(_checked, run)) for name, run in made)

    def _split_stages(self, program: Program, bound: BoundPlan) -> tuple[Program, BoundPlan, str]:
        hosted = [f for f in bound.families if f.on_hosts]
        owners = bound.devices > 1 or any(f.table.pulled for f in hosted)
        bucket_bytes = self.options.bucket_bytes
        stages = split_stages(program, {f.family for f in hosted}, owners=owners, bucket_bytes=bucket_bytes)
        bound = bound.noting(stages=tuple(map(str, stages.items)))
        return dataclasses.replace(program, stages=stages), bound, f"{stages.programs} compiled programs"


def _checked(
    run: Callable[..., tuple[Program, BoundPlan, str]], program: Program, bound: BoundPlan
) -> tuple[Program, BoundPlan, str]:
    """Runs a pass; what it can't do with tables on hosts is an error for users."""
    try:
        return run(program, bound)
    except NotLocal as error:
        raise not_on_hosts(program, error) from error
