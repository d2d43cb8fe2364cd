"""`init`: makes a state where its plan has it, share by share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.backends.devices import Devices
from autopar.backends.emit import emit
from autopar.backends.global_arrays import jit_on, local, place_array
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.storage import HostRows, rows_in
from autopar.backends.layouts import arranger, even_shards, placed
from autopar.errors import ArgumentsError, AutoparError, StateError
from autopar.ir.layout import RowLayout
from autopar.ir.program import Atom, Block, known
from autopar.ir.slicing import eliminate_dead, independent_outputs, uniform_outputs
from autopar.ir.trace import block_of
from autopar.jax_types import Dtype, Leaf, Pytree, Sharding
from autopar.mpi.exchange import as_lines
from autopar.mpi.machines import exchange, require_memory
from autopar.run.agreement import check_same_maker
from autopar.run.buffers import naming_donated
from autopar.run.planned_step import PlannedStep
from autopar.run.step import MethodStep, ParallelStep
from autopar.tables.host import HostTable
from autopar.tables.sharded import Table
from autopar.tables.staged import StageArray, StagePart, is_staged

#: Bytes of leaves that one program makes whole, unless one of them, or some that share values, take more.
_BYTES_AT_A_TIME = 1 << 28
#: State -> all arguments of the step.
CallArguments = Callable[[Leaf], Sequence[Leaf]]


def init(
    make_state: Callable[..., Pytree],
    *args: Pytree,
    step: ParallelStep | MethodStep,
    batch: Pytree = None,
    call: CallArguments | None = None,
) -> Pytree:
    """Runs `jax.jit(make_state)(*args)`, with each leaf made on the devices where the step's plan has it.

    A table that is divided over devices is never whole on any of them, and the first step takes it without a copy. The
    numbers are those of `jax.jit(make_state)(*args)` to the bit; if an initializer sums over a table's rows, up to the
    order of the sum. All processes call it together, with the same arguments.

    (On CPUs under jax 0.11 and later XLA rounds a shard differently from a whole array. There each process makes
    leaves whole in its memory, some at a time, and then divides them, so that their bits are the same. Tables on hosts
    are made whole one after the other, each by one of the processes of a machine, which gives the others their rows.)

    Args:
      make_state: Makes the state, which is the step's first argument, or the one that its `state_argnums` names. It
        takes what is no array from around it, as in `lambda key: make_state(model, key)`.
      *args: Arrays, random keys, numbers. Each device gets all of them.
      step: The step that `parallelize` returned.
      batch: The step's other argument: arrays, or `jax.ShapeDtypeStruct`s. Arrays also tell how many rows travel, as
        the batch of a first call does.
      call: Instead of `batch`, for steps with other arguments: returns all arguments of the step for the result of
        `make_state`, as in `call=lambda made: (made["params"], made["opt"], batch, key)`.

    Returns:
      The result of `make_state`, with a `Table` for each leaf that is stored in a layout, a `HostTable` for each leaf
        in host memory, and a `StageArray` for each leaf whose layers are on several stages, or whose stages are on
        several processes.

    Raises:
      ArgumentsError: `parallelize` didn't make the step; not exactly one of `batch` and `call`; a `make_state` that
        `jax.jit` doesn't take, or whose result the step can't be traced with.
      StateError: nothing that `make_state` returns is state of the step.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> def make_table(key):
      ...     return jax.random.normal(key, (100_000, 8))
      >>> ids = jnp.array([3, 5])
      >>> table = autopar.init(make_table, jax.random.key(0), step=step, batch=ids)
      >>> table, _ = step(table, ids)
    """
    step, batch, call = unbound("init", "made", step, batch, call)
    if not callable(make_state):
        raise ArgumentsError(f"init takes a function that makes the state first, not a {type(make_state).__name__}")
    name = getattr(make_state, "__name__", "make_state")
    try:
        traced = jax_compat.trace(make_state, args, {})
    except TypeError as error:
        raise ArgumentsError(
            f"{name} isn't a function from arrays to arrays: {error}. What is no array it takes from around it: "
            "init(lambda key: make_state(model, key), key, ...)"
        ) from error
    maker = Maker.of(step, name, traced, batch, call)
    if step.devices is not None and step.devices.processes.several:
        check_same_maker(step.devices.processes, name, block_of(traced.jaxpr), jax.tree.leaves(args))
    with naming_donated(name, args, {}):
        leaves = maker.leaves_of(jax.tree.leaves(args))
    return jax.tree.unflatten(traced.out_tree, leaves)


@dataclass(frozen=True, eq=False)
class Maker:
    """Makes the leaves of a state."""

    traced: jax.stages.Traced  #: The function that makes the state.
    devices: Devices | None
    shardings: Sequence[Sharding] | None  #: The sharding of each leaf; None on one device.
    layouts: Sequence[tuple[RowLayout, int] | None]  #: (layout, row axis) of each leaf that has one.

    @functools.cached_property
    def make(self) -> Callable[..., Sequence[Pytree]]:
        """The traced function of flat arrays."""
        return jax_compat.jaxpr_as_fun(self.traced.jaxpr)

    @functools.cached_property
    def block(self) -> Block:
        return block_of(self.traced.jaxpr)

    @functools.cached_property
    def whole(self) -> bool:
        """Leaves are made whole on one device first, so that their bits are right."""
        return jax_compat.rounds_by_shape()

    @staticmethod
    def of(
        step: ParallelStep, name: str, traced: jax.stages.Traced, batch: Pytree, call: CallArguments | None
    ) -> Maker:
        """Returns the maker of a traced `make_state`'s result."""
        made = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), traced.out_info)
        no_state = (
            f"nothing that {name} returns is state of {step.name}, which returns nothing of it updated. "
            "Name the state with parallelize(step, state_argnums=...)"
        )
        planned, numbers = planned_step_of(step, name, made, batch, call, no_state)
        maker = planned.way.maker(planned, traced, numbers)
        if maker is not None:
            return maker
        bound, devices = planned.compiled.bound, planned.devices
        if devices is None:
            return Maker(traced, None, None, [None] * len(numbers))
        shardings = [devices.sharding(*((None,) if k is None else bound.placement(k))) for k in numbers]
        layouts = [None if k is None else bound.layouts.get(k) for k in numbers]
        return Maker(traced, devices, shardings, layouts)

    def leaves_of(self, flat: Sequence[Leaf]) -> list[Leaf]:
        """Makes all leaves of flat arguments."""
        flat = [self.everywhere(x) for x in flat]
        return self.as_tables(self.run(*flat)) if self.devices is None or not self.whole else self._spread(flat)

    def _run(self, outputs: Sequence[Atom], flat: Sequence[Leaf]) -> Sequence[Leaf]:
        block, _ = eliminate_dead(replace(self.block, outputs=tuple(outputs)))
        return jax.jit(emit(block))(*flat) if outputs else []

    @functools.cached_property
    def run(self) -> Leaf:
        """The jitted function of flat arrays. It makes tables in even shards, and another program distributes their
        rows cyclically: XLA may round otherwise where it fuses the two."""
        devices = self.devices
        if devices is None:
            return jax.jit(self.make)

        def make(*flat: Leaf) -> list[Leaf]:
            pairs = zip(self.make(*flat), self.layouts, strict=True)
            return [x if layout is None else even_shards(x, *layout, devices) for x, layout in pairs]

        return jit_on(devices.mesh, make, out_shardings=self.shardings)

    def everywhere(self, leaf: Leaf) -> Pytree:
        """Puts an argument on all devices, or where all leaves are made."""
        if self.devices is None or not isinstance(leaf, jax.Array):
            return leaf
        if self.whole:
            return jax.device_put(local(leaf), jax.local_devices()[0])
        return place_array(leaf, self.devices.sharding(None))

    def as_tables(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns the leaves that `run` made, with Tables in place of even shards."""
        devices, tables = self.devices, list(leaves)
        for k, layout in enumerate(self.layouts):
            if devices is not None and layout is not None:
                tables[k] = Table(arranger(*layout, devices)(tables[k]), *layout)
        return tables

    def _spread(self, flat: Sequence[Leaf]) -> list[Leaf]:
        """Makes leaves whole, some at a time, and brings them where the plan has them."""
        assert self.shardings is not None and self.devices is not None, "several devices have shardings"
        made, outputs = dict[int, Leaf](), self.block.outputs
        for group in _merged(independent_outputs(self.block), outputs):
            leaves = list(self._run([outputs[k] for k in group], flat))
            for k in group:
                leaf, layout = leaves.pop(0), self.layouts[k]
                table = None if layout is None else Table(placed(leaf, *layout, self.devices), *layout)
                made[k] = place_array(leaf, self.shardings[k], own=True) if table is None else table
        return [made[k] for k in range(len(outputs))]


@dataclass(frozen=True, eq=False)
class StageMaker(Maker):
    """Makes each leaf on its stage's devices alone. `parts`: of each leaf; (): it is everywhere."""

    parts: Sequence[Sequence[StagePart]]

    @functools.cached_property
    def run(self) -> Leaf:
        """Makes each leaf's parts, by a program for each stage of this process and one for leaves that are
        everywhere."""

        def run(*flat: Leaf) -> list[list[Leaf]]:
            made: list[list[Pytree]] = [[None] * max(1, len(parts)) for parts in self.parts]
            for (everywhere, alone), own in self._programs().items():
                whole = alone is not None

                def make(*xs: Leaf, own: Sequence[tuple[int, int]] = own, whole: bool = whole) -> list[Leaf]:
                    leaves = self.make(*xs)
                    return [leaves[k] if whole else self._part(leaves[k], k, n) for k, n in own]

                values = flat if everywhere is None else jax.device_put(flat, everywhere)
                there = None if everywhere is None else [self.parts[k][n].sharding for k, n in own]
                for (k, n), value in zip(own, jax.jit(make, out_shardings=there)(*values), strict=True):
                    made[k][n] = jax.device_put(self._part(value, k, n), self.parts[k][n].sharding) if whole else value
            return made

        return run

    def _programs(self) -> dict[tuple[Leaf, Leaf], list[tuple[int, int]]]:
        """Returns (leaf, part) of each program's results, by its arguments' sharding. A leaf that is made whole and
        then cut has a program of its own."""
        programs: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
        for k, parts in enumerate(self.parts):
            if not parts:
                programs.setdefault((None, None), []).append((k, 0))
            for n, part in enumerate(parts):
                if part.sharding is not None:  # else of another process
                    alone = (k, n) if self.whole and len(parts) > 1 else None
                    programs.setdefault((part.whole, alone), []).append((k, n))
        return programs

    def _part(self, leaf: Leaf, k: int, n: int) -> Leaf:
        parts = self.parts[k]
        return leaf if len(parts) < 2 else leaf[parts[n].start : parts[n].stop]

    def as_tables(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return [
            StageArray(aval.shape, aval.dtype, parts, values, is_weak=aval.weak_type) if is_staged(parts) else values[0]
            for values, aval, parts in zip(leaves, self.traced.jaxpr.out_avals, self.parts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A leaf to be made in host memory."""

    path: str
    layout: RowLayout
    axis: int


@dataclass(frozen=True, eq=False)
class HostMaker(Maker):
    """Makes a state with tables on hosts, each rank its own shard.

    A table is made in equal shards of adjacent rows, on the devices of each rank, and distributed cyclically from
    there. Where shards aren't rounded as whole tables are, one rank of each machine makes it whole, ranks different
    tables at a time, and all take their rows from there.

    `tables`: for each leaf how it is to be stored on hosts, else None.
    """

    ranks: Ranks
    tables: Sequence[HostLeaf | None]

    @staticmethod
    def of_plan(traced: jax.stages.Traced, planned: PlannedStep, inputs_of: Sequence[int | None]) -> HostMaker:
        """Returns the maker for a plan. `inputs_of`: for each leaf the step's input."""
        ranks = Ranks(exchange(), "init", joint=True)
        devices = Devices(ranks.mesh, "ranks") if ranks.is_joint else None
        analysed = planned.compiled.analysed
        inputs, hosted = analysed.inputs, planned.compiled.bound.hosted(analysed)
        tables = [HostLeaf(inputs[k].path, *hosted[k]) if k is not None and k in hosted else None for k in inputs_of]
        even = [t and (RowLayout(t.layout.extent, t.layout.devices, cyclic=False), t.axis) for t in tables]
        shardings = devices and [devices.sharding(None if t is None else t.axis) for t in tables]
        return HostMaker(traced, devices, shardings, even, ranks, tables)

    def leaves_of(self, flat: Sequence[Leaf]) -> list[Leaf]:
        pairs = [(t, atom.type) for t, atom in zip(self.tables, self.block.outputs, strict=True) if t is not None]
        rank = self.ranks.exchange.rank
        own = {t.path: (resized(type_.shape, t.axis, t.layout.held_on(rank)), type_.dtype) for t, type_ in pairs}
        if self.whole and self.ranks.exchange.size > 1:  # a single rank keeps the memory in which tables were made
            own |= {f"{path} (made whole by one rank of a machine)": of for path, of in self._largest_whole().items()}
        require_memory(self.ranks.exchange, own)
        return self._in_turns([local(x) for x in flat]) if self.whole else super().leaves_of(flat)

    def as_tables(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return [
            self.ranks.own(leaf) if table is None else HostTable(self._stored(leaf, table))
            for leaf, table in zip(leaves, self.tables, strict=True)
        ]

    def _stored(self, leaf: Leaf, table: HostLeaf) -> HostRows:
        ranks = self.ranks.exchange
        if self.devices is None or self.whole:
            return HostRows.of(leaf, table.axis, table.layout, ranks.rank, table.path)
        even = RowLayout(table.layout.extent, table.layout.devices, cyclic=False)
        storage, shard = self._empty(table, leaf), np.moveaxis(np.asarray(leaf.addressable_data(0)), table.axis, 0)

        def read(numbers: np.ndarray) -> np.ndarray:
            indices, back = np.unique(numbers, return_inverse=True)
            requested = ranks.ask(indices, even.shard_rows)
            return ranks.fetch(requested, shard[requested.rows])[back]

        storage.fill(read)
        return storage

    def _empty(self, table: HostLeaf, of: Leaf) -> HostRows:
        shape = resized(of.shape, table.axis, table.layout.extent)
        return HostRows.empty(shape, of.dtype, table.axis, table.layout, self.ranks.exchange.rank, table.path)

    @functools.cached_property
    def _uniform(self) -> dict[int, Atom]:
        """Tables that are one number everywhere, and that number."""
        return {k: atom for k, atom in uniform_outputs(self.block).items() if self.tables[k] is not None}

    @functools.cached_property
    def _turns(self) -> list[Sequence[Sequence[int]]]:
        """Tables that are made whole: in each turn those of each rank of a machine."""
        groups = [group for group in independent_outputs(self.block) if all(self.tables[k] for k in group)]
        groups = [[k for k in group if k not in self._uniform] for group in groups]
        return list(_shared_out(groups, self.block.outputs, self.ranks.exchange.near.size))

    def _largest_whole(self) -> dict[str, tuple[tuple[int, ...], Dtype]]:
        """Returns path -> shape and dtype of what this rank makes whole in the turn that takes most memory."""
        outputs, rank = self.block.outputs, self.ranks.exchange.near.rank
        most = max((turn[rank] for turn in self._turns), key=lambda own: _nbytes(own, outputs), default=())
        types = {known(self.tables[k]).path: outputs[k].type for k in most}
        return {path: (type_.shape, type_.dtype) for path, type_ in types.items()}

    def _in_turns(self, flat: Sequence[Leaf]) -> list[Leaf]:
        """Makes tables whole, each on one rank of a machine, and all else on every rank."""
        outputs, made = self.block.outputs, dict[int, Leaf]()
        uniform, turns, near = self._uniform, self._turns, self.ranks.exchange.near
        rest = sorted(set(range(len(outputs))).difference(*(group for turn in turns for group in turn)))
        for turn in turns:  # first, as initializers may need more memory than tables
            own = iter(self._run([outputs[k] for k in turn[near.rank]], flat))
            for leaves in itertools.zip_longest(*turn):  # one of each rank
                made |= self._dealt(leaves, next(own, None))
        for k, leaf in zip(rest, self._run([uniform.get(k, outputs[k]) for k in rest], flat), strict=True):
            table = self.tables[k]
            if table is not None and k in uniform:
                made[k] = self._empty(table, outputs[k].type)
                made[k].rows[...] = np.asarray(leaf)
            else:
                made[k] = leaf if table is None else self._stored(leaf, table)
        return [made[k] if table is None else HostTable(made[k]) for k, table in enumerate(self.tables)]

    def _dealt(self, leaves: Sequence[int | None], whole: Leaf | None) -> dict[int, HostRows]:
        """Returns this rank's shards of tables of which each rank of its machine, or some, have made one. Collective
        there. `whole`: the table that this rank has made."""
        ranks, outputs, shards = self.ranks.exchange, self.block.outputs, dict[int, HostRows]()
        mine = leaves[ranks.near.rank]
        if ranks.size == 1 and mine is not None:
            table, is_given = known(self.tables[mine]), outputs[mine] in self.block.inputs
            if table.axis == 0 and not is_given and outputs.count(outputs[mine]) == 1:
                return {mine: HostRows.over(whole, table.layout, ranks.rank, table.path)}
        for k in leaves:
            if k is not None:
                shards[k] = self._empty(known(self.tables[k]), outputs[k].type)
        for parts in itertools.zip_longest(*(() if k is None else shards[k].blocks() for k in leaves)):
            own, pairs = parts[ranks.near.rank], zip(leaves, parts, strict=True)
            sends = [None] * len(parts) if mine is None or own is None else self._parts_of(mine, np.asarray(whole), own)
            receives = [None if k is None or part is None else as_lines(shards[k].rows[part]) for k, part in pairs]
            ranks.near.swap("rows", sends, receives)
        return shards

    def _parts_of(self, k: int, whole: np.ndarray, part: slice) -> Sequence[np.ndarray]:
        table = known(self.tables[k])
        numbers = [rows_in(table.layout, rank, part) for rank in self.ranks.exchange.near_ranks]
        return [as_lines(np.moveaxis(np.take(whole, each, table.axis), table.axis, 0)) for each in numbers]


def _nbytes(leaves: Iterable[int], outputs: Sequence[Atom]) -> int:
    return sum(outputs[k].type.nbytes for k in leaves)


def _merged(groups: Sequence[Sequence[int]], outputs: Sequence[Atom]) -> Iterator[Sequence[int]]:
    """Joins neighbouring groups of leaves whose bytes together are few."""
    merged: list[int] = []
    for group in groups:
        if merged and _nbytes((*merged, *group), outputs) > _BYTES_AT_A_TIME:
            yield merged
            merged = []
        merged += group
    yield merged


def _shared_out(
    groups: Sequence[Sequence[int]], outputs: Sequence[Atom], size: int
) -> Iterator[Sequence[Sequence[int]]]:
    """Divides groups of leaves among `size` ranks by bytes, and yields a group of each rank, or none, in turns."""
    nbytes = {n: _nbytes(group, outputs) for n, group in enumerate(groups) if group}
    ranks: list[list[int]] = [[] for _ in range(size)]
    for n in sorted(nbytes, key=lambda n: -nbytes[n]):
        min(ranks, key=lambda own: sum(nbytes[n] for n in own)).append(n)
    for turn in itertools.zip_longest(*ranks):
        yield [() if n is None else groups[n] for n in turn]


def unbound(
    user: str, made: str, step: ParallelStep | MethodStep, batch: Pytree, call: CallArguments | None
) -> tuple[ParallelStep, Pytree, CallArguments | None]:
    """Returns a step and how it is called; for a method its function, which is called with the object as well. `user`
    (a function of autopar) and `made` (the argument of a `call`) are for messages."""
    if not isinstance(step.step if isinstance(step, MethodStep) else step, ParallelStep):
        raise ArgumentsError(f"{user} takes a step that parallelize returned, not a {type(step).__name__}")
    if (batch is None) == (call is None):
        raise ArgumentsError(
            f"{user} needs to know what {step.name} is called with: batch=..., or, for a step with other arguments "
            f"than a state and a batch, call=lambda {made}: ({made}, ...)"
        )
    if isinstance(step, MethodStep):
        return step.step, None, step.calling(batch, call)
    return step, batch, call


def planned_step_of(
    step: ParallelStep, name: str, made: Pytree, batch: Pytree, call: CallArguments | None, no_state: str
) -> tuple[PlannedStep, list[int | None]]:
    """Plans a step for a state; returns the planned step, and for each leaf of the state the step's input.

    `made`: the state as shapes, each a distinct object: by identity they are found among the step's arguments. `name`,
    `no_state`: the name of the state's maker, and an error's text if no leaf is state.
    """
    arguments = _call_of(step, name, made, batch, call)
    try:
        planned = step.planned_for(*arguments)
    except AutoparError:
        raise
    # JAX and the user's own code raise these for arguments that don't fit.
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ArgumentsError(
            f"{step.name} can't be traced with what {name} returns and these other arguments: "
            f"{type(error).__name__}: {error}"
        ) from error
    order = {id(leaf): k for k, leaf in reversed(list(enumerate(step.leaves(arguments, {}))))}
    numbers = [order.get(id(leaf)) for leaf in jax.tree.leaves(made)]
    inputs = planned.compiled.analysed.inputs
    if not any(k is not None and inputs[k].role == "state" for k in numbers):
        raise StateError(no_state)
    return planned, numbers


def _call_of(
    step: ParallelStep, name: str, made: Pytree, batch: Pytree, call: CallArguments | None
) -> tuple[Pytree, ...]:
    """Returns all arguments of the step, as shapes."""
    if call is None:
        position = step.state_argnums[0] if step.state_argnums else 0
        if position > 1:
            raise ArgumentsError(
                f"{step.name} has its state in argument {position}: say how it is called with what {name} returns, "
                "init(..., call=lambda made: (..., made))"
            )
        return (batch, made) if position else (made, batch)
    if not callable(call):
        raise ArgumentsError(
            f"call={call!r}: give a function, call=lambda made: (made, ...), of all the step's arguments"
        )
    arguments = call(made)
    if not isinstance(arguments, (tuple, list)):
        raise ArgumentsError(f"call gives a tuple of the step's arguments, not a {type(arguments).__name__}")
    return tuple(arguments)
