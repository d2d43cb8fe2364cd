"""Brings a program into the form that later passes read, without dead and repeated equations.

Lookups become gathers (`recognise_lookups`) in the tables themselves (`follow_joins`, `follow_reshapes`), sums over
shards move to where these are made (`sink_sums`), gathers and scatters at each example's own index get batch axes
(`batch_indices`), gradients of slices are put together (`join_pads`), and broadcasts are explicit
(`expand_broadcasts`).

Dead code goes first, so that an unused metric over a table can't refuse it; effects stay. Then equal pure equations of
one block become one, so that the ids of a forward lookup and of its backward scatter are one value. Nested blocks are
numbered separately: a remat's recomputation is never merged with the first computation.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from autopar.analysis.counting import Counting
from autopar.analysis.primitives import ELEMENTWISE
from autopar.analysis.values import Numbering
from autopar.ir.program import Atom, Block, Equation, Program, Var, count_equations
from autopar.ir.slicing import eliminate_dead
from autopar.passes.normalizing.batch_indices import batch_indices
from autopar.passes.normalizing.follow_lookups import follow_joins, follow_reshapes, join_pads
from autopar.passes.normalizing.recognise_lookups import recognise_lookups
from autopar.passes.normalizing.sink_sums import sink_sums
from autopar.passes.rewriting import Rewriter


def normalize(program: Program) -> tuple[Program, str]:
    """Returns the normalized program; the note counts the changes."""
    program, sums = sink_sums(program)
    counting = Counting(program.block)
    program, batched = batch_indices(program, counting)
    program, lookups = recognise_lookups(program, counting)
    program, joined = follow_joins(program)
    program, reshaped = follow_reshapes(program)
    program, pads = join_pads(program)
    block = expand_broadcasts(program.block)
    before = count_equations(block)
    block, _ = eliminate_dead(block)
    live = count_equations(block)
    block = merge_equal(block)
    after = count_equations(block)
    note = f"{before} equations; {before - live} dead and {live - after} repeated ones removed"
    changes = (
        (sums, "sums over devices moved into what they add up"),
        (batched, "gathers and scatters by numbers of examples are batched"),
        (lookups, "products with one-hot matrices are lookups and their gradients"),
        (joined, "lookups in joined tables, and scatters of their gradients, are in the parts"),
        (reshaped, "lookups in reshaped tables, and scatters of their gradients, are in the tables"),
        (pads, "sums of padded slices are gathers"),
    )
    return replace(program, block=block), "; ".join([note, *(f"{count} {what}" for count, what in changes if count)])


def merge_equal(block: Block) -> Block:
    """Merges equal equations of a block and, separately, of the blocks in it."""
    return _MergeEqual().block(block)


class _MergeEqual(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self._numbering = Numbering()

    def rule(self, equation: Equation) -> list[Equation]:
        earlier = self._numbering.find(equation)
        if earlier is not None:
            self.env.update(zip(equation.outputs, earlier, strict=True))
        return [equation] if earlier is None else []

    def nested(self, equation: Equation) -> list[Equation]:
        return self.rule(*super().nested(equation))

    def body(self, equation: Equation, body: Block) -> Block:
        return merge_equal(body)


# --- explicit broadcasts: `t - rate * g` with `rate[1, D]` multiplies [1, D] by [V, D] ---
#
# Elementwise primitives take operands with axes of size 1 beside larger ones. An analysis that follows an axis (rows,
# examples, shards) would have to ask whether each operand has it at all; so each such operand is broadcast by an
# equation of its own, which every analysis knows. XLA's lowering does the same.


def expand_broadcasts(block: Block) -> Block:
    """Returns the block with operands of elementwise equations in the shape of their results."""
    return _ExpandBroadcasts().block(block)


class _ExpandBroadcasts(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self._spread: dict[tuple[Atom, tuple[int, ...]], Var] = {}

    def rule(self, equation: Equation) -> list[Equation]:
        if equation.op not in ELEMENTWISE:
            return [equation]
        shape, written, inputs = equation.outputs[0].shape, list[Equation](), list[Atom]()
        for atom in equation.inputs:
            if atom.shape == shape or len(atom.shape) != len(shape):  # scalars go with any shape
                inputs.append(atom)
                continue
            if (atom, shape) not in self._spread:
                self._spread[atom, shape] = Var(replace(atom.type, shape=shape))
                written.append(_broadcast(atom, self._spread[atom, shape], equation))
            inputs.append(self._spread[atom, shape])
        if all(a is b for a, b in zip(inputs, equation.inputs, strict=True)):
            return [equation]
        return [*written, replace(equation, inputs=tuple(inputs))]

    def body(self, equation: Equation, body: Block) -> Block:
        return expand_broadcasts(body)


def _broadcast(atom: Atom, out: Var, like: Equation) -> Equation:
    params = {"shape": out.shape, "broadcast_dimensions": tuple(range(len(out.shape))), "sharding": None}
    made = jax.lax.broadcast_in_dim_p
    return replace(like, op=made.name, inputs=(atom,), outputs=(out,), params=params, primitive=made, original=None)
