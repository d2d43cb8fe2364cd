"""Measures alpha, the share of a table's rows that a batch touches, on an example batch.

Only the equations that the ids depend on are run (no forward pass, no gradient). If the ids depend on arguments of
unknown value, the number of ids is an upper bound. Parallax (5.3.1) calls alpha the sparsity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import those_that
from autopar.backends.emit import emit
from autopar.backends.global_arrays import local
from autopar.ir.figures import Alpha, RowGrowth
from autopar.ir.program import Atom, Block, Equation, Program
from autopar.ir.rowspace import RowIds, RowSpace
from autopar.ir.slicing import eliminate_dead, needed_equations
from autopar.jax_types import Leaf
from autopar.passes.choosing.capacity import device_ids
from autopar.tables.kinds import materialize

#: Operations that only move elements.
_MOVES = those_that(lambda p: p.moves) | {"select_n"}


def batch_alpha(program: Program, space: RowSpace, leaves: Sequence[Leaf] | None, devices: int) -> Alpha:
    """Measures alpha of one family, for all devices together (the union) and for one. `leaves`: as in `example_ids`."""
    ids: RowIds = program.ids[space.family]
    ids_of_examples = example_ids(program, ids, leaves)
    extent = space.extent
    if ids_of_examples is None:
        return most(ids, extent, devices)
    return alpha_of(device_ids(ids_of_examples, ids.batched, devices, extent), extent, ids.count)


def most(ids: RowIds, extent: int, devices: int) -> Alpha:
    """Returns the upper bound of alpha: all ids are different."""
    return Alpha(min(extent, ids.count), extent, ids.count, False, min(extent, ids.count_on(devices)))


def alpha_of(requested: Sequence[np.ndarray], extent: int, ids: int) -> Alpha:
    """Returns alpha of the distinct rows that each device asks for, from `ids` ids."""
    union = np.unique(np.concatenate(requested))
    return Alpha(union.size, extent, ids, True, float(np.mean([rows.size for rows in requested])))


def growth_of(requested: Sequence[np.ndarray], extent: int, ids: float) -> RowGrowth | None:
    """Fits the growth of rows through the distinct rows that each of several workers asks for; None for one worker.

    A point for 1, 2, 4, ... and all workers averages over disjoint groups of that many. `ids`: of a worker, duplicates
    included.
    """
    if len(requested) < 2:
        return None
    sizes = sorted({*(1 << k for k in range(len(requested).bit_length())), len(requested)})
    return fit_growth(extent, ids, [(n, rows_together(requested, n)) for n in sizes])


def rows_together(requested: Sequence[np.ndarray], n: int) -> float:
    """Averages the number of rows that n of the workers touch together, over groups of neighbours."""
    groups = [requested[k : k + n] for k in range(0, len(requested) - n + 1, n)]
    return float(np.mean([np.unique(np.concatenate(group)).size for group in groups]))


def example_ids(program: Program, ids: RowIds, leaves: Sequence[Leaf] | None) -> list[np.ndarray] | None:
    """Returns the flat ids of a family in an example, int32; None if unknown. Collective for global leaves.

    `leaves`: flat arguments; None (or a ShapeDtypeStruct, or a tracer) for unknown values.
    """
    return None if leaves is None else id_reader(program, ids)(leaves)


def ids_by_family(
    program: Program, families: Mapping[int, RowIds], leaves: Sequence[Leaf] | None
) -> dict[int, Sequence[np.ndarray]]:
    """Returns `example_ids` of those families for which they are known, by one program for all of these."""
    if leaves is None:
        return {}
    programs = {family: id_program(program, ids) for family, ids in families.items()}
    known = [family for family, (block, used) in programs.items() if _is_known(block, used, leaves)]
    found = id_reader(program, *(families[family] for family in known))(leaves) if known else []
    assert found is not None, "of each family they are known"
    flat = iter(found)
    return {family: list(itertools.islice(flat, len(families[family].results))) for family in known}


def example_value(program: Program, atom: Atom, leaves: Sequence[Leaf] | None) -> np.ndarray | None:
    """Returns a value of a step in an example; None if it is unknown, or needs the state or a model. `leaves`: as in
    `example_ids`."""
    block, used = _reads(program, (), (atom,))
    of_state = any(u and input_.role == "state" for u, input_ in zip(used, program.inputs, strict=True))
    found = None if leaves is None or of_state or not is_exact(block) else _reader(block, used)(leaves)
    return None if found is None else found[0]


def _is_known(block: Block, used: Sequence[bool], leaves: Sequence[Leaf]) -> bool:
    needed = (x for x, u in zip(leaves, used, strict=True) if u)
    is_unknown = any(x is None or isinstance(x, (jax.ShapeDtypeStruct, jax_compat.Tracer)) for x in needed)
    return not is_unknown and not any(e.effects for e in block.walk())


def id_reader(program: Program, *families: RowIds) -> Callable[[Sequence[Leaf]], list[np.ndarray] | None]:
    """Compiles `example_ids` for many examples; ids of several families are concatenated in their order."""
    return _reader(*id_program(program, *families))


def _reader(block: Block, used: Sequence[bool]) -> Callable[[Sequence[Leaf]], list[np.ndarray] | None]:
    inputs = tuple(v for v, u in zip(block.inputs, used, strict=True) if u)
    run = jax.jit(emit(Block(inputs, block.equations, block.outputs)))

    def read(leaves: Sequence[Leaf]) -> list[np.ndarray] | None:
        if not _is_known(block, used, leaves):
            return None
        needed = [x for x, u in zip(leaves, used, strict=True) if u]
        with jax_compat.outside_traces():  # the step may be called while JAX traces another one
            return [np.asarray(x) for x in run(*map(local, materialize(needed, copy=False)))]

    return read


def id_program(program: Program, *families: RowIds) -> tuple[Block, list[bool]]:
    """Returns a program from the step's inputs to the flat ids of families, and which inputs it reads."""
    own = tuple(e for ids in families for e in ids.equations)
    return _reads(program, own, tuple(v for ids in families for v in ids.results))


