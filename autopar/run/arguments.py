"""Finds the arguments of a call that are state, and names all leaves.

An argument is state if the step returns it updated: its structure, shapes and dtypes are those of the output or of a
part of it, and some leaf's new value depends on the old one. A lone array is state only if everything before it is
(`step(w, batch) -> (w, loss)`), because inputs and outputs of one shape are common otherwise (an autoencoder's).
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.flow import carried
from autopar.errors import ArgumentsError, StateError
from autopar.ir.layout import RowLayout
from autopar.ir.paths import path_name
from autopar.ir.program import ArrayType, Block, Input, Output
from autopar.ir.stacked import StackIndex
from autopar.jax_types import Leaf, Pytree, PyTreeDef
from autopar.tables.kinds import is_table, layout_of, spread_as, stack_index_of

#: A layout and its row axis.
Layout = tuple[RowLayout, int]


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """One flattened argument. `position` is None for a keyword argument; `layouts` are those of leaves that are Tables,
    `spread` those that arrays amount to, and `stack_indices` those of leaves in stacks of tables."""

    name: str
    position: int | None
    treedef: PyTreeDef
    types: tuple[ArrayType, ...]
    paths: tuple[str, ...]
    layouts: tuple[Layout | None, ...]
    spread: tuple[Layout | None, ...]
    stack_indices: tuple[StackIndex | None, ...]

    @property
    def key(self) -> int | str:
        """The position, or the name of a keyword argument."""
        return self.name if self.position is None else self.position

    @property
    def is_lone_array(self) -> bool:
        return jax.tree_util.treedef_is_leaf(self.treedef)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call: its dynamic arguments in JAX's order, shapes with static arguments in place, and a hashable key."""

    arguments: tuple[Argument, ...]
    shapes: tuple[Pytree, Mapping[str, Pytree]]
    key: Any

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """Layouts of all leaves; None for leaves that are no Tables."""
        return tuple(layout for a in self.arguments for layout in a.layouts)

    def read_layouts(self, parameters: Set[int], devices: int) -> tuple[Layout | None, ...]:
        """Returns the layouts that a step on `devices` devices reads in place: those of Tables, and of arrays among an
        evaluation's parameters."""
        spread = [layout for a in self.arguments for layout in a.spread]
        found = (table or (spread[k] if k in parameters else None) for k, table in enumerate(self.layouts))
        return tuple(layout if layout is not None and layout[0].devices == devices else None for layout in found)

    def read_stack_indices(self, devices: int) -> tuple[StackIndex | None, ...]:
        """Returns where leaves lie in stacks, which a step on `devices` devices reads in place."""
        indices = (index for a in self.arguments for index in a.stack_indices)
        return tuple(index if index is not None and index.shape.devices == devices else None for index in indices)


