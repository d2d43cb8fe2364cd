"""Steps written for one device of several, as for `jax.pmap`: `parallelize(step, axis_name="batch")`.

Such a step sees its device's shard of the examples and reduces over devices itself (`lax.pmean(grads, "batch")`). Its
meaning is that of `pmap` over the N devices of the mesh, whatever it does: a sum of means, batch norm over a device's
own examples, `axis_index`. The global step is therefore `vmap(step, axis_name=, axis_size=N)` over shards of the
examples, one program of global arrays that is planned like any other.

Arguments are those of a global step: the state once (not replicated), and the whole batch (not reshaped). To find the
state, the step is first traced with all arguments whole on each device (with its shard, where `state_argnums` names the
state); this first look also finds single keys (`analysis.per_device`), which every device has whole. Results that are
equal on all devices are returned once, others stacked as by `pmap`, [N, ...]. A state that differs between devices is
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar import jax_compat
from autopar.analysis.per_device import may_be_words, own_sums, use_as_key
from autopar.backends.emit import emit
from autopar.errors import ArgumentsError, StateError, StepError
from autopar.ir.paths import BatchAxis, example_axes, matches, path_name
from autopar.ir.program import Block
from autopar.ir.trace import block_of
from autopar.jax_types import Jaxpr, Leaf, Pytree
from autopar.run.arguments import Call, NamedArguments, States, describe_leaves
from autopar.run.state_match import match_states

#: Equations that place values -> what becomes of them.
_PLACING = {
    "shard_map": "planned like the rest of the step, each of its devices an element of an axis",
    "sharding_constraint": "not followed, the plan says where values are",
}


def without_sharding(name: str, jaxpr: Jaxpr) -> tuple[Jaxpr, Block, Sequence[str]]:
    """Returns a step's program without the user's own sharding (`backends.emit`), and notes on what was removed; raises
    StepError if a `shard_map` has a collective that `jax.vmap` can't do."""
    block = block_of(jaxpr)
    lines = {op: dict.fromkeys(e.where for e in block.walk() if e.op == op) for op in _PLACING}
    if not any(lines.values()):
        return jaxpr, block, ()
    notes = [f"{op} ({', '.join(where)}): {_PLACING[op]}" for op, where in sorted(lines.items()) if where]
    inputs = [v.aval for v in jax_compat.open_jaxpr(jaxpr)[0].invars]
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in inputs]
    try:
        again = jax.make_jaxpr(emit(block))(*types)
    except Exception as error:
        where = ", ".join(lines["shard_map"])
        raise StepError(
            f"{name}: its shard_map ({where}) can't be made part of the step, as jax.vmap over its mesh's axes, for a "
            f"collective that this can't do: {error}. Write it over one axis at a time, or without shard_map: autopar "
            "divides the step by itself"
        ) from error
    return again, block_of(again), notes


@dataclass(frozen=True, slots=True)
class PerDevice:
    """The devices that a step is written for: the axis name of its collectives, their number, and the axis of the
    examples."""

    axis: str
    count: int
    batch_axis: BatchAxis


def unknown_axis(name: str, error: NameError, device: PerDevice | None) -> Exception:
    """Returns the error for a step that reduces over devices without `axis_name=`, or by another name than the
    `device`'s; any other NameError is the step's own."""
    if "axis name" not in str(error):
        return error
    if device is not None:
        return StepError(f"{name} reduces over another axis than its axis_name={device.axis!r} ({error}). Use one name")
    return StepError(
        f"{name} reduces over devices ({error}). If it is written for one device of several, as for "
        "jax.pmap, say so: parallelize(step, axis_name='...')"
    )


