"""Cuts a step with a separate gradient program into a worker's program and those of the servers that keep its state.

A worker runs the gradient program, and the part of the update that depends on gradients alone (a clip's norm); servers
run the rest of the update on pushed values. The cut minimizes bytes: of two values of which one follows from the other
the smaller one travels. Leaves that the update ties together are kept by one server; large ones may be cut into pieces
for all, if the update goes element by element (`cut_leaves`), tables of which rows are looked up by columns. Every
process has the clocks. Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014),
section 3; MXNET-MPI, section 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from autopar import jax_compat
from autopar.analysis.batch import SUMMED
from autopar.analysis.flow import dependent
from autopar.analysis.interpreter import union
from autopar.analysis.local import Followed, follow_spread, resized_params
from autopar.analysis.primitives import ELEMENTWISE
from autopar.analysis.rules import ALIGNED
from autopar.errors import StrategyError
from autopar.ir.local import NotLocal
from autopar.ir.operations import split
from autopar.ir.plan import ServedPlan, ServerPlan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.served import Cutting, KeptIndex, Piece, ServedStep, ServerPart, balanced_pieces
from autopar.ir.slicing import behind, clone, eliminate_dead, free_values, nearest_line, needed_equations
from autopar.ir.writer import expand
from autopar.sync import Async


def split_servers(
    program: Program, servers: int, gradient: Collection[Equation] | None, cutting: Cutting
) -> ServedStep:
    """Returns the programs of a worker and of each server.

    `program`: a program that `split_update` has cut, into one microbatch; or any other one. `servers`: the number of
    servers. `gradient`: the equations of its gradient program; None: that of `split_update`. `cutting`: the sizes from
    which on leaves are cut. Raises StrategyError if a result needs leaves that only servers have, or the update has an
    effect.
    """
    cut = [e for e in program.block.equations if e.op == "ap.microbatches"] if gradient is None else gradient
    return _Cutter(program, servers, set(cut), cutting).run()


@dataclass(frozen=True)
class _Cut:
    """The joint work of all servers."""

    of_update: Sequence[Equation]  #: Equations of their updates.
    pushed: Sequence[Var]  #: Values that workers push.
    of_pulls: Sequence[Equation]  #: Equations of pulls.
    ids: Sequence[Var]  #: Values that workers send for them.
    whole: Collection[int]  #: Leaves that are pulled whole.
    pulls: Sequence[Equation]  #: Lookups of rows.


class _Cutter:
    def __init__(self, program: Program, servers: int, gradient: Collection[Equation], cutting: Cutting) -> None:
        self._program, self._count, self._cutting = program, servers, cutting
        block = program.block
        self._inputs, self._equations = block.inputs, block.equations
        self._new = {k: block.outputs[out] for k, out in program.new_states.items()}
        self._results = [k for k, output in enumerate(program.outputs) if output.state is None]
        self._clocks = self._find_clocks()
        self._served = [k for k in self._new if k not in self._clocks]
        #: Number -> what servers keep: leaves of the state, and pieces of such, with numbers after theirs.
        self._kept: dict[int, Var] = {k: self._inputs[k] for k in self._served}
        self._pieces: dict[KeptIndex, Piece] = {}
        #: Updates and lookups of pieces; workers' equations that join pulled pieces, and slice pushed values.
        self._of_pieces: list[Equation] = []
        self._lookups: list[Equation] = []
        self._joins: list[Equation] = []
        self._slices: list[Equation] = []
        apart = [e for e in self._equations if e not in gradient]
        #: Value -> the leaves on which it depends other than by the gradient program, as bits.
        self._of_state = _reached(apart, {self._inputs[k]: 1 << k for k in self._new})
        self._on_state = [e for e in apart if any(self._of_state.get(v) for v in e.outputs)]
        self._stateless = [e for e in apart if e not in self._on_state]

    def run(self) -> ServedStep:
        if not self._served:
            raise StrategyError(
                f"sync=Async: no new state of {self._program.name} follows from what it is given with each call, so "
                "there is nothing to train. Say with state_argnums= what the state is, or leave sync= out"
            )
        # Servers compute new states; workers push the other values that these need.
        new = [self._new[k] for k in self._served]
        update = needed_equations(self._on_state, new)
        states = {self._inputs[k] for k in self._new}
        pushed, moved = self._sent(v for v in free_values(update, new) if v not in states)
        of_update = self._in_order([*self._on_state, *moved])
        self._check_effects(of_update)
        whole, pulls = self._pulled(pushed)
        ids, routes = self._sent(v for e in pulls for v in free_values([], e.inputs[1:]))
        counted = [k for k in self._clocks if self._counts_by_itself(k, of_update)]
        shares = self._shares(of_update, pushed, whole, pulls)
        of_update += self._of_pieces
        of_pulls = [*self._in_order([*pulls, *routes]), *self._lookups]
        new = [self._new[k] for share in shares for k in share]
        read = free_values(needed_equations(of_update, new), new)
        pushed = [v for v in (*pushed, *(v for e in self._slices for v in e.outputs)) if v in read]
        cut = _Cut(of_update, pushed, of_pulls, ids, whole, [*pulls, *self._lookups])
        parts = [self._part(leaves, cut, () if n else counted) for n, leaves in enumerate(shares)]
        pulled = [v for part in parts for v in part.pull.outputs if isinstance(v, Var)]
        own = [*self._clocks, *(k for k in range(len(self._inputs)) if k not in self._new)]
        outputs = (*pushed, *(self._program.block.outputs[k] for k in self._results))
        outputs = (*outputs, *(self._new[k] for k in self._clocks))
        rest = [*self._joins, *(e for e in self._equations if e not in pulls), *self._slices]
        worker = needed_equations(rest, outputs)
        inputs = (*pulled, *(self._inputs[k] for k in own))
        self._check_results(worker, outputs, inputs)
        of_ids = needed_equations(self._equations, ids)
        read = free_values(of_ids, ids)
        id_inputs = tuple(k for k, v in enumerate(self._inputs) if v in read)
        return ServedStep(
            ids=Block(tuple(self._inputs[k] for k in id_inputs), tuple(of_ids), tuple(ids)),
            id_inputs=id_inputs,
            worker=Block(inputs, tuple(worker), outputs),
            own=tuple(own),
            pushed=len(pushed),
            results=tuple(self._results),
            clocks=tuple(self._clocks),
            whole=frozenset(whole),
            servers=tuple(parts),
            pieces=self._pieces,
        )

    def _find_clocks(self) -> list[int]:
        """Returns leaves of the state whose new value depends on such leaves alone."""
        reached = _reached(self._equations, {v: 1 << k for k, v in enumerate(self._inputs)})
        clocks = list(self._new)
        while True:
            bits = sum(1 << k for k in clocks)
            kept = [k for k in clocks if not reached.get(self._new[k], 0) & ~bits]
            if kept == clocks:
                return clocks
            clocks = kept

    def _sent(self, wanted: Iterable[Var]) -> tuple[list[Var], list[Equation]]:
        """Returns the values that travel in place of the wanted ones, and the equations that compute these from them.
        Raises StrategyError if one of them can't travel."""
        sent = dict.fromkeys(wanted)
        moved: list[Equation] = []
        for equation in reversed(self._stateless):
            outputs = [v for v in equation.outputs if v in sent]
            inputs = [v for v in free_values([equation]) if v not in sent]
            must = not all(map(_travels, outputs))
            if outputs and (must or _bytes(inputs) <= _bytes(outputs)) and not equation.effects:
                for var in outputs:
                    del sent[var]
                sent.update(dict.fromkeys(inputs))
                moved.append(equation)
        lost = next((v for v in sent if not _travels(v)), None)
        if lost is not None:
            raise StrategyError(
                f"sync=Async: the update of {self._program.name} needs a value ({lost.type}) that a worker can't send. "
                "Make random keys of the state's, not of the batch's"
            )
        return list(sent), moved

    def _pulled(self, pushed: Sequence[Var]) -> tuple[list[int], list[Equation]]:
        needed = needed_equations(self._equations, pushed)
        leaves = {self._inputs[k]: k for k in self._served}
        pulls = [e for e in needed if e.op == "ap.pull" and e.inputs[0] in leaves and e.inputs[1] not in self._of_state]
        others = free_values([e for e in needed if e not in pulls])
        return [k for v, k in leaves.items() if v in others], pulls

    def _shares(
        self, of_update: Sequence[Equation], pushed: Sequence[Var], whole: Collection[int], pulls: Sequence[Equation]
    ) -> list[list[KeptIndex]]:
        """Returns the numbers of what each server keeps, if anything; leaves that the update ties together have one
        server.

        While one has much more than others, its largest ones are cut.

        Args:
          of_update: Equations of the update.
          pushed: Values that workers push.
          whole: Leaves that workers pull whole.
          pulls: Lookups of rows.
        """

        def cut(group: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
            new = [self._new[k] for k in group]
            lookups = {k: [e for e in pulls if e.inputs[0] is self._kept[k]] for k in group}
            row_axes = {e.params["axis"] for k in group for e in lookups[k]}
            equations = needed_equations(of_update, new)
            leaves = [self._kept[k] for k in group]
            found = cut_leaves(leaves, new, equations, pushed, self._count, uncut=row_axes)
            if found is None:
                return []
            for n, k in enumerate(group):
                pieces = [p.states[n] for p in found.pieces]
                if k in whole:
                    self._joins += joined(pieces, found.axis, self._kept[k], equations[-1])
                for lookup in lookups[k]:
                    self._look_up(lookup, pieces, found.axis)
            return self._numbers(group, found)

        def size(group: tuple[int, ...]) -> int:
            return _bytes(self._kept[k] for k in group)

        shares = balanced_pieces(self._tied(of_update), self._count, size, cut, self._cutting)
        return [sorted(KeptIndex(k) for group in share for k in group) for share in shares]

    def _look_up(self, lookup: Equation, pieces: Sequence[Var], axis: int) -> None:
        (rows,), parts = lookup.outputs, []
        for piece in pieces:
            parts.append(Var(rows.type.resized(axis, piece.shape[axis])))
            inputs = (piece, *lookup.inputs[1:])
            self._lookups.append(replace(lookup, inputs=inputs, outputs=(parts[-1],)))
        self._joins += joined(parts, axis, rows, lookup)

    def _numbers(self, group: tuple[int, ...], found: CutLeaves) -> list[tuple[KeptIndex, ...]]:
        """Returns new numbers of leaves in pieces, for each piece those of its leaves."""
        numbers = []
        for piece in found.pieces:
            first = len(self._inputs) + len(self._pieces)
            numbers.append(tuple(map(KeptIndex, range(first, first + len(group)))))
            for k, number, state, value in zip(group, numbers[-1], piece.states, piece.new, strict=True):
                self._pieces[number] = Piece(k, found.axis, piece.start, piece.stop)
                self._kept[number], self._new[number] = state, value
            self._of_pieces += piece.equations
            self._slices += piece.slices
        return numbers

    def _tied(self, equations: Sequence[Equation]) -> list[tuple[int, ...]]:
        """Groups the leaves of the state that the update ties together."""
        reached = _reached(equations, {self._inputs[k]: 1 << k for k in self._served})
        groups: list[int] = []
        for k in self._served:
            bits = reached.get(self._new[k], 0) | 1 << k
            tied = [g for g in groups if g & bits]
            groups = [g for g in groups if not g & bits] + [bits | union(tied)]
        groups.sort(key=lambda g: g & -g)
        return [tuple(k for k in self._served if bits >> k & 1) for bits in groups]

    def _counts_by_itself(self, clock: int, of_update: Sequence[Equation]) -> bool:
        """Returns whether a server can count a clock that nothing else of it needs; not a random key, which is each
        worker's."""
        v = self._inputs[clock]
        if jax_compat.is_key(v.dtype):
            return False
        new = [self._new[clock]]
        clocks = {self._inputs[k] for k in self._clocks}
        return all(a in clocks for a in free_values(needed_equations(of_update, new), new))

    def _part(self, leaves: Sequence[KeptIndex], cut: _Cut, counted: Sequence[int]) -> ServerPart:
        """Makes a server's programs. `leaves`: numbers of what it keeps. `cut`: the joint work of all servers.
        `counted`: clocks that it counts, whether it reads them or not."""
        clocks = list(counted)
        while True:  # a clock may need another one
            new = [self._new[k] for k in (*leaves, *clocks)]
            equations = needed_equations(cut.of_update, new)
            read = free_values(equations, new)
            more = [k for k in self._clocks if self._inputs[k] in read or k in counted]
            if more == clocks:
                break
            clocks = more
        used = [n for n, v in enumerate(cut.pushed) if v in read]
        states = [self._kept[k] for k in leaves]
        rows = [e for e in cut.pulls if e.inputs[0] in states]
        pulled = [k for k in leaves if (self._pieces[k].leaf if k in self._pieces else k) in cut.whole]
        given = [*(self._kept[k] for k in pulled), *(e.outputs[0] for e in rows)]
        of_given = needed_equations(cut.of_pulls, given)
        asked = [n for n, v in enumerate(cut.ids) if v in free_values(of_given)]
        inputs = (*states, *(self._inputs[k] for k in clocks), *(cut.pushed[n] for n in used))
        return ServerPart(
            leaves=tuple(leaves),
            clocks=tuple(clocks),
            pull=Block((*states, *(cut.ids[n] for n in asked)), tuple(of_given), tuple(given)),
            ids=tuple(asked),
            update=Block(inputs, tuple(equations), tuple(new)),
            pushed=tuple(used),
            leaf_bytes=_bytes(states),
            pull_bytes=_bytes(given) + _bytes([cut.ids[n] for n in asked]),
            push_bytes=_bytes([cut.pushed[n] for n in used]),
        )

    def _in_order(self, some: Collection[Equation]) -> list[Equation]:
        chosen = set(some)
        return [e for e in self._equations if e in chosen]

    def _check_effects(self, update: Sequence[Equation]) -> None:
        effect = next((e for e in update if e.effects), None)
        if effect is not None:
            raise StrategyError(
                f"sync=Async: {self._program.name} has an effect, {effect.op} ({effect.where}), on what servers keep. "
                "Leave it out"
            )

    def _check_results(self, worker: Sequence[Equation], outputs: Sequence[Atom], given: Collection[Var]) -> None:
        """Checks that a worker has everything that its results need. Raises StrategyError if it hasn't."""
        lost = next((v for v in free_values(worker, outputs) if v not in given), None)
        if lost is None:
            return
        k = self._inputs.index(lost)
        for n in self._results:
            out = self._program.block.outputs[n]
            if lost in free_values(needed_equations(worker, [out]), [out]):
                line = nearest_line(self._program.block, out)
                where = "" if line is None else f" ({line.where})"
                result = self._program.outputs[n].path or f"of {self._program.name}"
                raise StrategyError(
                    f"sync=Async: the result {result}{where} needs "
                    f"{self._program.inputs[k].path}, which servers keep, and a worker doesn't pull. Compute it of "
                    "autopar.average(state), outside of the step"
                )
        raise AssertionError(f"a worker needs {self._program.inputs[k].path}")


def _reached(equations: Iterable[Equation], starts: Mapping[Var, int]) -> dict[Atom, int]:
    reached: dict[Atom, int] = {**starts}
    for equation in equations:
        bits = union(reached.get(a, 0) for a in equation.inputs)
        if bits:
            reached.update(dict.fromkeys(equation.outputs, bits))
    return reached


def _travels(var: Var) -> bool:
    return isinstance(var.type, ArrayType) and not jax_compat.is_key(var.dtype)


def _bytes(some: Iterable[Var]) -> int:
    return sum(v.type.nbytes if isinstance(v.type, ArrayType) else 0 for v in some)


# --- the gradient program of a step whose examples can't be divided into microbatches ---
#
# In a contrastive loss, say, examples meet others, and no sum over them ends the gradient program. A worker with a
# whole minibatch needs none: the update is then everything that depends on leaves that no result needs (slots), and
# elementwise operations on the leaves themselves; the rest that depends on the batch is the gradient program.
#: Operations that find and read rows, for the examples and for the update.
_OF_ROWS = frozenset({"ap.row_ids", "ap.route", "ap.pull"})
#: Elementwise operations on leaves, or on their rows.
_ELEMENTWISE = ALIGNED | {"ap.commit", "optimization_barrier"}


def gradient_equations(program: Program) -> set[Equation]:
    """Returns the equations between a minibatch and the update, which don't depend on it.

    Empty if no result of the step shows which leaves its examples meet.
    """
    block, equations = program.block, program.block.equations
    states = {block.inputs[k] for k in program.new_states}
    results = [block.outputs[n] for n, output in enumerate(program.outputs) if output.state is None]
    met = states & _read_by(equations, results)
    if not met:
        return set()
    of_batch = dependent(equations, (v for v in block.inputs if v not in states))
    of_slots = dependent(equations, states - met)
    chains = _chains(equations, states, [block.outputs[out] for out in program.new_states.values()])
    works = [e for e in equations if e.op not in _OF_ROWS and not of_batch.isdisjoint(e.outputs)]
    update = [e for e in works if e in chains or not of_slots.isdisjoint(e.outputs)]
    updated = dependent(equations, (v for e in update for v in e.outputs))
    return {e for e in works if updated.isdisjoint(e.outputs)}


def _read_by(equations: Sequence[Equation], results: Iterable[Atom]) -> set[Atom]:
    results = list(results)
    return {*results, *(a for e in behind(equations, results) for a in e.inputs)}


def _chains(equations: Sequence[Equation], states: set[Var], new: Iterable[Atom]) -> set[Equation]:
    elementwise = [e for e in equations if e.op in _ELEMENTWISE and not e.bodies]
    read = _read_by(elementwise, new)
    rows = {v for e in equations if e.op == "ap.pull" and e.inputs[0] in states for v in e.outputs}
    reached = dependent(elementwise, states | rows)
    return {e for e in elementwise if not reached.isdisjoint(e.outputs) and not read.isdisjoint(e.outputs)}


# --- the plan of servers ---


def served_plan(
    program: Program, bound: ProgramPlan, served: ServedStep, sync: Async, clients: int, ranks: Sequence[int]
) -> ServedPlan:
    """Returns the plan of a step that `split_servers` has cut. `ranks`: of servers that are processes of their own."""
    paths = [input_.path for input_ in program.inputs]
    lifted = {k for space in program.facts.spaces if bound.family(space.family) is not None for k in space.leaves}
    kept = [pair for part in served.servers for pair in zip(part.leaves, part.pull.inputs, strict=False)]
    pulled = {v: served.leaf_of(k) for k, v in kept}
    lookups = (e for part in served.servers for e in part.pull.equations if e.op == "ap.pull")
    looked_up = {pulled[e.inputs[0]] for e in lookups if e.inputs[0] in pulled}
    along = [axis for k, axis in enumerate(bound.placements) if axis is not None and program.inputs[k].role == "batch"]
    sizes = [v.shape[a] for v, a in zip(program.block.inputs, bound.placements, strict=False) if a is not None]
    return ServedPlan(
        name=sync.name,
        clients=clients,
        staleness=sync.staleness,
        servers=tuple(_server_plan(program, served, part) for part in served.servers),
        by_rows=tuple(paths[k] for k in sorted(lifted & looked_up - served.whole)),
        clocks=tuple(paths[k] for k in served.clocks),
        examples=max(sizes, default=0) if along else 0,
        ranks=tuple(ranks[: len(served.servers)]),
    )


def _server_plan(program: Program, served: ServedStep, part: ServerPart) -> ServerPlan:
    pieces: dict[str, float] = {}
    for piece in (served.pieces[k] for k in part.leaves if k in served.pieces):
        path = program.inputs[piece.leaf].path
        share = (piece.stop - piece.start) / program.block.inputs[piece.leaf].shape[piece.axis]
        pieces[path] = pieces.get(path, 0.0) + share
    return ServerPlan(
        leaves=tuple(f"{program.inputs[served.leaf_of(k)].path}{served.pieces.get(k, '')}" for k in part.leaves),
        leaf_bytes=part.leaf_bytes,
        pull_bytes=part.pull_bytes,
        push_bytes=part.push_bytes,
        pieces=pieces,
    )


# --- leaves whose update is elementwise, cut into pieces, each with an update of its own ---
#
# One large matrix would keep one server busy. If neither its update nor those of its slots look beyond a piece of an
# axis, each server keeps a piece, and gets that piece of the gradient (MXNET-MPI, section 2: large keys are cut over
# all servers).


@dataclass(frozen=True, slots=True, eq=False)
class LeafPiece:
    """The update of one piece of some leaves."""

    start: int  #: The range along the axis.
    stop: int
    states: tuple[Var, ...]  #: A piece of each leaf.
    given: tuple[Var, ...]  #: Pieces of values from elsewhere.
    slices: tuple[Equation, ...]  #: The equations that slice these from the whole values.
    equations: tuple[Equation, ...]  #: The update.
    new: tuple[Var, ...]  #: A new piece of each leaf.


@dataclass(frozen=True, slots=True, eq=False)
class CutLeaves:
    """Leaves in pieces, in order."""

    axis: int  #: The axis along which they are cut.
    pieces: tuple[LeafPiece, ...]


def cut_leaves(
    states: Sequence[Var],
    new: Sequence[Atom],
    equations: Sequence[Equation],
    elsewhere: Collection[Var],
    parts: int,
    uncut: Collection[int],
) -> CutLeaves | None:
    """Returns leaves in pieces along an axis that allows it, in equal ones if some axis does; None if none does.

    Args:
      states: The leaves that an update ties together.
      new: Their new values.
      equations: The update, in order.
      elsewhere: Values that may come in pieces from elsewhere (those that workers push).
      parts: Most pieces.
      uncut: Axes along which they stay whole.
    """
    shape = states[0].shape
    if any(v.shape != shape or jax_compat.is_key(v.dtype) for v in states):
        return None
    axes = [axis for axis, n in enumerate(shape) if n > 1 and axis not in uncut]
    equal = [axis for axis in axes if shape[axis] % parts == 0]
    for axis in (*equal, *sorted(set(axes) - {*equal}, key=lambda axis: -shape[axis])):
        try:
            return _cut(Cut(shape[axis], min(parts, shape[axis])), axis, states, new, equations, elsewhere)
        except NotLocal:
            continue
    return None


def joined(pieces: Sequence[Var], axis: int, output: Var, like: Equation) -> list[Equation]:
    """Returns the equations that concatenate pieces along an axis."""
    return expand(lambda *xs: jax.lax.concatenate(xs, axis), like, pieces, output)


def _cut(
    cut: Cut,
    axis: int,
    states: Sequence[Var],
    new: Sequence[Atom],
    equations: Sequence[Equation],
    elsewhere: Collection[Var],
) -> CutLeaves:
    """Cuts leaves along an axis. Raises NotLocal if an equation looks beyond a piece."""
    placing = Placing(cut, dict.fromkeys(states, axis), elsewhere)
    placing.follow(equations)
    if not placing.placed:
        raise NotLocal("nothing is computed of the leaves")
    values = [placing.require(atom, axis) for atom in new]
    placing.keep_read()
    pieces = []
    for number in range(cut.count):
        writer = _PieceWriter(placing, number, placing.placed[-1].equation)
        start, stop = cut.span(number, cut.size)
        given = {var: writer.part(var) for var in placing.given}
        pieces.append(
            LeafPiece(
                start=start,
                stop=stop,
                states=tuple(map(writer.part, states)),
                given=tuple(given.values()),
                slices=tuple(e for var in given for e in writer.sliced(var)),
                equations=tuple(writer.equations()),
                new=tuple(map(writer.part, values)),
            )
        )
    return CutLeaves(axis, tuple(pieces))


class _PieceWriter:
    """Writes the equations of one piece. `like`: an equation whose line slices have."""

    def __init__(self, placing: Placing, number: int, like: Equation) -> None:
        self._placing, self._number, self._like = placing, number, like
        self._parts: dict[Var, Var] = {}

    def part(self, var: Var) -> Var:
        if var not in self._parts:
            axis = self._placing.axes[var]
            start, stop = (0, 0) if axis is None else self._span(var, axis)
            self._parts[var] = Var(var.type if axis is None else var.type.resized(axis, stop - start))
        return self._parts[var]

    def sliced(self, var: Var) -> list[Equation]:
        """Returns the equations that slice the piece of a value from the whole."""
        axis = self._placing.axes[var]
        assert axis is not None, "it lies in pieces"
        start, stop = self._span(var, axis)
        return expand(
            lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis), self._like, (var,), output=self.part(var)
        )

    def equations(self) -> list[Equation]:
        order = self._placing.order
        placed = sorted(self._placing.placed, key=lambda placed: order[placed.equation])
        return [*(e for var in self._placing.whole for e in self.sliced(var)), *map(self._equation, placed)]

    def _equation(self, placed: PieceEquation) -> Equation:
        equation, along = placed.equation, placed.along
        inputs = tuple(self._part(a) if k in along else a for k, a in enumerate(equation.inputs))
        outputs = tuple(map(self.part, equation.outputs))
        params, axis = equation.params, self._placing.axes[equation.outputs[0]]
        if axis is not None:
            spread = {k: a for k, a in along.items() if a is not None}
            params = resized_params(equation, spread, axis, outputs[0].shape[axis])
        bodies = () if placed.body is None else (self._body(equation.bodies[0], placed.body),)
        new = {"inputs": inputs, "outputs": outputs, "params": params, "bodies": bodies}
        return replace(equation, **new, original=None)

    def _body(self, body: Block, placing: Placing) -> Block:
        writer = _PieceWriter(placing, self._number, self._like)
        inputs = tuple(writer.part(v) if v in placing.axes else v for v in body.inputs)
        equations = (*dict.fromkeys(placing.others.values()), *writer.equations())
        outputs = tuple(map(writer._part, body.outputs))
        return clone(eliminate_dead(Block(inputs, equations, outputs))[0])[0]

    def _part(self, atom: Atom) -> Atom:
        return self.part(atom) if isinstance(atom, Var) else atom

    def _span(self, var: Var, axis: int) -> tuple[int, int]:
        return self._placing.cut.span(self._number, var.shape[axis])


