"""Converts values of one device's program between forms: whole, an equal shard, a partial sum (`localize`,
`ir.local`)."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.analysis.primitives import PLACED_ELEMENTWISE
from autopar.ir.local import Gathered, NotLocal, Partial, Reduction, Spread, State
from autopar.ir.operations import PREFIX
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, RouteType, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.writer import ZeroWriter


def joined(states: Iterable[State]) -> State:
    """Returns the common form of values: shards along the first one's axis, else partial sums, else whole."""
    kinds = list(states)
    first = next((s for s in kinds if isinstance(s, Spread)), None)
    return first or next((s for s in kinds if s is not None), None)


@dataclass(eq=False)
class Shared:
    """The common state of walks through a program and its bodies."""

    #: As `localize` takes them.
    bound: ProgramPlan
    examples: bool
    #: Prefix of the names of written operations: "" over devices, "microbatch_", "tensor_".
    over: str = ""
    between: bool = False
    owned: set[Var] = field(default_factory=set)
    reductions: list[Reduction] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    inside: NotLocal | None = None

    @property
    def devices(self) -> int:
        """Number of devices over which examples are spread."""
        return self.bound.devices * self.bound.rank_devices

    @property
    def owners(self) -> int:
        """Number of devices, or ranks, over which rows are spread."""
        return self.bound.devices

    def parts(self, state: Spread) -> int:
        """Returns the number of shards."""
        return self.owners if state.owner or state.rank else self.devices

    def op(self, name: str) -> str:
        """Returns the name of an operation over these devices."""
        return f"{PREFIX}{self.over}{name}"

    @functools.cached_property
    def undivided(self) -> int:
        """B, if the devices don't divide the examples; else 0."""
        return self.bound.undivided if self.examples else 0

    def of_examples(self, axis: int, size: int) -> Spread:
        """Returns a shard of the examples, along an axis of this size."""
        is_undivided = self.undivided and size % self.undivided == 0
        return Spread(axis, examples=self.undivided if is_undivided else 0)


