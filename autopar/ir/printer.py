"""Prints programs: for `explain`, debug dumps and golden tests.

Variables are numbered in order of appearance, so equal programs print alike whatever JAX called them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax
import numpy as np

from autopar import jax_compat
from autopar.ir.program import ArrayType, Atom, Block, Literal, Program, Var
from autopar.jax_types import Leaf, Params

_HIDDEN = {"of", "out_sharding", "sharding", "update_jaxpr", "update_consts", "weak_type"}


def format_program(program: Program) -> str:
    """Returns the program's text, nested blocks indented, inputs and outputs with their paths."""
    names: dict[Var, str] = {}
    lines = [f"program {program.name}"]
    for var, leaf in program.named_inputs:
        lines.append(f"  in  {_name(var, names)}:{var.type} {leaf.role} {leaf.path}")
    lines += format_block(program.block, names, "  ")
    for atom, leaf in zip(program.block.outputs, program.outputs, strict=True):
        target = f" -> {program.inputs[leaf.state].path}" if leaf.state is not None else ""
        lines.append(f"  out {format_atom(atom, names)} {leaf.path}{target}")
    return "\n".join(lines) + "\n"


def format_block(block: Block, names: dict[Var, str] | None = None, indent: str = "") -> list[str]:
    """Returns one line for each of a block's equations."""
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


@jax_compat.outside_traces()
def digest_of(value: Leaf) -> str:
    """Digests the elements of an array that this process has."""
    if jax_compat.is_key(value.dtype):
        value = jax.random.key_data(value)
    is_apart = isinstance(value, jax.Array) and not value.is_fully_addressable
    parts = [shard.data for shard in value.addressable_shards] if is_apart else [value]
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(np.ascontiguousarray(part).tobytes())
    return made.hexdigest()


def block_text(block: Block, digest: Callable[[object], str | None] = digest_of) -> list[str]:
    """Returns a text that is equal for two blocks only if they compute the same of their inputs.

    `digest` tells apart the arrays that blocks close over.
    """
    names: dict[Var, str] = {}
    inputs = " ".join(f"{_name(v, names)}:{v.type}" for v in block.inputs)
    lines = format_block(block, names)
    outputs = " ".join(format_atom(a, names) for a in block.outputs)
    walked = list(block.walk())
    atoms = [a for e in walked for a in (*e.inputs, *(a for body in e.bodies for a in body.outputs))]
    hidden = (a.value for a in (*atoms, *block.outputs) if isinstance(a, Literal) and not _is_shown(a))
    arrays = (f"an array that it closes over, {digest(x)}" for x in hidden)
    return [f"of {inputs}", *lines, f"it makes {outputs}", *arrays]


def format_atom(atom: Atom, names: dict[Var, str]) -> str:
    """Returns a variable's name, or a constant's value (an array's type)."""
    if isinstance(atom, Literal):
        return f"{np.asarray(atom.value).item()}:{atom.type}" if _is_shown(atom) else f"const:{atom.type}"
    return _name(atom, names)


def _name(var: Var, names: dict[Var, str]) -> str:
    return names.setdefault(var, f"%{len(names)}")


def _is_shown(atom: Literal) -> bool:
    if not isinstance(atom.type, ArrayType) or atom.shape != () or jax_compat.is_key(atom.dtype):
        return False
    return not (isinstance(atom.value, jax.Array) and atom.value.is_deleted())


def _params(params: Params) -> str:
    shown = [f"{k}={_value(v)}" for k, v in sorted(params.items()) if k not in _HIDDEN and v is not None]
    return f"[{', '.join(shown)}]" if shown else ""


def _value(value: object) -> str:
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return str(value).replace("\n", " ")
