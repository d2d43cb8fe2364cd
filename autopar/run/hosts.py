"""`HostRunner`: runs a planned step whose tables are in host memory."""

from __future__ import annotations

import functools
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends import global_arrays
from autopar.backends.background import Compilation, beside
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.running_step import Ahead, OtherShapes, RunningStep
from autopar.backends.host.segmented import SegmentedProgram
from autopar.backends.host.shape_buckets import Rows, ShapeBucket, ShapeBuckets
from autopar.backends.host.storage import HostRows, stacked
from autopar.backends.host.update_log import HostLogPrograms, common_host_log
from autopar.backends.update_log import AnyLog
from autopar.compile import Compiled, follow
from autopar.errors import ArgumentsError, StrategyError
from autopar.ir.deferred import flushes
from autopar.ir.local import OncePerRow, Spread
from autopar.ir.program import ArrayType, Block, Program, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.stacked import StackedTable
from autopar.ir.strategy import is_on
from autopar.jax_types import Leaf, Pytree, PyTreeDef, Sharding
from autopar.launch.notices import compiling
from autopar.launch.progress import PROGRESS, mark
from autopar.measure.cluster import reductions_here
from autopar.mpi.exchange import Requested
from autopar.mpi.machines import exchange, require_memory
from autopar.run.buffers import with_own_buffers
from autopar.run.kept_placements import KeptPlacements
from autopar.run.planned_step import Runner
from autopar.tables.host import HostTable
from autopar.tables.kinds import is_table
from autopar.ways.way import Way

#: Steps in a row that write something unexpected to update logs, after which rows are brought up to date when needed.
_SURPRISES = 3
#: Steps that aren't timed, those that are, and the share of them that exchanges of ids and rows must take for that CPUs
#: fetch ahead: what runs beside a step takes cores from it.
_UNTIMED, TIMED, LEAST_SHARE = 8, 32, 1 / 6
#: Calls before a program is compiled beside the steps, as many states are trained for a few only.
_FEW_CALLS = 8


@dataclass
class _LastStep:
    """Keeps what the next step takes over from the last one."""

    segmented: SegmentedProgram | None = None  #: Its program, with which the next step begins.
    needed: Rows = field(default_factory=dict)  #: Row counts that it needed.
    #: Routes of dense leaves. Every step requests all of their rows, so the first step's routes serve all steps.
    routes: Mapping[int, tuple[Requested, np.ndarray]] = field(default_factory=dict)
    #: The next step, as far as it ran beside it, and the leaves of its batch.
    ahead: tuple[Ahead, Mapping[int, weakref.ref[Leaf]]] | None = None
    surprises: int = 0  #: How often in a row a step has written something else to its update logs than was expected.
    #: Dense leaves of the state that it returned.
    returned: Mapping[int, weakref.ref[Leaf]] = field(default_factory=dict)


