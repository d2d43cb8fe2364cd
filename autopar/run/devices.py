"""`DevicesRunner`: calls a planned step on several devices."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.analysis.rules import resized
from autopar.backends.across import is_global, place_array
from autopar.backends.devices import Devices
from autopar.backends.donation import donation_order
from autopar.backends.layouts import placed
from autopar.backends.watched import jit_on
from autopar.compile import Compiled
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.deferred import update_logs
from autopar.ir.layout import RowLayout
from autopar.ir.program import ArrayType, Atom, Program, Var
from autopar.ir.sizes import NEAR
from autopar.jax_compat import ConcreteArray
from autopar.run.buffers import with_own_buffers
from autopar.run.kept_placements import KeptPlacements, forget
from autopar.run.late_fallback import LateFallback
from autopar.run.read_rows import ReadRows
from autopar.tables.deferred import DeferredTable, UpdateLog, UpdateLogSpec, common_log
from autopar.tables.kinds import copied, is_table
from autopar.tables.sharded import Table


def _stored(type_: Any, layout: tuple[RowLayout, int] | None) -> Any:
    """The type of an input as it is stored."""
    if layout is None:
        return type_
    return dataclasses.replace(type_, shape=resized(type_.shape, layout[1], layout[0].stored))


def _whole_type(type_: ArrayType, axis: int | None, parts: int) -> ArrayType:
    """The type of an array of which this is one of some parts along an axis; None: all of it."""
    return type_ if axis is None else type_.resized(axis, parts * type_.shape[axis])


def _layout(bound: BoundPlan, family: int) -> RowLayout | None:
    """How a family's rows are spread over the devices."""
    family_plan = bound.family(family)
    return None if family_plan is None else family_plan.layout


