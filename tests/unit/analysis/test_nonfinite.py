"""Whether untouched rows may differ after a NaN or an infinity: what is claimed, beside what the step makes of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.analysis.nonfinite import NonfiniteOutcomes
from autopar.compile import analyze_program
from autopar.ir.options import Options
from autopar.ir.program import Atom, Input, Output, Program
from autopar.ir.trace import block_of
from autopar.ways.table import way_of

ROWS, IDS = 6, np.array([0, 1], np.int32)
TABLE = np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
NUMBER = np.arange(ROWS)[:, None]
Update = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def turns(g: jax.Array, one: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (one(carry), None), g, None, length=2)[0]


#: Updates of a table (its rows, its gradient, a number of the step), and whether rows may differ.
UPDATES: dict[str, tuple[Update, bool]] = {
    "zeros times a number": (lambda t, g, s: g * s, False),
    "zeros over a number": (lambda t, g, s: g / s, False),
    "where the row's number is even": (lambda t, g, s: jnp.where(NUMBER % 2 == 0, g, g * s), True),
    "where the row holds something": (lambda t, g, s: jnp.where(t > 0, g, g * s), True),
    "where the number of the step is positive": (lambda t, g, s: jnp.where(s > 0, g, g * s), False),
    "where all is NaN": (lambda t, g, s: jnp.where(jnp.isnan(g * s), 0.0, g * s), False),
    "a maximum that keeps a NaN": (lambda t, g, s: jnp.maximum(g * s, 0.0), False),
    "a predicate of the row and of the number": (lambda t, g, s: jnp.where(t * s > 0, g, g * s), True),
    "a branch": (lambda t, g, s: jax.lax.cond(s > 0, lambda: g, lambda: g * s), False),
    "a branch within a row's predicate": (
        lambda t, g, s: jnp.where(t > 0, jax.lax.cond(s > 0, lambda: g, lambda: g * s), g),
        True,
    ),
    "turns of a loop": (lambda t, g, s: turns(g, lambda carry: carry * s), False),
    "turns that only some rows take": (lambda t, g, s: turns(g, lambda c: jnp.where(NUMBER % 2 == 0, c, c * s)), True),
}


def step(update: Update) -> Callable[..., Any]:
    def made(table: jax.Array, ids: jax.Array, s: jax.Array) -> Any:
        grads = jax.grad(lambda t: (t[ids] ** 2).sum())(table)
        found = update(table, grads, s)
        return table - found, found

    return made


def claimed(update: Update) -> bool:
    """Of the rows that are subtracted from the table."""
    shapes = (TABLE, IDS, np.float32(1))
    block = block_of(jax.make_jaxpr(lambda *args: step(update)(*args)[0])(*shapes))
    inputs = (Input("table", "state"), Input("ids", "batch"), Input("s", "batch"))
    program = Program(block, inputs, (Output("table", 0),), "step")
    program = analyze_program(program, way_of(Options(strategy="ps"))).program
    last = next(e for e in program.block.equations if program.block.outputs[0] in e.outputs)
    rows: Atom = last.inputs[1]
    return NonfiniteOutcomes(program.block, program.rows.values, program.rows.roles).of([(rows, 0)]).may_differ


@pytest.mark.parametrize("name", UPDATES)
def test_rows_that_may_differ(name: str) -> None:
    update, expected = UPDATES[name]
    untouched = np.setdiff1d(np.arange(ROWS), IDS)
    found = [np.asarray(step(update)(TABLE, IDS, np.float32(s))[1])[untouched] for s in (np.nan, np.inf, -np.inf, 0.0)]
    differ = any((np.isnan(rows) != np.isnan(rows[:1])).any() for rows in found)
    assert differ == expected, "the case is what its name says"
    assert claimed(update) == expected
