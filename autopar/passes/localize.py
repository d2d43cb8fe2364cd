"""Writes the program of one device (or rank): its shard of the batch and of the rows, with explicit reductions.

Under XLA's partitioner a program is global, and reductions appear where XLA needs them. Here they are equations:
`reduce` (over all devices), `shard` (a device's part of a whole value), `once` (on the first device; zero elsewhere).
Values of the batch's extent that don't depend on the batch (random bits, constants) are computed whole and then
sharded, so that a dropout mask is that of one device. Sums over the examples stay partial sums as long as linear
equations read them, and are reduced where another one does: gradients after the last loop and not in it. A step that
can't be followed is refused with its line; XLA then does the work. Sources: docs/hosts.md; Parallax, section 4.3 (local
aggregation).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import SUMMED
from autopar.analysis.local import REDUCES, follow_spread, resized_params, whole_operands_once
from autopar.analysis.rules import ALIGNED
from autopar.ir.local import PARTIAL, LocalFacts, NotLocal, Partial, Spread, State
from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.reductions import neutral
from autopar.ir.slicing import eliminate_dead, nearest_line
from autopar.passes.local_forms import LOCAL_ROW_OPS, UNROUNDED, Forms, Localization, common_state, is_short


def localize(
    program: Program, bound: ProgramPlan, *, examples: bool = True, reduces_by_mpi: bool = False
) -> tuple[Program, str]:
    """Returns a lifted program as that of each device, with `local` facts.

    `examples`: the batch is a device's part; otherwise only rows are an owner's part, and the rest stays global.
    `reduces_by_mpi`: sums over the ranks' examples are reduced between programs, by MPI. Raises NotLocal if an equation
    can't run on a part of its operands.
    """
    walk = Localizer(Localization(bound, examples, reduces_by_mpi=reduces_by_mpi))
    inputs = []
    entries = [input_.entry_axis for input_ in program.inputs[len(bound.placements) :]]
    placements = (*bound.placements, *entries)
    owned = {k for k, axis in enumerate(placements) if axis is not None and _is_owned(program, bound, k)}
    for k, var in enumerate(program.block.inputs):
        axis = placements[k]
        state = None if axis is None or not (examples or k in owned) else Spread(axis, k in owned)
        inputs.append(walk.define(var, state))
    input_ = [walk.state(v) for v in program.block.inputs]
    # A batch that the devices don't divide is whole at first: each device takes its part, padded.
    if examples:
        for k, axis in bound.uneven.items():
            walk.take_part(program.block.inputs[k], Spread(axis, examples=bound.undivided))
    outputs, states = walk.program(program, input_)
    block, _ = eliminate_dead(Block(tuple(inputs), tuple(walk.equations), tuple(outputs)))
    shared = walk.shared
    reductions, gathered = tuple(shared.reductions), tuple(shared.gathered)
    owned, meet = frozenset(shared.owned), shared.examples_meet
    facts = LocalFacts(tuple(states), owned, reductions, gathered, meet, reduces_by_mpi=reduces_by_mpi)
    count = len(shared.reductions)
    return replace(program, block=block, local=facts), f"{count} reductions over {shared.devices} devices"


def _is_owned(program: Program, bound: ProgramPlan, k: int) -> bool:
    planned = {f.family for f in bound.families if f.layout is not None}
    space = program.facts.space_of(k)
    is_entry = program.inputs[k].entry_axis is not None
    return is_entry or k in bound.shards or (space is not None and space.family in planned)


@dataclass(eq=False)
class Localizer(Forms):
    """One block being rewritten."""

    def program(self, program: Program, inputs: Sequence[State]) -> tuple[list[Atom], list[State]]:
        """Rewrites a whole program with defined inputs; returns its outputs, and a device's part of each.

        A new state's part is that of the old one. `inputs`: a device's parts of the inputs.
        """
        self.rewrite(program.block)
        outputs, states = [], []
        for atom, out in zip(program.block.outputs, program.outputs, strict=True):
            if out.state is not None:
                state, source = inputs[out.state], nearest_line(program.block, atom)
            else:
                state, source = self.result_state(self.state(atom)), None
            outputs.append(self.as_state(atom, state, source))
            states.append(state)
        return outputs, states

    def result_state(self, state: State) -> State:
        """Returns the form of a result that is no new state: a device's examples, if all devices have as many."""
        is_whole = isinstance(state, Partial) or (isinstance(state, Spread) and state.examples)
        return None if is_whole else state

    # --- equations ---

    def rewrite(self, block: Block) -> None:
        """Rewrites all equations; an error in one of ours is given the nearest line of the user's."""
        for equation in block.equations:
            try:
                self.add(equation)
            except NotLocal as error:
                if error.source is None and equation.outputs:
                    near = nearest_line(block, equation.outputs[0])
                    error.source = None if near is None else near.source
                raise

    def add(self, equation: Equation) -> None:
        states = [self.state(a) for a in equation.inputs]
        if equation.op in LOCAL_ROW_OPS:
            LOCAL_ROW_OPS[equation.op](self, equation)
        elif equation.op == "ap.microbatch_shard":
            self._microbatch(equation)
        elif equation.op == "ap.microbatch_once":
            self.copy(equation, states)
        elif self._is_callback(equation):
            self._first(equation)
        elif not any(states) and not _is_walked(equation) and not (equation.effects and self.repeats_effects):
            self.copy(equation)
        elif equation.effects and (not equation.bodies or not self.repeats_effects):
            self._effect(equation)
        elif equation.bodies:
            self.nested_equation(equation)
        elif equation.op == "optimization_barrier":
            self.copy(equation, [self.state(a) for a in equation.inputs])
        else:
            self._plain(equation)
        if any(a in self.reduced for a in equation.inputs):
            self.reduced.update(equation.outputs)
            self._note_inside(equation)

    def _note_inside(self, equation: Equation) -> None:
        for var in equation.outputs:
            state = self.state(var)
            if isinstance(state, Spread) and not state.owner:
                self.shared.note_meeting("the examples' own values depend on a sum over all", equation.source)

    def copy(self, equation: Equation, states: Sequence[State] | None = None) -> None:
        """Writes an equation unchanged, its results in these states; whole by default."""
        self.write(equation, map(self.read, equation.inputs), states or itertools.repeat(None))

    def _is_callback(self, equation: Equation) -> bool:
        is_call = equation.op in ("pure_callback", "io_callback") or (equation.effects and not equation.bodies)
        return is_call and self.repeats_effects

    def _first(self, equation: Equation) -> None:
        """Writes a callback of whole operands on the first device; its results go to all."""
        operands = tuple(self.whole(a, equation) for a in equation.inputs)
        inputs = tuple(Var(a.type) for a in equation.inputs)
        results, parts = (tuple(Var(v.type) for v in equation.outputs) for _ in range(2))
        body = Block(inputs, (replace(equation, inputs=inputs, outputs=results),), results)
        self.append(
            Equation(
                self.shared.op("first"), operands, parts, {}, (body,), effects=equation.effects, origin=equation.origin
            )
        )
        for var, part in zip(equation.outputs, parts, strict=True):
            self.reduced_value(var, part, "or" if var.dtype == np.bool_ else "sum", equation)

    def _effect(self, equation: Equation) -> None:
        """Writes an effect of whole values; sums over the examples are reduced before."""
        if self.shared.reduces_by_mpi and self.shared.bound.rank_devices > 1:
            raise NotLocal(f"{equation.op} has an effect, and a rank several devices", equation.source)
        if equation.bodies or any(isinstance(self.state(a), Spread) for a in equation.inputs):
            remedy = "Leave it out, or return what it tells from the step"
            raise NotLocal(f"{equation.op} has an effect", equation.source, remedy)
        for atom in equation.inputs:
            self.whole(atom, equation)
        self.copy(equation)

    def _plain(self, equation: Equation) -> None:
        states = [self.state(a) for a in equation.inputs]
        if any(isinstance(s, Partial) for s in states) and not any(isinstance(s, Spread) for s in states):
            if self._partial(equation, [isinstance(s, Partial) for s in states]):
                return
        on_top = equation.op == "scatter-add" and any(isinstance(s, Spread) for s in states)
        for atom in equation.inputs:
            if isinstance(self.state(atom), Partial):
                if on_top and atom is equation.inputs[0]:
                    continue  # the device's own partial sums are added to it
                self.whole(atom, equation)
        spread = {k: s.axis for k, a in enumerate(equation.inputs) if isinstance(s := self.state(a), Spread)}
        if spread:
            self.spread(equation, spread)
        else:
            self.copy(equation)

    def _partial(self, equation: Equation, partial: Sequence[bool]) -> bool:
        """Writes an equation of partial sums, if it is linear and it pays; returns whether it did."""
        others = whole_operands_once(equation, partial)
        if others is None:
            return False
        rest = [equation.inputs[k] for k in others]
        top = not self.delays_sums
        if self.rounds_once and equation.op not in UNROUNDED and is_short(equation.inputs[partial.index(True)].dtype):
            return False
        # Values are reduced before they grow; ranks may differ in the number of rows that a broadcast makes.
        grows = equation.outputs[0].type.size > equation.inputs[0].type.size
        if top and grows and equation.op in ("broadcast_in_dim", "pad"):
            return False
        # In gradient + decay the gradient alone is reduced.
        if top and any(a.shape and not self.is_zero(self.read(a)) for a in rest):
            return False
        if equation.op in ("mul", "div") and self._may_be_infinite(equation, partial):
            if top:
                return False
            if self.repeats_effects:
                self.scale_partial(equation, partial.index(True))
                return True
        inputs = [self.as_state(a, PARTIAL) if k in others else self.read(a) for k, a in enumerate(equation.inputs)]
        self.write(equation, inputs, itertools.repeat(PARTIAL))
        self.note_early_reduction(equation)
        return True

    def _may_be_infinite(self, equation: Equation, partial: Sequence[bool]) -> bool:
        return any(isinstance(a, Var) for a, is_sum in zip(equation.inputs, partial, strict=True) if not is_sum)

    def spread(self, equation: Equation, spread: Mapping[int, int]) -> None:
        """Writes an equation without bodies on a device's part of its operands."""
        for atom in equation.inputs:
            if isinstance(have := self.state(atom), Spread) and have.sums:
                self.sum_in_rank(atom, have)
        # Shards are of examples, or of an owner's rows; one equation can't work on several kinds.
        kinds = {s.moved(0) for a in equation.inputs if isinstance(s := self.state(a), Spread)}
        try:
            if len(kinds) > 1:
                what = "an owner's rows" if any(k.owner for k in kinds) else "other examples"
                raise NotLocal(f"{equation.op} of examples and of {what}", equation.source)
            (kind,) = kinds
            placed = follow_spread(equation, spread, self.shared.parts(kind), examples=kind.examples)
            if placed.axis == SUMMED and (equation.op not in REDUCES or kind.rank):
                raise NotLocal(f"{equation.op} over the examples", equation.source)
        except NotLocal as error:
            self._without_some(equation, spread, error)
            return
        inputs = []
        for k, atom in enumerate(equation.inputs):
            along = placed.needed.get(k)
            inputs.append(self.read(atom) if along is None else self.as_state(atom, kind.moved(along), equation))
        if placed.axis == SUMMED:
            if kind.examples:
                self._without_padding(equation, inputs, {**spread, **placed.needed})
            self._reduced(equation, inputs)
            return
        state = kind.moved(placed.axis)
        outputs = tuple(self.define(v, state) for v in equation.outputs)
        params = resized_params(equation, spread, placed.axis, outputs[0].shape[placed.axis])
        self.append(replace(equation, inputs=tuple(inputs), outputs=outputs, params=params, original=None))

    def _without_padding(self, equation: Equation, inputs: list[Atom], along: Mapping[int, int]) -> None:
        op = REDUCES[equation.op]
        for k, axis in along.items():
            if equation.op != "scatter-add" or k == 2:
                inputs[k] = self.masked(inputs[k], axis, equation.inputs[k].shape[axis], op)

    def masked(self, part: Atom, axis: int, size: int, op: str) -> Var:
        """Replaces padding by neutral values of a reduction; `size`: of the whole axis."""
        params = {"axis": axis, "size": size, "fill": neutral(op, part.dtype)}
        return self.emit("ap.only_examples", (part,), part.type, params)

    def _without_some(self, equation: Equation, spread: Mapping[int, int], reason: NotLocal) -> None:
        """Rewrites an equation whose operands can't all stay shards: a product keeps the larger one, others none."""
        # A new exception: the raised one would keep its frames, and the caller's arguments with them.
        self.shared.note_meeting(reason.reason, reason.source)
        if self.looks_up_rows(equation, spread):
            self.lookup_part(equation)
            return
        kept = self._kept(equation, spread) if len(spread) > 1 else ()
        self._plain(self.with_whole_operands(equation, [k for k in spread if k not in kept]))
        self.divide_again(equation, spread)

    def _kept(self, equation: Equation, spread: Mapping[int, int]) -> Collection[int]:
        """Returns the operands that may stay a device's own part, once it has all of the others."""
        states = [self.state(equation.inputs[k]) for k in spread]
        if equation.op == "dot_general":
            return (max(spread, key=lambda k: equation.inputs[k].type.size),)
        if not self.can_gather or any(isinstance(s, Spread) and s.owner for s in states):
            return ()
        if equation.op == "gather":
            return (1,)  # each device looks up for its own examples
        alike = [k for k, s in zip(spread, states, strict=True) if s == states[0]]
        return alike if equation.op in ALIGNED and len(alike) < len(states) else ()

    def _reduced(self, equation: Equation, inputs: list[Atom]) -> None:
        """Writes a reduction over the examples (or rows): a sum stays partial, others are reduced."""
        op = REDUCES[equation.op]
        if equation.op == "scatter-add":
            inputs[0] = self.as_state(equation.inputs[0], PARTIAL)
        outputs = tuple(Var(v.type) for v in equation.outputs)
        self.append(replace(equation, inputs=tuple(inputs), outputs=outputs))
        for old, new in zip(equation.outputs, outputs, strict=True):
            if op == "sum":
                self.env[old] = new, PARTIAL
            else:
                self.reduced_value(old, new, op, equation)

    def nested_walk(self) -> Localizer:
        return Localizer(self.shared, True)

    def body(self, body: Block, operands: Sequence[Atom], states: Sequence[State]) -> tuple[Localizer, list[Var]]:
        inner = self.nested_walk()
        inputs = [inner.define(v, s) for v, s in zip(body.inputs, states, strict=True)]
        inner.reduced.update(v for v, a in zip(body.inputs, operands, strict=True) if a in self.reduced)
        for equation in body.equations:
            inner.add(equation)
        return inner, inputs

    # --- loops, branches and checkpoints ---

    def nested_equation(self, equation: Equation) -> None:
        if equation.op == "scan":
            self._scan(equation)
        elif equation.op in ("remat", "cond"):
            self._branches(equation)
        elif equation.op == "ap.microbatches":
            self._microbatches(equation)
        elif equation.op != "while" or not self._while(equation):
            self.shared.note_meeting(f"a {equation.op} over examples", equation.source)
            self.copy(self.with_whole_operands(equation, range(len(equation.inputs))))

    def _mapped(self, equation: Equation) -> Spread | None:
        """Returns what a device has of the sequences of a loop over examples that do without each other, but for sums;
        None of other loops."""
        along, states = self.shared.of_examples(0, equation.params["length"]), list(map(self.state, equation.inputs))
        spread = [k for k, s in enumerate(states) if isinstance(s, Spread)]
        is_over_examples = all(k >= equation.border.fixed and states[k] == along for k in spread)
        if not spread or not is_over_examples or equation.effects or self.shared.over or _is_walked(equation):
            return None
        if any(self._of_microbatches(equation.inputs[k]) for k in spread):
            return None
        if along.examples:  # what is padded is in no sum, and might go on for ever
            is_map = not equation.border.carries and all(e.op != "while" for e in equation.bodies[0].walk())
        else:
            is_map = _only_sums(equation)
        return along if is_map else None

    def _map(self, equation: Equation, along: Spread) -> None:
        """Writes a loop over a device's own examples; what it adds up are partial sums."""
        border, length = equation.border, equation.params["length"]
        sequences = len(equation.inputs) - border.fixed
        states = (*[None] * border.consts, *[PARTIAL] * border.carries, *[along] * sequences)
        inputs = tuple(self.as_state(a, s, equation) for a, s in zip(equation.inputs, states, strict=True))
        made = itertools.chain([PARTIAL] * border.carries, itertools.repeat(along))
        params = {**equation.params, "length": along.size(length, self.shared.parts(along))}
        self.write(equation, inputs, made, params=params, original=None)

    def _scan(self, equation: Equation) -> None:
        if along := self._mapped(equation):
            self._map(equation, along)
            return
        consts, carry = equation.border.consts, equation.border.carries
        (body,) = equation.bodies
        states, constants = [self.state(a) for a in equation.inputs], [self.read(a) for a in equation.inputs[:consts]]
        sequences, xs = [], []
        for k in range(consts + carry, len(equation.inputs)):
            new, state = self._sequence(equation, k)
            sequences.append(new)
            xs.append(state.moved(state.axis - 1) if isinstance(state, Spread) else state)
        inner, inputs, results = self._turn(equation, states[: consts + carry], xs)
        carries = results[:carry]
        atoms = tuple(inner.as_state(a, s, equation) for a, s in zip(body.outputs, results, strict=True))
        hoisted = self._hoisted(equation, inner, dict(zip(inputs, equation.inputs[:consts], strict=False)))
        names = [*inputs[:consts], *hoisted]
        outer = [self.as_state(a, s, equation) for a, s in zip(equation.inputs[consts:], carries, strict=False)]
        outputs = []
        for k, var in enumerate(equation.outputs):
            state = results[k]
            if k >= carry and isinstance(state, Spread):
                state = state.moved(state.axis + 1)
            outputs.append(self.define(var, state))
        block = Block((*names, *inputs[consts:]), tuple(inner.equations), atoms)
        constants += hoisted.values()
        self.append(equation.with_operands([block], outputs, consts=constants, carries=outer, xs=sequences))
        if inner.reduced:
            self.reduced.update(equation.outputs)

    def _sequence(self, equation: Equation, k: int) -> tuple[Atom, State]:
        """Returns a scan's sequence (operand `k`) as its turns take it, and a device's part of it.

        That is its part of each microbatch, if these are a reshape of the examples, and all of any other sequence of
        examples.
        """
        atom = equation.inputs[k]
        new, state = self.read(atom), self.state(atom)
        if not isinstance(state, Spread) or state.axis:
            return new, state
        self.shared.note_meeting("a loop over the examples", equation.source)
        wanted = self._of_microbatches(atom)
        return self.as_state(atom, wanted, equation), wanted

    def _of_microbatches(self, atom: Atom) -> Spread | None:
        """Returns the way in which each microbatch is spread, if turns are microbatches: a reshape of the examples."""
        new, state = self.read(atom), self.state(atom)
        made = self.producers.get(new)
        if made is None or made.op != "reshape" or not self.can_gather or not isinstance(state, Spread) or state.owner:
            return None
        length, *turn = new.shape
        if not turn or made.inputs[0].shape[:1] != (length * turn[0],):
            return None
        of_turn = self.shared.of_examples(1, atom.shape[1])
        return of_turn if atom.shape[1] % (of_turn.examples or self.shared.devices) == 0 else None

    def _turn(
        self, equation: Equation, start: Sequence[State], xs: Sequence[State]
    ) -> tuple[Localizer, list[Var], list[State]]:
        """Returns a loop's body rewritten, its new inputs, and a device's part of its results, carries first.

        `equation`: the loop. `start`: a device's part of constants and carries before the first turn. `xs`: a device's
        part of a turn's slices of sequences.
        """
        body, border = equation.bodies[-1], equation.border
        consts, carry = border.consts, border.carries
        carries, operands = list(start[consts:]), equation.inputs[border.head :]
        while True:
            mark = self._mark()
            inner, inputs = self.body(body, operands, [*start[:consts], *carries, *xs])
            returned = [inner.state(a) for a in body.outputs]
            wanted = [common_state(pair) for pair in zip(carries, returned, strict=False)]
            if wanted == carries:
                return inner, inputs, [*carries, *returned[carry:]]
            self._restore(mark)
            carries = wanted

    def _hoisted(self, equation: Equation, inner: Localizer, constants: Mapping[Var, Atom]) -> dict[Var, Atom]:
        """Moves exchanges of a loop's constants from its body (`inner`) to before the loop; returns name in the body ->
        whole value. `constants`: name in the body -> constant."""
        whole, kept, shared = dict[Var, Atom](), [], self.shared
        reduce, replicate = shared.op("reduce"), shared.op("replicate")
        for each in inner.equations:
            name = each.inputs[0] if each.op in (reduce, replicate) else None
            if not isinstance(name, Var) or name not in constants:
                kept.append(each)
                continue
            if each.op == reduce:
                shared.reductions.remove(next(r for r in shared.reductions[::-1] if r.nested and r.type == name.type))
            elif name not in shared.owned:
                size = name.type.nbytes * shared.devices
                shared.gathered.remove(next(g for g in shared.gathered[::-1] if g.nested and g.nbytes == size))
            whole[each.outputs[0]] = self.whole(constants[name], equation)
        inner.equations[:] = kept
        return whole

    def _mark(self) -> tuple[int, int, NotLocal | None]:
        return len(self.shared.reductions), len(self.shared.gathered), self.shared.examples_meet

    def _restore(self, mark: tuple[int, int, NotLocal | None]) -> None:
        del self.shared.reductions[mark[0] :]
        del self.shared.gathered[mark[1] :]
        self.shared.examples_meet = mark[2]

    def _while(self, equation: Equation) -> bool:
        """Writes a loop over the examples' own values; returns False if its condition depends on several.

        A condition by example, as `vmap` makes it, stops each by itself: a device's loop ends with its own last one.
        """
        condition, body = equation.bodies
        n, first = equation.border.head, equation.border.head + equation.border.consts
        states, mark = [self.state(a) for a in equation.inputs], self._mark()
        if any(isinstance(s, Spread) and s.examples for s in states):
            return False  # padding might go on for ever
        start = states[n:]
        while True:
            turn, inputs, carries = self._turn(equation, start, ())
            atoms = tuple(turn.as_state(a, s, equation) for a, s in zip(body.outputs, carries, strict=True))
            read = (*equation.inputs[:n], *equation.inputs[first:])
            ends, given = self.body(condition, read, [*states[:n], *carries])
            goes_on = ends.state(condition.outputs[0])
            if ends.exchanges() or (isinstance(goes_on, Spread) and turn.exchanges()):
                self._restore(mark)
                return False
            if goes_on is None or all(s == goes_on for s in carries):
                break
            start = [*states[n:first], *[goes_on] * len(carries)]  # all carries have the examples' axis
        constants = [self.read(a) for a in equation.inputs[:first]]
        hoisted = self._hoisted(equation, turn, dict(zip(inputs, equation.inputs[n:first], strict=False)))
        names = [*inputs[: first - n], *hoisted]
        blocks = (
            Block(tuple(given), tuple(ends.equations), (ends.read(condition.outputs[0]),)),
            Block((*names, *inputs[first - n :]), tuple(turn.equations), atoms),
        )
        outer = [self.as_state(a, s, equation) for a, s in zip(equation.inputs[first:], carries, strict=True)]
        consts = [*constants[n:], *hoisted.values()]
        outputs = tuple(self.define(v, s) for v, s in zip(equation.outputs, carries, strict=True))
        self.append(equation.with_operands(blocks, outputs, head=constants[:n], consts=consts, carries=outer))
        if turn.reduced:
            self.reduced.update(equation.outputs)
        return True

    def scale_partial(self, equation: Equation, k: int) -> None:
        """Scales partial sums (operand `k`), in a loop or branch, by a number of the step.

        If that number isn't an ordinary one they are summed first, at each turn.
        """
        (out,) = equation.outputs

        def body(sums_first: bool) -> Block:
            inner = tuple(Var(a.type) for a in equation.inputs)
            operands, result = list(inner), Var(out.type)
            lines = []
            if sums_first:
                operands[k] = Var(inner[k].type)
                lines.append(Equation(self.shared.op("reduce"), (inner[k],), (operands[k],), {"op": "sum"}))
            lines.append(replace(equation, inputs=tuple(operands), outputs=(result,), original=None))
            if sums_first:
                lines.append(Equation(self.shared.op("once"), (result,), (Var(out.type),)))
            return Block(inner, tuple(lines), lines[-1].outputs)

        inputs = tuple(self.read(a) for a in equation.inputs)
        params = {"by": 1 - k, "divides": equation.op == "div"}
        scaled = self.define(out, PARTIAL)
        self.note_early_reduction(equation)
        self.append(Equation("ap.scaled", inputs, (scaled,), params, (body(False), body(True)), origin=equation.origin))

    def exchanges(self) -> bool:
        """Returns whether a nested block needs values of other devices."""
        exchanges = [self.shared.op(name) for name in ("reduce", "reduce_shards", "replicate")]
        return any(e.op in exchanges for e in Block((), tuple(self.equations), ()).walk())

    def part_state(self, state: State, axis: int, size: int) -> State:
        """Returns a device's part of a value with examples along an axis, given its present `state`."""
        return self.shared.of_examples(axis, size)

    def _microbatches(self, equation: Equation) -> None:
        """Writes each microbatch of a device's own examples; reductions over microbatches run over devices once."""
        (body,), params = equation.bodies, equation.params
        states = [self.state(atom) for atom in equation.inputs]
        for k, (atom, axis) in enumerate(zip(equation.inputs, params["axes"], strict=True)):
            if axis is not None:
                states[k] = self.part_state(states[k], axis, atom.shape[axis])
        inputs = tuple(self.as_state(a, s, equation) for a, s in zip(equation.inputs, states, strict=True))
        noted, mark = self.shared.reductions, len(self.shared.reductions)
        inner, names = self.body(body, equation.inputs, states)
        results: list[Atom] = []
        late: dict[Var, tuple[Var, str]] = {}
        outputs: list[Var] = []
        for atom, join, var in zip(body.outputs, params["joins"], equation.outputs, strict=True):
            last, state = inner.producers.get(inner.read(atom)), inner.state(atom)
            # The reduction over devices moves out of the loop, for all microbatches at once.
            if last is not None and last.op == self.shared.op("reduce") and last.params["op"] == join:
                results.append(last.inputs[0])
                outputs.append(Var(var.type))
                late[var] = outputs[-1], join
                continue
            if not isinstance(join, str):
                state = self.part_state(state, join, var.shape[join])
            elif join != "sum" and isinstance(state, Partial):
                state = None
            results.append(inner.as_state(atom, state, equation))
            outputs.append(self.define(var, state))
        block, _ = eliminate_dead(Block(tuple(names), tuple(inner.equations), tuple(results)))
        self.append(replace(equation, inputs=inputs, outputs=tuple(outputs), bodies=(block,)))
        for var, (part, join) in late.items():
            k = next(k for k, r in enumerate(noted[mark:], mark) if (r.type, r.op) == (part.type, join))
            del noted[k]
            self.reduced_value(var, part, join, equation)
        if inner.reduced:
            self.reduced.update(equation.outputs)

    def _microbatch(self, equation: Equation) -> None:
        (atom,), axis = equation.inputs, equation.params["axis"]
        self.write(equation, [self.as_state(atom, Spread(axis), equation)], itertools.repeat(Spread(axis)))

    def _branches(self, equation: Equation) -> None:
        skipped = equation.border.head
        is_update = equation.op == "cond" and not self.nested
        is_update = is_update and not any(isinstance(self.state(a), Spread) for a in equation.inputs)
        for atom in equation.inputs if is_update else equation.inputs[:skipped]:
            self.whole(atom, equation)  # reduces sums once, before the branches of an update
        states = [self.state(a) for a in equation.inputs[skipped:]]
        walked = [self.body(body, equation.inputs[skipped:], states) for body in equation.bodies]
        returned = [
            [inner.state(a) for a in body.outputs] for (inner, _), body in zip(walked, equation.bodies, strict=True)
        ]
        wanted = [common_state(states) for states in zip(*returned, strict=True)]
        bodies = []
        for (inner, inputs), body in zip(walked, equation.bodies, strict=True):
            atoms = tuple(inner.as_state(a, s, equation) for a, s in zip(body.outputs, wanted, strict=True))
            bodies.append(Block(tuple(inputs), tuple(inner.equations), atoms))
        inputs = tuple(self.read(a) for a in equation.inputs)
        outputs = tuple(self.define(v, s) for v, s in zip(equation.outputs, wanted, strict=True))
        self.append(equation.with_operands(bodies, outputs, consts=inputs))
        if any(inner.reduced for inner, _ in walked):
            self.reduced.update(equation.outputs)

    # --- examples that meet those of other devices and are divided again (looked up, reordered, microbatches) ---

    def looks_up_rows(self, equation: Equation, spread: Mapping[int, int]) -> bool:
        """Returns whether it looks up single rows of several devices, few enough that sums of them are less than all
        rows."""
        if equation.op != "gather" or 0 not in spread or not self.repeats_effects:
            return False
        operand = equation.inputs[0]
        state, is_known = self.state(operand), (self.read(operand), None) in self.converted
        is_others = isinstance(state, Spread) and not state.owner and self.can_gather
        if is_others and (is_known or 2 * equation.outputs[0].type.size >= operand.type.size):
            return False
        numbers, axis = equation.params["dimension_numbers"], spread[0]
        is_row = axis in numbers.start_index_map and equation.params["slice_sizes"][axis] == 1
        dtype = equation.outputs[0].type.dtype
        return is_row and not jax_compat.is_key(dtype) and dtype != np.bool_

    def lookup_part(self, equation: Equation) -> None:
        """Looks up the rows of all examples that a device has, with zeros for the others."""
        operand, index = equation.inputs
        state = self.state(operand)
        assert isinstance(state, Spread), "its rows are spread"
        inputs = (self.read(operand), self.whole(index, equation))
        params = {**equation.params, "axis": state.axis, "size": operand.shape[state.axis]}
        self.write(equation, inputs, [PARTIAL], op=self.shared.op("lookup_part"), params=params, original=None)

    def take_part(self, var: Var, state: Spread) -> None:
        """Replaces an old value that a device is given whole by its part, from here on."""
        whole = self.read(var)
        part = self.as_state(var, state)
        self.env[var] = part, state
        self.converted[part, None] = whole

    def divide_again(self, equation: Equation, spread: Mapping[int, int]) -> None:
        """Gives each device its part of examples that were gathered or reordered. `equation`: the equation that all
        devices run on all examples. `spread`: operand -> the axis of the examples."""
        states = [self.state(equation.inputs[k]) for k in spread]
        if not self.can_gather or any(isinstance(s, Spread) and s.owner for s in states):
            return
        for out in equation.outputs:
            axis = _regrouped(equation, out, spread) if self.state(out) is None else None
            if axis is None or (jax_compat.is_float(out.dtype) and out.type.size == out.shape[axis]):
                continue  # one number for each example isn't worth dividing
            state = self.shared.of_examples(axis, out.shape[axis])
            if out.shape[axis] % (state.examples or self.shared.devices) == 0:
                self.take_part(out, state)


