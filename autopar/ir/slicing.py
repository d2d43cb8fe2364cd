"""Backward slices of blocks: liveness, dead-code elimination, and hoisting a value out of its loops.

Precise through scan (a carry is live only if something live reads it), remat and cond; a while is all or nothing.
Effects are always live.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var
from autopar.ir.rowspace import representative
from autopar.jax_compat import is_rounded


def eliminate_dead(
    block: Block, live: Sequence[bool] | None = None, *, effects: bool = True
) -> tuple[Block, list[bool]]:
    """Returns the block with its live outputs only, and which inputs it still reads (all inputs are kept).

    `live`: which outputs are wanted; all by default. `effects`: effects are live by themselves; not so in a second copy
    of a block.
    """
    live = [True] * len(block.outputs) if live is None else live
    outputs = tuple(a for a, keep in zip(block.outputs, live, strict=True) if keep)
    needed: set[Atom] = set(outputs)
    kept: list[Equation] = []
    for equation in reversed(block.equations):
        if needed.isdisjoint(equation.outputs) and not (effects and equation.effects):
            continue
        if equation.bodies:
            equation = reduce_equation(equation, [v in needed for v in equation.outputs], effects)
        needed.update(equation.inputs)
        kept.append(equation)
    used = [v in needed for v in block.inputs]
    block = block.with_equations(kept[::-1])
    return (block if all(live) else replace(block, outputs=outputs)), used


def independent_outputs(block: Block) -> list[list[int]]:
    """Groups outputs so that a program of one group alone rounds as the whole block does: no two groups share an
    intermediate result that is rounded, which XLA might fuse otherwise. What is exact (integers, random keys) may be
    shared; each group computes it. Effects keep all outputs together."""
    if any(equation.effects for equation in block.equations):
        return [list(range(len(block.outputs)))]
    leader = list(range(len(block.outputs)))
    readers: dict[Atom, set[int]] = {}
    for k, atom in enumerate(block.outputs):
        readers.setdefault(atom, set()).add(k)
    for equation in reversed(block.equations):
        # All that reads a result comes later, and is known.
        found = set().union(*(readers.get(v, ()) for v in equation.outputs))
        inner = (v for body in equation.bodies for each in body.walk() for v in each.outputs)
        if any(isinstance(v.type, ArrayType) and is_rounded(v.type.dtype) for v in (*equation.outputs, *inner)):
            for k in found:
                leader[representative(leader, k)] = representative(leader, min(found))
            found = {representative(leader, k) for k in found}
        for atom in equation.inputs:
            readers.setdefault(atom, set()).update(found)
    groups: dict[int, list[int]] = {}
    for k in range(len(block.outputs)):
        groups.setdefault(representative(leader, k), []).append(k)
    return list(groups.values())


def uniform_outputs(block: Block) -> dict[int, Atom]:
    """Returns, for outputs that are one number everywhere, that number."""
    makers = {
        v: equation for equation in block.equations for v in equation.outputs if equation.op == "broadcast_in_dim"
    }
    sources = {k: makers[atom].inputs[0] for k, atom in enumerate(block.outputs) if atom in makers}
    return {k: atom for k, atom in sources.items() if isinstance(atom.type, ArrayType) and not atom.type.shape}


def reduce_equation(equation: Equation, wanted: Sequence[bool], effects: bool = True) -> Equation:
    """Returns the equation without unwanted outputs, and without operands that only those need."""
    if equation.op == "scan":
        return _reduce_scan(equation, wanted, effects)
    if equation.op in ("remat", "cond"):
        return _reduce_branches(equation, wanted, effects)
    return equation


def halves(equation: Equation, wanted: Sequence[bool]) -> tuple[Equation, Equation]:
    """Returns a loop or branch twice: with the wanted outputs, and with the others."""
    first, second = (reduce_equation(equation, [w == half for w in wanted]) for half in (True, False))
    # Both halves have the loop's counter.
    outputs = tuple(Var(v.type) if v in first.outputs else v for v in second.outputs)
    bodies = tuple(clone(body)[0] for body in second.bodies)
    return first, replace(second, outputs=outputs, bodies=bodies, original=None)


def _reduce_branches(equation: Equation, wanted: Sequence[bool], effects: bool) -> Equation:
    """Reduces a remat's body, or the branches of a cond; an operand goes if no branch reads it."""
    reduced = [eliminate_dead(b, wanted, effects=effects) for b in equation.bodies]
    used = [any(uses) for uses in zip(*(used for _, used in reduced), strict=True)]
    if all(used) and all(new is old for (new, _), old in zip(reduced, equation.bodies, strict=True)):
        return equation
    skipped = equation.border.head
    return replace(
        equation,
        inputs=(*equation.inputs[:skipped], *_select(equation.inputs[skipped:], used)),
        outputs=_select(equation.outputs, wanted),
        bodies=tuple(replace(b, inputs=_select(b.inputs, used)) for b, _ in reduced),
        original=None,
        effects=any(_has_effects(b) for b, _ in reduced),
    )


