"""Cuts layers that a scan goes through apart between its iterations, so that stages can share them.

The weights of such layers are stacked: a leaf has a row for each layer, and a scan takes a row an iteration. Here the
leaf becomes several, each with the rows of some layers, and the scan as many, one after the other. Results for each
layer (residuals, gradients), elementwise functions of these in the optimizer, and its slots are in the same parts.
Equations without a rule (`analysis.local.follow_spread`) read the concatenated parts, which is right all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
from jax.extend.core import Primitive

from autopar import jax_compat
from autopar.analysis.batch import SUMMED
from autopar.analysis.local import REDUCES, follow_spread, resized_params
from autopar.ir.local import NotLocal
from autopar.ir.paths import layers_path
from autopar.ir.program import Atom, Block, Equation, Input, Output, Program, Source, Var
from autopar.ir.slicing import clone
from autopar.passes.staging.parts import find_parts, used_weights

T = TypeVar("T")
#: Reduction -> the primitive that joins its parts.
_JOINS = {"sum": jax.lax.add_p, "max": jax.lax.max_p, "min": jax.lax.min_p, "prod": jax.lax.mul_p}
#: The end of each part of a leaf, in layers; the last one is the number of layers.
Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Leaves of the state whose rows are layers of the same scans."""

    layers: int  #: The number of layers.
    leaves: tuple[Var, ...]  #: Weights and their slots.


@dataclass(frozen=True, slots=True, eq=False)
class CutProgram:
    """A program whose stacked leaves are in parts."""

    program: Program  #: It has an input for each part, and an output for each new one.
    #: Inputs and outputs of the whole program, in order; a leaf in parts is a tuple.
    inputs: tuple[Var | tuple[Var, ...], ...]
    outputs: tuple[Atom | tuple[Atom, ...], ...]
    leaves: Mapping[Var, tuple[Var, ...]]  #: Leaf -> its parts.

    def parts(self, leaf: Var) -> tuple[Var, ...]:
        """Returns the parts of a leaf; itself, if it is whole."""
        return self.leaves.get(leaf, (leaf,))

    def layers(self, leaves: Sequence[Var]) -> list[tuple[Var, ...]]:
        """Returns the parts of several leaves that have the same layers, layer by layer."""
        return list(zip(*map(self.parts, leaves), strict=True))


def find_stacks(program: Program) -> list[Stack]:
    """Returns the stacks of a step that `split_update` has cut, whose gradient program only scans over their layers."""
    parts = find_parts(program)
    lengths = {e.params["length"] for e in parts.body.equations if e.op == "scan"} - {1}
    weights = used_weights(program, parts)
    leaves = {v for v in weights if v.shape[0] in lengths}
    while leaves:
        cutter = _Cutter({v: (1, v.shape[0]) for v in leaves})
        cutter.run(program)
        kept = {v for scanned in cutter.scans for v in scanned} - cutter.spoiled.keys()
        if kept == leaves:
            groups = (sorted(group, key=weights.index) for group in _connected(cutter.scans))  # for all ranks alike
            return [_with_slots(program, cutter, group, set(weights)) for group in groups]
        leaves = kept
    return []


def why_whole(program: Program, leaf: Var) -> str:
    """Says why a leaf of a step that `split_update` has cut is in no stack."""
    cutter = _Cutter({leaf: (1, leaf.shape[0])})
    cutter.run(program)
    if leaf not in cutter.spoiled:
        return "no scan goes through its first axis"
    source = cutter.spoiled[leaf]
    return "the step reads it otherwise than a scan does, a layer at a time" + (f" ({source})" if source else "")


def _connected(groups: Iterable[frozenset[Var]]) -> list[frozenset[Var]]:
    joined: list[frozenset[Var]] = []
    for group in groups:
        met = [other for other in joined if not group.isdisjoint(other)]
        joined = [other for other in joined if other not in met] + [group.union(*met)]
    return joined


