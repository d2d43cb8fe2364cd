"""Decides whether a family is lifted, by which method, and with which bounds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar import jax_compat
from autopar.analysis.bags import BagFinder, BagPair, Bags, find_bags, is_plain_access, most_uses
from autopar.analysis.row_ids import append_new
from autopar.analysis.values import Numbering
from autopar.cost.exchange import (
    ID_BYTES,
    NO_OTHERS,
    REPLAY,
    least,
    lookup_terms,
    sent_bytes,
    step_seconds,
    step_terms,
    table_3,
)
from autopar.cost.model import DEFERRED_MARGIN, deferred_s, lifting_pays, lifting_pays_on_accelerators, log_steps
from autopar.cost.rates import Measurements
from autopar.errors import StrategyError
from autopar.ir.figures import HEADROOM, Room, Sizes, Term, format_bytes
from autopar.ir.layout import RowLayout
from autopar.ir.options import Options
from autopar.ir.plan import TablePlan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, Var, known
from autopar.ir.program_plan import Bounds
from autopar.ir.rowspace import Access, Refusal, Row, RowIds, RowSpace, host_refusal
from autopar.ir.slicing import hoist
from autopar.ir.strategy import HOSTED, ROW_METHODS, Where
from autopar.passes.choosing.capacity import (
    asked_layout,
    bounds_layout,
    device_bounds,
    device_ids,
    host_bounds,
    imbalance,
    limited,
    longest_message,
    owner_loads,
    rounded,
    tightened,
    with_layout,
    with_safe_capacity,
)

#: Most rows of a table; one more number must be free for "no row".
_MOST_ROWS = np.iinfo(np.int32).max
#: On devices owners add up bags if rows take this many times the bytes, and this many bytes more for all tables that
#: are exchanged as one: bags take another message.
_BAGS_PAY = 2, 1 << 16
#: ((Bounds without limits, bounds as planned) or None if the family stays dense, the plans of its tables).
Decision = tuple[tuple[Bounds, Bounds] | None, list[TablePlan]]


@dataclass(frozen=True, slots=True)
class Choices:
    """The basis of decisions on families: the user's options, the devices, the example and the program."""

    options: Options
    measured: Measurements
    methods: Mapping[int, tuple[str, bool]]  #: Table -> (method, whether the strategy names this table's path).
    hosts: frozenset[int] = frozenset()  #: Tables in host memory; the options' devices are ranks then.
    repeatable: bool = True  #: A step has no effects, so it may run again if a batch exceeds a capacity.
    decided: Mapping[int, TablePlan] = field(default_factory=dict)  #: Table -> its earlier plan.
    #: Finds the program's bags, if there may be any.
    bags: Callable[[], BagFinder] | None = None
    value: Callable[[Atom], np.ndarray | None] = lambda atom: None  #: A value of the program for the example.
    whole: frozenset[int] = frozenset()  #: Tables that one rank, or device, is to have whole.
    waiting: int = 0  #: Rows of all families that share an update log; 0: each family has its own.

    @property
    def devices(self) -> int:
        return self.options.devices

    def waits(self, space: RowSpace) -> int:
        """Returns the most steps that a family's deferred rows wait; 0 if none are deferred."""
        if not space.deferred:
            return 0
        earlier = self.earlier_plan(space)
        wanted = earlier.log_steps if earlier is not None else self.options.log_steps
        return wanted or log_steps(max(space.extent, self.waiting))

    def earlier_plan(self, space: RowSpace) -> TablePlan | None:
        """Returns the earlier plan of a family, if any."""
        return next((self.decided[k] for k in space.tables if k in self.decided), None)


def decide_family(
    program: Program,
    space: RowSpace,
    choices: Choices,
    *,
    why_sharded: str = "",
    why_dense: str = "",
    together: int = 1,
    others: Mapping[str, int] = NO_OTHERS,
    may_join_hosts: bool = True,
    may_pool: bool = True,
    owner: int | None = None,
) -> Decision:
    """Decides how a family is trained.

    Args:
      why_sharded: Why "auto" must shard it, whatever that costs; "": it takes the cheapest method.
      why_dense: Why "auto" must leave it dense; "": it decides by cost.
      together: Number of tables on devices, its own included, that "ps" exchanges as one.
      others: Method -> number of other exchanges by it, which share messages with this one.
      may_join_hosts: "auto" may put it on hosts beside other tables there, if that sends fewer bytes.
      may_pool: Owners may add up its bags, if that sends fewer bytes.
      owner: The rank, or the device of a stack, that gets all rows; None: they are sharded.

    Raises:
      StrategyError: the strategy names a method for a table that can't be lifted.
    """
    space = replace(space, refusal=_refusal(program, space, choices))
    family = _Family(program, space, choices, may_pool)
    return (
        family.refused()
        or family.dense_as_asked()
        or family.on_hosts(owner, may_join=may_join_hosts)
        or family.on_one_device()
        or family.on_devices(together, others, owner, why_sharded=why_sharded, why_dense=why_dense)
    )


