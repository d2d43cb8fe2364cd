"""Checks a Program's invariants after every pass. A violation is a bug in autopar, never the user's."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.operations import OPERATIONS, PASSES, PREFIX
from autopar.ir.program import Atom, Block, Equation, Literal, Program, RouteType, Var
from autopar.ir.rowspace import Const, Row, RowFacts


def verify_program(program: Program, verified: Block | None = None, after: str = PASSES[-1]) -> None:
    """Raises AssertionError, naming the equation, unless the program is well formed.

    `program`: the program. `verified`: a block that has been verified before: passes that only add facts leave it
    unchanged. `after`: the pass that made the program; operations of later passes may not occur.
    """
    block = program.block
    assert len(block.inputs) == len(program.inputs), "every input has a path and a role"
    assert len(block.outputs) == len(program.outputs), "every output has a path"
    if block is not verified:
        written = PASSES[: PASSES.index(after) + 1] if after in PASSES else ()
        verify_block(block, set(), program.name, frozenset(written), program.rows)
    for output, atom in zip(program.outputs, block.outputs, strict=True):
        if output.state is not None:
            old = block.inputs[output.state].type
            assert atom.type.shape == old.shape, f"new {output.path} is {atom.type}, was {old}"
            assert atom.type.dtype == old.dtype, f"new {output.path} is {atom.type}, was {old}"


@dataclass(frozen=True, slots=True)
class _Location:
    """A location in the program, whose text is made only for an error."""

    outer: str | _Location
    equation: Equation

    def __str__(self) -> str:
        return f"{self.outer}, {self.equation.op} ({self.equation.where})"


def verify_block(
    block: Block,
    defined: set[Var],
    where: str | _Location,
    written: frozenset[str] = frozenset(PASSES),
    rows: RowFacts | None = None,
) -> None:
    """Checks a block and those nested in it; collects their variables in `defined`. `where`: where the block is in the
    program. `written`: passes whose operations may occur. `rows`: facts that its operations rest on."""
    visible: set[Var] = set()
    for var in block.inputs:
        _define(var, visible, defined, where)
    for equation in block.equations:
        location = _Location(where, equation)
        _verify_operation(equation, location, written)
        _verify_padding(equation, location, rows)
        for atom in equation.inputs:
            _read(atom, visible, location)
        for body in equation.bodies:
            verify_block(body, defined, location, written, rows)
        _verify_boundaries(equation, location)
        for var in equation.outputs:
            _define(var, visible, defined, location)
    for atom in block.outputs:
        _read(atom, visible, where)


def _verify_operation(equation: Equation, where: str | _Location, written: frozenset[str]) -> None:
    """Checks its name, the pass that may have written it, and the operands of our operations."""
    if not equation.op.startswith(PREFIX):
        known = equation.primitive is not None or bool(equation.bodies)
        assert known, f"{where}: {equation.op} is no operation of autopar and has no primitive"
        return
    assert equation.op in OPERATIONS, f"{where}: {equation.op} is no operation of autopar and has no primitive"
    spec = OPERATIONS[equation.op]
    assert spec.since in written, f"{where}: {equation.op} isn't written before {spec.since}"
    try:
        groups = spec.split(equation.params, equation.inputs)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None
    for name, atoms in groups.items():
        routes = [isinstance(a.type, RouteType) for a in atoms]
        assert name != "route" or all(routes), f"{where}: no route, but {atoms[0].type}"
        assert name in ("route", "touched", "operands") or not any(routes), f"{where}: a route for {name}"


def _verify_padding(equation: Equation, where: str | _Location, rows: RowFacts | None) -> None:
    if not (equation.op in OPERATIONS and OPERATIONS[equation.op].takes_padding):
        return
    values = [None if rows is None else rows.value(atom) for atom in equation.params["of"]]
    untouched_values = [value.untouched if isinstance(value, Row) else None for value in values]
    known = (
        isinstance(untouched_values[0], Const)
        if len(untouched_values) == 1
        else any(isinstance(o, Const) and o.is_zero for o in untouched_values)
    )
    assert known, f"{where}: rows that the step doesn't touch are taken for a constant, and are {untouched_values[0]}"


def _define(var: Var, visible: set[Var], defined: set[Var], where: str | _Location) -> None:
    assert var not in defined, f"{where}: a variable of type {var.type} is defined twice"
    visible.add(var)
    defined.add(var)


def _read(atom: Atom, visible: set[Var], where: str | _Location) -> None:
    assert isinstance(atom, Literal) or atom in visible, f"{where}: reads a {atom.type} that is not defined before"


def _same(a: Atom, b: Atom, where: str | _Location) -> None:
    left, right = a.type, b.type
    if hasattr(left, "shape") and hasattr(right, "shape"):
        assert (left.shape, left.dtype) == (right.shape, right.dtype), f"{where}: {left} meets {right}"
    else:
        assert type(left) is type(right), f"{where}: {left} meets {right}"


def _verify_boundaries(equation: Equation, where: str | _Location) -> None:
    """Checks operands against inputs of bodies, and results of bodies against outputs."""
    if equation.op == "scan":
        consts, carry = equation.border.consts, equation.border.carries
        (body,) = equation.bodies
        assert len(body.inputs) == len(equation.inputs), f"{where}: {len(body.inputs)} inputs"
        assert len(body.outputs) == len(equation.outputs), f"{where}: {len(body.outputs)} outputs"
        for outer, inner in (
            *zip(equation.inputs[: consts + carry], body.inputs, strict=False),
            *zip(equation.outputs[:carry], body.outputs, strict=False),
            *zip(body.inputs[consts : consts + carry], body.outputs, strict=False),
        ):
            _same(outer, inner, where)
        for outer, inner in zip(equation.inputs[consts + carry :], body.inputs[consts + carry :], strict=True):
            assert outer.shape[1:] == inner.shape, f"{where}: a sequence of {outer.type} gives {inner.type}"
        for outer, inner in zip(equation.outputs[carry:], body.outputs[carry:], strict=True):
            assert outer.shape[1:] == inner.shape, f"{where}: {inner.type} stacks to {outer.type}"
    elif equation.op == "remat" or equation.op == "cond":
        skip = 1 if equation.op == "cond" else 0
        for body in equation.bodies:
            for outer, inner in zip(equation.inputs[skip:], body.inputs, strict=True):
                _same(outer, inner, where)
            for outer, inner in zip(equation.outputs, body.outputs, strict=True):
                _same(outer, inner, where)
