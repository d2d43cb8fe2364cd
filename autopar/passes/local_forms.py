"""Converts values of one device's program between states: whole, shard, partial sum (`localize`, `ir.local`)."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import PLACED_ELEMENTWISE
from autopar.ir.deferred import Replay
from autopar.ir.local import PARTIAL, Gathered, NotLocal, Partial, Reduction, Spread, State
from autopar.ir.operations import PREFIX, split
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, RouteType, Source, Var, family_of
from autopar.ir.program_plan import FamilyPlan, ProgramPlan
from autopar.ir.writer import ZeroWriter, expand
from autopar.jax_types import Array, Dtype


def common_state(states: Iterable[State]) -> State:
    """Returns a state that fits several values: shards along the first shard's axis, else partial sums, else whole."""
    kinds = list(states)
    first = next((s for s in kinds if isinstance(s, Spread)), None)
    return first or next((s for s in kinds if s is not None), None)


#: Operations that keep a sum of 8 or 16 bits unrounded, if their operands are.
UNROUNDED = frozenset({"add", "add_any", "reshape", "squeeze", "transpose"})
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def is_short(dtype: Dtype) -> bool:
    """Returns whether sums of a dtype are made in a wider one."""
    return jax_compat.sum_dtype(dtype) != dtype


@functools.cache
def _cast_to(dtype: np.dtype) -> Callable[[Array], Array]:
    """Returns a cast that XLA doesn't leave out, as it does one to 16 bits and back."""

    def cast(value: Array) -> Array:
        if dtype.itemsize == 2:
            value = jax.lax.reduce_precision(value, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        return jax.lax.convert_element_type(value, dtype)

    return cast


@dataclass(eq=False)
class Localization:
    """The arguments and findings of `localize`, which the walks through a program and its bodies share."""

    bound: ProgramPlan
    examples: bool  #: The batch is sharded.
    over: str = ""  #: Prefix of the names of written operations: "" over devices, "microbatch_", "tensor_".
    reduces_by_mpi: bool = False  #: Sums over the ranks' examples are reduced between programs.
    #: The findings, as in `LocalFacts`.
    owned: set[Var] = field(default_factory=set)
    reductions: list[Reduction] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)
    examples_meet: NotLocal | None = None

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
        """Returns the state of a shard of the examples, along an axis of this size."""
        is_undivided = self.undivided and size % self.undivided == 0
        return Spread(axis, examples=self.undivided if is_undivided else 0)

    def note_meeting(self, reason: str, source: Source | None) -> None:
        """Notes why examples of several devices meet before the gradients, if this is the first reason."""
        self.examples_meet = self.examples_meet or NotLocal(reason, source)


