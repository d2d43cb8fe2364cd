"""`gradient_equations`: what of a step works on its examples, where these can't be divided into microbatches.

In a contrastive loss, say, examples meet others, and no sum over them ends the gradient program. Whoever has a
minibatch whole needs none: the update is then what follows from leaves that no result needs (slots), and what is done
element by element to the leaves themselves; the rest of what follows from the batch is the gradient program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Equation, Program, Var

#: How rows are found and read, which is done for the examples and for the update.
_OF_ROWS = frozenset({"ap.row_ids", "ap.route", "ap.pull"})
#: What is done to leaves, or to their rows, one by one.
_ELEMENTWISE = ALIGNED | {"ap.commit", "optimization_barrier"}


def gradient_equations(program: Program) -> set[Equation]:
    """Returns the equations between a minibatch and the update: the update reads what they make, and they don't read
    what it makes. None if no result of the step shows which leaves its examples meet."""
    block, equations = program.block, program.block.equations
    states = {block.inputs[k] for k in program.new_states}
    results = [block.outputs[n] for n, output in enumerate(program.outputs) if output.state is None]
    met = _read_by(equations, results) & states
    if not met:
        return set()
    of_batch = _following(equations, (v for v in block.inputs if v not in states))
    of_slots = _following(equations, states - met)
    chains = _chains(equations, states, [block.outputs[out] for out in program.new_states.values()])
    works = [e for e in equations if e.op not in _OF_ROWS and not of_batch.isdisjoint(e.outputs)]
    update = [e for e in works if e in chains or not of_slots.isdisjoint(e.outputs)]
    behind = _following(equations, (v for e in update for v in e.outputs))
    return {e for e in works if behind.isdisjoint(e.outputs)}


def _following(equations: Iterable[Equation], starts: Iterable[Var]) -> set[Var]:
    reached = set(starts)
    for equation in equations:
        if not reached.isdisjoint(_vars(equation.inputs)):
            reached.update(equation.outputs)
    return reached


def _read_by(equations: Sequence[Equation], results: Iterable[Atom]) -> set[Var]:
    read = set(_vars(results))
    for equation in reversed(equations):
        if not read.isdisjoint(equation.outputs):
            read.update(_vars(equation.inputs))
    return read


def _chains(equations: Sequence[Equation], states: set[Var], new: Iterable[Atom]) -> set[Equation]:
    elementwise = [e for e in equations if e.op in _ELEMENTWISE and not e.bodies]
    read = _read_by(elementwise, new)
    rows = {v for e in equations if e.op == "ap.pull" and e.inputs[0] in states for v in e.outputs}
    reached = _following(elementwise, states | rows)
    return {e for e in elementwise if not reached.isdisjoint(e.outputs) and not read.isdisjoint(e.outputs)}


def _vars(atoms: Iterable[Atom]) -> list[Var]:
    return [a for a in atoms if isinstance(a, Var)]
