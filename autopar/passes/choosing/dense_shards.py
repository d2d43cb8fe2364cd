"""Dense parameters in shards: which leaves a strategy's `ps` spreads over the devices, and along which axis.

Parallax's BASE keeps dense parameters on servers: each is gathered for use, and its gradient is reduced to its owner.
Its slots go with it: the leaves that its update reads element by element.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from autopar.analysis.rules import ALIGNED
from autopar.errors import StrategyError
from autopar.ir.layout import even_axis
from autopar.ir.plan import DensePlan
from autopar.ir.program import Atom, Program, Var


def shard_dense(
    program: Program, patterns: Mapping[int, str], dense: frozenset[int], devices: int, first: Mapping[str, int]
) -> tuple[dict[int, int], list[DensePlan]]:
    """Leaf -> the axis along which it is spread, slots included; and the plans of the leaves that a pattern names.

    Args:
      program: An analysed program.
      patterns: Leaf -> the pattern that gives it to "ps".
      dense: Leaves that no lifted family has.
      devices: N.
      first: Path of a leaf -> the axis along which it is spread if they divide that; else the first one.

    Raises:
      StrategyError: a pattern names one leaf that can't be spread.
    """
    axes: dict[int, int] = {}
    plans: dict[int, DensePlan] = {}
    tables = {k for k, _ in program.tables}
    for leaf, pattern in patterns.items():
        if leaf not in dense or leaf in axes or devices == 1:
            continue
        type_, path = program.block.inputs[leaf].type, program.inputs[leaf].path
        axis = even_axis(getattr(type_, "shape", ()), first.get(path, 0), devices)
        if axis is None:
            if pattern == path:
                raise StrategyError(
                    f"strategy: {path} can't be spread over {devices} devices: they divide none of its axes ({type_}). "
                    "Leave it to 'auto'"
                )
            continue
        shards = _with_slots(program, leaf) & dense
        named = min(shards, key=lambda k: (len(program.inputs[k].path), k))  # the parameter rather than a slot
        axes.update(dict.fromkeys(shards, axis))
        slots = f", {len(shards) - 1} slot{'s' * (len(shards) > 2)} with it" if len(shards) > 1 else ""
        use = "looked up at its owners" if shards & tables else "gathered for use"
        reason = f"a shard of axis {axis} on each device{slots}; {use}, its gradient reduced to its owner"
        once = (devices - 1) * type_.nbytes // devices
        sent = {"ps": 2 * once, "allreduce": 2 * once}
        plans[named] = dataclasses.replace(dense_plan(program, named, sharded=True), reason=reason, sent=sent)
    return axes, list(plans.values())


def dense_plan(program: Program, k: int, *, sharded: bool) -> DensePlan:
    """The plan of a leaf that isn't looked up by rows."""
    type_ = program.block.inputs[k].type
    size = getattr(type_, "nbytes", 0)
    return DensePlan(program.inputs[k].path, getattr(type_, "shape", ()), _text(type_.dtype), size, sharded)


#: NumPy takes a while to say what a dtype is called, and a state has thousands of leaves of few dtypes.
_text = functools.cache(str)


def _with_slots(program: Program, leaf: int) -> frozenset[int]:
    """The leaf, and the leaves of its shape that are tied to it by updates made element by element."""
    block, new = program.block, program.new_states
    producers = {v: e for e in block.equations for v in e.outputs}
    numbers = {v: k for k, v in enumerate(block.inputs)}
    shape = block.inputs[leaf].shape
    together, waiting = {leaf}, [leaf]
    while waiting:
        k = waiting.pop()
        seen: set[Atom] = set()
        atoms = [block.outputs[new[k]]] if k in new else []
        while atoms:
            atom = atoms.pop()
            if not isinstance(atom, Var) or atom in seen or atom.shape != shape:
                continue
            seen.add(atom)
            if atom in numbers and program.inputs[numbers[atom]].role == "state" and numbers[atom] not in together:
                together.add(numbers[atom])
                waiting.append(numbers[atom])
            made = producers.get(atom)
            if made is not None and (made.op in ALIGNED or made.op == "optimization_barrier"):
                atoms += made.inputs
    return frozenset(together)
