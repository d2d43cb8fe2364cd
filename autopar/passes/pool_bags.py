"""Has owners add up rows by bags, where a rank reads nothing but sums of the rows that it looks up.

    sum_l w[b, l] * rows[ids[b, l]]                  ->  pool(rows, ids, w)
    zeros.at[segments].add(w[i] * rows[ids[i]])      ->  pool(rows, ids, segments, w)
    zeros.at[ids].add(w * dy[b])                     ->  push_pool(dy, ids, w)

An owner sends a partial sum of each bag in place of the rows, and gets the bag's cotangent in place of their gradients.
`choose` has decided for which tables that sends fewer bytes (`Sizes.bags`). It is done in the program of one rank, with
tables on hosts, or of one device, where owners learn of the bags in an equation of its own (`ask_bags`). What it finds
is what `choose` found (`analysis.bags`), unless examples were cut apart in a way that it doesn't follow: then rows
travel, and the plan says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from autopar.analysis.bags import BagFinder, BagPair, Bags, Factor, find_bags, most_uses
from autopar.cost.exchange import with_sizes
from autopar.ir.local import BagSet, bags_of_owner
from autopar.ir.plan import TablePlan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var, family_of, known
from autopar.ir.program_plan import FamilyPlan, ProgramPlan
from autopar.ir.slicing import eliminate_dead, in_order
from autopar.ir.writer import ZeroWriter, expand
from autopar.jax_types import Array, Dtype
from autopar.passes.choosing.capacity import of_busiest
from autopar.passes.once_per_row import Ids, adds_rows, all_ids
from autopar.passes.stack_tables import shares_of


class _Apart(Exception):
    """Says why bags can't be added up by owners."""


