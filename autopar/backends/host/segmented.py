"""Runs a step in segments: compiled programs, with exchanges between ranks in between.

Calls into MPI are made between programs, never from a callback inside one. Everything that a segment needs is looked up
once, when the step is compiled for a shape bucket (rows asked for and owned); a step itself walks a list. `OtherShapes`
ends a run before anything has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.analysis.prefix import Expected, LogAhead, Prefix, first_program, prefix_of
from autopar.analysis.values import block_key
from autopar.backends.emit import donation_order, emit
from autopar.backends.host.other_rows import OtherRows
from autopar.backends.host.ranks import EACH, Lowerable, Placement, Ranks
from autopar.backends.host.running_step import Ahead, HostRoute, OtherShapes, RunningStep
from autopar.backends.host.shape_buckets import Rows, ShapeBucket, ShapeBuckets
from autopar.backends.host.storage import HostRows, rows_back, rows_first
from autopar.backends.host.table_reduction import TableReduction
from autopar.backends.host.view import RouteView, host_backends, padded
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.deferred import flushes
from autopar.ir.layout import RowLayout
from autopar.ir.local import BagSet, ExchangeSegment, ProgramSegment, Side, Spread
from autopar.ir.operations import plain_name, split
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, RouteType, Var, known
from autopar.ir.program_plan import ProgramPlan
from autopar.jax_types import Dtype, Index, Leaf, Sharding
from autopar.mpi.bags import BagIds, RequestedBags
from autopar.mpi.buffers import aligned
from autopar.mpi.exchange import Requested, RequestedPart, Rounds, distinct_rows, number_dtype

_Action = Callable[[RunningStep], None]


@dataclass(frozen=True, slots=True)
class _Called:
    """A program that a step calls."""

    program: Lowerable
    side: Side
    inputs: tuple[Var, ...]
    given: tuple[Placement, ...]
    outputs: tuple[Atom, ...]


class SegmentedProgram:
    """A step's segments, compiled for a shape bucket.

    Attributes:
      once_per_row: The values that are computed once for each distinct row; None if there are none.
      segments: What it runs, in order, as text.
    """

    def __init__(
        self,
        program: Program,
        bound: ProgramPlan,
        ranks: Ranks,
        buckets: ShapeBuckets,
        bucket: ShapeBucket,
        donated: frozenset[int],
    ) -> None:
        """
        Args:
          program: A localized program, cut into segments.
          bound: The plan, with the sizes of the bucket.
          buckets: The step's shape buckets; `bucket` is one of them.
          donated: Inputs whose buffers may be used for their new values.
        """
        self._ranks = ranks
        self._bound = bound
        self._buckets, self._bucket = buckets, bucket
        self.once_per_row = program.once_per_row
        self._inputs = program.block.inputs
        items, self._outputs = returned_by_programs(program)
        self.segments = list(map(str, items))
        states = {program.block.inputs[k]: program.block.outputs[out] for k, out in program.new_states.items()}
        self._states = {new: old for old, new in states.items()}
        self._reusable = {v: states[v] for k, v in enumerate(program.block.inputs) if k in donated and v in states}
        self._layouts = bound.host_layouts
        tables = {f.family: f.table for f in bound.families}
        self._by_first = {family for family, table in tables.items() if table.sizes and table.sizes.by_first}
        self._others: dict[Equation, OtherRows] = {}
        self._tables: dict[Equation, TableReduction] = {}
        self._names: dict[Equation, str] = {}
        self._called: list[_Called] = []
        self._ids = self._ids_by_device(items)
        self._placements = self._placed(program, items)
        self._awaited = awaited_fetches(items)
        routes = [k for k, item in enumerate(items) if isinstance(item, ExchangeSegment) and item.op == "ap.route"]
        last_route = max(routes, default=-1)  # from there on the run isn't begun again
        actions = [self._action(item, may_donate=k > last_route) for k, item in enumerate(items)]
        in_reach = ranks.exchange.size == 1 and not ranks.hides_exchanges(ranks.exchange)  # rows are where CPUs compute
        nothing = ranks.is_joint or not ranks.exchange.knows_lists or in_reach
        found = [None if nothing else prefix_of(program, items, self._layouts, deferred=own) for own in (False, True)]
        #: What runs ahead, without and with deferred rows, if rows do: ids alone aren't worth that the ranks agree.
        self._prefixes = [one if one is not None and (one.fetches or one.sent) else None for one in found]
        self._ids_ahead, self._by_item = list[_Action](), list(actions)
        prefix = self._prefixes[True]
        self._batch = () if prefix is None else tuple(k for k, v in enumerate(self._inputs) if v in prefix.inputs)
        self._actions = actions
        if prefix is not None:
            self._ids_ahead = [actions[k] for k in prefix.ids]
            for k in prefix.ids:
                actions[k] = _unless_known(actions[k], items[k])
            for k in prefix.owners:
                actions[k] = _unless_caught_up(actions[k], items[k], prefix.logs)
            self._insert(prefix.start + 1, "ask for the next step's rows", self._run_ahead)
        if flushes(program.block):
            start = first_program(items)
            k = len(items) if start is None else start + 1
            self._insert(k, "bring some rows up to date that wait", _catch_up_some)
        if prefix is not None and prefix.expected is not None:
            expected = self._segment(ProgramSegment("device", 0, prefix.expected.block, frozenset()), False)
            act = functools.partial(self._expect, prefix.expected, expected)
            self._insert(prefix.start, "compute what update logs will get", act)

    def _insert(self, k: int, text: str, act: _Action) -> None:
        self._actions.insert(k, act)
        self.segments.insert(k, text)

    def run(self, inputs: Sequence[Leaf], step: RunningStep) -> list[Leaf]:
        """Runs one step, from flat inputs (arrays, and `HostRows`) to flat outputs. Raises OtherShapes, before anything
        has changed, if the step needs another shape bucket."""
        step.values = dict(zip(self._inputs, inputs, strict=True))
        if step.ahead is not None and step.ahead.segmented is self:
            step.values |= step.ahead.values
        try:
            for act in self._actions:
                act(step)
        finally:  # after an error, too: nothing else is exchanged meanwhile
            self._await_following(step)
        return [a.value if isinstance(a, Literal) else step.values[a] for a in self._outputs]

    def fits(self, needs: Rows) -> bool:
        """Says whether a step with these needs is run by this program."""
        return self._buckets.best(needs) is self._bucket

    def _action(self, item: ProgramSegment | ExchangeSegment, *, may_donate: bool) -> _Action:
        if isinstance(item, ProgramSegment):
            return self._segment(item, may_donate)
        if item.op == "ap.reduce":
            return lambda step: self._reduce(item, step)
        run = getattr(self, "_" + plain_name(item.op))

        def act(step: RunningStep) -> None:
            self._await_thread(step)
            if item.op == "ap.route":
                self._route(item.equations, step)
                return
            operands = ([self._value(step, a) for a in equation.inputs] for equation in item.equations)
            if item.op in ("ap.fetch", "ap.deliver"):  # all families' at once
                results = run(item.equations, step, list(operands))
            else:
                results = (run(e, step, *given) for e, given in zip(item.equations, operands, strict=True))
            for equation, made in zip(item.equations, results, strict=True):
                step.values.update(zip(equation.outputs, made, strict=True))

        return act

    def _placed(self, program: Program, items: Sequence[ProgramSegment | ExchangeSegment]) -> dict[Atom, Placement]:
        made = (v for i in items if isinstance(i, ProgramSegment) and i.side == "device" for v in i.block.outputs)
        placements: dict[Atom, Placement] = dict.fromkeys(made, EACH)
        inputs = itertools.zip_longest(program.block.inputs, self._bound.placements)
        placements |= {v: at for v, at in inputs if isinstance(v.type, ArrayType)}
        for atom, state in zip(self._outputs, known(program.local).outputs, strict=True):
            if atom in placements:
                placements[atom] = state.axis if isinstance(state, Spread) and not state.owner else None
        return placements

    def _ids_by_device(self, items: Sequence[ProgramSegment | ExchangeSegment]) -> set[Atom]:
        """Returns ids that are spread over devices: each looks up those of its own examples."""
        routes = [e for i in items if isinstance(i, ExchangeSegment) and i.op == "ap.route" for e in i.equations]
        return {a for e in routes for a, batched in _ids_of(e) if batched}

    # --- compiled programs ---

    def _segment(self, segment: ProgramSegment, may_donate: bool) -> _Action:
        block = segment.block
        names = block.inputs
        owner = segment.side == "owner"
        view = self._ranks.owner_view if owner else self._ranks.device_view
        made = {v: k for k, v in enumerate(block.outputs)}
        last = segment.last if may_donate else frozenset()
        states = [k for k, v in enumerate(names) if v in last and self._reusable.get(v) in made]
        new = {k: made[self._reusable[names[k]]] for k in states}
        new = {k: out for out, k in {out: k for k, out in new.items()}.items()}  # a new value has one placement
        outputs = [block.outputs[k] for k in donation_order(new, len(block.outputs))]
        block = dataclasses.replace(block, outputs=tuple(outputs))
        given, returned = ([self._placements.get(v, EACH) for v in of] for of in (names, outputs))

        def compiled_now() -> Lowerable:
            run = emit(block, host_backends(self._bound, view), view)
            return self._ranks.compile(run, segment.side, sorted(new), given, returned)

        try:  # what doesn't depend on the shape bucket is compiled once: ids, updates of dense parameters
            key = block_key(block), segment.side, *map(tuple, (sorted(new), given, returned))
            compiled = self._ranks.programs.get(key) or self._ranks.programs.setdefault(key, compiled_now())
        except TypeError:  # a parameter can't be hashed
            compiled = compiled_now()
        self._called.append(_Called(compiled, segment.side, names, tuple(given), tuple(outputs)))

        def read(step: RunningStep, var: Var, placement: Placement) -> Leaf:
            if owner:
                return self._ranks.for_owner(_shown(self._value(step, var)))
            return self._ranks.for_device(_shown(step.values[var]), placement)

        def act(step: RunningStep) -> None:
            values = step.values
            operands = [read(step, v, placement) for v, placement in zip(names, given, strict=True)]
            for var, value in zip(outputs, compiled(*operands), strict=True):
                values[var] = value

        return act

    def compile(self, committed: Mapping[int, Sharding]) -> None:
        """Compiles all programs ahead of the step that calls them. `committed`: the shardings of those of a step's
        inputs that are committed to devices."""
        at: dict[Atom, Sharding] = {self._inputs[k]: sharding for k, sharding in committed.items()}
        for called in self._called:
            given = [(v, self._operand(called, v, k, at.get(v))) for k, v in enumerate(called.inputs)]
            compiled = called.program.lower(*(operand for _, operand in given)).compile()
            if any(v in at for v, _ in given) if self._ranks.is_single else called.side == "device":
                at.update(zip(called.outputs, jax.tree.leaves(compiled.output_shardings), strict=False))

    def _operand(self, called: _Called, var: Var, k: int, sharding: Sharding | None) -> Leaf:
        def typed(type_: ArrayType) -> Leaf:
            return self._ranks.operand(type_, called.given[k], sharding, called.side)

        if isinstance(var.type, RouteType):
            rows, requested = self._bucket.rows[var.type.family]
            return RouteView(*(typed(ArrayType((n,), np.dtype(np.int32))) for n in (rows, 1, requested)))
        assert isinstance(var.type, ArrayType), "programs are given arrays"
        return typed(var.type)

    # --- the next step's prefix, beside this step ---

    def ahead_inputs(self, *, expects: bool) -> tuple[int, ...]:
        """Returns the inputs of the batch that what runs ahead reads; () if nothing does. `expects`: as in a step."""
        return self._batch if self._prefixes[expects] is not None else ()

    def begin(self, batch: Sequence[Leaf]) -> Ahead:
        """Calls the programs of a next step's ids: on one device programs run in the order of their calls, and what is
        called beside this step's own would wait for it. `batch`: the leaves of `ahead_inputs`."""
        running = RunningStep({self._inputs[k]: leaf for k, leaf in zip(self._batch, batch, strict=True)})
        for act in self._ids_ahead:
            act(running)
        return Ahead(self, running)

    def _expect(self, expected: Expected, act: _Action, step: RunningStep) -> None:
        """Calls the program of what this step is expected to write to its update logs, ahead of its own programs."""
        if step.looks_ahead and step.expects and step.following is not None:
            running = RunningStep(step.values | {v: np.ones(v.shape, v.dtype) for v in expected.assumed})
            act(running)
            step.following.new_entries = {v: running.values[v] for v in expected.block.outputs}

    def _run_ahead(self, step: RunningStep) -> None:
        """Asks for the next step's rows and fetches those that this step doesn't write, if all ranks know the batch."""
        prefix = self._prefixes[step.expects]
        if step.looks_ahead and prefix is not None:

            def ask() -> None:
                with self._ranks.exchange.beside():
                    self._ask_ahead(prefix, step)

            step.under_way = self._ranks.in_thread(ask)

    def _ask_ahead(self, prefix: Prefix, step: RunningStep) -> None:
        ahead = step.following
        if not self._ranks.least(ahead is not None) or ahead is None:
            return
        running = ahead.running
        with contextlib.suppress(OtherShapes):  # rows have other places in another program
            self._route(prefix.routes, running)
        ahead.values = {v: x for v, x in running.values.items() if v in prefix.values}
        tables = {e.inputs[0]: step.values[e.inputs[0]] for e in prefix.pulls}
        entries = self._entries(prefix.logs, step, ahead)
        can_fetch = ahead.fits and step.lagging.isdisjoint(tables.values())
        can_fetch = can_fetch and all(entries[log.now] < log.length for log in prefix.logs)  # else it is emptied first
        ahead.is_there = True
        if not self._ranks.least(can_fetch):
            return
        running.values |= tables | entries
        for equation in prefix.pulls:
            leaf, route = (running.values[a] for a in equation.inputs)
            running.values |= zip(equation.outputs, self._pull(equation, running, leaf, route), strict=True)
        written = {family: self._written(prefix, step, family) for family in map(_family, prefix.routes)}
        self._send_ahead(prefix, ahead, written)
        later: dict[LogAhead, np.ndarray] = {}
        for log in prefix.logs:  # rows that this step writes are up to date by then
            route, stamped = running.values[log.stamps.inputs[1]], running.values[log.stamps.outputs[0]]
            later[log] = np.flatnonzero(np.isin(route.read, written[log.family]))
            stamped[later[log]] = entries[log.now]
        for k in prefix.owners:  # on CPUs a thread's programs wait for those that it called before, no others
            self._by_item[k](running)
        for log, which in later.items():
            if log.caught:
                ahead.caught |= {pull: (which, _copy(self._value(running, v))) for pull, v in log.caught.items()}
                stamps = np.full_like(running.values[log.stamps.outputs[0]], entries[log.now])
                ahead.caught[log.stamps] = which, stamps
        parts: dict[int, tuple[RequestedPart, RequestedPart]] = {}
        fetches = list[Rounds[np.ndarray]]()
        for equation in prefix.fetches:
            rows, route = (self._value(running, a) for a in equation.inputs)
            family = _family(equation.inputs[1])
            if family not in parts:
                parts[family] = self._ranks.divide(route.requested, written[family])
            early, late = parts[family]
            first = _owned(equation, rows, route)
            ahead.fetched[equation] = self._memory(equation, first, route), late
            fetches.append(self._ranks.fetching_part(early, first, ahead.fetched[equation][0]))
        self._ranks.fetch(fetches)
        ahead.tables = tuple(k for k, v in enumerate(self._inputs) if v in tables)
        ahead.entries = {k: entries[v] for k, v in enumerate(self._inputs) if v in entries}
        ahead.versions.update((table, table.version) for table in tables.values())
        running.values.clear()  # no table is kept alive for a step that may never come

    def _send_ahead(self, prefix: Prefix, ahead: Ahead, written: Mapping[int, np.ndarray]) -> None:
        """Copies what devices read of the next step's tables to them, and notes which rows this step writes."""
        values = ahead.running.values
        try:
            for equation in prefix.sent:
                which = np.flatnonzero(np.isin(values[equation.inputs[1]].read, written[_family(equation.inputs[1])]))
                ahead.sent[equation] = which, self._ranks.send(values[equation.outputs[0]])
        except jax.errors.JaxRuntimeError as error:
            ahead.sent.clear()
            ahead.refusal = str(error)

    def _stop_ahead(self, refusal: str) -> None:
        """Copies rows in the step that needs them from now on, and says so once."""
        self._prefixes = [None, None]
        warn(
            f"there may be no room on the device for rows of two steps: {refusal.splitlines()[0]}. From now on rows "
            "are copied in the step that needs them; optimize= without 'prefetch' does so from the first step",
            SlowPlanWarning,
        )

    def _entries(self, logs: Sequence[LogAhead], step: RunningStep, ahead: Ahead) -> dict[Atom, np.ndarray]:
        """Returns update logs' entries as they are expected to be after a step."""
        new = RunningStep(ahead.new_entries)
        pairs = ((old, after) for log in logs for old, after in log.entries.items())
        return {old: np.asarray(self._value(step if after is old else new, after)) for old, after in pairs}

    def _written(self, prefix: Prefix, step: RunningStep, family: int) -> np.ndarray:
        """Returns the rows of this owner that a step writes."""
        return step.routes[family][0].rows[: None if family in prefix.written else 0]

    # --- exchanges ---

    def _route(self, equations: Sequence[Equation], step: RunningStep) -> None:
        families = [_family(equation) for equation in equations]
        new = {
            family: equation for equation, family in zip(equations, families, strict=True) if family not in step.routes
        }
        layouts = [self._layouts[family] for family in new]
        ids = ([self._own_ids(step, a) for a in equation.inputs] for equation in new.values())
        wanted = list(map(_distinct_indices, ids, layouts))
        found = self._ranks.ask(wanted, [layout.shard_rows for layout in layouts]) if new else []
        for family, requested, indices in zip(new, found, wanted, strict=True):
            step.routes[family] = requested, indices
            step.needs[family] = self._ranks.agree((len(requested.rows) + 1, indices.size), first=step.is_first)
        if not self.fits(step.needs):
            raise OtherShapes(step.needs)
        for equation, family in zip(equations, families, strict=True):
            if equation.outputs[0] not in step.values:
                requested, indices = step.routes[family]
                rows, requested_rows = self._bucket.rows[family]
                route = _route(requested, indices, self._layouts[family], rows, requested_rows)
                step.values[equation.outputs[0]] = route

    def _reduce(self, item: ExchangeSegment, step: RunningStep) -> None:
        if item.gradient_bucket is None:
            self._await_thread(step)
        for op in dict.fromkeys(e.params["op"] for e in item.equations):
            some = [e for e in item.equations if e.params["op"] == op]
            key = item.level, item.gradient_bucket, op
            if key not in step.reduced:
                values = [self._value(step, e.inputs[0]) for e in some]
                step.reduced[key] = self._ranks.reduce(values, op, beside=item.gradient_bucket is not None)
            step.beside.append((some, step.reduced[key]))
        if item.gradient_bucket is None:
            self._await_thread(step)

    def _await_following(self, step: RunningStep) -> None:
        if step.under_way is not None:
            ask, step.under_way = step.under_way, None
            ask()
            if step.following is not None and step.following.refusal:
                self._stop_ahead(step.following.refusal)

    def _await_thread(self, step: RunningStep) -> None:
        self._await_following(step)
        for equations, result in step.beside:
            step.values.update(zip((e.outputs[0] for e in equations), result(), strict=True))
        step.beside.clear()

    # By equation: what it returns from its operands.

    def _pull(self, equation: Equation, step: RunningStep, leaf: Leaf, route: HostRoute) -> Sequence[Leaf]:
        axis, state = equation.params["axis"], equation.params["state"]
        if not isinstance(leaf, HostRows):  # an array with as many rows that is no leaf: a mask
            layout = self._layouts[equation.inputs[1].type.family]
            leaf = HostRows(rows_first(np.asarray(leaf), axis), layout, 0, axis, "")
        elif leaf in step.lagging:
            leaf.catch_up(route.rows[: route.count])

        def late(which: np.ndarray) -> np.ndarray:
            return leaf.pull(route.rows[which], int(which.searchsorted(route.count)), route.spare, state)

        if step.ahead is not None and equation in step.ahead.caught:
            which, pulled = step.ahead.caught[equation]
            rows_first(pulled, axis)[which] = rows_first(late(which), axis)
            return [pulled]
        if step.ahead is not None and equation in step.ahead.sent:
            which, sent = step.ahead.sent[equation]
            return [self._ranks.sent(sent, which, late(which), axis)]
        return [leaf.pull(route.rows, route.count, route.spare, state)]

    def _fetch(
        self, equations: Sequence[Equation], step: RunningStep, operands: Sequence[Sequence[Leaf]]
    ) -> Iterator[Sequence[Leaf]]:
        fetched = self._ranks.fetch([self._fetching(e, step, *of) for e, of in zip(equations, operands, strict=True)])
        return ([rows_back(out, e.params["axis"])] for e, out in zip(equations, fetched, strict=True))

    def _fetching(self, equation: Equation, step: RunningStep, rows: Leaf, route: HostRoute) -> Rounds[np.ndarray]:
        first = _owned(equation, rows, route)
        if step.ahead is not None and equation in step.ahead.fetched:
            out, late = step.ahead.fetched[equation]
            yield from self._ranks.fetching_part(late, first, out)
        else:
            out = self._memory(equation, first, route)
            yield from self._ranks.fetching(route.requested, first, out)
        return out

    def _memory(self, fetch: Equation, first: np.ndarray, route: HostRoute) -> np.ndarray:
        """Returns memory for rows that are fetched, first axis first, with zeros behind them."""
        shape = len(route.view.requested), *first.shape[1:]
        out = self._buffer(fetch, shape, first.dtype) if fetch in self._awaited else aligned(shape, first.dtype)
        out[route.requested.size :] = 0
        return out

    def _deliver(
        self, equations: Sequence[Equation], step: RunningStep, operands: Sequence[Sequence[Any]]
    ) -> Iterator[Sequence[Leaf]]:
        own, outs = list[np.ndarray](), list[np.ndarray]()
        for equation, (sums, route, *_) in zip(equations, operands, strict=True):
            first = rows_first(np.asarray(sums), equation.params["axis"])[: route.indices.size]
            own.append(np.ascontiguousarray(first))
            outs.append(self._buffer(equation, (len(route.rows), *first.shape[1:]), first.dtype))
        totals = self._ranks.deliver([route.requested for _, route, *_ in operands], own, outs)
        for equation, (_, _, *base), out, total in zip(equations, operands, outs, totals, strict=True):
            if equation.inputs[1].type.family in self._by_first:
                self._ranks.through_first(total)
            out[len(total) :] = 0
            rows = rows_back(out, equation.params["axis"])
            yield [rows + np.asarray(base[0]) if base else rows]

    def _pool(self, equation: Equation, step: RunningStep, rows: Leaf, route: HostRoute, *ids: Leaf) -> Sequence[Leaf]:
        sets: Sequence[BagSet] = equation.params["sets"]
        first = np.ascontiguousarray(np.asarray(rows)[: route.count])
        bags = self._bags(sets, step, equation.inputs[1:], route, ids, first.dtype)
        sums = self._ranks.add_up(bags, first)
        counts = np.cumsum([math.prod(one.shape) for one in sets])[:-1]
        parts = zip(np.split(sums, counts), sets, strict=True)
        return [part.reshape(*one.shape, *sums.shape[1:]) for part, one in parts]

    def _push_pool(self, equation: Equation, step: RunningStep, route: HostRoute, *operands: Leaf) -> Sequence[Leaf]:
        sets: Sequence[BagSet] = equation.params["sets"]
        named = split(equation.op, equation.params, (route, *operands))
        own = equation.inputs[len(equation.inputs) - len(named["bags"]) :]
        parts = [np.asarray(part) for part in named["cotangents"]]
        bags = self._bags(sets, step, (equation.inputs[0], *own), route, named["bags"], parts[0].dtype)
        columns = equation.outputs[0].shape[1:]
        cotangents = np.concatenate([part.reshape(-1, *columns) for part in parts])
        kept = None
        if named["kept"]:
            masks, given = iter(named["kept"]), list[np.ndarray]()
            for one, ids, _, which, _ in _of_sets(sets, named["bags"]):
                flags = np.asarray(next(masks)) if one.is_kept else np.ones(ids.shape, bool)
                given.append(flags[which].ravel())
            kept = np.concatenate(given)
        gradients = self._ranks.spread(bags, cotangents, kept)
        if equation.inputs[0].type.family in self._by_first:
            self._ranks.through_first(gradients)
        out = self._buffer(equation, (len(route.rows), *columns), gradients.dtype)
        out[: route.count] = gradients
        out[route.count :] = 0
        return [out]

    def _bags(
        self,
        sets: Sequence[BagSet],
        step: RunningStep,
        atoms: Sequence[Atom],
        route: HostRoute,
        operands: Sequence[Leaf],
        dtype: np.dtype,
    ) -> RequestedBags:
        """Tells owners of the ids in bags, once a step. `atoms`: the route, and the operands' names."""
        key = tuple(atoms)
        if key not in step.bags:
            layout = self._layouts[_family(atoms[0])]
            step.bags[key] = self._ranks.ask_bags(
                route.requested,
                route.indices,
                layout.shard_rows,
                _bag_ids(sets, operands, route.indices, layout, dtype),
            )
        return step.bags[key]

    def _reduce_table(self, equation: Equation, step: RunningStep, *operands: Leaf) -> Sequence[Leaf]:
        if equation not in self._tables:
            self._tables[equation] = TableReduction(equation, self._ranks)
        return [self._tables[equation].run(operands)]

    def _reduce_others(
        self, equation: Equation, step: RunningStep, part: Leaf, route: HostRoute, needed: Leaf, *operands: Leaf
    ) -> Sequence[Leaf]:
        if np.any(needed):
            part = self._of_others(equation).reduce(np.asarray(part), route.rows[: route.count], operands)
        return [part]

    def _of_others(self, equation: Equation) -> OtherRows:
        if equation not in self._others:
            self._others[equation] = OtherRows(equation, self._bound, self._ranks)
        return self._others[equation]

    def _commit(
        self, equation: Equation, step: RunningStep, leaf: HostRows, rows: Leaf, route: HostRoute, *first: Leaf
    ) -> Sequence[Leaf]:
        step.has_written = True
        # The next step gets the rows that are written here; what else is written to the table ends its prefetched ones.
        versions = step.following.versions if step.following is not None else {}
        is_known = versions.get(leaf) == leaf.version
        leaf.commit(route.rows, route.count, np.asarray(rows))
        if is_known:
            versions[leaf] = leaf.version
        return [leaf]

    def _fill(
        self, equation: Equation, step: RunningStep, leaf: HostRows, rows: Leaf, route: HostRoute, *unless: Any
    ) -> Sequence[Leaf]:
        """Writes a leaf that is constant off the rows, unless a sweep has found that it isn't."""
        if not any(map(np.any, unless)):
            step.has_written = True
            leaf.spread_last(np.asarray(rows))
        return [leaf]

    def _densify(
        self, equation: Equation, step: RunningStep, rows: Leaf, route: HostRoute, *first: Leaf
    ) -> Sequence[Leaf]:
        """Writes a leaf that is always constant off the rows, in place of the leaf that it replaces."""
        leaf = step.values[self._states[equation.outputs[0]]]
        step.has_written = True
        leaf.spread_last(np.asarray(rows))
        return self._commit(equation, step, leaf, rows, route)

    def _flush(self, equation: Equation, step: RunningStep, *operands: Leaf) -> Sequence[Leaf]:
        """Returns its operands: the update log's owner flushes before the next step (`UpdateLog.make_room`)."""
        replay = equation.params["replay"]
        named = split(equation.op, equation.params, operands)
        leaves, stamps, entries = (named[name] for name in ("leaves", "stamps", "entries"))
        return [*leaves[: replay.changed], *stamps, *entries[:2], *entries[2 + len(replay.records) :]]

    def _sweep(self, equation: Equation, step: RunningStep, needed: Leaf, *operands: Leaf) -> Sequence[Leaf]:
        if np.any(needed):
            step.has_written = True
            self._of_others(equation).sweep(operands)
        return operands[: len(equation.outputs)]

    def _buffer(self, equation: Equation, shape: tuple[int, ...], dtype: Dtype) -> np.ndarray:
        name = self._names.setdefault(equation, f"{plain_name(equation.op)} {len(self._names)}")
        return self._ranks.buffers.take(name, shape, dtype)

    def _value(self, step: RunningStep, atom: Atom) -> Leaf:
        if isinstance(atom, Literal):
            return atom.value
        value = step.values[atom]
        return self._ranks.from_device(value, self._placements[atom]) if atom in self._placements else value

    def _own_ids(self, step: RunningStep, atom: Atom) -> np.ndarray:
        return self._ranks.own_ids(step.values[atom] if atom in self._ids else self._value(step, atom))


