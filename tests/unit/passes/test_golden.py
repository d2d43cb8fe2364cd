"""Golden text: Programs written by hand, put through the pipeline one pass at a time.

Each pass must print what `golden/<program>.txt` says, and leave a program that returns the same: it is run before
and after. After a change that is meant, `python -m tests.unit.passes.test_golden` writes the files anew; read the
difference.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import jax_compat
from autopar.backends.emit import emit
from autopar.compile import analyze_program, compile_program
from autopar.ir.options import Options
from autopar.ir.printer import format_block, format_program
from autopar.ir.program import Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.rowspace import Row, RowFacts
from autopar.ir.trace import block_of
from autopar.passes.normalize import merge_equal
from autopar.ways.table import way_of
from tests.support.programs import OPTIONS, PROGRAMS, ROWS, TOLD, sgd

GOLDEN = Path(__file__).parent / "golden"

# --- the passes, as text ---


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass, its note, the program after it, and the plan."""

    name: str
    note: str
    program: Program
    bound: ProgramPlan | None


def passes(name: str) -> list[Pass]:
    program, way = PROGRAMS[name](), way_of(OPTIONS.get(name, Options(strategy="ps")))
    compiled = compile_program(analyze_program(program, way), way)
    found = [Pass("written", "by hand", program, None)]
    return found + [Pass(r.name, r.note, r.program, compiled.bound) for r in compiled.records]


def text(name: str) -> str:
    """The golden text: a program where it is new, and what each pass says."""
    printed, lines = "", [str(PROGRAMS[name].__doc__)]
    for each in passes(name):
        program = format_program(each.program)
        lines += ["", f"--- {each.name}: {each.note}", *_findings(each)]
        lines += [program.rstrip()] if program != printed else []
        printed = program
    return "\n".join(lines) + "\n"


def _findings(made: Pass) -> list[str]:
    """Facts where a pass finds them, the plan where it decides."""
    program, lines = made.program, []
    if made.name == "classify":
        lines += [f"table {program.inputs[k].path}, rows along {axis}" for k, axis in program.tables]
        lines += [f"candidate {program.inputs[k].path}, rows along {axis}" for k, axis in program.candidates]
    elif made.name == "analyze_rows":
        lines += _facts(program)
    elif made.name == "choose" and made.bound is not None:
        lines += [
            f"family {f.family}: {f.method}, {f.bounds.rows} rows, {f.table.ids} ids" for f in made.bound.families
        ]
        lines += [f"{p.path}: {p.method}, {p.reason}" for p in made.bound.plan.parameters]
    elif made.name == "split_segments":
        lines += map(str, program.segments.items if program.segments is not None else ())
    return lines


def _facts(program: Program) -> list[str]:
    facts: RowFacts = program.rows
    names: dict[Var, str] = {}
    for var in program.block.inputs:
        names[var] = f"%{len(names)}"
    format_block(program.block, names)
    roles = {v: facts.roles.get(e, "") for e in program.block.walk() for v in e.outputs}
    lines = []
    for var, name in names.items():
        value = facts.value(var)
        if isinstance(value, Row):
            family = facts.find(value.family)
            lines.append(f"{name} rows of {family} along {value.axis}, {value.untouched} {roles.get(var, '')}".rstrip())
        elif value is not None:
            lines.append(f"{name} free along {sorted(value.axes)}, {value.untouched}")
        elif roles.get(var):
            lines.append(f"{name} dense by {roles[var]}")
    for space in facts.spaces:
        leaves = ", ".join(program.inputs[k].path for k in space.leaves)
        lines.append(f"family of {leaves}: {space.refusal or f'lifts, {len(space.accesses)} accesses'}")
    return lines


# --- the tests ---


def arguments(program: Program) -> list[jax.Array]:
    """Small integers; ids with duplicates, and one that is out of range."""
    rng = np.random.default_rng(3)
    made = []
    for var in program.block.inputs:
        is_ids = var.dtype == np.int32
        made.append(jnp.asarray(rng.integers(1, ROWS + 2 if is_ids else 5, var.shape), var.dtype))
    return made


def outputs(program: Program) -> list[np.ndarray]:
    TOLD.clear()
    results = [np.asarray(x) for x in emit(program.block)(*arguments(program))]
    return [*results, np.asarray(TOLD)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_after_each_pass(name: str) -> None:
    assert text(name) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in OPTIONS])
def test_each_pass_keeps_what_is_returned(name: str) -> None:
    first, *later = passes(name)
    expected, before = outputs(first.program), first.program
    for each in later:
        if each.program.block is not before.block:
            before = each.program
            for a, b in zip(expected, outputs(before), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-6, err_msg=each.name)


def test_equal_bytes_of_other_types_are_not_merged() -> None:
    def both(x: Any) -> Any:
        return x, jnp.full(3, 1, jnp.int4), jnp.full(3, 1, jnp.uint4)

    block = block_of(jax_compat.trace(both, (1.0,), {}).jaxpr)
    merged = merge_equal(block)
    assert [a.type for a in merged.outputs] == [a.type for a in block.outputs]


def test_equal_programs_print_alike() -> None:
    assert format_program(sgd()) == format_program(sgd())


if __name__ == "__main__":
    for _name in PROGRAMS:
        (GOLDEN / f"{_name}.txt").write_text(text(_name))
