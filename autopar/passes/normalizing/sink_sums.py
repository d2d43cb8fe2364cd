"""Moves sums over devices' shards of the examples to where the shards are made.

A step written for one device of several (`axis_name=`) is traced for all of them: a table's gradient is then [N, V, D],
one for each device, and a sum over the N follows. Here that sum goes through linear equations to the scatter-add (or
product) that made the shards, which then adds all examples' rows to one [V, D]:

  reduce_sum(zeros[N, V, D].at[n, ids[n]].add(g[n]), axis=0)  ->  zeros[V, D].at[ids].add(g)
  reduce_sum(einsum("nbi,nbo->nio", x, g), axis=0)            ->  einsum("nbi,nbo->io", x, g)

Nonlinear functions of shards stay (a norm of each device's own gradient). Batching writes such a sum as `psum` over a
numbered axis, `pmax` and `pmin` likewise; they become reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.program import Atom, Equation, Literal, Program, Var
from autopar.ir.reductions import REDUCERS
from autopar.ir.writer import expand
from autopar.jax_types import Leaf
from autopar.passes.rewriting import Rewriter

#: Collective that a step for one device calls -> the reduction.
_REDUCTIONS: Mapping[str, str] = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}


def sink_sums(program: Program) -> tuple[Program, int]:
    """Returns the program with its sums over shards moved, and their number."""
    return _Sink().run(program)


class _Sink(Rewriter):
    def rule(self, equation: Equation) -> list[Equation]:
        written: list[Equation] = []
        for e in _reduction(equation):
            sunk = _Sinking(self.made).sum(e)
            self.count += sunk is not None
            written += [e] if sunk is None else sunk
        return written


def _reduction(equation: Equation) -> list[Equation]:
    name, axes = _REDUCTIONS.get(equation.op), equation.params.get("axes", ())
    if name is None or equation.params.get("axis_index_groups") or not all(isinstance(a, int) for a in axes):
        return [equation]
    pairs = zip(equation.inputs, equation.outputs, strict=True)
    reduce = REDUCERS[name].reduce
    return [e for a, out in pairs for e in expand(lambda x: reduce(x, axes), equation, (a,), out)]


class _Sinking:
    """Writes the equations of one sum."""

    def __init__(self, producers: Mapping[Atom, Equation]) -> None:
        self._producers = producers
        self._made: list[Equation] = []

    def sum(self, equation: Equation) -> list[Equation] | None:
        """Returns the equations in place of a sum that reaches the equations that make the shards; None if it
        doesn't."""
        if equation.op != "reduce_sum" or len(equation.params["axes"]) != 1:
            return None
        (operand,), axis = equation.inputs, int(equation.params["axes"][0])
        if not self._reaches(operand, axis):
            return None
        self._summed(operand, axis, equation.outputs[0])
        return self._made

    def _reaches(self, atom: Atom, axis: int) -> bool:
        """Returns whether scatter-adds or products make a value's shards along an axis, with linear equations in
        between."""
        equation = self._producers.get(atom)
        if equation is None:
            return False
        if equation.op == "scatter-add":
            numbers = equation.params["dimension_numbers"]
            return axis in numbers.operand_batching_dims and self._is_zero(equation.inputs[0])
        if equation.op == "dot_general":
            return axis < len(equation.params["dimension_numbers"][1][0])
        return bool(inner := _through(equation, axis)) and all(self._reaches(a, d) for a, d in inner)

    def _is_zero(self, atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return not jax_compat.is_key(atom.dtype) and not np.any(np.asarray(atom.value))
        equation = self._producers.get(atom)
        keeps = ("broadcast_in_dim", "convert_element_type", "reshape")
        return equation is not None and equation.op in keeps and self._is_zero(equation.inputs[0])

    def _summed(self, atom: Atom, axis: int, output: Var | None = None) -> Var:
        equation = self._producers[atom]
        if equation.op == "scatter-add":
            apply, atoms = _scattered, equation.inputs[1:]
        elif equation.op == "dot_general":
            apply, atoms = _contracted, equation.inputs
        else:
            sums = {a: self._summed(a, d) for a, d in _through(equation, axis) or ()}
            apply, atoms = _applied, tuple(sums.get(a, a) for a in equation.inputs)
        self._made += expand(functools.partial(apply, equation, axis), equation, atoms, output)
        return self._made[-1].outputs[0]


def _through(equation: Equation, axis: int) -> list[tuple[Atom, int]] | None:
    """Returns (operand, axis) of a linear equation whose sums give the result's sum; None of any other equation."""
    if equation.op in ("add", "add_any", "sub"):
        same = all(a.shape == equation.outputs[0].shape for a in equation.inputs)
        return [(a, axis) for a in equation.inputs] if same else None
    if equation.op in ("neg", "copy", "name"):
        return [(equation.inputs[0], axis)]
    if equation.op == "convert_element_type":
        wide, narrow = equation.outputs[0].dtype, equation.inputs[0].dtype
        floats = jax_compat.is_float(wide) and jax_compat.is_float(narrow)
        return [(equation.inputs[0], axis)] if floats and jax_compat.holds_floats(wide, narrow) else None
    if equation.op in ("mul", "div") and equation.inputs[1].shape == ():
        return [(equation.inputs[0], axis)]
    if equation.op == "mul" and equation.inputs[0].shape == ():
        return [(equation.inputs[1], axis)]
    if equation.op == "transpose":
        return [(equation.inputs[0], int(equation.params["permutation"][axis]))]
    return None


def _applied(equation: Equation, axis: int, *operands: Leaf) -> Leaf:
    params = equation.params
    if equation.op == "transpose":
        gone = params["permutation"][axis]
        params = {**params, "permutation": tuple(d - (d > gone) for d in params["permutation"] if d != gone)}
    return jax_compat.bind(equation.primitive, operands, params)[0]


def _contracted(equation: Equation, axis: int, *operands: Leaf) -> Leaf:
    contract, batch = equation.params["dimension_numbers"]
    numbers = (
        tuple((*c, b[axis]) for c, b in zip(contract, batch, strict=True)),
        tuple((*b[:axis], *b[axis + 1 :]) for b in batch),
    )
    return jax_compat.bind(equation.primitive, operands, {**equation.params, "dimension_numbers": numbers})[0]


def _scattered(equation: Equation, axis: int, indices: Leaf, updates: Leaf) -> Leaf:
    numbers, old = equation.params["dimension_numbers"], equation.outputs[0]
    k = numbers.operand_batching_dims.index(axis)
    shape = [size for d, size in enumerate(old.shape) if d != axis]
    less = lambda dims: tuple(int(d) - (d > axis) for d in dims if d != axis)  # noqa: E731
    reduced = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(map(int, numbers.update_window_dims)),
        inserted_window_dims=less(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(int(d) - (d > axis) for d in numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=less(numbers.operand_batching_dims),
        scatter_indices_batching_dims=tuple(
            int(d) for n, d in enumerate(numbers.scatter_indices_batching_dims) if n != k
        ),
    )
    return jax.lax.scatter_add(jnp.zeros(shape, old.dtype), indices, updates, reduced, mode=equation.params["mode"])