def _reads(program: Program, added: tuple[Equation, ...], results: tuple[Atom, ...]) -> tuple[Block, list[bool]]:
    """Returns a program of what results need, and which inputs it reads. `added`: equations behind the step's."""
    roots = [*results, *(a for e in added for a in e.inputs)]
    needed = needed_equations(program.block.equations, roots)
    return eliminate_dead(Block(program.block.inputs, (*needed, *added), results))


def is_exact(block: Block) -> bool:
    """Returns whether a program of ids returns the same ids however it is compiled, as no float is rounded in it."""
    return all(_moves(e) or not any(jax_compat.is_float(v.dtype) for v in e.outputs) for e in block.walk())


def _moves(equation: Equation) -> bool:
    if equation.op == "convert_element_type":
        return not jax_compat.is_float(equation.inputs[0].dtype)
    return equation.op in _MOVES


def id_inputs(program: Program) -> list[bool]:
    """Returns which of the step's inputs the ids of any table depend on."""
    _, used = id_program(program, *(program.ids[space.family] for space in program.facts.spaces))
    return used


# --- the growth of rows: how many distinct rows n workers touch together, from what a few of them touch ---
#
# Heaps' law (Heaps, "Information Retrieval", 1978, 7.5): m words of a text have about k m^beta distinct ones. It has no
# bound, and a table has V rows. So H is the number of distinct rows of an unbounded table, and of V rows there are
#
#     rows = V (1 - exp(-H / V)),  H = k m^beta,  m = n * ids of a worker
#
# which is Heaps' law while few rows are touched, never exceeds V, and is exact for uniformly drawn ids (beta is 1).
# Fitted to 1, 2, 4 and 8 workers it is 1% below to 9% above what 48 touch; Heaps' law cut off at V is up to 47% above
# (ids by Zipf's law, exponents 0 to 1.5, V of 10^3 to 10^6, workers of 64 to 20,000 ids).


#: Fewest untouched rows in the fit, whose logarithm must exist.
_LEFT = 0.5


def fit_growth(extent: int, ids: float, points: Sequence[tuple[float, float]]) -> RowGrowth:
    """Fits the growth through points (n, rows that n workers touch together), by least squares in log space.

    Args:
      extent: V, rows of the table.
      ids: Ids of a worker.
      points: At least two, of different n.

    >>> round(fit_growth(1000, 10, [(1, 9.955), (2, 19.811)]).rows(100))
    632
    """
    if len({n for n, _ in points}) < 2:
        raise ValueError(f"growth is fitted to two numbers of workers at least, not to {list(points)}")
    if any(n <= 0 or not 0 <= rows <= extent for n, rows in points):
        raise ValueError(f"workers are positive and touch 0 to {extent} rows, not {list(points)}")
    kept = tuple((n, float(rows)) for n, rows in points)
    touched = [(n, rows) for n, rows in kept if rows]  # 0 (padding alone) has no logarithm
    if not touched:
        return RowGrowth(extent, ids, kept, 0.0, 1.0, 0.0)
    drawn = [math.log(n * ids) for n, _ in touched]
    endless = [math.log(_endless(extent, rows)) for _, rows in touched]
    beta, log_k = np.polyfit(drawn, endless, 1) if len(touched) > 1 else (1.0, endless[0] - drawn[0])
    growth = RowGrowth(extent, ids, kept, math.exp(log_k), float(beta), 0.0)
    return replace(growth, residual=max(abs(growth.rows(n) / rows - 1) for n, rows in touched))


def _endless(extent: int, rows: float) -> float:
    return -extent * math.log1p(-min(rows, extent - _LEFT) / extent)
