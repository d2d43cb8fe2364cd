"""Adds up the gradients of a family before they travel: one exchange for many pushes.

If devices hold shards of the batch and rows travel (`ps`, `allgather`), a push is split in two: `aggregate` adds
gradients to the rows that a device asked for, on that device; `deliver` sends these sums, to owners or to all. Sums of
delivered rows are then delivered once, and a loop that adds up deliveries adds up aggregates and delivers them after
its last iteration (Parallax's local aggregation, section 4.3). Elsewhere a sum of a value and a push becomes a push
into that value, so that a loop's carry takes gradients in place.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.slicing import eliminate_dead
from autopar.ir.writer import ZeroWriter

#: Operations that add gradients of rows to their first operand.
_ADDING = ("ap.aggregate", "ap.push")


def merge_pushes(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the lifted program with as few exchanges of gradients as its sums allow."""
    if not bound.families:
        return program, "nothing is lifted"
    before = _count(program.block)
    requested = {f.family: f.bounds.requested for f in bound.families if f.bounds.requested is not None}
    merged = _Merge(requested).run(program.block, frozenset())
    block, _ = eliminate_dead(merged)
    note = f"pushes: {before} before, {_count(block)} after" + (", each an exchange" if requested else "")
    return replace(program, block=block), note


def _count(block: Block) -> int:
    return sum(e.op in ("ap.push", "ap.deliver") for e in block.walk())


@dataclass(frozen=True, slots=True)
class _Merge:
    """Merges pushes. `requested`: family whose pushes are split -> F, the rows that all devices together ask for."""

    requested: Mapping[int, int]

    def run(self, block: Block, zeros: frozenset[Var]) -> Block:
        """Returns the merged block; `zeros` are inputs that are known to be zero."""
        split = _Editor(known_zeros=set(zeros))
        for equation in block.equations:
            if equation.bodies and equation.op in ("scan", "remat", "cond"):
                self._nested(split, equation)
            elif self._is_split(equation):
                self._split(split, equation)
            else:
                split.append(equation)
        return _merge_sums(Block(block.inputs, tuple(split.equations), block.outputs), zeros)

    def _is_split(self, equation: Equation) -> bool:
        adds = equation.op == "ap.push" and equation.params["op"] == "scatter-add"
        return adds and equation.inputs[1].type.family in self.requested and equation.params["batch"] is not None

    def _split(self, editor: _Editor, push: Equation) -> None:
        base, route, *rest = push.inputs
        axis = push.params["axis"]
        start = editor.zeros(push.outputs[0].type.resized(axis, self.requested[route.type.family]))
        sums = Var(start.type)
        editor.append(replace(push, op="ap.aggregate", inputs=(start, route, *rest), outputs=(sums,)))
        on = () if editor.is_zero(base) else (base,)
        editor.append(Equation("ap.deliver", (sums, route, *on), push.outputs, {"axis": axis}))

    # --- bodies ---

    def _nested(self, editor: _Editor, equation: Equation) -> None:
        border, bodies = equation.border, []
        for body in equation.bodies:
            pairs = zip(body.inputs[: border.consts], equation.inputs[border.head :], strict=False)
            bodies.append(self.run(body, frozenset(v for v, a in pairs if editor.is_zero(a))))
        equation = equation.with_bodies(bodies)
        if equation.op == "cond":
            editor.append(equation)
        else:
            self._deliver_behind(editor, equation)

    def _deliver_behind(self, editor: _Editor, equation: Equation) -> None:
        """Writes a scan or checkpoint that returns aggregates in place of delivered rows, and delivers them after it.

        In a scan these are carries, which its turns add up.
        """
        (body,), consts, is_scan = equation.bodies, equation.border.consts, equation.op == "scan"
        inputs, outputs, after = list(equation.inputs), list(equation.outputs), list[Equation]()
        for k, result in enumerate(equation.outputs[: equation.border.carries if is_scan else None]):
            made = _delivery(body, k, body.inputs[consts + k] if is_scan else None)
            if made is None:
                continue
            sums, route = made.inputs[:2]
            outer, on = equation.inputs[body.inputs.index(route)], ()
            if is_scan:
                inner, carried, start = _Editor.of(body), Var(sums.type), inputs[consts + k]
                sums = inner.plus(carried, sums)
                body = Block(_set(body.inputs, consts + k, carried), tuple(inner.equations), body.outputs)
                inputs[consts + k] = editor.zeros(sums.type)
                on = () if editor.is_zero(start) else (start,)
            body = Block(body.inputs, body.equations, _set(body.outputs, k, sums))
            outputs[k] = Var(sums.type)
            after.append(Equation("ap.deliver", (outputs[k], outer, *on), (result,), made.params))
        if after:
            body, _ = eliminate_dead(body)
            equation = replace(equation, inputs=tuple(inputs), outputs=tuple(outputs), bodies=(body,), original=None)
        editor.extend([equation, *after])


