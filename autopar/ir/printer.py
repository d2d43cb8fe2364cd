"""Programs as text: for `explain`, debug dumps and golden tests.

Variables are numbered in the order of their appearance, so equal programs print alike whatever JAX called them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.ir.program import Atom, Block, Literal, Program, Var

_HIDDEN = {"of", "out_sharding", "sharding", "update_jaxpr", "update_consts", "weak_type"}


def format_program(program: Program) -> str:
    """The whole program, nested blocks indented; inputs and outputs with their paths."""
    names: dict[Var, str] = {}
    lines = [f"program {program.name}"]
    for var, leaf in zip(program.block.inputs, program.inputs, strict=True):
        lines.append(f"  in  {_name(var, names)}:{var.type} {leaf.role} {leaf.path}")
    lines += format_block(program.block, names, "  ")
    for atom, leaf in zip(program.block.outputs, program.outputs, strict=True):
        target = f" -> {program.inputs[leaf.state].path}" if leaf.state is not None else ""
        lines.append(f"  out {format_atom(atom, names)} {leaf.path}{target}")
    return "\n".join(lines) + "\n"


def format_block(block: Block, names: dict[Var, str] | None = None, indent: str = "") -> list[str]:
    """The block's equations, a line each."""
    names = {} if names is None else names
    lines = []
    for equation in block.equations:
        outs = " ".join(f"{_name(v, names)}:{v.type}" for v in equation.outputs)
        operands = " ".join(format_atom(a, names) for a in equation.inputs)
        params = _params(equation.params)
        lines.append(f"{indent}{outs} = {equation.op}{params} {operands}".rstrip())
        for body in equation.bodies:
            inputs = " ".join(f"{_name(v, names)}:{v.type}" for v in body.inputs)
            lines.append(f"{indent}  {{ {inputs}")
            lines += format_block(body, names, indent + "    ")
            lines.append(f"{indent}  }} -> {' '.join(format_atom(a, names) for a in body.outputs)}")
    return lines


def format_atom(atom: Atom, names: dict[Var, str]) -> str:
    """A variable's name, or a constant's value (an array's type)."""
    if isinstance(atom, Literal):
        return _literal(atom)
    return _name(atom, names)


def _name(var: Var, names: dict[Var, str]) -> str:
    return names.setdefault(var, f"%{len(names)}")


def _literal(atom: Literal) -> str:
    if atom.shape != () or not isinstance(atom.value, (int, float, bool, np.generic, np.ndarray)):
        return f"const:{atom.type}"
    return f"{np.asarray(atom.value).item()}:{atom.type}"


def _params(params: Mapping[str, Any]) -> str:
    shown = [f"{k}={_value(v)}" for k, v in sorted(params.items()) if k not in _HIDDEN and v is not None]
    return f"[{', '.join(shown)}]" if shown else ""


def _value(value: Any) -> str:
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return str(value).replace("\n", " ")