def _with_slots(program: Program, cutter: _Cutter, weights: Sequence[Var], read: Collection[Var]) -> Stack:
    """Returns weights, and other leaves that only the update reads, whose new value depends on them layer by layer."""
    block, layers, leaves = program.block, weights[0].shape[0], dict.fromkeys(weights)
    for leaf, out in program.new_states.items():
        var, new = block.inputs[leaf], cutter.value(block.outputs[out])
        is_cut = isinstance(new, _Pieces) and new.axis == 0 and new.leaves <= set(weights)
        if is_cut and var.shape[:1] == (layers,) and var not in read:
            leaves[var] = None
    return Stack(layers, tuple(leaves))


def cut_layers(program: Program, ends: Mapping[Var, Ends]) -> CutProgram:
    """Returns the program with leaves in parts. `ends`: leaf to cut -> the ends of its parts."""
    cutter = _Cutter(ends)
    block = cutter.run(program)
    inputs = tuple(cutter.parts.get(v, v) for v in program.block.inputs)
    own: list[Input] = []
    numbers: dict[int, int] = {}
    for k, (var, leaf) in enumerate(program.named_inputs):
        numbers[k] = len(own)
        own += [replace(leaf, path=p) for p in layers_path(leaf.path, ends[var])] if var in ends else [leaf]
    outputs: list[Atom | tuple[Atom, ...]] = []
    new: list[Output] = []
    for atom, out in zip(program.block.outputs, program.outputs, strict=True):
        var = None if out.state is None else program.block.inputs[out.state]
        if var is None or var not in ends:
            outputs.append(cutter.whole(atom))
            new.append(out if out.state is None else replace(out, state=numbers[out.state]))
            continue
        outputs.append(cutter.pieces(atom, 0, ends[var]).atoms)
        paths = layers_path(out.path, ends[var])
        new += [Output(path, numbers[out.state or 0] + k) for k, path in enumerate(paths)]
    flat = tuple(a for each in outputs for a in (each if isinstance(each, tuple) else (each,)))
    block = Block(tuple(v for each in inputs for v in _listed(each)), tuple(cutter.equations), flat)
    cut = replace(program, block=block, inputs=tuple(own), outputs=tuple(new))
    return CutProgram(cut, inputs, tuple(outputs), cutter.parts)


def _listed(each: Var | tuple[Var, ...]) -> tuple[Var, ...]:
    return each if isinstance(each, tuple) else (each,)


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """A value in parts along an axis; `leaves`: those that it depends on."""

    axis: int
    ends: Ends
    atoms: tuple[Atom, ...]
    leaves: frozenset[Var]


def _sizes(ends: Ends) -> list[int]:
    return [end - start for start, end in zip((0, *ends), ends, strict=False)]