def _set(items: Sequence, k: int, item: Atom) -> tuple:
    return (*items[:k], item, *items[k + 1 :])


def _delivery(body: Block, k: int, carry: Var | None) -> Equation | None:
    """Returns the delivery that makes result k of a body, by a route from outside, if there is one.

    It is on top of nothing, or of a carry that the iteration doesn't use otherwise.
    """
    out, base = body.outputs[k], () if carry is None else (carry,)
    made = body.makers().get(out)
    if made is None or made.op != "ap.deliver" or made.inputs[1] not in body.inputs or made.inputs[2:] != base:
        return None
    uses = body.uses()
    return None if carry is not None and max(uses[carry], uses[out]) > 1 else made


class _Editor(ZeroWriter):
    """A block being written, and its sums."""

    @staticmethod
    def of(body: Block) -> _Editor:
        """Returns an editor that goes on with a block."""
        editor = _Editor()
        editor.extend(body.equations)
        return editor

    def plus(self, base: Atom, sums: Atom) -> Atom:
        """Returns the sum of two values; gradients added to zeros are added to the first value directly."""
        chain = self.chain(sums)
        if not chain:
            return self.emit("ap.plus", (base, sums), base.type)
        for adding in chain:
            out = Var(base.type)
            self.append(replace(adding, inputs=(base, *adding.inputs[1:]), outputs=(out,)))
            base = out
        return base

    def name_last(self, out: Var) -> None:
        """Renames the result of the last equation."""
        last = self.equations.pop()
        del self.producers[last.outputs[0]]
        self.append(replace(last, outputs=(out,)))

    def chain(self, sums: Atom) -> list[Equation]:
        """Returns the equations that add gradients to zeros, first to last; none if there are other terms."""
        chain: list[Equation] = []
        while (made := self.producers.get(sums)) is not None and made.op in _ADDING:
            if made.params["op"] != "scatter-add":
                return []
            chain.append(made)
            sums = made.inputs[0]
        return chain[::-1] if self.is_zero(sums) else []


def _merge_sums(block: Block, zeros: frozenset[Var]) -> Block:
    """Delivers sums of delivered rows once, and writes sums of values and pushes as pushes into those values."""
    uses = block.uses()
    editor = _Editor(known_zeros=set(zeros))
    terms: dict[Atom, list[Atom]] = {}
    for equation in block.equations:
        parts = _parts(editor, equation)
        if parts is not None:
            out = equation.outputs[0]
            flat = [t for a in parts for t in (terms[a] if a in terms and uses[a] == 1 else [a])]
            terms[out] = flat
            if _sum(editor, equation, flat, uses):
                continue
        editor.append(equation)
    return block.with_equations(editor.equations)


def _parts(editor: _Editor, equation: Equation) -> list[Atom] | None:
    """Returns the terms of a sum, None if it is none; a delivery onto a base has the base and the delivered rows."""
    if equation.op in ("add", "add_any") and equation.inputs[0].shape == equation.inputs[1].shape:
        return list(equation.inputs)
    if equation.op == "ap.deliver" and len(equation.inputs) == 3:
        alone = replace(equation, inputs=equation.inputs[:2], outputs=(Var(equation.outputs[0].type),))
        editor.append(alone)
        return [equation.inputs[2], *alone.outputs]
    return None


def _sum(editor: _Editor, equation: Equation, flat: Sequence[Atom], uses: collections.Counter[Atom]) -> bool:
    """Writes a sum in the merged form, if there is one; returns whether there is."""
    rest: list[Atom] = []
    pushes: list[Atom] = []
    deliveries: dict[tuple[Atom, int], list[Atom]] = {}
    for atom in flat:
        made = editor.producers.get(atom) if uses[atom] <= 1 else None
        if made is not None and made.op == "ap.deliver" and len(made.inputs) == 2:
            deliveries.setdefault((made.inputs[1], made.params["axis"]), []).append(made.inputs[0])
        elif made is not None and made.op == "ap.push" and editor.chain(atom):
            pushes.append(atom)
        else:
            rest.append(atom)
    if not pushes and not deliveries:
        return False
    # Deliveries by one route are added up before they travel, and then added to local terms.
    base = functools.reduce(editor.plus, (*rest, *pushes)) if rest or pushes else None
    for (route, axis), sums in deliveries.items():
        together = functools.reduce(editor.plus, sums)
        on = () if base is None else (base,)
        base = editor.emit("ap.deliver", (together, route, *on), equation.outputs[0].type, {"axis": axis})
    editor.name_last(equation.outputs[0])
    return True