def _has_effects(body: Block) -> bool:
    return any(e.effects for e in body.equations)


def _reduce_scan(equation: Equation, wanted: Sequence[bool], effects: bool) -> Equation:
    consts, carry = equation.border.consts, equation.border.carries
    live = list(wanted)
    while True:
        body, used = eliminate_dead(equation.bodies[0], live, effects=effects)
        grown = [a or b for a, b in zip(live[:carry], used[consts : consts + carry], strict=True)] + live[carry:]
        if grown == live:
            break
        live = grown
    # A carry that is wanted stays an operand even where the body itself doesn't read it.
    used[consts : consts + carry] = live[:carry]
    if body is equation.bodies[0] and all(used):
        return equation
    return replace(
        equation,
        inputs=_select(equation.inputs, used),
        outputs=_select(equation.outputs, live),
        bodies=(replace(body, inputs=_select(body.inputs, used)),),
        params={**equation.params, "num_consts": sum(used[:consts]), "num_carry": sum(live[:carry])},
        original=None,
        effects=_has_effects(body),
    )


def _select(items: Sequence, keep: Sequence[bool]) -> tuple:
    return tuple(x for x, k in zip(items, keep, strict=True) if k)


def needed_equations(equations: Iterable[Equation], atoms: Iterable[Atom]) -> list[Equation]:
    """Returns the equations that the atoms depend on, in order, reduced to what they need and without effects."""
    reduced, _ = eliminate_dead(Block((), tuple(equations), tuple(atoms)), effects=False)
    return list(reduced.equations)


def behind(equations: Iterable[Equation], atoms: Iterable[Atom]) -> list[Equation]:
    """Returns the equations that the atoms depend on, in order, as they are."""
    wanted, found = set(atoms), list[Equation]()
    for equation in reversed(list(equations)):
        if not wanted.isdisjoint(equation.outputs):
            found.append(equation)
            wanted.update(equation.inputs)
    return found[::-1]


def in_order(equations: Sequence[Equation], given: Iterable[Var]) -> list[Equation] | None:
    """Returns equations in an order in which they can be run, as near to theirs as can be; those that can be observed
    stay in order. None: there is no such order, or one reads what neither `given` nor any equation has."""
    waiting, known = dict[Var, list[int]](), set(given)
    missing = [0] * len(equations)
    made = {v for e in equations for v in e.outputs}
    if any(isinstance(a, Var) and a not in made and a not in known for e in equations for a in e.inputs):
        return None
    observed = [k for k, e in enumerate(equations) if e.effects]
    after = dict(itertools.pairwise(observed))
    for k, e in enumerate(equations):
        for v in {a for a in e.inputs if isinstance(a, Var) and a in made}:
            waiting.setdefault(v, []).append(k)
            missing[k] += 1
    for k in after.values():
        missing[k] += 1
    ready = [k for k, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    ordered: list[Equation] = []
    while ready:
        k = heapq.heappop(ready)
        ordered.append(equations[k])
        for j in [*(j for v in equations[k].outputs for j in waiting.get(v, ())), *([after[k]] if k in after else ())]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, j)
    return ordered if len(ordered) == len(equations) else None


def free_values(equations: Iterable[Equation], outputs: Iterable[Atom] = ()) -> dict[Var, None]:
    """Returns the variables, in order, that equations and `outputs` read and that none of the equations makes."""
    equations = list(equations)
    made = {v for e in equations for v in e.outputs}
    read = itertools.chain(*(e.inputs for e in equations), outputs)
    return dict.fromkeys(a for a in read if isinstance(a, Var) and a not in made)


def nearest_line(block: Block, atom: Atom) -> Equation | None:
    """Returns the nearest equation with a user's line behind a value; behind an input, the first one made of it."""
    made = block.makers()
    waiting, seen = [atom], set[Atom]()
    while waiting:
        equation = made.get(waiting.pop(0))
        if equation is not None and equation.source is not None:
            return equation
        if equation is not None:
            waiting += [a for a in equation.inputs if a not in seen]
            seen.update(equation.inputs)
    reached = {atom}
    for equation in block.equations:
        if reached.intersection(equation.inputs):
            if equation.source is not None:
                return equation
            reached.update(equation.outputs)
    return None


