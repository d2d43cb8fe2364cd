"""A step as it is to be planned for devices that aren't here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from autopar.cost import Rates
from autopar.cost.planned_rates import planned_rates
from autopar.ir.plan import asks_for_hosts, without_hosts
from autopar.measure.cluster import Cluster, require_cluster
from autopar.run.step import ParallelStep


def elsewhere(step: ParallelStep, cluster: Cluster) -> ParallelStep:
    """The step on the cluster's devices, by its rates. It can be planned, not run; `step` is left alone.

    Tables that the strategy puts on hosts are there, with a rank for each device.
    """
    require_cluster(cluster)
    rates, memory = functools.partial(planned_rates, cluster), int(cluster.device.memory_bytes)
    planned = on_devices(step, cluster.count, rates, memory)
    strategy = step.options.strategy
    planned.options = dataclasses.replace(planned.options, hosts=asks_for_hosts(strategy), strategy=strategy)
    return planned


def on_devices(
    step: ParallelStep, count: int, rates: Callable[[], Rates] | None = None, memory: int | None = None
) -> ParallelStep:
    """The same on so many devices, of no particular kind if nothing is said of their rates and memory (in bytes)."""
    options = dataclasses.replace(
        step.options,
        devices=count,
        hosts=False,
        strategy=without_hosts(step.options.strategy),
        rates=rates,
        memory=None if memory is None else lambda: memory,
        may_leave=False,
    )
    written = step.per_device and dataclasses.replace(step.per_device, count=count)
    given = (step.donate, step.state_argnums, step.batch_argnums, step.static_argnums)
    return ParallelStep(step.fun, options, *given, per_device=written)