class DevicesRunner:
    """Calls a planned step on several devices: places its arguments, and makes Tables of what is stored in a layout.

    Args:
      run: The planned step on flat arrays as they are stored.
      compiled: What says where they are.
      devices: The mesh.
      out_tree: The structure of its results.
      donate: Whether states are updated in place.
      first: The planned step without its fallback, for as long as that isn't compiled.
      are_results_whole: Whether results by example are brought to every process.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        compiled: Compiled,
        devices: Devices,
        out_tree: Any,
        donate: bool,
        first: Callable[..., Sequence[Any]] | None = None,
        *,
        are_results_whole: bool = False,
    ) -> None:
        self._out_tree = out_tree
        bound, analysed = compiled.bound, compiled.analysed
        self._log_specs = [
            UpdateLogSpec(
                tables,
                [_layout(bound, e.params["family"]) for e in tables],
                [analysed.ids[e.params["family"]].count for e in tables],
                devices,
            )
            for tables in update_logs(compiled.program.block)
        ]
        of_each = 1 if compiled.program.local is None else devices.count  # in a device's own program its part of a log
        logs = [
            _whole_type(v.type, input_.entry_axis, of_each)
            for input_, v in zip(compiled.program.inputs, compiled.program.block.inputs, strict=True)
            if input_.role == "log"
        ]
        entries = [s for j in self._log_specs for s in j.shardings]
        self._devices = devices
        self._layouts = bound.layouts
        self._shardings = [devices.sharding(*bound.place(k)) for k in range(len(bound.placements))]
        states = [k for k, input_ in enumerate(analysed.inputs) if input_.role == "state"]
        self._donated = frozenset(states if donate else ())
        copies = [devices.mesh.size // (1 if along is None else devices.count) for along in bound.placements]
        self._kept = KeptPlacements(analysed, copies)
        self._read_rows = None if states else ReadRows(analysed, self._kept)
        self._tables = {out: bound.layouts[k] for k, out in analysed.new_states.items() if k in bound.layouts}
        self._types = [_stored(v.type, self._layouts.get(k)) for k, v in enumerate(analysed.block.inputs)]
        self._types += logs
        self._places = (*self._shardings, *entries)
        self._homes = [None if k in self._layouts else sharding for k, sharding in enumerate(self._shardings)]
        ordinary = (k for k in range(len(analysed.inputs)) if k not in self._donated and k not in self._layouts)
        self._placed_together = frozenset(() if devices.processes.several else ordinary)
        self._donate = donate
        self._new_states = analysed.new_states
        self._count = len(analysed.outputs)  # and perhaps what the batch needs of capacities
        self._capacities = np.array([f.bounds.capacity for f in bound.families if f.bounds.tight])
        self._loads: collections.deque[Any] = collections.deque()
        self._across, self._are_results_whole = devices.processes.several, are_results_whole
        places = self._returned(analysed, entries, bool(bound.fallback))
        order = donation_order(compiled.program.new_states, len(places))
        self._order = sorted(range(len(order)), key=order.__getitem__)

        def jitted(run: Callable[..., Sequence[Any]], *further: int) -> Any:
            def run_in_order(*leaves: Any) -> tuple[Any, ...]:
                results = run(*leaves)
                return tuple(results[k] for k in (*order, *further))

            return jit_on(
                devices.mesh,
                run_in_order,
                in_shardings=self._places,
                out_shardings=(*(places[k] for k in order), *[devices.sharding(None)] * len(further)),
                donate_argnums=(*states, *range(len(analysed.inputs), len(self._types))) if donate else (),
                keep_unused=True,  # all are placed, and JAX pairs what is donated with what comes back
            )

        self._run = jitted(run)
        self._call = self._run
        if first is not None:
            kept = {k: order.index(out) for k, out in compiled.program.new_states.items()}
            alone = jitted(first, len(order))
            self._call = LateFallback(alone, self._run, kept, self._lowered, self._across)

    def _returned(
        self, analysed: Program, entries: Sequence[NamedSharding], loads: bool
    ) -> tuple[NamedSharding | None, ...]:
        """Where results are: new states in their place. Other ones XLA puts where it likes; across processes those of
        the batch are spread, if they may be, and the rest is on every device, so that every process can read it."""

        def of(atom: Atom, state: int | None) -> NamedSharding | None:
            if state is not None:
                return self._shardings[state]
            if not self._across or not isinstance(atom.type, ArrayType):
                return None
            axis = analysed.batch.get(atom) if isinstance(atom, Var) and not self._are_results_whole else None
            return self._devices.sharding(axis if axis is None or atom.shape[axis] % self._devices.count == 0 else None)

        pairs = zip(analysed.block.outputs, analysed.outputs, strict=True)
        shardings = [of(atom, out.state) for atom, out in pairs]
        return (*shardings, *entries, *([self._devices.sharding(None) if self._across else None] if loads else []))

    def lower(self) -> Any:
        """`jax.jit(...).lower` at the plan's shapes, as calls have them. Of a single process they find compiled what is
        compiled so; several first take a part of it (`LateFallback`)."""
        if not self._across:  # where other processes needn't have been asked for it
            self.begin_whole()
        return self._lowered()

    def begin_whole(self) -> None:
        """Have the next calls run the step together with its fallback. On all processes, if on any."""
        self._call = self._run

    def prepare(self) -> None:
        """Compile, beside the steps, what a batch needs that exceeds a capacity."""
        if isinstance(self._call, LateFallback):
            self._call.prepare()

    def _lowered(self) -> Any:
        pairs = zip(self._types, self._places, strict=True)
        return self._run.lower(
            *(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type, sharding=s) for t, s in pairs)
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The step's results, of flat arguments (arrays or Tables), placed where need be."""
        if self._read_rows is not None:
            leaves = self._read_rows.current(leaves)
        leaves, going, entries = self._logs(leaves) if self._log_specs else (leaves, [], [])
        placed = self._in_place(leaves)
        for spec, known in zip(self._log_specs, entries, strict=True):
            if not known:
                known += spec.begin([placed[k] for k in spec.leaves])
        forget(leaves[k] for k in self._donated)
        returned = self._call(*placed, *(x for known in entries for x in known))
        results = [returned[k] for k in self._order]
        lengths = [len(known) for known in entries]
        if len(results) > self._count + sum(lengths):
            self._loads.append(results.pop())
        if self._log_specs:
            self._keep_logs(results, lengths, going)
        for out, (layout, axis) in self._tables.items():
            if not isinstance(results[out], DeferredTable):
                results[out] = Table(results[out], layout, axis)
        return self._out_tree.unflatten(results)

    def _in_place(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Returns the arguments where the step takes them; most are there already."""
        placed = list(leaves)
        elsewhere = [
            k
            for k, (leaf, home) in enumerate(zip(leaves, self._homes, strict=True))
            if type(leaf) is not ConcreteArray
            or ((place := leaf.sharding) is not home and place != home)
            or leaf.is_deleted()
        ]
        batch = [k for k in elsewhere if k in self._placed_together and isinstance(leaves[k], np.ndarray)]
        for k in elsewhere:
            self._kept.look(k, leaves[k])
        if batch:
            arrays = jax.device_put([leaves[k] for k in batch], [self._shardings[k] for k in batch])
            for k, array in zip(batch, arrays, strict=True):
                placed[k] = array
        for k in elsewhere:
            if k not in batch:
                placed[k] = self._placed(k, leaves[k])
        if any(placed[k].is_deleted() for k in elsewhere):  # on several devices the runtime would crash
            raise RuntimeError("an argument was donated to an earlier call")
        self._separate(leaves, placed, elsewhere)
        return placed

    def _separate(self, leaves: Sequence[Any], placed: list[Any], elsewhere: Sequence[int]) -> None:
        """Copy state leaves that are another leaf's buffer, too: each is to be updated in place by itself. `elsewhere`:
        those that were placed."""
        placed_now = self._donated.intersection(elsewhere)
        if any(placed[k] is not leaves[k] and isinstance(leaves[k], jax.Array) for k in placed_now):  # the user's
            own = with_own_buffers(leaves, self._donated)
            for k in self._donated:
                if own[k] is not leaves[k]:
                    placed[k] = self._placed(k, own[k])
        if len(set(map(id, placed))) == len(placed):
            return
        held = {id(leaf) for k, leaf in enumerate(placed) if k not in self._donated}
        for k in sorted(self._donated):
            if id(placed[k]) in held:
                placed[k] = copied(placed[k])
            held.add(id(placed[k]))

    def _logs(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], list[UpdateLog | None], list[list[Any]]]:
        """The leaves, those of update logs that go on as they are stored; these logs, None where one begins; and their
        entries, or none."""
        leaves, entries = list(leaves), []
        logs = [common_log([leaves[k] for k in j.leaves], j) for j in self._log_specs]
        going = {id(log) for log in logs if log is not None}
        members = {k for j in self._log_specs for k in j.leaves}
        for k, leaf in enumerate(leaves):  # the state's own rows as another argument: they are read as they are now
            if k not in members and isinstance(leaf, DeferredTable) and id(leaf.log) in going:
                leaves[k] = leaf.materialize() if self._donate else leaf.current()
        for spec, log in zip(self._log_specs, logs, strict=True):
            if log is not None:
                log.make_room()
            entries.append([] if log is None else list(log.entries))
            pairs = zip(spec.leaves, log.leaves if log is not None else (), strict=False)
            for k, stored in pairs:
                leaves[k] = Table(stored, *self._layouts[k]) if k in self._layouts else stored
        return leaves, logs, entries

    def _keep_logs(self, results: list[Any], lengths: Sequence[int], going: Sequence[UpdateLog | None]) -> None:
        """Take the update logs off the end of the results, and make tables of their leaves."""
        start = len(results) - sum(lengths)
        rest, results[start:] = results[start:], []
        for spec, length, before in zip(self._log_specs, lengths, going, strict=True):
            entries, rest = rest[:length], rest[length:]
            outs = [self._new_states[k] for k in spec.leaves]
            log = UpdateLog.after(before, spec, [results[out] for out in outs], entries)
            # Those that are only read as well: nobody is to change them before the update was replayed.
            for n, out in enumerate(outs):
                results[out] = DeferredTable(log, n, *spec.stored_as(n))

    def loads(self) -> Sequence[int] | None:
        """Returns what earlier calls are known to have needed of each capacity, in rows; None if none came near.

        In one process it waits for nothing. Processes must all know it after the same call, so there it is the call
        before the latest one, which is waited for while the latest one runs.
        """
        most = None
        while len(self._loads) > 1 if self._across else self._loads and self._loads[0].is_ready():
            loads = np.asarray(self._loads.popleft())
            if np.any(loads > NEAR * self._capacities):
                most = loads if most is None else np.maximum(most, loads)
        return None if most is None else most.tolist()

    def _placed(self, k: int, leaf: Any) -> Any:
        own, sharding, layout = k in self._donated, self._shardings[k], self._layouts.get(k)
        if isinstance(leaf, DeferredTable):  # what is only read needs no copy
            leaf = leaf.materialize() if own else leaf.current()
        if isinstance(leaf, Table) and layout is not None and leaf.layout == layout[0]:
            if leaf.stored.sharding == sharding:
                return leaf.stored
        elif layout is None and isinstance(leaf, jax.Array):
            if leaf.sharding == sharding:
                return leaf
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):  # the same buffers, to be donated if it is state
                return jax.device_put(leaf, sharding)
        if not own:
            return self._kept.placed(k, leaf, (sharding, layout), functools.partial(self._moved, k))
        return self._moved(k, leaf)

    def _moved(self, k: int, leaf: Any) -> jax.Array:
        """Brings an argument from elsewhere; it stays the user's own, whatever is done to what is returned."""
        layout, own = self._layouts.get(k), k in self._donated
        if is_table(leaf):
            leaf = leaf.materialize()
        elif own and layout is None and isinstance(leaf, jax.Array) and (not self._across or is_global(leaf)):
            leaf = copied(leaf)
        if layout is not None:
            return placed(leaf, *layout, self._devices)
        return place_array(leaf, self._shardings[k], own=own or isinstance(leaf, jax.Array))