def hoist(path: Sequence[Equation], atom: Atom) -> tuple[list[Equation], Atom, tuple[bool, ...]]:
    """Computes a value of a loop's or remat's body outside of it, without the rest of the body.

    `path`: the equations around the value, outermost first (scans, remats and conds), of which the innermost's body has
    it. Returns new equations to append to the block that holds `path[0]`; the value there, with a leading axis for each
    scan that it varies in; and for each equation of the path whether it varies in it.
    """
    if not path or isinstance(atom, Literal):
        return [], atom, (False,) * len(path)
    equation, body = path[0], _body_with(path, atom)
    inner, value, varies = hoist(path[1:], atom)
    if isinstance(value, Literal):
        return [], value, (False, *varies)
    body = Block(body.inputs, body.equations + tuple(inner), body.outputs)
    if equation.op in ("remat", "cond"):  # a cond's branch is computed even if it isn't taken
        operands = equation.inputs[equation.border.head :]
        return *_inline(Block(body.inputs, body.equations, (value,)), operands), (False, *varies)
    assert equation.op == "scan", f"a lookup inside {equation.op} can't be hoisted"
    hoisted, outside, stacked = _hoist_from_scan(equation, body, value)
    return hoisted, outside, (stacked, *varies)


def _body_with(path: Sequence[Equation], atom: Var) -> Block:
    bodies = path[0].bodies
    if len(path) > 1:
        return next(b for b in bodies if any(e is path[1] for e in b.equations))
    return next(b for b in bodies if atom in b.inputs or any(atom in e.outputs for e in b.equations))


def _hoist_from_scan(equation: Equation, body: Block, value: Var) -> tuple[list[Equation], Atom, bool]:
    carry = equation.border.carries
    body = Block(body.inputs, body.equations, (*body.outputs[:carry], value))
    stacked = Var(ArrayType((equation.params["length"], *value.shape), value.dtype))
    outputs = (*(Var(v.type) for v in equation.outputs[:carry]), stacked)
    scan = replace(equation, outputs=outputs, bodies=(body,), original=None)
    scan = _reduce_scan(scan, [False] * carry + [True], effects=False)
    reduced = scan.bodies[0]
    consts, carry = scan.border.consts, scan.border.carries
    if len(scan.inputs) == consts:  # the same in every iteration
        return *_inline(reduced, scan.inputs), False
    if not reduced.equations and carry == 0:  # a sequence as it is
        return [], scan.inputs[reduced.inputs.index(reduced.outputs[0])], True
    copy, _ = clone(reduced)
    return [replace(scan, bodies=(copy,))], stacked, True


def _inline(body: Block, operands: Sequence[Atom]) -> tuple[list[Equation], Atom]:
    body, _ = eliminate_dead(body, effects=False)
    copy, env = clone(body, dict(zip(body.inputs, operands, strict=True)))
    output = body.outputs[0]
    return list(copy.equations), env.get(output, output) if isinstance(output, Var) else output


def copied(equation: Equation, inputs: Iterable[Atom]) -> Equation:
    """Returns an equation on other operands, with results and bodies of its own."""
    outputs, bodies = tuple(Var(v.type) for v in equation.outputs), tuple(clone(b)[0] for b in equation.bodies)
    return replace(equation, inputs=tuple(inputs), outputs=outputs, bodies=bodies)


def clone(block: Block, env: dict[Var, Atom] | None = None) -> tuple[Block, dict[Var, Atom]]:
    """Returns a copy with variables of its own, except for those that `env` replaces."""
    env = {} if env is None else env
    for var in block.inputs:
        env.setdefault(var, Var(var.type))

    def read(atom: Atom) -> Atom:
        return env[atom] if isinstance(atom, Var) else atom

    equations = []
    for equation in block.equations:
        inputs = tuple(read(a) for a in equation.inputs)
        bodies = tuple(clone(b)[0] for b in equation.bodies)
        outputs = tuple(env.setdefault(v, Var(v.type)) for v in equation.outputs)
        equations.append(replace(equation, inputs=inputs, outputs=outputs, bodies=bodies))
    inputs = tuple(v for v in (env[i] for i in block.inputs) if isinstance(v, Var))
    return Block(inputs, tuple(equations), tuple(read(a) for a in block.outputs)), env
