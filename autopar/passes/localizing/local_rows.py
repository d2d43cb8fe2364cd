"""Row-space operations in the program of one device: see `localize`.

Rows of a family by `ps` are an owner's own share; by the other methods every device has all of them. A device has by
itself what it asked for (`fetch`), what its examples look up, and the sums of their gradients (`aggregate`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from autopar.analysis.local import PARTIAL, NotLocal, Partial, Spread, State
from autopar.ir.bound_plan import FamilyPlan
from autopar.ir.operations import split
from autopar.ir.program import Atom, Block, Equation, RouteType, Var
from autopar.passes.localizing.local_forms import Forms


def _family(walk: Forms, equation: Equation) -> FamilyPlan:
    atoms = (*equation.inputs, *equation.outputs, *(v for b in equation.bodies for v in b.inputs))
    family = next(a.type.family for a in atoms if isinstance(a.type, RouteType))
    found = walk.shared.plan.family(family)
    assert found is not None, "a route belongs to a family of the plan"
    return found


def _rows(walk: Forms, equation: Equation, axis: int) -> State:
    """What a device has of the routed rows."""
    return Spread(axis, owner=True) if _family(walk, equation).layout is not None else None


def _asked(walk: Forms, equation: Equation, axis: int) -> State:
    """What a device has of the rows that all devices asked for."""
    return Spread(axis) if walk.shared.examples and _family(walk, equation).asked is not None else None


def _fetched(walk: Forms, equation: Equation, fetched: Atom, axis: int) -> Atom:
    """The rows that a lookup reads. Rows of which each example has a copy (`vmap` of a branch that takes the table) are
    spread over the examples instead: they are brought together."""
    has_fetch = _family(walk, equation).layout is not None
    return walk.as_state(fetched, _asked(walk, equation, axis) if has_fetch else None, equation)


def _write(walk: Forms, equation: Equation, inputs: list[Atom], state: State) -> None:
    outputs = tuple(walk.define(v, state) for v in equation.outputs)
    walk.emit(dataclasses.replace(equation, inputs=tuple(inputs), outputs=outputs))


def _examples(walk: Forms, equation: Equation, atom: Atom, axis: int | None) -> Atom:
    """An index operand, or updates: spread along an axis as the access was planned, or whole."""
    if axis is None or not walk.shared.examples:
        return walk.whole(atom, equation)
    return walk.as_state(atom, Spread(axis), equation)


def _row_ids(walk: Forms, equation: Equation) -> None:
    index = equation.inputs[0]
    planned = equation.params.get("batch")
    if planned is None or not walk.shared.examples:
        _write(walk, equation, [walk.whole(index, equation)], None)
    else:
        _write(walk, equation, [walk.as_state(index, Spread(planned), equation)], Spread(0))


def _route(walk: Forms, equation: Equation) -> None:
    _write(walk, equation, [walk.read(a) for a in equation.inputs], None)


def _pull(walk: Forms, equation: Equation) -> None:
    axis = equation.params["axis"]
    state = _rows(walk, equation, axis)
    leaf = walk.as_state(equation.inputs[0], state, equation)
    _write(walk, equation, [leaf, walk.read(equation.inputs[1])], state)


def _fetch(walk: Forms, equation: Equation) -> None:
    axis = equation.params["axis"]
    rows = walk.as_state(equation.inputs[0], _rows(walk, equation, axis), equation)
    _write(walk, equation, [rows, walk.read(equation.inputs[1])], _asked(walk, equation, axis))


def _lookup(walk: Forms, equation: Equation) -> None:
    fetched, route, index = equation.inputs
    batch, spread = equation.params["batch"], equation.params["spread"]
    rows = _fetched(walk, equation, fetched, equation.params["axis"])
    inputs = [rows, walk.read(route), _examples(walk, equation, index, batch)]
    local = None if batch is None or not walk.shared.examples else Spread(spread)
    _write(walk, equation, inputs, local)


def _lookup_ids(walk: Forms, equation: Equation) -> None:
    fetched, route, ids = equation.inputs
    rows = _fetched(walk, equation, fetched, equation.params["axis"])
    _write(walk, equation, [rows, walk.read(route), walk.whole(ids, equation)], None)


def _aggregate(walk: Forms, equation: Equation) -> None:
    base, route, index, updates = equation.inputs
    p, axis = equation.params, equation.params["axis"]
    asked = _asked(walk, equation, axis)
    inputs = [
        walk.as_state(base, asked, equation),
        walk.read(route),
        _examples(walk, equation, index, p["batch"]),
        _examples(walk, equation, updates, p["spread"]),
    ]
    _write(walk, equation, inputs, asked)


def _deliver(walk: Forms, equation: Equation) -> None:
    sums, route, *base = equation.inputs
    axis = equation.params["axis"]
    rows = _rows(walk, equation, axis)
    inputs = [walk.as_state(sums, _asked(walk, equation, axis), equation), walk.read(route)]
    inputs += [walk.as_state(b, rows, equation) for b in base]
    _write(walk, equation, inputs, rows)


def _push(walk: Forms, equation: Equation) -> None:
    base, route, index, updates = equation.inputs
    p, axis = equation.params, equation.params["axis"]
    rows = _rows(walk, equation, axis)
    if rows is None and p["op"] == "scatter-add":
        _push_replicated(walk, equation)
        return
    if walk.nested and not walk.shared.examples and walk.shared.devices > 1:
        reason = "gradients of rows that every rank looks up are added to their owners' rows in a loop or branch"
        raise NotLocal(reason, equation.source)
    inputs = [
        walk.as_state(base, rows, equation),
        walk.read(route),
        _examples(walk, equation, index, None),
        _examples(walk, equation, updates, None),
    ]
    _write(walk, equation, inputs, rows)


def _push_replicated(walk: Forms, equation: Equation) -> None:
    """Into rows that every device has: a device adds up its own examples' gradients (`allreduce_rows`)."""
    base, route, index, updates = equation.inputs
    p = equation.params
    batched = p["batch"] is not None and walk.shared.examples
    if not batched and not isinstance(walk.state(updates), Partial):
        inputs = [walk.whole(base, equation), walk.read(route), _examples(walk, equation, index, None)]
        _write(walk, equation, [*inputs, _examples(walk, equation, updates, None)], None)
        return
    given = walk.read(updates)
    if batched:
        given = _examples(walk, equation, updates, p["spread"])
    inputs = [walk.as_state(base, PARTIAL), walk.read(route), _examples(walk, equation, index, p["batch"]), given]
    _write(walk, equation, inputs, PARTIAL)


