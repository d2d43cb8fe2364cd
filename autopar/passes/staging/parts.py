"""Divides a step cut by `split_update`, and finds the stage of each equation and leaf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.analysis.flow import dependent
from autopar.analysis.primitives import MOVES
from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.schedule import Kind
from autopar.ir.slicing import copied, eliminate_dead, halves, needed_equations

#: Operations that relate rows of a table to all of it.
_ROWS = ("ap.pull", "ap.commit")
#: Most elements of a value that every stage computes by itself: scalars.
SMALL = 1


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A program around its one `ap.microbatches` equation."""

    before: Sequence[Equation]
    step: Equation
    after: Sequence[Equation]

    @property
    def body(self) -> Block:
        return self.step.bodies[0]


def find_parts(program: Program) -> Parts:
    """Finds the parts of a program that `split_update` has cut."""
    equations = program.block.equations
    k = next(k for k, e in enumerate(equations) if e.op == "ap.microbatches")
    before = needed_equations(equations[:k], equations[k].inputs)
    known = {v for e in before for v in e.outputs}
    rest = []  # equations that the update alone reads
    for equation in equations[:k]:
        is_known = [v in known for v in equation.outputs]
        if not all(is_known) or not is_known:
            rest.append(halves(equation, is_known)[1] if any(is_known) else equation)
    return Parts(before, equations[k], (*rest, *equations[k + 1 :]))


def read_by(parts: Parts) -> dict[Var, Var]:
    """Maps inputs of the microbatch's program to its operands."""
    pairs = zip(parts.body.inputs, parts.step.inputs, strict=True)
    return {inner: outer for inner, outer in pairs if isinstance(outer, Var)}


def used_weights(program: Program, parts: Parts) -> list[Var]:
    """Returns leaves of the state that the gradient program reads and the update changes, in order of their first
    use."""
    whole = {v for v, axis in zip(parts.body.inputs, parts.step.params["axes"], strict=True) if axis is None}
    outer = read_by(parts)
    states = [v for v, input_ in program.named_inputs if input_.role == "state" and v.shape]
    reached = {v: dependent(parts.before, [v]) for v in states}
    order: dict[Var, None] = {}
    for equation in parts.body.equations:
        read = {outer[a] for a in equation.inputs if isinstance(a, Var) and a in whole}
        order.update(dict.fromkeys(v for v in states if v not in order and not read.isdisjoint(reached[v])))
    return list(order)


