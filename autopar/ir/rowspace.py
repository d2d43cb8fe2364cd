"""Describes row space: the facts that let a step run on the touched rows only (docs/design.md).

A *family* is a set of state leaves with the same number of rows V (a table, its optimizer slots) that row-parallel
equations tie together. A value is *in row space* if each of its rows depends on that row of the family alone;
`untouched` is its value on the rows that the step doesn't touch.
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
    """The value is this scalar on all untouched rows."""

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
    """The value on untouched rows is the old value of a state leaf, in any float dtype that holds it exactly."""

    leaf: int
    dtype: Dtype

    def __str__(self) -> str:
        return "unchanged"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The value on untouched rows is some function of the row.

    Values with the same `function` are equal there; None: nothing is known.
    """

    function: Hashable = None

    def __str__(self) -> str:
        return "some other function of the row"


UNKNOWN = Unknown()
UntouchedValue = Const | Same | Unknown


@dataclass(frozen=True, slots=True)
class Row:
    """A value in row space, with rows along `axis`, of a family (an id, see `RowFacts.find`)."""

    axis: int
    family: int
    untouched: UntouchedValue


@dataclass(frozen=True, slots=True)
class Free:
    """A value of no family that can be made anew for any rows along each of `axes` (a broadcast, a constant, an iota).

    `index_axis` is the axis along which it depends on the row's number, if it does.
    """

    axes: frozenset[int]
    untouched: UntouchedValue
    index_axis: int | None = None


#: None: an ordinary (dense) value.
Value = Row | Free | None


#: Why an equation needs all rows, the most telling kinds first: those that make a gradient dense. "body": it is in a
#: loop's or branch's body; "sum", "product", "scatter": of all rows; "lost": rows are joined with others or moved;
#: "replayed": rows would be replayed in vain.
RefusalKind = Literal["body", "softmax", "sum", "product", "scatter", "lost", "replayed", "other"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a family stays dense, in words, with the user's line and a remedy; passes read `kind` alone."""

    reason: str
    source: Source | None
    remedy: str
    kind: RefusalKind = "other"

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.reason}{where}"


@dataclass(frozen=True, slots=True, eq=False)
class KnownIds:
    """Ids that include those of an access and are known before it."""

    equations: tuple[Equation, ...]  #: Equations that compute them from values of the program.
    atom: Atom  #: The ids, [..., 1].


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """An equation that reads or writes rows by their ids."""

    equation: Equation  #: A gather, scatter, dynamic_slice, dynamic_update_slice, slice or pad.
    path: tuple[Equation, ...]  #: The scans and remats around it, outermost first.
    axis: int  #: The row axis of the equation's operand (of its result for pad).
    known: KnownIds | None = None  #: A superset of its ids, if its own ids depend on rows of the same table.

    @property
    def is_lookup(self) -> bool:
        """It reads rows rather than adding gradients to them."""
        return self.equation.op in ("gather", "dynamic_slice", "slice")


@dataclass(frozen=True, slots=True, eq=False)
class RowSpace:
    """A family of leaves with `extent` rows."""

    family: int  #: Its representative in `RowFacts`; negative and unique if it is refused.
    extent: int
    #: Its members, and those of them that are looked up, as indices of the program's inputs.
    leaves: tuple[int, ...]
    axes: tuple[int, ...]  #: The row axis of each of `leaves`.
    tables: tuple[int, ...]
    accesses: tuple[Access, ...]  #: All equations that read or write its rows by ids.
    refusal: Refusal | None = None  #: Why it can't be lifted, None if it can.
    notes: tuple[str, ...] = ()  #: Remarks for `explain` on a family that lifts.
    is_read_whole: bool = False  #: An equation reads all rows of a leaf at once.
    depends_on: tuple[int, ...] = ()  #: Families whose rows the ids of this one depend on.
    deferred: bool = False  #: A step moves untouched rows, by a function of the row that can be replayed later.
    is_pulled: bool = False  #: Every step touches all rows: dense leaves on hosts.
    rows_read: int = 0  #: If no lookup is followed (no `accesses`), about how many rows lookups read.

    @property
    def row_axes(self) -> dict[int, int]:
        return dict(zip(self.leaves, self.axes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class RowFacts:
    """The findings of `analyze_rows`."""

    values: Mapping[Var, Value]  #: Variable -> its row axis and family; others are dense.
    #: Equation in row space -> how it is lifted: 'rows', 'lookup', 'push', 'reduce', 'contract' or 'dense' (a dense
    #: read of a whole leaf).
    roles: Mapping[Equation, str]
    spaces: tuple[RowSpace, ...]
    parents: tuple[int, ...]  #: Family -> the family that it was united with (union-find).
    #: Row value that can be computed for all rows -> families whose updated leaves that needs.
    whole: Mapping[Atom, frozenset[int]]

    def find(self, family: int) -> int:
        """Returns the representative of a family that may have been united with others."""
        return representative(self.parents, family)

    def value(self, atom: Atom) -> Value:
        """Returns a variable's row axis and family; None: it is dense, as constants are."""
        return self.values.get(atom) if isinstance(atom, Var) else None

    def space_of(self, leaf: int) -> RowSpace | None:
        """Returns the family that a state leaf belongs to."""
        return next((s for s in self.spaces if leaf in s.leaves), None)


def representative(parents: Sequence[int], k: int) -> int:
    """Returns the root of the union that `k` is in, a family, say."""
    while parents[k] != k:
        k = parents[k]
    return k


def host_refusal(program: Program, space: RowSpace) -> Refusal | None:
    """Returns why a family can't be in host memory; NumPy, which holds its rows there, has no typed PRNG keys."""
    key = next((k for k in space.leaves if jax_compat.is_key(program.block.inputs[k].dtype)), None)
    if space.refusal is not None or key is None:
        return space.refusal
    where = next((a.equation.source for a in space.accesses if a.equation.source is not None), None)
    remedy = "keep jax.random.key_data(keys) in the state, and wrap the rows that are looked up (wrap_key_data)"
    return Refusal(f"{program.inputs[key].path} holds typed PRNG keys", where, remedy)


def can_be_run_again(equation: Equation) -> bool:
    """Returns whether an equation on touched rows may also run on all rows; not if that costs a loop or has effects."""
    return equation.op not in ("scan", "remat") and not equation.effects


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The index operand of an access, computed outside of the loops around it."""

    path: tuple[Equation, ...]  #: The equations around the access, outermost first.
    #: The operand at the top of the program, with a leading axis for each equation of the path that `varies`.
    atom: Atom
    varies: tuple[bool, ...]  #: For each of them, the operand differs from iteration to iteration.


@dataclass(frozen=True, slots=True, eq=False)
class RowIds:
    """The ids of a family's accesses."""

    #: Equations to append to the program, which compute the ids outside of loops, and `row_ids` and `row_range`s.
    equations: tuple[Equation, ...]
    results: tuple[Var, ...]  #: Flat ids.
    batched: tuple[bool, ...]  #: For each result, equal shards of it are the ids of equal shards of the batch.
    #: Access -> the batch axis of its index operand, if the access may be spread by it.
    axes: Mapping[Equation, int | None]
    indices: Mapping[Equation, Index]  #: Access without `known` ids -> its index operand outside of loops.

    @property
    def count(self) -> int:
        """Number of ids, duplicates and padding included."""
        return sum(v.shape[0] for v in self.results)

    def count_on(self, devices: int) -> int:
        """Returns the number of ids of each of `devices` devices over which the batch is spread."""
        return sum(v.shape[0] // (devices if b else 1) for v, b in zip(self.results, self.batched, strict=True))
