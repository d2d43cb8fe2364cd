"""Gives families with the same untouched update one update log, so that one loop replays rows of all of them.

An optimizer treats most tables alike: a step records the same values for all (a learning rate, bias corrections). A
shared log has one record for each step, and the stamps of each family. With 26 tables XLA compiles one replay in the
step, in an evaluation, and between steps (`backends.update_log`), in place of 26.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.analysis.values import Numbering, atom_key, block_key
from autopar.ir.deferred import Replay, flushes
from autopar.ir.program import Atom, Block, Equation, Output, Program, Var
from autopar.ir.program_plan import ProgramPlan


def share_logs(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the lifted program with one update log for families whose logs would be equal."""
    logs = _logs(program)
    if not logs:
        return program, "nothing is deferred"
    if bound.on_hosts:
        return program, "each table on hosts has an update log of its own"
    same = _equal_values(program.block)
    groups: dict[Hashable, list[_Log]] = {}
    for log in logs:
        groups.setdefault(log.key(same), []).append(log)
    shared = list(groups.values())
    note = f"{len(logs)} families have {len(shared)} update logs"
    return (program if len(shared) == len(logs) else _with_logs(program, shared)), note


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    """A family's update log."""

    flush: Equation
    record: Equation | None  #: The equation that records a step, if there is anything to record.
    #: Stamps, now, segment, records, segments before the step, and after it.
    old: tuple[Var, ...]
    new: tuple[Atom, ...]
    first: int  #: The index of its stamps among the program's inputs; the others of `old` follow.

    @property
    def family(self) -> int:
        return self.flush.params["family"]

    def key(self, same: Mapping[Atom, Atom]) -> Hashable:
        """Returns a key that is equal for families that can share an update log."""
        replay: Replay = self.flush.params["replay"]
        if self.record is None:
            return self.family
        _, *given = self.record.inputs
        values = tuple(atom_key(same.get(a, a)) for a in given[len(replay.records) :])
        alike = replace(replay, leaves=tuple(range(len(replay.leaves))), extent=0)
        try:
            return alike, block_key(self.flush.bodies[0]), values
        except TypeError:
            return self.family


def _logs(program: Program) -> list[_Log]:
    """Returns the program's update logs, in the order of their inputs."""
    block = program.block
    start = next((k for k, input_ in enumerate(program.inputs) if input_.role == "log"), 0)
    makers = {v: e for e in block.equations if e.op == "ap.record" for v in e.outputs}
    outputs, logs = program.new_states, list[_Log]()
    for flush in flushes(block):
        replay: Replay = flush.params["replay"]
        numbers = range(start, start + 3 + len(replay.records) + len(replay.segments))
        new = tuple(block.outputs[outputs[k]] for k in numbers)
        written = new[3] if replay.records else None
        record = makers[written] if isinstance(written, Var) else None
        logs.append(_Log(flush, record, tuple(block.inputs[k] for k in numbers), new, start))
        start = numbers.stop
    return logs


def _equal_values(block: Block) -> dict[Atom, Atom]:
    """Maps results of JAX's equations to earlier values that are always equal."""
    numbering, same = Numbering(), dict[Atom, Atom]()
    for equation in block.equations:
        if equation.op.startswith("ap.") and equation.op != "ap.full":
            continue
        inputs = tuple(same.get(a, a) for a in equation.inputs)
        earlier = numbering.find(replace(equation, inputs=inputs))
        if earlier is not None:
            same.update(zip(equation.outputs, earlier, strict=True))
    return same


def _with_logs(program: Program, shared: Sequence[Sequence[_Log]]) -> Program:
    """Returns the program with one update log for each group of families: that of its first family."""
    block = program.block
    env: dict[Atom, Atom] = {}
    leads: dict[Equation, int] = {}
    gone: set[Equation] = set()
    for first, *others in shared:
        leads.update((log.flush, first.family) for log in (first, *others))
        records = [log.record for log in (first, *others) if log.record is not None]
        written = min(records, key=block.equations.index) if records else None
        for log in others:
            env.update(zip(log.old[1:], first.old[1:], strict=True))
        for record in records:
            if record is not written and written is not None:
                env.update(zip(record.outputs, written.outputs, strict=True))
                gone.add(record)
    equations = []
    for equation in block.equations:
        if equation not in gone:
            lead = {"log": leads[equation]} if equation in leads else {}
            inputs = tuple(env.get(a, a) for a in equation.inputs)
            equation = replace(equation, inputs=inputs, params={**equation.params, **lead})
            equations.append(equation)
    return _reordered(program, shared, _join_catch_ups(equations, shared), env)


