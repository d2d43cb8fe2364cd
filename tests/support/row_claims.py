"""Brute force over what an analysis claims, on small arrays of small integers.

The step is analysed, each of its equations is run, and whatever the analysis says of a variable is checked: a `Row`
must not change when another row of the operands does, and must be on the untouched rows what its `untouched` says,
values of one function must be equal there; a `Free` must be the same all along its axes; a lookup must read no
untouched row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.program import Block, Equation, Literal, Program, Var
from autopar.ir.rowspace import UNKNOWN, Const, Free, Row, RowFacts, Same, Unknown
from autopar.ir.trace import block_of
from autopar.passes.analyze_rows import analyze_rows
from autopar.passes.classify import classify
from autopar.run.arguments import NamedArguments, describe_leaves, find_states, read_call

ROWS = 5
TOUCHED = (1, 3)


@dataclass(frozen=True)
class Rows:
    """What a case may use: leaves with ROWS rows, the gradient `g` of one of them, dense values."""

    t: Any  # f32[5, 3], the table
    s: Any  # f32[5], a slot
    m: Any  # f32[5, 2, 2], too long for a bfloat16
    h: Any  # bf16[5, 3]
    ids: Any  # int32[2]: 1 and 3
    up: Any  # f32[2, 3], new rows
    x: Any  # f32[5, 3], dense
    k: Any  # f32[]
    g: Any  # f32[5, 3], zero off the touched rows

    @property
    def q(self) -> Any:
        return self.t.astype(jnp.int32)

    @property
    def d(self) -> Any:
        return self.g.astype(jnp.int32)


def _arguments() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    rng = np.random.default_rng(7)

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(1, 5, shape).astype(np.float32)

    state = {
        "t": ints(ROWS, 3),
        "s": ints(ROWS),
        "m": 2 * ints(ROWS, 2, 2) + 299,
        "h": jnp.asarray(ints(ROWS, 3), jnp.bfloat16),
    }
    batch = {"ids": np.asarray(TOUCHED, np.int32), "up": ints(2, 3), "x": ints(ROWS, 3), "k": np.float32(3)}
    return jax.tree.map(jnp.asarray, state), jax.tree.map(jnp.asarray, batch)


Build = Callable[[Rows], Any]


def analysed(build: Build) -> Program:
    """A step that looks rows up and trains on them by SGD, and does what the case does besides."""

    def step(state: Any, batch: Any) -> Any:
        g = jnp.zeros_like(state["t"]).at[batch["ids"]].add(batch["up"])
        build(Rows(**state, **batch, g=g))
        return {**state, "t": state["t"] - 0.5 * g}, state["t"][batch["ids"]].sum()

    call = read_call(step, _arguments(), {}, NamedArguments())
    traced = jax_compat.trace(step, *call.shapes)
    inputs, outputs = describe_leaves(call, find_states(call, traced.out_info, None), traced.out_info)
    return analyze_rows(classify(Program(block_of(traced.jaxpr), inputs, outputs))[0])[0]


# --- running a block, equation by equation ---


@dataclass(frozen=True)
class Event:
    """An equation that was run, with its operands' and results' values."""

    equation: Equation
    operands: list[Any]
    results: list[Any]


def _run(block: Block, inputs: Sequence[Any]) -> Iterator[Event]:
    """Runs a block and the bodies of its scans (each iteration), remats and conds (the branch taken)."""
    env: dict[Var, Any] = dict(zip(block.inputs, inputs, strict=True))
    for equation in block.equations:
        operands = [a.value if isinstance(a, Literal) else env[a] for a in equation.inputs]
        results = _apply(equation, operands)
        env.update(zip(equation.outputs, results, strict=True))
        yield Event(equation, operands, results)
        if equation.op == "remat":
            yield from _run(equation.bodies[0], operands)
        elif equation.op == "cond":
            yield from _run(equation.bodies[int(operands[0])], operands[1:])
        elif equation.op == "scan":
            yield from _run_scan(equation, operands)


def _run_scan(equation: Equation, operands: Sequence[Any]) -> Iterator[Event]:
    p, body = equation.params, equation.bodies[0]
    consts, end = p["num_consts"], p["num_consts"] + p["num_carry"]
    state = list(operands[consts:end])
    for k in range(p["length"]):
        inputs = [*operands[:consts], *state, *(x[k] for x in operands[end:])]
        env = dict(zip(body.inputs, inputs, strict=True))
        for event in _run(body, inputs):
            yield event
            env.update(zip(event.equation.outputs, event.results, strict=True))
        outs = body.outputs[: p["num_carry"]]
        state = [a.value if isinstance(a, Literal) else env[a] for a in outs]


def _apply(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    params = equation.original if equation.original is not None else equation.params
    return jax_compat.bind(equation.primitive, [jnp.asarray(x) for x in operands], params)


def equations(block: Block) -> Iterator[Equation]:
    """All equations, those in bodies included."""
    for equation in block.equations:
        yield equation
        for body in equation.bodies:
            yield from equations(body)


# --- checks ---


def check(program: Program) -> set[str]:
    """Check all claims; the ops of equations that rows come out of, or are looked up or reduced by."""
    facts: RowFacts = program.rows
    inputs = jax.tree.leaves(_arguments())
    leaves = dict(enumerate(np.asarray(x) for x in inputs))
    seen = set()
    functions: dict[Any, tuple[Equation, np.ndarray]] = {}
    for event in _run(program.block, inputs):
        equation = event.equation
        values = [facts.value(a) for a in equation.inputs]
        results = [facts.value(v) for v in equation.outputs]
        for value, result in zip(results, event.results, strict=True):
            _check_untouched(equation, value, np.asarray(result), leaves)
            if isinstance(value, Row) and isinstance(value.untouched, Unknown) and value.untouched != UNKNOWN:
                rows = np.delete(np.moveaxis(np.asarray(result), value.axis, 0), TOUCHED, 0)
                first, known = functions.setdefault(value.untouched.function, (equation, rows))
                if first is equation:  # of a loop, at another turn
                    functions[value.untouched.function] = equation, rows
                else:
                    np.testing.assert_array_equal(rows, known, f"{equation.op}, {first.op}: one function of the row")
        if not equation.bodies and any(isinstance(v, Row) for v in results):
            _check_parallel(event, values, results)
        role = facts.roles.get(equation)
        if role in ("lookup", "contract"):
            _check_reads_touched(event, values)
        if role in ("lookup", "contract", "reduce") or any(isinstance(v, (Row, Free)) for v in results):
            seen.add(equation.op)
    return seen


def _check_untouched(equation: Equation, value: Any, result: np.ndarray, leaves: dict[int, np.ndarray]) -> None:
    if isinstance(value, Free):
        for axis in value.axes - {value.index_axis}:
            np.testing.assert_array_equal(result, np.broadcast_to(result.take([0], axis), result.shape), equation.op)
        if isinstance(value.untouched, Const):
            _check_const(equation, value.untouched, result)
    elif isinstance(value, Row):
        rows = np.delete(np.moveaxis(result, value.axis, 0), TOUCHED, 0)
        if isinstance(value.untouched, Const):
            _check_const(equation, value.untouched, rows)
        elif isinstance(value.untouched, Same):
            old = np.delete(leaves[value.untouched.leaf], TOUCHED, 0).reshape(len(rows), -1).astype(rows.dtype)
            new = rows.reshape(len(rows), -1)
            if new.shape == old.shape:
                np.testing.assert_array_equal(new, old, f"{equation.op}: unchanged off the rows")
            else:  # a broadcast of the leaf
                assert all(set(a) == set(b) for a, b in zip(new, old, strict=True)), equation.op


def _check_const(equation: Equation, untouched: Const, actual: np.ndarray) -> None:
    expected = np.broadcast_to(np.asarray(untouched.value), actual.shape)
    exact = untouched.is_zero or untouched.is_one or actual.dtype.kind in "bi"
    np.testing.assert_allclose(actual, expected, rtol=0 if exact else 1e-6, err_msg=f"{equation.op}: {untouched}")


def _changed(operand: Any, axis: int, row: int) -> jax.Array:
    """The operand with one row changed."""
    rows = np.moveaxis(np.array(operand), axis, 0)
    rows[row] = ~rows[row] if rows.dtype == np.bool_ else rows[row] + np.asarray(1, rows.dtype)
    return jnp.asarray(np.moveaxis(rows, 0, axis))


def _with_row_changed(event: Event, values: Sequence[Any], row: int, const: bool = True) -> list[Any]:
    operands = []
    for operand, value in zip(event.operands, values, strict=True):
        change = isinstance(value, Row) and (const or not isinstance(value.untouched, Const))
        operands.append(_changed(operand, value.axis, row) if change else operand)
    return operands


def _check_parallel(event: Event, values: Sequence[Any], results: Sequence[Any]) -> None:
    """Changing a row of all row operands changes that row of the results only."""
    if not any(isinstance(v, Row) for v in values):
        return
    for row in range(ROWS):
        again = _apply(event.equation, _with_row_changed(event, values, row))
        for value, old, new in zip(results, event.results, again, strict=True):
            if isinstance(value, Row):
                rest = [np.delete(np.asarray(x), row, value.axis) for x in (old, new)]
                np.testing.assert_array_equal(*rest, f"{event.equation.op}: row {row} changes others")


def _check_reads_touched(event: Event, values: Sequence[Any]) -> None:
    """No untouched row is read by a lookup, nor by a product with rows that are zero there."""
    const = event.equation.op != "dot_general"
    for row in set(range(ROWS)) - set(TOUCHED):
        again = _apply(event.equation, _with_row_changed(event, values, row, const))
        np.testing.assert_array_equal(again[0], event.results[0], f"{event.equation.op} reads row {row}")
