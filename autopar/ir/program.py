"""Represents a train step as plain, frozen data: the intermediate representation (IR).

JAX's jaxprs change from version to version (primitives, parameters, classes), so a step is copied once into these
classes, and nothing above `ir.trace` reads a jaxpr. A `Program` holds facts; decisions are the `Plan`'s.

Invariants, checked by `ir.verifier` after every pass: each variable is defined once and before its use (single static
assignment); a nested block reads nothing but its own inputs; types agree at every boundary.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jax.extend.core import Primitive

from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Leaf, Params, ValueType

if TYPE_CHECKING:  # they are made of programs
    from autopar.ir.local import LocalFacts, OncePerRow, Segments
    from autopar.ir.pipeline import StagedStep
    from autopar.ir.rowspace import Refusal, RowFacts, RowIds
    from autopar.ir.served import ServedStep
    from autopar.ir.stacked import StackIndex
    from autopar.ir.trace import Origin

Found = TypeVar("Found")

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "bool"}


def short_dtype(dtype: Dtype) -> str:
    """Returns `f32` for `float32`, as jaxprs print dtypes."""
    name = str(np.dtype(dtype).name) if not hasattr(dtype, "_impl") else str(dtype)
    stem = name.rstrip("0123456789")
    return _SHORT.get(stem, stem) + name[len(stem) :]


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Shape and dtype of a value. `weak_type` is JAX's: a Python scalar's dtype, which yields to others."""

    shape: tuple[int, ...]
    dtype: Dtype
    weak_type: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * int(getattr(self.dtype, "itemsize", 4))

    def resized(self, axis: int, size: int) -> ArrayType:
        """Returns the type with another size along an axis."""
        return replace(self, shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]))

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class RouteType:
    """The route to the rows that a step touches: at most `rows` (padded) of the family's `extent`."""

    family: int
    extent: int
    rows: int

    def __str__(self) -> str:
        return f"route[{self.rows} of {self.extent}]"


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A value that is no array (a token, a reference), which passes carry through."""

    text: str

    def __str__(self) -> str:
        return self.text


Type = ArrayType | RouteType | OpaqueType


class _Typed:
    __slots__ = ()

    type: ValueType

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.type, "shape", ())

    @property
    def dtype(self) -> Dtype:
        return getattr(self.type, "dtype", None)


@dataclass(frozen=True, slots=True, eq=False)
class Var(_Typed):
    """A value, defined once: by an equation or as a block's input. Compared by identity."""

    type: ValueType


@dataclass(frozen=True, slots=True, eq=False)
class Literal(_Typed):
    """A constant: a scalar written in the program, or an array that the step closes over."""

    value: Leaf
    type: ValueType

    @staticmethod
    def scalar(value: Leaf, dtype: Dtype) -> Literal:
        return Literal(np.asarray(value, dtype), ArrayType((), dtype))


Atom = Var | Literal


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's own code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Border:
    """Maps an equation's operands to the inputs of its last body: of a while its body, not its condition; of a cond
    any branch."""

    #: Number of leading operands that the body doesn't take: a cond's index, the constants of a while's condition.
    head: int
    consts: int  #: Number of operands that are the same in each turn of a loop.
    carries: int  #: Number of operands that a loop carries from turn to turn and returns. A scan slices the rest.

    @property
    def fixed(self) -> int:
        """Number of the body's inputs that aren't a turn's slice of an operand."""
        return self.consts + self.carries


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One operation."""

    op: str  #: The JAX primitive's name, or that of an operation of ours (`ir.operations`).
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    #: The operation's static parameters (of a scan or cond: ours, not JAX's).
    params: Params = field(default_factory=dict)
    #: Nested programs: one for scan and remat, one per branch of a cond, (condition, body) of a while.
    bodies: tuple[Block, ...] = ()
    primitive: Primitive | None = None  #: JAX's primitive; None for an operation of ours, unless it is made of one.
    #: JAX's parameters of a control-flow equation whose bodies are unchanged, which is emitted as it was traced. None
    #: once a pass has changed a body.
    original: Params | None = None
    effects: bool = False  #: Running it can be observed (a print, an ordered callback), so it is never removed.
    #: JAX's equation context and source info, which emission restores.
    context: object = None
    info: object = None
    origin: Origin | None = None  #: Finds `source` (`ir.trace.Origin`).

    @property
    def source(self) -> Source | None:
        """The line of the user's code that this equation comes from, if it is known."""
        return self.origin.source if self.origin is not None else None

    @property
    def where(self) -> str:
        """The `source` as a message shows it, or "an unknown line"."""
        source = self.source
        return str(source) if source else "an unknown line"

    @property
    def border(self) -> Border:
        """The mapping of a loop's, branch's or checkpoint's operands to its body's inputs."""
        if self.op == "scan":
            return Border(0, self.params["num_consts"], self.params["num_carry"])
        if self.op == "while":
            return Border(self.params["cond_nconsts"], self.params["body_nconsts"], len(self.outputs))
        count = len(self.bodies[0].inputs)
        return Border(len(self.inputs) - count, count, 0)

    def with_bodies(self, bodies: Sequence[Block]) -> Equation:
        """Returns the equation with other bodies; itself if they are unchanged."""
        if all(new is old for new, old in zip(bodies, self.bodies, strict=True)):
            return self
        return replace(self, bodies=tuple(bodies), original=None)

    def with_operands(
        self,
        bodies: Sequence[Block],
        outputs: Sequence[Var],
        *,
        head: Sequence[Atom] = (),
        consts: Sequence[Atom] = (),
        carries: Sequence[Atom] = (),
        xs: Sequence[Atom] = (),
    ) -> Equation:
        """Returns the loop, branch or checkpoint with other bodies and operands, in the order of its `border`."""
        params = self.params
        if self.op == "scan":
            params = {**params, "num_consts": len(consts), "num_carry": len(carries)}
        elif self.op == "while":
            params = {**params, "cond_nconsts": len(head), "body_nconsts": len(consts)}
        inputs = (*head, *consts, *carries, *xs)
        return replace(self, inputs=inputs, outputs=tuple(outputs), bodies=tuple(bodies), params=params, original=None)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A straight-line program; its equations are in an order that can be run."""

    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]

    def walk(self) -> Iterator[Equation]:
        """Yields all equations, those of nested blocks included, outer ones first."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies:
                yield from body.walk()

    def makers(self) -> dict[Atom, Equation]:
        """Maps values to the equations that make them."""
        return {v: e for e in self.equations for v in e.outputs}

    def uses(self) -> Counter[Atom]:
        """Counts how often each value is read; the block reads its outputs."""
        return Counter(itertools.chain(*(e.inputs for e in self.equations), self.outputs))

    def with_equations(self, equations: Sequence[Equation]) -> Block:
        """Returns the block with other equations; itself if they are unchanged."""
        same = len(equations) == len(self.equations)
        if same and all(new is old for new, old in zip(equations, self.equations, strict=True)):
            return self
        return Block(self.inputs, tuple(equations), self.outputs)