def _push_ids(walk: Forms, equation: Equation) -> None:
    base, route, ids, updates = equation.inputs
    rows = _rows(walk, equation, equation.params["axis"])
    inputs = [walk.as_state(base, rows, equation), walk.read(route), walk.whole(ids), walk.whole(updates, equation)]
    _write(walk, equation, inputs, rows)


def _row_iota(walk: Forms, equation: Equation) -> None:
    p = equation.params
    state = _rows(walk, equation, p["axis"])
    out = walk.define(equation.outputs[0], state)
    params = {**p, "shape": out.shape}
    walk.emit(dataclasses.replace(equation, inputs=(walk.read(equation.inputs[0]),), outputs=(out,), params=params))


def _reduce_rows(walk: Forms, equation: Equation) -> None:
    """An owner's rows by themselves, then all owners'."""
    rows, route, *more = equation.inputs
    state = _rows(walk, equation, equation.params["axis"])
    inputs = [walk.as_state(rows, state, equation), walk.read(route)]
    given: list[Atom] = []
    if more:
        given, inner = _off_form(walk, equation, (), more)
        (result,) = equation.bodies[0].outputs
        equation = dataclasses.replace(equation, bodies=(inner([state], (result,)),))
    if state is None:
        _write(walk, equation, [*inputs, *given], None)
        return
    part = Var(equation.outputs[0].type)
    if given and _family(walk, equation).on_hosts:  # no program has the other rows
        needed, *read = given
        routed = Var(part.type)
        alone = dataclasses.replace(equation, op="ap.reduce_part", outputs=(routed,), bodies=())
        walk.emit(dataclasses.replace(alone, inputs=(*inputs, needed)))
        others = (routed, inputs[1], needed, *read)
        walk.emit(dataclasses.replace(equation, op="ap.reduce_others", inputs=others, outputs=(part,)))
    else:
        operands = (*inputs, *given)
        walk.emit(dataclasses.replace(equation, op="ap.reduce_part", inputs=operands, outputs=(part,)))
    walk.env[equation.outputs[0]] = walk.reduce(part, equation.params["op"], equation), None


def _reduce_table(walk: Forms, equation: Equation) -> None:
    """An owner's rows of a whole table, then all owners'. The body is about rows of one owner already."""
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
    walk.emit(dataclasses.replace(equation, inputs=tuple(inputs), outputs=(part,)))
    walk.env[equation.outputs[0]] = walk.reduce(part, p["op"], equation), None


