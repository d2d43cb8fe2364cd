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


class DevicesRunner(Runner):
    """Calls a planned step on several devices: places its arguments, and wraps results that are tables.

    `run`: the planned step on flat arrays as they are stored. `first`: the same without its fallback, to be called
    until `run` is compiled; None: it has no fallback. `are_results_whole`: whether every process gets all of
    per-example results.
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
        ran = compiled.as_run
        bound, analysed = ran.bound, ran.analysed
        self._out_tree = out_tree
        self._stack = None if compiled.stacked is None else StackedLeaves(compiled.stacked, devices, donate=donate)
        self._moves = Moves(analysed.name)
        self._arguments = arguments = _Arguments(analysed, bound, devices, donate=donate)
        self._logs = logs = _Logs(ran, devices, arguments)
        self._read_rows = None if arguments.states else ReadRows(analysed, arguments.kept)
        self._tables = {out: bound.layouts[k] for k, out in analysed.new_states.items() if k in bound.layouts}
        self._count = len(analysed.outputs)  # a row count for each capacity may follow
        self._capacities = np.array([f.bounds.capacity for f in bound.families if f.bounds.tight])
        self._loads: collections.deque[Leaf] = collections.deque()
        self._across, everywhere = devices.processes.several, devices.sharding(None)
        self._types, self._in_shardings = [*arguments.types, *logs.types], (*arguments.shardings, *logs.shardings)
        own = _result_shardings(analysed, arguments.shardings, devices, are_results_whole=are_results_whole)
        loads = [everywhere if self._across else None] if bound.fallback else []
        out_shardings = (*own, *logs.shardings, *loads)
        order = donation_order(ran.program.new_states, len(out_shardings))
        self._order = sorted(range(len(order)), key=order.__getitem__)
        donated = (*arguments.states, *range(len(arguments.types), len(self._types))) if donate else ()

        def jitted(run: Callable[..., Sequence[Pytree]], *further: int) -> Any:
            def run_in_order(*leaves: Leaf) -> tuple[Leaf, ...]:
                results = run(*leaves)
                return tuple(results[k] for k in (*order, *further))

            return jit_on(
                devices.mesh,
                run_in_order,
                in_shardings=self._in_shardings,
                out_shardings=(*(out_shardings[k] for k in order), *[everywhere] * len(further)),
                donate_argnums=donated,
                keep_unused=True,  # all are placed, and JAX pairs what is donated with what comes back
            )

        self._run = self._call = jitted(run)
        if first is not None:
            kept = {k: order.index(out) for k, out in ran.program.new_states.items()}
            self._call = LateFallback(jitted(first, len(order)), self._run, kept, self._lowered, self._across)

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
        leaves, earlier = self._logs.taken(leaves) if self._logs.programs else (leaves, [])
        placed = self._arguments.place(leaves)
        pairs = zip(earlier, self._logs.programs, strict=True)
        logs = [log or programs.begin([placed[k] for k in programs.leaves]) for log, programs in pairs]
        entries = [x for log in logs for x in log.entries]
        forget(leaves[k] for k in self._arguments.donated)
        returned = self._call(*placed, *entries)
        results = [returned[k] for k in self._order]
        if len(results) > self._count + len(entries):
            self._loads.append(results.pop())
        if logs:
            self._logs.keep(results, logs, len(entries))
        for out, (layout, axis) in self._tables.items():
            if not isinstance(results[out], DeferredTable):
                results[out] = Table(results[out], layout, axis)
        return self._out_tree.unflatten(results if self._stack is None else self._stack.split(results))

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


class _Arguments:
    """Places the arguments of a step on several devices.

    Attributes:
      states, donated: Inputs that are state, and those of them whose arrays the step takes over.
      types: The inputs' types as they are stored.
      shardings: Their shardings.
      kept: Placements of arguments that stay the same from call to call.
    """

    def __init__(self, program: Program, bound: ProgramPlan, devices: Devices, *, donate: bool) -> None:
        self._devices, self._layouts = devices, bound.layouts
        self.states = [k for k, input_ in enumerate(program.inputs) if input_.role == "state"]
        self.donated = frozenset(self.states if donate else ())
        self.types: list[ValueType] = [v.type for v in program.block.inputs]
        for k, (layout, axis) in bound.layouts.items():
            self.types[k] = replace(self.types[k], shape=resized(self.types[k].shape, axis, layout.stored))
        self.shardings = [devices.sharding(*bound.placement(k)) for k in range(len(bound.placements))]
        copies = [devices.mesh.size // (1 if along is None else devices.count) for along in bound.placements]
        self.kept = KeptPlacements(program, copies)
        self._homes = [None if k in self._layouts else sharding for k, sharding in enumerate(self.shardings)]
        self._across = devices.processes.several
        ordinary = (k for k in range(len(program.inputs)) if k not in self.donated and k not in self._layouts)
        self._placed_together = frozenset(() if self._across else ordinary)

    def place(self, leaves: Sequence[Leaf]) -> list[jax.Array]:
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
            self.kept.look(k, leaves[k])
        if batch:
            arrays = jax.device_put([leaves[k] for k in batch], [self.shardings[k] for k in batch])
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
        placed_now = self.donated.intersection(elsewhere)
        if any(placed[k] is not leaves[k] and isinstance(leaves[k], jax.Array) for k in placed_now):  # the user's
            own = with_own_buffers(leaves, self.donated)
            for k in self.donated:
                if own[k] is not leaves[k]:
                    placed[k] = self._placed(k, own[k])
        if len(set(map(id, placed))) == len(placed):
            return
        held = {id(leaf) for k, leaf in enumerate(placed) if k not in self.donated}
        for k in sorted(self.donated):
            if id(placed[k]) in held:
                placed[k] = copied(placed[k])
            held.add(id(placed[k]))

    def _placed(self, k: int, leaf: Leaf) -> Leaf:
        own, sharding, layout = k in self.donated, self.shardings[k], self._layouts.get(k)
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
            return self.kept.placed(k, leaf, (sharding, layout), functools.partial(self._moved, k))
        return self._moved(k, leaf)

    def _moved(self, k: int, leaf: Leaf) -> jax.Array:
        """Brings an argument from elsewhere. The user's own array stays valid, whatever happens to the result."""
        layout, own = self._layouts.get(k), k in self.donated
        if is_table(leaf):
            leaf = leaf.materialize()
        elif own and layout is None and isinstance(leaf, jax.Array) and (not self._across or is_global(leaf)):
            leaf = copied(leaf)
        if layout is not None:
            return placed(leaf, *layout, self._devices)
        return place_array(leaf, self.shardings[k], own=own or isinstance(leaf, jax.Array))


