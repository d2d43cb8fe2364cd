"""Steps of `flax.nnx` that change models and optimizers in place, as under `nnx.jit`.

    from autopar.integrations import nnx as anx

    @anx.parallelize
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["ids"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    loss = train_step(model, optimizer, batch)  # model and optimizer have the new values

An nnx object is split into its graph, which is static, and the values of its Variables, which are arguments of an
ordinary step. That one is planned (`autopar.parallelize`), and its results are put into the user's objects. Each
structure of the objects has one ordinary step.

Invariants: the ordinary step doesn't return an object whose values didn't change, so that an evaluation gathers no
table; objects that arguments share are one object inside, too; changes of structure (a new Variable, a static
attribute) are made to the user's objects, as by `nnx.jit`.

A planned step may keep a table as an `autopar.Table` or an `autopar.DeferredTable`. Such a leaf stays inside its
Variable; `variable[...]`, which nnx's own layers read, gives the true rows, and `materialize(model)` puts ordinary
arrays in place for everything else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

import autopar
from autopar.errors import ArgumentsError
from autopar.interrupts import uninterrupted
from autopar.jax_types import Leaf, Pytree
from autopar.run.arguments import NamedArguments
from autopar.run.object_step import ObjectStep
from autopar.run.step import ParallelStep
from autopar.tables.leaf import TableLeaf

#: The name of nnx's record of pairs of inner and outer objects.
_TAG = "autopar"


@dataclass(frozen=True)
class Values:
    """The values of an nnx object, as a pytree with leaves named as in the object. `key` (which argument, which
    object of it) keeps two objects of one form apart."""

    key: tuple[Any, ...]
    paths: tuple[str, ...]
    leaves: tuple[Leaf, ...]


def _flatten_values(values: Values) -> tuple[list[tuple[Pytree, Pytree]], Pytree]:
    keys = map(jax.tree_util.GetAttrKey, values.paths)
    return list(zip(keys, values.leaves, strict=True)), (values.key, values.paths)


def _unflatten_values(data: Leaf, leaves: Leaf) -> Values:
    key, paths = data
    return Values(key, paths, tuple(leaves))


jax.tree_util.register_pytree_with_keys(Values, _flatten_values, _unflatten_values)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Graphs:
    """Structures of nnx objects by key; static in the arguments and results of the ordinary step."""

    found: tuple[tuple[Leaf, Leaf], ...]


def parallelize(step: Callable[..., Pytree] | None = None, /, **options: Any) -> Any:
    """Runs a step of nnx objects by a plan.

    Args:
      step: A function as for `nnx.jit`: of nnx objects (modules, optimizers, metrics, Rngs, also within containers) and
        arrays, which may change the objects.
      **options: As for `autopar.parallelize`. Positions are those of the step's own arguments.

    Returns:
      An `NnxStep`, which you call like `step`; `autopar.explain`, `autopar.verify`, `.plan` and `.lower(...)` work.

    Raises:
      ArgumentsError: an option that doesn't exist; an argument that mixes objects and arrays.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from autopar.integrations import nnx as anx
      >>> model = nnx.Embed(100_000, 8, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> @anx.parallelize
      ... def train_step(model, optimizer, ids):
      ...     loss, grads = nnx.value_and_grad(lambda m: (m(ids) ** 2).sum())(model)
      ...     optimizer.update(model, grads)
      ...     return loss
      >>> before = float(train_step(model, optimizer, jnp.array([3, 5])))
      >>> float(train_step(model, optimizer, jnp.array([3, 5]))) < before
      True
    """
    if step is None:
        return lambda fun: parallelize(fun, **options)
    if inspect.ismethod(step) and isinstance(step.__self__, nnx.Module):
        name = step.__func__.__qualname__
        raise ArgumentsError(
            f"{step.__name__} is bound to an object, which a step has to be given to change it: parallelize({name}), "
            "called with the object first"
        )
    autopar.parallelize(step, **options)  # raises for wrong options
    return NnxStep(step, options)


def materialize(*objects: Any) -> None:
    """Puts ordinary arrays in place of the Tables in nnx objects: for `nnx.jit`, `nnx.split`, saving. The next planned
    step takes them as well, and keeps its tables as before."""
    with nnx.split_context() as context:
        for node in objects:
            for _, leaf in context.flatten(node)[1]:
                if isinstance(leaf, nnx.Variable) and isinstance(raw := leaf.get_raw_value(), TableLeaf):
                    leaf.set_raw_value(autopar.materialize(raw))


@dataclass(eq=False, repr=False)
class NnxStep(ObjectStep):
    """A step of nnx objects that runs by a plan; made by `parallelize`."""

    @uninterrupted
    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        with nnx.update_context(_TAG):
            split, args, kwargs = self._split(args, kwargs)
            out, graphs, *new = self._step(split.structure)(*args, **kwargs)
            if graphs is None:
                split.update(new)
                return out
            with nnx.merge_context(_TAG, inner=False) as context:
                return _merged([new, out], dict(graphs.found), context)[1]

    def pure(
        self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]
    ) -> tuple[ParallelStep, Sequence[Pytree], Mapping[str, Pytree]]:
        with nnx.update_context(_TAG):
            split, args, kwargs = self._split(args, kwargs)
        return self._step(split.structure), args, kwargs

    @functools.cached_property
    def _static(self) -> NamedArguments:
        return autopar.parallelize(self.fun, **self.options).static

    def _split(
        self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]
    ) -> tuple[_Split, tuple[Pytree, ...], dict[str, Pytree]]:
        """Returns the splitter of a call, and the arguments of the ordinary step."""
        with nnx.split_context(_TAG) as context:
            split = _Split(context)
            pure_args = tuple(a if k in self._static else split(k, a) for k, a in enumerate(args))
            pure_kwargs = {k: a if k in self._static else split(k, a) for k, a in kwargs.items()}
        return split, pure_args, pure_kwargs

    def _step(self, graphs: Graphs) -> ParallelStep:
        change = "the nnx objects have another structure (a Variable, a static attribute)"
        remedy = "Keep what changes from call to call in Variables"
        static = self._static.static_options
        make = lambda: autopar.parallelize(_pure(self.fun, dict(graphs.found)), **{**self.options, **static})  # noqa: E731
        return self._step_of(graphs, make, change, remedy)


class _Split:
    """Takes nnx objects out of arguments, and remembers their structure and Variables by key."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.graphs: dict[Any, Any] = {}
        self.variables: dict[Any, list[Any]] = {}

    def __call__(self, name: Any, tree: Pytree) -> Pytree:
        """Returns the tree with Values in place of objects."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_object)
        objects = list(map(_is_object, leaves))
        if any(objects) and not all(objects) and name is not _OUT:
            other = next(x for x, is_object in zip(leaves, objects, strict=True) if not is_object)
            raise ArgumentsError(
                f"argument {name!r} holds nnx objects and something else (a {type(other).__name__}) together: "
                "pass each as an argument of its own, or keep the arrays in an nnx.Variable"
            )
        pairs = enumerate(zip(leaves, objects, strict=True))
        return treedef.unflatten([self._values((name, k), x) if is_object else x for k, (x, is_object) in pairs])

    @property
    def structure(self) -> Graphs:
        return Graphs(tuple(self.graphs.items()))

    def update(self, new: Pytree) -> None:
        """Puts the step's results into the Variables."""
        for values in _values_in(new):
            for variable, leaf in zip(self.variables[values.key], values.leaves, strict=True):
                if isinstance(variable, nnx.Variable):
                    variable.set_raw_value(leaf)

    def _values(self, key: tuple[Any, ...], node: Any) -> Values:
        graph, flat = self._context.flatten(node)
        flat = list(flat)
        self.graphs[key] = graph
        self.variables[key] = [leaf for _, leaf in flat]
        paths = tuple("/".join(map(str, path)) or "value" for path, _ in flat)
        raw = (leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for _, leaf in flat)
        return Values(key, paths, tuple(raw))


#: The name of the step's result, in keys.
_OUT = None


def _is_object(x: Leaf) -> bool:
    return nnx.graphlib.is_graph_node(x) or isinstance(x, nnx.Variable)


def _is_values(x: Leaf) -> bool:
    return isinstance(x, Values)


def _values_in(tree: Pytree) -> Iterator[Values]:
    return filter(_is_values, jax.tree.leaves(tree, is_leaf=_is_values))


def _merged(tree: Pytree, graphs: Mapping[Any, Any], context: Any) -> Pytree:

    def made(v: Any) -> Pytree:
        return context.unflatten(graphs[v.key], list(v.leaves)) if _is_values(v) else v

    return jax.tree.map(made, tree, is_leaf=_is_values)


def _pure(fun: Callable[..., Pytree], graphs: Mapping[Any, Any]) -> Callable[..., Pytree]:
    """Returns the step as a function of arrays, for objects of a structure.

    It returns the step's results; the new structures, or None if nothing changed; and for each argument with objects
    their new values, or None if they are the old ones.
    """

    @functools.wraps(fun)
    def pure(*args: Pytree, **kwargs: Pytree) -> tuple[Pytree, ...]:
        with nnx.update_context(_TAG):
            with nnx.merge_context(_TAG, inner=True) as merging:
                own_args, own_kwargs = _merged((args, kwargs), graphs, merging)
            out = fun(*own_args, **own_kwargs)
            with nnx.split_context(_TAG) as splitting:
                split = _Split(splitting)
                named = [*enumerate(zip(args, own_args, strict=True))]
                named += [(k, (kwargs[k], own_kwargs[k])) for k in kwargs]
                pairs = [(old, split(k, own)) for k, (old, own) in named if any(_values_in(old))]
                out = split(_OUT, out)
        same = split.graphs.keys() == graphs.keys() and all(
            graph.with_no_outer_index() == graphs[key] for key, graph in split.graphs.items()
        )
        for values in (v for old, _ in pairs for v in _values_in(old)):
            changed = zip(split.variables[values.key], values.leaves, strict=True) if same else ()
            same = same and not any(not isinstance(v, nnx.Variable) and v is not x for v, x in changed)
        if not same:
            return out, split.structure, *(new for _, new in pairs)
        return out, None, *(None if _is_same(old, new) else new for old, new in pairs)

    return pure


def _is_same(old: Pytree, new: Pytree) -> bool:
    return all(a is b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))
