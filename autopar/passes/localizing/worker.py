"""The program of each of a worker's devices, which divide its minibatch (`passes.split_servers`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.analysis.local import NotLocal, Spread
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.program import Block, Program, Var
from autopar.ir.served import LocalWorker
from autopar.ir.slicing import eliminate_dead
from autopar.passes.localize import Localizer
from autopar.passes.localizing.local_forms import Shared


def localize_worker(program: Program, bound: BoundPlan, devices: int) -> tuple[LocalWorker, str]:
    """What each device does, all results whole on each; a minibatch that isn't divided all compute.

    Args:
      program: A program that `split_servers` has cut.
      bound: Its plan.
      devices: Of a worker.
    """
    places = zip(program.block.inputs, bound.placements, strict=False)
    axes = {v: axis for v, axis in places if axis is not None and v.shape[axis] % devices == 0}
    over = dataclasses.replace(bound, plan=dataclasses.replace(bound.plan, devices=devices, emit="pmap"))
    worker: Block = program.served.worker
    try:
        block, note = _local(worker, over, axes), f"the minibatch is divided over {devices} devices of a worker"
    except NotLocal as error:
        axes, note = {}, f"{devices} devices of a worker do the same: {error}"
        block = _local(worker, over, axes)
    return LocalWorker(block, tuple(axes.get(v) for v in worker.inputs)), note


def _local(worker: Block, bound: BoundPlan, axes: Mapping[Var, int]) -> Block:
    walk = Localizer(Shared(bound, True))
    inputs = [walk.define(v, Spread(axes[v]) if v in axes else None) for v in worker.inputs]
    walk.rewrite(worker)
    outputs = tuple(walk.as_state(atom, None) for atom in worker.outputs)
    return eliminate_dead(Block(tuple(inputs), tuple(walk.equations), outputs))[0]
