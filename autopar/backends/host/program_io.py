"""What goes into a step's compiled programs and comes out of them: who returns what, and whose memory is used again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.stages import ExchangeStage, ProgramStage


def returned_by_programs(program: Program) -> tuple[list[ProgramStage | ExchangeStage], tuple[Atom, ...]]:
    """The stages, and the outputs, with a later program returning what was reduced for the caller (a loss, metrics).

    What a program returns is JAX's already; making an array of NumPy's takes JAX longer than all of some stages.
    """
    items: list[ProgramStage | ExchangeStage] = list(program.stages.items)
    outputs = list(program.block.outputs)
    last = max(
        (k for k, item in enumerate(items) if isinstance(item, ProgramStage) and item.side == "device"), default=-1
    )
    before = [item for item in items[: max(last, 0)] if isinstance(item, ExchangeStage) and item.op == "ap.reduce"]
    reduced = {v for item in before for e in item.equations for v in e.outputs}
    copies: list[tuple[Var, Var]] = []
    for k in sorted(set(range(len(program.outputs))) - set(program.new_states.values())):
        atom = outputs[k]
        if isinstance(atom, Var) and atom in reduced:
            outputs[k] = new = Var(atom.type)
            copies.append((atom, new))
    if copies:
        segment = items[last]
        assert isinstance(segment, ProgramStage), "the last program of the devices"
        block = segment.block
        inputs = tuple(dict.fromkeys((*block.inputs, *(old for old, _ in copies))))
        made = tuple(Equation("copy", (old,), (new,), primitive=jax.lax.copy_p) for old, new in copies)
        block = Block(inputs, (*block.equations, *made), (*block.outputs, *(new for _, new in copies)))
        items[last] = dataclasses.replace(segment, block=block)
    return items, tuple(outputs)


def awaited_fetches(items: Sequence[ProgramStage | ExchangeStage]) -> frozenset[Equation]:
    """Fetches whose rows are read by programs only that the same step waits for: their memory can be used again.

    A program reads what it is given until it is done, and JAX may take NumPy's memory as it is. A step waits for the
    program whose sums it delivers; an evaluation waits for none.
    """
    waits = {item.level for item in items if isinstance(item, ExchangeStage) and item.op == "ap.deliver"}
    late = {
        v for item in items if isinstance(item, ProgramStage) and item.level not in waits for v in item.block.inputs
    }
    fetches = [e for item in items if isinstance(item, ExchangeStage) and item.op == "ap.fetch" for e in item.equations]
    return frozenset(e for e in fetches if waits and not late.intersection(e.outputs))
