"""A step as it is to be planned for devices that aren't here."""

from __future__ import annotations

import dataclasses
import functools

from autopar.cost.rates import planned_rates, planned_stage_rates
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.strategy import Strategy, asks_for_hosts, without_hosts
from autopar.measure.cluster import require_cluster
from autopar.measure.machine import NOWHERE, Machine
from autopar.run.step import ParallelStep


def elsewhere(step: ParallelStep, cluster: ClusterSpec) -> ParallelStep:
    """Returns the step on the cluster's devices, by its rates. It can be planned, not run; `step` is left alone.

    Tables that the strategy puts on hosts are there, with a rank for each device.
    """
    require_cluster(cluster)
    if step.options.sync is not None:
        raise ArgumentsError(
            f"{step.name} trains replicas by sync=, which are planned for the processes here alone: leave cluster= out"
        )
    memory = int(cluster.device.memory_bytes)
    rates, stages = functools.partial(planned_rates, cluster), functools.partial(planned_stage_rates, cluster)
    strategy, tensor = step.options.strategy, step.options.tensor
    if cluster.count % tensor:
        raise ArgumentsError(
            f"{step.name} divides products over {tensor} devices, and {cluster} has {cluster.count}: give a multiple"
        )
    count = 1 if step.options.pipeline is not None else cluster.count // tensor
    there = on_devices(
        step, count, Machine(rates, rates, lambda: memory, stages), strategy, hosts=asks_for_hosts(strategy)
    )
    options = dataclasses.replace(there.options, stage_devices=cluster.count // tensor)
    planner, in_stages = dataclasses.replace(there.planner, options=options), step.planner.in_stages
    if in_stages is not None:
        pipeline = in_stages().options.pipeline
        staged = dataclasses.replace(planner, options=dataclasses.replace(options, devices=1, pipeline=pipeline))
        planner = dataclasses.replace(planner, in_stages=lambda: staged)
    return ParallelStep(planner)


def on_devices(
    step: ParallelStep,
    count: int,
    machine: Machine = NOWHERE,
    strategy: Strategy | None = None,
    *,
    hosts: bool = False,
) -> ParallelStep:
    """Returns the step on so many devices, of no particular kind if nothing is said of them.

    Args:
      step: The step.
      count: N.
      machine: What is known of them.
      strategy: In place of the step's own, which then leaves the hosts alone.
      hosts: Whether tables are there.
    """
    strategy = without_hosts(step.options.strategy) if strategy is None else strategy
    options = dataclasses.replace(step.options, devices=count, hosts=hosts, strategy=strategy, may_leave=False)
    options = dataclasses.replace(options, rank_devices=1)
    old = step.planner
    written = old.per_device and dataclasses.replace(old.per_device, count=count)
    planner = dataclasses.replace(
        old, options=options, machine=machine, devices=None, per_device=written, in_stages=None
    )
    return ParallelStep(planner)
