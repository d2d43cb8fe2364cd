"""Lookups behind reshapes, and scatters there, read and write the same in the table itself, out of range as well."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.backends.emit import emit
from autopar.ir.program import Block, Input, Program
from autopar.ir.slicing import eliminate_dead
from autopar.ir.trace import block_of
from autopar.passes.normalizing.follow_lookups import follow_reshapes

#: Shapes of tables, and the shapes that they are given.
SHAPES = [
    ((12, 4), (3, 4, 4)),
    ((12, 4), (24, 2)),
    ((12, 4), (6, 8)),
    ((12, 4), (48,)),
    ((12, 4), (2, 6, 2, 2)),
    ((12, 4), (1, 12, 4)),
    ((12, 4), (6, 2, 4, 1)),
    ((12,), (3, 4)),
    ((12, 2, 6), (4, 3, 12)),
    ((12, 2, 6), (24, 3, 2)),
]
MODES = ("fill", "clip", "promise_in_bounds")


def _made(fun: Any, *args: Any) -> tuple[Block, Block, int]:
    block = block_of(jax.make_jaxpr(fun)(*args))
    inputs = (Input("table", "state"), *(Input(str(k), "batch") for k in range(len(args) - 1)))
    program, count = follow_reshapes(Program(block, inputs, ()))
    return block, eliminate_dead(program.block)[0], count


def _index(axes: Any, ids: Any, rank: int) -> Any:
    return tuple(ids[..., axes.index(d)] if d in axes else slice(None) for d in range(rank))


@pytest.mark.parametrize(("table", "shape"), SHAPES)
def test_all_places_in_all_modes(table: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=table).astype(np.float32)
    written = 0
    several = [axes for n in range(1, len(shape) + 1) for axes in itertools.combinations(range(len(shape)), n)]
    for axes, mode in zip(random.Random(0).sample(several, min(5, len(several))), itertools.cycle(MODES)):
        ids = np.stack([rng.integers(-2 * shape[d], 2 * shape[d], (2, 3)) for d in axes], -1).astype(np.int32)
        u = rng.normal(size=(2, 3)).astype(np.float32)

        def look(x: Any, ids: Any, u: Any, axes: Any = axes, mode: Any = mode) -> Any:
            at = x.reshape(shape).at[_index(axes, ids, len(shape))]
            found = at.get(mode=mode, fill_value=7) if mode == "fill" else at.get(mode=mode)
            zeros = jnp.zeros(shape).at[_index(axes, ids, len(shape))]
            weights = u.reshape(*u.shape, *[1] * (found.ndim - u.ndim)) if axes[0] == 0 else u.sum()
            added = zeros.add(found * weights, mode="drop" if mode == "fill" else mode)
            largest = at.max(0.25, mode="drop" if mode == "fill" else mode)
            return found, (2 * added - added).reshape(table), largest.reshape(table)

        old, new, count = _made(look, x, ids, u)
        assert count in (0, 3)
        written += count
        for a, b in zip(jax.jit(emit(old))(x, ids, u), jax.jit(emit(new))(x, ids, u), strict=True):
            np.testing.assert_array_equal(a, b)
    assert written


@pytest.mark.parametrize(
    ("table", "shape"), [((12, 4), (8, 6)), ((12, 4), (12, 2, 2)), ((6, 4), (4, 6)), ((9, 4), (6, 6))]
)
def test_what_stays(table: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Uneven parts, and rows that are whole anyway."""
    x = np.arange(math.prod(table), dtype=np.float32).reshape(table)
    assert _made(lambda x, i: x.reshape(shape)[i], x, np.arange(3))[2] == 0


def test_what_is_no_table() -> None:
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    assert _made(lambda x, i, y: (y + 1).reshape(24, 2)[i], x, np.arange(3), x)[2] == 0
    assert _made(lambda x, i: (x @ jnp.eye(4)).reshape(24, 2)[i], x, np.arange(3))[2] == 0