def _only_sums(loop: Equation) -> bool:
    """Returns whether a loop's turns read nothing of each other: they add to its carries, and do nothing else with
    them."""
    (body,), border = loop.bodies, loop.border
    carries = body.inputs[border.consts : border.fixed]
    made, uses = body.makers(), body.uses()
    return all(
        out in made
        and made[out].op in ("add", "add_any")
        and carry in made[out].inputs
        and uses[carry] == uses[out] == 1
        for carry, out in zip(carries, body.outputs, strict=False)
    )


def _is_walked(equation: Equation) -> bool:
    return any(e.op in LOCAL_ROW_OPS for body in equation.bodies for e in body.walk())


#: Operations that keep the axis of the examples.
_SAME_AXIS = frozenset({"concatenate", "dynamic_slice", "pad", "rev", "slice", "split"})


def _regrouped(equation: Equation, out: Var, spread: Mapping[int, int]) -> int | None:
    """Returns the axis of a result along which examples lie, if it is known."""
    if equation.op in _SAME_AXIS:
        return next(iter(spread.values()))
    if 0 not in spread:
        return None
    (old, axis), new = (equation.inputs[0].shape, spread[0]), out.shape
    if equation.op == "gather":
        numbers = equation.params["dimension_numbers"]
        looked_up = (k for k in range(len(new)) if k not in numbers.offset_dims)
        return next(looked_up, None) if axis in numbers.start_index_map else None
    if equation.op == "reshape":  # (B, ...) to (M, B / M, ...)
        fits = (k for k in range(1, len(new)) if new[: k - 1] == old[:axis] and new[k - 1] * new[k] == old[axis])
        return next(fits, None)
    return None