@dataclass(frozen=True, slots=True, eq=False)
class CallOfOne:
    """A call of a step that is written for one device; options as given to `parallelize`."""

    fun: Callable[..., Pytree]
    name: str
    call: Call
    device: PerDevice
    state_argnums: Sequence[int] | None
    batch_argnums: Sequence[int]
    static: NamedArguments

    def everywhere(self) -> tuple[Callable[..., Pytree], list[str]]:
        """Makes the function of global arrays that all N devices compute together; and notes on what differs between
        devices, complete once the function was traced.

        Raises ArgumentsError if the devices can't divide the examples. Raises StateError if the state can't be found,
        or differs between devices.
        """
        args, _ = self.call.shapes
        device, count = self.device, self.device.count
        states, block, keys = self._first_look()
        axes = self._example_axes(states, keys)
        notes = [f"each device's number is used ({where})" for where in _numbers_used(block, device.axis)]
        notes += own_sums(block, axes, device.axis, count)
        paths = [input_.path for input_ in describe_leaves(self.call, states, None)[0]]
        notes += [f"{paths[k]} is a key: every device has the same" for k in sorted(keys)]
        dynamic = [k for k in range(len(args)) if k not in self.static]

        @functools.wraps(self.fun)
        def whole(*args: Pytree, **kwargs: Pytree) -> Pytree:
            flat, tree = jax.tree.flatten(self.static.others(args, kwargs))
            shared = [_shared(x, axis, count) for x, axis in zip(flat, axes, strict=True)]
            returned = None

            def of_one(*leaves: Leaf) -> Sequence[Pytree]:
                nonlocal returned
                own, own_named = jax.tree.unflatten(tree, leaves)
                every = list(args)
                for k, value in zip(dynamic, own, strict=True):
                    every[k] = value
                results, returned = jax.tree.flatten(self.fun(*every, **{**kwargs, **own_named}))
                return results

            results, along = jax_compat.vmap_inferred(of_one, axes, device.axis, count)(*shared)
            assert returned is not None, "the step was traced"
            _check_states(self.name, self.call, states, along, device.axis)
            paths = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(returned.unflatten(results))]
            own = [path or "output" for path, axis in zip(paths, along, strict=True) if axis is not None]
            kept = [f"result {path} is each device's own: stacked, [devices, ...]" for path in own]
            notes[:] = [text for text in notes if "stacked" not in text] + kept
            pairs = zip(results, along, strict=True)
            return returned.unflatten([x if axis is None else jax.numpy.moveaxis(x, axis, 0) for x, axis in pairs])

        return whole, notes

    def _example_axes(self, states: States, keys: Collection[int]) -> list[int | None]:
        """Returns for each leaf the axis that devices divide; None for states and single keys, which each has whole."""
        inputs, _ = describe_leaves(self.call, states, None)
        shapes = [t.shape for a in self.call.arguments for t in a.types]
        examples = [k for k, input_ in enumerate(inputs) if input_.role != "state"]
        batch_axes = example_axes(self.device.batch_axis, [(inputs[k].path, shapes[k]) for k in examples])
        axes: list[int | None] = [None] * len(inputs)
        for k, axis in zip(examples, batch_axes, strict=True):
            if k in keys:
                continue
            axes[k] = axis
            if axis is not None and shapes[k][axis] % self.device.count:
                raise ArgumentsError(
                    f"{inputs[k].path} has {shapes[k][axis]} examples (axis {axis}), which {self.device.count} devices "
                    f"can't share equally: {self.name} is written for one device (axis_name={self.device.axis!r}). "
                    "Give a batch of a multiple, or say what is no example: batch_axis={'...': None}"
                )
        return axes

    def _first_look(self) -> tuple[States, Block, frozenset[int]]:
        """Returns the state, the program of one device, and the leaves that are single keys. Leaves that may be keys
        are whole at first; if the step fails so, it takes them as examples."""
        if self.state_argnums is None:
            return self._looked(None)
        named = States({k: 0 for k, a in enumerate(self.call.arguments) if a.position in self.state_argnums})
        may_be = frozenset(self._may_be_keys(named))
        try:
            look = self._looked(self._example_axes(named, may_be))
        except Exception:
            if not may_be:
                raise
            return self._shared_all(named, may_be)
        keys = look[2]
        return look if keys == may_be else self._looked(self._example_axes(named, keys))

    def _shared_all(self, states: States, may_be: Collection[int]) -> tuple[States, Block, frozenset[int]]:
        """Takes the first look with shards of all examples, including leaves that may be keys."""
        try:
            return self._looked(self._example_axes(states, ()))
        except Exception as error:
            paths = [input_.path for input_ in describe_leaves(self.call, states, None)[0]]
            names = [paths[k] for k in sorted(may_be)]
            error.add_note(
                f"autopar gave each of {self.device.count} devices its part of {', '.join(names)}. If one is a single "
                f"key, every device needs all of it: batch_axis={{{names[0]!r}: None}}"
            )
            raise

    def _is_key(self, path: str, block: Block, k: int) -> bool:
        """Says whether a leaf is used as a single key; raises ArgumentsError if it is unclear."""
        use = use_as_key(block, block.inputs[k])
        if use == "unclear":
            raise ArgumentsError(
                f"{path} is uint32{list(block.inputs[k].shape)} and becomes part of a PRNG key in {self.name} in a way "
                "that autopar doesn't follow: are these numbers the words of one key, which every device has, or those "
                f"of examples, which devices share? Say which: batch_axis={{{path!r}: None}} for a key, "
                f"batch_axis={{{path!r}: {len(block.inputs[k].shape) - 1}}} for examples"
            )
        return use == "key"

    def _may_be_keys(self, states: States) -> list[int]:
        """Returns uint32 leaves whose axis of examples may be that of a key's words, unless the user gave their axis by
        name."""
        inputs, _ = describe_leaves(self.call, states, None)
        types = [t for a in self.call.arguments for t in a.types]
        examples = [k for k, input_ in enumerate(inputs) if input_.role != "state"]
        axes = example_axes(self.device.batch_axis, [(inputs[k].path, types[k].shape) for k in examples])
        batch_axis = self.device.batch_axis
        named = [p for p in batch_axis if p not in ("*", "**")] if isinstance(batch_axis, Mapping) else []
        may_be = [k for k, axis in zip(examples, axes, strict=True) if may_be_words(types[k], axis)]
        return [k for k in may_be if not any(matches(p, inputs[k].path) for p in named)]

    def _looked(self, axes: Sequence[int | None] | None) -> tuple[States, Block, frozenset[int]]:
        """Takes the first look with a device's shard along these axes; None: with whole arguments."""
        args, kwargs = self.call.shapes
        statics = self.static.of_call(args, kwargs)
        fixed = {n: v for n, v in kwargs.items() if n in statics}
        shapes = self.static.others(args, kwargs)
        if axes is not None:
            leaves, tree = jax.tree.flatten(shapes)
            shapes = tree.unflatten([_share(x, axis, self.device.count) for x, axis in zip(leaves, axes, strict=True)])

        def of_one(positional: Pytree, by_name: Pytree) -> Pytree:
            rest = iter(positional)
            return self.fun(*(statics[k] if k in statics else next(rest) for k in range(len(args))), **by_name, **fixed)

        try:
            traced = jax.make_jaxpr(of_one, axis_env=[(self.device.axis, self.device.count)], return_shape=True)
            jaxpr, outputs = traced(*shapes)
        except Exception as error:
            count = self.device.count
            stacked = [a.name for a in self.call.arguments if a.types and all(t.shape[:1] == (count,) for t in a.types)]
            if stacked:
                error.add_note(
                    f"All leaves of {' and of '.join(stacked)} have {count} along their first axis, as many as "
                    "there are devices. Unlike jax.pmap, autopar takes the state once, a single key, and the whole "
                    "batch, [examples, ...]"
                )
            elif self.state_argnums is None:
                error.add_note(
                    f"autopar traced {self.name} with the whole batch on each device, to see which arguments are "
                    "state. If the step relies on the size of its shard, name them: "
                    "parallelize(step, state_argnums=...)"
                )
            raise
        block = block_of(jaxpr)
        states = match_states(self.call, block, outputs, self.state_argnums, self.batch_argnums)
        paths = [input_.path for input_ in describe_leaves(self.call, states, None)[0]]
        keys = frozenset(k for k in self._may_be_keys(states) if self._is_key(paths[k], block, k))
        return states, block, keys


def _share(shape: Leaf, axis: int | None, count: int) -> Leaf:
    if axis is None:
        return shape
    sizes = (*shape.shape[:axis], shape.shape[axis] // count, *shape.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(sizes, shape.dtype, weak_type=shape.weak_type)


def _numbers_used(block: Block, axis: str) -> Iterator[str]:
    return iter(dict.fromkeys(e.where for e in block.walk() if e.op == "axis_index" and e.params["axis_name"] == axis))


def _shared(x: Leaf, axis: int | None, count: int) -> Leaf:
    if axis is None:
        return x
    return jax.numpy.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))


def _check_states(name: str, call: Call, states: States, along: Sequence[int | None], axis: str) -> None:
    for k, first in states.outputs.items():
        argument = call.arguments[k]
        for path, differs in zip(argument.paths, along[first : first + len(argument.paths)], strict=True):
            if differs is not None:
                raise StateError(
                    f"{name} gives each device another {path or argument.name!r}: it is made of the device's own "
                    f"examples and never reduced. Reduce it in the step, jax.lax.pmean(..., {axis!r}), as is done with "
                    "gradients (batch statistics, too)"
                )