class HostRunner(Runner):
    """Places a step's arguments, and runs its programs, which it compiles for each shape bucket that batches need."""

    several_programs = "with tables on hosts"

    def __init__(
        self, compiled: Compiled, in_buckets: Callable[[int | None], Way], out_tree: PyTreeDef, donate: bool
    ) -> None:
        self._out_tree, self._donate = out_tree, donate
        self._local, self._updated = known(compiled.program.local), compiled.analysed.new_states
        #: The caller's tables on hosts: layout, row axis, path.
        paths = [input_.path for input_ in compiled.analysed.inputs]
        self._hosted = {k: (*at, paths[k]) for k, at in compiled.bound.hosted(compiled.analysed).items()}
        stack, run = compiled.stacked, compiled.as_run
        self._bound, self._program = bound, program = run.bound, run.analysed
        _check_leaves_on_devices(program, bound)
        #: For each input and output of the program the caller's index; a stack of tables has several.
        self._callers_inputs: Sequence[int | StackedTable] = range(len(program.inputs))
        self._callers_outputs: Sequence[Sequence[int]] = [(k,) for k in range(len(program.outputs))]
        if stack is not None:
            self._callers_inputs, self._callers_outputs = stack.inputs, stack.outputs
        self._begin_ranks(compiled, in_buckets)
        self._arguments = arguments = _Arguments(program, bound, self.ranks)
        self._tables = bound.hosted(program)
        self._dense = frozenset(arguments.states - set(self._tables))  #: Dense leaves of the state.
        self._new = {out: k for k, out in program.new_states.items()}
        #: Outputs that are unchanged inputs: a table before its update, or examples -> the input.
        self._unchanged = {
            out: k
            for out, atom in enumerate(program.block.outputs)
            for k, input_ in enumerate(program.block.inputs)
            if atom is input_ and out not in self._new
            if k in self._tables or (k not in arguments.states and bound.placements[k] is not None)
        }
        self._buckets = _shape_buckets(program, bound)
        self._pulled = {f.family for f in bound.families if f.on_hosts and f.table.pulled}
        self._pulled_alone = frozenset(k for k in self._tables if _is_pulled_alone(compiled.program.block, k))
        self._log_programs = [HostLogPrograms(e, self.ranks.host) for e in flushes(compiled.program.block)]
        self._programs: dict[ShapeBucket, SegmentedProgram] = {}
        #: Programs that are compiled beside the steps, until one needs them.
        self._coming: dict[ShapeBucket, Compilation[SegmentedProgram]] = {}
        self._last, self._calls = _LastStep(), 0

    def _begin_ranks(self, compiled: Compiled, in_buckets: Callable[[int | None], Way]) -> None:
        """Begins this rank's exchanges, in rings and buckets as they were measured. Collective."""
        exchange_ = exchange(by_leaders=is_on(compiled.plan.optimize, "local"))
        is_by_mpi, bucket_bytes = compiled.plan.reduction_backend == "mpi", None
        if exchange_.size > 1 and is_by_mpi:
            exchange_.rings_from, bucket_bytes = reductions_here()
        self.ranks = Ranks(exchange_, self._program.name, joint=not is_by_mpi, devices=self._bound.rank_devices)
        #: What no other step exchanges messages for, the same on all ranks.
        text = "".join(f"{e.op}{e.outputs}" for e in self._program.block.walk())
        self._purpose = f"{self._program.name} {zlib.crc32(text.encode())}"
        self._way = in_buckets(bucket_bytes)
        pays = Ranks.hides_exchanges(exchange_) if is_on(compiled.plan.optimize, "prefetch") else False
        self._prefetches = bool(pays)
        #: Steps until it is known whether it pays to fetch rows ahead; None: it is.
        self._untimed = TIMED + _UNTIMED if pays is None and exchange_.knows_lists and is_by_mpi else None
        self._seconds, self._timed_from = 0.0, (0.0, 0.0)  #: Of calls; and then of exchanges.
        self._share: float | None = None  #: Of the timed steps that exchanges of ids and rows took.
        #: Steps so far of which nothing, ids alone, and rows were there from beside the step before.
        self._steps_ahead = [0, 0, 0]

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments (arrays, Tables, HostTables); returns its results as a tree."""
        start = time.perf_counter()
        with self.ranks.exchange.purpose(self._purpose):
            results = self._run(leaves)
        self._seconds += time.perf_counter() - start
        return results

    def _run(self, leaves: Sequence[Leaf]) -> Pytree:
        self.ranks.step = PROGRESS.last.step
        self._require_memory(leaves)
        shards = self._storages(leaves)
        tables = self._stacked(shards)
        own = self._separated([leaves[k] if isinstance(k, int) else None for k in self._callers_inputs])
        logs, lagging = self._logs(tables)
        inputs = [tables[k] if k in tables else self._arguments.place(k, leaf) for k, leaf in enumerate(own)]
        inputs += [x for log in logs for x in log.entries]
        self._compile_beside(inputs)
        before = {out: _read(tables[k] if k in tables else own[k]) for out, k in self._unchanged.items()}
        needs = {f: self._last.needed[f] for f in self._last.routes}
        step = RunningStep({}, dict(self._last.routes), needs, lagging=lagging, is_first=not self._calls)
        step.catch_up_some = functools.partial(_catch_up_some, logs)
        self._calls += 1  # on all ranks, even if the step fails
        self._time_exchanges()
        known = self.upcoming if self._prefetches else None
        step.looks_ahead = known is not None
        upcoming = {} if known is None else known.after(leaves)
        self._use_ahead(step, leaves, inputs)
        step.expects = self._last.surprises < _SURPRISES
        try:
            results = self._write_logs(self._run_step(inputs, step, upcoming), logs)
            returned = [before[out] if out in before else self._result(out, x) for out, x in enumerate(results)]
            if self._way.options.are_results_whole(self._program):
                returned = [self._on_all(x) for x in returned]
        except BaseException:
            if step.has_written:  # else the tables are as they were
                self._new_handles(leaves, shards)
            raise
        new = self._new_handles(leaves, shards)
        self._last.returned = {
            k: weakref.ref(returned[out])
            for out, k in self._new.items()
            if k not in self._tables and isinstance(returned[out], jax.Array)
        }
        outputs = {k: x for indices, x in zip(self._callers_outputs, returned, strict=True) for k in indices}
        outputs |= {self._updated[k]: table for k, table in new.items()}
        return self._out_tree.unflatten([outputs[k] for k in range(len(outputs))])

    def _run_step(self, inputs: Sequence[Leaf], step: RunningStep, upcoming: Mapping[int, Leaf]) -> Sequence[Leaf]:
        """Runs the step by the last step's program, or by another one if its rows don't fit there.

        `upcoming`: the known arguments of the next call, by index.
        """
        segmented = self._last.segmented or self._compiled_for(self._buckets.least)
        while True:
            is_known = self._last.segmented in (None, segmented)  # the caller announces the first compilation
            following, batch = self._begin_next(segmented, upcoming, expects=step.expects)
            step.following = following
            try:
                with nullcontext() if is_known else compiling(self._program.name):
                    results = segmented.run(inputs, step)
                break
            except OtherShapes as other:
                segmented = self._program_for(other.needs)
            finally:
                self._last.ahead = (following, batch) if following is not None and following.is_there else None
        self._last.segmented = segmented
        self._last.needed = step.needs
        self._last.routes = {f: step.routes[f] for f in self._pulled if f in step.routes}
        return results

    # --- the part of a step that runs beside the one before it ---

    def _time_exchanges(self) -> None:
        """Counts a step; after some, agrees with all ranks on whether ids and rows took enough of them to be exchanged
        ahead. Collective then."""
        if self._untimed is None:
            return
        self._untimed -= 1
        if self._untimed == TIMED:
            self._timed_from = self._seconds, self.ranks.exchanged_s
        elif not self._untimed:
            start, before = self._timed_from
            self._share = (self.ranks.exchanged_s - before) / (self._seconds - start)
            self._prefetches, self._untimed = self.ranks.least(int(self._share >= LEAST_SHARE)) > 0, None

    @property
    def outcome(self) -> str:
        """Says what was done so far of steps beside the ones before them; "" where nothing ever is."""
        nothing, ids, rows = self._steps_ahead
        if self._untimed is not None:
            return f"exchanges are timed for {self._untimed} more steps"
        if not self._prefetches:
            took = f"exchanges of ids and rows took {self._share or 0:.0%} of the steps that were timed"
            return "" if self._share is None else f"nothing is fetched ahead, {took}"
        if self.upcoming is None and not ids + rows:
            return "nothing is fetched ahead, as no batch is announced by shard(step=)"
        return (
            f"of {nothing + ids + rows} steps {rows} had rows there from beside the step before, {ids} found owners "
            f"asked but fetched anew, and {nothing} had nothing"
        )

    def _begin_next(
        self, segmented: SegmentedProgram, upcoming: Mapping[int, Leaf], *, expects: bool
    ) -> tuple[Ahead | None, Mapping[int, weakref.ref[Leaf]]]:
        """Begins the next step if its batch is known; returns it, and the leaves of that batch."""
        numbers = segmented.ahead_inputs(expects=expects)
        known = {k: at for k in numbers if isinstance(at := self._callers_inputs[k], int) and at in upcoming}
        if not numbers or len(known) < len(numbers):
            return None, {}
        ahead = segmented.begin([self._arguments.place(k, upcoming[at]) for k, at in known.items()])
        return ahead, {at: weakref.ref(upcoming[at]) for at in known.values()}

    def _use_ahead(self, step: RunningStep, leaves: Sequence[Leaf], inputs: Sequence[Leaf]) -> None:
        """Takes over what ran of this step beside the last one, as far as all ranks can use it.

        Nothing if a rank gets another batch; routes alone if tables were written in between, rows don't fit, or the
        last step wrote something else to its update logs than was expected.
        """
        if self._last.ahead is None:
            self._steps_ahead[0] += 1
            return
        (ahead, batch), self._last.ahead = self._last.ahead, None
        usable = 0
        if all(leaf() is leaves[k] for k, leaf in batch.items()):
            is_same = ahead.segmented is self._last.segmented and ahead.fits and ahead.has_rows
            is_same = is_same and all(ahead.versions.get(inputs[k]) == inputs[k].version for k in ahead.tables)
            as_expected = all(np.asarray(inputs[k]).tobytes() == x.tobytes() for k, x in ahead.entries.items())
            usable = 3 if is_same and as_expected else 2 if is_same else 1
        usable = self.ranks.least(usable)
        self._steps_ahead[(0, 1, 1, 2)[usable]] += 1
        if usable:
            if usable > 1 and ahead.entries:
                self._last.surprises = 0 if usable == 3 else self._last.surprises + 1
            if usable < 3:
                ahead.drop_rows()
            step.ahead = ahead
            step.routes |= ahead.running.routes
            step.needs |= ahead.running.needs

    # --- deferred rows ---

    def _logs(self, tables: Mapping[int, HostRows]) -> tuple[list[AnyLog], frozenset[HostRows]]:
        """Returns an update log for each family with deferred rows, and other tables of which the step only pulls rows.
        The latter may lag behind their updates; all others are brought up to date."""
        logs = []
        waiting: set[int] = set()
        for programs in self._log_programs:
            members = programs.replay.leaves
            log = common_host_log([tables[k] for k in members], programs)
            log.make_room()
            logs.append(log)
            waiting.update(members)
        others = {k: storage for k, storage in tables.items() if k not in waiting}
        for k, storage in others.items():
            if k not in self._pulled_alone:
                storage.bring_up_to_date()
        return logs, frozenset(storage for k, storage in others.items() if k in self._pulled_alone)

    def _write_logs(self, results: Sequence[Leaf], logs: Sequence[AnyLog]) -> Sequence[Leaf]:
        """Writes results that are records to the update logs; returns the step's own results."""
        start = len(self._program.outputs)
        rest = results[start:]
        for log in logs:
            n = len(log.entries)
            (_, *entries), rest = rest[:n], rest[n:]  # stamps are written in place
            log.wrote([np.asarray(self.ranks.own(x)) for x in entries])
        return results[:start]

    # --- programs ---

    def _compile_beside(self, inputs: Sequence[Leaf]) -> None:
        """Compiles what numbers of rows call for: a larger bucket if the last step came near the largest, a smaller one
        if most steps needed far fewer. `inputs`: of the step that is to come."""
        needed = self._last.needed
        if not needed:
            return
        smaller = self._buckets.ran(needed)
        is_near = self._calls >= _FEW_CALLS and self._buckets.is_near(needed)
        for bucket in filter(None, (smaller, self._buckets.grow(needed) if is_near else None)):
            committed = {k: x.sharding for k, x in enumerate(inputs) if isinstance(x, jax.Array) and x.committed}
            compile_all = functools.partial(self._compiled, bucket, committed)
            self._coming[bucket] = beside(f"{self._program.name} for other numbers of rows", compile_all)

    def _compiled(self, bucket: ShapeBucket, committed: Mapping[int, Sharding]) -> SegmentedProgram:
        segmented = self._segmented(bucket)
        if not _is_useless(bucket, segmented):
            segmented.compile(committed)
        return segmented

    def _program_for(self, needs: Rows) -> SegmentedProgram:
        """Returns the program of the smallest bucket that fits. Drops smaller ones that save nothing."""
        bucket = self._buckets.best(needs) or self._buckets.grow(needs)
        segmented = self._compiled_for(bucket)
        if not _is_useless(bucket, segmented):
            return segmented
        self._buckets.drop(bucket)
        del self._programs[bucket]
        return self._program_for(needs)

    @property
    def compilations(self) -> int:
        """The number of compiled shape buckets."""
        return len(self._programs)

    @property
    def once_per_row(self) -> OncePerRow | None:
        """The values that the last step's program computed once per distinct row, if any."""
        return self._last.segmented.once_per_row if self._last.segmented is not None else None

    def _compiled_for(self, bucket: ShapeBucket) -> SegmentedProgram:
        if bucket not in self._programs:
            mark(self.ranks.step, "compiling", "compiles")
            coming = self._coming.pop(bucket, None)
            self._programs[bucket] = (coming and coming.finish()) or self._segmented(bucket)
        return self._programs[bucket]

    def _segmented(self, bucket: ShapeBucket) -> SegmentedProgram:
        plan = self._bound.with_sizes(bucket.rows)
        program: Program = follow(self._program, plan, self._way)
        donated = self._dense if self._donate and not self.ranks.is_joint else frozenset[int]()
        return SegmentedProgram(program, plan, self.ranks, self._buckets, bucket, donated)

    # --- arguments ---

    def _require_memory(self, leaves: Sequence[Leaf]) -> None:
        """Raises HostMemoryError if the hosts lack memory for tables that aren't there yet."""
        coming = {k: leaves[k] for k in self._hosted if not self._is_placed(k, leaves[k])}
        if coming:
            wanted = {}
            for k, leaf in coming.items():
                layout, axis, path = self._hosted[k]
                shape = (layout.held_on(self.ranks.exchange.rank), *leaf.shape[:axis], *leaf.shape[axis + 1 :])
                wanted[path] = shape, leaf.dtype
            require_memory(self.ranks.exchange, wanted)

    def _is_placed(self, k: int, leaf: Leaf) -> bool:
        return isinstance(leaf, HostTable) and leaf.layout == self._hosted[k][0]

    def _storages(self, leaves: Sequence[Leaf]) -> dict[int, HostRows]:
        """Returns the storages of the caller's tables. A table that is given twice is copied, as each is updated by
        itself."""
        storages: dict[int, HostRows] = {}
        for k, (layout, axis, path) in self._hosted.items():
            leaf = leaves[k]
            if not self._is_placed(k, leaf):
                leaf = np.asarray(leaf) if is_table(leaf) else global_arrays.local(leaf)
                storages[k] = HostRows.of(leaf, axis, layout, self.ranks.exchange.rank, path)
                continue
            storage = leaf.waiting
            again = any(storage is other for other in storages.values())
            storages[k] = storage.copy() if k in self._updated and (again or not self._donate) else storage
        return storages

    def _stacked(self, shards: Mapping[int, HostRows]) -> dict[int, HostRows]:
        """Returns the tables as the program takes them, stacked if it has stacks."""
        tables: dict[int, HostRows] = {}
        for k, (layout, _) in self._tables.items():
            of = self._callers_inputs[k]
            if isinstance(of, int):
                tables[k] = shards[of]
            else:
                starts = of.indices[0].shape.starts_on(self.ranks.exchange.rank)
                tables[k] = stacked([shards[j] for j in of.inputs], layout, starts, self._program.name)
        return tables

    def _new_handles(self, leaves: Sequence[Leaf], shards: Mapping[int, HostRows]) -> dict[int, HostTable]:
        """Returns new handles of the updated tables, and deletes those of the arguments."""
        handles = {}
        for k, shard in shards.items():
            if k in self._updated:
                leaf = leaves[k]
                same = isinstance(leaf, HostTable) and not leaf.is_deleted() and leaf.waiting is shard
                handles[k] = leaf.handed_on() if same else HostTable(shard)
        return handles

    def _separated(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """Copies leaves of the state that share a buffer with another leaf."""
        if not self._donate or self.ranks.is_joint or self._are_own(leaves):
            return leaves
        return with_own_buffers(leaves, self._dense)

    def _are_own(self, leaves: Sequence[Leaf]) -> bool:
        """Says whether the last step returned this state, and no other argument shares its arrays."""
        returned = self._last.returned
        own = {id(leaves[k]) for k in returned}
        if not own or len(own) < len(returned) or any(id(x) in own for k, x in enumerate(leaves) if k not in returned):
            return False  # leaves with the same new value are one array
        return all(new() is leaves[k] for k, new in returned.items())

    def _result(self, out: int, value: Leaf) -> Leaf:
        if self._new.get(out) in self._tables:
            return value
        if isinstance(value, HostRows):
            return _read(value)
        state, ranks = self._local.outputs[out], self.ranks
        if isinstance(state, Spread) and not (state.owner or ranks.is_joint) and ranks.exchange.size > 1:
            return self._global_array(value, state.axis)
        return jax.numpy.asarray(value) if isinstance(value, np.ndarray) else ranks.own(value)

    def _on_all(self, result: Leaf) -> Leaf:
        """Replicates a result on every rank; tables stay as they are."""
        with PROGRESS.during("gathering results", "waits") if global_arrays.is_global(result) else nullcontext():
            return self.ranks.own(global_arrays.whole_everywhere(result))

    def _global_array(self, part: Leaf, along: int) -> jax.Array:
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(self.ranks.exchange.size, -1), ("ranks", "local"))
        spec = jax.sharding.PartitionSpec(*[None] * along, "ranks")
        shape = (*part.shape[:along], part.shape[along] * self.ranks.exchange.size, *part.shape[along + 1 :])
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_process_local_data(sharding, np.asarray(part), shape)


