"""Row space: the facts that let a step run on the touched rows only (docs/design.md).

A *family* is a set of state leaves with the same number of rows V (a table, its optimizer slots) that are tied by
row-parallel equations. A value is *in row space* if each of its rows depends on that row of the family alone. What it
is on the rows that the step doesn't touch is its `untouched`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar import jax_compat
from autopar.ir.program import Atom, Equation, Program, Source, Var
from autopar.jax_types import Dtype, Leaf


@dataclass(frozen=True, slots=True)
class Const:
    """Off the touched rows the value is this scalar everywhere."""

    value: Leaf

    @property
    def is_zero(self) -> bool:
        return bool(np.all(np.asarray(self.value) == 0))

    @property
    def is_one(self) -> bool:
        return bool(np.all(np.asarray(self.value) == 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and bool(np.array_equal(np.asarray(self.value), np.asarray(other.value)))

    def __hash__(self) -> int:
        return hash(np.asarray(self.value).item())

    def __str__(self) -> str:
        return f"constant {np.asarray(self.value).item():g}" if np.ndim(self.value) == 0 else "constant"


@dataclass(frozen=True, slots=True)
class Same:
    """Off the touched rows the value is the old value of a state leaf (in whatever float that holds it exactly)."""

    leaf: int
    dtype: Dtype

    def __str__(self) -> str:
        return "unchanged"


@dataclass(frozen=True, slots=True)
class Unknown:
    """Off the touched rows the value is some function of the row.

    Attributes:
      function: Names the function: values of one name are equal there. None: nothing is known of it.
    """

    function: Hashable = None

    def __str__(self) -> str:
        return "some other function of the row"


UNKNOWN = Unknown()
UntouchedValue = Const | Same | Unknown


@dataclass(frozen=True, slots=True)
class Row:
    """In row space: rows along `axis`, of a family (an id, see `RowFacts.find`)."""

    axis: int
    family: int
    untouched: UntouchedValue


@dataclass(frozen=True, slots=True)
class Free:
    """Belongs to no family: along each of `axes` it can be made anew for any rows (a broadcast, a constant, an iota).

    `index_axis` is the axis along which it depends on the row's number, if it does.
    """

    axes: frozenset[int]
    untouched: UntouchedValue
    index_axis: int | None = None


#: None: an ordinary (dense) value.
Value = Row | Free | None


#: What an equation does that needs all rows, the most telling ones first: those that make a gradient dense.
RefusalKind = Literal["body", "softmax", "sum", "product", "scatter", "lost", "replayed", "other"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a family stays dense.

    Attributes:
      reason: In words, for people alone.
      source: The line of the user's code.
      remedy: What would change it.
      kind: What passes go by: in a loop's or a branch's body, a softmax, another sum over all rows, a product with
        them, a scatter of them, rows that are joined with others or moved, rows that would be replayed in vain, or
        something else.
    """

    reason: str
    source: Source | None
    remedy: str
    kind: RefusalKind = "other"

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.reason}{where}"


@dataclass(frozen=True, slots=True, eq=False)
class KnownIds:
    """Ids that include those of an access, and are known before them.

    Attributes:
      equations: What computes them of values of the program.
      atom: The ids, [..., 1].
    """

    equations: tuple[Equation, ...]
    atom: Atom


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """An equation that reads or writes rows by their ids.

    Attributes:
      equation: A gather, scatter, dynamic_slice, dynamic_update_slice, slice or pad.
      path: The scans and remats around it, outermost first.
      axis: The row axis of the equation's operand (of its result for pad).
      known: What says which rows it may mean, where its own ids depend on rows of the same table.
    """

    equation: Equation
    path: tuple[Equation, ...]
    axis: int
    known: KnownIds | None = None

    @property
    def is_lookup(self) -> bool:
        """Returns whether it reads rows (rather than adding gradients to them)."""
        return self.equation.op in ("gather", "dynamic_slice", "slice")


