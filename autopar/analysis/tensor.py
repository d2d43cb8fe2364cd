"""Decides the axis along which each weight of a product is divided over a tensor axis, and the exchanges that follow.

A first product is divided by columns: each device has some features of its result, and computes with these as long as
equations keep features apart. The next product, which sums over them, is divided by rows: each device has a partial
sum, and one AllReduce adds them up. Attention is such a pair, over its heads; a product with a vocabulary is followed
by sums over it. The rest of the state (biases, optimizer slots) is divided as its new value is.

Source: Megatron-LM (Shoeybi et al., 2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.batch import SUMMED, result_axis
from autopar.analysis.interpreter import Interpreter
from autopar.analysis.local import REDUCES, follow_spread
from autopar.analysis.primitives import MOVES
from autopar.analysis.work import flops
from autopar.ir.figures import wire_bytes
from autopar.ir.local import NotLocal, sent_bytes
from autopar.ir.program import Atom, Equation, Program, Source, Var

#: An axis' value for partial sums on each device.
PARTIAL = -1
#: Most rounds in which leaves follow others (slots of slots); with more, nothing is divided.
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange of the devices of a tensor axis in a step."""

    collective: str  #: XLA's name, "all-reduce" or "all-gather".
    nbytes: float  #: Bytes of the value, for a device's examples.
    times: int  #: Iterations of a loop.
    source: Source | None  #: The user's line.

    def sent(self, devices: int) -> float:
        return wire_bytes(self.collective, devices, self.times * self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """Weights that are divided together or not at all."""

    #: Leaf of the state -> the axis along which it is divided; leaves that follow a weight among them.
    axes: Mapping[int, int]
    weights: tuple[int, ...]  #: Those of them that products read, in order.
    exchanges: tuple[Exchange, ...]
    flops: float  #: Operations of the divided products.


def divide_products(program: Program, leaves: Collection[int], devices: int, examples: int) -> list[TensorGroup]:
    """Returns the groups of weights that T `devices` can divide, in the order of their first products. `leaves`: inputs
    of the state that may be divided. `examples`: N, the number of devices over which examples are spread."""
    inputs, new = program.block.inputs, program.new_states
    decided: dict[int, int] = {}
    followed: dict[int, _Value] = {}
    for _ in range(_ROUNDS):  # until every leaf is where its new value is
        walk = _Walk(program.batch, examples, devices, decided)
        for k in leaves:
            axes = tuple(range(len(inputs[k].shape)))
            walk.values[inputs[k]] = followed.get(k) or _Value(leaf=k, axes=axes)
        walk.run(program.block.equations)
        returned = {k: walk.located(walk.value(program.block.outputs[new[k]])) for k in leaves if k in new}
        others = {k: v for k, v in returned.items() if k not in decided and v.axis is not None and v.axis != PARTIAL}
        same = {k: v.axis for k, v in others.items()} == {k: v.axis for k, v in followed.items()}
        if same and not walk.decided_more:
            for k in decided.keys() & returned.keys():
                walk.brought(inputs[k], returned[k], decided[k])
            return walk.groups(followed)
        followed = others
    return []


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The division of the values of some equations, with the leaves decided."""

    devices: int  #: T.
    axes: Mapping[Var, int]  #: Divided value -> its axis.
    flops: Mapping[Equation, float]  #: Equation -> the operations of its divided products.
    exchanges: Mapping[Equation, Sequence[Exchange]]  #: Equation -> exchanges in it, or for its operands.


class Divider:
    """Follows divided leaves (leaf -> the axis along which it is divided) through equations."""

    def __init__(self, leaves: Mapping[Var, int], devices: int) -> None:
        self._walk = _Walk({}, 1, devices, {})
        self._walk.values.update({v: _Value(axis, weight) for weight, (v, axis) in enumerate(leaves.items())})
        self._devices = devices
        self._flops: dict[Equation, float] = {}
        self._exchanges: dict[Equation, Sequence[Exchange]] = {}

    def same(self, new: Var, old: Atom) -> None:
        """Records that a new value is an old one."""
        self._walk.values[new] = self._walk.value(old)

    def run(self, equations: Iterable[Equation]) -> None:
        """Follows leaves through equations, in an order in which they can run."""
        for equation in equations:
            before = self._walk.mark()
            self._walk.run([equation])
            after = self._walk.mark()
            flops_ = [f for key, f in after.flops.items() if key not in before.flops]
            exchanges = [e for key, e in after.exchanges.items() if key not in before.exchanges]
            if flops_:
                self._flops[equation] = sum(flops_)
            if exchanges:
                self._exchanges[equation] = exchanges

    @property
    def division(self) -> Division:
        axes_found = {v: value.axis for v, value in self._walk.values.items()}
        axes = {v: axis for v, axis in axes_found.items() if axis is not None and axis != PARTIAL}
        return Division(self._devices, axes, self._flops, self._exchanges)


@dataclass(frozen=True, slots=True)
class _Value:
    """A device's part of a value."""

    axis: int | None = None  #: The divided axis; `PARTIAL`; None: the device has all of it.
    weight: int | None = None  #: The weight that it is divided for.
    #: The leaf of the state whose elements it has unchanged, and the leaf's axis for each of its own.
    leaf: int | None = None
    axes: tuple[int | None, ...] = ()


_WHOLE = _Value()


@dataclass(eq=False)
class _Notes:
    """The findings of a walk, by the weight that they are for."""

    exchanges: dict[tuple[int, Atom, str], Exchange] = field(default_factory=dict)
    flops: dict[tuple[int, Equation], float] = field(default_factory=dict)


class _Walk(Interpreter[_Value]):
    """Follows divided leaves once; weights are decided at their first product. `batch`: the axis of examples of each
    variable that has one. `decided`: leaf -> its decided axis."""

    def __init__(self, batch: Mapping[Var, int], examples: int, devices: int, decided: dict[int, int]) -> None:
        super().__init__()
        self._batch, self._examples, self._devices, self._decided = batch, examples, devices, decided
        self._notes, self._trips = _Notes(), 1
        self._joined: dict[int, int] = {}
        self.decided_more = False

    # --- the lattice ---

    def unknown(self, atom: Atom) -> _Value:
        return _WHOLE

    def plain(self, equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
        if equation.op == "optimization_barrier":
            return operands
        self._decide(equation, operands)
        located = [self.located(v) for v in operands]
        result = self._divide(equation, located)
        moved = self._moved(equation, operands)
        if moved is not None and result.axis is None:
            return [moved] * len(equation.outputs)
        return [result] * len(equation.outputs)

    def join(self, values: Sequence[_Value], atoms: Sequence[Atom]) -> _Value:
        """Returns a divided value, if any is; whole ones are divided without an exchange."""
        values = [self.located(v) for v in values]
        first = next((v for v in values if v.axis is not None and v.axis != PARTIAL), _WHOLE)
        for value, atom in zip(values, atoms, strict=True):
            if value.axis != first.axis:
                self._whole(atom, value)
        return first

    def inside(self, value: _Value) -> _Value:
        """Keeps the axis within one layer: a stack of weights is divided along the axes of each layer."""
        if value.leaf is not None:
            return replace(value, axes=value.axes[1:])
        return replace(value, axis=value.axis - 1) if value.axis else _WHOLE

    def outside(self, value: _Value) -> _Value:
        value = self.located(value)
        return value if value.axis in (None, PARTIAL) else replace(value, axis=value.axis + 1)

    def nested(self, equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
        """Adds up partial sums before a loop or branch."""
        for atom, value in zip(equation.inputs, operands, strict=True):
            if value.axis == PARTIAL:
                self._whole(atom, value)
        return super().nested(equation, [_WHOLE if v.axis == PARTIAL else v for v in operands])

    def loop(self, equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
        before, self._trips = self._trips, self._trips * equation.params.get("length", 1)
        try:
            return super().loop(equation, operands)
        finally:
            self._trips = before

    def while_loop(self, equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
        for atom, value in zip(equation.inputs, operands, strict=True):
            self._whole(atom, self.located(value))
        return self.unconverged(equation)

    def mark(self) -> _Notes:
        return _Notes(dict(self._notes.exchanges), dict(self._notes.flops))

    def restore(self, mark: _Notes) -> None:
        self._notes = mark

    # --- findings ---

    def located(self, value: _Value) -> _Value:
        """Returns a device's part of a value; of a leaf's elements, once the leaf is decided."""
        if value.leaf is None:
            return value
        axis = self._decided.get(value.leaf)
        return _Value(value.axes.index(axis), value.leaf) if axis in value.axes and axis is not None else _WHOLE

    def brought(self, atom: Atom, value: _Value, axis: int) -> None:
        """Notes that a value is needed in parts along an axis."""
        if value.axis != axis:
            self._whole(atom, value)

    def groups(self, followed: Mapping[int, _Value]) -> list[TensorGroup]:
        """Returns the weights that are divided together; `followed`: leaves that follow their new values."""
        axes: dict[int, dict[int, int]] = {}
        for leaf, axis in self._decided.items():
            axes.setdefault(self._root(leaf), {})[leaf] = axis
        weights = {root: tuple(leaves) for root, leaves in axes.items()}
        for leaf, value in followed.items():
            if value.weight is not None and value.axis is not None:
                axes[self._root(value.weight)][leaf] = value.axis
        groups = []
        for root, own in axes.items():
            exchanges = [e for (weight, _, _), e in self._notes.exchanges.items() if self._root(weight) == root]
            work = sum(f for (weight, _), f in self._notes.flops.items() if self._root(weight) == root)
            groups.append(TensorGroup(own, weights[root], tuple(exchanges), work))
        return groups

    def _root(self, weight: int) -> int:
        while weight in self._joined:
            weight = self._joined[weight]
        return weight

    def _join_groups(self, values: Sequence[_Value]) -> int | None:
        roots = list(dict.fromkeys(self._root(v.weight) for v in values if v.weight is not None))
        self._joined.update(dict.fromkeys(roots[1:], roots[0]) if roots else {})
        return roots[0] if roots else None

    def _whole(self, atom: Atom, value: _Value) -> None:
        if value.axis is not None and value.weight is not None:
            self._exchange("all-reduce" if value.axis == PARTIAL else "all-gather", atom, value.weight, None)

    def _exchange(self, collective: str, atom: Atom, weight: int, source: Source | None) -> None:
        key = weight, atom, collective
        if key not in self._notes.exchanges:
            op = "sum" if collective == "all-reduce" else ""
            size = sent_bytes(atom.type, op) / (self._examples if atom in self._batch else 1)
            self._notes.exchanges[key] = Exchange(collective, size, self._trips, source)

    def _moved(self, equation: Equation, operands: Sequence[_Value]) -> _Value | None:
        """Returns a leaf's unchanged elements, cast or in another shape."""
        if equation.op not in MOVES or len(operands) != 1 or operands[0].leaf is None:
            return None
        (atom,), (out,) = equation.inputs, equation.outputs
        axes: list[int | None] = [None] * len(out.shape)
        for own, axis in enumerate(operands[0].axes):
            result = result_axis(equation, 0, own, self._devices)
            if result is not None and result != SUMMED and atom.shape[own] > 1:
                axes[result] = axis
        return _Value(leaf=operands[0].leaf, axes=tuple(axes))

    def _decide(self, equation: Equation, operands: Sequence[_Value]) -> None:
        """Decides a product's weight: by rows if the product sums over divided features, else by columns."""
        if equation.op != "dot_general":
            return
        contract, batch = equation.params["dimension_numbers"]
        for k, value in enumerate(operands):
            other = self.located(operands[1 - k])
            if value.leaf is None or value.leaf in self._decided or operands[1 - k].leaf is not None:
                continue
            own = [d for d in range(len(value.axes)) if d not in contract[k] and d not in batch[k]]
            if other.axis is not None and other.axis != PARTIAL:
                pairs = [*zip(contract[1 - k], contract[k], strict=True), *zip(batch[1 - k], batch[k], strict=True)]
                own = [d for axis, d in pairs if axis == other.axis]
            shape = equation.inputs[k].shape
            axes = [value.axes[d] for d in own if value.axes[d] is not None and shape[d] % self._devices == 0]
            if axes and axes[0] is not None:
                self._decided[value.leaf] = axes[0]
                self.decided_more = True

    def _divide(self, equation: Equation, operands: Sequence[_Value]) -> _Value:
        """Returns the result of divided operands."""
        operands = list(operands)
        for k, value in enumerate(operands):
            if value.axis == PARTIAL:
                self._whole(equation.inputs[k], value)
                operands[k] = _WHOLE
        spread = {k: v.axis for k, v in enumerate(operands) if v.axis is not None}
        if not spread or not equation.outputs:
            return _WHOLE
        looked_up = _LOOKUPS.get(equation.op)
        axis = None if looked_up is None else looked_up(equation, spread)
        if axis is None:
            try:
                axis = follow_spread(equation, spread, self._devices).axis
                if axis == SUMMED and equation.op not in REDUCES:
                    raise NotLocal(f"{equation.op} over features")
            except NotLocal:
                return self._without_some(equation, operands, spread)
        weight = self._join_groups([operands[k] for k in spread])
        assert weight is not None, "a value is divided for a weight"
        if equation.op == "dot_general":
            self._notes.flops[weight, equation] = self._trips * flops(equation)
        if axis != SUMMED:
            return _Value(axis, weight)
        if REDUCES.get(equation.op, "sum") == "sum":
            return _Value(PARTIAL, weight)
        self._exchange("all-reduce", equation.outputs[0], weight, equation.source)
        return _WHOLE

    def _without_some(self, equation: Equation, operands: Sequence[_Value], spread: Mapping[int, int]) -> _Value:
        """Makes operands whole that have no rule in parts; a product keeps the larger one divided, others none."""
        kept = max(spread, key=lambda k: equation.inputs[k].type.size)
        if equation.op != "dot_general" or len(spread) == 1:
            kept = None
        for k in spread:
            if k != kept:
                self._whole(equation.inputs[k], operands[k])
        rest = [v if k == kept else _WHOLE for k, v in enumerate(operands)]
        return self._divide(equation, rest)


def _gathered(equation: Equation, spread: Mapping[int, int]) -> int | None:
    numbers = equation.params["dimension_numbers"]
    return SUMMED if set(spread) == {0} and spread[0] in numbers.collapsed_slice_dims else None


def _scattered(equation: Equation, spread: Mapping[int, int]) -> int | None:
    numbers = equation.params["dimension_numbers"]
    return spread[0] if set(spread) == {0} and spread[0] in numbers.inserted_window_dims else None


#: Rules for operations that select along a divided axis.
_LOOKUPS: Mapping[str, Callable[[Equation, Mapping[int, int]], int | None]] = {
    "gather": _gathered,
    "scatter-add": _scattered,
}