@dataclass(eq=False)
class Forms(ZeroWriter, abc.ABC):
    """Old values of one block, under their new names, and in other forms."""

    shared: Shared
    nested: bool = False
    #: Old variable -> its new name and a device's part of it.
    env: dict[Var, tuple[Atom, State]] = field(default_factory=dict)
    #: Old variables that depend on a sum over the examples.
    reduced: set[Atom] = field(default_factory=set)
    converted: dict[tuple[Atom, State], Atom] = field(default_factory=dict)
    #: Partial sum whose operands are reduced in its place -> its equation, and its operands' bytes.
    sooner: dict[Atom, tuple[Equation, int]] = field(default_factory=dict)

    # --- values ---

    @property
    def may_repeat(self) -> bool:
        """An effect that all devices have would be seen once for each of them."""
        return self.shared.examples and not self.shared.between

    @property
    def regroups(self) -> bool:
        """Parts are of examples, and each device can have all of them."""
        return self.may_repeat and not self.shared.over

    def state(self, atom: Atom) -> State:
        """Returns a device's part of an old value."""
        return None if isinstance(atom, Literal) else self.env[atom][1]

    def read(self, atom: Atom) -> Atom:
        """Returns the new name of an old value."""
        return atom if isinstance(atom, Literal) else self.env[atom][0]

    def _local_type(self, type_: ArrayType, state: State) -> ArrayType:
        if not isinstance(state, Spread):
            return type_
        return type_.resized(state.axis, state.size(type_.shape[state.axis], self.shared.parts(state)))

    def define(self, var: Var, state: State) -> Var:
        """Returns a new variable for an old one."""
        type_ = var.type
        if isinstance(type_, RouteType):
            new = Var(dataclasses.replace(type_, rows=type_.rows // self._owners(type_.family)))
        else:
            new = Var(self._local_type(type_, state))
        self.env[var] = new, state
        if isinstance(state, Spread) and state.owner:
            self.shared.owned.add(new)
        return new

    def _owners(self, family: int) -> int:
        planned = self.shared.bound.family(family)
        return 1 if planned is None or planned.layout is None else self.shared.owners

    @abc.abstractmethod
    def body(self, body: Block, operands: Sequence[Atom], states: Sequence[State]) -> tuple[Forms, list[Var]]:
        """Rewrites a nested block; also returns its new inputs, which are in these states."""

    # --- from one form to another ---

    def as_state(self, atom: Atom, wanted: State, source: Equation | None = None) -> Atom:
        """Returns the value in another form; shards that are wanted whole, or along another axis, are gathered."""
        have, new = self.state(atom), self.read(atom)
        if have == wanted or isinstance(atom.type, RouteType):
            return new
        if isinstance(have, Spread) and isinstance(wanted, Spread) and self._alike(have, wanted):
            return new
        if isinstance(have, Spread) and have.sums:
            self.add_up(atom, have)
            return self.as_state(atom, wanted, source)
        if isinstance(wanted, Spread) and wanted.sums and have == dataclasses.replace(wanted, sums=False):
            return self._once_a_rank(new)
        if isinstance(have, Partial) and wanted is not None:
            return self._convert(self.whole(atom, source), atom, wanted)
        if isinstance(have, Partial):
            return self.whole(atom, source)
        if isinstance(have, Spread):
            new = self._gathered(new, atom, have, source)
        return self._convert(new, atom, wanted)

    def _alike(self, a: Spread, b: Spread) -> bool:
        parts = self.shared.parts(a), self.shared.parts(b)
        return (a.axis, a.examples, a.sums, parts[0]) == (b.axis, b.examples, b.sums, parts[1])

    def _gathered(self, new: Atom, atom: Atom, have: Spread, source: Equation | None) -> Atom:
        if have.owner and self.shared.bound.on_hosts and not self.shared.bound.shards:
            raise NotLocal("all rows of a table are read at once", source.source if source else None)
        known = None if have.owner else self.known(atom)
        if known is not None:
            return known
        return self._all_of(new, atom.type, have, source)

    def _all_of(self, new: Atom, type_: ArrayType, have: Spread, source: Equation | None) -> Atom:
        """Returns all of a new value that is spread; a broadcast one is gathered before, to send fewer bytes."""
        key = new, None
        if key in self.converted:
            return self.converted[key]
        made = None if have.owner else self.producers.get(new)
        if made is not None and made.op == "broadcast_in_dim":
            dims, inputs = made.params["broadcast_dimensions"], made.inputs
            axis = dims.index(have.axis) if have.axis in dims else None
            if axis is not None and inputs[0].shape[axis] == new.shape[have.axis]:
                whole = inputs[0].type.resized(axis, type_.shape[have.axis])
                inputs = (self._all_of(inputs[0], whole, have.moved(axis), source), *inputs[1:])
            out, params = Var(type_), {**made.params, "shape": type_.shape}
            self.append(dataclasses.replace(made, inputs=inputs, outputs=(out,), params=params))
        else:
            if not have.owner:
                op, where = (source.op, source.source) if source else ("", None)
                nbytes = new.type.nbytes * self.shared.parts(have)
                self.shared.gathered.append(Gathered(nbytes, self.nested, op, where))
                self.shared.inside = self.shared.inside or NotLocal("examples meet those of other devices", where)
            size = {"size": type_.shape[have.axis]} if have.examples else {}
            out = self.emit(self.shared.op("replicate"), (new,), type_, {"axis": have.axis, **size, **self._by(have)})
        self.converted[key] = out
        return out

    def whole(self, atom: Atom, source: Equation | None = None) -> Atom:
        """Returns an old value reduced over the devices; from here on it is whole."""
        if not isinstance(self.state(atom), Partial):
            return self.as_state(atom, None, source)
        assert isinstance(atom, Var), "constants are whole"
        if atom in self.sooner:
            made, _ = self.sooner[atom]
            inputs = tuple(self.as_state(a, None, source) for a in made.inputs)
            self.reduced.add(atom)
            self.append(dataclasses.replace(made, inputs=inputs, outputs=(self.define(atom, None),)))
            return self.read(atom)
        return self.reduced_value(atom, self.read(atom), "sum", source)

    def note_sooner(self, equation: Equation) -> None:
        """Notes a partial sum whose operands are better reduced than itself, if it can't stay partial.

        In a loop or branch it is larger than its operands. Outside of one it is their transpose: a product that is
        summed at once is one call of XLA's, on a CPU, and its transpose is read in the update's loop (a GPT on 4
        devices: 1.04 of data parallelism's time in place of 1.10).
        """
        parts = {a for a in equation.inputs if isinstance(self.state(a), Partial)}
        nbytes = sum(self.sooner[a][1] if a in self.sooner else a.type.nbytes for a in parts)
        made = equation.outputs[0].type
        if self.nested:
            is_sooner = nbytes < made.nbytes
        else:
            is_alike = [(a.type.size, a.dtype) for a in parts] == [(made.size, made.dtype)]
            is_sooner = equation.op == "transpose" or (is_alike and parts <= self.sooner.keys())
            is_sooner &= not self.shared.over  # sums over devices
        if is_sooner:
            self.sooner[equation.outputs[0]] = equation, nbytes

    def reduced_value(self, var: Var, part: Atom, op: str, source: Equation | None) -> Atom:
        """Returns an old value after its parts are reduced; from here on it is whole."""
        out = self.known(var)
        if out is None:
            out = self.reduce(part, op, source)
            self.reduced.add(var)
        self.env[var] = out, None
        return out

    def known(self, atom: Atom) -> Atom | None:
        """Returns the whole of an old value that was computed before, if it was."""
        return None

    def _by(self, state: Spread) -> dict[str, bool]:
        return {"ranks": True} if self.shared.parts(state) != self.shared.devices else {}

    def reduce(self, new: Atom, op: str, source: Equation | None = None, *, owners: bool = False) -> Var:
        """Returns a new value reduced over the devices, or over the owners of rows."""
        where = source.source if source else None
        self.shared.reductions.append(Reduction(new.type, op, self.nested, where))
        if self.shared.between and not owners:
            new = self.of_rank(new, op)
        ranks = {"ranks": True} if owners and self.shared.bound.on_hosts else {}
        return self.emit(self.shared.op("reduce"), (new,), new.type, {"op": op, **ranks})

    def add_up(self, atom: Atom, have: Spread) -> None:
        """Adds up a rank's devices' partial sums of an old value."""
        assert isinstance(atom, Var), "constants are whole"
        self.env[atom] = self.of_rank(self.read(atom)), dataclasses.replace(have, sums=False)

    def _once_a_rank(self, new: Atom) -> Var:
        return self.emit(self.shared.op("once_rank"), (new,), new.type)

    def of_rank(self, new: Atom, op: str = "sum") -> Atom:
        """Returns a new value reduced over a rank's own devices."""
        if self.shared.bound.rank_devices == 1:
            return new
        return self.emit(self.shared.op("reduce_rank"), (new,), new.type, {"op": op})

    def wholly(self, equation: Equation, operands: Iterable[int]) -> Equation:
        """Returns an equation that reads some operands whole."""
        inputs = list(equation.inputs)
        for k in operands:
            if self.state(inputs[k]) is not None:
                whole = Var(inputs[k].type)
                self.env[whole] = self.whole(inputs[k], equation), None
                inputs[k] = whole
        return dataclasses.replace(equation, inputs=tuple(inputs))

    def _convert(self, new: Atom, atom: Atom, wanted: State) -> Atom:
        """Returns a whole value as a shard or a partial sum."""
        key = new, wanted
        if isinstance(new, Var) and key in self.converted:
            return self.converted[key]
        if isinstance(wanted, Partial):
            out = new if self.is_zero(new) else self.emit(self.shared.op("once"), (new,), new.type)
        elif isinstance(wanted, Spread):
            out = self._shard(new, wanted)
            out = self._once_a_rank(out) if wanted.sums and not self.is_zero(new) else out
        else:
            out = new
        if isinstance(new, Var):
            self.converted[key] = out
        return out

    def _is_same_along(self, new: Atom, axis: int, depth: int = 8) -> bool:
        """Returns whether a new value is constant along an axis, by the last equations that make it, so that parts
        can be made."""
        made = self.producers.get(new) if depth else None
        if made is None or made.op == "ap.full":
            return made is not None
        if made.op == "broadcast_in_dim":
            dims = made.params["broadcast_dimensions"]
            return axis not in dims or made.inputs[0].shape[dims.index(axis)] != new.shape[axis]
        is_plain = made.op in PLACED_ELEMENTWISE and len(made.outputs) == 1 and not made.effects
        return is_plain and all(not a.shape or self._is_same_along(a, axis, depth - 1) for a in made.inputs)

    def _shard(self, new: Atom, wanted: Spread) -> Var:
        """Returns a device's part; a broadcast value is made in that size."""
        type_ = self._local_type(new.type, wanted)
        if self._is_same_along(new, wanted.axis):
            made, out = self.producers[new], Var(type_)
            inputs, params = made.inputs, made.params
            if made.op in PLACED_ELEMENTWISE:
                inputs = tuple(self._convert(a, a, wanted) if a.shape else a for a in inputs)
            else:
                params = {**params, "shape": type_.shape}
            self.append(dataclasses.replace(made, inputs=inputs, outputs=(out,), params=params))
        else:
            size = {"size": type_.shape[wanted.axis]} if wanted.examples else {}
            out = self.emit(self.shared.op("shard"), (new,), type_, {"axis": wanted.axis, **size, **self._by(wanted)})
        if wanted.owner:
            self.shared.owned.add(out)
        return out
