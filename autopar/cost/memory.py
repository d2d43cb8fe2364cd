"""What a plan's state takes of the devices' memory, and which tables have to leave them."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.plan import Plan, Strategy, matches, split_method
from autopar.ir.program import Program
from autopar.ir.rowspace import RowSpace

#: The part of a device's memory that states may take; the rest is for batches, activations and gradients.
STATE_SHARE = 0.7


def leaf_bytes(program: Program, plan: Plan, leaf: int) -> int:
    """Bytes of a leaf of the state on each device."""
    size = int(getattr(program.block.inputs[leaf].type, "nbytes", 0))
    return size if plan.placements[leaf] is None else -(-size // plan.devices)


def state_bytes(program: Program, plan: Plan) -> int:
    """Bytes of the whole state on each device."""
    return sum(leaf_bytes(program, plan, k) for k, given in enumerate(program.inputs) if given.role == "state")


def leave_devices(program: Program, plan: Plan, strategy: Strategy, memory: int) -> Mapping[str, int]:
    """The tables that don't fit the devices, and that the strategy leaves to autopar: path -> bytes with their slots.

    The largest go first, until the rest fits. Empty if all fits; what can't be lifted can't leave.

    Args:
      program: Analysed.
      plan: With everything on the devices.
      strategy: The user's.
      memory: Bytes of each device.
    """
    budget = int(STATE_SHARE * memory)
    needed = state_bytes(program, plan)
    found: dict[str, int] = {}
    free = [s for s in program.rows.spaces if s.refusal is None and _is_free(program, s, strategy)]
    sizes = {id(s): sum(leaf_bytes(program, plan, k) for k in s.leaves) for s in free}
    for space in sorted(free, key=lambda s: (-sizes[id(s)], program.inputs[s.tables[0]].path)):
        if needed <= budget:
            break
        needed -= sizes[id(space)]
        found.update({program.inputs[k].path: sizes[id(space)] for k in space.tables})
    return found


def _is_free(program: Program, space: RowSpace, strategy: Strategy) -> bool:
    """Whether the strategy leaves all tables of a family to autopar."""
    if not isinstance(strategy, Mapping):
        return split_method(strategy)[0] == "auto"
    given = []
    for k in space.tables:
        pattern = next((p for p in strategy if matches(p, program.inputs[k].path)), None)
        given.append("auto" if pattern is None else split_method(strategy[pattern])[0])
    return all(method == "auto" for method in given)
