"""Keeps dense leaves on hosts: the step pulls all of their rows, and pushes gradients to all of them.

  x @ w        ->  x @ w[arange(n)]
  w - lr * g   ->  w - lr * zeros.at[arange(n)].add(g)

Elementwise functions of the leaf, its optimizer slots and its gradient alone belong to the rows' owners (the update,
and reductions of it: a norm). Other equations that read such a value look all of its rows up; other values that are
read there are pushed. Neither changes a value, so the result is the step's wherever the border is. From here on the
leaf is a table of which every step touches all rows, and later passes keep it on hosts like others. There are no
untouched rows, and nothing is deferred.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE
from autopar.errors import StrategyError
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.strategy import Strategy, choice_for
from autopar.ir.writer import expand
from autopar.jax_types import Leaf, Pytree

#: Fewest rows of an axis that is divided over ranks, if there is such an axis.
_ENOUGH_ROWS = 64


def pull_whole(program: Program, strategy: Strategy, *, all_dense: bool = False) -> tuple[Program, str]:
    """Inserts lookups and pushes of all rows of the dense leaves that a strategy puts on hosts.

    `program`: a classified program. `strategy`: the user's. A pattern means dense leaves if it puts no table there.
    `all_dense`: those that it leaves to "auto" are on hosts as well, if they can be. Raises StrategyError if a named
    leaf can't be there.
    """
    inputs = program.block.inputs
    tables = {k for k, _ in program.tables}
    pulled: dict[int, int] = {}
    parameters: list[int] = []
    for k, is_named in _wanted(program, strategy, all_dense=all_dense).items():
        if k in pulled:  # a slot of another one
            continue
        reason, path, layout = _refusal(inputs[k]), program.inputs[k].path, program.inputs[k].layout
        if reason is None:
            axis = _row_axis(inputs[k].shape) if layout is None else layout[1]
            update = _Update.of(program, k, axis)
            if not tables.isdisjoint(update.leaves):  # it is a slot of a table
                continue
            changed = update.rewritten()
            if changed is not None:
                program = changed
                pulled |= dict.fromkeys(sorted(update.leaves), axis)
                parameters.append(min(update.leaves, key=lambda k: (len(program.inputs[k].path), k)))
                continue
            reason = "the step reads nothing of it but for its own new value, so that there is nothing to pull"
        if is_named and layout is None:
            raise StrategyError(f"strategy: {path} can't be on hosts: {reason}. Leave it to 'auto'")
    if not pulled:
        return program, ""
    candidates = {**dict(program.candidates), **pulled}
    program = replace(
        program,
        tables=tuple(sorted((*program.tables, *((k, pulled[k]) for k in parameters)))),
        candidates=tuple(sorted(candidates.items())),
        pulled=program.pulled | {inputs[k] for k in pulled},
        pulled_tables={inputs[k]: pulled[k] for k in parameters},
    )
    return program, f"; dense, and pulled from hosts: {', '.join(program.inputs[k].path for k in parameters)}"


def _wanted(program: Program, strategy: Strategy, *, all_dense: bool) -> dict[int, bool]:
    """Finds leaves that are to be on hosts although they aren't looked up by rows: leaf -> is it named itself."""
    if not isinstance(strategy, Mapping) and not all_dense:
        return {}
    tables = {program.inputs[k].path for k, _ in program.tables}
    of_tables = {"*", "**", None, *(choice_for(strategy, path).pattern for path in tables)}
    read = {a for e in program.block.equations for a in e.inputs}
    wanted: dict[int, bool] = {}
    for k, (leaf, input_) in enumerate(program.named_inputs):
        choice = choice_for(strategy, input_.path)
        is_open = all_dense and (choice.method == "auto" or choice.where == "hosts")
        if input_.role not in ("state", "table") or input_.path in tables or not (is_open or choice.where == "hosts"):
            continue
        is_named = choice.pattern == input_.path
        if leaf in read and (is_open or is_named or choice.pattern not in of_tables):
            wanted[k] = is_named
    return wanted


def _refusal(leaf: Var) -> str | None:
    if not isinstance(leaf.type, ArrayType) or not jax_compat.is_float(leaf.dtype):
        return f"it is {leaf.type}, and hosts keep floating-point parameters"
    return None if max(leaf.shape, default=1) > 1 else "it has a single element, and hosts keep rows"


