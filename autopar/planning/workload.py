"""Says what each device does in a step of a plan, as simulations of more devices, or fewer, need it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.cost.exchange import HOSTED
from autopar.cost.simulate import SIMULATED, TableLoad, Workload
from autopar.errors import ArgumentsError
from autopar.ir.plan import Plan, TablePlan
from autopar.planning.plan import dense_load


def named_methods(methods: Mapping[str, Any] | Any, work: Workload) -> Mapping[str, str] | str:
    """Returns methods by the names that simulated steps have; as in strategies ("ps", "hosts") is one."""

    def name(method: Any) -> str:
        method_ = HOSTED if method == ("ps", "hosts") else method
        if method_ not in ("auto", *SIMULATED, HOSTED):
            known = ", ".join(map(repr, ("auto", *SIMULATED, HOSTED)))
            raise ArgumentsError(f"methods: there is no {method!r}; there are {known}")
        return method_

    if not isinstance(methods, Mapping):
        return name(methods)
    paths = [t.path for t in work.tables]
    for path in methods:
        if path not in paths:
            raise ArgumentsError(f"methods: no table {path!r} goes by its rows; there are {', '.join(paths) or 'none'}")
    return {path: name(method) for path, method in methods.items()}


def workload(plan: Plan) -> Workload:
    """Returns what each device does in a step of a plan.

    Raises:
      ArgumentsError: the plan is of one device.
    """
    if plan.devices == 1:
        raise ArgumentsError(
            f"the plan of {plan.step} is of one device, which says nothing of what several share: "
            "plan(step, state, batch, cluster=...) for two devices at least"
        )
    tables = tuple(table_load(table) for table in plan.families if table.sizes is not None)
    return Workload(dense_load(plan), tables)


def table_load(table: TablePlan, ids: int | None = None) -> TableLoad:
    """Returns what each device asks of a table of a plan of several devices.

    Args:
      table: One with `sizes`.
      ids: That a device looks up, drawn as those of the plan are; as many as there by default.
    """
    sizes = table.sizes
    assert sizes is not None, "a plan of several devices has the sizes of its tables"
    each = sizes.ids if ids is None else ids
    growth = table.growth if table.growth is None or ids is None else table.growth.with_ids(ids)

    def rows(n: int) -> float:
        """Returns the rows that n devices touch; where growth isn't known all ids differ."""
        return growth.rows(n) if growth is not None else min(sizes.extent, n * each)

    return TableLoad(
        table.path,
        sizes.extent,
        sizes.row_bytes,
        sizes.family_bytes,
        each,
        rows,
        hosted=table.where == "hosts",
        gradient_bytes=sizes.gradient_bytes,
        reduced=sizes.reduced,
    )


def client_workload(plan: Plan) -> Workload:
    """Returns what each device of a client does in its own step. On one device all ids of a table are taken to
    differ."""
    if plan.devices > 1:
        return workload(plan)
    lifted = [t for t in plan.families if t.lifted]
    rest = tuple(t for t in plan.tables if not t.lifted)
    return Workload(dense_load(dataclasses.replace(plan, tables=rest)), tuple(map(_alone, lifted)))


def _alone(table: TablePlan) -> TableLoad:
    extent, ids = table.shape[table.axis], table.ids
    row = table_bytes(table) // extent
    return TableLoad(table.path, extent, row, row * (1 + len(table.slots)), ids, lambda n: min(extent, n * ids))


def table_bytes(table: TablePlan) -> int:
    """Returns the bytes of a table without its slots."""
    return math.prod(table.shape) * np.dtype(table.dtype).itemsize


def untouched_bytes(table: TablePlan, minibatches: int) -> float:
    """Returns the bytes of a table's rows that so many minibatches leave alone, if all of their ids differ."""
    return max(0.0, 1 - minibatches * table.ids / table.shape[table.axis]) * table_bytes(table)


def goes_by_rows(table: TablePlan) -> bool:
    """Says whether no step moves rows of a table that it doesn't look up."""
    return table.lifted and not table.log_steps
