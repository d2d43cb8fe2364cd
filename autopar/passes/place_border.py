"""Runs operations between a table's owners and those who look its rows up on the side that makes the rows smaller.

    table[ids][..., :8]                        ->  table[:, :8][ids]
    table[ids].astype(bfloat16)                ->  table.astype(bfloat16)[ids]
    table[ids].sum(-1)                         ->  table.sum(-1)[ids]
    table.astype(float32)[ids]                  ->  table[ids].astype(float32)
    zeros.at[ids].add(pad(g, ...))             ->  pad(zeros.at[ids].add(g), ...)
    zeros.at[ids].add(broadcast(g, ...))       ->  broadcast(zeros.at[ids].add(g), ...)

Lifting turns what is computed from a table before its lookup into work of the rows' owners, and what follows a sum of
gradients as well. Which functions of a row are sent is the cheapest cut of what the step computes from it
(`cheapest_cut`). Of gradients those parts are sent that aren't zero, and that aren't copies of others: no other choice
takes fewer bytes. A gradient's cast doesn't move, nor does what adds up overlapping parts: the sums would round
otherwise. This is Parallax's placement of operations between servers and workers (Kim et al., section 5.3.2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.bags import is_plain_access
from autopar.analysis.primitives import MOVES, PLACED_ELEMENTWISE, PRIMITIVES
from autopar.analysis.values import atom_key, params_key
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.rowspace import Access, RowSpace
from autopar.ir.slicing import eliminate_dead, in_order
from autopar.ir.writer import ZeroWriter, expand
from autopar.jax_types import Array, Leaf, Params
from autopar.passes.choosing.families import row_bytes
from autopar.passes.normalize import merge_equal

_ADDS = ("add", "add_any")
#: Operations that do the same to each part of a gradient, and leave zeros alone.
_OF_PARTS = frozenset({"convert_element_type", "neg", "copy"})


@dataclass(frozen=True, slots=True)
class Moved:
    """Operations that run at the owners of a table's rows."""

    tables: tuple[str, ...]  #: Paths of the family's tables.
    sent: str  #: What is sent: "looked_up" rows, or "gradients".
    operations: tuple[str, ...]  #: Each with its line.
    before: int  #: Bytes of a row on the wire.
    after: int
    behind: tuple[str, ...] = ()  #: Operations that are written ahead of a lookup, and run behind it.

    def __str__(self) -> str:
        sent = "send" if self.sent == "looked_up" else "are sent gradients of"
        saved = f"{sent} {self.after} B a row in place of {self.before} B"
        texts = [f"{_run(self.operations)} at the rows' owners, who {saved}"] * bool(self.operations)
        later = "" if texts else f", and the rows' owners {saved}"
        return "; ".join([*texts, *[f"{_run(self.behind)} behind the lookup{later}"] * bool(self.behind)])


def _run(operations: Sequence[str]) -> str:
    return f"{', '.join(operations)} {'run' if len(operations) > 1 else 'runs'}"


@dataclass(frozen=True, slots=True)
class Kept:
    """Operations on gradients that would change the rounding of a sum elsewhere."""

    tables: tuple[str, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.operations)
        stay = "stay where gradients are" if len(self.operations) > 1 else "stays where gradients are"
        return f"{names} {stay} made: their sum would round otherwise"


def place_border(
    program: Program, bound: ProgramPlan, analyze: Callable[[Program], Program], *, on_cpus: bool
) -> tuple[Program, Sequence[Moved | Kept]]:
    """Returns an analysed program with operations moved to the owners of rows, analysed by `analyze`, and what moved;
    itself if nothing does. `bound`: its plan; families whose rows or gradients travel by it. `on_cpus`: as of
    `row_bytes`."""
    own = [f for f in bound.families if bound.devices > 1 and not f.table.pulled and not f.table.pooled]
    travels = {f.family: f.method for f in own}
    found = list[Moved | Kept]()
    for border in (_Lookups, _Gradients) if travels else ():
        leaves = [s.leaves[0] for s in program.facts.spaces if travels.get(s.family) in border.methods]
        placed = _placed(program, leaves, border, analyze, on_cpus=on_cpus)
        if placed is None:  # one by one
            for leaf in leaves:
                program, more = _placed(program, [leaf], border, analyze, on_cpus=on_cpus) or (program, [])
                found += more
        else:
            program, more = placed
            found += more
    return program, found


