"""Compiles the programs of a step whose state servers keep."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.backends.devices import Devices, Mapped
from autopar.backends.emit import emit
from autopar.backends.global_arrays import jit_on, local, place_array
from autopar.ir.printer import block_text
from autopar.ir.program import Block, Program, known
from autopar.ir.served import LocalWorker, ServedStep, ServerPart
from autopar.jax_types import Array, Leaf, ValueType

#: Maps (leaves, ids) to pulled values.
PullProgram = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
#: Maps (leaves, clocks, pushed values) to new leaves and clocks.
UpdateProgram = Callable[[Sequence[Array], Sequence[Array], Sequence[Array]], tuple[list[Array], list[Array]]]
#: Maps (number of an input, its array, a sharding, a function that puts it there) to the placed array.
Keep = Callable[[int, Array, Any, Callable[[Array], Array]], Array]


class ServedPrograms:
    """Runs the programs of workers and servers. `analysed`: the program before `split_servers` cut it, which knows the
    types of results. `devices`: those over which a worker divides its minibatch. `keep`: places inputs that are no
    state, unless an earlier step has; None: they are placed each time."""

    def __init__(
        self, program: Program, analysed: Program, devices: Devices | None = None, keep: Keep | None = None
    ) -> None:
        self._devices, self._keep = devices, keep
        self._states = frozenset(analysed.new_states)
        self.step = known(program.served)
        self._functions = [_server_functions(self.step, part, analysed) for part in self.step.servers]
        #: For each server its pull, and its update by a push, which works in place.
        self.servers = [
            server_programs(*functions, len(part.leaves))
            for functions, part in zip(self._functions, self.step.servers, strict=True)
        ]
        blocks = [b for part in self.step.servers for b in (part.pull, part.update)]
        texts = ["\n".join(block_text(block)) for block in (self.step.ids, self.step.worker, *blocks)]
        #: Identifies these programs.
        self.digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
        served, program = self.step, analysed
        types = [None] * served.pushed + [program.block.outputs[k].type for k in served.results]
        types += [program.block.outputs[program.new_states[k]].type for k in served.clocks]
        self._ids = jax.jit(emit(served.ids)) if served.ids.outputs else None
        run, axes = emit(served.worker), (None,) * len(served.worker.inputs)
        if devices is not None and served.local_worker is not None:
            run, axes = _mapped(served.local_worker, devices), served.local_worker.axes
        self._axes, work = axes, _typed(run, types)
        # On several devices all results, which are pushed or the user's, are whole on each.
        whole = None if devices is None else devices.sharding(None)
        self._work = jax.jit(work) if devices is None else jit_on(devices.mesh, work, out_shardings=whole)

    def exported(self, server: int, leaves: Sequence[Array]) -> ExportedPrograms:
        """Returns a server's programs in a form that can be sent to another process. `leaves`: the step's flat
        arguments."""
        part, (pull, update) = self.step.servers[server], self._functions[server]
        kept = [self.step.kept(k, leaves) for k in part.leaves]
        ids = part.pull.inputs[len(kept) :]
        clocks = [leaves[k] for k in part.clocks]
        pushed = part.update.inputs[len(kept) + len(clocks) :]
        return ExportedPrograms(
            jax_compat.exported(pull, [*kept, *ids]), jax_compat.exported(update, [*kept, *clocks, *pushed]), len(kept)
        )

    def ids(self, leaves: Sequence[Array]) -> list[Sequence[Array]]:
        """Returns for each server the ids of the rows that a worker pulls from it. `leaves`: the step's flat
        arguments."""
        if self._ids is None:
            return [()] * len(self.step.servers)
        ids = self._ids(*(self._placed_input(k, leaves[k], None) for k in self.step.id_inputs))
        return [[ids[n] for n in part.ids] for part in self.step.servers]

    def work(
        self, pulled: Sequence[Sequence[Array]], leaves: Sequence[Array]
    ) -> tuple[list[Sequence[Array]], dict[int, Array], dict[int, Array]]:
        """Returns values pushed to each server, the worker's results by output number, and new clocks by input number.
        `pulled`: values by server. `leaves`: the step's flat arguments; state that servers keep isn't read."""
        given = [self._placed(x, None) for values in pulled for x in values]
        own = [
            self._placed_input(k, leaves[k], axis)
            for k, axis in zip(self.step.own, self._axes[len(given) :], strict=True)
        ]
        outputs = self._work(*given, *own)
        pushed: list[Sequence[Array]] = [[outputs[n] for n in part.pushed] for part in self.step.servers]
        rest, count = outputs[self.step.pushed :], len(self.step.results)
        results = dict(zip(self.step.results, rest[:count], strict=True))
        return pushed, results, dict(zip(self.step.clocks, rest[count:], strict=True))

    def _placed(self, value: Array, axis: int | None) -> Array:
        sharding = self._sharding(axis)
        return value if sharding is None else place_array(value, sharding)

    def _placed_input(self, k: int, leaf: Array, axis: int | None) -> Array:
        """Places an input, unless it is in place from an earlier step."""
        sharding = self._sharding(axis)
        if sharding is None or self._keep is None or k in self._states:
            return self._placed(leaf, axis)
        place = functools.partial(place_array, sharding=sharding, own=isinstance(leaf, jax.Array))
        return self._keep(k, leaf, sharding, place)

    def _sharding(self, axis: int | None) -> NamedSharding | None:
        return None if self._devices is None else self._devices.sharding(axis)


@dataclass(frozen=True, slots=True)
class ExportedPrograms:
    """A server's programs (`jax.export.Exported`) as they travel to another process, whose devices are CPUs."""

    pull: Any
    update: Any
    count: int  #: Number of leaves that the server keeps.

    def programs(self) -> tuple[PullProgram, UpdateProgram]:
        """Returns the server's programs; leaves are updated in place."""
        return server_programs(self.pull.call, self.update.call, self.count)