def _reordered(
    program: Program, shared: Sequence[Sequence[_Log]], equations: Sequence[Equation], env: Mapping[Atom, Atom]
) -> Program:
    """Returns the program with inputs and outputs in the order of shared logs: all stamps, then the shared parts."""
    block, new_states = program.block, program.new_states
    start = shared[0][0].first
    kept: list[int] = []
    for first, *others in shared:
        kept += [log.first for log in (first, *others)]
        kept += range(first.first + 1, first.first + len(first.old))
    numbers = [*range(start), *kept]
    positions = [new_states[k] for k in kept]
    ahead = min(new_states[k] for k in range(start, len(program.inputs)))
    behind = ahead + len(program.inputs) - start
    order = [*range(ahead), *positions, *range(behind, len(program.outputs))]
    renumbered = {old: new for new, old in enumerate(numbers)}

    def output(k: int) -> Output:
        out = program.outputs[k]
        return out if out.state is None else replace(out, state=renumbered[out.state])

    return replace(
        program,
        block=Block(
            tuple(block.inputs[k] for k in numbers),
            tuple(equations),
            tuple(env.get(block.outputs[k], block.outputs[k]) for k in order),
        ),
        inputs=tuple(program.inputs[k] for k in numbers),
        outputs=tuple(map(output, order)),
    )


def _join_catch_ups(equations: Sequence[Equation], shared: Sequence[Sequence[_Log]]) -> Sequence[Equation]:
    """Joins each `ap.catch_up` with others of the same log, unless one depends on the other."""
    for logs in shared:
        families = {log.family for log in logs}
        waiting = [e for e in equations if e.op == "ap.catch_up" and families.issuperset(e.params["families"])]
        while waiting:
            members, equations = _join_first(equations, waiting[0], set(waiting))
            waiting = [e for e in waiting if e not in members]
    return equations


def _join_first(
    equations: Sequence[Equation], first: Equation, candidates: set[Equation]
) -> tuple[set[Equation], Sequence[Equation]]:
    """Joins an `ap.catch_up` with later ones that don't depend on it; returns these, and all equations.

    Equations that depend on them follow the last one.
    """
    start = equations.index(first)
    members, dependent = [first], set[Atom](first.outputs)
    ahead, delayed = list[Equation](), list[Equation]()
    rest: list[Equation] = []  # since the last member
    for equation in equations[start + 1 :]:
        if equation.effects:
            break
        rest.append(equation)
        if equation in candidates and dependent.isdisjoint(equation.inputs):
            members.append(equation)
            dependent.update(equation.outputs)
            for other in rest[:-1]:
                (ahead if dependent.isdisjoint(other.outputs) else delayed).append(other)
            rest = []
        elif not dependent.isdisjoint(equation.inputs):
            dependent.update(equation.outputs)
    end = start + 1 + len(ahead) + len(delayed) + len(members) - 1
    return set(members), [*equations[:start], *ahead, _catch_up(members), *delayed, *equations[end:]]


def _catch_up(members: Sequence[Equation]) -> Equation:
    first = members[0]
    if len(members) == 1:
        return first
    n = len(first.params["replay"].leaves)
    rows = [a for e in members for a in e.inputs[:n]]
    stamps = [e.inputs[n] for e in members]
    outputs = tuple(v for e in members for v in e.outputs)
    params = {**first.params, "families": tuple(f for e in members for f in e.params["families"])}
    return replace(first, inputs=(*rows, *stamps, *first.inputs[n + 1 :]), outputs=outputs, params=params)