@dataclass(frozen=True, eq=False)
class _Family:
    """A family that is decided on: by the first of its methods that returns a decision (see `decide_family`)."""

    program: Program
    space: RowSpace
    choices: Choices
    may_pool: bool

    @functools.cached_property
    def ids(self) -> RowIds:
        return self.program.ids[self.space.family]

    @functools.cached_property
    def method(self) -> str:
        return _method(self.space, self.choices)

    @functools.cached_property
    def is_hosted(self) -> bool:
        return any(k in self.choices.hosts for k in self.space.tables)

    @property
    def shown(self) -> str:
        return f"{self.ids.count} ids a step against {self.space.extent} rows"

    # --- its decisions, in the order in which they are asked for ---

    def refused(self) -> Decision | None:
        """Leaves a family that can't be lifted dense. Raises StrategyError if the strategy names a method for it."""
        refusal, hosted = self.space.refusal, self.is_hosted
        if refusal is None:
            return None
        requested = (self.choices.methods[k] for k in self.space.tables)
        by_name = (method for method, is_named in requested if is_named and method in ROW_METHODS[1:])
        named = "hosts" if hosted else next(by_name, None)
        if named is not None:
            what = "be on hosts" if hosted else f"be trained with {named!r}"
            remedy = f" To change it: {refusal.remedy}." if refusal.remedy else ""
            path = self.program.inputs[self.space.tables[0]].path
            raise StrategyError(
                f"strategy: {path} can't {what}: {refusal}.{remedy} Leave it to 'auto', or to 'allreduce'"
            )
        where = str(refusal.source) if refusal.source else ""
        # A sampled softmax is advised only for tables that would then be lifted, by their size and ids.
        small = refusal.kind == "softmax" and not self._pays()
        return self._dense(refusal.reason, "" if small else refusal.remedy, where, refused=True)

    def dense_as_asked(self) -> Decision | None:
        """Leaves a family dense by `sparse="off"`, or by its method."""
        space, choices = self.space, self.choices
        if choices.options.sparse == "off" and not space.is_pulled:
            return self._dense("sparse='off'")
        if self.method != "allreduce":
            return None
        who = "the strategy" if choices.earlier_plan(space) is None else "the plan"
        sizes = None
        if choices.devices > 1 and not choices.hosts:
            sizes = _sizes(self.program, space, self.ids, self._sharded()[1], choices)
        return self._dense(f"{who} says 'allreduce'", sizes=sizes)

    def on_hosts(self, owner: int | None, *, may_join: bool) -> Decision | None:
        """Decides on a family that the strategy puts on hosts, or that may be beside others there."""
        program, space, ids, choices = self.program, self.space, self.ids, self.choices
        # Tables by rows on devices can't be beside tables on hosts: their update logs, say, differ.
        may_leave = choices.hosts and (choices.devices > 1 or space.deferred) and self.method == "auto"
        if not self.is_hosted and not may_leave:
            return None
        bounds = host_bounds(space, ids, choices.devices, owner)
        sizes, why = None if choices.devices == 1 else _host_sizes(program, space, ids, bounds, choices), ""
        if self.may_pool and sizes is not None:
            sizes, why = _with_bags(program, space, ids, sizes, choices)
        sent = {} if sizes is None else sent_bytes(sizes, "hosts")
        if not self.is_hosted and sizes is not None and not (may_join and sent["allreduce"] > sent[HOSTED]):
            who, more = f"a rank asks for {sizes.requested} of {space.extent} rows", sent["allreduce"] > sent[HOSTED]
            reason = f"{who}: their whole gradient takes {'hardly' if more else 'no'} more bytes"
            return self._dense(reason, "strategy=('ps', 'hosts')")
        if not self.is_hosted and sizes is None and not self._pays():
            return self._dense(f"{self.shown}: the dense update is faster", "strategy=('ps', 'hosts')")
        return self._lifted((bounds, bounds), "ps", where="hosts", why=why, sent=sent, sizes=sizes)

    def on_one_device(self) -> Decision | None:
        if self.choices.devices > 1:
            return None
        pays = self.ids.count < self.space.extent if self.choices.options.rows_travel else self._pays()
        if self.method == "auto" and not pays:
            return self._dense(f"{self.shown}: the dense update is faster", "strategy='ps'")
        method = "ps" if self.method == "auto" else self.method
        bounds = device_bounds(self.space, self.ids, method, 1)
        return self._lifted((bounds, bounds), method)

    def on_devices(
        self, together: int, others: Mapping[str, int], owner: int | None, *, why_sharded: str, why_dense: str
    ) -> Decision:
        program, space, ids, choices, method = self.program, self.space, self.ids, self.choices, self.method
        stored = next((layout[0] for k in space.leaves if (layout := program.inputs[k].layout) is not None), None)
        owner = stack_owner(program, space) if stored is not None else owner
        safe, tight = self._sharded(stored, cyclic=together > 1, owner=owner)
        sizes = replace(_sizes(program, space, ids, tight, choices), together=together)
        bags = _owned_bags(program, space, ids, choices) if self.may_pool else ()
        safe, tight, sizes, by_bags = _with_device_bags(space, ids, bags, (safe, tight), sizes, choices)
        costs: dict[str, Any] = {"sent": sent_bytes(sizes), "sizes": sizes}
        if stored is not None:  # a Table that is only read
            costs["sent"] = {"ps": costs["sent"]["ps"]}
            return self._lifted((safe, tight), "ps", why=by_bags, **(costs if by_bags else {}))
        why = why_sharded
        if method == "auto":
            rates = choices.measured.rates
            costs["terms"] = {} if rates is None else step_terms(rates, sizes, others)
            seconds = {} if rates is None else step_seconds(rates, sizes, others)
            found = self._compared(sizes, seconds or costs["sent"])
            method, why = ("ps", why_sharded) if why_sharded else found
            slow = "" if why_sharded else self._why_dense(costs["terms"], method, sizes)
            if why_dense := why_dense or slow:
                # Beside tables on hosts its gradient is reduced with all others.
                costs["sizes"] = None if choices.hosts else sizes
                reason = (why if method == "allreduce" else "") or why_dense
                return self._dense(f"{self.shown}: {reason}", "strategy='ps'", **costs)
        if method != "ps":
            safe = tight = device_bounds(space, ids, method, choices.devices)
            by_bags = ""
        return self._lifted((safe, tight), method, why="; ".join(filter(None, [why, by_bags])), **costs)

    # --- what it is decided by ---

    def _pays(self) -> bool:
        program, space, options = self.program, self.space, self.choices.options
        own = max(1, sum(program.block.inputs[k].type.nbytes for k in space.leaves) // space.extent)
        if options.accelerators:
            return lifting_pays_on_accelerators(family_bytes=own * space.extent, deferred=space.deferred)
        count, steps = self.ids.count, _steps(program, space)
        return lifting_pays(extent=space.extent, ids=count, row_bytes=own, deferred=space.deferred, steps=steps)

    def _compared(self, sizes: Sizes, costs: Mapping[str, float]) -> tuple[str, str]:
        """Returns the cheapest method, and ""; by the Parallax paper's table 3 the method of the fewest bytes, and
        why."""
        space, choices = self.space, self.choices
        if choices.options.choose == "times":
            return least(costs), ""
        flat, n = choices.measured.ids.get(space.family), choices.devices
        touched: float = sizes.requested
        if flat is not None:
            touched = np.mean([rows.size for rows in device_ids(flat, self.ids.batched, n, space.extent)]).item()
        b, alpha = sum(self.program.block.inputs[k].type.nbytes for k in space.tables), min(1.0, touched / space.extent)
        nbytes = table_3(b=b, n=n, alpha=alpha)
        method = least(nbytes)
        others = ", ".join(f"{m} {format_bytes(nbytes[m])}" for m in nbytes if m != method)
        shown = f"table 3 (b={format_bytes(b)}, N={n}, alpha={alpha:.2%})"
        return method, f"{shown}: {format_bytes(nbytes[method])}, {others}"

    def _why_dense(self, terms: Mapping[str, Sequence[Term]], method: str, sizes: Sizes) -> str:
        """Returns why "auto" leaves a family dense that could be lifted; "" if it lifts it.

        `method`: the cheapest one. `terms`: the costs of each method; empty: unknown.
        """
        space = self.space
        if method == "allreduce" or (space.deferred and self.choices.options.accelerators):
            return "the dense update is the fastest"
        if not space.deferred or not terms:
            return ""
        row_elements = max(self.program.block.inputs[k].type.size for k in space.tables) // max(1, space.extent)
        # `deferred_s` includes bringing rows up to date.
        taken = sum(term.seconds for term in terms[method] if term.name != REPLAY)
        saved = sum(term.seconds for term in terms["allreduce"]) - taken
        rows = min(self.ids.count, sizes.devices * sizes.owned if method == "ps" else sizes.routed)
        is_little = saved < DEFERRED_MARGIN * deferred_s(rows=rows, row_elements=row_elements)
        return "to bring rows up to date may cost more than their exchange saves" if is_little else ""

    def _sharded(
        self, stored: RowLayout | None = None, *, cyclic: bool = False, owner: int | None = None
    ) -> tuple[Bounds, Bounds]:
        """Returns the bounds by `ps`: without limits, and with the capacity that the example needs, if there is one.

        `stored`: the layout that the rows have already. `cyclic`: rows must be distributed cyclically. `owner`: of
        `Bounds`. An earlier plan's layout is kept and, for as many ids, its capacity.
        """
        space, ids, choices, earlier = self.space, self.ids, self.choices, self.choices.earlier_plan(self.space)
        bounds = device_bounds(space, ids, "ps", choices.devices, owner)
        earlier = earlier if earlier is not None and earlier.method == "ps" and stored is None else None
        if stored is not None:
            bounds = replace(bounds, layout=stored)
        elif cyclic or (earlier is not None and earlier.cyclic):
            bounds = replace(bounds, layout=replace(bounds_layout(bounds), cyclic=True))
        # A step that exceeds a capacity runs again; it can't if it has effects, or ids that depend on other rows.
        if not choices.repeatable or space.depends_on:
            return bounds, bounds
        if earlier is not None and earlier.ids == ids.count:
            grown = (earlier.capacity or 1) * choices.options.headroom / HEADROOM
            return bounds, limited(bounds, grown) if earlier.tight else bounds
        flat = choices.measured.ids.get(space.family)
        if flat is None:
            return bounds, bounds
        loads = device_ids(flat, ids.batched, choices.devices, space.extent)
        safe = with_layout(bounds, loads) if stored is None and earlier is None else bounds
        safe = replace(safe, imbalance=imbalance(loads, bounds_layout(safe)) if owner is None else None)
        return safe, tightened(safe, loads, choices.options.headroom)

    # --- the forms of a decision ---

    def _dense(self, reason: str, remedy: str = "", line: str = "", **fields: Any) -> Decision:
        notes = {"reason": reason, "remedy": remedy, "line": line or _line(self.space)}
        return None, self._plans(method="allreduce", where="devices", lifted=False, **notes, **fields)

    def _lifted(
        self, bounds: tuple[Bounds, Bounds], method: str, where: Where = "devices", why: str = "", **fields: Any
    ) -> Decision:
        space, (_, planned), waits = self.space, bounds, self.choices.waits(self.space)
        most = min(space.extent, self.ids.count)
        reason = f"at most {most} of {space.extent} rows a step{_rows_text(planned, where)}"
        if space.is_pulled:
            pulled, pushed = map(format_bytes, _exchanged_bytes(space))
            reason = f"a step pulls {pulled} of it and pushes {pushed} of gradients{_rows_text(planned, where)}"
        if waits:
            reason += f"; the others move, too: they wait for up to {waits} steps, until they are read"
        reason = "; ".join([reason, *filter(None, [why]), *space.notes])
        if where == "hosts" and space.is_read_whole:
            reason += "; on hosts each rank reads the rows that it owns, all of them in every step, and reduces them"
        layout = planned.layout
        fields |= {"capacity": planned.capacity, "tight": planned.tight, "log_steps": waits}
        fields |= {"cyclic": layout is not None and layout.cyclic, "owner": None if layout is None else layout.owner}
        fields |= {"reason": reason, "line": _line(space)}
        return bounds, self._plans(method=method, where=where, lifted=True, **fields)

    def _plans(self, **fields: Any) -> list[TablePlan]:
        """Returns the plans of the family's tables, with these common fields."""
        program, space = self.program, self.space
        return [
            TablePlan(
                path=program.inputs[table].path,
                shape=program.block.inputs[table].shape,
                dtype=str(program.block.inputs[table].dtype),
                axis=space.row_axes[table],
                slots=tuple(program.inputs[k].path for k in space.leaves if k != table),
                ids=self.ids.count if space.accesses else space.rows_read,
                pulled=space.is_pulled,
                unchanged=table in program.unchanged,
                family_bytes=_family_bytes(program, space),
                **fields,
            )
            for table in space.tables
        ]


def compares(program: Program, space: RowSpace, choices: Choices) -> bool:
    """Returns whether a family's method is chosen by cost, on several devices."""
    options = choices.options
    is_open = _method(space, choices) == "auto" and options.sparse != "off"
    if not is_open or choices.devices == 1 or choices.hosts or options.choose == "formulas":
        return False
    is_stored = any(program.inputs[k].layout is not None for k in space.leaves)
    return not is_stored and _refusal(program, space, choices) is None


def _method(space: RowSpace, choices: Choices) -> str:
    requested = (choices.methods[k][0] for k in space.tables)
    return next((method for method in requested if method != "auto"), "auto")


def _refusal(program: Program, space: RowSpace, choices: Choices) -> Refusal | None:
    if space.refusal is None and space.extent >= _MOST_ROWS:
        return Refusal(f"it has {space.extent} rows; numbers of rows are int32", None, "divide it into several tables")
    return host_refusal(program, space) if choices.hosts else space.refusal


def _steps(program: Program, space: RowSpace) -> int:
    """Returns the number of updates of a family in a call, which may loop over several train steps."""
    leaves, turns = {program.block.inputs[k] for k in space.leaves}, [1]
    for equation in program.block.equations:
        if equation.op == "scan":
            first, count, body = equation.border.consts, equation.border.carries, equation.bodies[0]
            carries = zip(equation.inputs[first:], body.inputs[first:], body.outputs[:count], strict=False)
            turns += [equation.params["length"] for a, old, new in carries if a in leaves and old is not new]
    return max(turns)


def _exchanged_bytes(space: RowSpace) -> tuple[int, int]:
    pulled = sum(a.equation.outputs[0].type.nbytes for a in space.accesses if a.is_lookup)
    return pulled, sum(a.equation.inputs[2].type.nbytes for a in space.accesses if not a.is_lookup)


def _rows_text(bounds: Bounds, where: Where) -> str:
    """Describes where sharded rows are."""
    if bounds.layout is None:
        return ""
    if where == "hosts":
        if bounds.layout.owner is not None:
            return f"; all rows in the memory of rank {bounds.layout.owner}"
        ranks = f"{bounds.layout.devices} ranks" if bounds.layout.devices > 1 else "this process"
        return f"; rows in the memory of the hosts, distributed cyclically over {ranks}"
    order = ", distributed cyclically over the devices" if bounds.layout.cyclic else ", in shards of adjacent rows"
    measured = "measured, with headroom" if bounds.tight else "a bound"
    text = f"{order}; a device asks another one for {bounds.capacity} of them at most ({measured})"
    if bounds.imbalance is None:
        return text
    return f"{text}; in the example the busiest message is {bounds.imbalance:.2f} times the average one"


def _sizes(program: Program, space: RowSpace, ids: RowIds, sharded: Bounds, choices: Choices) -> Sizes:
    """Returns the sizes of a step's work with the family, given its bounds by `ps`."""
    layout, requested, capacity = bounds_layout(sharded), sharded.requested, sharded.capacity
    assert requested is not None and capacity is not None, "sharded rows have bounds"
    inputs = program.block.inputs
    sent = row_bytes(program, space, ids, on_cpus=not choices.options.accelerators)
    replays = space.deferred and not choices.options.accelerators and not choices.hosts
    return Sizes(
        devices=layout.devices,
        extent=space.extent,
        row_bytes=sent.looked_up,
        gradient_bytes=sent.gradients if any(ids.batched) else None,
        reduced=sent.reduced,
        family_bytes=_family_bytes(program, space),
        ids=ids.count_on(layout.devices),
        requested=requested // layout.devices,
        routed=min(space.extent, ids.count) + 1,
        capacity=capacity,
        owned=sharded.rows // layout.devices,
        checks=sharded.tight,
        spread=any(ids.batched),
        replayed=sum(inputs[k].type.nbytes for k in space.tables) // space.extent if replays else 0,
    )


def _family_bytes(program: Program, space: RowSpace) -> int:
    return sum(program.block.inputs[k].type.nbytes for k in space.leaves) // space.extent


def _host_sizes(program: Program, space: RowSpace, ids: RowIds, bounds: Bounds, choices: Choices) -> Sizes:
    """Returns the sizes of a family on hosts, measured on the example if there is one."""
    sizes = _sizes(program, space, ids, replace(bounds, capacity=0), choices)
    by_first = not choices.options.optimizes("owner") and bool(after_the_sum(program, space.family)[1])
    is_whole = bounds_layout(bounds).owner is not None
    # As many as a rank asks for, on average.
    sizes = replace(sizes, owned=sizes.requested, by_first=by_first, whole=is_whole)
    if space.is_pulled:
        pulled, pushed = (size // space.extent for size in _exchanged_bytes(space))
        return replace(sizes, row_bytes=pulled, gradient_bytes=pushed, spread=True, constant=True)
    flat = None if space.depends_on else choices.measured.ids.get(space.family)
    if flat is None:
        return sizes
    loads = device_ids(flat, ids.batched, choices.devices, space.extent)
    spread = replace(bounds, layout=replace(bounds_layout(bounds), owner=None))
    limit = tightened(with_safe_capacity(spread), loads, choices.options.headroom).capacity or 0
    requested = max(rows.size for rows in loads)
    owned = requested if is_whole else int(owner_loads(loads, bounds_layout(bounds)).max())
    return replace(sizes, requested=requested, owned=owned, capacity=limit)


def _with_bags(program: Program, space: RowSpace, ids: RowIds, sizes: Sizes, choices: Choices) -> tuple[Sizes, str]:
    """Returns the sizes with bags that owners add up, if that sends fewer bytes, and the reason ("": no bags)."""
    earlier, bags = choices.earlier_plan(space), _owned_bags(program, space, ids, choices)
    if not bags:
        return sizes, ""
    n = choices.devices
    # Segments may put a rank's ids into the bags of all.
    of_all = sum(one.count for one in bags if one.segments is not None)
    count = of_all + sum(one.count // n for one in bags if one.segments is None)
    filled = sum(_filled(program, one, choices) for one in bags)
    placed = sum(one.placed for one in bags) // n
    number = 2 if sizes.requested <= 1 << 16 else 4  # which of the rows that were asked for
    weight = bags[0].value.dtype.itemsize if any(one.weights for one in bags) else 0
    most = max(one.length if one.segments is None else one.length // n for one in bags)
    counted = np.min_scalar_type(most).itemsize
    pooled = replace(
        sizes,
        bags=count,
        bag_ids=placed,
        bag_id_bytes=number + weight,
        bag_count_bytes=counted,
        bags_of_all=of_all,
        bags_filled=filled if of_all else None,
    )
    before, after = (sent_bytes(each, "hosts")[HOSTED] for each in (sizes, pooled))
    if before <= after and earlier is None:
        return sizes, ""
    saved = f"a rank sends {format_bytes(after)} in place of {format_bytes(before)}"
    return pooled, f"the owners of the rows add up each rank's {filled} bags: {saved}"


def _filled(program: Program, bags: Bags, choices: Choices) -> int:
    """Returns in how many bags a rank has ids: the most in the example, else as many as if ids came bag by bag."""
    n = choices.devices
    if bags.segments is None:
        return bags.count // n
    found = choices.value(bags.segments)
    if found is None:
        return min(bags.count, bags.count // n + 1, bags.placed // n)
    there = (np.unique(part) for part in np.split(found.reshape(bags.ids), n, known(_axis_of_ids(program, bags))))
    return max(int(((part >= 0) & (part < bags.count)).sum()) for part in there)


def _axis_of_ids(program: Program, bags: Bags) -> int | None:
    """Returns the batch axis of the ids in bags by segments; None if it isn't known."""
    atoms = (bags.segments, *(() if bags.moves else (bags.index,)))
    axes = (program.batch.get(atom) for atom in atoms if isinstance(atom, Var))
    return next((axis for axis in axes if axis is not None), None)


def _owned_bags(program: Program, space: RowSpace, ids: RowIds, choices: Choices) -> Sequence[Bags]:
    """Returns the bags that owners may add up; none if single rows are read, or ids have a place in a bag that has
    examples of several devices. Bags by segments are those of ranks alone: between devices each message would have
    room for all bags."""
    earlier, options = choices.earlier_plan(space), choices.options
    by_one = not choices.hosts or options.rank_devices == 1  # a rank's bags are those of one device
    is_whole = by_one and options.microbatches == 1 and options.tensor == 1
    if space.is_pulled or space.depends_on or not is_whole or (earlier is not None and not earlier.pooled):
        return ()
    bags = [pair.sums for pair in _bag_pairs(space, ids, choices)]
    for one in bags:
        if one.segments is not None:
            axis = _axis_of_ids(program, one)
            if not choices.hosts or axis is None or one.ids[axis] % choices.devices:
                return ()
            continue
        axis = program.batch.get(one.value) if isinstance(one.value, Var) else None
        if axis is None or axis >= len(one.shape) or one.shape[axis] % choices.devices:
            return ()
    return bags


def _with_device_bags(
    space: RowSpace, ids: RowIds, bags: Sequence[Bags], bounds: tuple[Bounds, Bounds], sizes: Sizes, choices: Choices
) -> tuple[Bounds, Bounds, Sizes, str]:
    """Returns bounds and sizes with bags that owners add up, if that pays, and the reason ("": no bags).

    `bounds`: (without limits, as planned). A fallback sends rows in place of bags.
    """
    (safe, tight), earlier = bounds, choices.earlier_plan(space)
    if not bags or choices.hosts:
        return safe, tight, sizes, ""
    n, most, uses = choices.devices, ids.count_on(choices.devices), most_uses(bags)
    count, placed = sum(one.count for one in bags) // n, sum(one.placed for one in bags) // n
    if tight.tight and earlier is not None and earlier.ids == ids.count:
        most = min(most, rounded(known(earlier.sizes).bag_ids / (n * uses) * choices.options.headroom / HEADROOM))
    elif tight.tight:
        flat = choices.measured.ids[space.family]
        loads = device_ids(flat, ids.batched, n, space.extent, distinct=False)
        most = min(most, rounded(choices.options.headroom * longest_message(loads, asked_layout(tight))))
    slots = min(uses * most, placed)
    weight = bags[0].value.dtype.itemsize if any(one.weights for one in bags) else 0
    pooled = replace(
        sizes, bags=count, bag_ids=n * slots, bag_id_bytes=ID_BYTES, bag_count_bytes=ID_BYTES, bag_weight=weight
    )
    shown = pooled if tight.owner is None else in_whole(pooled)
    before, after = (sent_bytes(each)["ps"] for each in (sizes, shown))
    if earlier is None and not _bags_pay(sizes, shown, choices):
        return safe, tight, sizes, ""
    bounded = replace(tight, bag_ids=most)
    saved = f"a device sends {format_bytes(after)} in place of {format_bytes(before)}"
    why = f"the owners of the rows add up each device's {count} bags: {saved}"
    return safe if tight.tight else bounded, bounded, pooled, why


def in_whole(sizes: Sizes) -> Sizes:
    """Returns the sizes of a table that one device has whole, if devices have equal parts of all such tables: messages
    to it alone have room for its rows and bags."""
    return replace(sizes, room=Room(sizes.capacity, sizes.bag_ids // sizes.devices, sizes.bags))


def stack_owner(program: Program, space: RowSpace) -> int | None:
    """Returns the device that has all of a family's rows already, in a stack; None if there is none."""
    indices = (program.inputs[k].stack_index for k in space.leaves)
    return next((index.shape.owner(index.table) for index in indices if index is not None), None)


def _bags_pay(sizes: Sizes, pooled: Sizes, choices: Choices) -> bool:
    """Returns whether bags pay on devices: by their bytes, and by predicted times if rates are known."""
    (times, saved), (before, after) = _BAGS_PAY, (sent_bytes(each)["ps"] for each in (sizes, pooled))
    if (before - times * after) * sizes.together < saved:
        return False
    rates = choices.measured.rates
    if rates is None:
        return True
    taken, instead = (
        step_seconds(rates, each)["ps"] + sum(term.seconds for term in lookup_terms(rates, each))
        for each in (sizes, pooled)
    )
    return instead < taken


def _bag_pairs(space: RowSpace, ids: RowIds, choices: Choices) -> Sequence[BagPair]:
    """Returns the bags by which a family is looked up; none if single rows are read."""
    lookups, pushes = list[tuple[Atom, Atom]](), list[tuple[Atom, Atom]]()
    for access in space.accesses:
        equation = access.equation
        if access.path or access.known or access.axis or not is_plain_access(equation):
            return ()
        if access.is_lookup:
            lookups.append((equation.inputs[1], equation.outputs[0]))
        else:
            pushes.append((equation.inputs[1], equation.inputs[2]))
    several = len({a.equation.inputs[0] for a in space.accesses if a.is_lookup}) > 1  # forms of a row
    if several or choices.bags is None or not all(ids.batched):
        return ()
    return find_bags(choices.bags(), lookups, pushes) or ()


def _line(space: RowSpace) -> str:
    lookups = sorted(space.accesses, key=lambda access: not access.is_lookup)  # of a table that is only written: writes
    sources = (access.equation.source for access in lookups)
    return str(next(filter(None, sources), ""))


# --- bytes of a family's rows that are sent, looked up and as gradients ---
#
# A step may look up a few columns of a table, cast it first, or look up functions of its rows: the looked-up values are
# sent. Gradients are sent as they are scattered, a sum of several once (`passes.merge_pushes`).


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of a row, counting each value that is sent by itself."""

    looked_up: int  #: Bytes of the values that lookups read.
    gradients: int  #: Bytes of the sums of gradients that are sent.
    reduced: tuple[int, ...]  #: Bytes of each gradient that is reduced over the devices.


def row_bytes(program: Program, space: RowSpace, ids: RowIds, *, on_cpus: bool) -> RowBytes:
    """Returns the bytes of the family's rows that are sent in a step.

    `on_cpus`: XLA there adds up small floats as float32, and merges a checkpoint's recomputation.
    """
    numbering = Numbering()
    for equation in program.block.equations if on_cpus else ():
        numbering.find(equation)
    read: dict[Atom, int] = {}
    totals: dict[Var, int] = {}
    reduced: list[int] = []
    for access in space.accesses:
        equation, path = access.equation, access.path
        if access.is_lookup:
            atom, turns = _outside(path, equation.inputs[0])
            # Lookups that a checkpoint repeats are merged then, so both get one name.
            if on_cpus and path and all(e.op == "remat" for e in path):
                inner, value, _ = hoist(path, equation.inputs[0])
                atom = append_new(inner, value, [], numbering)
            read[atom] = turns * _bytes_of_row(equation.inputs[0].type, space.extent)
        elif equation.op == "scatter-add" and ids.axes.get(equation) is not None:
            made = equation.outputs[0].type
            total, turns = _total(program.block, access)
            totals[total] = turns * _bytes_of_row(made, space.extent)
            reduced.append(_bytes_of_row(made, space.extent, np.dtype(jax_compat.sum_dtype(made.dtype)).itemsize))
    return RowBytes(sum(read.values()), sum(totals.values()), tuple(reduced))


def _bytes_of_row(type_: ArrayType, extent: int, itemsize: int = 0) -> int:
    return (type_.size * itemsize or type_.nbytes) // extent


def _iterations(path: Sequence[Equation]) -> int:
    return math.prod(e.params["length"] for e in path if e.op == "scan")


def _outside(path: Sequence[Equation], atom: Atom) -> tuple[Atom, int]:
    """Returns a value's name in the outermost block that has it, and how often a step computes it."""
    for depth in range(len(path) - 1, -1, -1):
        equation = path[depth]
        body = next((b for b in equation.bodies if atom in b.inputs), None)
        constant = 0 if body is None else equation.border.consts
        if body is None or not isinstance(atom, Var) or body.inputs.index(atom) >= constant:
            return atom, _iterations(path[: depth + 1])
        atom = equation.inputs[equation.border.head + body.inputs.index(atom)]
    return atom, 1


def _total(block: Block, access: Access) -> tuple[Var, int]:
    """Returns the sum that a gradient is a term of, in the outermost block, and how often a step computes it."""
    blocks, within = [block], (*access.path, access.equation)
    for outer, inner in itertools.pairwise(within):
        blocks.append(next(b for b in outer.bodies if any(e is inner for e in b.equations)))
    path, total = list(access.path), access.equation.outputs[0]
    while True:
        block = blocks[-1]
        uses = block.uses()
        user = next((e for e in block.equations if total in e.inputs), None)
        if uses[total] == 1 and user is not None and _adds(user, total):
            total = user.outputs[0]
        elif uses[total] == 1 and user is None and path and _is_handed_on(path[-1], k := block.outputs.index(total)):
            total = path.pop().outputs[k]
            blocks.pop()
        else:
            return total, _iterations(path)


def _is_handed_on(equation: Equation, k: int) -> bool:
    return equation.op != "scan" or k < equation.border.carries


def _adds(equation: Equation, term: Var) -> bool:
    if equation.op == "scatter-add":
        return equation.inputs[0] is term
    return equation.op in ("add", "add_any") and all(a.shape == term.shape for a in equation.inputs)


def after_the_sum(program: Program, family: int) -> tuple[list[Equation], list[Equation]]:
    """Returns the equations that compute a family's rows from sums of gradients, and those that add up over rows."""
    facts, known = program.facts, set[Atom]()
    by_row, sums = list[Equation](), list[Equation]()
    for e in program.block.equations:
        role, value = facts.roles.get(e), facts.value(e.outputs[0]) if e.outputs else None
        if role == "push" and isinstance(value, Row) and facts.find(value.family) == family:
            known.update(e.outputs)
        elif not known.isdisjoint(e.inputs) and role == "rows":
            known.update(e.outputs)
            by_row.append(e)
        elif not known.isdisjoint(e.inputs) and role in ("reduce", "contract"):
            sums.append(e)
    return by_row, sums
