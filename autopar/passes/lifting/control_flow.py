"""Scans, remats and conds in row space, and `rewrite`, which dispatches every equation.

A scan's carries and sequences change form where they are in row space; what else its body reads is imported. Each
family that comes out of a body gets the body's off-row form as well (a `Template`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.program import Atom, Block, Equation, Var
from autopar.passes.lifting.equations import LIFT
from autopar.passes.lifting.off_rows import OffScope, emit_scan
from autopar.passes.lifting.scope import Key, Lifting, Scope, Template


def rewrite(scope: Scope, equation: Equation) -> None:
    """Rewrite one equation of the block, whatever it is."""
    role = scope.lifting.facts.roles.get(equation)
    if not scope.lifting.touches(equation) or role == "dense":
        scope.compute(equation)
    elif equation.op == "scan":
        _Loop(scope, equation).lift()
    elif equation.op in ("remat", "cond"):
        _lift_branches(scope, equation)
    else:
        LIFT[role or "rows"](scope, equation)


@dataclass(eq=False)
class _Loop:
    """Rewriting one scan."""

    scope: Scope
    equation: Equation

    def lift(self) -> None:
        scope, equation, lifting = self.scope, self.equation, self.scope.lifting
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
        body = equation.bodies[0]
        child = Scope(lifting, body, scope, dict(zip(body.inputs[:consts], equation.inputs[:consts], strict=True)))
        starts, start_vars = self._bind(child, range(consts, consts + carry), equation.outputs[:carry], 0)
        xs, x_vars = self._bind(child, range(consts + carry, len(equation.inputs)), None, 1)
        for access in self._varying_indices():
            stacked = scope.index(access)
            child.indices[access] = one = Var(dataclasses.replace(stacked.type, shape=stacked.shape[1:]))
            xs.append(stacked)
            x_vars.append(one)
        for inner in body.equations:
            rewrite(child, inner)
        outputs = [self._result(child, k, 0 if k < carry else 1) for k in range(len(equation.outputs))]
        pending = self._off_forms(child, carry)
        exported: dict[Atom, int] = {}
        for off in pending:
            for atom in off.exports:
                exported.setdefault(atom, len(outputs) + len(exported))
        inputs = (*child.imports.values(), *start_vars, *x_vars)
        block = Block(inputs, tuple(child.equations), (*outputs, *exported))
        results = emit_scan(scope, equation, block, [scope.resolve(k) for k in child.imports], starts, xs)
        scope.bind(equation.outputs, results)
        for off in pending:
            stacked = tuple(results[exported[a]] for a in off.exports)
            lifting.templates[equation, off.family] = dataclasses.replace(off, stacked=stacked)

    def _varying_indices(self) -> list[Equation]:
        """Accesses in the loop whose index operand differs from iteration to iteration."""
        indices = self.scope.lifting.indices.items()
        return [e for e, at in indices if self.equation in at.path and at.varies[at.path.index(self.equation)]]

    def _bind(
        self, child: Scope, positions: range, fixed: Sequence[Var] | None, shift: int
    ) -> tuple[list[Atom], list[Var]]:
        """Inputs of the body that vary: outside and inside, in row form where they are in row space."""
        outside, inside = [], []
        for n, k in enumerate(positions):
            operand, var = self.equation.inputs[k], self.equation.bodies[0].inputs[k]
            row = self.scope.lifting.row(var if fixed is None else fixed[n])
            if row is None:
                outside.append(self.scope.get(operand))
                child.dense[var] = new = Var(var.type)
            else:
                outside.append(self.scope.at_rows(operand, row.axis + shift, row.family))
                new = Var(child.at(var.type, row.axis, row.family))
                child.rows[var, row.axis, row.family] = new
            inside.append(new)
        return outside, inside

    def _result(self, child: Scope, k: int, shift: int) -> Atom:
        atom, row = self.equation.bodies[0].outputs[k], self.scope.lifting.row(self.equation.outputs[k])
        return child.get(atom) if row is None else child.at_rows(atom, row.axis - shift, row.family)

    def _off_forms(self, child: Scope, carry: int) -> list[Template]:
        """The body once more for each family that comes out of the loop."""
        equation, lifting = self.equation, self.scope.lifting
        consts, body = equation.params["num_consts"], equation.bodies[0]
        made = []
        for family in _families(lifting, equation.outputs):
            off = OffScope(lifting, body, None, dict(child.operands), primary=child)
            carries, sequences, inner = [], [], []
            for k in range(consts, len(equation.inputs)):
                is_carry = k < consts + carry
                row = lifting.row(equation.outputs[k - consts] if is_carry else body.inputs[k])
                if row is None or row.family != family:
                    continue
                var = Var(off.at(body.inputs[k].type, row.axis, family))
                off.rows[body.inputs[k], row.axis, family] = var
                inner.append(var)
                (carries if is_carry else sequences).append((equation.inputs[k], row.axis + (0 if is_carry else 1)))
            made.append(_template(equation, family, off, carry, inner, carries, sequences))
        return made


def _families(lifting: Lifting, outputs: Sequence[Var]) -> list[int]:
    return list(dict.fromkeys(r.family for v in outputs if (r := lifting.row(v)) is not None))


def _template(
    equation: Equation,
    family: int,
    off: OffScope,
    carry: int,
    inner: Sequence[Var] = (),
    carries: Sequence[tuple[Atom, int]] = (),
    sequences: Sequence[tuple[Atom, int]] = (),
) -> Template:
    """The off-row form of a body, whose results are stacked from number `carry` on.

    What it reads is sorted: what the loop leaves alone is imported, the rest is exported by the first rewriting.
    """
    returned = off.block.outputs
    outs = [(k, r) for k, v in enumerate(equation.outputs) if (r := off.lifting.row(v)) and r.family == family]
    off.run([a for k, _ in outs if isinstance(a := returned[k], Var)], family)
    results = tuple(off.at_rows(returned[k], r.axis - (k >= carry), family) for k, r in outs)
    assert off.primary is not None, "an off-row form is a second rewriting"
    outside = {var: key for key, var in off.primary.imports.items()}
    imports: list[Key] = []
    invariant, varying, exports = [], [], []
    for key, var in off.imports.items():
        if key[0] == "new" and key[1] not in outside:
            varying.append(var)
            exports.append(key[1])
            continue
        outer = outside[key[1]] if key[0] == "new" else key
        assert key[0] != "new" or outer[0] == "dense", "it takes only dense values from the first rewriting"
        invariant.append(var)
        imports.append(outer)
    return Template(
        equation=equation,
        family=family,
        bodies=(Block((*invariant, *inner, *varying), tuple(off.equations), results),),
        imports=tuple(imports),
        carries=tuple(carries),
        sequences=tuple(sequences),
        exports=tuple(exports),
        outputs=tuple(equation.outputs[k] for k, _ in outs),
    )


def _lift_branches(scope: Scope, equation: Equation) -> None:
    """A remat, or the branches of a cond, whose bodies work on rows. All bodies take the same operands."""
    lifting = scope.lifting
    head = equation.inputs[: len(equation.inputs) - len(equation.bodies[0].inputs)]  # a cond's index
    operands = equation.inputs[len(head) :]
    children = [Scope(lifting, b, scope, dict(zip(b.inputs, operands, strict=True))) for b in equation.bodies]
    returned = []
    for child in children:
        for inner in child.block.equations:
            rewrite(child, inner)
        pairs = zip(child.block.outputs, map(lifting.row, equation.outputs), strict=True)
        returned.append([child.get(a) if r is None else child.at_rows(a, r.axis, r.family) for a, r in pairs])
    pending = {f: [_off_branch(child, equation, f) for child in children] for f in _families(lifting, equation.outputs)}
    exports = [
        list(dict.fromkeys(a for offs in pending.values() for a in offs[k].exports)) for k in range(len(children))
    ]
    for k, (child, outputs) in enumerate(zip(children, returned, strict=True)):
        for j, atoms in enumerate(exports):
            outputs += atoms if j == k else [child.zeros(a.type) for a in atoms]
    types = {key: var.type for child in children for key, var in child.imports.items()}
    blocks = tuple(
        Block(tuple(child.import_(key, type_) for key, type_ in types.items()), tuple(child.equations), tuple(outputs))
        for child, outputs in zip(children, returned, strict=True)
    )
    results = tuple(Var(a.type) for a in blocks[0].outputs)
    inputs = (*(scope.get(a) for a in head), *(scope.resolve(key) for key in types))
    scope.append(dataclasses.replace(equation, inputs=inputs, outputs=results, bodies=blocks, original=None))
    scope.bind(equation.outputs, results)
    exported = dict(zip([a for atoms in exports for a in atoms], results[len(equation.outputs) :], strict=True))
    for family, offs in pending.items():
        lifting.templates[equation, family] = _join_branches(offs, exported)


def _off_branch(child: Scope, equation: Equation, family: int) -> Template:
    """The off-row form of one body."""
    off = OffScope(child.lifting, child.block, None, dict(child.operands), primary=child)
    return _template(equation, family, off, len(equation.outputs))


def _join_branches(offs: Sequence[Template], exported: Mapping[Atom, Var]) -> Template:
    """One template of the branches' off-row forms, which then take the same operands."""
    named = [dict(zip((*o.imports, *o.exports), o.bodies[0].inputs, strict=True)) for o in offs]
    imports = tuple(dict.fromkeys(key for off in offs for key in off.imports))
    exports = tuple(dict.fromkeys(a for off in offs for a in off.exports))
    types = {name: var.type for rows in named for name, var in rows.items()}
    bodies = tuple(
        dataclasses.replace(off.bodies[0], inputs=tuple(rows.get(k) or Var(types[k]) for k in (*imports, *exports)))
        for off, rows in zip(offs, named, strict=True)
    )
    stacked = tuple(exported[a] for a in exports)
    return dataclasses.replace(offs[0], bodies=bodies, imports=imports, stacked=stacked)
