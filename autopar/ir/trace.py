"""Copies a jaxpr into a Block; above `jax_compat` no other module reads JAX's programs.

Calls (`jit`, `custom_jvp`, `custom_vjp`) are inlined; scan, while, cond and remat keep nested blocks (inlining a remat
would let XLA merge the recomputation away). A reshape that also transposes becomes two equations, a `device_put` of
several arrays one for each. Everything else is copied unchanged, whatever its primitive.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn

from autopar import jax_compat
from autopar.errors import is_library
from autopar.garbage import paused_collection
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, OpaqueType, Source, Type, Var
from autopar.jax_types import Jaxpr, Leaf


def type_of(aval: Leaf) -> Type:
    if hasattr(aval, "shape") and hasattr(aval, "dtype") and type(aval).__name__ == "ShapedArray":
        return ArrayType(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))
    return OpaqueType(str(aval))


@paused_collection()
def block_of(jaxpr: Jaxpr) -> Block:
    """Copies a (closed) jaxpr into a Block."""
    return _block(jax_compat.lowered(jaxpr), ())


@dataclass(eq=False)
class Origin:
    """Source infos of an equation and of the calls it was inlined from, innermost first."""

    infos: tuple[object, ...]

    @functools.cached_property
    def source(self) -> Source | None:
        """The innermost frame in the user's own code, looked up when it is asked for."""
        frames = (frame for info in self.infos for frame in jax_compat.frames(info) if not is_library(frame[0]))
        return next((Source(_shown(file), line, function) for file, line, function in frames), None)

    @functools.cached_property
    def is_own_loop(self) -> bool:
        """The user's line calls JAX's control flow itself, rather than a function that loops within it."""
        called = ""
        for file, _, _ in (frame for info in self.infos for frame in jax_compat.frames(info)):
            if not is_library(file):
                break
            called = called if file.endswith("traceback_util.py") else file
        return "control_flow" in called or "ad_checkpoint" in called


def _shown(file: str) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return cell[1] if cell else file


def _block(jaxpr: Jaxpr, outer: tuple[JaxprEqn, ...]) -> Block:
    jaxpr, consts = jax_compat.open_jaxpr(jaxpr)
    inputs = tuple(Var(type_of(v.aval)) for v in jaxpr.invars)
    equations: list[Equation] = []
    outputs = _run(jaxpr, consts, inputs, equations, outer)
    return Block(inputs, tuple(equations), tuple(outputs))


def _run(
    jaxpr: Jaxpr,
    consts: Sequence[Leaf],
    inputs: Sequence[Atom],
    equations: list[Equation],
    outer: tuple[JaxprEqn, ...],
) -> Sequence[Atom]:
    """Appends the equations of an open jaxpr; returns its outputs."""
    env: dict[object, Atom] = {v: Literal(c, type_of(v.aval)) for v, c in zip(jaxpr.constvars, consts, strict=True)}
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: object) -> Atom:
        if isinstance(atom, jax_compat.JaxLiteral):
            return Literal(jax_compat.literal_value(atom), type_of(atom.aval))
        return env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        body = jax_compat.call_body(eqn)
        if body is not None:
            results = _run(
                *jax_compat.open_jaxpr(body), jax_compat.call_operands(eqn, operands), equations, (eqn, *outer)
            )
        else:
            equation = _equation(eqn, operands, outer)
            equations += _divided(equation)
            results = equation.outputs
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _equation(eqn: JaxprEqn, operands: Sequence[Atom], outer: tuple[JaxprEqn, ...]) -> Equation:
    primitive, params = eqn.primitive, eqn.params
    name = primitive.name
    infos = (eqn.source_info, *(e.source_info for e in outer))
    # A cached body of a library's jit (`jnp.take`) remembers the line that called it first: use this call's.
    library = [
        k
        for k, e in enumerate(outer)
        if (body := jax_compat.call_body(e)) is not None and is_library(_file_of(jax_compat.body_file(body)))
    ]
    if library:
        infos = infos[library[-1] + 1 :]
    bodies: Sequence[Jaxpr] = ()
    original = params
    if name == "scan":
        consts, carry = jax_compat.scan_counts(params)
        bodies = (params["jaxpr"],)
        ours = {k: params[k] for k in ("length", "reverse", "unroll")} | {"num_consts": consts, "num_carry": carry}
    elif name in jax_compat.REMATS:
        name, bodies = "remat", (params["jaxpr"],)
        ours = {k: params.get(k) for k in ("prevent_cse", "policy")}
    elif name == "cond":
        bodies, ours = params["branches"], {}
    elif name == "while":
        bodies = (params["cond_jaxpr"], params["body_jaxpr"])
        ours = {k: params[k] for k in ("cond_nconsts", "body_nconsts")}
    elif name == "reshard" and jax_compat.is_of_auto_mesh(params["dst_sharding"]):
        name, primitive, ours, original = "copy", jax_compat.copy_p, {}, None
    else:
        ours, original = {k: None if jax_compat.is_of_auto_mesh(v) else v for k, v in params.items()}, None
    blocks = tuple(_block(body, (eqn, *outer)) for body in bodies)
    is_manual = jax_compat.is_manual(eqn)
    if is_manual or any(e.op in ("shard_map", "sharding_constraint") for block in blocks for e in block.walk()):
        original = None
    return Equation(
        op=name,
        inputs=tuple(operands),
        outputs=tuple(Var(type_of(v.aval)) for v in eqn.outvars),
        params=ours,
        bodies=blocks,
        primitive=primitive,
        original=original,
        effects=bool(eqn.effects),
        context=None if is_manual else eqn.ctx,
        info=eqn.source_info,
        origin=Origin(infos),
    )


def _divided(equation: Equation) -> Sequence[Equation]:
    """Splits an equation that does several things.

    JAX's reshape may also transpose its operand (that of `vmap`'s convolutions does), and its `device_put` takes all
    leaves of a tree.
    """
    if equation.op == "device_put":
        pairs = enumerate(zip(equation.inputs, equation.outputs, strict=True))
        params = equation.params.items()
        return [
            replace(equation, inputs=(a,), outputs=(v,), params={name: (p[k],) for name, p in params})
            for k, (a, v) in pairs
        ]
    order = equation.params.get("dimensions") if equation.op == "reshape" else None
    if order is None:
        return (equation,)
    (operand,) = equation.inputs
    shape = tuple(operand.shape[d] for d in order)
    moved = Var(replace(operand.type, shape=shape))
    params, primitive = {"permutation": tuple(order)}, jax_compat.transpose_p
    first = replace(equation, op="transpose", outputs=(moved,), params=params, primitive=primitive)
    return first, replace(equation, inputs=(moved,), params={**equation.params, "dimensions": None})


@functools.lru_cache(maxsize=4096)
def _file_of(text: str) -> str:
    return text.rpartition(" at ")[2].rpartition(":")[0]
