"""Devices or hosts: what a plan shows of where tables can be, and the options by which to plan again.

The decision changes what a step is analysed for (devices or ranks), so it is made of a whole plan: one that asks for
hosts though nothing can be there, or one whose state doesn't fit the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autopar.cost.memory import is_open, leaf_bytes, state_bytes
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.cluster import state_budget
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.rowspace import host_refusal
from autopar.ir.strategy import Strategy, with_hosts, without_hosts


@dataclass(frozen=True, slots=True)
class Move:
    """Options by which a step is planned again; the tables that are elsewhere then, and why."""

    options: Options
    paths: Collection[str] = ()
    reason: str = ""


def move_tables(
    program: Program, bound: BoundPlan, options: Options, memory: int | None, *, devices: int, ranks: int
) -> Move | None:
    """Returns whether tables are to be elsewhere than a plan has them; None if they are where they can be.

    Args:
      program: An analysed program.
      bound: A plan of it.
      options: Those that it was made by.
      memory: Bytes of each device, None if unknown.
      devices: How many run the step if nothing is on hosts.
      ranks: How many run it if something is.
    """
    if options.hosts and not bound.on_hosts:  # nothing can be there
        strategy = without_hosts(options.strategy)
        return Move(dataclasses.replace(options, hosts=False, devices=devices, strategy=strategy))
    if memory is None or options.hosts or not options.may_leave:
        return None
    paths = leave_devices(program, bound, options.strategy, memory)
    reason = f"the state takes too much of the {memory / 2**30:.1f} GiB of a device"
    return Move(on_hosts(options, paths, ranks), paths, reason) if paths else None


def on_hosts(options: Options, paths: Iterable[str], ranks: int) -> Options:
    """Returns the options with some tables in the memory of the hosts."""
    return dataclasses.replace(options, hosts=True, devices=ranks, strategy=with_hosts(options.strategy, paths))


def leave_devices(program: Program, bound: BoundPlan, strategy: Strategy, memory: int) -> tuple[str, ...]:
    """Returns the tables that don't fit devices of `memory` bytes each, and that the strategy leaves to autopar.

    The largest go first, until the rest fits. Empty if all fits; what can't be lifted can't leave.
    """
    excess = state_bytes(program, bound) - state_budget(memory)
    paths: list[str] = []
    free = [s for s in program.facts.spaces if host_refusal(program, s) is None and is_open(program, s, strategy)]
    sizes = {id(s): sum(leaf_bytes(program, bound, k) for k in s.leaves) for s in free}
    for space in sorted(free, key=lambda s: (-sizes[id(s)], program.inputs[s.tables[0]].path)):
        if excess <= 0:
            break
        excess -= sizes[id(space)]
        paths += [program.inputs[k].path for k in space.tables]
    return tuple(paths)