def _padding(walk: Forms, equation: Equation) -> None:
    state = _rows(walk, equation, equation.params["axis"])
    _write(walk, equation, [walk.as_state(equation.inputs[0], state), *map(walk.read, equation.inputs[1:])], state)


def _commit(walk: Forms, equation: Equation) -> None:
    leaf, rows, *rest = equation.inputs
    state = _rows(walk, equation, equation.params["axis"])
    inputs = [walk.as_state(leaf, state, equation), walk.as_state(rows, state, equation), *map(walk.read, rest)]
    _write(walk, equation, inputs, state)


def _densify(walk: Forms, equation: Equation) -> None:
    rows, *rest = equation.inputs
    state = _rows(walk, equation, equation.params["axis"])
    _write(walk, equation, [walk.as_state(rows, state, equation), *map(walk.read, rest)], state)


def _changes(walk: Forms, equation: Equation) -> None:
    """Each owner finds out by itself whether its other rows change."""
    p = equation.params
    family = walk.shared.plan.family(p["family"])
    assert family is not None, "untouched rows belong to a family of the plan"
    given = split(equation.op, p, equation.inputs)
    axes = (*p["axes"], *p["axes"], *(axis for _, axis in p["constants"]))
    states: list[State] = [None if family.layout is None else Spread(axis, owner=True) for axis in axes]
    rows = (*given["old"], *given["new"], *given["constant"])
    inputs = [walk.as_state(a, s, equation) for a, s in zip(rows, states, strict=True)]
    inputs += [walk.whole(a, equation) for a in given["frontier"]]
    for atom in (*given["finite"], *given["nonzero"]):  # a sum may be 0 where no device's part of it is, and conversely
        inputs.append(walk.whole(atom, equation) if isinstance(walk.state(atom), Partial) else walk.read(atom))
    _write(walk, equation, [*inputs, *map(walk.read, (*given["guard"], *given["first"]))], None)


def _sweep(walk: Forms, equation: Equation) -> None:
    axes = equation.params["axes"]
    rows = _family(walk, equation).layout is not None
    states: list[State] = [Spread(axis, owner=True) if rows else None for axis in axes]
    inputs, inner = _off_form(walk, equation, axes, equation.inputs)
    outputs = tuple(walk.define(v, s) for v, s in zip(equation.outputs, states, strict=True))
    body = inner(states, equation.bodies[0].outputs)
    walk.emit(dataclasses.replace(equation, inputs=tuple(inputs), outputs=outputs, bodies=(body,)))


def _off_form(
    walk: Forms, equation: Equation, axes: Sequence[int], operands: Sequence[Atom]
) -> tuple[list[Atom], Callable[[Sequence[State], Sequence[Atom]], Block]]:
    """Operands of an off-row form (whether it is needed, rows, values of the step), and what makes its body of the
    states of its results."""
    needed, *read = operands
    rows = _family(walk, equation).layout is not None
    along = (*axes, *equation.params["read_axes"])
    states: list[State] = [Spread(axis, owner=True) if rows else None for axis in along]
    states += [None] * (len(read) - len(states))
    inputs = [walk.read(needed), *(walk.as_state(a, s, equation) for a, s in zip(read, states, strict=True))]
    (body,) = equation.bodies
    inner, names = walk.body(body, (needed, *read), [None, *states])

    def block(states: Sequence[State], outputs: Sequence[Atom]) -> Block:
        results = tuple(inner.as_state(a, s, equation) for a, s in zip(outputs, states, strict=True))
        return Block(tuple(names), tuple(inner.equations), results)

    return inputs, block


def _fill(walk: Forms, equation: Equation) -> None:
    leaf, rows, *rest = equation.inputs
    state = _rows(walk, equation, equation.params["axis"])
    inputs = [walk.as_state(leaf, state, equation), walk.as_state(rows, state, equation), *map(walk.read, rest)]
    _write(walk, equation, inputs, state)


def _catch_up(walk: Forms, equation: Equation) -> None:
    """Each owner by itself; what was written down every device has."""
    inputs, states = _of_journal(walk, equation)
    outputs = tuple(walk.define(v, s) for v, s in zip(equation.outputs, states, strict=False))
    walk.emit(dataclasses.replace(equation, inputs=tuple(inputs), outputs=outputs))