class _Arguments:
    """Places a step's arguments, but for tables on hosts, as the device programs take them."""

    def __init__(self, program: Program, bound: ProgramPlan, ranks: Ranks) -> None:
        self._program, self._bound, self._ranks = program, bound, ranks
        copies = [bound.rank_devices if along is None else 1 for along in bound.placements]
        self._kept = KeptPlacements(program, copies)
        read = {*program.block.outputs, *(a for e in program.block.equations for a in e.inputs)}
        self._unread = {k for k, leaf in enumerate(program.block.inputs) if leaf not in read}
        self.states = {k for k, input_ in enumerate(program.inputs) if input_.role == "state"}

    def place(self, k: int, leaf: Leaf) -> Leaf:
        """Places an argument as the device programs take it."""
        along, type_ = self._bound.placements[k], self._program.block.inputs[k].type
        if is_table(leaf):
            if k in self._unread:  # a slot that an evaluation is given with its parameter
                return leaf
            leaf = leaf.materialize()
        if not isinstance(type_, ArrayType):
            return leaf
        if along is None or self._ranks.exchange.size == 1:
            place = functools.partial(self._whole, k, along)
        else:
            place = functools.partial(self._part, along)
        if k in self.states:
            return place(leaf)
        if isinstance(leaf, np.ndarray):  # a global array has a part on each rank already
            self._kept.look(k, leaf)
        return self._kept.placed(k, leaf, (self._ranks.mesh, along), place)

    def _whole(self, k: int, along: int | None, leaf: Leaf) -> Leaf:
        ranks = self._ranks
        if ranks.is_alone and ranks.is_single:
            return leaf
        leaf = ranks.own(leaf)
        if global_arrays.is_global(leaf):
            raise ArgumentsError(
                f"{self._program.inputs[k].path} is spread over the processes, but every rank needs all of it: give "
                "it whole to each, jax.device_put with a replicated sharding"
            )
        if ranks.is_single:
            return leaf
        return ranks.everywhere(leaf) if ranks.is_joint else jax.device_put(leaf, ranks.sharding(along))

    def _part(self, along: int, leaf: Leaf) -> Leaf:
        """Returns this rank's shard of an argument, or the global array of all ranks."""
        ranks = self._ranks
        rank, size = ranks.exchange.rank, ranks.exchange.size
        leaf = ranks.own(leaf)  # a batch that the ranks divide and their devices don't is on every device
        count = leaf.shape[along] // size
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            shards = sorted(leaf.addressable_shards, key=lambda s: s.index[along].start or 0)
            arrays = list({s.index[along].start: s.data for s in shards}.values())
            if len(arrays) == len(ranks.own_devices):
                return ranks.array_of(arrays, along)
            own = np.concatenate([np.asarray(x) for x in arrays], along)
        else:
            index = (slice(None),) * along + (slice(rank * count, (rank + 1) * count),)
            own = (leaf if jax_compat.is_key(leaf.dtype) else np.asarray(leaf))[index]
            if isinstance(leaf, jax.Array) and isinstance(own, np.ndarray):
                own = jax.numpy.asarray(own) if ranks.is_single else own.copy()  # a view would keep the whole leaf
        if ranks.is_single:
            return own
        if not ranks.is_joint:
            return jax.device_put(own, ranks.sharding(along))
        return jax.make_array_from_process_local_data(ranks.sharding(along), own, leaf.shape)


