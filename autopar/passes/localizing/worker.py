"""The program of each of a worker's devices, which divide its minibatch (`passes.split_servers`)."""

from __future__ import annotations

import dataclasses

from autopar.analysis.local import Spread
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.program import Block, Program
from autopar.ir.served import LocalWorker
from autopar.ir.slicing import eliminate_dead
from autopar.passes.localize import Localizer
from autopar.passes.localizing.local_forms import Shared


def localize_worker(program: Program, bound: BoundPlan, devices: int) -> LocalWorker:
    """Returns what each device of a worker does, all results whole on each; what they don't divide all compute.

    Args:
      program: A program that `split_servers` has cut.
      bound: Its plan.
      devices: How many divide the minibatch.

    Raises:
      NotLocal: an equation that can't be run on a part of its operands.
    """
    worker: Block = program.served.worker
    places = zip(program.block.inputs, bound.placements, strict=False)
    axes = {v: axis for v, axis in places if axis is not None and v.shape[axis] % devices == 0}
    over = dataclasses.replace(bound, plan=dataclasses.replace(bound.plan, devices=devices))
    walk = Localizer(Shared(over, True))
    inputs = tuple(walk.define(v, Spread(axes[v]) if v in axes else None) for v in worker.inputs)
    walk.rewrite(worker)
    outputs = tuple(walk.as_state(atom, None) for atom in worker.outputs)
    block, _ = eliminate_dead(Block(inputs, tuple(walk.equations), outputs))
    return LocalWorker(block, tuple(axes.get(v) for v in worker.inputs))