@dataclass(eq=False)
class Forms(ZeroWriter, abc.ABC):
    """The values of a block that is being rewritten. *Old* values are the global program's, *new* ones a device's."""

    shared: Localization
    nested: bool = False  #: The block is a loop's or branch's body.
    env: dict[Var, tuple[Atom, State]] = field(default_factory=dict)  #: Old variable -> new value, and its state.
    reduced: set[Atom] = field(default_factory=set)  #: Old variables that depend on a sum over the examples.
    converted: dict[tuple[Atom, State], Atom] = field(default_factory=dict)  #: (New value, state) -> it in that state.
    wide: dict[Atom, Var] = field(default_factory=dict)  #: New value of 8 or 16 bits -> it in float32, unrounded.
    #: Partial sum whose operands are better reduced than itself -> its equation, and the operands' bytes.
    reduced_early: dict[Atom, tuple[Equation, int]] = field(default_factory=dict)

    # --- values ---

    @property
    def repeats_effects(self) -> bool:
        """Each device would repeat an effect that the program has once."""
        return self.shared.examples and not self.shared.reduces_by_mpi

    @property
    def can_gather(self) -> bool:
        """Shards of the examples can be gathered on each device."""
        return self.repeats_effects and not self.shared.over

    def state(self, atom: Atom) -> State:
        """Returns an old value's state."""
        return None if isinstance(atom, Literal) else self.env[atom][1]

    def read(self, atom: Atom) -> Atom:
        """Returns the new value of an old one, in its state."""
        return atom if isinstance(atom, Literal) else self.env[atom][0]

    def _local_type(self, type_: ArrayType, state: State) -> ArrayType:
        if not isinstance(state, Spread):
            return type_
        return type_.resized(state.axis, state.size(type_.shape[state.axis], self.shared.parts(state)))

    def define(self, var: Var, state: State) -> Var:
        """Returns a new variable for an old one."""
        type_ = var.type
        if isinstance(type_, RouteType):
            new = Var(replace(type_, rows=type_.rows // self._owners(type_.family)))
        else:
            new = Var(self._local_type(type_, state))
        self.env[var] = new, state
        if isinstance(state, Spread) and state.owner:
            self.shared.owned.add(new)
        return new

    def _owners(self, family: int) -> int:
        planned = self.shared.bound.family(family)
        return 1 if planned is None or planned.layout is None else self.shared.owners

    def write(self, equation: Equation, inputs: Iterable[Atom], states: Iterable[State], **changes: object) -> None:
        """Writes an equation with new operands, and results in these states."""
        outputs = tuple(self.define(v, s) for v, s in zip(equation.outputs, states, strict=False))
        self.append(replace(equation, inputs=tuple(inputs), outputs=outputs, **changes))

    @property
    def delays_sums(self) -> bool:
        """Partial sums stay so wherever they can, so that a loop adds them up and ends with one reduction."""
        return self.nested

    @property
    def rounds_once(self) -> bool:
        """Sums of 8 and 16 bits are rounded after their reduction, as on one device."""
        return not self.delays_sums

    @abc.abstractmethod
    def body(self, body: Block, operands: Sequence[Atom], states: Sequence[State]) -> tuple[Forms, list[Var]]:
        """Rewrites a nested block, whose inputs are in these states; also returns its new inputs."""

    # --- from one state to another ---

    def as_state(self, atom: Atom, wanted: State, source: Equation | None = None) -> Atom:
        """Returns an old value in a state. Gathers shards that are wanted whole or along another axis."""
        have, new = self.state(atom), self.read(atom)
        if have == wanted or isinstance(atom.type, RouteType):
            return new
        if isinstance(have, Spread) and isinstance(wanted, Spread) and self._is_equal(have, wanted):
            return new
        if isinstance(have, Spread) and have.sums:
            self.sum_in_rank(atom, have)
            return self.as_state(atom, wanted, source)
        if isinstance(wanted, Spread) and wanted.sums and have == replace(wanted, sums=False):
            return self._once_in_rank(new)
        if isinstance(have, Partial) and isinstance(wanted, Spread) and self._can_scatter(atom, wanted):
            return self._scattered(atom, wanted, source)
        if isinstance(have, Partial) and wanted is not None:
            return self._from_whole(self.whole(atom, source), atom, wanted)
        if isinstance(have, Partial):
            return self.whole(atom, source)
        if isinstance(have, Spread):
            new = self._whole_of_spread(new, atom, have, source)
        return self._from_whole(new, atom, wanted)

    def _can_scatter(self, atom: Atom, wanted: Spread) -> bool:
        """Says whether devices can reduce a partial sum of which each keeps a shard."""
        shared = self.shared
        if self.nested or shared.over or shared.bound.on_hosts or not wanted.owner or self.known(atom) is not None:
            return False
        return atom.shape[wanted.axis] % shared.parts(wanted) == 0 and not self.is_zero(self.read(atom))

    def _scattered(self, atom: Atom, wanted: Spread, source: Equation | None) -> Atom:
        """Returns a partial sum, an old value, reduced as shards; later reads get these."""
        assert isinstance(atom, Var), "constants are whole"
        early, _ = self.reduced_early.get(atom, (None, 0))
        if early is not None and early.op == "transpose":
            axis = early.params["permutation"][wanted.axis]
            inputs = [self.as_state(early.inputs[0], wanted.moved(axis), source)]
            self.write(replace(early, outputs=(atom,)), inputs, [wanted])
        else:
            where = source.source if source else None
            self.shared.reductions.append(Reduction(atom.type, "sum", self.nested, where, in_shards=True))
            part = self._unrounded(self.read(atom)) if is_short(atom.dtype) else self.read(atom)
            type_, params = self._local_type(part.type, wanted), {"axis": wanted.axis}
            total = self.emit(self.shared.op("reduce_shards"), (part,), type_, params)
            total = self._cast(total, atom.dtype, source) if is_short(atom.dtype) else total
            self.env[atom] = total, wanted
            self.shared.owned.add(total)
        self.reduced.add(atom)
        return self.read(atom)

    def _is_equal(self, a: Spread, b: Spread) -> bool:
        parts = self.shared.parts(a), self.shared.parts(b)
        return (a.axis, a.examples, a.sums, parts[0]) == (b.axis, b.examples, b.sums, parts[1])

    def _whole_of_spread(self, new: Atom, atom: Atom, have: Spread, source: Equation | None) -> Atom:
        if have.owner and self.shared.bound.on_hosts and not self.shared.bound.shards:
            raise NotLocal("all rows of a table are read at once", source.source if source else None)
        known = None if have.owner else self.known(atom)
        if known is not None:
            return known
        return self._gather(new, atom.type, have, source)

    def _gather(self, new: Atom, type_: ArrayType, have: Spread, source: Equation | None) -> Atom:
        """Gathers a new value. Of a broadcast the operand is gathered, to send fewer bytes."""
        key = new, None
        if key in self.converted:
            return self.converted[key]
        made = None if have.owner else self.producers.get(new)
        if made is not None and made.op == "broadcast_in_dim":
            dims, inputs = made.params["broadcast_dimensions"], made.inputs
            axis = dims.index(have.axis) if have.axis in dims else None
            if axis is not None and inputs[0].shape[axis] == new.shape[have.axis]:
                whole = inputs[0].type.resized(axis, type_.shape[have.axis])
                inputs = (self._gather(inputs[0], whole, have.moved(axis), source), *inputs[1:])
            out, params = Var(type_), {**made.params, "shape": type_.shape}
            self.append(replace(made, inputs=inputs, outputs=(out,), params=params))
        else:
            if not have.owner:
                op, where = (source.op, source.source) if source else ("", None)
                nbytes = new.type.nbytes * self.shared.parts(have)
                self.shared.gathered.append(Gathered(nbytes, self.nested, op, where))
                self.shared.note_meeting("examples meet those of other devices", where)
            size = {"size": type_.shape[have.axis]} if have.examples else {}
            out = self.emit(self.shared.op("replicate"), (new,), type_, {"axis": have.axis, **size, **self._by(have)})
        self.converted[key] = out
        return out

    def whole(self, atom: Atom, source: Equation | None = None) -> Atom:
        """Returns an old value whole, reduced if it is a partial sum; later reads get it whole."""
        if not isinstance(self.state(atom), Partial):
            return self.as_state(atom, None, source)
        assert isinstance(atom, Var), "constants are whole"
        if atom in self.reduced_early:
            made, _ = self.reduced_early[atom]
            inputs = tuple(self.as_state(a, None, source) for a in made.inputs)
            self.reduced.add(atom)
            self.append(replace(made, inputs=inputs, outputs=(self.define(atom, None),)))
            return self.read(atom)
        return self.reduced_value(atom, self.read(atom), "sum", source)

    def note_early_reduction(self, equation: Equation) -> None:
        """Notes a partial sum whose operands are better reduced than itself, where it must be reduced.

        In a loop or branch: if it is larger than its operands. Elsewhere: if it is a transpose, since XLA computes a
        product and its sum by one call on a CPU, and reads the transpose in the update's loop (a GPT on 4 devices takes
        1.04 times as long as by data parallelism in place of 1.10).
        """
        parts = {a for a in equation.inputs if isinstance(self.state(a), Partial)}
        nbytes = sum(self.reduced_early[a][1] if a in self.reduced_early else a.type.nbytes for a in parts)
        made = equation.outputs[0].type
        if self.nested:
            is_early = nbytes < made.nbytes
        else:
            is_alike = [(a.type.size, a.dtype) for a in parts] == [(made.size, made.dtype)]
            is_early = equation.op == "transpose" or (is_alike and parts <= self.reduced_early.keys())
            is_early &= not self.shared.over  # sums over devices
        if is_early:
            self.reduced_early[equation.outputs[0]] = equation, nbytes

    def reduced_value(self, var: Var, part: Atom, op: str, source: Equation | None) -> Atom:
        """Returns an old value whole, its parts reduced by `op`; later reads get it whole."""
        out = self.known(var)
        if out is None:
            out = self.reduce(part, op, source)
            self.reduced.add(var)
        self.env[var] = out, None
        return out

    def known(self, atom: Atom) -> Atom | None:
        """Returns all of an old value if it was computed before."""
        return None

    def _by(self, state: Spread) -> dict[str, bool]:
        return {"ranks": True} if self.shared.parts(state) != self.shared.devices else {}

    def reduce(self, new: Atom, op: str, source: Equation | None = None, *, owners: bool = False) -> Var:
        """Returns a new value reduced over the devices, or over the owners of rows."""
        where = source.source if source else None
        self.shared.reductions.append(Reduction(new.type, op, self.nested, where))
        is_rounded = op == "sum" and self.rounds_once and is_short(new.dtype)
        part = self._unrounded(new) if is_rounded else new
        if self.shared.reduces_by_mpi and not owners:
            part = self.reduce_in_rank(part, op)
        ranks = {"ranks": True} if owners and self.shared.bound.on_hosts else {}
        total = self.emit(self.shared.op("reduce"), (part,), part.type, {"op": op, **ranks})
        return self._cast(total, new.dtype, source) if is_rounded else total

    def _unrounded(self, new: Atom) -> Atom:
        """Returns a new value of 8 or 16 bits in float32, as the products and sums that it is made of make it."""
        if new in self.wide:
            return self.wide[new]
        made, dtype = self.producers.get(new), jax_compat.sum_dtype(new.dtype)
        is_product = (
            made is not None and made.op in _PRODUCTS and not jax_compat.names_algorithm(made.params["precision"])
        )
        if made is None or not (is_product or made.op in (*UNROUNDED, "reduce_sum")):
            self.wide[new] = self._cast(new, dtype, made)
            return self.wide[new]
        params = {**made.params, "preferred_element_type": dtype} if is_product else made.params
        inputs = made.inputs if is_product else tuple(map(self._unrounded, made.inputs))
        self.wide[new] = out = Var(replace(new.type, dtype=dtype))
        self.append(replace(made, inputs=inputs, outputs=(out,), params=params))
        return out

    def _cast(self, new: Atom, dtype: Dtype, like: Equation | None) -> Var:
        self.extend(expand(_cast_to(np.dtype(dtype)), like or Equation("cast", (), ()), (new,), again=True))
        return self.equations[-1].outputs[0]

    def sum_in_rank(self, atom: Atom, have: Spread) -> None:
        """Reduces the partial sums of an old value that a rank's devices have."""
        assert isinstance(atom, Var), "constants are whole"
        self.env[atom] = self.reduce_in_rank(self.read(atom)), replace(have, sums=False)

    def _once_in_rank(self, new: Atom) -> Var:
        return self.emit(self.shared.op("once_rank"), (new,), new.type)

    def reduce_in_rank(self, new: Atom, op: str = "sum") -> Atom:
        """Returns a new value reduced over a rank's own devices."""
        if self.shared.bound.rank_devices == 1:
            return new
        return self.emit(self.shared.op("reduce_rank"), (new,), new.type, {"op": op})

    def with_whole_operands(self, equation: Equation, operands: Iterable[int]) -> Equation:
        """Returns an equation that reads some operands whole."""
        inputs = list(equation.inputs)
        for k in operands:
            if self.state(inputs[k]) is not None:
                whole = Var(inputs[k].type)
                self.env[whole] = self.whole(inputs[k], equation), None
                inputs[k] = whole
        return replace(equation, inputs=tuple(inputs))

    def _from_whole(self, new: Atom, atom: Atom, wanted: State) -> Atom:
        """Returns a whole new value as a shard or a partial sum. `atom`: the old value."""
        key = new, wanted
        if isinstance(new, Var) and key in self.converted:
            return self.converted[key]
        if isinstance(wanted, Partial):
            out = new if self.is_zero(new) else self.emit(self.shared.op("once"), (new,), new.type)
        elif isinstance(wanted, Spread):
            out = self._shard(new, wanted)
            out = self._once_in_rank(out) if wanted.sums and not self.is_zero(new) else out
        else:
            out = new
        if isinstance(new, Var):
            self.converted[key] = out
        return out

    def _is_constant_along(self, new: Atom, axis: int, depth: int = 8) -> bool:
        """Returns whether a new value is constant along an axis, by the last equations that make it."""
        made = self.producers.get(new) if depth else None
        if made is None or made.op == "ap.full":
            return made is not None
        if made.op == "broadcast_in_dim":
            dims = made.params["broadcast_dimensions"]
            return axis not in dims or made.inputs[0].shape[dims.index(axis)] != new.shape[axis]
        is_plain = made.op in PLACED_ELEMENTWISE and len(made.outputs) == 1 and not made.effects
        return is_plain and all(not a.shape or self._is_constant_along(a, axis, depth - 1) for a in made.inputs)

    def _shard(self, new: Atom, wanted: Spread) -> Var:
        """Returns a device's shard; makes a value that is constant along the axis in that size."""
        type_ = self._local_type(new.type, wanted)
        if self._is_constant_along(new, wanted.axis):
            made, out = self.producers[new], Var(type_)
            inputs, params = made.inputs, made.params
            if made.op in PLACED_ELEMENTWISE:
                inputs = tuple(self._from_whole(a, a, wanted) if a.shape else a for a in inputs)
            else:
                params = {**params, "shape": type_.shape}
            self.append(replace(made, inputs=inputs, outputs=(out,), params=params))
        else:
            size = {"size": type_.shape[wanted.axis]} if wanted.examples else {}
            out = self.emit(self.shared.op("shard"), (new,), type_, {"axis": wanted.axis, **size, **self._by(wanted)})
        if wanted.owner:
            self.shared.owned.add(out)
        return out


# --- operations in row space: the states of their operands and results ---


def _family(walk: Forms, equation: Equation) -> FamilyPlan:
    family = family_of(equation)
    bound = None if family is None else walk.shared.bound.family(family)
    assert bound is not None, "its rows belong to a family of the plan"
    return bound


def _owned(family: FamilyPlan, axis: int) -> State:
    return Spread(axis, owner=True) if family.layout is not None else None


def _rows(walk: Forms, equation: Equation) -> State:
    return _owned(_family(walk, equation), equation.params["axis"])


def _requested(walk: Forms, equation: Equation) -> State:
    is_spread = walk.shared.examples and _family(walk, equation).bounds.requested is not None
    of_rank = walk.shared.devices != walk.shared.owners
    return Spread(equation.params["axis"], rank=of_rank) if is_spread else None


def _requested_sums(walk: Forms, equation: Equation) -> State:
    state = _requested(walk, equation)
    return replace(state, sums=state.rank) if isinstance(state, Spread) else state


def _examples(walk: Forms, axis: int | None, atom: Atom) -> State:
    if axis is None or not walk.shared.examples:
        return None
    return walk.shared.of_examples(axis, atom.shape[axis])


def _fetched(walk: Forms, equation: Equation) -> State:
    """Returns the state of the rows that a lookup reads: whole for a table without layout, so that rows which each
    example has a copy of (by `vmap` of a branch that takes the table) are gathered."""
    return _requested(walk, equation) if _family(walk, equation).layout is not None else None


def _index(equation: Equation) -> Atom:
    return split(equation.op, equation.params, equation.inputs)["index"][0]


def _updates(equation: Equation) -> Atom:
    return equation.outputs[0] if equation.op == "ap.lookup" else equation.inputs[-1]


#: Name in `_in_states` -> the state of an operand or result.
_STATES: Mapping[str, Callable[[Forms, Equation], State]] = {
    "whole": lambda walk, equation: None,
    "rows": _rows,
    "requested": _requested,
    "fetched": _fetched,
    "index": lambda walk, equation: _examples(walk, equation.params.get("batch"), _index(equation)),
    "updates": lambda walk, equation: _examples(walk, equation.params["spread"], _updates(equation)),
    "owner": lambda walk, equation: Spread(equation.params["axis"], owner=True),
}


def _in_states(operands: str, result: str) -> Callable[[Forms, Equation], None]:
    """Returns a rewrite of operations whose operands and results have given states.

    `operands`: for each operand a name in `_STATES`, or "read" (any state); the last holds for all further operands.
    `result`: the name for all results.
    """
    *names, last = operands.split()

    def rewrite(walk: Forms, equation: Equation) -> None:
        inputs = []
        for atom, name in zip(equation.inputs, itertools.chain(names, itertools.repeat(last)), strict=False):
            wanted = None if name == "read" else _STATES[name](walk, equation)
            inputs.append(walk.read(atom) if name == "read" else walk.as_state(atom, wanted, equation))
        walk.write(equation, inputs, itertools.repeat(_STATES[result](walk, equation)))

    return rewrite


#: What a loop over microbatches can do whose turns are each of one rank's examples.
_MICROBATCHES = (
    "If the loop is over n microbatches, give each of them examples of every rank "
    "(x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1) in place of x.reshape(n, -1, *x.shape[1:]))"
)


def _push(walk: Forms, equation: Equation) -> None:
    is_replicated = _rows(walk, equation) is None and equation.params["op"] == "scatter-add"
    if is_replicated:
        push_partial(walk, equation)
    elif walk.nested and walk.shared.bound.on_hosts and not walk.shared.reduces_by_mpi and walk.shared.owners > 1:
        reason = "gradients of rows that every rank looks up are added to their owners' rows in a loop or branch"
        raise NotLocal(reason, equation.source, _MICROBATCHES)
    elif _is_delivered(walk, equation):
        _deliver_partial(walk, equation)
    else:
        _in_states("rows read whole", "rows")(walk, equation)


def _is_delivered(walk: Forms, equation: Equation) -> bool:
    is_pulled = _family(walk, equation).table.pulled and equation.params["op"] == "scatter-add"
    return is_pulled and walk.shared.examples and isinstance(walk.state(equation.inputs[3]), Partial)


def _deliver_partial(walk: Forms, push: Equation) -> None:
    """Writes a rank's partial sums of the rows that it requested, and their delivery to the owners."""
    base, route, index, updates = push.inputs
    requested, axis = _family(walk, push).bounds.requested, push.params["axis"]
    assert requested is not None, "rows on hosts are requested"
    type_, state = push.outputs[0].type.resized(axis, requested), _requested_sums(walk, push)
    start = walk.zeros(type_.resized(axis, requested // walk.shared.owners))
    sums = Var(type_)
    aggregate = replace(push, op="ap.aggregate", outputs=(sums,))
    walk.write(aggregate, [start, walk.read(route), walk.as_state(index, None), walk.read(updates)], [state])
    on = () if walk.is_zero(walk.read(base)) else (base,)
    deliver = Equation("ap.deliver", (sums, route, *on), push.outputs, {"axis": axis})
    _in_states("requested read rows", "rows")(walk, deliver)


def push_partial(walk: Forms, equation: Equation) -> None:
    """Pushes into rows that every device has: each sums its own examples' gradients (`allreduce_rows`)."""
    base, route, index, updates = equation.inputs
    p = equation.params
    batched = p["batch"] is not None and walk.shared.examples
    if not batched and not isinstance(walk.state(updates), Partial):
        _in_states("whole", "whole")(walk, equation)
        return
    index = walk.as_state(index, _examples(walk, p["batch"], index), equation)
    values = _own_updates(walk, equation) if batched else walk.read(updates)
    walk.write(equation, [walk.as_state(base, PARTIAL), walk.read(route), index, values], [PARTIAL])


def _own_updates(walk: Forms, equation: Equation) -> Atom:
    """Returns the updates of a device's examples; zeros for padding."""
    updates = _updates(equation)
    state = _STATES["updates"](walk, equation)
    part = walk.as_state(updates, state, equation)
    if not isinstance(state, Spread) or not state.examples:
        return part
    params = {"axis": state.axis, "size": updates.shape[state.axis], "fill": 0}
    return walk.emit("ap.only_examples", (part,), part.type, params)


def _aggregate(walk: Forms, equation: Equation) -> None:
    base, route, index, _ = equation.inputs
    state = _requested_sums(walk, equation)
    inputs = [walk.as_state(base, state, equation), walk.read(route)]
    inputs += [walk.as_state(index, _STATES["index"](walk, equation), equation), _own_updates(walk, equation)]
    walk.write(equation, inputs, [state])


def _row_ids(walk: Forms, equation: Equation) -> None:
    """Writes the ids of a device's own examples; padding gets the id of no row."""
    (index,), params, (out,) = equation.inputs, equation.params, equation.outputs
    state = _STATES["index"](walk, equation)
    part = walk.as_state(index, state, equation)
    if not isinstance(state, Spread) or not state.examples:
        walk.write(equation, [part], [None if state is None else Spread(0)])
        return
    ids = walk.define(out, Spread(0))
    each = out.shape[0] // (index.shape[state.axis] + params.get("more", 0))  # ids of an element along the axis
    padded = Var(ids.type)
    walk.append(
        replace(
            equation,
            inputs=(part,),
            outputs=(padded,),
            params={name: value for name, value in params.items() if name != "more"},
        )
    )
    fill = {"axis": 0, "size": index.shape[state.axis] * each, "fill": params["extent"]}
    walk.append(Equation("ap.only_examples", (padded,), (ids,), fill))


def _row_iota(walk: Forms, equation: Equation) -> None:
    out = walk.define(equation.outputs[0], _rows(walk, equation))
    params = {**equation.params, "shape": out.shape}
    walk.append(replace(equation, inputs=(walk.read(equation.inputs[0]),), outputs=(out,), params=params))


def _reduce_rows(walk: Forms, equation: Equation) -> None:
    """Reduces an owner's rows, then over all owners."""
    rows, route, *more = equation.inputs
    state = _rows(walk, equation)
    inputs = [walk.as_state(rows, state, equation), walk.read(route)]
    beside: list[Atom] = []
    if more:
        beside, inner = _untouched_form(walk, equation, (), more)
        (result,) = equation.bodies[0].outputs
        equation = replace(equation, bodies=(inner([state], (result,)),))
    if state is None:
        walk.write(equation, [*inputs, *beside], [None])
        return
    part = Var(equation.outputs[0].type)
    if beside and _family(walk, equation).on_hosts:  # no program has the untouched rows
        needed, *read = beside
        routed = Var(part.type)
        alone = replace(equation, op="ap.reduce_part", outputs=(routed,), bodies=())
        walk.append(replace(alone, inputs=(*inputs, needed)))
        others = (routed, inputs[1], needed, *read)
        walk.append(replace(equation, op="ap.reduce_others", inputs=others, outputs=(part,)))
    else:
        operands = (*inputs, *beside)
        walk.append(replace(equation, op="ap.reduce_part", inputs=operands, outputs=(part,)))
    walk.env[equation.outputs[0]] = walk.reduce(part, equation.params["op"], equation, owners=True), None


def _reduce_table(walk: Forms, equation: Equation) -> None:
    """Reduces an owner's rows of a whole table, as the equation's body does already, then over all owners."""
    p = equation.params
    by_owner = [axis for axis, _ in p["stored"]]
    for axis, _ in p["touched"]:
        by_owner += [axis, None]
    inputs = []
    for k, atom in enumerate(equation.inputs):
        axis = by_owner[k] if k < len(by_owner) else None
        if isinstance(atom.type, RouteType):
            inputs.append(walk.read(atom))
        else:
            inputs.append(walk.as_state(atom, None if axis is None else Spread(axis, owner=True), equation))
    part = Var(equation.outputs[0].type)
    walk.append(replace(equation, inputs=tuple(inputs), outputs=(part,)))
    walk.env[equation.outputs[0]] = walk.reduce(part, p["op"], equation, owners=True), None


def _changes(walk: Forms, equation: Equation) -> None:
    """Checks on each owner whether its untouched rows change."""
    p = equation.params
    family = _family(walk, equation)
    parts = split(equation.op, p, equation.inputs)
    axes = (*p["axes"], *p["axes"], *(axis for _, axis in p["constants"]))
    states = [_owned(family, axis) for axis in axes]
    rows = (*parts["old"], *parts["new"], *parts["constant"])
    inputs = [walk.as_state(a, s, equation) for a, s in zip(rows, states, strict=True)]
    inputs += [walk.whole(a, equation) for a in parts["frontier"]]
    for atom in (*parts["finite"], *parts["nonzero"]):  # a sum may be 0 although no device's part is, and conversely
        inputs.append(walk.whole(atom, equation) if isinstance(walk.state(atom), Partial) else walk.read(atom))
    walk.write(equation, [*inputs, *map(walk.read, (*parts["guard"], *parts["first"]))], [None])


def _sweep(walk: Forms, equation: Equation) -> None:
    axes = equation.params["axes"]
    states = [_owned(_family(walk, equation), axis) for axis in axes]
    inputs, inner = _untouched_form(walk, equation, axes, equation.inputs)
    outputs = tuple(walk.define(v, s) for v, s in zip(equation.outputs, states, strict=True))
    body = inner(states, equation.bodies[0].outputs)
    walk.append(replace(equation, inputs=tuple(inputs), outputs=outputs, bodies=(body,)))


def _untouched_form(
    walk: Forms, equation: Equation, axes: Sequence[int], operands: Sequence[Atom]
) -> tuple[list[Atom], Callable[[Sequence[State], Sequence[Atom]], Block]]:
    """Returns new operands of an untouched form (a flag, rows, values of the step), and a function that makes its body
    from the results' states and the results."""
    needed, *read = operands
    family = _family(walk, equation)
    states = [_owned(family, axis) for axis in (*axes, *equation.params["read_axes"])]
    states += [None] * (len(read) - len(states))
    inputs = [walk.read(needed), *(walk.as_state(a, s, equation) for a, s in zip(read, states, strict=True))]
    (body,) = equation.bodies
    inner, names = walk.body(body, (needed, *read), [None, *states])

    def block(states: Sequence[State], outputs: Sequence[Atom]) -> Block:
        results = tuple(inner.as_state(a, s, equation) for a, s in zip(outputs, states, strict=True))
        return Block(tuple(names), tuple(inner.equations), results)

    return inputs, block


def _update_log(walk: Forms, equation: Equation) -> None:
    """Writes a replay of each owner's rows and stamps; every device has all records."""
    replay: Replay = equation.params["replay"]
    numbers = equation.params.get("families") or (equation.params["family"],)
    families = [f for f in map(walk.shared.bound.family, numbers) if f is not None]
    stamps, entries = [_owned(f, 0) for f in families], itertools.repeat(None)
    wanted = itertools.chain((_owned(f, axis) for f in families for axis in replay.axes), stamps, entries)
    inputs = [walk.as_state(a, s, equation) for a, s in zip(equation.inputs, wanted, strict=False)]
    changed = (_owned(f, axis) for f in families for axis in replay.axes[: replay.changed])
    walk.write(equation, inputs, itertools.chain(changed, stamps, entries))


def _select(walk: Forms, equation: Equation) -> None:
    which, new, old = equation.inputs
    state = walk.state(old)
    inputs = [walk.whole(which), walk.as_state(new, state, equation), walk.as_state(old, state, equation)]
    walk.write(equation, inputs, [state])


def _replicate(walk: Forms, equation: Equation) -> None:
    """Gathers a sharded dense parameter."""
    (atom,) = equation.inputs
    state = walk.state(atom)
    if not isinstance(state, Spread):
        walk.env[equation.outputs[0]] = walk.whole(atom), None
        return
    walk.write(equation, [walk.read(atom)], [None])


def _spread(walk: Forms, equation: Equation) -> None:
    (atom,) = equation.inputs
    state = Spread(equation.params["axis"], owner=True)
    walk.env[equation.outputs[0]] = walk.as_state(atom, state, equation), state


def _whole_table(walk: Forms, equation: Equation) -> None:
    if not walk.shared.examples or walk.shared.bound.on_hosts:
        raise NotLocal("all rows of a table are read at once", equation.source)
    layout, axis = equation.params["layout"], equation.params["axis"]
    rows = walk.as_state(equation.inputs[0], Spread(axis, owner=True), equation)
    walk.write(equation, [rows], [Spread(axis, examples=layout.extent if layout.extent % layout.devices else 0)])


def _plus(walk: Forms, equation: Equation) -> None:
    wanted = common_state(map(walk.state, equation.inputs))
    walk.write(equation, [walk.as_state(a, wanted, equation) for a in equation.inputs], [wanted])


LOCAL_ROW_OPS: Mapping[str, Callable[[Forms, Equation], None]] = {
    "ap.row_ids": _row_ids,
    "ap.row_range": _in_states("read", "whole"),
    "ap.row_iota": _row_iota,
    "ap.route": _in_states("read", "whole"),
    "ap.pull": _in_states("rows read", "rows"),
    "ap.fetch": _in_states("rows read", "requested"),
    "ap.padding": _in_states("rows read", "rows"),
    "ap.lookup": _in_states("fetched read index", "updates"),
    "ap.lookup_ids": _in_states("fetched read whole", "whole"),
    "ap.push_ids": _in_states("rows read whole", "rows"),
    "ap.push": _push,
    "ap.aggregate": _aggregate,
    "ap.deliver": _in_states("requested read rows", "rows"),
    "ap.reduce_rows": _reduce_rows,
    "ap.reduce_table": _reduce_table,
    "ap.densify": _in_states("rows read", "rows"),
    "ap.commit": _in_states("rows rows read", "rows"),
    "ap.changes": _changes,
    "ap.sweep": _sweep,
    "ap.fill": _in_states("rows rows read", "rows"),
    "ap.catch_up": _update_log,
    "ap.record": _in_states("whole", "whole"),
    "ap.flush": _update_log,
    "ap.next": _in_states("whole", "whole"),
    "ap.load": _in_states("read", "whole"),
    "ap.exceeded": _in_states("whole", "whole"),
    "ap.plus": _plus,
    "ap.any": _in_states("whole", "whole"),
    "ap.select": _select,
    "ap.replicate": _replicate,
    "ap.spread": _spread,
    # An array with a table's rows that is none, such as a mask: each owner takes its rows of it.
    "ap.store": _in_states("whole", "owner"),
    "ap.whole": _whole_table,
}