def _flush(walk: Forms, equation: Equation) -> None:
    inputs, states = _of_journal(walk, equation)
    changed = equation.params["replay"].changed
    entries = len(equation.outputs) - changed - 1
    ends = (*states[:changed], states[-1], *(None for _ in range(entries)))
    outputs = tuple(walk.define(v, s) for v, s in zip(equation.outputs, ends, strict=True))
    walk.emit(dataclasses.replace(equation, inputs=tuple(inputs), outputs=outputs))


def _of_journal(walk: Forms, equation: Equation) -> tuple[list[Atom], list[State]]:
    """Operands, and what a device has of the leaves' rows and of their stamps."""
    family = walk.shared.plan.family(equation.params["family"])
    assert family is not None, "a journal belongs to a family of the plan"
    axes = (*equation.params["replay"].axes, 0)
    states: list[State] = [None if family.layout is None else Spread(axis, owner=True) for axis in axes]
    pairs = zip(equation.inputs, states, strict=False)
    rows = [walk.as_state(a, s, equation) for a, s in pairs]
    return [*rows, *(walk.whole(a, equation) for a in equation.inputs[len(axes) :])], states


def _exceeded(walk: Forms, equation: Equation) -> None:
    part = Var(equation.outputs[0].type)
    walk.emit(dataclasses.replace(equation, inputs=tuple(map(walk.read, equation.inputs)), outputs=(part,)))
    walk.env[equation.outputs[0]] = walk.reduce(part, "or", equation), None


def _select(walk: Forms, equation: Equation) -> None:
    which, new, old = equation.inputs
    state = walk.state(old)
    inputs = [walk.whole(which), walk.as_state(new, state, equation), walk.as_state(old, state, equation)]
    _write(walk, equation, inputs, state)


def _replicate(walk: Forms, equation: Equation) -> None:
    """Shares of a dense parameter, gathered for use."""
    (atom,) = equation.inputs
    state = walk.state(atom)
    if not isinstance(state, Spread):
        walk.env[equation.outputs[0]] = walk.whole(atom), None
        return
    out = walk.define(equation.outputs[0], None)
    walk.emit(dataclasses.replace(equation, inputs=(walk.read(atom),), outputs=(out,)))


def _spread(walk: Forms, equation: Equation) -> None:
    (atom,) = equation.inputs
    state = Spread(equation.params["axis"], owner=True)
    walk.env[equation.outputs[0]] = walk.as_state(atom, state, equation), state


def _store(walk: Forms, equation: Equation) -> None:
    """An array with as many rows as a table that is none, such as a mask: each owner takes its rows of it."""
    (atom,) = equation.inputs
    _write(walk, equation, [walk.whole(atom, equation)], Spread(equation.params["axis"], owner=True))


def _whole_table(walk: Forms, equation: Equation) -> None:
    raise NotLocal("all rows of a table are read at once", equation.source)


def _plus(walk: Forms, equation: Equation) -> None:
    states = [walk.state(a) for a in equation.inputs]
    wanted = next((s for s in states if isinstance(s, Spread)), next((s for s in states if s is not None), None))
    _write(walk, equation, [walk.as_state(a, wanted, equation) for a in equation.inputs], wanted)


def _whole_operands(walk: Forms, equation: Equation) -> None:
    _write(walk, equation, [walk.whole(a) for a in equation.inputs], None)


ROW_OPS: Mapping[str, Callable[[Forms, Equation], None]] = {
    "ap.row_ids": _row_ids,
    "ap.row_range": _route,
    "ap.row_iota": _row_iota,
    "ap.route": _route,
    "ap.pull": _pull,
    "ap.fetch": _fetch,
    "ap.padding": _padding,
    "ap.lookup": _lookup,
    "ap.lookup_ids": _lookup_ids,
    "ap.push_ids": _push_ids,
    "ap.push": _push,
    "ap.aggregate": _aggregate,
    "ap.deliver": _deliver,
    "ap.reduce_rows": _reduce_rows,
    "ap.reduce_table": _reduce_table,
    "ap.densify": _densify,
    "ap.commit": _commit,
    "ap.changes": _changes,
    "ap.sweep": _sweep,
    "ap.fill": _fill,
    "ap.catch_up": _catch_up,
    "ap.record": _whole_operands,
    "ap.flush": _flush,
    "ap.next": _whole_operands,
    "ap.exceeded": _exceeded,
    "ap.plus": _plus,
    "ap.any": _whole_operands,
    "ap.select": _select,
    "ap.replicate": _replicate,
    "ap.spread": _spread,
    "ap.store": _store,
    "ap.whole": _whole_table,
}