def shape_of(leaf: Leaf, path: str, remedy: str) -> Leaf:
    """Returns a leaf's shape, dtype and weak type, as JAX traces it; raises ArgumentsError if it is no array, number or
    shape. `path` and `remedy` are for the error."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_table(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "is_weak", False))
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        what = f"array of {leaf.dtype}" if hasattr(leaf, "dtype") else f"{type(leaf).__name__}: {reprlib.repr(leaf)}"
        if callable(leaf) and "/" in path:
            remedy += "; steps of Equinox's modules, with functions among their leaves, are for "
            remedy += "autopar.integrations.equinox.parallelize"
        raise ArgumentsError(
            f"the step's argument {path} is no array of numbers ({what}). Make it one, or {remedy}"
        ) from error
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def parameter_names(fun: Callable[..., Pytree], count: int) -> list[str]:
    """Returns names of the positional arguments, as far as the signature has them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return [f"argument{k}" for k in range(count)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return named[:count] + [f"argument{k}" for k in range(len(named), count)]


def read_call(
    fun: Callable[..., Pytree], args: Sequence[Pytree], kwargs: Mapping[str, Pytree], static: NamedArguments
) -> Call:
    """Flattens a call. Leaves may be arrays, tracers or ShapeDtypeStructs. Raises ArgumentsError if a leaf is no array,
    or a static argument can't be hashed."""
    names = parameter_names(fun, len(args))
    arguments: list[Argument] = []
    shaped: list[Any] = []
    for k, value in enumerate(args):
        if k in static:
            shaped.append(value)
            continue
        argument, shapes = _argument(names[k], k, value)
        arguments.append(argument)
        shaped.append(shapes)
    shaped_kwargs = {}
    for name in sorted(kwargs):
        if name in static:
            shaped_kwargs[name] = kwargs[name]
        else:
            argument, shaped_kwargs[name] = _argument(name, None, kwargs[name])
            arguments.append(argument)
    statics = static.of_call(args, kwargs)
    key = (static_key(statics), tuple((a.name, a.treedef, a.types) for a in arguments))
    try:
        hash(key)
    except TypeError as error:
        raise ArgumentsError(_unhashable(statics, names, error)) from error
    return Call(tuple(arguments), (tuple(shaped), shaped_kwargs), key)


def static_key(statics: Mapping[int | str, Any]) -> Any:
    """Returns a key of static arguments that, as in `jax.jit`, tells 1, 1.0 and True apart."""
    return tuple((key, type(value), value) for key, value in statics.items())


def _unhashable(statics: Mapping[int | str, Any], names: Sequence[str], cause: TypeError) -> str:
    what = "an argument's structure can't be hashed"
    for key, value in statics.items():
        try:
            hash(value)
        except TypeError:
            which = names[key] if isinstance(key, int) else key
            what = f"the static argument {which} is a {type(value).__name__}, which can't be hashed"
    return (
        f"{what} ({cause}). Each value of a static argument has a plan of its own, so it must be hashable (a tuple, a "
        "frozen dataclass). Arrays are ordinary arguments: leave them out of static_argnums and static_argnames"
    )


def check_positions(call: Call, states: Sequence[int] | None, batches: Sequence[int] | None) -> None:
    """Checks that `state_argnums` and `batch_argnums` name arguments of the call, none of them twice, or raises
    ArgumentsError."""
    known = {a.position for a in call.arguments if a.position is not None}
    for option, positions in (("state_argnums", states), ("batch_argnums", batches)):
        for k in positions or ():
            if k not in known:
                raise ArgumentsError(
                    f"{option} names argument {k}; the step was called with {sorted(known)} by position. "
                    "Pass what it names by position"
                )
    both = set(states or ()).intersection(batches or ())
    if both:
        raise ArgumentsError(f"argument {min(both)} is in state_argnums and in batch_argnums")


def _argument(name: str, position: int | None, value: Pytree) -> tuple[Argument, Pytree]:
    """Flattens an argument; returns it and its shapes as a tree."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    paths = tuple(path_name(p) for p, _ in leaves)
    if jax.tree_util.treedef_is_leaf(treedef):
        option = f"static_argnames={name!r}" if position is None else f"static_argnums={position}"
        remedy = f"say that it is static: parallelize(step, {option})"
    else:
        remedy = f"take it out of {name!r} before the step is called"
    shapes = [shape_of(x, f"{name}/{path}".rstrip("/"), remedy) for path, (_, x) in zip(paths, leaves, strict=True)]
    types = tuple(map(type_of_shape, shapes))
    layouts = tuple(layout_of(leaf) for _, leaf in leaves)
    spread = tuple(spread_as(leaf) for _, leaf in leaves)
    indices = tuple(stack_index_of(leaf) for _, leaf in leaves)
    argument = Argument(name, position, treedef, types, paths, layouts, spread, indices)
    return argument, jax.tree.unflatten(treedef, shapes)


def type_of_shape(shape: Leaf) -> ArrayType:
    return ArrayType(tuple(shape.shape), shape.dtype, bool(getattr(shape, "weak_type", False)))


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The arguments that are state: index in the call -> first output leaf of the new value."""

    outputs: Mapping[int, int]

    def confirmed(self, call: Call, block: Block, top: frozenset[tuple[int, Any]]) -> States:
        """Drops arguments that only look like state: a parameter's gradient has its form, and a batch may be returned
        unchanged. `top`: as `tops` returns it."""
        added, scaled = carried(block, scaled="never"), carried(block, scaled="ever")
        sure, likely, start = {}, {}, 0
        for k, argument in enumerate(call.arguments):
            first = self.outputs.get(k)
            if first is not None:
                pairs = [(start + n, first + n) for n in range(len(argument.types))]
                new = [(i, o) for i, o in pairs if block.outputs[o] is not block.inputs[i]]
                if any(added[o] >> i & 1 for i, o in new):
                    sure[k] = first
                elif (first, argument.treedef) in top and any(scaled[o] >> i & 1 for i, o in new):
                    likely[k] = first
            start += len(argument.types)
        return States(sure | likely if sure else {})


def tops(tree: Pytree) -> frozenset[tuple[int, Pytree]]:
    """Returns first leaf and structure of the whole output and of each of its outermost parts."""
    parts, start = {(0, tree)}, 0
    for child in tree.children():
        parts.add((start, child))
        start += child.num_leaves
    return frozenset(parts)


def find_states(
    call: Call, outputs: Pytree, state_argnums: Sequence[int] | None, batch_argnums: Sequence[int] = ()
) -> States:
    """Matches arguments with outputs, a pytree of ShapeDtypeStructs. Without `state_argnums` any argument may be state,
    except those of `batch_argnums`.

    Raises StateError if a named state, or what looks like one, isn't returned as it was given. Raises ArgumentsError if
    two arguments could be the state.
    """
    leaves, treedef = jax.tree.flatten(outputs)
    nodes = list(subtrees(treedef))
    types = [type_of_shape(leaf) for leaf in leaves]
    claimed: list[tuple[int, int]] = []
    starts: dict[int, int] = {}
    for k, argument in enumerate(call.arguments):
        named = state_argnums is not None and argument.position in state_argnums
        if (state_argnums is not None and not named) or not argument.types or argument.position in batch_argnums:
            continue
        lone = argument.is_lone_array and not named
        if lone and any(j not in starts for j in range(k) if call.arguments[j].types):
            continue
        start = next(_find(argument, nodes, types, claimed), None)
        if start is not None:
            starts[k] = start
            claimed.append((start, start + len(argument.types)))
        elif not lone:
            _check_missing(call, argument, nodes, types, starts, named)
    _check_lone(call, starts, treedef, state_argnums)
    return States(starts)


def subtrees(treedef: PyTreeDef) -> Iterator[tuple[Pytree, int]]:
    """Yields all subtrees with the index of their first leaf, outer ones first."""
    queue = [(treedef, 0)]
    while queue:
        node, first = queue.pop(0)
        yield node, first
        for child in node.children():
            queue.append((child, first))
            first += child.num_leaves


def _find(
    argument: Argument, nodes: Sequence[tuple[Any, int]], types: Sequence[ArrayType], claimed: Sequence[tuple[int, int]]
) -> Iterator[int]:
    """Yields first leaves of outputs that have the argument's form and don't overlap with claimed ranges."""
    size = len(argument.types)
    for node, start in nodes:
        if node != argument.treedef or any(a < start + size and start < b for a, b in claimed):
            continue
        if all(alike(a, b) for a, b in zip(argument.types, types[start : start + size], strict=True)):
            yield start


def possible_starts(argument: Argument, outputs: Pytree, claimed: Sequence[tuple[int, int]]) -> list[int]:
    """Returns first leaves of all outputs of an argument's form that don't overlap with claimed ranges of leaves."""
    leaves, treedef = jax.tree.flatten(outputs)
    return list(_find(argument, list(subtrees(treedef)), [type_of_shape(leaf) for leaf in leaves], claimed))


def alike(a: ArrayType, b: ArrayType) -> bool:
    """Says whether types are equal but for weakness, which a step may change."""
    return a.shape == b.shape and a.dtype == b.dtype


def _check_missing(
    call: Call,
    argument: Argument,
    nodes: Sequence[tuple[Any, int]],
    types: Sequence[ArrayType],
    starts: Mapping[int, int],
    named: bool,
) -> None:
    """Raises if an argument without a matching output was meant to be state, or has the same form as the one that was
    matched."""
    twin = next((j for j in starts if _same_form(call.arguments[j], argument)), None)
    if twin is not None:
        raise ArgumentsError(
            f"arguments {call.arguments[twin].name!r} and {argument.name!r} have the same form, and the step returns "
            "only one like them: say which is the state, parallelize(step, state_argnums=...)"
        )
    size = len(argument.types)
    lone = argument.is_lone_array
    near = next((start for node, start in nodes if node == argument.treedef and not lone), None)
    pairs = (
        list(zip(argument.paths, argument.types, types[near : near + size], strict=True)) if near is not None else []
    )
    same_shapes = sum(old.shape == new.shape for _, old, new in pairs)
    if pairs and (named or (not starts and size > 1 and 2 * same_shapes > size)):
        path, old, new = next(p for p in pairs if not alike(p[1], p[2]))
        raise StateError(
            f"the step returns {argument.name!r} with another type at {path or 'its only leaf'}: {new}, and was given "
            f"{old}. Cast it in the step, or say parallelize(step, state_argnums=()) if it is no state"
        )
    if named:
        raise StateError(
            f"state_argnums names {argument.name!r}, but the step returns nothing of its structure. Return the new "
            "value of every state"
        )


def _same_form(a: Argument, b: Argument) -> bool:
    return a.treedef == b.treedef and len(a.types) > 1 and all(map(alike, a.types, b.types))


def _check_lone(call: Call, starts: Mapping[int, int], treedef: PyTreeDef, state_argnums: Sequence[int] | None) -> None:
    """Refuses a lone output of the first argument's shape: it may be a new state or a prediction."""
    if state_argnums is not None or list(starts) != [0] or not jax.tree_util.treedef_is_leaf(treedef):
        return
    others = [a for a in call.arguments[1:] if not a.is_lone_array]
    if others:
        raise ArgumentsError(
            f"can't tell whether {call.arguments[0].name!r} is the state: the output has its shape. Say "
            "parallelize(step, state_argnums=(0,)) if it is, or state_argnums=() if the step only reads its arguments"
        )


def describe_leaves(
    call: Call, states: States, outputs: Pytree, devices: int = 1
) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """Returns paths and roles of all leaves. Paths of a lone state have no argument's name before them.

    A Table that is no state is read in place if it is divided over as many devices as the step.
    """
    several = len(states.outputs) > 1
    layouts, stack_indices = call.read_layouts(frozenset(), devices), call.read_stack_indices(devices)
    inputs: list[Input] = []
    new: dict[int, int] = {}
    for k, argument in enumerate(call.arguments):
        is_state = k in states.outputs
        lead = argument.name if several or not is_state else ""
        for n, path in enumerate(argument.paths):
            if is_state:
                new[states.outputs[k] + n] = len(inputs)
            full = "/".join(p for p in (lead, path) if p) or argument.name
            layout = layouts[len(inputs)]
            inputs.append(
                Input(full, "state")
                if is_state
                else Input(full, "batch" if layout is None else "table", layout, stack_indices[len(inputs)])
            )
    flat, _ = jax.tree_util.tree_flatten_with_path(outputs)
    outs = [Output(path_name(p) or "output", new.get(i)) for i, (p, _) in enumerate(flat)]
    return tuple(inputs), tuple(outs)


def call_difference(old: Call, new: Call) -> str | None:
    """Names the first leaf whose shape or dtype changed; None if only weak types did."""
    for a, b in zip(old.arguments, new.arguments, strict=True):
        if a.treedef != b.treedef:
            return f"{b.name} has another structure: {_structure_difference(a.treedef, b.treedef)}"
        for path, x, y in zip(a.paths, a.types, b.types, strict=True):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"{'/'.join(p for p in (b.name, path) if p)} was {x} and is {y}"
    for (_, _, before), (key, _, now) in zip(old.key[0], new.key[0], strict=False):
        if type(before) is not type(now) or before != now:
            which = f"argument {key}" if isinstance(key, int) else key
            return f"a static argument changed: {which} was {reprlib.repr(before)} and is {reprlib.repr(now)}"
    given = {key for key, *_ in old.key[0]} ^ {key for key, *_ in new.key[0]}
    return f"a static argument changed: {', '.join(map(str, given))}, which one call isn't given" if given else None


def _structure_difference(old: PyTreeDef, new: PyTreeDef) -> str:
    """Names the outermost node in which two structures differ."""
    (kind, before), (now_kind, now) = (treedef.node_data() or (None, None) for treedef in (old, new))
    if kind is None or kind is not now_kind:
        return " became ".join("a leaf" if k is None else f"a {k.__name__}" for k in (kind, now_kind))
    if before != now:
        return _metadata_difference(kind, before, now)
    children = old.children(), new.children()
    if len(children[0]) != len(children[1]):
        return f"the length of a {kind.__name__}: {len(children[0])} became {len(children[1])}"
    return next(_structure_difference(x, y) for x, y in zip(*children, strict=True) if x != y)


def _metadata_difference(kind: type, old: Leaf, new: Leaf) -> str:
    """Names what two nodes of one kind have besides their leaves: keys, or static fields."""
    name = f"the keys of a {kind.__name__}" if issubclass(kind, dict) else f"static data of a {kind.__name__}"
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        k = next(k for k, (x, y) in enumerate(zip(old, new, strict=True)) if x != y)
        old, new = old[k], new[k]
        fields = getattr(kind, "__dataclass_fields__", {}).values()
        static = [f.name for f in fields if not f.metadata.get("pytree_node", True)]
        name = f"{kind.__name__}.{static[k]}" if k < len(static) else name
    if " at 0x" in repr(new):  # functions, and what holds them, are equal to themselves alone
        return f"{name} is another object. Make it once, and give it to each state"
    return f"{name}: {reprlib.repr(old)} became {reprlib.repr(new)}"


def note_cause(call: Call, fun: Callable[..., Pytree], error: Exception) -> None:
    """Notes on the error of a step that can't be traced what its arguments, or its objects, may have to do with it."""
    if isinstance(error, TypeError) and any(word in str(error) for word in ("concrete", "traced array")):
        _note_python_numbers(call, error)
    elif "trace level" in str(error) and "flax" in sys.modules:
        runs = "autopar.integrations.nnx.parallelize runs steps that change such objects, and is given them"
        how = f": {fun.__func__.__qualname__}, called with the object first" if inspect.ismethod(fun) else ""
        error.add_note(f"{step_name(fun)} changes objects of flax.nnx that aren't among its arguments. {runs}{how}")


def _note_python_numbers(call: Call, error: TypeError) -> None:
    for a in call.arguments:
        # Python's numbers are weak, but for bools.
        if a.is_lone_array and a.types[0].shape == () and (a.types[0].weak_type or a.types[0].dtype == bool):
            option = f"static_argnames={a.name!r}" if a.position is None else f"static_argnums={a.position}"
            error.add_note(
                f"{a.name} is a number, which the step gets as a traced array. If the step needs its value "
                f"(an if, a shape), say parallelize(step, {option}): each of its values then gets a plan of its own"
            )


# --- the arguments that options of `parallelize` name, by position or by keyword ---


@dataclass(frozen=True, slots=True)
class NamedArguments:
    """Arguments that are named by position or by keyword, as by `static_argnums` and `static_argnames`. False if there
    are none."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.argnums or self.argnames)

    def __contains__(self, key: int | str) -> bool:
        return key in self.argnums or key in self.argnames

    def __or__(self, other: NamedArguments) -> NamedArguments:
        return NamedArguments(
            tuple(sorted({*self.argnums, *other.argnums})), tuple(sorted({*self.argnames, *other.argnames}))
        )

    @property
    def static_options(self) -> Mapping[str, Any]:
        """The options of `jax.jit` for static arguments."""
        return {"static_argnums": self.argnums, "static_argnames": self.argnames}

    def of_call(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> dict[int | str, Pytree]:
        """Returns a call's named arguments, by position or name."""
        return {k: v for k, v in (*enumerate(args), *sorted(kwargs.items())) if k in self}

    def others(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> tuple[list[Pytree], dict[str, Pytree]]:
        return [a for k, a in enumerate(args) if k not in self], {k: v for k, v in kwargs.items() if k not in self}


def static_arguments(
    step: Callable[..., Pytree], argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
) -> NamedArguments:
    """Returns the static arguments: those of `parallelize`, and of a `jax.jit` around the step."""
    return _named(step, "static", argnums, argnames) | _jitted(step, "static")


def donated_arguments(
    step: Callable[..., Pytree],
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str] | None,
    static: NamedArguments,
    donate: bool,
) -> NamedArguments | None:
    """Returns the donated arguments: those that the user names, or else those of a `jax.jit` around the step. None if
    nobody names any; then `donate` decides. Raises ArgumentsError if one of them is static, or `donate` is False."""
    if argnums is None and argnames is None:
        return _jitted(step, "donate") or None
    donated = _named(step, "donate", argnums, argnames)
    both = [k for k in (*donated.argnums, *donated.argnames) if k in static]
    if both:
        raise ArgumentsError(f"argument {both[0]!r} is static and donated: only arrays can be donated")
    if donated and not donate:
        raise ArgumentsError("donate=False, and donate_argnums or donate_argnames name arguments: leave one out")
    return donated


def positions_of(
    step: Callable[..., Pytree], option: str, positions: int | Sequence[int] | None
) -> tuple[int, ...] | None:
    """Returns positions of arguments; negative ones count from the last parameter."""
    if positions is None:
        return None
    several = isinstance(positions, Iterable) and not isinstance(positions, (str, bytes))
    numbers: tuple[Leaf, ...] = tuple(cast(Any, positions)) if several else (positions,)
    if not all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) for k in numbers):
        raise ArgumentsError(f"{option}={positions!r}: give positions of the step's arguments, whole numbers from 0")
    parameters = _parameters(step)
    if parameters is None:
        return numbers
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for k in numbers:
        if k < -count or (k >= count and not open_ended):
            by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            names = option.replace("argnums", "argnames")
            hint = f". Name what is passed by keyword: {names}={by_keyword[0]!r}" if by_keyword else ""
            raise ArgumentsError(f"{option} names argument {k}; {step_name(step)} takes {count}, numbered from 0{hint}")
    return tuple(int(k) + count if k < 0 else int(k) for k in numbers)


