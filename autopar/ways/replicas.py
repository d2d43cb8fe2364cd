"""Clients train replicas of the state, which come together now and then (`sync=`); each runs its step in a way of its
own."""

from __future__ import annotations

import dataclasses

from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.passes.replicate import replicate
from autopar.sync import Replicated
from autopar.ways.way import Way


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