def _check_leaves_on_devices(program: Program, bound: ProgramPlan) -> None:
    """Raises StrategyError if, beside tables on hosts, there are dense shards on devices; or tables by rows on
    devices, with several ranks or deferred rows."""
    if bound.shards:
        path, ranks = program.inputs[min(bound.shards)].path, bound.devices
        raise StrategyError(
            f"strategy: {path} can't be in shards on devices ('ps') beside tables on the hosts of {ranks} ranks. "
            "Give it ('ps', 'hosts') as well, or leave it to 'auto' or 'allreduce'"
        )
    there = {f.family: f.method for f in bound.families if not f.on_hosts}
    spaces = [s for s in program.facts.spaces if s.family in there]
    space = next((s for s in spaces if s.deferred), spaces[0] if spaces else None)
    if space is not None and (bound.devices > 1 or space.deferred):
        path, ranks = program.inputs[space.tables[0]].path, bound.devices
        raise StrategyError(
            f"strategy: {path} can't be trained with {there[space.family]!r} on devices beside tables on the hosts "
            f"of {ranks} rank{'s' * (ranks > 1)}. Give it ('ps', 'hosts') as well, or leave it to 'auto' or "
            "'allreduce'"
        )


def _shape_buckets(program: Program, bound: ProgramPlan) -> ShapeBuckets:
    count, there = bound.devices, [f for f in bound.families if f.on_hosts]
    limits = {f.family: (f.bounds.rows // count, (f.bounds.requested or 0) // count) for f in there}
    #: Two rows at least: a reshape couldn't tell an axis of one row from others.
    least: dict[int, tuple[int, int]] = dict.fromkeys(limits, (2, 1))
    for space in program.facts.spaces:
        has_dynamic_ids = any(a.equation.op not in ("slice", "pad") for a in space.accesses)
        is_fixed = space.is_pulled or not has_dynamic_ids  # the same rows for every batch
        if space.family in least and (space.depends_on or is_fixed):
            least[space.family] = limits[space.family]
    return ShapeBuckets(least, limits)


def _is_useless(bucket: ShapeBucket, segmented: SegmentedProgram) -> bool:
    """Says whether a smaller bucket saves nothing: no work depends on it but for values computed once per row."""
    return bucket.is_smaller and segmented.once_per_row is None


def _catch_up_some(logs: Sequence[AnyLog]) -> None:
    for log in logs:
        log.catch_up_some()


def _read(value: Leaf) -> jax.Array:
    """Copies a table (collective), or another leaf, to a new array."""
    if isinstance(value, HostRows):
        return HostTable(value).materialize()
    return value.materialize() if is_table(value) else value if isinstance(value, jax.Array) else jax.numpy.array(value)


def _is_pulled_alone(block: Block, k: int) -> bool:
    """Says whether the step does nothing with an input but pull its rows."""
    leaf = block.inputs[k]
    uses = [e for e in block.walk() if leaf in e.inputs]
    return leaf not in block.outputs and all(e in block.equations and e.op == "ap.pull" for e in uses)