def _ids_of(route: Equation) -> Iterable[tuple[Atom, bool]]:
    """Yields a route's ids, each with whether devices look up those of their own examples."""
    batched = route.params["batched"] or [False] * len(route.inputs)
    return zip(route.inputs, batched, strict=True)


def _of_sets(
    sets: Sequence[BagSet], operands: Sequence[Leaf]
) -> Iterator[tuple[BagSet, np.ndarray, np.ndarray, Index, Sequence[np.ndarray]]]:
    """Yields sets of bags, each with its ids, their bags, which of them count, bag by bag, and weights if there are
    any."""
    rest = iter(operands)
    for one in sets:
        ids = np.asarray(next(rest))
        bags = np.asarray(next(rest)) if one.is_jagged else np.arange(len(ids))[:, None]
        mask = np.asarray(next(rest)) if one.is_masked else None
        which: Index = slice(None) if mask is None else mask
        if one.is_jagged:
            is_there = bags < math.prod(one.shape)
            there = np.flatnonzero(is_there if mask is None else is_there & mask)
            which = there[np.argsort(bags[there], kind="stable")]
        yield one, ids, bags, which, [np.asarray(next(rest))] if one.is_weighted else []


def _bag_ids(
    sets: Sequence[BagSet], operands: Sequence[Leaf], indices: np.ndarray, layout: RowLayout, dtype: np.dtype
) -> BagIds:
    """Returns the ids that count in all sets of bags, one set after the other."""
    parts, count, longest, has_weights = list[Sequence[np.ndarray]](), 0, 0, any(one.is_weighted for one in sets)
    for one, own, bags, which, weights in _of_sets(sets, operands):
        given = [own, count + bags, *(weights or [np.ones((), dtype)])] if has_weights else [own, count + bags]
        parts.append([np.broadcast_to(value, own.shape)[which].ravel() for value in given])
        count, longest = count + math.prod(one.shape), max(longest, own.shape[-1])
    ids, numbers, *joined = map(np.concatenate, zip(*parts, strict=True))
    wanted = indices.searchsorted(layout.storage_index(ids.astype(indices.dtype, copy=False)))
    return BagIds(wanted, numbers, count, longest, joined[0] if joined else None, dtype)


