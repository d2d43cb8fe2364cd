"""`measure_alpha`: the share of each table's rows that workers touch, alone and together, over several batches.

Parallax (5.3.1) calls alpha the sparsity. n workers touch fewer than n times the rows of one, as they share frequent
rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import ArgumentsError, RecompileWarning
from autopar.ir.figures import RowGrowth
from autopar.ir.program import Program
from autopar.ir.rowspace import RowIds, RowSpace
from autopar.jax_types import Leaf, Pytree
from autopar.measure.alpha import growth_of, id_reader, rows_together
from autopar.passes.choosing.capacity import device_ids
from autopar.planning.plan import on_devices
from autopar.run.object_step import AnyStep, unwrapped
from autopar.run.planned_step import PlannedStep
from autopar.run.step import ParallelStep


@dataclass(frozen=True, slots=True)
class TableAlpha:
    """The rows of a table that workers touch in a step.

    Attributes:
      path: The table's path.
      growth: Number of workers -> distinct rows that they touch together.
      workers, per_machine: Number of workers that were measured, and of workers on one machine.
      worker, machine, union: Distinct rows that one worker touches, that a machine's workers touch together, and that
        all measured workers do; means over workers and machines. `machine` is predicted if fewer workers were measured
        than a machine has.
    """

    path: str
    growth: RowGrowth
    workers: int
    per_machine: int
    worker: float
    machine: float
    union: float

    @property
    def share(self) -> float:
        """The share of rows that all measured workers touch together."""
        return self.union / self.growth.extent

    def rows_at(self, n: float) -> float:
        """Returns the expected number of distinct rows that n workers touch together."""
        return self.growth.rows(n)

    def alpha_at(self, n: float) -> float:
        """Returns `rows_at` as a share of all rows; for one worker the paper's alpha."""
        return self.growth.rows(n) / self.growth.extent


