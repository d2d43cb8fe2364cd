"""`DevicesRunner`: calls a planned step on several devices.

A step with measured capacities (`backends.on_devices`) has a fallback for batches that exceed them. Both together take
twice as long to compile, and the fallback rarely runs. So `LateFallback` first calls the step alone, reads a flag that
says whether a capacity was exceeded, and calls the program with both if so. That program is compiled in the background
after some steps; later steps call it, and wait for no flag.

An evaluation brings only those deferred rows up to date that it reads (`ReadRows`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.analysis.row_ids import collect_ids
from autopar.analysis.rules import resized
from autopar.backends.background import Compilation, beside
from autopar.backends.deferred import NEVER
from autopar.backends.devices import Devices
from autopar.backends.emit import donation_order, emit
from autopar.backends.global_arrays import is_global, jit_on, local, place_array
from autopar.backends.indices import sorted_unique
from autopar.backends.layouts import placed
from autopar.backends.update_log import DeviceLogPrograms, UpdateLog
from autopar.compile import Compiled
from autopar.ir.deferred import update_logs
from autopar.ir.figures import NEAR
from autopar.ir.layout import RowLayout
from autopar.ir.program import ArrayType, Atom, Block, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.rowspace import Access, RowSpace
from autopar.jax_compat import ConcreteArray
from autopar.jax_types import Array, Leaf, Pytree, PyTreeDef, ValueType
from autopar.measure.alpha import id_program, is_exact
from autopar.run.buffers import with_own_buffers
from autopar.run.kept_placements import KeptPlacements, forget
from autopar.run.planned_step import Runner
from autopar.run.stacked import Moves, StackedLeaves, unstacked
from autopar.tables.kinds import copied, is_table
from autopar.tables.leaf import TableLeaf
from autopar.tables.sharded import DeferredTable, Table, common_log

#: Calls before the program with the fallback is compiled, as many steps run for a few batches only; and calls after
#: which several processes wait for it, as they must change programs together.
CALLS, WAITING_CALLS = 32, 64
#: Row numbers are cut into at most this many blocks; more are brought up to date by a program of their own size.
_BLOCKS = 8


def _stored(type_: ValueType, layout: tuple[RowLayout, int] | None) -> Leaf:
    if layout is None:
        return type_
    return replace(type_, shape=resized(type_.shape, layout[1], layout[0].stored))


def _whole_type(type_: ArrayType, axis: int | None, parts: int) -> ArrayType:
    """Returns the type of an array of whose `parts` shards along `axis` `type_` is one; `axis` None: it is whole."""
    return type_ if axis is None else type_.resized(axis, parts * type_.shape[axis])


def _layout(bound: ProgramPlan, family: int) -> RowLayout | None:
    family_plan = bound.family(family)
    return None if family_plan is None else family_plan.layout


class DevicesRunner(Runner):
    """Calls a planned step on several devices: places its arguments, and wraps results that are tables.

    Args:
      run: The planned step on flat arrays as they are stored.
      compiled: The plan and its programs.
      devices: The mesh.
      out_tree: The structure of the step's results.
      donate: Whether states are updated in place.
      first: The planned step without its fallback, to be called until `run` is compiled; None: it has no fallback.
      are_results_whole: Whether every process gets all of per-example results.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Pytree]],
        compiled: Compiled,
        devices: Devices,
        out_tree: PyTreeDef,
        donate: bool,
        first: Callable[..., Sequence[Leaf]] | None = None,
        *,
        are_results_whole: bool = False,
    ) -> None:
        self._out_tree = out_tree
        self._stack = None if compiled.stacked is None else StackedLeaves(compiled.stacked, devices, donate=donate)
        compiled = compiled.as_run
        bound, analysed = compiled.bound, compiled.analysed
        self._moves = Moves(analysed.name)
        self._log_programs = [
            DeviceLogPrograms(
                tables,
                [_layout(bound, e.params["family"]) for e in tables],
                [analysed.ids[e.params["family"]].count for e in tables],
                devices,
            )
            for tables in update_logs(compiled.program.block)
        ]
        parts = 1 if compiled.program.local is None else devices.count  # a device's own program has its part of a log
        log_types = [
            _whole_type(v.type, input_.entry_axis, parts)
            for input_, v in zip(compiled.program.inputs, compiled.program.block.inputs, strict=True)
            if input_.role == "log"
        ]
        log_shardings = [s for programs in self._log_programs for s in programs.shardings]
        self._devices = devices
        self._layouts = bound.layouts
        self._shardings = [devices.sharding(*bound.placement(k)) for k in range(len(bound.placements))]
        states = [k for k, input_ in enumerate(analysed.inputs) if input_.role == "state"]
        self._donated = frozenset(states if donate else ())
        copies = [devices.mesh.size // (1 if along is None else devices.count) for along in bound.placements]
        self._kept = KeptPlacements(analysed, copies)
        self._read_rows = None if states else ReadRows(analysed, self._kept)
        self._tables = {out: bound.layouts[k] for k, out in analysed.new_states.items() if k in bound.layouts}
        self._types = [_stored(v.type, self._layouts.get(k)) for k, v in enumerate(analysed.block.inputs)]
        self._types += log_types
        self._in_shardings = (*self._shardings, *log_shardings)
        self._homes = [None if k in self._layouts else sharding for k, sharding in enumerate(self._shardings)]
        ordinary = (k for k in range(len(analysed.inputs)) if k not in self._donated and k not in self._layouts)
        self._placed_together = frozenset(() if devices.processes.several else ordinary)
        self._donate = donate
        self._new_states = analysed.new_states
        self._count = len(analysed.outputs)  # a row count for each capacity may follow
        self._capacities = np.array([f.bounds.capacity for f in bound.families if f.bounds.tight])
        self._loads: collections.deque[Leaf] = collections.deque()
        self._across, self._are_results_whole = devices.processes.several, are_results_whole
        out_shardings = self._result_shardings(analysed, log_shardings, bool(bound.fallback))
        order = donation_order(compiled.program.new_states, len(out_shardings))
        self._order = sorted(range(len(order)), key=order.__getitem__)

        def jitted(run: Callable[..., Sequence[Pytree]], *further: int) -> Any:
            def run_in_order(*leaves: Leaf) -> tuple[Leaf, ...]:
                results = run(*leaves)
                return tuple(results[k] for k in (*order, *further))

            return jit_on(
                devices.mesh,
                run_in_order,
                in_shardings=self._in_shardings,
                out_shardings=(*(out_shardings[k] for k in order), *[devices.sharding(None)] * len(further)),
                donate_argnums=(*states, *range(len(analysed.inputs), len(self._types))) if donate else (),
                keep_unused=True,  # all are placed, and JAX pairs what is donated with what comes back
            )

        self._run = jitted(run)
        self._call = self._run
        if first is not None:
            kept = {k: order.index(out) for k, out in compiled.program.new_states.items()}
            first = jitted(first, len(order))
            self._call = LateFallback(first, self._run, kept, self._lowered, self._across)

    def _result_shardings(
        self, analysed: Program, log_shardings: Sequence[NamedSharding], loads: bool
    ) -> tuple[NamedSharding | None, ...]:
        """Returns the results' shardings; None: XLA chooses.

        New states have their own. Over several processes, results by example are sharded if possible, and the others
        replicated, so that each process can read them.
        """

        def of(atom: Atom, state: int | None) -> NamedSharding | None:
            if state is not None:
                return self._shardings[state]
            if not self._across or not isinstance(atom.type, ArrayType):
                return None
            axis = analysed.batch.get(atom) if isinstance(atom, Var) and not self._are_results_whole else None
            return self._devices.sharding(axis if axis is None or atom.shape[axis] % self._devices.count == 0 else None)

        pairs = zip(analysed.block.outputs, analysed.outputs, strict=True)
        shardings = [of(atom, out.state) for atom, out in pairs]
        more = [self._devices.sharding(None) if self._across else None] if loads else []
        return (*shardings, *log_shardings, *more)

    def lower(self) -> Any:
        """Lowers the step, with its fallback, at the plan's shapes. In one process later calls take this program."""
        if not self._across:  # other processes needn't have called this
            self.begin_whole()
        return self._lowered()

    def begin_whole(self) -> None:
        """Makes later calls run the program with the fallback. Call it on all processes, or on none."""
        self._call = self._run

    def prepare(self) -> None:
        """Compiles the program with the fallback in the background."""
        if isinstance(self._call, LateFallback):
            self._call.prepare()

    def _lowered(self) -> Any:
        pairs = zip(self._types, self._in_shardings, strict=True)
        return self._run.lower(
            *(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type, sharding=s) for t, s in pairs)
        )

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments (arrays or Tables); returns its results as a tree."""
        if self._stack is not None:
            leaves = self._stack.joined(leaves)
        elif self._read_rows is None:  # pending copies out of stacks come before the step takes its own rows
            self._moves.see(leaves)
            leaves = list(map(unstacked, leaves))
        if self._read_rows is not None:
            leaves = self._read_rows.current(leaves)
        leaves, earlier = self._logs(leaves) if self._log_programs else (leaves, [])
        placed = self._placed_leaves(leaves)
        pairs = zip(earlier, self._log_programs, strict=True)
        logs = [log or programs.begin([placed[k] for k in programs.leaves]) for log, programs in pairs]
        entries = [x for log in logs for x in log.entries]
        forget(leaves[k] for k in self._donated)
        returned = self._call(*placed, *entries)
        results = [returned[k] for k in self._order]
        if len(results) > self._count + len(entries):
            self._loads.append(results.pop())
        if logs:
            self._keep_logs(results, logs, len(entries))
        for out, (layout, axis) in self._tables.items():
            if not isinstance(results[out], DeferredTable):
                results[out] = Table(results[out], layout, axis)
        return self._out_tree.unflatten(results if self._stack is None else self._stack.split(results))

    def _placed_leaves(self, leaves: Sequence[Leaf]) -> list[jax.Array]:
        """Returns the arguments with the step's shardings, which most have already."""
        placed = list(leaves)
        elsewhere = [
            k
            for k, (leaf, home) in enumerate(zip(leaves, self._homes, strict=True))
            if type(leaf) is not ConcreteArray
            or ((sharding := leaf.sharding) is not home and sharding != home)
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

    def _separate(self, leaves: Sequence[Leaf], placed: list[Leaf], elsewhere: Sequence[int]) -> None:
        """Copies state leaves that share a buffer with another leaf. `elsewhere`: indices of leaves placed by this
        call."""
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

    def _logs(self, leaves: Sequence[Leaf]) -> tuple[list[Leaf], list[UpdateLog[DeviceLogPrograms] | None]]:
        """Returns the leaves as stored, and their update logs; None for a log that begins with this call."""
        leaves = list(leaves)
        logs = [common_log([leaves[k] for k in programs.leaves], programs) for programs in self._log_programs]
        known = {id(log) for log in logs if log is not None}
        members = {k for programs in self._log_programs for k in programs.leaves}
        for k, leaf in enumerate(leaves):  # the state's own rows as another argument: they are read as they are now
            if k not in members and isinstance(leaf, DeferredTable) and id(leaf.pending) in known:
                leaves[k] = leaf.materialize() if self._donate else leaf.current()
        for programs, log in zip(self._log_programs, logs, strict=True):
            if log is not None:
                log.make_room()
                for k, stored in zip(programs.leaves, log.leaves, strict=True):
                    leaves[k] = Table(stored, *self._layouts[k]) if k in self._layouts else stored
        return leaves, logs

    def _keep_logs(self, results: list[Leaf], logs: Sequence[UpdateLog[DeviceLogPrograms]], count: int) -> None:
        """Takes the update logs (`count` entries) off the end of the results, and makes deferred tables of their
        leaves."""
        rest, results[-count:] = results[-count:], []
        for programs, before in zip(self._log_programs, logs, strict=True):
            length = len(before.entries)
            entries, rest = rest[:length], rest[length:]
            outs = [self._new_states[k] for k in programs.leaves]
            log = before.after([results[out] for out in outs], entries)
            # Leaves that the step only reads are among them: they mustn't change before the update is replayed.
            for n, out in enumerate(outs):
                results[out] = DeferredTable(log, n)

    def loads(self) -> Sequence[int] | None:
        """Returns the number of rows that earlier calls needed of each capacity; None if none came near it.

        One process waits for no call. Several must get the same answer: they wait for all calls but the latest, which
        still runs.
        """
        most = None
        while len(self._loads) > 1 if self._across else self._loads and self._loads[0].is_ready():
            loads = np.asarray(self._loads.popleft())
            if np.any(loads > NEAR * self._capacities):
                most = loads if most is None else np.maximum(most, loads)
        return None if most is None else most.tolist()

    def _placed(self, k: int, leaf: Leaf) -> Leaf:
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

    def _moved(self, k: int, leaf: Leaf) -> jax.Array:
        """Brings an argument from elsewhere. The user's own array stays valid, whatever happens to the result."""
        layout, own = self._layouts.get(k), k in self._donated
        if is_table(leaf):
            leaf = leaf.materialize()
        elif own and layout is None and isinstance(leaf, jax.Array) and (not self._across or is_global(leaf)):
            leaf = copied(leaf)
        if layout is not None:
            return placed(leaf, *layout, self._devices)
        return place_array(leaf, self._shardings[k], own=own or isinstance(leaf, jax.Array))


class LateFallback:
    """Calls a step without its fallback until the program with both is compiled, or needed.

    Args:
      first: The step without its fallback. Its last output says whether a capacity was exceeded; states are then
        unchanged.
      whole: The step and its fallback, with the other outputs.
      states: Operand -> output with its new value.
      lower: Lowers `whole` at the shapes of its calls.
      across: Whether several processes call it.
    """

    def __init__(
        self, first: Any, whole: Any, states: Mapping[int, int], lower: Callable[[], Any], across: bool
    ) -> None:
        self._first, self._whole, self._states = first, whole, states
        self._lower, self._across = lower, across
        self._calls = 0
        self._compilation: Compilation[Any] | None = None
        self._is_whole = False

    def __call__(self, *operands: Leaf) -> Sequence[Pytree]:
        if not self._is_whole:
            self._calls += 1
            if self._calls > CALLS:
                self.prepare()
            self._is_whole = self._is_compiled()
        if self._is_whole:
            return self._whole(*operands)
        *results, exceeded = self._first(*operands)
        if not local(exceeded):
            return results
        if self._compilation is not None:
            self._compilation.finish()
        self._is_whole = True
        states = self._states
        return self._whole(*(results[states[k]] if k in states else x for k, x in enumerate(operands)))

    def _is_compiled(self) -> bool:
        """Says whether `whole` is compiled, on all processes."""
        if self._compilation is None or (self._across and self._calls <= WAITING_CALLS):
            return False
        if self._across:
            self._compilation.finish()
        return self._compilation.is_done()

    def prepare(self) -> None:
        """Compiles `whole` in the background."""
        if self._compilation is None and not self._is_whole:
            what = "a step for batches that exceed its capacities"
            self._compilation = beside(what, lambda: self._lower().compile())


@dataclass(frozen=True)
class _Ids:
    """Computes the rows that are looked up in a leaf."""

    run: Callable[..., Sequence[Array]]  #: Returns flat row indices; those out of range are no rows.
    reads: Sequence[int]  #: The inputs that `run` takes.


class ReadRows:
    """Brings those rows of deferred tables up to date that an evaluation reads."""

    def __init__(self, program: Program, kept: KeptPlacements) -> None:
        self._program, self._kept = program, kept
        self._ids, self._program_of = functools.cache(self._find_ids), functools.cache(self._ids_program)

    def current(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Brings the rows that a call reads up to date; returns its flat arguments.

        A table in which the call only looks up rows, by ids that depend on no table, becomes its stored rows. Other
        arguments are returned as they are.
        """
        by_log: dict[int, tuple[UpdateLog[DeviceLogPrograms], list[int]]] = {}
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, DeferredTable):
                by_log.setdefault(id(leaf.pending), (leaf.pending, []))[1].append(k)
        made = list(leaves)
        for log, indices in by_log.values():
            if log.is_up_to_date or log.is_deleted():
                continue
            found = {k: ids for k in indices if (ids := self._ids(k, leaves[k].axis)) is not None}
            reads = sorted({k for ids in found.values() for k in ids.reads})
            if len(found) < len(indices) or any(isinstance(leaves[k], TableLeaf) for k in reads):
                continue
            tables, everywhere = tuple((leaves[k].table, k, leaves[k].axis) for k in indices), log.programs.everywhere
            run = self._program_of(tables, log.programs.blocks, everywhere)
            for ids in run({k: self._placed(k, leaves[k], everywhere) for k in reads}):
                log.catch_up(ids)
            for k in indices:
                made[k] = leaves[k].lagging()
        return made

    def _placed(self, k: int, leaf: Leaf, everywhere: NamedSharding) -> Array:
        place = functools.partial(place_array, sharding=everywhere, own=True)
        return leaf if is_global(leaf) else self._kept.placed(k, leaf, (everywhere, None), place)

    def _ids_program(
        self, read: tuple[tuple[int, int, int], ...], sizes: tuple[int, ...], everywhere: NamedSharding
    ) -> Callable[[Mapping[int, Array]], list[dict[int, Array]]]:
        """Compiles the function from inputs to the row numbers of all tables of an update log: flat, sorted, distinct.

        `read`: (table, input that is a leaf of it, its row axis). `sizes`: for each table the number of rows that are
        brought up to date at a time. `everywhere`: the sharding of the results.
        """

        def run(inputs: Mapping[int, Array]) -> list[dict[int, Array]]:
            rows: dict[int, list[Array]] = {}
            for table, k, axis in read:
                ids = self._ids(k, axis)
                assert ids is not None, "only rows are read"
                rows.setdefault(table, []).extend(ids.run(*(inputs[n] for n in ids.reads)))
            flat = {table: jnp.concatenate(some) for table, some in rows.items() if some}
            return _cut({table: sorted_unique(ids, ids.size, NEVER) for table, ids in flat.items()}, sizes)

        return jit_on(cast(Mesh, everywhere.mesh), run, out_shardings=everywhere)

    def _find_ids(self, k: int, axis: int) -> _Ids | None:
        """Finds the rows that are looked up in a leaf; None if it is read in another way."""
        lookups = _lookups(self._program.block, k, axis)
        if not lookups:
            return None if lookups is None else _Ids(tuple, ())
        extent = self._program.block.inputs[k].shape[axis]
        space = RowSpace(k, extent, (k,), (axis,), (k,), tuple(lookups))
        block, used = id_program(self._program, collect_ids(self._program.block, space))
        if any(e.effects for e in block.walk()) or not is_exact(block):
            return None
        reads = [n for n, is_read in enumerate(used) if is_read]
        block = Block(tuple(block.inputs[n] for n in reads), block.equations, block.outputs)
        return _Ids(emit(block), reads)


def _cut(rows: Mapping[int, Array], sizes: Sequence[int]) -> list[dict[int, Array]]:
    """Cuts row numbers into blocks of these sizes, one for each table; leaves them whole if there would be many
    blocks."""
    count = max((-(-ids.size // sizes[table]) for table, ids in rows.items()), default=0)
    if count > _BLOCKS:
        return [dict(rows)]

    def block(table: int, k: int) -> Array:
        ids, size = rows.get(table, jnp.zeros(0, jnp.int32)), sizes[table]
        some = ids[k * size : (k + 1) * size]
        return jnp.pad(some, (0, size - some.size), constant_values=NEVER)

    return [{table: block(table, k) for table in range(len(sizes))} for k in range(count)]


def _lookups(block: Block, k: int, axis: int) -> list[Access] | None:
    """Returns the lookups of rows of an input, all outside of loops and branches; None if anything else reads it."""
    leaf, found = block.inputs[k], list[Access]()
    if leaf in block.outputs:
        return None
    for equation in block.equations:
        if leaf not in equation.inputs:
            continue
        numbers = equation.params["dimension_numbers"] if equation.op == "gather" else None
        is_lookup = numbers is not None and axis in numbers.start_index_map and axis in numbers.collapsed_slice_dims
        if not is_lookup or leaf in equation.inputs[1:]:
            return None
        found.append(Access(equation, (), axis))
    return found