def _row_axis(shape: Sequence[int]) -> int:
    """Returns the axis of rows, the first one with enough of them or the longest.

    It is the same for any number of ranks, so that a checkpoint fits all.
    """
    longest = max(range(len(shape)), key=lambda d: (shape[d], -d))
    return next((d for d, size in enumerate(shape) if size >= _ENOUGH_ROWS), longest)


@dataclass(frozen=True, slots=True)
class _AllRows:
    """Looks up all rows of an array, or pushes it into zeros; either way the result equals the array."""

    axis: int
    is_push: bool

    def __call__(self, array: Leaf, numbers: Leaf) -> Pytree:
        window = tuple(d for d in range(array.ndim) if d != self.axis)
        if array.dtype == bool:  # masks can't be added
            return self(array.astype(jnp.uint8), numbers) != 0
        if self.is_push:
            dimensions = jax.lax.ScatterDimensionNumbers(window, (self.axis,), (self.axis,))
            return jax.lax.scatter_add(jnp.zeros(array.shape, array.dtype), numbers, array, dimensions)
        dimensions = jax.lax.GatherDimensionNumbers(window, (self.axis,), (self.axis,))
        sizes = [1 if d == self.axis else size for d, size in enumerate(array.shape)]
        return jax.lax.gather(array, numbers, dimensions, sizes, mode="clip")