def _catch_up_some(step: RunningStep) -> None:
    if step.catch_up_some is not None:
        step.catch_up_some()


def _unless_known(act: _Action, segment: ProgramSegment | ExchangeSegment) -> _Action:
    """Returns an action that does nothing if its results are there."""
    assert isinstance(segment, ProgramSegment), "programs compute ids"
    outputs = segment.block.outputs

    def act_once(step: RunningStep) -> None:
        if not all(v in step.values for v in outputs):
            act(step)

    return act_once


def _unless_caught_up(act: _Action, segment: ProgramSegment | ExchangeSegment, logs: Sequence[LogAhead]) -> _Action:
    """Returns an action that hands rows on that were brought up to date ahead, if it does nothing else to them."""
    assert isinstance(segment, ProgramSegment), "programs bring rows up to date"
    caught = {v: pull for log in logs for pull, v in log.caught.items()}
    if not caught.keys() >= {v for e in segment.block.equations for v in e.outputs}:
        return act
    pulls = [(caught[v], v) for e in segment.block.equations for v in e.outputs if isinstance(v, Var)]

    def act_unless_there(step: RunningStep) -> None:
        if step.ahead is None or not step.ahead.caught.keys() >= {pull for pull, _ in pulls}:
            act(step)
        else:
            step.values.update((v, step.values[pull.outputs[0]]) for pull, v in pulls)

    return act_unless_there