def _server_functions(
    step: ServedStep, part: ServerPart, program: Program
) -> tuple[Callable[..., Leaf], Callable[..., Leaf]]:
    indices = [*map(step.leaf_of, part.leaves), *part.clocks]
    types = [program.block.outputs[program.new_states[k]].type for k in indices]
    return _own(part.pull), _typed(emit(part.update), types)


def server_programs(
    pull_function: Callable[..., Any], update_function: Callable[..., Any], count: int
) -> tuple[PullProgram, UpdateProgram]:
    """Returns the compiled programs of a server that keeps `count` leaves."""
    run_pull = jax.jit(pull_function)
    run_update = jax.jit(update_function, donate_argnums=tuple(range(count)), keep_unused=True)

    def pull(leaves: Sequence[Array], ids: Sequence[Array]) -> list[Array]:
        return run_pull(*leaves, *ids)

    def update(
        leaves: Sequence[Array], clocks: Sequence[Array], pushed: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        if any(x is y for n, x in enumerate(leaves) for y in leaves[:n]):  # leaves with one new value are one array
            leaves = [copied(x) for x in leaves]
        new = run_update(*leaves, *clocks, *pushed)
        return new[:count], new[count:]

    return pull, update


def copied(leaf: Array) -> Array:
    """Returns an array that no other program updates in place."""
    if jax_compat.is_key(getattr(leaf, "dtype", None)):
        return jax.random.wrap_key_data(jnp.array(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return jnp.array(leaf)


def _own(block: Block) -> Callable[..., list[Array]]:
    """Returns a function that runs the block and copies arguments that it returns, as these are updated in place."""
    run, given = emit(block), set(block.inputs)

    def own(*inputs: Array) -> list[Array]:
        return [copied(x) if a in given else x for a, x in zip(block.outputs, run(*inputs), strict=True)]

    return own


def _mapped(worker: LocalWorker, devices: Devices) -> Callable[..., Sequence[Array]]:
    run = emit(worker.block, devices=Mapped(devices.mesh, devices.axis))
    returned = (None,) * len(worker.block.outputs)
    return devices.mapped(lambda *inputs: tuple(map(jnp.asarray, run(*inputs))), worker.axes, returned)


def _typed(run: Callable[..., Sequence[Array]], types: Sequence[ValueType]) -> Callable[..., list[Array]]:
    """Returns the function with the plain step's types, weak or strong."""

    def typed(*inputs: Array) -> list[Array]:
        return [x if t is None else _like(jnp.asarray(x), t) for x, t in zip(run(*inputs), types, strict=True)]

    return typed


def _like(value: Array, type_: ValueType) -> Array:
    if jax_compat.is_key(value.dtype):
        return value
    return jax_compat.weak(value) if getattr(type_, "weak_type", False) else jax_compat.strong(value)


def one_worker(programs: ServedPrograms, program: Program) -> Callable[..., list[Array]]:
    """Returns the step of one worker and its servers on flat arrays, which must equal the plain step.

    Collective within a worker of several processes. `program`: the analysed step.
    """
    served = programs.step

    def step(*leaves: Array) -> list[Array]:
        ids = programs.ids(leaves)
        parts = list(zip(served.servers, programs.servers, strict=True))
        pulled = [
            pull([served.kept(k, leaves) for k in part.leaves], [*map(local, ids[n])])
            for n, (part, (pull, _)) in enumerate(parts)
        ]
        pushed, results, new = programs.work(pulled, leaves)
        for (part, (_, update)), values in zip(parts, pushed, strict=True):
            kept = [copied(served.kept(k, leaves)) for k in part.leaves]  # they are updated in place
            updated, clocks = update(kept, [leaves[k] for k in part.clocks], [*map(local, values)])
            new |= zip((*part.leaves, *part.clocks), (*updated, *clocks), strict=True)
        results |= {program.new_states[k]: x for k, x in served.whole_leaves(new).items()}
        return [results[k] for k in range(len(program.outputs))]

    return step