class _Cutter:
    """Writes a block with values in parts."""

    def __init__(self, ends: Mapping[Var, Ends], *, is_body: bool = False) -> None:
        #: Leaf that is cut -> the ends of its parts, and the parts.
        self.ends = ends
        self.parts: dict[Var, tuple[Var, ...]] = {}
        self.equations: list[Equation] = []  #: The written equations.
        self.scans: list[frozenset[Var]] = []  #: For each scan that is cut, the leaves that it goes through.
        #: Leaf that the gradient program doesn't only read layer by layer -> where.
        self.spoiled: dict[Var, Source | None] = {}
        self._is_body, self._spoils = is_body, True  # until the update
        self._env: dict[Var, _Pieces] = {}
        self._wholes: dict[Var, Var] = {}
        self._sliced: dict[tuple[Var, int, Ends], _Pieces] = {}

    def run(self, program: Program) -> Block:
        """Cuts all of a program, and returns it with the old outputs."""
        for var, ends in self.ends.items():
            self.parts[var] = tuple(Var(var.type.resized(0, size)) for size in _sizes(ends))
            self._env[var] = _Pieces(0, ends, self.parts[var], frozenset((var,)))
        for equation in program.block.equations:
            if equation.op == "ap.microbatches":
                self._microbatches(equation)
                self._spoils = False
            else:
                self.add(equation)
        return Block(program.block.inputs, tuple(self.equations), program.block.outputs)

    def value(self, atom: Atom) -> Atom | _Pieces:
        return self._env.get(atom, atom) if isinstance(atom, Var) else atom

    def add(self, equation: Equation) -> None:
        """Writes an equation, in parts if some of its operands are."""
        cut = {k: value for k, a in enumerate(equation.inputs) if isinstance(value := self.value(a), _Pieces)}
        if equation.op == "scan" and self._scan(equation, cut):
            return
        if not cut:
            self.equations.append(equation)
        elif equation.bodies or equation.effects or not self._plain(equation, cut):
            self._spoil(equation, cut.values())
            inputs = tuple(self.whole(a) for a in equation.inputs)
            self.equations.append(replace(equation, inputs=inputs))

    def whole(self, atom: Atom) -> Atom:
        """Returns a value with its parts concatenated."""
        value = self.value(atom)
        if not isinstance(value, _Pieces) or not isinstance(atom, Var):
            return atom
        if atom not in self._wholes:
            self._wholes[atom] = Var(atom.type)
            self._write("concatenate", jax.lax.concatenate_p, value.atoms, self._wholes[atom], dimension=value.axis)
        return self._wholes[atom]

    def pieces(self, atom: Atom, axis: int, ends: Ends) -> _Pieces:
        """Returns a value in parts."""
        value = self.value(atom)
        if isinstance(value, _Pieces) and (value.axis, value.ends) == (axis, ends):
            return value
        source = self.whole(atom)
        assert isinstance(source, Var), "a literal has no axes"
        key = (source, axis, ends)
        if key not in self._sliced:
            parts = tuple(Var(source.type.resized(axis, size)) for size in _sizes(ends))
            for part, start, end in zip(parts, (0, *ends), ends, strict=False):
                starts = tuple(start if d == axis else 0 for d in range(len(source.shape)))
                limits = tuple(end if d == axis else size for d, size in enumerate(source.shape))
                params = {"start_indices": starts, "limit_indices": limits, "strides": None}
                self._write("slice", jax_compat.slice_p, (source,), part, **params)
            self._sliced[key] = _Pieces(axis, ends, parts, frozenset())
        return self._sliced[key]

    def _write(self, op: str, primitive: Primitive, inputs: tuple[Atom, ...], output: Var, **params: object) -> None:
        self.equations.append(Equation(op, inputs, (output,), params, primitive=primitive))

    def _spoil(self, equation: Equation, values: Iterable[_Pieces]) -> None:
        if self._spoils:
            self.spoiled.update({leaf: equation.source for value in values for leaf in value.leaves})

    def _microbatches(self, equation: Equation) -> None:
        """Writes the gradient program, its operands and sums in parts."""
        (body,), axes, joins = equation.bodies, equation.params["axes"], equation.params["joins"]
        inner = _Cutter({}, is_body=True)
        inputs: list[tuple[Atom, Var, int | None]] = []
        for atom, var, axis in zip(equation.inputs, body.inputs, axes, strict=True):
            inputs += inner._crossing(self.value(atom) if axis is None else self.whole(atom), var, axis)
        for each in body.equations:
            inner.add(each)
        outputs: list[tuple[Atom, Var, str | int]] = []
        for atom, var, join in zip(body.outputs, equation.outputs, joins, strict=True):
            outputs += self._crossing(inner.value(atom) if isinstance(join, str) else inner.whole(atom), var, join)
        self.scans += inner.scans
        self.spoiled |= inner.spoiled
        block = Block(tuple(v for _, v, _ in inputs), tuple(inner.equations), tuple(a for a, _, _ in outputs))
        axes, joins = tuple(axis for _, _, axis in inputs), tuple(join for _, _, join in outputs)
        params = {**equation.params, "axes": axes, "joins": joins}
        self.equations.append(
            replace(
                equation,
                inputs=tuple(a for a, _, _ in inputs),
                outputs=tuple(v for _, v, _ in outputs),
                params=params,
                bodies=(block,),
            )
        )

    def _crossing(self, value: Atom | _Pieces, var: Var, how: T) -> list[tuple[Atom, Var, T]]:
        """Returns a value that comes in as `var`, with its name here; each of its parts by itself."""
        if not isinstance(value, _Pieces):
            return [(value, var, how)]
        parts = tuple(Var(a.type) for a in value.atoms)
        self._env[var] = replace(value, atoms=parts)
        return [(atom, part, how) for atom, part in zip(value.atoms, parts, strict=True)]

    def _scan(self, equation: Equation, cut: Mapping[int, _Pieces]) -> bool:
        """Writes a scan cut between iterations, where its operands are; returns whether it is one."""
        params = equation.params
        border, first = equation.border, equation.border.fixed
        layered = [value for k, value in cut.items() if k >= first and value.axis == 0]
        if not layered:
            return False
        ends = layered[0].ends
        self._spoil(equation, (v for k, v in cut.items() if k < first or (v.axis, v.ends) != (0, ends)))
        leaves = frozenset[Var]().union(*(value.leaves for value in layered))
        consts = tuple(self.whole(a) for a in equation.inputs[: border.consts])
        carry = tuple(self.whole(a) for a in equation.inputs[border.consts : first])
        xs = [self.pieces(a, 0, ends).atoms for a in equation.inputs[first:]]
        made: dict[int, tuple[Var, ...]] = {}
        order, sizes = range(len(ends)), _sizes(ends)
        last = 0 if params["reverse"] else len(ends) - 1
        # One scan for each part, in the order of the iterations; the carries go from one to the next.
        for k in reversed(order) if params["reverse"] else order:
            carries = equation.outputs[: border.carries]
            carries = carries if k == last else tuple(Var(v.type) for v in carries)
            ys = tuple(Var(v.type.resized(0, sizes[k])) for v in equation.outputs[border.carries :])
            self.equations.append(
                replace(
                    equation,
                    inputs=(*consts, *carry, *(x[k] for x in xs)),
                    outputs=(*carries, *ys),
                    params={**params, "length": sizes[k], "unroll": min(params["unroll"], sizes[k])},
                    bodies=(clone(equation.bodies[0], {})[0],),
                    original=None,
                )
            )
            carry, made[k] = carries, ys
        for n, var in enumerate(equation.outputs[border.carries :]):
            self._env[var] = _Pieces(0, ends, tuple(made[k][n] for k in order), leaves)
        self.scans.append(leaves)
        return True

    def _plain(self, equation: Equation, cut: Mapping[int, _Pieces]) -> bool:
        """Writes an equation without bodies for each part; returns whether there is a rule."""
        # Parts with other ends can't meet; scatters, and our operations, have no rule for parts.
        first, *others = cut.values()
        if any(other.ends != first.ends for other in others) or equation.op.startswith(("scatter", "ap.")):
            return False
        along = {k: value.axis for k, value in cut.items()}
        try:
            placed = follow_spread(equation, along, 1)
        except NotLocal:
            return False
        is_sum = placed.axis == SUMMED
        if is_sum and (REDUCES.get(equation.op) not in _JOINS or self._is_body or len(equation.outputs) > 1):
            return False
        leaves = first.leaves.union(*(other.leaves for other in others))
        operands = {k: value.atoms for k, value in cut.items()}
        operands |= {k: self.pieces(equation.inputs[k], axis, first.ends).atoms for k, axis in placed.needed.items()}
        made: list[tuple[Var, ...]] = []
        for k, size in enumerate(_sizes(first.ends)):
            types = [v.type if is_sum else v.type.resized(placed.axis, size) for v in equation.outputs]
            params = equation.params if is_sum else resized_params(equation, along, placed.axis, size)
            inputs = tuple(operands[j][k] if j in operands else a for j, a in enumerate(equation.inputs))
            made.append(tuple(map(Var, types)))
            self.equations.append(replace(equation, inputs=inputs, outputs=made[-1], params=params, original=None))
        if is_sum:
            self._joined(equation, [part for (part,) in made])
            return True
        for n, var in enumerate(equation.outputs):
            self._env[var] = _Pieces(placed.axis, first.ends, tuple(outputs[n] for outputs in made), leaves)
        return True

    def _joined(self, equation: Equation, parts: Sequence[Var]) -> None:
        primitive, total = _JOINS[REDUCES[equation.op]], parts[0]
        for k, part in enumerate(parts[1:], 2):
            (out,) = equation.outputs
            new = out if k == len(parts) else Var(out.type)
            self._write(primitive.name, primitive, (total, part), new)
            total = new