def _copy(rows: Leaf) -> np.ndarray:
    copy = aligned(rows.shape, rows.dtype)  # which programs read where it is
    np.copyto(copy, np.asarray(rows))
    return copy


def _owned(fetch: Equation, rows: Leaf, route: HostRoute) -> np.ndarray:
    """Returns an owner's rows that are asked for, first axis first."""
    return np.ascontiguousarray(rows_first(np.asarray(rows), fetch.params["axis"])[: route.count])


def _family(route: Equation | Atom) -> int:
    type_ = route.outputs[0].type if isinstance(route, Equation) else route.type
    assert isinstance(type_, RouteType), "a route is what a route equation makes"
    return type_.family


def _shown(value: Leaf) -> Leaf:
    return value.view if isinstance(value, HostRoute) else value


def _distinct_indices(ids: Sequence[np.ndarray], layout: RowLayout) -> np.ndarray:
    """Returns the sorted storage indices of distinct rows among flat ids; `extent` is no row."""
    flat = np.concatenate(ids) if ids else np.zeros((0,), np.int32)
    flat = flat[flat < layout.extent].astype(number_dtype(layout.stored), copy=False)
    return distinct_rows(layout.storage_index(flat))


def _route(requested: Requested, indices: np.ndarray, layout: RowLayout, rows: int, requested_rows: int) -> HostRoute:
    touched = requested.rows
    # The first row that the step doesn't touch; some row if it touches all.
    gaps = np.flatnonzero(touched != np.arange(touched.size, dtype=touched.dtype))
    spare = int(gaps[0]) if gaps.size else touched.size if touched.size < layout.shard_rows else 0
    numbers = padded(touched, rows, layout.shard_rows)
    view = RouteView(numbers, np.array([spare], np.int32), padded(indices, requested_rows, layout.stored))
    return HostRoute(requested, indices, view, numbers, spare)