@dataclass(eq=False)
class _Update:
    """Finds the part of a step that belongs to the owners of a leaf's rows."""

    program: Program
    leaves: set[int]  #: The leaf, and its followers: slots, moving averages.
    axis: int  #: The row axis.
    shape: tuple[int, ...]  #: Shape of the leaf, its slots and its gradient.
    of_rows: set[Atom] = field(default_factory=set)  #: Elementwise functions of the leaves and of gradients.
    sources: set[Atom] = field(default_factory=set)  #: Other values that these read.
    scalars: set[Atom] = field(default_factory=set)  #: Values that are a scalar everywhere.
    made: dict[Atom, Equation] = field(default_factory=dict)  #: Value -> its equation.
    readers: dict[Atom, list[Equation]] = field(default_factory=dict)  #: Value -> its readers.

    @staticmethod
    def of(program: Program, leaf: int, axis: int) -> _Update:
        update = _Update(program, {leaf}, axis, program.block.inputs[leaf].shape)
        for equation in program.block.equations:
            update.made.update(dict.fromkeys(equation.outputs, equation))
            for atom in dict.fromkeys(equation.inputs):
                update.readers.setdefault(atom, []).append(equation)
            is_repeated = equation.op == "broadcast_in_dim" or update._is_elementwise(equation)
            if is_repeated and all(map(update._is_scalar, equation.inputs)):
                update.scalars.update(equation.outputs)
        update._find_leaves()
        update._find_reduced()
        return update

    def _is_alike(self, atom: Atom) -> bool:
        return isinstance(atom.type, ArrayType) and atom.shape == self.shape and not jax_compat.is_key(atom.dtype)

    def _is_elementwise(self, equation: Equation) -> bool:
        is_plain = equation.op in ELEMENTWISE and not equation.effects
        operands = (a.shape == () or self._is_alike(a) for a in equation.inputs)
        return is_plain and self._is_alike(equation.outputs[0]) and all(operands)

    def _is_scalar(self, atom: Atom) -> bool:
        return atom.shape == () or atom in self.scalars

    def _find_leaves(self) -> None:
        """Finds the leaves, and the values on which their new values depend."""
        block, new = self.program.block, self.program.new_states
        states = {v: k for k, v in enumerate(block.inputs) if k in new and self._is_alike(v)}
        origins = self._origins(states)
        updates = {k: self._made_of(block.outputs[new[k]], origins) for k in states.values()}
        count = 0
        while count < len(self.leaves):
            count = len(self.leaves)
            found = [updates[k] for k in self.leaves if k in updates]
            self.of_rows = {block.inputs[k] for k in self.leaves}.union(*(values for values, _ in found))
            self.sources = set[Atom]().union(*(sources for _, sources in found))
            self.leaves |= {states[a] for a in self.of_rows if isinstance(a, Var) and a in states}
            self.leaves |= {k for k, (values, _) in updates.items() if not values.isdisjoint(self.of_rows)}

    def _origins(self, states: Mapping[Var, int]) -> dict[Atom, frozenset[Atom]]:
        """Maps each value of the leaf's shape to its elementwise origins: leaves, and values of another origin.

        A function of two such values and no leaf counts as an origin itself, so that one is pushed in place of two.
        """
        origins: dict[Atom, frozenset[Atom]] = {v: frozenset([v]) for v in states}
        for equation in self.program.block.equations:
            found: frozenset[Atom] | None = None
            if self._is_elementwise(equation):
                alike = [a for a in equation.inputs if not self._is_scalar(a)]
                found = frozenset(o for a in alike for o in origins.get(a, frozenset([a])))
                found = found if len(found) <= 1 or not found.isdisjoint(states) else None
            for out in filter(self._is_alike, equation.outputs):
                origins[out] = frozenset([out]) if found is None else found
        return origins

    def _made_of(self, root: Atom, origins: Mapping[Atom, frozenset[Atom]]) -> tuple[set[Atom], set[Atom]]:
        """Finds the values of a leaf's elementwise update, and the other values that it reads."""
        values: set[Atom] = set()
        sources: set[Atom] = set()
        waiting = [root]
        while waiting:
            atom = waiting.pop()
            if atom is not root and self._is_scalar(atom):
                continue
            is_made = atom in self.made and origins[atom] != {atom} and not self._is_scalar(atom)
            if is_made or atom in self._states:
                fresh = atom not in values
                values.add(atom)
                waiting += self.made[atom].inputs if is_made and fresh else ()
            else:
                sources.add(atom)
        return values, sources

    @functools.cached_property
    def _states(self) -> set[Var]:
        return {self.program.block.inputs[k] for k in self.program.new_states}

    def _find_reduced(self) -> None:
        """Finds values that are only reduced over all rows, or converted to fewer bytes before all of it is read."""
        known, results = self.of_rows | self.sources, set(self.program.block.outputs)
        eligible: list[Equation] = []
        for equation in self.program.block.equations:
            alike = [a for a in equation.inputs if not self._is_scalar(a)]
            if alike and self._is_elementwise(equation) and all(a in known for a in alike):
                eligible += [] if equation.outputs[0] in known else [equation]
                known.update(equation.outputs)
        for equation in reversed(eligible):
            (out,) = equation.outputs
            readers = self.readers.get(out, [])
            is_reduced = bool(readers) and all(map(self._is_of_rows, readers))
            if out not in results and (is_reduced or _narrows(equation)):
                self.of_rows.add(out)

    def _is_of_rows(self, equation: Equation) -> bool:
        is_reduction = equation.op in REDUCTION_PRIMITIVES and self.axis in equation.params["axes"]
        return is_reduction or any(v in self.of_rows for v in equation.outputs)

    def rewritten(self) -> Program | None:
        """Returns the program with lookups and pushes; None if nothing is pulled."""
        block = self.program.block
        last = block.equations[-1]
        count = self.shape[self.axis]
        equations = expand(lambda: jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0), last, ())
        numbers = equations[-1].outputs[0]
        moved: dict[tuple[Atom, bool], Atom] = {}
        pushed: set[Var] = set()

        def all_rows(atom: Atom, like: Equation, *, is_push: bool) -> Atom:
            if (atom, is_push) not in moved:
                made = expand(_AllRows(self.axis, is_push), like, (atom, numbers), again=True)
                equations.extend(made)
                moved[atom, is_push] = made[-1].outputs[0]
                pushed.update(v for e in made if is_push and e.op == "scatter-add" for v in e.outputs)
            return moved[atom, is_push]

        def seen(atom: Atom, like: Equation, *, by_owners: bool) -> Atom:
            if by_owners and atom in self.sources:
                return all_rows(atom, like, is_push=True)
            return all_rows(atom, like, is_push=False) if atom in self.of_rows and not by_owners else atom

        for equation in block.equations:
            by_owners = self._is_of_rows(equation)
            inputs = tuple(seen(a, equation, by_owners=by_owners) for a in equation.inputs)
            is_same = all(a is b for a, b in zip(inputs, equation.inputs, strict=True))
            equations.append(equation if is_same else replace(equation, inputs=inputs))
        outputs: list[Atom] = []
        for atom, output in zip(block.outputs, self.program.outputs, strict=True):
            is_input = isinstance(atom, Var) and atom in block.inputs
            outputs.append(atom if is_input else seen(atom, last, by_owners=output.state in self.leaves))
        if all(is_push for _, is_push in moved):
            return None
        changed = Block(block.inputs, tuple(equations), tuple(outputs))
        return replace(self.program, block=changed, pulled=self.program.pulled | pushed)


def _narrows(equation: Equation) -> bool:
    return (
        equation.op == "convert_element_type" and equation.outputs[0].dtype.itemsize < equation.inputs[0].dtype.itemsize
    )
