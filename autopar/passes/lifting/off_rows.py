"""The second rewriting of a block, for rows of a family that the step does not touch.

Pushes are dropped, and dense values are taken from the first rewriting (out of a loop: stacked). The result is the
family's off-row function, which a sweep over all rows runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.program import Atom, Block, Equation, Literal, RouteType, Var
from autopar.ir.rowspace import Free, Row
from autopar.ir.slicing import clone
from autopar.passes.lifting.equations import lift_row_equation, push_base
from autopar.passes.lifting.scope import Scope, Template


@dataclass(eq=False)
class OffScope(Scope):
    """The second rewriting of a block, for untouched rows of one family: pushes are dropped, dense values imported.

    Attributes:
      primary: The first rewriting of the same block.
      outer: The second one of the block around it, by which this one's rows are computed; None for a `Template`, which
        imports them, and for the outermost block.
      ran: What was rewritten.
    """

    primary: Scope | None = None
    outer: OffScope | None = None
    ran: list[Equation] = field(default_factory=list)

    @property
    def may_import(self) -> bool:
        return True

    def get(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        if atom in self.dense:  # a leaf of the family, which the sweep updates in place
            return self.dense[atom]
        assert self.primary is not None
        return self.frontier(self.primary.get(atom))

    def frontier(self, atom: Atom) -> Atom:
        """A value of the first rewriting, as an input of this one."""
        if isinstance(atom, Literal):
            return atom
        return self.import_new(atom)

    def rows_of(self, family: int) -> int:
        return self.lifting.block_rows[family]

    def _make_rows(self, atom: Atom, axis: int, family: int) -> Atom:
        if self.outer is not None and isinstance(atom, Var) and atom in self.operands:
            outside = self.operands[atom]
            if isinstance(self.lifting.facts.value(atom), (Row, Free)):
                return self.outer.computed(outside, axis, family)
        return super()._make_rows(atom, axis, family)

    def computed(self, atom: Atom, axis: int, family: int) -> Atom:
        """The value at the rows, after what it is made of."""
        if isinstance(atom, Var) and (atom, axis, family) not in self.rows and self.lifting.row(atom) is not None:
            self.run([atom], family)
        return self.at_rows(atom, axis, family)

    def run(self, targets: Sequence[Var], family: int) -> None:
        """Rewrite the row equations that the targets need, in order."""
        lifting = self.lifting
        needed = set(targets)
        kept = []
        for equation in reversed(self.block.equations):
            if not needed.intersection(equation.outputs):
                continue
            if not any((r := lifting.row(v)) is not None and r.family == family for v in equation.outputs):
                continue
            kept.append(equation)
            needed.update(a for a in self._read(equation, family) if isinstance(a, Var))
        for equation in reversed(kept):
            self._off(equation, family)
        self.ran += reversed(kept)

    def _read(self, equation: Equation, family: int) -> Sequence[Atom]:
        """Returns what the off-row form of an equation reads."""
        if self.lifting.facts.roles.get(equation) == "push":
            return equation.inputs[:1]
        if not equation.bodies:
            return equation.inputs
        template = self.lifting.templates[equation, family]
        rows = [what[0] for kind, *what in template.imports if kind in ("rows", "fetched")]
        return [*(a for a, _ in (*template.carries, *template.sequences)), *rows]

    def _off(self, equation: Equation, family: int) -> None:
        if self.lifting.facts.roles.get(equation) == "push":
            out = equation.outputs[0]
            row = self.lifting.row(out)
            assert row is not None, "a push makes rows"
            self.rows[out, row.axis, family] = push_base(self, equation, row)
        elif equation.op == "optimization_barrier":
            for operand, out in zip(equation.inputs, equation.outputs, strict=True):
                row = self.lifting.row(out)
                if row is not None and row.family == family:
                    self.rows[out, row.axis, family] = self.at_rows(operand, row.axis, family)
        elif equation.bodies:
            self._use(self.lifting.templates[equation, family])
        else:
            lift_row_equation(self, equation)

    def _use(self, template: Template) -> None:
        """Put the off-row form of a scan, remat or cond here."""
        outer = [self.frontier(k[1]) if k[0] == "new" else self.resolve(k) for k in template.imports]
        equation = template.equation
        stacked = [self.frontier(v) for v in template.stacked]
        if equation.op == "remat":
            (body,) = template.bodies
            copy, env = clone(body, dict(zip(body.inputs, [*outer, *stacked], strict=True)))
            self.equations += copy.equations
            results = [env.get(a, a) if isinstance(a, Var) else a for a in body.outputs]
        elif equation.op == "cond":
            inputs = (self.get(equation.inputs[0]), *outer, *stacked)
            results = tuple(Var(a.type) for a in template.bodies[0].outputs)
            copies = tuple(clone(b)[0] for b in template.bodies)
            self.append(dataclasses.replace(equation, inputs=inputs, outputs=results, bodies=copies, original=None))
        else:
            starts = [self.at_rows(a, axis, template.family) for a, axis in template.carries]
            sequences = [self.at_rows(a, axis, template.family) for a, axis in template.sequences]
            body, _ = clone(template.bodies[0])
            results = emit_scan(self, equation, body, outer, starts, [*sequences, *stacked])
        for old, new in zip(template.outputs, results, strict=True):
            row = self.lifting.row(old)
            assert row is not None, "the off-row form returns rows"
            self.rows[old, row.axis, row.family] = new


def off_scope(scope: Scope, family: int) -> tuple[OffScope, dict[int, Var]]:
    """A scope for a family's off-row form, and the names of its leaves in it; its route is its first input.

    `scope`: the first rewriting of a block that is in no loop which carries rows.
    """
    block, space = scope.block, scope.lifting.spaces[family]
    if scope.parent is not None:
        outer, inner = off_scope(scope.parent, family)
        routes = {family: outer.routes[family]}
        off = OffScope(scope.lifting, block, None, dict(scope.operands), routes=routes, primary=scope, outer=outer)
        return off, inner
    inner = {k: Var(scope.lifting.inputs[k].type) for k in space.leaves}
    chunk = Var(RouteType(family, space.extent, scope.lifting.block_rows[family]))
    off = OffScope(
        scope.lifting,
        block,
        routes={family: chunk},
        primary=scope,
        dense={block.inputs[k]: v for k, v in inner.items()},
        leaf_atoms=set(inner.values()),
    )
    return off, inner


def emit_scan(
    scope: Scope, like: Equation, body: Block, consts: Sequence[Atom], starts: Sequence[Atom], xs: Sequence[Atom]
) -> tuple[Var, ...]:
    """Append a scan with a new body; its carries and stacked results."""
    carry, length = len(starts), like.params["length"]
    outputs = [Var(a.type) for a in body.outputs[:carry]]
    outputs += [Var(dataclasses.replace(a.type, shape=(length, *a.shape))) for a in body.outputs[carry:]]
    params = {**like.params, "num_consts": len(consts), "num_carry": carry}
    inputs = (*consts, *starts, *xs)
    scope.append(
        dataclasses.replace(like, inputs=inputs, outputs=tuple(outputs), params=params, bodies=(body,), original=None)
    )
    return tuple(outputs)