# --- what compiled programs are given and return, and whose memory is used again ---


def returned_by_programs(program: Program) -> tuple[list[ProgramSegment | ExchangeSegment], tuple[Atom, ...]]:
    """Returns segments and outputs in which a program returns the caller's reduced results (a loss, metrics).

    What a program returns is a JAX array already; making one of NumPy's takes longer than some segments."""
    items: list[ProgramSegment | ExchangeSegment] = list(known(program.segments).items)
    outputs = list(program.block.outputs)
    last = max(
        (k for k, item in enumerate(items) if isinstance(item, ProgramSegment) and item.side == "device"), default=-1
    )
    before = [item for item in items[: max(last, 0)] if isinstance(item, ExchangeSegment) and item.op == "ap.reduce"]
    reduced = {v for item in before for e in item.equations for v in e.outputs}
    copies: list[tuple[Var, Var]] = []
    for k in sorted(set(range(len(program.outputs))) - set(program.new_states.values())):
        atom = outputs[k]
        if isinstance(atom, Var) and atom in reduced:
            outputs[k] = new = Var(atom.type)
            copies.append((atom, new))
    if copies:
        segment = items[last]
        assert isinstance(segment, ProgramSegment), "the last program of the devices"
        block = segment.block
        inputs = tuple(dict.fromkeys((*block.inputs, *(old for old, _ in copies))))
        made = tuple(Equation("copy", (old,), (new,), primitive=jax.lax.copy_p) for old, new in copies)
        block = Block(inputs, (*block.equations, *made), (*block.outputs, *(new for _, new in copies)))
        items[last] = dataclasses.replace(segment, block=block)
    return items, tuple(outputs)


def awaited_fetches(items: Sequence[ProgramSegment | ExchangeSegment]) -> frozenset[Equation]:
    """Returns fetches whose rows are read only by programs that the same step waits for: their memory can be reused.

    A program reads its operands until it is done, and JAX may use NumPy's memory directly. A step waits for the program
    whose sums it delivers; an evaluation waits for none.
    """
    waits = {item.level for item in items if isinstance(item, ExchangeSegment) and item.op == "ap.deliver"}
    late = {
        v for item in items if isinstance(item, ProgramSegment) and item.level not in waits for v in item.block.inputs
    }
    fetches = [
        e for item in items if isinstance(item, ExchangeSegment) and item.op == "ap.fetch" for e in item.equations
    ]
    return frozenset(e for e in fetches if waits and not late.intersection(e.outputs))