def _named(
    step: Callable[..., Pytree], kind: str, argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
) -> NamedArguments:
    """Returns the arguments that an option and its sibling name. As in `jax.jit`, one follows from the other if it
    isn't given."""
    numbers, names = positions_of(step, f"{kind}_argnums", argnums), _names_of(step, f"{kind}_argnames", argnames)
    either = {k: p.name for k, p in enumerate(_parameters(step) or ()) if p.kind is p.POSITIONAL_OR_KEYWORD}
    if numbers is None:
        numbers = tuple(k for k, name in either.items() if name in (names or ()))
    elif names is None:
        names = tuple(name for k, name in either.items() if k in numbers)
    return NamedArguments(numbers, names or ())


def _names_of(step: Callable[..., Pytree], option: str, given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names: tuple[Any, ...] = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentsError(f"{option}={given!r}: give names of the step's arguments, strings")
    parameters = _parameters(step)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return names
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in names:
        if name not in known:
            raise ArgumentsError(f"{option} names {name!r}; {step_name(step)} takes {', '.join(known)} by keyword")
    return names


def _jitted(step: Callable[..., Pytree], kind: str) -> NamedArguments:
    argnums, argnames = jax_compat.jit_arguments(step, kind)
    return NamedArguments(positions_of(step, f"{kind}_argnums", argnums) or (), argnames)


def _parameters(step: Callable[..., Pytree]) -> Sequence[inspect.Parameter] | None:
    try:
        return tuple(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None


def step_name(step: Callable[..., Pytree]) -> str:
    """Returns the name of a function or callable object in messages; of a `functools.partial` that of its function."""
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__name__", type(step).__name__)