def _placed(
    program: Program,
    leaves: Sequence[int],
    border: type[_Lookups | _Gradients],
    analyze: Callable[[Program], Program],
    *,
    on_cpus: bool,
) -> tuple[Program, list[Moved | Kept]] | None:
    """Returns the program with one border of some families moved, given a leaf of each, and what moved; None if another
    family is harmed, or more is sent."""
    notes, moving, block = list[Moved | Kept](), dict[int, tuple[Sequence[str], Sequence[str]]](), program.block
    spaces = {k: _space(program, k) for k in leaves}
    for k, space in spaces.items():
        one = border(replace(program, block=block), space)
        block, operations = one.run()
        moving[k] = operations, one.behind
        if kept := _told(one.kept):
            notes.append(Kept(_paths(program, space), tuple(kept)))
    if not any(any(of) for of in moving.values()):
        return program, notes
    moved = analyze(replace(program, block=block, rows=None))
    pairs = itertools.zip_longest(program.facts.spaces, moved.facts.spaces)
    if not all(old and new and _are_alike(old, new) for old, new in pairs):
        return None
    for k, (operations, behind) in moving.items():
        before, after = (
            getattr(row_bytes(p, s, p.ids[s.family], on_cpus=on_cpus), border.sent)
            for p, s in ((program, spaces[k]), (moved, _space(moved, k)))
        )
        if (operations or behind) and after >= before:
            return None
        if operations or behind:
            paths = _paths(program, spaces[k])
            notes.append(Moved(paths, border.sent, tuple(operations), before, after, tuple(behind)))
    return moved, notes


def _space(program: Program, leaf: int) -> RowSpace:
    space = program.facts.space_of(leaf)
    assert space is not None, "the leaf is a table's"
    return space


def _paths(program: Program, space: RowSpace) -> tuple[str, ...]:
    return tuple(program.inputs[k].path for k in space.tables)


def _are_alike(old: RowSpace, new: RowSpace) -> bool:
    """Returns whether a family can be planned as before."""
    pairs = ((s.family, s.leaves, s.deferred, s.depends_on, s.refusal is None) for s in (old, new))
    return next(pairs) == next(pairs)


def _told(equations: Iterable[Equation]) -> list[str]:
    """Describes operations, once each."""
    return list(dict.fromkeys(f"{e.op} ({e.where})" for e in equations))


def _accesses(space: RowSpace, *, lookups: bool) -> Iterator[Access]:
    """Yields the accesses of whole rows, at the top of the program."""
    for a in space.accesses:
        if a.is_lookup == lookups and not a.path and not a.known and a.axis == 0 and is_plain_access(a.equation):
            yield a