# --- the part of a block that can be computed on pieces of its values ---
#
# There are rules for JAX's equations (`analysis.local`) and for some operations on rows; others are refused.
#: Operation on rows -> operands that are cut as the result is.
_ON_ROWS: Mapping[str, tuple[str, ...]] = {
    "ap.pull": ("leaf",),
    "ap.padding": ("rows",),
    "ap.densify": ("rows",),
    "ap.commit": ("leaf", "rows"),
    "ap.fill": ("leaf", "rows"),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The indices at which an axis of `size` is cut, into `count` pieces of one size, or nearly so."""

    size: int
    count: int

    @property
    def is_equal(self) -> bool:
        return self.size % self.count == 0

    def fits(self, size: int) -> bool:
        """Returns whether an axis of another size can be cut alike."""
        ends = (self.size * n // self.count for n in range(self.count))
        return all(end * size % self.size == 0 for end in ends)

    def span(self, number: int, size: int) -> tuple[int, int]:
        """Returns where a piece of such an axis begins and ends."""
        start, stop = (self.size * n // self.count * size // self.size for n in (number, number + 1))
        return start, stop


@dataclass(frozen=True, slots=True, eq=False)
class PieceEquation:
    """An equation of the program that pieces compute."""

    equation: Equation
    along: Mapping[int, int | None]  #: Operand in pieces -> its axis.
    body: Placing | None = None  #: The values in pieces of its body, if it has one.


@dataclass(eq=False)
class Placing:
    """Finds which values of a block can be had in pieces."""

    cut: Cut
    #: Value in pieces -> their axis; None: each piece has a value of its own, of the same shape.
    axes: dict[Var, int | None]
    elsewhere: Collection[Var] = ()  #: Values that may come in pieces from elsewhere.
    #: Values in pieces that come from elsewhere; `whole`: those that are whole, and sliced here.
    given: list[Var] = field(default_factory=list)
    whole: list[Var] = field(default_factory=list)
    placed: list[PieceEquation] = field(default_factory=list)  #: The equations that pieces compute.
    #: Results of equations that all servers compute -> the equation.
    others: dict[Var, Equation] = field(default_factory=dict)
    order: dict[Equation, int] = field(default_factory=dict)  #: The position of each equation.

    def follow(self, equations: Sequence[Equation]) -> None:
        """Raises NotLocal where an equation looks beyond a piece."""
        self.order = {equation: n for n, equation in enumerate(equations)}
        for equation in equations:
            along = {k: self.axes[a] for k, a in enumerate(equation.inputs) if isinstance(a, Var) and a in self.axes}
            if not along:
                self.others.update(dict.fromkeys(equation.outputs, equation))
            elif equation.op == "ap.changes":
                self._changes(equation, along)
            elif equation.op == "ap.sweep":
                self._sweep(equation, along)
            elif equation.op in _ON_ROWS:
                groups = _operands(equation)
                rows = [k for name in _ON_ROWS[equation.op] for k in groups[name]]
                axis = self._of_rows(equation, along, rows, equation.params["axis"])
                self._cut_results(equation, {**along, **dict.fromkeys(rows, axis)}, [axis])
            else:
                found = self._found(equation, along)
                for k, axis in found.needed.items():
                    self.require(equation.inputs[k], axis)
                self._cut_results(equation, {**along, **found.needed}, [found.axis] * len(equation.outputs))

    def require(self, atom: Atom, axis: int) -> Var:
        """Returns a value that is needed in pieces along an axis. Raises NotLocal if it can't be cut so."""
        if isinstance(atom, Literal):
            raise NotLocal("a constant of all rows")
        if atom not in self.axes:
            self._name(atom, axis)
            if atom in self.elsewhere:
                self.given.append(atom)
            elif not self._compute(atom, axis):
                self.whole.append(atom)
        if self.axes[atom] != axis:
            raise NotLocal("a value lies otherwise")
        return atom

    def keep_read(self) -> None:
        """Slices given values here if they are whole anyway, because a sum over them is computed."""
        read = [a for p in self.placed for k, a in enumerate(p.equation.inputs) if k not in p.along]
        needed = needed_equations(dict.fromkeys(self.others.values()), [*read, *self.whole])
        whole = {*read, *(a for equation in needed for a in equation.inputs)}
        self.whole += [v for v in self.given if v in whole]
        self.given = [v for v in self.given if v not in whole]

    def _compute(self, var: Var, axis: int) -> bool:
        """Lets pieces compute an elementwise value from pieces of its operands; returns whether they can."""
        equation = self.others.get(var)
        if equation is None or equation.op not in ELEMENTWISE:
            return False
        large = {k: axis for k, a in enumerate(equation.inputs) if a.shape == var.shape}
        if not large or any(isinstance(equation.inputs[k], Literal) for k in large):
            return False
        if any(self.axes.get(a, axis) != axis for a in equation.inputs if isinstance(a, Var)):
            return False
        for k in large:
            self.require(equation.inputs[k], axis)
        self.placed.append(PieceEquation(equation, large))
        return True

    def _found(self, equation: Equation, along: Mapping[int, int | None]) -> Followed:
        """Cuts the results of an equation without bodies, from operands in pieces."""
        op = equation.op
        spread = {k: axis for k, axis in along.items() if axis is not None}
        is_known = equation.primitive is not None and not equation.bodies and len(spread) == len(along)
        if not is_known or (op == "conv_general_dilated" and not self.cut.is_equal):
            raise NotLocal(f"{op} of all rows", equation.source)
        found = follow_spread(equation, spread, self.cut.count if self.cut.is_equal else 1)
        if found.axis == SUMMED:
            raise NotLocal(f"{op} over all rows", equation.source)
        return found

    def _of_rows(
        self, equation: Equation, along: Mapping[int, int | None], operands: Sequence[int], row_axis: int
    ) -> int:
        """Finds the axis along which some operands are cut, as all of them then must be; it can't be the rows'."""
        axes = {along[k] for k in operands if k in along}
        axis = axes.pop() if len(axes) == 1 else None
        if axis is None or axis == row_axis:
            raise NotLocal(f"{equation.op} of all rows", equation.source)
        for k in operands:
            self.require(equation.inputs[k], axis)
        return axis

    def _changes(self, equation: Equation, along: Mapping[int, int | None]) -> None:
        """Checks each piece for changes of untouched rows."""
        groups, all_ = _operands(equation), dict(along)
        for old, new, row_axis in zip(groups["old"], groups["new"], equation.params["axes"], strict=True):
            if old in along or new in along:
                all_.update(dict.fromkeys((old, new), self._of_rows(equation, along, (old, new), row_axis)))
        for k, (_, row_axis) in zip(groups["constant"], equation.params["constants"], strict=True):
            if k in along:
                self._of_rows(equation, along, (k,), row_axis)
        self._cut_results(equation, all_, [None])

    def _sweep(self, equation: Equation, along: Mapping[int, int | None]) -> None:
        """Updates all rows of each piece, if need be."""
        groups, (body,), params = _operands(equation), equation.bodies, equation.params
        axes = [self._of_rows(equation, along, (k,), a) for k, a in zip(groups["leaves"], params["axes"], strict=True)]
        for k, row_axis in zip(groups["read"], params["read_axes"], strict=True):
            if k in along:
                self._of_rows(equation, along, (k,), row_axis)
        inside = Placing(self.cut, {body.inputs[k]: axis for k, axis in along.items() if k not in groups["needed"]})
        inside.follow(body.equations)
        for atom, axis in zip(body.outputs, axes, strict=True):
            inside.require(atom, axis)
        self._cut_results(equation, along, axes, inside)

    def _cut_results(
        self,
        equation: Equation,
        along: Mapping[int, int | None],
        axes: Sequence[int | None],
        body: Placing | None = None,
    ) -> None:
        for var, axis in zip(equation.outputs, axes, strict=True):
            self._name(var, axis)
        self.placed.append(PieceEquation(equation, along, body))

    def _name(self, var: Var, axis: int | None) -> None:
        if axis is not None and not self.cut.fits(var.shape[axis]):
            raise NotLocal(f"an axis of {var.shape[axis]} isn't cut at the same places")
        self.axes[var] = axis


def _operands(equation: Equation) -> dict[str, tuple[int, ...]]:
    return split(equation.op, equation.params, range(len(equation.inputs)))