@dataclass(frozen=True, slots=True, eq=False)
class RowSpace:
    """A family of leaves with `extent` rows.

    Attributes:
      family: Its representative in `RowFacts`; negative, and its own, if it is refused.
      leaves, tables: Its members, and those of them that are looked up, as indices of the program's inputs.
      axes: The row axis of each of `leaves`.
      accesses: All equations that read or write its rows by ids.
      refusal: Why it can't be lifted, None if it can.
      notes: What is to be said of it although it lifts.
      is_read_whole: Whether an equation reads all rows of a leaf at once.
      depends_on: Families whose rows the ids of this one depend on.
      deferred: Whether a step moves rows that it doesn't touch, by a function of the row that can be replayed later.
      is_pulled: Whether every step touches all rows: dense leaves on hosts.
      rows_read: Where nothing is followed (no `accesses`), about how many rows lookups read.
    """

    family: int
    extent: int
    leaves: tuple[int, ...]
    axes: tuple[int, ...]
    tables: tuple[int, ...]
    accesses: tuple[Access, ...]
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()
    is_read_whole: bool = False
    depends_on: tuple[int, ...] = ()
    deferred: bool = False
    is_pulled: bool = False
    rows_read: int = 0

    @property
    def row_axes(self) -> dict[int, int]:
        """Leaf -> its row axis."""
        return dict(zip(self.leaves, self.axes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class RowFacts:
    """The findings of `analyze_rows`: what each variable is, and the families.

    `roles` says how an equation that touches row space is to be lifted: 'rows', 'lookup', 'push', 'reduce', 'contract'
    or 'dense' (a dense read of a whole leaf). `whole`: row values that can be had for all rows, with the families whose
    updated leaves that needs.
    """

    values: Mapping[Var, Value]
    roles: Mapping[Equation, str]
    spaces: tuple[RowSpace, ...]
    parents: tuple[int, ...]
    whole: Mapping[Atom, frozenset[int]]

    def find(self, family: int) -> int:
        """Returns the representative of a family that may have been united with others."""
        return representative(self.parents, family)

    def value(self, atom: Atom) -> Value:
        """Returns what a variable is along rows; constants are dense."""
        return self.values.get(atom) if isinstance(atom, Var) else None

    def space_of(self, leaf: int) -> RowSpace | None:
        """Returns the family that a state leaf belongs to."""
        return next((s for s in self.spaces if leaf in s.leaves), None)


def representative(parents: Sequence[int], family: int) -> int:
    """Returns the family that stands for all that were united with one."""
    while parents[family] != family:
        family = parents[family]
    return family


def host_refusal(program: Program, space: RowSpace) -> Refusal | None:
    """Returns why a family can't be in host memory, None if it can: rows there are NumPy's, which has no typed PRNG
    keys."""
    key = next((k for k in space.leaves if jax_compat.is_key(program.block.inputs[k].dtype)), None)
    if space.refusal is not None or key is None:
        return space.refusal
    where = next((a.equation.source for a in space.accesses if a.equation.source is not None), None)
    remedy = "keep jax.random.key_data(keys) in the state, and wrap the rows that are looked up (wrap_key_data)"
    return Refusal(f"{program.inputs[key].path} holds typed PRNG keys", where, remedy)


def can_be_run_again(equation: Equation) -> bool:
    """Returns whether an equation that is run on the touched rows may be run on all rows as well: not if that costs a
    loop, or can be observed (a print in a branch of a cond)."""
    return equation.op not in ("scan", "remat") and not equation.effects


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The index operand of an access, computed outside of the loops around it.

    Attributes:
      path: The equations around the access, outermost first.
      atom: The operand at the top of the program, with a leading axis for each equation of the path that `varies`.
      varies: Whether the operand differs from iteration to iteration.
    """

    path: tuple[Equation, ...]
    atom: Atom
    varies: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowIds:
    """The ids of a family: equations to append to the program's block, and their flat results.

    Attributes:
      equations: Those that compute the ids outside of loops, and the `row_ids` and `row_range`s.
      results: Flat ids.
      batched: For each result, whether equal shards of it are those of equal shards of the batch.
      axes: For each access, the batch axis of its index operand where it stands, if the access may be spread by it.
      indices: For each access its index operand outside of loops; not of one by `known` ids, which are others.
    """

    equations: tuple[Equation, ...]
    results: tuple[Var, ...]
    batched: tuple[bool, ...]
    axes: Mapping[Equation, int | None]
    indices: Mapping[Equation, Index]

    @property
    def count(self) -> int:
        """The number of ids, duplicates and padding included."""
        return sum(v.shape[0] for v in self.results)

    def count_on(self, devices: int) -> int:
        """Returns the number of ids that each device has, if the batch is spread over so many."""
        return sum(v.shape[0] // (devices if b else 1) for v, b in zip(self.results, self.batched, strict=True))
