"""Control flow: rows pass into the bodies of scan, remat and cond, and out of them; a while keeps its tables dense.

A scan's carries are a fixed point: they start as what comes in and are widened until a run of the body returns what
went in (what a carry is off the rows may become unknown, a zero may become a family's rows).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.analysis.rules.elementwise import off_of
from autopar.analysis.rules.table import RULES, Analysis, Mixes
from autopar.ir.program import Atom, Equation
from autopar.ir.rowspace import UNKNOWN, Free, Row, Value


def remat(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    return analysis.body(equation, equation.bodies[0], values)


def cond(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Each branch by itself; a result is what all branches return."""
    mark = analysis.checkpoint()
    returned = [analysis.body(equation, body, values[1:]) for body in equation.bodies]
    refusal = analysis.refused_since(mark)
    if refusal is not None:  # the cond as a whole may still read all rows
        analysis.restore(mark)
        raise Mixes(f"inside a cond: {refusal.reason}", refusal.remedy, "body")
    results = returned[0]
    atoms = equation.bodies[0].outputs
    for body, others in zip(equation.bodies[1:], returned[1:], strict=True):
        pairs = zip(atoms, results, body.outputs, others, strict=True)
        results = [join(analysis, a, x, b, y) for a, x, b, y in pairs]
    return results


#: What to do about a table in a while loop.
_NO_WHILE = (
    "use lax.scan, or lax.fori_loop with bounds that are known when the step is traced; what ends earlier can skip the "
    "rest by lax.cond"
)


def while_loop(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    if any(isinstance(v, Row) for v in values):
        raise Mixes("the table is used inside a while loop", _NO_WHILE, "body")
    return [None] * len(equation.outputs)


def join(analysis: Analysis, a: Atom, x: Value, b: Atom, y: Value) -> Value:
    """What a value is that is either x or y: rows if one of them is, for the other can be restricted to them."""
    rows = [v for v in (x, y) if isinstance(v, Row)]
    if not rows:
        return x if x == y else None
    axis = rows[0].axis
    if rows[-1].axis != axis:
        raise Mixes("rows along different axes in a loop or a cond")
    off_x, off_y = off_of(a, x, axis), off_of(b, y, axis)
    return Row(axis, analysis.unite(rows), off_x if off_x == off_y else UNKNOWN)


def scan(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
    body = equation.bodies[0]
    carries = list(values[consts : consts + carry])
    sequences: list[Value] = []
    for value in values[consts + carry :]:
        if isinstance(value, Row) and value.axis == 0:
            raise Mixes("a scan over the rows of the table")
        sequences.append(Row(value.axis - 1, value.family, value.off) if isinstance(value, Row) else None)
    starts = equation.inputs[consts : consts + carry]
    for _ in range(2 * len(carries) + 4):
        mark = analysis.checkpoint()
        results = analysis.body(equation, body, [*values[:consts], *carries, *sequences])
        widened = [
            _widen(analysis, start, value, out, result)
            for start, value, out, result in zip(starts, carries, body.outputs, results[:carry], strict=False)
        ]
        if widened == carries:
            break
        carries = widened
        analysis.restore(mark)
    else:
        raise Mixes("a loop whose carries don't settle")
    stacked = [Row(v.axis + 1, v.family, v.off) if isinstance(v, Row) else None for v in results[carry:]]
    return [*carries, *stacked]


def _widen(analysis: Analysis, start: Atom, value: Value, out: Atom, result: Value) -> Value:
    """The carry's value that covers both what came in and what one iteration returns."""
    if isinstance(value, Row) or isinstance(result, Row):
        return join(analysis, start, value, out, result)
    if isinstance(value, Free) and isinstance(result, Free) and value.off == result.off and value.off != UNKNOWN:
        return Free(value.axes & result.axes, value.off)
    return None


RULES |= {"remat": remat, "scan": scan, "cond": cond, "while": while_loop}