@dataclass(frozen=True, slots=True)
class Input:
    """A flat input."""

    path: str
    #: 'state' (the step returns it updated), 'table' (only read, in a layout), 'log' (state of autopar's own) or
    #: 'batch' (everything else).
    role: str
    layout: tuple[RowLayout, int] | None = None  #: A table's layout and row axis.
    stack_index: StackIndex | None = None  #: Where a table lies that is only read, in a stack of tables.

    @property
    def entry_axis(self) -> int | None:
        """The axis along which an update log's entry is spread, as its family's rows are; None of other inputs."""
        return self.layout[1] if self.role == "log" and self.layout is not None else None


@dataclass(frozen=True, slots=True)
class Output:
    """A flat output; `state` is the index of the input whose new value it is, if any."""

    path: str
    state: int | None = None


def known(found: Found | None) -> Found:
    """Returns a finding, after the pass that makes it."""
    assert found is not None, "the pass that finds it has run"
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A whole train step, and the findings of analyses."""

    block: Block
    #: Paths and roles of the block's inputs and outputs, in order.
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    name: str = "step"
    #: (state input, row axis) of those that are looked up by rows (`classify`).
    tables: tuple[tuple[int, int], ...] = ()
    #: (state input, row axis) of those that have as many rows as a table (`classify`).
    candidates: tuple[tuple[int, int], ...] = ()
    #: State input -> why its lookups aren't followed, or that rows are only written into it (`classify`).
    unfollowed: Mapping[int, Refusal] = field(default_factory=dict)
    #: State input -> about how many rows' elements its lookups read, followed or not (`classify`).
    rows_read: Mapping[int, int] = field(default_factory=dict)
    #: Leaves on hosts of which every step touches all rows, and values pushed to all of them (`pull_whole`).
    pulled: frozenset[Var] = frozenset()
    #: Of these leaves those that `pull_whole` made tables of -> their row axis; the others are their slots.
    pulled_tables: Mapping[Var, int] = field(default_factory=dict)
    rows: RowFacts | None = None  #: The rows' facts (`analyze_rows`).
    #: Variable -> its axis that runs over the batch, where it is known (`analyze_batch`).
    batch: Mapping[Var, int] = field(default_factory=dict)
    #: Family -> the rows that its accesses read or write, for the plan's devices (`analyze_batch`).
    ids: Mapping[int, RowIds] = field(default_factory=dict)
    local: LocalFacts | None = None  #: In the program of one device, its part of each output.
    once_per_row: OncePerRow | None = None  #: Work that is done once for each distinct row, if any.
    segments: Segments | None = None  #: In the program of one rank, its compiled programs and exchanges.
    staged: StagedStep | None = None  #: In a pipeline, the programs of its stages.
    served: ServedStep | None = None  #: With servers, the programs of a worker and of the servers.

    @property
    def facts(self) -> RowFacts:
        """The rows' facts, once `analyze_rows` has run."""
        return known(self.rows)

    @property
    def named_inputs(self) -> list[tuple[Var, Input]]:
        return list(zip(self.block.inputs, self.inputs, strict=True))

    @property
    def new_states(self) -> dict[int, int]:
        """Index of a state input -> index of the output that is its new value."""
        return {o.state: k for k, o in enumerate(self.outputs) if o.state is not None}

    @property
    def unchanged(self) -> frozenset[int]:
        """Indices of the states that the step only reads, and returns as they are."""
        block = self.block
        return frozenset(k for k, out in self.new_states.items() if block.outputs[out] is block.inputs[k])

    @property
    def echoes(self) -> dict[int, int]:
        """Index of an output that is an input but no state's new value -> index of that input."""
        inputs, states = {v: k for k, v in enumerate(self.block.inputs)}, set(self.new_states.values())
        outputs = ((k, a) for k, a in enumerate(self.block.outputs) if isinstance(a, Var) and k not in states)
        return {k: inputs[a] for k, a in outputs if a in inputs}


def family_of(equation: Equation) -> int | None:
    """Returns the family whose rows an operation of ours reads or writes; None of any other equation."""
    atoms = (*equation.inputs, *equation.outputs, *(v for b in equation.bodies for v in b.inputs))
    routed = next((a.type.family for a in atoms if isinstance(a.type, RouteType)), None)
    return equation.params.get("family", routed)


def count_equations(block: Block) -> int:
    """Counts the equations, those of nested blocks included."""
    return sum(1 for _ in block.walk())