class _Logs:
    """The update logs of a step's deferred tables.

    Attributes:
      programs: The programs of each log.
      types, shardings: Those of all logs' entries, which follow the step's own arguments and results.
    """

    def __init__(self, compiled: Compiled, devices: Devices, arguments: _Arguments) -> None:
        ids, new_states = compiled.analysed.ids, compiled.analysed.new_states
        layouts = {family.family: family.layout for family in compiled.bound.families}
        self._arguments, self._layouts, self._new_states = arguments, compiled.bound.layouts, new_states
        self.programs: list[DeviceLogPrograms] = []
        for flushes in update_logs(compiled.program.block):
            families = [e.params["family"] for e in flushes]
            counts = [ids[family].count for family in families]
            self.programs.append(DeviceLogPrograms(flushes, list(map(layouts.get, families)), counts, devices))
        self.shardings = [s for programs in self.programs for s in programs.shardings]
        parts = 1 if compiled.program.local is None else devices.count  # a device's own program has its part of a log
        self.types = [
            v.type if (axis := input_.entry_axis) is None else v.type.resized(axis, parts * v.type.shape[axis])
            for v, input_ in compiled.program.named_inputs
            if input_.role == "log"
        ]

    def taken(self, leaves: Sequence[Leaf]) -> tuple[list[Leaf], list[UpdateLog[DeviceLogPrograms] | None]]:
        """Returns the leaves as stored, and their update logs; None for a log that begins with this call."""
        leaves = list(leaves)
        logs = [common_log([leaves[k] for k in programs.leaves], programs) for programs in self.programs]
        known = {id(log) for log in logs if log is not None}
        members = {k for programs in self.programs for k in programs.leaves}
        for k, leaf in enumerate(leaves):  # the state's own rows as another argument: they are read as they are now
            if k not in members and isinstance(leaf, DeferredTable) and id(leaf.pending) in known:
                leaves[k] = leaf.materialize() if self._arguments.donated else leaf.current()
        for programs, log in zip(self.programs, logs, strict=True):
            if log is not None:
                log.make_room()
                log.catch_up_some()
                for k, stored in zip(programs.leaves, log.leaves, strict=True):
                    leaves[k] = Table(stored, *self._layouts[k]) if k in self._layouts else stored
        return leaves, logs

    def keep(self, results: list[Leaf], logs: Sequence[UpdateLog[DeviceLogPrograms]], count: int) -> None:
        """Takes the update logs (`count` entries) off the end of the results, and makes deferred tables of their
        leaves."""
        rest, results[-count:] = results[-count:], []
        for programs, before in zip(self.programs, logs, strict=True):
            length = len(before.entries)
            entries, rest = rest[:length], rest[length:]
            outs = [self._new_states[k] for k in programs.leaves]
            log = before.after([results[out] for out in outs], entries)
            # Leaves that the step only reads are among them: they mustn't change before the update is replayed.
            for n, out in enumerate(outs):
                results[out] = DeferredTable(log, n)


def _result_shardings(
    program: Program, shardings: Sequence[NamedSharding], devices: Devices, *, are_results_whole: bool
) -> list[NamedSharding | None]:
    """Returns the shardings of a step's results; None: XLA chooses.

    New states have their own (`shardings`, by input). Over several processes, results by example are sharded if
    possible, and the others replicated, so that each process can read them.
    """

    def of(atom: Atom, state: int | None) -> NamedSharding | None:
        if state is not None:
            return shardings[state]
        if not devices.processes.several or not isinstance(atom.type, ArrayType):
            return None
        axis = program.batch.get(atom) if isinstance(atom, Var) and not are_results_whole else None
        return devices.sharding(axis if axis is None or atom.shape[axis] % devices.count == 0 else None)

    return [of(atom, out.state) for atom, out in zip(program.block.outputs, program.outputs, strict=True)]


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