def homes_before(parts: Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """Returns the stage of leaves, and of functions of them before the microbatches: that of the deepest leaf."""
    return _depends(parts.before, homes)


def label_parts(
    parts: Parts, homes: Mapping[Var, int], stages: int, *, splits_backward: bool = False
) -> dict[Equation, Label]:
    """Returns the label of each equation of the gradient program. `homes`: the stage of each weight. `stages`: S.
    `splits_backward`: gradients of weights are "W", apart from those of inputs."""
    body, outer, depths = parts.body, read_by(parts), homes_before(parts, homes)
    weights = {inner: depths[leaf] for inner, leaf in outer.items() if leaf in depths}
    groups = _elementwise((*parts.before, *parts.after), [*homes, *parts.step.outputs])
    reached = {groups[v]: v for v in reversed(list(homes)) if v in groups}
    trained = {v: reached[groups[v]] for v in parts.step.outputs if groups.get(v) in reached}
    pairs = zip(body.outputs, parts.step.outputs, strict=True)
    gradients = {inner: homes[trained[outer]] for inner, outer in pairs if outer in trained}
    labels = label_equations(body, weights, gradients, stages)
    return split_backward(body, labels) if splits_backward else labels


def _elementwise(equations: Iterable[Equation], starts: Iterable[Var]) -> dict[Var, int]:
    """Groups values by number: those that meet in equations of one shape share one, and rows that of their table."""
    groups = {v: k for k, v in enumerate(starts) if v.shape and v.type.size > SMALL}
    members: dict[int, set[Var]] = {k: {v} for v, k in groups.items()}
    for equation in equations:
        for out in equation.outputs:
            read = [a for a in equation.inputs if a in groups and isinstance(a, Var)]
            same = [a for a in read if a.shape == out.shape or equation.op in _ROWS]
            numbers = sorted({groups[a] for a in same})
            if not numbers:
                continue
            first = numbers[0]
            for other in numbers[1:]:
                for var in members.pop(other):
                    groups[var] = first
                    members[first].add(var)
            groups[out] = first
            members[first].add(out)
    return groups


def update_homes(parts: Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """Returns the stage of elementwise functions of a leaf in the update: the leaf's."""
    groups = _elementwise((*parts.before, *parts.after), [*homes, *parts.step.outputs])
    stages = {groups[v]: stage for v, stage in reversed(list(homes.items())) if v in groups}
    return {v: stages[group] for v, group in groups.items() if group in stages}


def other_homes(program: Program, parts: Parts, homes: Mapping[Var, int]) -> dict[Var, int]:
    """Returns the stage of the state's other leaves, that of the weight whose update reads them."""
    states = [v for v, input_ in program.named_inputs if input_.role == "state"]
    groups = _elementwise((*parts.before, *parts.after), [*homes, *states, *parts.step.outputs])
    stages = {groups[v]: homes[v] for v in homes if v in groups}
    return {v: stages.get(groups.get(v, -1), 0) for v in states if v not in homes}


def untied(parts: Parts, homes: Mapping[Var, int], stages: int) -> Parts:
    """Splits gradients that are sums over stages into a result for each stage; the update adds them."""
    while True:
        labels = label_parts(parts, homes, stages)
        body, made = parts.body, parts.body.makers()
        for k, atom in enumerate(body.outputs):
            equation = made.get(atom) if isinstance(atom, Var) else None
            if equation is None or equation.op not in ("add_any", "add") or parts.step.params["joins"][k] != "sum":
                continue
            addends = [a for a in equation.inputs if a.shape == atom.shape]
            where = {labels[made[a]] for a in addends if isinstance(a, Var) and a in made}
            if len(addends) == 2 and len(where) == 2:
                parts = _added_later(parts, k, equation)
                break
        else:
            return parts


def _added_later(parts: Parts, k: int, equation: Equation) -> Parts:
    step, body = parts.step, parts.body
    sums = tuple(Var(step.outputs[k].type) for _ in equation.inputs)
    later = replace(equation, inputs=sums, outputs=(step.outputs[k],))
    outputs = (*body.outputs[:k], *equation.inputs, *body.outputs[k + 1 :])
    joins = step.params["joins"]
    new = replace(
        step,
        outputs=(*step.outputs[:k], *sums, *step.outputs[k + 1 :]),
        params={**step.params, "joins": (*joins[:k], "sum", "sum", *joins[k + 1 :])},
        bodies=(eliminate_dead(Block(body.inputs, body.equations, outputs))[0],),
    )
    return Parts(parts.before, new, (later, *parts.after))


# --- rematerialization: a stage's backward computes its forward again, from the inputs that the stage was sent ---
#
# So a stage holds only these inputs of each microbatch, and no other activations. The last stage's backward follows its
# forward at once, and computes nothing twice. Source: GPipe (Huang et al., 2018), section 2.3.


def with_remat(parts: Parts, labels: Mapping[Equation, Label], stages: int) -> tuple[Parts, dict[Equation, Label]]:
    """Returns the step whose backwards read no activations of their own stage's forward, and its labels.

    `labels`: of `label_parts`; `stages`: S.
    """
    copier = _Copier(parts, labels)
    for equation in parts.body.equations:
        label = labels[equation]
        if label.direction == "F" or label.stage < 0 or label.stage == stages - 1 > 0:
            copier.labels[equation] = label
        else:
            inputs = tuple(copier.again(a, label) for a in equation.inputs)
            copier.labels[replace(equation, inputs=inputs)] = label
    block = Block(parts.body.inputs, tuple(copier.labels), parts.body.outputs)
    return Parts(parts.before, replace(parts.step, bodies=(block,)), parts.after), copier.labels


class _Copier:
    """Writes the equations, and recomputed ones before their first reader."""

    def __init__(self, parts: Parts, labels: Mapping[Equation, Label]) -> None:
        self.labels: dict[Equation, Label] = {}  #: The written equations, in order, with their labels.
        self._forward: dict[Var, tuple[Equation, int]] = {}
        for equation in parts.body.equations:
            label = labels[equation]
            if label.direction == "F" and label.stage >= 0:
                self._forward.update(dict.fromkeys(equation.outputs, (equation, label.stage)))
        self._for_inputs = self._read_for_inputs(parts, labels)
        self._new: dict[Var, Var] = {}

    def again(self, atom: Atom, reader: Label) -> Atom:
        """Returns a value for a backward to read, recomputed if the same stage's forward has made it."""
        made = self._forward.get(atom) if isinstance(atom, Var) else None
        if made is None or made[1] != reader.stage or not isinstance(atom, Var):
            return atom
        if atom not in self._new:
            equation = made[0]
            # Recomputation for gradients of inputs isn't delayed to "W".
            label = Label("B", reader.stage) if equation in self._for_inputs else reader
            copy = copied(equation, [self.again(a, reader) for a in equation.inputs])
            self._new.update(zip(equation.outputs, copy.outputs, strict=True))
            self.labels[copy] = label
        return self._new[atom]

    def _read_for_inputs(self, parts: Parts, labels: Mapping[Equation, Label]) -> set[Equation]:
        """Returns the forward equations that "B" equations read, directly or not."""
        found: set[Equation] = set()
        for equation in parts.body.equations:
            label = labels[equation]
            wanted = list(equation.inputs) if label.direction == "B" else []
            while wanted:
                atom = wanted.pop()
                made = self._forward.get(atom) if isinstance(atom, Var) else None
                if made is not None and made[1] == label.stage and made[0] not in found:
                    found.add(made[0])
                    wanted += made[0].inputs
        return found


# --- each equation of a gradient program gets a stage, forward or backward; no markers are needed ---
#
# Weights are ordered by their first use, and cut into stages in that order. For each equation there is the deepest
# stage whose weights it depends on, and the deepest whose gradients it feeds. An equation that doesn't depend on the
# last stage belongs to the forward of the former. Others belong to the backward of the latter, raised to the stage of
# any weight or forward value that they read: `dy @ W.T` feeds what is ahead of W, and belongs to W's stage. Equations
# that depend on no weight (masks, positions) have no stage: each stage computes those that it reads. Source:
# docs/pipelines.md.


#: The stage of equations that depend on no weight.
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Label:
    """The stage of an equation (`NOWHERE`: each stage computes it), and its direction."""

    direction: Kind
    stage: int


def label_equations(
    block: Block, weights: Mapping[Var, int], gradients: Mapping[Atom, int], stages: int
) -> dict[Equation, Label]:
    """Returns the label of each equation of a gradient program, of one microbatch. `weights`: input that depends on
    weights -> the deepest stage of these. `gradients`: output that is a gradient -> the stage of its weight."""
    last = stages - 1
    depends = _depends(block.equations, weights)
    feeds, measured = _feeds(block, gradients, last)
    labels: dict[Equation, Label] = {}
    homes: dict[Var, int] = dict(weights)
    for equation in block.equations:
        deepest = max((depends.get(v, NOWHERE) for v in equation.outputs), default=NOWHERE)
        if deepest == NOWHERE:
            labels[equation] = Label("F", NOWHERE)
        elif deepest < last or any(v in measured for v in equation.outputs):
            labels[equation] = Label("F", deepest)
            homes.update(dict.fromkeys(equation.outputs, deepest))
    reached: dict[Var, int] = {}
    for equation in reversed(block.equations):
        if equation in labels:
            continue
        stage = max(feeds.get(v, NOWHERE) for v in equation.outputs)
        stage = max([stage, *(reached[v] for v in equation.outputs if v in reached)])
        stage = max([stage, *(homes[a] for a in equation.inputs if isinstance(a, Var) and a in homes)])
        labels[equation] = Label("B", stage)
        for atom in equation.inputs:
            if isinstance(atom, Var):
                reached[atom] = max(reached.get(atom, NOWHERE), stage)
    return _with_moves(block, labels)


def _with_moves(block: Block, labels: dict[Equation, Label]) -> dict[Equation, Label]:
    """Moves equations that only move a backward value to the stage that makes it: a transposed gradient is that
    stage's."""
    made: dict[Var, Label] = {}
    for equation in block.equations:
        label, sources = labels[equation], [a for a in equation.inputs if isinstance(a, Var)]
        source = made.get(sources[0]) if len(sources) == 1 else None
        if label.direction == "B" and equation.op in MOVES and source is not None and source.direction == "B":
            size = sum(getattr(v.type, "nbytes", 0) for v in equation.outputs)
            if size <= getattr(sources[0].type, "nbytes", 0):
                label = labels[equation] = source
        made.update(dict.fromkeys(equation.outputs, label))
    return labels


def split_backward(block: Block, labels: Mapping[Equation, Label]) -> dict[Equation, Label]:
    """Relabels "B" as "W" where no other stage waits for the result: gradients of a stage's own weights."""
    split: dict[Equation, Label] = {}
    read: dict[Var, set[Label]] = {}
    for equation in reversed(block.equations):
        label = labels[equation]
        if label.direction == "B":
            readers = {r for v in equation.outputs for r in read.get(v, ())}
            if all(r.direction == "W" and r.stage == label.stage for r in readers):
                label = Label("W", label.stage)
        split[equation] = label
        for atom in equation.inputs:
            if isinstance(atom, Var):
                read.setdefault(atom, set()).add(label)
    return split


def _depends(equations: Iterable[Equation], weights: Mapping[Var, int]) -> dict[Var, int]:
    """Maps values to the deepest stage whose weights they depend on; `weights`: those of which that is known."""
    depths = dict(weights)
    for equation in equations:
        deepest = max((depths.get(a, NOWHERE) for a in equation.inputs if isinstance(a, Var)), default=NOWHERE)
        if deepest != NOWHERE:
            depths.update(dict.fromkeys(equation.outputs, deepest))
    return depths


def _feeds(block: Block, gradients: Mapping[Atom, int], last: int) -> tuple[dict[Var, int], set[Var]]:
    """Maps values to the deepest stage whose gradients they feed; also returns those that feed other results."""
    deepest_fed: dict[Var, int] = {}
    measured = {a for a in block.outputs if isinstance(a, Var) and a not in gradients}
    for atom in block.outputs:
        if isinstance(atom, Var):
            deepest_fed[atom] = max(deepest_fed.get(atom, NOWHERE), gradients.get(atom, last))
    for equation in reversed(block.equations):
        deepest = max((deepest_fed.get(v, NOWHERE) for v in equation.outputs), default=NOWHERE)
        is_measured = any(v in measured for v in equation.outputs)
        for atom in equation.inputs:
            if isinstance(atom, Var):
                deepest_fed[atom] = max(deepest_fed.get(atom, NOWHERE), deepest)
                if is_measured:
                    measured.add(atom)
    return deepest_fed, measured