def pool_bags(program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
    """Returns the program of one device with bags added up by owners; `program`: localized by `bound`."""
    block, pooled = program.block, 0
    for planned in bound.families:
        if not planned.table.pooled or not (planned.on_hosts or planned.bounds.bag_ids):
            continue
        try:
            pooling = _Pooling(block, planned, 0 if planned.on_hosts else bound.devices)
            block, pooled = pooling.run(), pooled + 1
            if planned.stacked and not planned.on_hosts:
                bound = _with_room(bound, planned, pooling)
        except _Apart as error:
            bound = _by_rows(bound, planned, str(error))
    return replace(program, block=block), bound, f"bags of {pooled} families are added up by owners"


def _by_rows(bound: ProgramPlan, planned: FamilyPlan, reason: str) -> ProgramPlan:
    """Returns the plan in which a family's rows travel, and why."""

    def changed(table: TablePlan) -> TablePlan:
        by_rows = with_sizes(table, known(table.sizes).by_rows())
        return replace(by_rows, reason=f"{table.reason}; but its rows travel: {reason}")

    own = frozenset().union(*(paths for _, paths in planned.tables()))
    tables = (changed(t) if t.pooled and t.path in own else t for t in bound.plan.tables)
    return bound.noting(tables=tuple(tables))


def _with_room(bound: ProgramPlan, planned: FamilyPlan, pooling: _Pooling) -> ProgramPlan:
    """Returns the plan in which a stack's tables share the room of its messages: more than for its tables' own if an id
    of one is in more bags than one of another, or if devices that have tables whole have different numbers of bags."""
    n, each = bound.devices, [(table.owner, known(table.sizes), paths) for table, paths in planned.tables()]
    has_owners = any(owner is not None for owner, *_ in each)
    bags = n * bags_of_owner(pooling.sets, n)
    ids = [s.bag_ids if owner is None else s.bag_ids // n for owner, s, _ in each]
    sums = [s.bags * (n if owner is None else 1) for owner, s, _ in each]
    found = dict[str, tuple[int, int]]()
    for (*_, paths), *shares in zip(each, shares_of(n * pooling.slots, ids), shares_of(bags, sums), strict=True):
        found |= dict.fromkeys(paths, tuple(shares))

    def changed(table: TablePlan) -> TablePlan:
        sizes, (bag_ids, bags) = known(table.sizes), found[table.path]
        if has_owners:
            return with_sizes(table, replace(sizes, room=replace(known(sizes.room), bag_ids=bag_ids, bags=bags)))
        return with_sizes(table, replace(sizes, bag_ids=bag_ids))

    tables = (changed(t) if t.pooled and t.path in found else t for t in bound.plan.tables)
    return bound.noting(tables=tuple(tables))


@dataclass(eq=False)
class _Pooling:
    """Rewrites one family's lookups and pushes."""

    block: Block
    planned: FamilyPlan
    devices: int  #: N, whose messages have a fixed size; 0: ranks, with tables on hosts.
    lookups: Mapping[Atom, Equation] = field(default_factory=dict)  #: By index vectors.
    pushes: Mapping[Atom, Equation] = field(default_factory=dict)
    ids: Mapping[tuple[Atom, Atom], Ids] = field(default_factory=dict)  #: Of lookups of whole rows.
    sets: list[BagSet] = field(default_factory=list)
    operands: list[Atom] = field(default_factory=list)  #: Of all sets; on devices, what an owner was told.
    written: list[Equation] = field(default_factory=list)
    made: dict[Hashable, Atom] = field(default_factory=dict)  #: Key -> a value of ids that is computed once.
    slots: int = 0  #: On devices, ids that a message has room for.

    def run(self) -> Block:
        """Returns the rewritten block. Raises _Apart if it can't be."""
        own = [e for e in self.block.equations if family_of(e) == self.planned.family]
        lookups, fetches, delivered = ([e for e in own if e.op == f"ap.{op}"] for op in ("lookup", "fetch", "deliver"))
        self.ids = all_ids(self.block)
        if len(fetches) != 1 or len(delivered) > 1 or fetches[0].params["axis"]:
            raise _Apart("they are exchanged in several forms")
        fetch = fetches[0]
        read = [e for e in self.block.equations if fetch.outputs[0] in e.inputs]
        if read != lookups or fetch.outputs[0] in self.block.outputs:
            raise _Apart("they are read in another way than by their ids")
        if any((e.inputs[1], e.inputs[2]) not in self.ids for e in lookups):
            raise _Apart("they aren't looked up whole")
        finder = BagFinder(self.block)
        pushes = self._pushes(delivered[0], finder.made) if delivered else []
        pairs = find_bags(
            finder, [(e.inputs[2], e.outputs[0]) for e in lookups], [(e.inputs[2], e.inputs[3]) for e in pushes]
        )
        if pairs is None:
            raise _Apart("bags aren't found in a rank's own program")
        found = sum(pair.sums.count for pair in pairs)
        if self.devices and found >= known(self.planned.bounds.capacity):
            raise _Apart(f"a device's own program has {found} bags, no fewer than the rows that it asks an owner for")
        self.lookups, self.pushes = _by_index(lookups), _by_index(pushes)
        if any(push.params["clip"] and not self.lookups[ids].params["clip"] for ids, push in self.pushes.items()):
            raise _Apart("ids out of range look up nothing, and get a gradient")
        equations = self._with_sums(fetch, pairs)
        if delivered:
            equations = self._with_gradients(equations, delivered[0], pairs)
        return eliminate_dead(self.block.with_equations(equations))[0]

    def _pushes(self, deliver: Equation, values: ZeroWriter) -> list[Equation]:
        """Returns the aggregates that a delivery is the sum of."""
        found, waiting = list[Equation](), [deliver.inputs[0]]
        while waiting:
            atom = waiting.pop()
            if values.is_zero(atom):
                continue
            made = values.producers.get(atom)
            if made is None or made.op not in ("ap.aggregate", "ap.plus"):
                raise _Apart("gradients are added up in another way than by their ids")
            if made.op == "ap.aggregate":
                known = self.ids.get((made.inputs[1], made.inputs[2]))
                if known is None or not adds_rows(made, known):
                    raise _Apart("gradients aren't added to whole rows")
                found.append(made)
                waiting.append(made.inputs[0])
            else:
                waiting += made.inputs
        return found

    # --- sums ---

    def _with_sums(self, fetch: Equation, pairs: Sequence[BagPair]) -> list[Equation]:
        """Returns the block's equations with sums in place of the fetch."""
        outputs, added, kept = list[Var](), list[Equation](), list[Atom]()
        rows, route = fetch.inputs
        row = rows.shape[1:]
        for pair in pairs:
            sums, like = pair.sums, self.lookups[pair.sums.index]
            selects = (*self._in_range(like), *sums.selects)
            left_out = {factor.key for factor in selects}
            mask = self._mask(like, sums, selects)
            weights = self._weights(like, sums)
            index = self._once(("ids", sums.places), like, _ids(sums, like), (sums.index,))
            segments = self._segments(like, sums)
            push = pair.cotangents
            is_kept = push is not None and any(factor.key not in left_out for factor in self._kept(push))
            given = (mask is not None, weights is not None, is_kept, segments is not None)
            self.sets.append(BagSet(sums.shape, *given, owner=_owner(like, sums)))
            self.operands += [a for a in (index, segments, mask, weights) if a is not None]
            if self.devices and is_kept:
                kept.append(known(self._mask(like, known(push), self._kept(known(push)))))
            assert isinstance(sums.value, Var), "an equation makes the sums"
            extra = self._extra(like, sums, selects) if mask is not None else None
            out = sums.value if extra is None else Var(ArrayType((*sums.shape, *row), rows.dtype))
            outputs.append(out)
            if extra is not None:
                added += expand(_add, like, (out, extra), sums.value, again=True)
        if self.devices:
            self._ask(fetch, pairs, kept)
        operands, params = (rows, route, *self.operands), {"axis": 0, "sets": tuple(self.sets)}
        pool = Equation("ap.pool", operands, tuple(outputs), params, origin=fetch.origin)
        position, ends = self.block.equations.index(fetch), {pair.sums.value for pair in pairs}
        kept = [e for e in self.block.equations[position:] if ends.isdisjoint(e.outputs)]
        equations = [*self.block.equations[:position], *self.written, pool, *added, *kept]
        ordered = in_order(equations, self.block.inputs)
        if ordered is None:
            raise _Apart("weights depend on sums of the same table")
        return ordered

    def _ask(self, fetch: Equation, pairs: Sequence[BagPair], kept: Sequence[Atom]) -> None:
        """Writes what tells owners of the bags, which also says which ids get a gradient."""
        (rows, route), sums = fetch.inputs, [pair.sums for pair in pairs]
        placed = of_busiest([one.placed for one in sums], [one.owner for one in self.sets], self.devices)
        bounds = self.planned.bounds
        self.slots = slots = min(most_uses(sums) * known(bounds.bag_ids), placed)
        if slots < placed and not bounds.tight:  # no program follows that has more
            raise _Apart("messages haven't room for all of their ids")
        types = [ArrayType((self.devices * slots,), np.dtype(np.int32))] * 3
        types += [ArrayType((self.devices * slots,), rows.dtype)] * any(one.is_weighted for one in self.sets)
        outputs, params = tuple(map(Var, types)), {"axis": 0, "sets": tuple(self.sets), "slots": slots}
        self.written.append(
            Equation("ap.ask_bags", (route, *kept, *self.operands), outputs, params, origin=fetch.origin)
        )
        self.operands = [*outputs]
        self.sets = [replace(one, is_kept=False) for one in self.sets]

    def _in_range(self, access: Equation) -> tuple[Factor, ...]:
        """Returns what selects ids that are a row's; nothing where others mean the nearest row."""
        p, index = access.params, access.inputs[2]
        if p["clip"]:
            return ()
        fill = Literal.scalar(jnp.nan if p.get("fill_value") is None else p["fill_value"], access.outputs[0].dtype)
        is_row = self._once(("rows", index), access, _is_row(self.lookups[index]), (index,))
        return (Factor("keep", is_row, fill, tuple(range(len(index.shape) - 1))),)

    def _kept(self, push: Bags) -> tuple[Factor, ...]:
        return *self._in_range(self.pushes[push.index]), *push.selects

    def _mask(self, like: Equation, bags: Bags, selects: Sequence[Factor]) -> Atom | None:
        """Returns bool[bags, ids]: which rows stay; None: all."""
        if not selects:
            return None
        key = "mask", bags.places, tuple(f.key for f in selects)
        return self._once(key, like, _mask(bags, selects), [f.atom for f in selects])

    def _segments(self, like: Equation, bags: Bags) -> Atom | None:
        """Returns int32[ids]: the bag of each, as many as there are bags for none; None: that is its place."""
        if bags.segments is None:
            return None
        return self._once(("segments", bags.segments, bags.count), like, _segments(bags), (bags.segments,))

    def _weights(self, like: Equation, bags: Bags) -> Atom | None:
        if not bags.weights:
            return None
        key = "weights", bags.key, bags.places
        make = _weights(bags, like.outputs[0].dtype)
        return self._once(key, like, make, [f.atom for f in bags.weights])

    def _extra(self, like: Equation, bags: Bags, selects: Sequence[Factor]) -> Atom | None:
        """Returns what ids that are left out add to each bag, in the shape of the sums."""
        fills = [f.fill for f in selects if f.fill is not None]
        assert len(fills) == len(selects), "a select reads something in place of rows"
        if not bags.weights and all(isinstance(f, Literal) and not f.value for f in fills):
            return None
        columns = len(like.outputs[0].shape) - len(like.inputs[2].shape) + 1
        make = _extra(bags, selects, like.outputs[0].dtype, columns)
        own = [] if bags.segments is None else [self._segments(like, bags)]
        atoms = [*own, *(f.atom for f in selects), *fills, *(f.atom for f in bags.weights)]
        return self._once(("extra", bags.value), like, make, atoms)

    # --- gradients ---

    def _with_gradients(
        self, equations: Sequence[Equation], deliver: Equation, pairs: Sequence[BagPair]
    ) -> Sequence[Equation]:
        """Returns the equations with cotangents in place of the delivery."""
        self.written = []
        cotangents, masks = list[Atom](), list[Atom]()
        for pair, one in zip(pairs, self.sets, strict=True):
            push = pair.cotangents
            assert push is not None, "all lookups have gradients, or none"
            like = self.lookups[push.index]
            cotangents.append(self._once(("cotangent", push.value, push.axes), like, _cotangents(push), (push.value,)))
            mask = self._mask(like, push, self._kept(push)) if one.is_kept else None
            masks += [] if mask is None else [mask]
        _, route, *base = deliver.inputs
        out = deliver.outputs[0] if not base else Var(deliver.outputs[0].type)
        operands, params = (route, *cotangents, *masks, *self.operands), {"axis": 0, "sets": tuple(self.sets)}
        push_ = replace(deliver, op="ap.push_pool", inputs=operands, outputs=(out,), params=params)
        after = expand(_add, deliver, (base[0], out), deliver.outputs[0], again=True) if base else []
        position = equations.index(deliver)
        return *equations[:position], *self.written, push_, *after, *equations[position + 1 :]

    def _once(self, key: Hashable, like: Equation, make: Callable[..., Array], atoms: Sequence[Atom]) -> Atom:
        if key not in self.made:
            equations = expand(lambda *xs: jnp.copy(make(*xs)), like, atoms)
            self.written += equations
            self.made[key] = equations[-1].outputs[0]
        return self.made[key]


def _by_index(accesses: Iterable[Equation]) -> Mapping[Atom, Equation]:
    """Maps index vectors to one of the accesses by them. Raises _Apart if ids out of range mean different things to
    them."""
    found: dict[Atom, Equation] = {}
    for access in accesses:
        p, other = access.params, found.setdefault(access.inputs[2], access).params
        if p["clip"] != other["clip"] or str(p.get("fill_value")) != str(other.get("fill_value")):
            raise _Apart("ids out of range mean different things to different lookups")
    return found


def _owner(lookup: Equation, bags: Bags) -> int | None:
    """Returns the device that has all rows of bags' tables; None: several may have some."""
    owners = [-1 if owner is None else owner for owner in lookup.params.get("owners", ())]
    if not owners:
        return None
    found = np.unique(bags.moved(np.broadcast_to(np.array(owners), lookup.inputs[2].shape[:-1])))
    return int(found[0]) if found.size == 1 and found[0] >= 0 else None


def _add(a: Array, b: Array) -> Array:
    return a + b


def _ids(bags: Bags, lookup: Equation) -> Callable[[Array], Array]:
    """Returns a function of index vectors: int32[bags, ids] (with segments int32[ids]), each the nearest row's."""
    last = lookup.params["extent"] - 1

    def ids(index: Array) -> Array:
        nearest = jnp.clip(index[..., 0], 0, min(last, jnp.iinfo(index.dtype).max)).astype(jnp.int32)
        return bags.by_bags(bags.moved(nearest))

    return ids


def _segments(bags: Bags) -> Callable[[Array], Array]:
    def segments(index: Array) -> Array:
        flat, last = index.reshape(-1), min(bags.count - 1, jnp.iinfo(index.dtype).max)
        return jnp.where((flat >= 0) & (flat <= last), flat.astype(jnp.int32), bags.count)

    return segments


def _is_row(lookup: Equation) -> Callable[[Array], Array]:
    """Returns a function of index vectors: which of them are a row's."""
    last = lookup.params["extent"] - 1
    return lambda index: ((index >= 0) & (index <= min(last, jnp.iinfo(index.dtype).max)))[..., 0]


def _stays(bags: Bags, selects: Sequence[Factor], values: Sequence[Array]) -> list[Array]:
    """Returns for each select which rows it lets stay, in the shape of the bags' ids."""
    stays = []
    for factor, value in zip(selects, values, strict=True):
        value = bags.moved(value) if factor.order is not None else factor.by_ids(value, len(bags.ids))
        stays.append(value if factor.op == "keep" else ~value)
    return stays


def _mask(bags: Bags, selects: Sequence[Factor]) -> Callable[..., Array]:
    return lambda *values: bags.by_bags(functools.reduce(jnp.logical_and, _stays(bags, selects, values)))


def _product(bags: Bags, start: Array, values: Sequence[Array]) -> Array:
    for factor, value in zip(bags.weights, values, strict=True):
        value = factor.by_ids(value, len(bags.ids))
        start = start * value if factor.op == "mul" else start / value
    return start


def _weights(bags: Bags, dtype: Dtype) -> Callable[..., Array]:
    return lambda *values: bags.by_bags(_product(bags, jnp.ones((), dtype), values))


def _extra(bags: Bags, selects: Sequence[Factor], dtype: Dtype, columns: int) -> Callable[..., Array]:
    """Returns a function of what selects and weights read: the sums of what is in place of rows that don't stay."""
    count = len(selects)

    def extra(*values: Array) -> Array:
        own, values = (values[0], values[1:]) if bags.segments is not None else (None, values)
        constant, stays = jnp.zeros((), dtype), _stays(bags, selects, values[:count])
        for factor, stay, fill in zip(selects, stays, values[count : 2 * count], strict=True):
            fill = fill if fill.ndim == 0 else factor.by_ids(fill, len(bags.ids))
            constant = jnp.where(stay, constant, fill)
        left_out = ~functools.reduce(jnp.logical_and, stays)
        each = bags.by_bags(jnp.where(left_out, _product(bags, constant, values[2 * count :]), 0))
        sums = each.sum(1) if own is None else jnp.zeros(bags.count, dtype).at[own].add(each, mode="drop")
        return sums.reshape(*bags.shape, *[1] * columns)

    return extra


def _cotangents(bags: Bags) -> Callable[[Array], Array]:
    """Returns a function of cotangents as they are found: one for each bag."""

    def cotangents(value: Array) -> Array:
        if bags.segments is not None:
            return value
        if bags.order is not None:
            return value.transpose(bags.order)
        return value[tuple(0 if d in bags.axes else slice(None) for d in range(len(bags.ids)))]

    return cotangents
