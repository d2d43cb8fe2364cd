"""Backward slices: what is live, and what computing a loop's inner value outside of it costs and gives.

Each block is traced from a small function, sliced, and run: what is left must return what it returned before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar import jax_compat
from autopar.analysis.row_ids import index_atoms
from autopar.backends.emit import emit
from autopar.ir.program import Atom, Block, Equation, Literal, count_equations
from autopar.ir.rowspace import Access
from autopar.ir.slicing import (
    clone,
    eliminate_dead,
    hoist,
    independent_outputs,
    needed_equations,
    uniform_outputs,
)
from autopar.ir.trace import block_of
from autopar.ir.verifier import verify_block

TABLE = jnp.arange(21.0).reshape(7, 3)
IDS = jnp.array([[3, 1], [0, 5], [6, 2]], jnp.int32)
START = jnp.ones((2, 3))


def traced(fun: Callable[..., Any], *args: Any) -> Block:
    return block_of(jax_compat.trace(fun, args, {}).jaxpr)


def run(block: Block, *args: Any) -> list[Any]:
    verify_block(block, set(), "test")
    return emit(block)(*args)


def ops(block: Block) -> list[str]:
    return [e.op for e in block.walk()]


def only(block: Block, op: str) -> Equation:
    (found,) = (e for e in block.walk() if e.op == op)
    return found


def close(a: Sequence[Any], b: Sequence[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


# --- dead code ---


def test_dead_equations_go_and_inputs_stay() -> None:
    block = traced(lambda x, y: (jnp.sin(x), jnp.cos(y))[0], START, START)
    slim, used = eliminate_dead(block)
    assert ops(slim) == ["sin"] and used == [True, False]
    assert slim.inputs == block.inputs
    close(run(slim, START, START), [jnp.sin(START)])


def test_outputs_that_are_not_live_go() -> None:
    block = traced(lambda x, y: (jnp.sin(x), jnp.cos(y), x), START, START)
    slim, used = eliminate_dead(block, [False, True, False])
    assert ops(slim) == ["cos"] and used == [False, True] and len(slim.outputs) == 1
    close(run(slim, START, START), [jnp.cos(START)])


def test_a_block_without_dead_code_is_returned_as_it_is() -> None:
    block = traced(lambda x: lax.scan(lambda c, i: (c * i, c + i), x, jnp.arange(3.0)), 1.0)
    assert eliminate_dead(block)[0] is block


def _scan(body: Callable[..., Any], start: Any, xs: Any) -> Callable[[Any, Any], Any]:
    """A scan of which the first carry comes out."""
    return lambda start, xs: lax.scan(body, start, xs)[0][0]


def test_dead_carries_sequences_and_stacks_of_a_scan_go() -> None:
    def body(carry: Any, xs: Any) -> Any:
        (live, dead), (x, unread) = carry, xs
        return (live * 0.5 + x, dead + jnp.tanh(unread)), jnp.exp(x)

    start, xs = (jnp.float32(1), jnp.float32(2)), (jnp.arange(3.0), jnp.arange(3.0))
    block = traced(_scan(body, start, xs), start, xs)
    slim, used = eliminate_dead(block)
    scan = only(slim, "scan")
    assert (scan.params["num_carry"], len(scan.inputs), len(scan.outputs)) == (1, 2, 1)
    assert used == [True, False, True, False]
    assert not {"tanh", "exp"} & set(ops(slim))
    args = jax.tree.leaves((start, xs))
    close(run(slim, *args), run(block, *args))


def test_a_carry_that_a_live_one_reads_stays() -> None:
    def body(carry: Any, x: Any) -> Any:
        out, behind, alone = carry
        return (out + behind, behind * x, alone * 2), None

    start, xs = (jnp.float32(0), jnp.float32(1), jnp.float32(1)), jnp.arange(1.0, 4.0)
    block = traced(_scan(body, start, xs), start, xs)
    slim, used = eliminate_dead(block)
    assert only(slim, "scan").params["num_carry"] == 2 and used == [True, True, False, True]
    close(run(slim, *start, xs), run(block, *start, xs))


def test_a_wanted_carry_that_its_body_does_not_read_stays() -> None:
    start, xs = (jnp.float32(5), jnp.float32(1)), jnp.arange(1.0, 4.0)
    block = traced(_scan(lambda c, x: ((x, c[1] + 1), None), start, xs), start, xs)
    slim, used = eliminate_dead(block)
    assert used == [True, False, True]
    close(run(slim, *start, xs), [xs[-1]])


def test_dead_results_of_a_remat_go() -> None:
    def step(x: Any, y: Any) -> Any:
        return jax.checkpoint(lambda x, y: (jnp.sin(x), jnp.cos(y)))(x, y)[0]

    slim, used = eliminate_dead(traced(step, START, START))
    remat = only(slim, "remat")
    assert len(remat.inputs) == len(remat.outputs) == len(remat.bodies[0].inputs) == 1 and used == [True, False]
    close(run(slim, START, START), [jnp.sin(START)])


def test_dead_results_of_a_cond_go() -> None:
    def step(k: Any, x: Any) -> Any:
        return lax.cond(k > 0, lambda: (x + 1, jnp.sin(x)), lambda: (x, jnp.cos(x)))[0]

    block = traced(step, 1, START)
    slim, _ = eliminate_dead(block)
    assert not {"sin", "cos"} & set(ops(slim))
    for k in (0, 1):
        close(run(slim, jnp.int32(k), START), run(block, jnp.int32(k), START))


def test_a_while_is_all_or_nothing() -> None:
    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, jnp.sin(c[1])), (x, x))

    whole = traced(lambda x: loop(x)[0], 1.0)
    assert "sin" in ops(eliminate_dead(whole)[0])
    assert ops(eliminate_dead(traced(lambda x: (loop(x), x + 1)[1], 1.0))[0]) == ["add"]


# --- effects ---


def _noisy_scan(seen: list[int]) -> Callable[[Any, Any], Any]:
    """Looks rows up by a counter and tells which: nothing of it is wanted but the telling."""

    def step(table: Any, start: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            h, k = carry
            jax.debug.callback(lambda k: seen.append(int(k)), k)
            return (jnp.tanh(h + table[k]), k + 2), None

        lax.scan(body, (start, jnp.int32(1)), None, length=3)
        return start

    return step


def test_effects_stay_where_nothing_else_is_wanted() -> None:
    seen: list[int] = []
    block = traced(_noisy_scan(seen), TABLE, START)
    slim, _ = eliminate_dead(block)
    assert only(slim, "scan").params["num_carry"] == 1, "the counter is what the callback reads"
    assert not {"tanh", "dynamic_slice"} & set(ops(slim))
    run(slim, TABLE, START)
    jax.effects_barrier()
    assert sorted(seen) == [1, 3, 5]


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: lambda x: lax.cond(x.sum() > 0, f, f, x)])
def test_effects_stay_in_nested_programs(wrap: Callable[..., Any]) -> None:
    seen: list[float] = []

    def noisy(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x[0])), x)
        return jnp.sin(x)

    slim, _ = eliminate_dead(traced(lambda x: (wrap(noisy)(x), x + 1)[1], jnp.ones(2)))
    assert "sin" not in ops(slim) or "cond" in ops(slim)
    run(slim, jnp.full(2, 4.0))
    jax.effects_barrier()
    assert seen == [4.0]


# --- what an atom needs ---


def test_needed_equations_reduce_loops_to_what_is_needed() -> None:
    def step(x: Any, k: Any) -> Any:
        (h, k), _ = lax.scan(lambda c, _: ((jnp.tanh(c[0]), c[1] + 2), None), (x, k), None, length=3)
        return h, k * 10

    block = traced(step, START, jnp.int32(1))
    needed = needed_equations(block.equations, [block.outputs[1]])
    assert [e.op for e in needed] == ["scan", "mul"]
    slim = Block(block.inputs, tuple(needed), (block.outputs[1],))
    assert "tanh" not in ops(slim)
    close(run(slim, START, jnp.int32(1)), [70])
    assert needed_equations(block.equations, [block.inputs[0], Literal(1.0, block.inputs[0].type)]) == []


# --- out of loops ---


def lookups(block: Block, path: tuple[Equation, ...] = ()) -> Iterator[tuple[tuple[Equation, ...], Atom]]:
    """The ids of lookups in nested blocks, and the equations around them."""
    for equation in block.equations:
        if equation.op in ("gather", "dynamic_slice"):
            (ids,) = index_atoms(Access(equation, path, 0))
            yield path, ids
        for body in equation.bodies:
            yield from lookups(body, (*path, equation))


def hoisted(fun: Callable[..., Any], *args: Any) -> tuple[list[Equation], Atom, list[Any]]:
    """The ids of the lookup inside `fun`, outside of all loops: equations, the atom, and its value."""
    block = traced(fun, *args)
    path, ids = next(lookups(block))
    equations, atom, _ = hoist(path, ids)
    place = block.equations.index(path[0])
    outside = Block(block.inputs, (*block.equations[:place], *equations), (atom,))
    assert not {"tanh", "gather", "dynamic_slice"} & {o for e in equations for o in ops(Block((), (e,), ()))}
    return equations, atom, run(outside, *args)


def _over(ids: Callable[[Any, Any, Any], Any], wrap: Any = lambda body: body, reverse: bool = False) -> Any:
    """A scan that looks up `ids(its iteration's ids, a counter, a constant)`."""

    def step(table: Any, xs: Any, constant: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            h, k = carry
            rows = table.at[ids(i, k, constant)].get(mode="clip")
            return (jnp.tanh(h + rows.sum()), k + 2), None

        return lax.scan(wrap(body), (jnp.zeros(()), jnp.int32(1)), xs, reverse=reverse)[0]

    return step


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint])
@pytest.mark.parametrize("reverse", [False, True])
def test_ids_of_a_sequence(wrap: Any, reverse: bool) -> None:
    _, _, (value,) = hoisted(_over(lambda i, k, c: (i + 1) % 7, wrap, reverse), TABLE, IDS, IDS[0])
    np.testing.assert_array_equal(value.reshape(IDS.shape), (IDS + 1) % 7)


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint])
@pytest.mark.parametrize("reverse", [False, True])
def test_ids_of_a_carry(wrap: Any, reverse: bool) -> None:
    equations, _, (value,) = hoisted(_over(lambda i, k, c: i * 0 + k, wrap, reverse), TABLE, IDS, IDS[0])
    order = [5, 3, 1] if reverse else [1, 3, 5]
    np.testing.assert_array_equal(value.reshape(IDS.shape), np.repeat(order, 2).reshape(3, 2))
    (scan,) = (e for e in equations if e.op == "scan")
    assert scan.params["num_carry"] == 1, "only the counter goes around"


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint])
def test_ids_that_no_iteration_changes_need_no_loop(wrap: Any) -> None:
    equations, atom, (value,) = hoisted(_over(lambda i, k, c: c * 2 % 7, wrap), TABLE, IDS, IDS[0])
    np.testing.assert_array_equal(value.reshape(-1), IDS[0] * 2 % 7)
    assert atom.shape[:1] == (2,) and not any(e.bodies for e in equations)


def test_sequences_as_they_are_need_nothing() -> None:
    def step(table: Any, xs: Any) -> Any:
        return lax.scan(lambda h, i: (h + lax.gather(table, i, numbers, (1, 3)).sum(), None), 0.0, xs)[0]

    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    block = traced(step, TABLE, IDS[..., None])
    path, ids = next(lookups(block))
    assert hoist(path, ids)[:2] == ([], block.inputs[1])
    literal = Literal(np.int32(3), ids.type)  # type: ignore[arg-type]
    assert hoist(path, literal)[:2] == ([], literal)


def test_ids_in_nested_loops_have_an_axis_each() -> None:
    def step(table: Any, xs: Any) -> Any:
        def inner(h: Any, i: Any) -> Any:
            return jnp.tanh(h + table[i]), None

        def outer(h: Any, row: Any) -> Any:
            return lax.scan(jax.checkpoint(inner), h, row + 1)[0], None

        return lax.scan(outer, jnp.zeros(3), xs)[0]

    _, _, (value,) = hoisted(step, TABLE, IDS)
    np.testing.assert_array_equal(value.reshape(IDS.shape), IDS + 1)


def test_ids_of_an_inner_loop_that_the_outer_one_leaves_alone() -> None:
    def step(table: Any, xs: Any) -> Any:
        def inner(h: Any, i: Any) -> Any:
            return jnp.tanh(h + table[i]), None

        return lax.scan(lambda h, _: (lax.scan(inner, h, xs * 2)[0], None), jnp.zeros(3), None, length=4)[0]

    _, atom, (value,) = hoisted(step, TABLE, IDS[:, 0])
    assert atom.shape[0] == len(IDS), "one axis, of the inner loop"
    np.testing.assert_array_equal(value.reshape(-1), IDS[:, 0] * 2)


def test_ids_through_a_remat_around_a_loop() -> None:
    def step(table: Any, xs: Any, shift: Any) -> Any:
        def loop(h: Any, xs: Any, shift: Any) -> Any:
            def body(carry: Any, i: Any) -> Any:
                h, seen = carry
                return (jnp.tanh(h + table[(i + seen + shift) % 7].sum()), seen + 1), None

            return lax.scan(body, (h, 0), xs)[0][0]

        return jax.checkpoint(loop)(jnp.zeros(()), xs, shift)

    _, _, (value,) = hoisted(step, TABLE, IDS, jnp.int32(2))
    np.testing.assert_array_equal(value.reshape(IDS.shape), (IDS + np.arange(3)[:, None] + 2) % 7)


def test_nothing_else_is_hoisted_with_the_ids() -> None:
    """An effect of the loop happens where the loop is, not where its ids are computed as well."""
    seen: list[int] = []
    block = traced(_noisy_scan(seen), TABLE, START)
    equations, *_ = hoist(*next(lookups(block)))
    assert not any(e.effects for e in Block((), tuple(equations), ()).walk())


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint])
def test_a_planned_step_tells_what_the_plain_one_tells(wrap: Any) -> None:
    """Callbacks in a loop whose ids are computed ahead of it: as often as in plain JAX."""
    seen: list[int] = []

    def loss(table: jax.Array, ids: jax.Array) -> jax.Array:
        def body(h: Any, i: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), i.sum())
            return jnp.tanh(h + table[i].sum()), None

        return lax.scan(wrap(body), jnp.zeros(()), ids)[0]

    def step(table: jax.Array, ids: jax.Array) -> Any:
        value, grad = jax.value_and_grad(loss)(table, ids)
        return table - 0.1 * grad, value

    def told(fun: Callable[..., Any]) -> list[int]:
        seen.clear()
        fun(TABLE, IDS)
        jax.effects_barrier()
        return sorted(seen)

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    assert told(planned) == told(jax.jit(step))
    assert planned.plan is not None and planned.plan.lifts


def test_effects_happen_once_where_ids_come_out_of_another_loop() -> None:
    """The first loop is needed in part ahead of the second: by the ids it computes."""
    seen: list[int] = []

    def step(table: jax.Array, ids: jax.Array) -> Any:
        def walk(carry: Any, i: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), i[0])
            k, total = carry
            return ((k + i) % 7, total + table[0].sum()), None

        (last, total), _ = lax.scan(walk, (ids[0], jnp.zeros(())), ids)
        return table - 0.1 * jax.grad(lambda t: jnp.sum(t[last] ** 2))(table), total

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    new, total = planned(TABLE, IDS)
    jax.effects_barrier()
    assert sorted(seen) == sorted(IDS[:, 0].tolist())
    close([new, total], jax.jit(step)(TABLE, IDS))


# --- copies ---


def test_a_clone_has_variables_of_its_own() -> None:
    block = traced(_over(lambda i, k, c: i + k, jax.checkpoint), TABLE, IDS, IDS[0])
    copy, env = clone(block)
    both: set[Any] = set()
    verify_block(block, both, "block")
    verify_block(copy, both, "its copy")
    assert count_equations(copy) == count_equations(block)
    assert set(env) >= set(block.inputs)
    close(run(copy, TABLE, IDS, IDS[0]), run(block, TABLE, IDS, IDS[0]))


def test_a_clone_takes_the_operands_it_is_given() -> None:
    block = traced(lambda x, y: x * 2 + y, 1.0, 2.0)
    three = Literal(np.float32(3), block.inputs[0].type)
    copy, _ = clone(block, {block.inputs[0]: three})
    assert len(copy.inputs) == 1
    close(run(copy, jnp.float32(1)), [7.0])


def test_independent_outputs_share_nothing_that_is_rounded() -> None:
    """Keys may be shared, and inputs; floats, loops that have some and what is derived from these may not."""

    def make(key: Any, x: Any) -> list[Any]:
        first, second = jax.random.split(key)
        drawn, whole = jax.random.normal(first, (8, 3)), jnp.arange(8)
        scale = jnp.exp(x).sum()
        rounded = jnp.floor(x * 7).astype(jnp.int32)
        looped = lax.fori_loop(0, 3, lambda k, y: y + k * lax.convert_element_type(jnp.sin(1.0 * k), jnp.int32), 0)
        return [
            *(drawn * 2, drawn + 1, jax.random.normal(second, (8, 3)), jax.random.uniform(second, (4,))),
            *(
                x,
                x + whole,
                x - whole,
                jnp.zeros(5),
                scale * 2,
                jnp.cos(scale),
                rounded + 1,
                rounded * 2,
                looped,
                -looped,
            ),
        ]

    block = traced(make, jax.random.key(0), jnp.ones(8))
    assert independent_outputs(block) == [[0, 1], [2], [3], [4], [5], [6], [7], [8, 9], [10, 11], [12, 13]]
    effects = traced(lambda x: (jax.debug.print("{}", x), x + 1, x - 1)[1:], jnp.ones(2))
    assert independent_outputs(effects) == [[0, 1]]


def test_uniform_outputs_are_one_number() -> None:
    block = traced(
        lambda x: (jnp.full((4, 2), 0.5), jnp.zeros(3), jnp.full((9,), x * 2), jnp.arange(4), x), jnp.ones(())
    )
    assert {k: run(dataclasses.replace(block, outputs=(a,)), 3.0) for k, a in uniform_outputs(block).items()} == {
        0: [0.5],
        1: [0.0],
        2: [6.0],
    }
