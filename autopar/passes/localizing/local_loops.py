"""Loops, branches and checkpoints in the program of one device: see `localize`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.local import PARTIAL, NotLocal, Partial, Spread, State
from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.slicing import eliminate_dead
from autopar.passes.localizing.local_forms import Forms, joined


@dataclass(eq=False)
class LoopForms(Forms, abc.ABC):
    """One block being rewritten, as far as the equations are concerned that have bodies."""

    @abc.abstractmethod
    def body(self, body: Block, operands: Sequence[Atom], states: Sequence[State]) -> tuple[LoopForms, list[Var]]:
        """A nested block rewritten, and its new inputs, which are in these states."""

    @abc.abstractmethod
    def copy(self, equation: Equation) -> None:
        """An equation as it is, its results whole."""

    def nested_equation(self, equation: Equation) -> None:
        """Rewrite a loop, a branch or a checkpoint."""
        if equation.op == "scan":
            self._scan(equation)
        elif equation.op in ("remat", "cond"):
            self._branches(equation)
        elif equation.op == "ap.microbatches":
            self._microbatches(equation)
        elif equation.op != "while" or not self._while(equation):
            self.shared.inside = self.shared.inside or NotLocal(f"a {equation.op} over examples", equation.source)
            self.copy(self.wholly(equation, range(len(equation.inputs))))

    def _scan(self, equation: Equation) -> None:
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
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
        operands = (*constants, *hoisted.values(), *outer, *sequences)
        outputs = []
        for k, var in enumerate(equation.outputs):
            state = results[k]
            if k >= carry and isinstance(state, Spread):
                state = state.moved(state.axis + 1)
            outputs.append(self.define(var, state))
        block = Block((*names, *inputs[consts:]), tuple(inner.equations), atoms)
        params = {**equation.params, "num_consts": len(names)}
        self.append(
            dataclasses.replace(
                equation, inputs=operands, outputs=tuple(outputs), bodies=(block,), params=params, original=None
            )
        )
        if inner.reduced:
            self.reduced.update(equation.outputs)

    def _sequence(self, equation: Equation, k: int) -> tuple[Atom, State]:
        """Returns a scan's sequence (operand `k`) as its turns take it, and what a device has of it: its part of each
        microbatch, where these are a reshape of the examples, and all of any other sequence of examples."""
        atom = equation.inputs[k]
        new, state = self.read(atom), self.state(atom)
        if not isinstance(state, Spread) or state.axis:
            return new, state
        self.shared.inside = self.shared.inside or NotLocal("a loop over the examples", equation.source)
        made, wanted = self.producers.get(new), None
        if made is not None and made.op == "reshape" and self.regroups and not state.owner and len(new.shape) > 1:
            of_turn = self.shared.of_examples(1, atom.shape[1])
            is_parted = made.inputs[0].shape[:1] == (new.shape[0] * new.shape[1],)
            if is_parted and atom.shape[1] % (of_turn.examples or self.shared.devices) == 0:
                wanted = of_turn
        return self.as_state(atom, wanted, equation), wanted

    def _turn(
        self, equation: Equation, start: Sequence[State], xs: Sequence[State]
    ) -> tuple[LoopForms, list[Var], list[State]]:
        """A loop's body rewritten, its new inputs, and what a device has of its results, carries first.

        Args:
          equation: The loop.
          start: What a device has of constants and carries before the first turn.
          xs: And of what a turn takes of sequences.
        """
        body, count = equation.bodies[-1], len(equation.bodies[-1].inputs)
        carry = equation.params["num_carry"] if equation.op == "scan" else len(equation.outputs)
        consts = len(start) - carry
        carries, operands = list(start[consts:]), equation.inputs[len(equation.inputs) - count :]
        while True:
            mark = self._mark()
            inner, inputs = self.body(body, operands, [*start[:consts], *carries, *xs])
            returned = [inner.state(a) for a in body.outputs]
            wanted = [joined(pair) for pair in zip(carries, returned, strict=False)]
            if wanted == carries:
                return inner, inputs, [*carries, *returned[carry:]]
            self._restore(mark)
            carries = wanted

    def _hoisted(self, equation: Equation, inner: LoopForms, constants: Mapping[Var, Atom]) -> dict[Var, Atom]:
        """Exchanges once, before a loop, what each turn would exchange of the loop's constants.

        Args:
          equation: The loop.
          inner: Its body, which no longer exchanges that.
          constants: Name in the body -> constant.

        Returns:
          Name in the body -> what is whole.
        """
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
        """Returns how much has been noted so far."""
        return len(self.shared.reductions), len(self.shared.gathered), self.shared.inside

    def _restore(self, mark: tuple[int, int, NotLocal | None]) -> None:
        """Forget what was noted since."""
        del self.shared.reductions[mark[0] :]
        del self.shared.gathered[mark[1] :]
        self.shared.inside = mark[2]

    def _while(self, equation: Equation) -> bool:
        """Write a loop over the examples' own values; False if its condition depends on several.

        A condition by example, as `vmap` makes it, stops each by itself: a device's loop ends with its own last one.
        """
        condition, body = equation.bodies
        n, first = equation.params["cond_nconsts"], equation.params["cond_nconsts"] + equation.params["body_nconsts"]
        states, mark = [self.state(a) for a in equation.inputs], self._mark()
        if any(isinstance(s, Spread) and s.examples for s in states):
            return False  # what is padded might go on for ever
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
            start = [*states[n:first], *[goes_on] * len(carries)]  # whatever is carried has the examples' axis
        constants = [self.read(a) for a in equation.inputs[:first]]
        hoisted = self._hoisted(equation, turn, dict(zip(inputs, equation.inputs[n:first], strict=False)))
        names = [*inputs[: first - n], *hoisted]
        blocks = (
            Block(tuple(given), tuple(ends.equations), (ends.read(condition.outputs[0]),)),
            Block((*names, *inputs[first - n :]), tuple(turn.equations), atoms),
        )
        outer = (self.as_state(a, s, equation) for a, s in zip(equation.inputs[first:], carries, strict=True))
        operands = (*constants, *hoisted.values(), *outer)
        outputs = tuple(self.define(v, s) for v, s in zip(equation.outputs, carries, strict=True))
        params = {**equation.params, "body_nconsts": len(names)}
        self.append(
            dataclasses.replace(equation, inputs=operands, outputs=outputs, bodies=blocks, params=params, original=None)
        )
        if turn.reduced:
            self.reduced.update(equation.outputs)
        return True

    def scale_partial(self, equation: Equation, k: int) -> None:
        """In a loop or branch, partial sums (operand `k`) times or by a number of the step: they are summed first, at
        each turn, only if that number isn't an ordinary one."""
        (out,) = equation.outputs

        def body(sums_first: bool) -> Block:
            inner = tuple(Var(a.type) for a in equation.inputs)
            operands, result = list(inner), Var(out.type)
            lines = []
            if sums_first:
                operands[k] = Var(inner[k].type)
                lines.append(Equation(self.shared.op("reduce"), (inner[k],), (operands[k],), {"op": "sum"}))
            lines.append(dataclasses.replace(equation, inputs=tuple(operands), outputs=(result,), original=None))
            if sums_first:
                lines.append(Equation(self.shared.op("once"), (result,), (Var(out.type),)))
            return Block(inner, tuple(lines), lines[-1].outputs)

        inputs = tuple(self.read(a) for a in equation.inputs)
        params = {"by": 1 - k, "divides": equation.op == "div"}
        scaled = self.define(out, PARTIAL)
        self.note_growth(equation)
        self.append(Equation("ap.scaled", inputs, (scaled,), params, (body(False), body(True)), equation.origin))

    def exchanges(self) -> bool:
        """Whether a nested block needs values of other devices."""
        exchanges = self.shared.op("reduce"), self.shared.op("replicate")
        return any(e.op in exchanges for e in Block((), tuple(self.equations), ()).walk())

    def part_state(self, state: State, axis: int, size: int) -> State:
        """Returns what a device is to have of a value (of which it has `state`) whose examples lie along an axis."""
        return self.shared.of_examples(axis, size)

    def _microbatches(self, equation: Equation) -> None:
        """Each microbatch of a device's own examples; what is reduced over microbatches is over devices once, then."""
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
        self.append(dataclasses.replace(equation, inputs=inputs, outputs=tuple(outputs), bodies=(block,)))
        for var, (part, join) in late.items():
            k = next(k for k, r in enumerate(noted[mark:], mark) if (r.type, r.op) == (part.type, join))
            del noted[k]
            self.reduced_value(var, part, join, equation)
        if inner.reduced:
            self.reduced.update(equation.outputs)

    def _microbatch(self, equation: Equation) -> None:
        """A microbatch's part of what a device has of a value."""
        (atom,), axis = equation.inputs, equation.params["axis"]
        part = self.as_state(atom, Spread(axis), equation)
        outputs = tuple(self.define(v, Spread(axis)) for v in equation.outputs)
        self.append(dataclasses.replace(equation, inputs=(part,), outputs=outputs))

    def _branches(self, equation: Equation) -> None:
        skipped = len(equation.inputs) - len(equation.bodies[0].inputs)
        is_update = equation.op == "cond" and not self.nested
        is_update = is_update and not any(isinstance(self.state(a), Spread) for a in equation.inputs)
        for atom in equation.inputs if is_update else equation.inputs[:skipped]:
            self.whole(atom, equation)  # sums once, before the branches of an update
        states = [self.state(a) for a in equation.inputs[skipped:]]
        walked = [self.body(body, equation.inputs[skipped:], states) for body in equation.bodies]
        returned = [
            [inner.state(a) for a in body.outputs] for (inner, _), body in zip(walked, equation.bodies, strict=True)
        ]
        wanted = [joined(states) for states in zip(*returned, strict=True)]
        bodies = []
        for (inner, inputs), body in zip(walked, equation.bodies, strict=True):
            atoms = tuple(inner.as_state(a, s, equation) for a, s in zip(body.outputs, wanted, strict=True))
            bodies.append(Block(tuple(inputs), tuple(inner.equations), atoms))
        inputs = tuple(self.read(a) for a in equation.inputs)
        outputs = tuple(self.define(v, s) for v, s in zip(equation.outputs, wanted, strict=True))
        self.append(dataclasses.replace(equation, inputs=inputs, outputs=outputs, bodies=tuple(bodies), original=None))
        if any(inner.reduced for inner, _ in walked):
            self.reduced.update(equation.outputs)
