"""Predicts the device memory of a plan's state; chooses tables to shard so that it fits, and numbers of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.cluster import state_budget
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.rowspace import RowSpace
from autopar.ir.strategy import Strategy, choice_for


@dataclass(frozen=True, slots=True)
class Shardable:
    """A family that every device holds whole, though its rows could be sharded."""

    saved: int  #: Bytes that sharding it saves on each device.
    added: float  #: Seconds (bytes, if rates aren't known) that sharding adds to a step; negative if it saves some.


def choose_sharded(families: Sequence[Shardable], excess: int) -> frozenset[int]:
    """Chooses families to shard so that each device has `excess` bytes less: the cheapest for each byte first.

    Only bytes in excess count. Families that later ones make needless are dropped again, the most expensive first. Ties
    go by order. All are chosen if even that isn't enough.
    """
    waiting = [k for k, family in enumerate(families) if family.saved > 0]
    taken: list[int] = []
    while waiting and excess > 0:
        best = min(waiting, key=lambda k: (families[k].added / min(families[k].saved, excess), k))
        waiting.remove(best)
        taken.append(best)
        excess -= families[best].saved
    for k in sorted(taken, key=lambda k: (-families[k].added, k)):
        if excess + families[k].saved <= 0:
            taken.remove(k)
            excess += families[k].saved
    return frozenset(taken)


def least_devices(whole: int, spread: Sequence[int], budget: int) -> int | None:
    """Returns the least number of devices on which a state fits; None if no number is enough.

    `whole`: bytes of replicated leaves. `spread`: bytes of each sharded leaf. `budget`: bytes of each device for the
    state.
    """

    def fits(devices: int) -> bool:
        return whole + sum(-(-size // devices) for size in spread) <= budget

    if whole + sum(size > 0 for size in spread) > budget:
        return None
    low, high = 0, max(1, *spread) if spread else 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _whole_bytes(program: Program, leaf: int) -> int:
    return int(getattr(program.block.inputs[leaf].type, "nbytes", 0))


def leaf_bytes(program: Program, bound: ProgramPlan, leaf: int) -> int:
    """Returns bytes of a leaf of the state on each device."""
    size = _whole_bytes(program, leaf)
    size = size if bound.placements[leaf] is None else -(-size // bound.devices)
    return size if leaf not in bound.tensors or bound.plan.tensor is None else -(-size // bound.plan.tensor.devices)


def state_bytes(program: Program, bound: ProgramPlan) -> int:
    """Returns bytes of the state on each device, without tables on hosts."""
    return sum(leaf_bytes(program, bound, k) for k in _on_devices(program, bound))


def hosted_bytes(program: Program, bound: ProgramPlan) -> int:
    return sum(_whole_bytes(program, k) for k in _on_hosts(program, bound))


def _on_hosts(program: Program, bound: ProgramPlan) -> set[int]:
    hosted = {f.family for f in bound.families if f.on_hosts}
    return {k for space in program.facts.spaces if space.family in hosted for k in space.leaves}


def _on_devices(program: Program, bound: ProgramPlan) -> list[int]:
    away = _on_hosts(program, bound)
    return [k for k, input_ in enumerate(program.inputs) if input_.role == "state" and k not in away]


@dataclass(frozen=True, slots=True)
class Shortage:
    """A state that doesn't fit the devices."""

    missing: int  #: Bytes by which it exceeds each device's budget.
    #: The least number of devices with which it fits, everything sharded; None if no number is enough.
    devices: int | None

    def machines(self, devices: int) -> int | None:
        """Returns the least number of machines of `devices` devices each."""
        return None if self.devices is None else math.ceil(self.devices / devices)


def find_shortage(program: Program, bound: ProgramPlan, strategy: Strategy, memory: float) -> Shortage | None:
    """Returns by how much a plan's state exceeds devices of `memory` bytes; None if it fits."""
    missing = state_bytes(program, bound) - state_budget(memory)
    if missing <= 0:
        return None
    states = _on_devices(program, bound)
    spread = {k for k in states if bound.placements[k] is not None}
    if bound.plan.sparse != "off":
        spaces = [s for s in program.facts.spaces if s.refusal is None and is_open(program, s, strategy)]
        spread.update(k for s in spaces for k in s.leaves if k in states)
    sizes = {k: _whole_bytes(program, k) for k in states}
    whole = sum(size for k, size in sizes.items() if k not in spread)
    return Shortage(missing, least_devices(whole, [sizes[k] for k in sorted(spread)], state_budget(memory)))


def is_open(program: Program, space: RowSpace, strategy: Strategy) -> bool:
    """Returns whether the strategy leaves all tables of a family to autopar."""
    return all(choice_for(strategy, program.inputs[k].path).method == "auto" for k in space.tables)