@dataclass(frozen=True, slots=True)
class Alphas:
    """The result of `measure_alpha`; `str()` is a table."""

    step: str
    tables: tuple[TableAlpha, ...]

    def table(self, path: str) -> TableAlpha:
        """Returns the figures of one table.

        Raises:
          ArgumentsError: that table wasn't measured.
        """
        table = next((t for t in self.tables if t.path == path), None)
        if table is None:
            shown = ", ".join(t.path for t in self.tables) or "none"
            raise ArgumentsError(f"alpha of {path!r} wasn't measured; that of these tables of {self.step} was: {shown}")
        return table

    def __str__(self) -> str:
        workers, each = (self.tables[0].workers, self.tables[0].per_machine) if self.tables else (0, 0)
        columns = ["table", "rows", "a worker", f"a machine of {each}", f"all {workers}", "k", "beta", "off by"]
        lines = [columns, *map(_line, self.tables)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([f"alpha of {self.step}: distinct rows that workers touch in a step, together", *shown])


def measure_alpha(
    step: AnyStep, batches: Iterable[Pytree], *, state: Pytree = None, workers: int = 1, per_machine: int = 1
) -> Alphas:
    """Measures the rows of each table that one worker touches, that a machine's workers touch together, and that n do.

    Only the equations that ids depend on are run. Rows are counted for 1, 2, 4, ... workers up to all of them, as means
    over disjoint groups, and fitted (`autopar.measure.alpha`): `alpha_at(48)` has an answer after 8 batches.

    Args:
      step: The step that `parallelize` returned.
      batches: One batch a worker; all are read. Without `state` each is a tuple of all of the step's arguments.
      state: The step's first argument, if the batch is its second and last one. Shapes will do unless ids depend on it
        (on a key in it, say).
      workers: Number of workers that divide each batch, as the step divides its batches over devices; each part counts
        as a worker's batch.
      per_machine: Workers of a machine.

    Returns:
      `Alphas`, with each table's `worker`, `machine` and `union` in rows, `rows_at(n)`, `alpha_at(n)` and `growth`.

    Raises:
      ArgumentsError: fewer than two workers' batches, batches that the workers can't divide, or ids that depend on a
        mere shape.

    Example:
      >>> import jax, numpy as np, autopar
      >>> step = autopar.parallelize(lambda table, ids: table.at[ids].add(-0.1 * table[ids]))
      >>> state = jax.ShapeDtypeStruct((50, 8), "float32")
      >>> found = autopar.measure_alpha(step, np.arange(24).reshape(6, 4), state=state)
      >>> table = found.tables[0]
      >>> table.worker, table.union, table.share
      (4.0, 24.0, 0.48)
    """
    if workers < 1 or per_machine < 1:
        raise ArgumentsError(f"workers={workers}, per_machine={per_machine}: one at least")
    reader = _Reader(step, workers)
    for k, batch in enumerate(batches):
        if state is None and not isinstance(batch, tuple):
            raise ArgumentsError(
                f"measure_alpha: without state= each of the batches is a tuple of all of the step's arguments; "
                f"number {k} is a {type(batch).__name__}"
            )
        reader.read(batch if state is None else (state, batch), k)
    if reader.workers < 2:
        raise ArgumentsError(
            f"measure_alpha takes the batches of two workers at least, to see how rows grow with workers, not of "
            f"{reader.workers}: give more batches, or say over how many workers each is spread (workers=)"
        )
    return Alphas(step.name, tuple(measured.alpha(per_machine) for measured in reader.tables.values()))


@dataclass(eq=False)
class _Measured:
    """A table's distinct rows by worker, and the workers' numbers of ids."""

    path: str
    extent: int
    requested: list[np.ndarray]
    ids: list[int]

    def alpha(self, per_machine: int) -> TableAlpha:
        growth = growth_of(self.requested, self.extent, float(np.mean(self.ids)))
        assert growth is not None, "there are two workers at least"
        count = len(self.requested)
        machine = rows_together(self.requested, per_machine) if per_machine <= count else growth.rows(per_machine)
        rows = (rows_together(self.requested, 1), machine, rows_together(self.requested, count))
        return TableAlpha(self.path, growth, count, per_machine, *rows)


class _Reader:
    """Reads the rows of calls, whose shapes may differ, and whose batches `workers` workers divide."""

    def __init__(self, step: AnyStep, workers: int) -> None:
        self.tables: dict[str, _Measured] = {}
        self.workers = 0
        self._step, self._spread = step, workers
        self._own: dict[ParallelStep, ParallelStep] = {}
        self._readers: dict[PlannedStep, list[tuple[RowSpace, RowIds, Callable[..., Leaf]]]] = {}

    def read(self, args: Sequence[Pytree], number: int) -> None:
        """Reads the rows of a call; `number`: its index among the batches."""
        pure, arrays, named = unwrapped(self._step, args, {}, "measure_alpha")
        own = self._own.setdefault(pure, on_devices(pure, self._spread))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompileWarning)  # nothing is compiled
            planned = own.planned_for(*arrays, **named)
        leaves = own.leaves(arrays, named)
        program = planned.compiled.analysed
        is_spread = not planned.compiled.bound.uneven and any(v in program.batch for v in program.block.inputs)
        if self._spread > 1 and not is_spread:
            raise ArgumentsError(
                f"batch {number} of measure_alpha isn't spread over {self._spread} workers: its examples must be a "
                "multiple of them"
            )
        if planned not in self._readers:
            self._readers[planned] = list(_readers(program))
        for space, ids, run in self._readers[planned]:
            flat = run(leaves)
            if flat is None:
                raise ArgumentsError(
                    f"batch {number} of measure_alpha: the ids of {program.inputs[space.tables[0]].path} aren't known: "
                    "they depend on what is only a shape, or on a callback. Give arrays (state= as well, if ids are "
                    "drawn by a key in it)"
                )
            rows = device_ids(flat, ids.batched, self._spread, space.extent)
            for table in space.tables:
                path = program.inputs[table].path
                measured = self.tables.setdefault(path, _Measured(path, space.extent, [], []))
                measured.requested += rows
                measured.ids += [ids.count_on(self._spread)] * len(rows)
        self.workers += self._spread


def _readers(program: Program) -> Iterable[tuple[RowSpace, RowIds, Callable[..., Leaf]]]:
    for space in program.facts.spaces:
        if space.accesses:
            ids = program.ids[space.family]
            yield space, ids, id_reader(program, ids)


def _line(table: TableAlpha) -> list[str]:
    extent, growth = table.growth.extent, table.growth
    rows = [f"{rows:.0f} ({rows / extent:.2%})" for rows in (table.worker, table.machine, table.union)]
    return [table.path, str(extent), *rows, f"{growth.k:.3g}", f"{growth.beta:.3f}", f"{growth.residual:.1%}"]