# --- rows: operations on looked-up values ---


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A function of a row."""

    type: ArrayType  #: Of all rows, [V, ...].
    made: Equation | None  #: The equation that computes it, ahead of a lookup or behind; None: a value of the owners.
    params: Params
    operands: tuple[int | Atom, ...]  #: Numbers of functions, and literals.

    @property
    def table(self) -> Atom:
        (table,) = self.operands
        assert not isinstance(table, int), "it is looked up as it is"
        return table


@dataclass(frozen=True, slots=True)
class _Looked:
    """A value is a function of the rows of some ids: [*ids, ...]."""

    function: int
    lookup: Equation
    fill: Leaf  #: Of ids out of range; None: these mean the nearest row.
    fills: Mapping[int, Leaf] = field(default_factory=dict)  #: Those of functions that are written ahead of the lookup.

    @property
    def index(self) -> Atom:
        return self.lookup.inputs[1]

    @property
    def ids(self) -> tuple[Atom, str]:
        """Equal for the same rows."""
        return self.index, str(self.lookup.params["mode"])


@dataclass(eq=False)
class _Lookups:
    """Finds the functions of a family's rows, and looks up those of the cheapest cut."""

    program: Program
    space: RowSpace
    sent: ClassVar[str] = "looked_up"
    methods: ClassVar[tuple[str, ...]] = ("ps",)  #: Those by which rows travel.
    kept: Sequence[Equation] = ()
    functions: list[_Function] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)  #: Key -> number of a function.
    looked: dict[Atom, _Looked] = field(default_factory=dict)
    uniform: dict[Atom, Literal] = field(default_factory=dict)  #: Value -> the number that all its elements are.
    needed: set[int] = field(default_factory=set)  #: Functions that are read by something else.
    producers: dict[Var, Equation] = field(default_factory=dict)
    ahead: dict[Atom, int | None] = field(default_factory=dict)  #: Value of all rows -> its number, if it has one.
    behind: Sequence[str] = ()  #: Operations that moved from ahead of a lookup.

    def run(self) -> tuple[Block, list[str]]:
        """Returns the new block, and the operations that moved to the owners."""
        block = self.program.block
        self.producers = {out: e for e in block.equations for out in e.outputs}
        lookups = {a.equation for a in _accesses(self.space, lookups=True)}
        for equation in block.equations:
            if equation in lookups:
                self._begin(equation)
            elif not self._follow(equation):
                self.needed.update(self.looked[a].function for a in equation.inputs if a in self.looked)
        self.needed.update(self.looked[a].function for a in block.outputs if a in self.looked)
        costs = [f.type.nbytes // self.space.extent for f in self.functions]
        written = {x.function for out, x in self.looked.items() if x.lookup.outputs[0] is out}
        if all(n in written or cost >= sum(costs[k] for k in written) for n, cost in enumerate(costs)):
            return block, []
        if any(a.is_lookup and a.equation not in lookups for a in self.space.accesses):
            self.needed |= written  # others, in loops, read rows as they are
        reads = [(k, n) for n, f in enumerate(self.functions) for k in f.operands if isinstance(k, int)]
        given = {n for n, f in enumerate(self.functions) if f.made is None}
        ahead = given.union(n for n in self.ahead.values() if n is not None)
        # What is written ahead of a lookup stays there if nothing is saved.
        cuts = (cheapest_cut(costs, reads, of, self.needed) for of in (ahead, given))
        own = min(cuts, key=lambda own: sum(costs[k] for k in self._sent(own)))
        ordered = in_order(self._rewritten(own), block.inputs) if own - given != ahead - given else None
        if ordered is None:
            return block, []
        made = {n: f.made for n, f in enumerate(self.functions) if f.made is not None}
        self.behind = _told(made[n] for n in sorted(ahead - own))
        moved = _told(made[n] for n in sorted(own - ahead))
        return merge_equal(eliminate_dead(block.with_equations(ordered))[0]), moved

    def _begin(self, lookup: Equation) -> None:
        table, mode, value = lookup.inputs[0], str(lookup.params["mode"]), lookup.params["fill_value"]
        if not isinstance(table.type, ArrayType) or not jax_compat.is_float(table.dtype):
            return
        fill = np.asarray(np.nan if value is None else value).astype(table.dtype) if "FILL" in mode else None
        function, fills = self._function_ahead(table), dict[int, Leaf]()
        if function is not None and fill is not None:
            found = self._fill_ahead(function, lookup, fill, fills)
            function = function if found is not None and np.array_equal(found, fill, equal_nan=True) else None
        if function is None:
            function = self._number(("table", table), _Function(table.type, None, {}, (table,)))
        self.looked[lookup.outputs[0]] = _Looked(function, lookup, fill, fills)

    def _function_ahead(self, atom: Atom) -> int | None:
        """Returns the number of a leaf's value of all rows, or of what is computed of it row by row ahead of a lookup;
        None for any other value."""
        if atom in self.ahead:
            return self.ahead[atom]
        type_, self.ahead[atom] = atom.type, None
        if not (isinstance(atom, Var) and isinstance(type_, ArrayType) and jax_compat.is_float(type_.dtype)):
            return None
        made = self.producers.get(atom)
        if atom in [self.program.block.inputs[k] for k in self.space.leaves]:
            self.ahead[atom] = self._number(("table", atom), _Function(type_, None, {}, (atom,)))
        elif made is not None and made.params.get("sharding") is None and (_is_elementwise(made) or _joins_rows(made)):
            operands = [a if isinstance(a, Literal) else self._function_ahead(a) for a in made.inputs]
            known = tuple(x for x in operands if x is not None)
            if len(known) == len(operands) and any(isinstance(x, int) for x in known):
                self.ahead[atom] = self._number_of(made, _Function(type_, made, made.params, known))
        return self.ahead[atom]

    def _fill_ahead(self, number: int, lookup: Equation, fill: Leaf, fills: dict[int, Leaf]) -> Leaf:
        """Returns the fill of a function that is written ahead of a lookup, if a leaf's is `fill`, and notes those of
        all that it is computed of; None: that isn't known."""
        if number not in fills:
            f = self.functions[number]
            if f.made is None:
                fills[number] = fill.astype(f.type.dtype)
            else:
                below = {k: self._fill_ahead(k, lookup, fill, fills) for k in f.operands if isinstance(k, int)}
                found = (_Looked(x, lookup, below[x]) if isinstance(x, int) else x for x in f.operands)
                operands = [x for x in found if isinstance(x, _Looked | Literal)]
                fills[number] = None if None in below.values() else _filled(f.made, operands)
        return fills[number]

    def _number_of(self, equation: Equation, function: _Function) -> int:
        """Returns the number of what an equation computes: the same for the same function."""
        operands = tuple(n if isinstance(n, int) else atom_key(n) for n in function.operands)
        return self._number((equation.op, params_key(replace(equation, params=function.params)), operands), function)

    def _number(self, key: Hashable, function: _Function) -> int:
        number = self.numbers.setdefault(key, len(self.functions))
        if number == len(self.functions):
            self.functions.append(function)
        return number

    def _follow(self, equation: Equation) -> bool:
        """Notes the function that an equation computes of looked-up rows; returns False if it computes none."""
        inputs = equation.inputs
        if equation.op == "broadcast_in_dim" and isinstance(inputs[0], Literal) and inputs[0].shape == ():
            self.uniform[equation.outputs[0]] = inputs[0]
        forms = [self.looked.get(a) for a in inputs]
        first = next((form for form in forms if form is not None), None)
        if first is None:
            return True
        found = (self.looked.get(a) or self.uniform.get(a, a) for a in inputs)
        operands = [x for x in found if isinstance(x, _Looked | Literal)]
        ids = len(first.index.shape) - 1
        known = all(x.ids == first.ids if isinstance(x, _Looked) else x.shape == () for x in operands)
        known &= len(operands) == len(inputs)
        params = _by_rows(equation, ids, self.space.extent) if known else None
        fill = None if params is None or first.fill is None else _filled(equation, operands)
        if params is None or (first.fill is not None and fill is None):
            return False
        type_ = equation.outputs[0].type
        type_ = replace(type_, shape=(self.space.extent, *type_.shape[ids:]))
        numbers = tuple(x.function if isinstance(x, _Looked) else x for x in operands)
        function = self._number_of(equation, _Function(type_, equation, params, numbers))
        self.looked[equation.outputs[0]] = _Looked(function, first.lookup, fill)
        return True

    def _sent(self, own: frozenset[int]) -> set[int]:
        """Returns the functions that owners send, if they compute some."""
        read = {k for n, f in enumerate(self.functions) if n not in own for k in f.operands if isinstance(k, int)}
        return (read | self.needed) & own

    def _rewritten(self, own: frozenset[int]) -> list[Equation]:
        """Returns the block's equations, in any order, with lookups of the cut's functions in place of what computes
        them of looked-up rows, or of looked-up rows of wider ones."""
        sent = self._sent(own)
        of_rows: dict[int, Atom] = {n: f.table for n, f in enumerate(self.functions) if f.made is None}
        written = list[Equation]()

        def computed(n: int) -> Atom:
            if n not in of_rows:
                f, made = self.functions[n], self.functions[n].made
                assert made is not None, "looked-up values are given"
                operands = tuple(computed(k) if isinstance(k, int) else k for k in f.operands)
                of_rows[n] = out = Var(f.type)
                written.append(replace(made, inputs=operands, outputs=(out,), params=f.params))
            return of_rows[n]

        def behind(n: int, looked: _Looked, found: dict[int, Atom], output: Var | None = None) -> Atom:
            if n not in found:
                f, ids = self.functions[n], looked.index.shape[:-1]
                found[n] = out = output or Var(replace(f.type, shape=(*ids, *f.type.shape[1:])))
                if f.made is None or n in own:
                    written.append(_gather(replace(looked, fill=looked.fills.get(n)), computed(n), out))
                else:
                    operands = tuple(behind(k, looked, found) if isinstance(k, int) else k for k in f.operands)
                    axis = {"dimension": f.params["dimension"] + len(ids) - 1} if f.made.op == "concatenate" else {}
                    written.append(replace(f.made, inputs=operands, outputs=(out,), params={**f.params, **axis}))
            return found[n]

        for equation in self.program.block.equations:
            looked = self.looked.get(equation.outputs[0]) if equation.outputs else None
            if looked is not None and equation is looked.lookup and looked.function not in own:
                behind(looked.function, looked, {}, equation.outputs[0])
                continue
            if looked is not None and equation is not looked.lookup and looked.function in sent:
                equation = _gather(looked, computed(looked.function), equation.outputs[0])
            written.append(equation)
        return written


def _is_elementwise(equation: Equation) -> bool:
    return equation.op in PLACED_ELEMENTWISE and equation.op not in ("device_put", "select_n", "clamp")


def _joins_rows(equation: Equation) -> bool:
    return equation.op == "concatenate" and equation.params["dimension"] > 0


def _gather(looked: _Looked, table: Atom, out: Var) -> Equation:
    """Returns the lookup of a value of all rows."""
    like, ids, rank = looked.lookup, len(looked.index.shape) - 1, len(table.shape)
    params = {
        **like.params,
        "dimension_numbers": jax.lax.GatherDimensionNumbers(tuple(range(ids, ids + rank - 1)), (0,), (0,)),
        "slice_sizes": (1, *table.shape[1:]),
    }
    if looked.fill is not None:
        params["fill_value"] = looked.fill.item()
    return replace(like, inputs=(table, looked.index), outputs=(out,), params=params)


def _filled(equation: Equation, operands: Sequence[_Looked | Literal]) -> np.ndarray | None:
    """Returns what an equation makes of the fill of ids out of range, if that is one number without a rounding."""
    op, out, described = equation.op, equation.outputs[0].dtype, PRIMITIVES[equation.op]
    fills = [x.fill if isinstance(x, _Looked) else np.asarray(x.value) for x in operands]
    fill = next(x.fill for x in operands if isinstance(x, _Looked))
    is_nan, are_zero = np.isnan(fill), all(not x for x in fills)
    if not jax_compat.is_float(out):
        return None
    if op == "convert_element_type":
        made = fill.astype(out)
        return made if np.array_equal(made.astype(fill.dtype), fill, equal_nan=True) else None
    if op in MOVES or op == "slice":
        return fill
    if op == "concatenate":
        return fill if all(np.array_equal(x, fill, equal_nan=True) for x in fills) else None
    if op == "reduce_sum" or not described.elementwise:
        return fill if op == "reduce_sum" and (is_nan or are_zero) else None
    if described.keeps_nan and any(np.isnan(x) for x in fills):
        return np.asarray(np.nan).astype(out)
    return np.zeros((), out) if described.keeps_zero and are_zero and op != "neg" else None


def _by_rows(equation: Equation, ids: int, extent: int) -> Params | None:
    """Returns the parameters of an equation on values [*ids, ...] for [V, ...]; None if it isn't done row by row."""
    op, p, shape, out = equation.op, equation.params, equation.inputs[0].shape, equation.outputs[0].shape

    def of_row(axes: Iterable[int]) -> tuple[int, ...] | None:
        axes = tuple(int(d) for d in axes)
        return tuple(d - ids + 1 for d in axes) if all(d >= ids for d in axes) else None

    if p.get("sharding") is not None or p.get("out_sharding") is not None or out[:ids] != shape[:ids]:
        return None
    if _is_elementwise(equation):
        return p
    if op in REDUCTION_PRIMITIVES and (axes := of_row(p["axes"])) is not None:
        return {**p, "axes": axes}
    if op == "squeeze" and (axes := of_row(p["dimensions"])) is not None:
        return {**p, "dimensions": axes}
    if op == "reshape" and p.get("dimensions") is None:
        return {**p, "new_sizes": (extent, *out[ids:])}
    if op == "transpose" and tuple(p["permutation"][:ids]) == tuple(range(ids)):
        return {**p, "permutation": (0, *(of_row(p["permutation"][ids:]) or ()))}
    if op == "slice" and p["strides"] is None and not any(p["start_indices"][:ids]):
        starts, limits = (tuple(map(int, p[k][ids:])) for k in ("start_indices", "limit_indices"))
        return {**p, "start_indices": (0, *starts), "limit_indices": (extent, *limits)}
    if op == "broadcast_in_dim":
        dims = tuple(map(int, p["broadcast_dimensions"]))
        if dims[:ids] == tuple(range(ids)) and (rest := of_row(dims[ids:])) is not None:
            return {**p, "shape": (extent, *out[ids:]), "broadcast_dimensions": (0, *rest)}
    if op == "concatenate" and (axes := of_row((p["dimension"],))) is not None:
        return {**p, "dimension": axes[0]}
    return None


# --- gradients: operations ahead of a scatter ---

#: Makes all columns of a gradient from a part of it: operations and their arguments, in order.
Step = tuple[str, Leaf]
Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of a gradient, [*ids, ...], and how often it is in each column so far."""

    atom: Atom
    columns: np.ndarray


@dataclass(eq=False)
class _Gradients:
    """Sends the parts of a family's gradients that aren't zero, and no copies."""

    program: Program
    space: RowSpace
    sent: ClassVar[str] = "gradients"
    methods: ClassVar[tuple[str, ...]] = ("ps", "allgather", "allreduce_rows")
    behind: Sequence[str] = ()
    kept: list[Equation] = field(default_factory=list)  #: Equations after which a sum would round otherwise.
    values: ZeroWriter = field(default_factory=ZeroWriter)
    new: list[Equation] = field(default_factory=list)  #: Equations in place of a sum.
    moved: list[Equation] = field(default_factory=list)  #: Equations that they make superfluous.
    added: dict[Hashable, Atom] = field(default_factory=dict)  #: (base, index, part) -> the sum.

    def run(self) -> tuple[Block, list[str]]:
        """Returns the new block, and the operations that moved."""
        block, written, moved = self.program.block, list[Equation](), list[Equation]()
        self.values.extend(block.equations)
        sums = self._sums_of_pushes({a.equation for a in _accesses(self.space, lookups=False)})
        for equation in block.equations:
            pushes = sums.get(equation.outputs[0]) if equation.outputs else None
            self.new, self.moved = [], []
            if pushes and self._in_parts(equation.outputs[0], pushes):
                written += self.new
                moved += self.moved
            else:
                written.append(equation)
        return (eliminate_dead(block.with_equations(written))[0] if moved else block), _told(moved)

    def _sums_of_pushes(self, pushes: set[Equation]) -> dict[Atom, list[Equation]]:
        """Maps sums of pushes, and of nothing else, to these."""
        block = self.program.block
        uses = block.uses()
        sums: dict[Atom, list[Equation]] = {}
        for e in block.equations:
            terms = e.inputs[:1] if e in pushes else e.inputs if e.op in _ADDS else ()
            known = [a for a in terms if a in sums and uses[a] == 1]
            if terms and all(a in known or self.values.is_zero(a) for a in terms) and (e in pushes or known):
                sums[e.outputs[0]] = [*(p for a in known for p in sums.pop(a)), *([e] if e in pushes else [])]
        return sums

    def _in_parts(self, total: Var, pushes: Sequence[Equation]) -> bool:
        """Writes a sum of pushes in parts; returns False if that saves nothing, or would round otherwise."""
        parts = {e: self._parts(e.inputs[2], len(e.inputs[1].shape) - 1) for e in pushes}
        every = {steps: part for of in parts.values() for steps, part in of.items()}
        if not every or () in every:
            return False
        if not _are_apart(every.values()):
            self.kept += self.moved
            return False
        sums = self._sums(total, parts)
        if sum(math.prod(rows.shape[1:]) for rows in {*sums.values()}) >= math.prod(total.shape[1:]):
            return False
        terms, last = list[Atom](), len(sums) - 1
        for k, (steps, rows) in enumerate(sums.items()):
            # a sum of one term is the result itself
            out = total if k == last == 0 else None
            terms.append(self._write(lambda x, steps=steps: _spread(x, steps), pushes[-1], rows, output=out))
        whole = terms[0]
        for k, term in enumerate(terms[1:], 1):
            whole = self._write(jax.lax.add, pushes[-1], whole, term, output=total if k == last else None)
        return True

    def _write(self, fun: Callable[..., Array], like: Equation, *atoms: Atom, output: Var | None = None) -> Atom:
        self.new += expand(fun, like, atoms, output)
        return self.new[-1].outputs[0]

    def _sums(self, total: Atom, parts: Mapping[Equation, Mapping[Steps, _Part]]) -> dict[Steps, Atom]:
        """Returns the sum of each part, added up in the order of the whole."""
        if self.values.is_zero(total):
            return {}
        made = self.values.producers[total]
        if made in parts:
            sums = self._sums(made.inputs[0], parts)
            sums |= {steps: self._push(made, sums.get(steps), part.atom) for steps, part in parts[made].items()}
            return sums
        sums = {}
        for term in made.inputs:
            for steps, rows in self._sums(term, parts).items():
                sums[steps] = self._write(jax.lax.add, made, sums[steps], rows) if steps in sums else rows
        return sums

    def _push(self, like: Equation, base: Atom | None, part: Atom) -> Atom:
        """Returns a sum with a part's updates added."""
        index = like.inputs[1]
        if (base, index, part) not in self.added:
            ids = len(index.shape) - 1
            type_ = ArrayType((self.space.extent, *part.shape[ids:]), part.dtype)
            start = base or self._write(lambda: jnp.zeros(type_.shape, type_.dtype), like)
            numbers = jax.lax.ScatterDimensionNumbers(tuple(range(ids, len(part.shape))), (0,), (0,))
            out, params = Var(type_), {**like.params, "dimension_numbers": numbers}
            self.new.append(replace(like, inputs=(start, index, part), outputs=(out,), params=params))
            self.added[base, index, part] = out
        return self.added[base, index, part]

    def _parts(self, atom: Atom, ids: int) -> dict[Steps, _Part]:
        """Returns what a gradient [*ids, ...] consists of."""
        whole: dict[Steps, _Part] = {(): _Part(atom, np.ones(atom.shape[ids:], int))}
        e = self.values.producers.get(atom)
        if self.values.is_zero(atom):
            return {}
        if e is None:
            return whole
        if e.op in _ADDS:
            found: dict[Steps, _Part] = {}
            for term in e.inputs:
                for steps, part in self._parts(term, ids).items():
                    if steps in found:
                        part = replace(part, atom=self._write(jax.lax.add, e, found[steps].atom, part.atom))
                    found[steps] = part
            if () not in found and _are_apart(found.values()):
                return found
            self.kept += [e] if () not in found else []
            return whole
        if e.op in _OF_PARTS:
            self.kept += [e] if e.inputs[0].dtype.itemsize < e.outputs[0].dtype.itemsize else []
            found = self._parts(e.inputs[0], ids)
            return whole if () in found else {steps: self._mapped(e, part) for steps, part in found.items()}
        made = self._step(e, ids)
        if made:
            self.moved.append(e)
        return (
            whole
            if not made
            else {
                (*steps, step): _Part(part.atom, _on_columns(part.columns, step))
                for operand, step in made
                for steps, part in self._parts(operand, ids).items()
            }
        )

    def _mapped(self, equation: Equation, part: _Part) -> _Part:
        out = Var(replace(equation.outputs[0].type, shape=part.atom.shape))
        self.new.append(replace(equation, inputs=(part.atom,), outputs=(out,)))
        return replace(part, atom=out)

    def _step(self, e: Equation, ids: int) -> list[tuple[Atom, Step]]:
        """Returns what an equation makes all columns of, and how; nothing if it does anything else."""
        p, x, shape, row = e.params, e.inputs[0], e.outputs[0].shape, e.outputs[0].shape[ids:]
        if e.op == "pad" and self.values.is_zero(e.inputs[1]):
            around = tuple(tuple(map(int, ends)) for ends in p["padding_config"])
            kept = all(low >= 0 and high >= 0 and not inner for low, high, inner in around)
            return [(x, ("pad", around[ids:]))] if kept and x.shape[:ids] == shape[:ids] else []
        if e.op == "concatenate" and p["dimension"] >= ids:
            axis, start, made = p["dimension"], 0, list[tuple[Atom, Step]]()
            for part in e.inputs:
                ends = (start, shape[axis] - start - part.shape[axis], 0)
                made.append((part, ("pad", tuple(ends if d == axis else (0, 0, 0) for d in range(ids, len(shape))))))
                start += part.shape[axis]
            return made
        if e.op == "reshape" and p.get("dimensions") is None and x.shape[:ids] == shape[:ids] != shape:
            return [(x, ("reshape", row))] if x.shape != shape else []
        if e.op == "broadcast_in_dim" and isinstance(x, Var):
            dims = tuple(map(int, p["broadcast_dimensions"]))
            of_row = tuple(d - ids for d in dims if d >= ids)
            kept = tuple(n for n, d in zip(x.shape, dims, strict=True) if d >= ids)
            if kept == row:
                return []
            ahead = tuple(d for d in dims if d < ids)
            if ahead != tuple(range(ids)) or x.shape[:ids] != shape[:ids]:  # the same for several ids
                to = (*ahead, *range(ids, ids + len(kept)))
                x = self._write(lambda x: jax.lax.broadcast_in_dim(x, (*shape[:ids], *kept), to), e, x)
            return [(x, ("broadcast", (row, of_row)))]
        return []


def _are_apart(parts: Iterable[_Part]) -> bool:
    return all(np.max(columns) <= 1 for columns in [sum(part.columns for part in parts)])


def _spread(rows: Array, steps: Steps) -> Array:
    """Returns all columns of a part of a sum, [V, ...]."""
    for op, how in steps:
        if op == "pad":
            rows = jax.lax.pad(rows, jnp.zeros((), rows.dtype), ((0, 0, 0), *how))
        elif op == "reshape":
            rows = jax.lax.reshape(rows, (rows.shape[0], *how))
        else:
            row, of_row = how
            rows = jax.lax.broadcast_in_dim(rows, (rows.shape[0], *row), (0, *(d + 1 for d in of_row)))
    return rows


def _on_columns(columns: np.ndarray, step: Step) -> np.ndarray:
    op, how = step
    if op == "pad":
        return np.pad(columns, [(low, high) for low, high, _ in how])
    if op == "reshape":
        return columns.reshape(how)
    row, of_row = how
    sizes = [1] * len(row)
    for d, size in zip(of_row, columns.shape, strict=True):
        sizes[d] = size
    return np.broadcast_to(columns.reshape(sizes), row)


# --- the cheapest cut of a graph of values ---


def cheapest_cut(
    costs: Sequence[int], reads: Sequence[tuple[int, int]], given: Collection[int], needed: Collection[int]
) -> frozenset[int]:
    """Returns the values that the first side computes, of the cheapest cuts that with the fewest. `costs`: of sending
    each value. `reads`: pairs of values, the second computed from the first. `given`, `needed`: values that the first
    side has, and that the second side needs.

    A value is computed where all that it reads is: the second side computes from what it is sent, and sends nothing
    back.
    """
    from scipy.sparse import csr_array  # which takes a tenth of a second to import, and JAX needs it, too
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    count, endless = len(costs), sum(costs) + 1
    source, sink = 2 * count, 2 * count + 1  # k: where a value is computed; count + k: where it is after sending
    edges = {(k, count + k): cost for k, cost in enumerate(costs)}
    edges |= {(source, k): endless for k in given} | {(count + k, sink): endless for k in needed}
    for k, reader in reads:
        edges |= {(count + k, reader): endless, (reader, k): endless}
    ends, capacities = np.array([*edges]).T, np.array([*edges.values()], np.int32)
    graph = csr_array((capacities, (ends[0], ends[1])), shape=(sink + 1, sink + 1))
    rest = csr_array(graph - maximum_flow(graph, source, sink).flow)
    rest.eliminate_zeros()
    reached = breadth_first_order(rest, source, return_predecessors=False)
    return frozenset(int(k) for k in reached if k < count)
